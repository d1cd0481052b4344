//! Tests of placement on GPUs made of host memory: which devices have contexts, memory and generators, and which may be
//! mixed.

#![cfg(not(feature = "cuda"))] // libtorch's own kernels have their places

use brigade_test_device::fake;
use tch::{Device, Kind, Reduction, Tensor};

fn floats(device: Device) -> (Kind, Device) {
    (Kind::Float, device)
}

#[test]
fn libtorch_finds_the_devices() {
    assert!(!tch::Cuda::is_available(), "there are none before");
    fake::install(2).unwrap();
    fake::install(2).unwrap();
    assert!(tch::Cuda::is_available());
    assert_eq!(tch::Cuda::device_count(), 2);
    assert!(!tch::Cuda::cudnn_is_available());
    let other = fake::install(3).unwrap_err().to_string();
    assert!(other.contains("2 GPUs made of host memory are installed"), "{other}");
    assert!(fake::contexts().is_empty(), "asking makes no context");
    let error = Tensor::f_zeros([2], floats(Device::Cuda(2))).unwrap_err().to_string();
    assert!(error.contains("invalid device ordinal 2"), "{error}");
}

#[test]
fn the_devices_of_one_operator_must_be_the_same() {
    fake::install(2).unwrap();
    let (first, second, host) =
        (floats(Device::Cuda(0)), floats(Device::Cuda(1)), floats(Device::Cpu));
    let vector = Tensor::ones([3], first);
    let message = |result: Result<Tensor, tch::TchError>| result.unwrap_err().to_string();
    let found = message(vector.f_add(&Tensor::ones([3], host)));
    let words = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!";
    assert!(found.contains(words), "{found}");
    let found = message(vector.f_add(&Tensor::ones([3], second)));
    assert!(found.contains("cuda:0 and cuda:1!"), "{found}");
    let weight = Tensor::ones([3, 3], host);
    assert!(message(Tensor::ones([2, 3], first).f_matmul(&weight)).contains("cuda:0 and cpu!"));
    let classes = Tensor::from_slice(&[0i64, 1]);
    let logits = Tensor::ones([2, 3], first);
    assert!(
        message(logits.f_cross_entropy_loss(&classes, None::<Tensor>, Reduction::Mean, -100, 0.0))
            .contains("and cpu!")
    );
    assert!(message(Tensor::f_cat(&[&vector, &Tensor::ones([3], host)], 0)).contains("and cpu!"));
    // Elementwise operators accept a CPU scalar as a number, other operators do not.
    let scalar = Tensor::from(2.0f32);
    assert_eq!(vector.f_add(&scalar).unwrap().device(), Device::Cuda(0));
    assert!(message(vector.f_dot(&scalar)).contains("and cpu!"));
    let other = Tensor::from(2.0f32).to_device(Device::Cuda(1));
    assert!(message(vector.f_add(&other)).contains("cuda:0 and cuda:1!"));
    // It cannot be the output either.
    assert!(message(scalar.shallow_clone().f_add_(&vector.get(0))).contains("and cpu!"));
    // Indices may be on the CPU; they are copied, for which the host waits.
    let rows = Tensor::from_slice(&[2i64, 0]);
    let waited = fake::synchronizations(|| {
        assert_eq!(vector.index(&[Some(&rows)]).device(), Device::Cuda(0));
    });
    assert_eq!(waited, ["aten::index"]);
}

#[test]
fn a_context_is_made_where_something_is_used() {
    fake::install(3).unwrap();
    let weight = Tensor::ones([3], floats(Device::Cuda(1))).set_requires_grad(true);
    let loss = (&weight * &weight).sum(Kind::Float);
    loss.backward();
    assert_eq!(weight.grad().device(), Device::Cuda(1));
    assert_eq!(Vec::<f32>::try_from(weight.grad()).unwrap(), [2.0; 3]);
    assert_eq!(fake::contexts(), [1], "the threads of autograd make none on other devices");
    // Pinned memory belongs to an existing context.
    assert!(
        Tensor::ones([3], floats(Device::Cpu))
            .pin_memory(Device::Cuda(0))
            .is_pinned(Device::Cuda(0))
    );
    assert_eq!(fake::contexts(), [1]);
    tch::Cuda::synchronize(2);
    assert_eq!(fake::contexts(), [1, 2]);
}

#[test]
fn pinned_memory_makes_a_context_on_the_current_device_where_there_is_none() {
    fake::install(2).unwrap();
    assert_eq!(fake::contexts(), [0usize; 0]);
    let _pinned = Tensor::ones([3], floats(Device::Cpu)).pin_memory(Device::Cuda(0));
    assert_eq!(fake::contexts(), [0]);
}

#[test]
fn the_current_device_is_of_a_thread() {
    fake::install(2).unwrap();
    fake::set_current_device(1).unwrap();
    let there =
        std::thread::spawn(|| Tensor::ones([1], floats(Device::Cuda(0))).device()).join().unwrap();
    assert_eq!(there, Device::Cuda(0));
    assert_eq!(fake::contexts(), [0]);
    assert!(fake::set_current_device(2).is_err());
}

#[test]
fn tensors_move_between_devices() {
    fake::install(2).unwrap();
    let host = Tensor::randn([2, 3, 4, 4], floats(Device::Cpu));
    let last = brigade_torch::channels_last(&host).unwrap();
    for tensor in [&host, &last, &host.transpose(0, 2), &host.narrow(1, 1, 2)] {
        let first = tensor.to_device(Device::Cuda(0));
        let second = first.to_device(Device::Cuda(1));
        assert_eq!((first.device(), second.device()), (Device::Cuda(0), Device::Cuda(1)));
        assert_eq!(first.stride(), tensor.copy().stride());
        assert!(second.to_device(Device::Cpu).equal(tensor));
        let half = tensor.to_device_(Device::Cuda(1), Kind::Half, false, false);
        assert_eq!((half.device(), half.kind()), (Device::Cuda(1), Kind::Half));
        assert!(half.to_device(Device::Cpu).equal(&tensor.to_kind(Kind::Half)));
        assert!(
            half.to_device_(Device::Cpu, Kind::Float, false, false)
                .allclose(tensor, 1e-3, 1e-3, false)
        );
    }
    assert!(brigade_torch::is_channels_last(&last.to_device(Device::Cuda(0))).unwrap());
    let mut target = Tensor::zeros([3, 2], floats(Device::Cuda(0)));
    target.copy_(&Tensor::from_slice(&[1i64, 2]));
    assert_eq!(Vec::<f32>::try_from(target.flatten(0, 1)).unwrap(), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
}

#[test]
fn each_wait_for_the_device_is_named() {
    fake::install(2).unwrap();
    let device = Device::Cuda(0);
    let x = Tensor::from_slice(&[1.0f32, 0.0, 3.0]).to_device(device);
    let none: [&str; 0] = [];
    let loss = || (&x * 2.0 + 1.0).relu().sum(Kind::Float);
    assert_eq!(fake::synchronizations(|| drop(loss())), none);
    assert_eq!(
        fake::synchronizations(|| assert!(loss().double_value(&[]) > 0.0)),
        ["aten::_local_scalar_dense"]
    );
    assert_eq!(fake::synchronizations(|| drop(x.nonzero())), ["aten::nonzero"]);
    let mask = x.gt(0.0);
    assert_eq!(fake::synchronizations(|| drop(x.masked_select(&mask))), ["aten::masked_select"]);
    assert_eq!(fake::synchronizations(|| drop(x.index(&[Some(&mask)]))), ["aten::index"]);
    let index = Tensor::from_slice(&[0i64, 1]).to_device(device);
    assert_eq!(fake::synchronizations(|| drop(x.index(&[Some(&index)]))), none);
    assert_eq!(
        fake::synchronizations(|| drop(index.bincount(None::<Tensor>, 0))),
        ["aten::bincount"]
    );
    assert_eq!(fake::synchronizations(|| assert!(x.equal(&x))), ["aten::equal"]);
    assert_eq!(fake::synchronizations(|| drop(x.where_self(&mask, &x))), none);
    let number = Tensor::from(1.0f32);
    assert_eq!(fake::synchronizations(|| drop(x.where_self(&mask, &number))), ["aten::where"]);
    assert_eq!(fake::synchronizations(|| drop(x.masked_fill(&mask, 1.0))), none);
    let put = |index: &Tensor, value: &Tensor| drop(x.index_put(&[Some(index)], value, false));
    assert_eq!(fake::synchronizations(|| put(&mask, &number)), none);
    assert_eq!(fake::synchronizations(|| put(&mask, &x.get(0))), ["aten::_index_put_impl_"]);
    assert_eq!(fake::synchronizations(|| put(&index, &number)), ["aten::_index_put_impl_"]);
    assert_eq!(fake::synchronizations(|| put(&index, &x.get(0))), none);
    assert_eq!(
        fake::synchronizations(|| drop(Tensor::repeat_interleave(&index, None))),
        ["aten::repeat_interleave"]
    );
    assert_eq!(fake::synchronizations(|| drop(Tensor::repeat_interleave(&index, Some(1)))), none);
    assert_eq!(
        fake::synchronizations(|| assert!(x.allclose(&x, 1e-5, 1e-5, false))),
        ["aten::_local_scalar_dense"]
    );
    assert_eq!(fake::synchronizations(|| drop(x.to_device(Device::Cpu))), ["copy: device to host"]);
    let host = Tensor::zeros([3], floats(Device::Cpu));
    let pinned = host.pin_memory(device);
    let up = |from: &Tensor, non_blocking| {
        drop(from.to_device_(device, Kind::Float, non_blocking, false));
    };
    assert_eq!(fake::synchronizations(|| up(&host, false)), ["copy: host to device"]);
    assert_eq!(fake::synchronizations(|| up(&host, true)), ["copy: host to device"]);
    assert_eq!(fake::synchronizations(|| up(&pinned, false)), ["copy: host to device"]);
    assert_eq!(fake::synchronizations(|| up(&pinned, true)), none);
    let waits =
        fake::synchronizations(|| drop(x.to_device_(Device::Cpu, Kind::Float, true, false)));
    assert_eq!(waits, none, "libtorch copies into pinned memory of its own");
    assert_eq!(fake::synchronizations(|| drop(x.to_device(Device::Cuda(1)))), none);
    assert_eq!(fake::synchronizations(|| tch::Cuda::synchronize(0)), ["synchronize: device"]);
    // On other threads, those of autograd among them.
    let weight = x.detach().set_requires_grad(true);
    let (sum, here) = ((&weight * &x).sum(Kind::Float), x.shallow_clone());
    let waits = fake::synchronizations(|| {
        sum.backward();
        let _ = std::thread::spawn(move || here.nonzero()).join().unwrap();
    });
    assert_eq!(waits, ["aten::nonzero"]);
}

#[test]
fn memory_is_counted_and_ends() {
    fake::install(2).unwrap();
    let megabyte = 1 << 20;
    let tensor = Tensor::zeros([megabyte / 4], floats(Device::Cuda(0)));
    let there = fake::memory(0).unwrap();
    assert_eq!((there.allocated, there.peak, there.capacity), (1 << 20, 1 << 20, None));
    assert_eq!(fake::memory(1).unwrap().allocated, 0);
    drop(tensor);
    let after = fake::memory(0).unwrap();
    assert_eq!((after.allocated, after.peak, after.reserved), (0, 1 << 20, 1 << 20));
    fake::empty_cache(0).unwrap();
    assert_eq!(fake::memory(0).unwrap().reserved, 0);

    fake::set_capacity(0, 3 << 20).unwrap();
    let kept = Tensor::zeros([megabyte / 2], floats(Device::Cuda(0)));
    let error = Tensor::f_zeros([megabyte / 2], floats(Device::Cuda(0))).unwrap_err().to_string();
    let words = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 3.00 MiB of which \
                 1.00 MiB is free.";
    assert!(error.contains(words), "{error}");
    // The other device has its own memory, and freed memory is available again.
    drop(Tensor::zeros([megabyte], floats(Device::Cuda(1))));
    drop(kept);
    drop(Tensor::f_zeros([megabyte / 2 + 1], floats(Device::Cuda(0))).unwrap());
    // An operator's result counts, too.
    let input = Tensor::zeros([megabyte / 4], floats(Device::Cuda(0)));
    let _first = input.f_exp().unwrap();
    let _second = input.f_exp().unwrap();
    assert!(input.f_exp().is_err());
}

#[test]
fn each_device_has_a_generator() {
    fake::install(2).unwrap();
    let draw = |device: Device| Vec::<f32>::try_from(Tensor::randn([4], floats(device))).unwrap();
    tch::manual_seed(5);
    let (first, second, host) = (draw(Device::Cuda(0)), draw(Device::Cuda(1)), draw(Device::Cpu));
    assert_eq!(first, second, "each was seeded, and none goes on for another");
    assert_eq!(first, host);
    tch::manual_seed(5);
    let _ = (draw(Device::Cuda(1)), draw(Device::Cpu));
    assert_eq!(draw(Device::Cuda(0)), first);
    assert_ne!(draw(Device::Cuda(0)), first);
    let state = brigade_torch::rng_state(Device::Cuda(0)).unwrap();
    let next = draw(Device::Cuda(0));
    assert_ne!(draw(Device::Cuda(0)), next);
    brigade_torch::set_rng_state(Device::Cuda(0), &state).unwrap();
    assert_eq!(draw(Device::Cuda(0)), next);
    tch::Cuda::manual_seed_all(5);
    assert_eq!(draw(Device::Cuda(1)), first);
    // Operators without a generator argument.
    let dropped = |device| {
        let ones = Tensor::ones([1000], floats(device));
        Vec::<f32>::try_from(ones.dropout(0.25, true)).unwrap()
    };
    let before = brigade_torch::rng_state(Device::Cpu).unwrap();
    tch::Cuda::manual_seed_all(7);
    let one = dropped(Device::Cuda(0));
    assert_eq!(dropped(Device::Cuda(1)), one);
    assert_ne!(dropped(Device::Cuda(0)), one);
    assert_eq!(brigade_torch::rng_state(Device::Cpu).unwrap(), before, "the CPU's is left alone");
    let kept = one.iter().filter(|it| **it != 0.0).count();
    assert!((700..800).contains(&kept), "{kept} of 1000 are kept");
    assert!(one.iter().all(|it| *it == 0.0 || (it - 1.0 / 0.75).abs() < 1e-6));
    let permuted = Tensor::randperm(100, (Kind::Int64, Device::Cuda(0)));
    assert_eq!(permuted.device(), Device::Cuda(0));
    assert_eq!(brigade_torch::rng_state(Device::Cpu).unwrap(), before);
}

#[test]
fn two_devices_train_at_once() {
    fake::install(2).unwrap();
    let train = |device: Device| {
        let mut weight = Tensor::full([4, 3], 0.5, floats(device)).set_requires_grad(true);
        for step in 0..20 {
            let input = (Tensor::arange(6, floats(device)).view([2, 3]) + step).sin();
            weight.zero_grad();
            let hidden = input.linear(&weight, None::<Tensor>).dropout(0.3, true);
            hidden.square().sum(Kind::Float).backward();
            assert_eq!(weight.grad().device(), device);
            let _ = tch::no_grad(|| weight.g_sub_(&(weight.grad() * 0.1)));
        }
        Vec::<f32>::try_from(weight.detach().flatten(0, 1)).unwrap()
    };
    tch::manual_seed(9);
    let alone = train(Device::Cuda(0));
    tch::manual_seed(9);
    let threads = [0, 1].map(|at| std::thread::spawn(move || train(Device::Cuda(at))));
    for thread in threads {
        assert_eq!(thread.join().unwrap(), alone);
    }
}
