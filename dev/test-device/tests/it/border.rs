//! Tests of brigade-torch's operations on GPUs made of host memory: on their device, close to the CPU's numbers, and
//! without a wait for the device.

#![cfg(not(feature = "cuda"))] // libtorch's own kernels have their places

use brigade_test_device::{fake, kernels};
use brigade_torch::{
    Activation, AttentionOptions, BatchNormState, Biased, CrossEntropyOptions, DeviceMemory, Fetch,
    GatedPair, activation, activation_linear, attention, batch_norm_relu, cross_entropy, dropout,
    gated_linear, gelu_linear, gradients, linear, max_pool2d, recomputed, rotary_pair,
};
use tch::{Device, Kind, Tensor};

use crate::numbers::random;

/// Runs forward and backward on both devices, and on the CPU in float64. The host may not wait for the GPU, whose error
/// may be eight times the CPU's (other orders of sums) and four units in the last place of the tensor's largest value.
fn close(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Tensor) {
    fake::install(2).unwrap();
    let run = |device: Device, kind: Kind| {
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| {
                let there = input.to_device(device).detach();
                if there.is_floating_point() {
                    there.to_kind(kind).set_requires_grad(true)
                } else {
                    there
                }
            })
            .collect();
        let mut all = Vec::new();
        let waits = fake::synchronizations(|| {
            let result = function(&inputs);
            result.square().sum(kind).backward();
            all.push(result.detach());
        });
        assert_eq!(waits, [""; 0], "on {device:?}");
        all.extend(inputs.iter().map(Tensor::grad).filter(Tensor::defined));
        all
    };
    let exact = run(Device::Cpu, Kind::Double);
    let [expected, found] = [Device::Cpu, Device::Cuda(1)].map(|device| run(device, Kind::Float));
    for (at, ((expected, found), exact)) in expected.iter().zip(&found).zip(&exact).enumerate() {
        assert_eq!(found.device(), Device::Cuda(1), "{at}");
        let largest = |values: Tensor| values.abs().max().double_value(&[]);
        let error = |values: &Tensor| largest(values.to_device(Device::Cpu) - exact);
        let allowed =
            8.0 * error(expected) + 4.0 * f64::from(f32::EPSILON) * largest(exact.shallow_clone());
        let error = error(found);
        assert!(error <= allowed, "{at}: {error} of {allowed}: {found} is not {exact}");
    }
    assert_eq!(fake::contexts(), [1]);
}

#[test]
fn layers() {
    let weights = [random(&[4, 6]), random(&[3, 6]), random(&[3])];
    close(&weights, |x| linear(&x[0], &x[1], Some(&x[2])).unwrap());
    close(&weights, |x| gelu_linear(&x[0], "none", &x[1], Some(&x[2])).unwrap());
    close(&[random(&[2, 3, 6, 6])], |x| max_pool2d(&x[0], [2, 2], [2, 2], [0, 0]).unwrap());
    close(&[random(&[2, 2, 5, 4]), random(&[2, 2, 5, 4]), random(&[2, 2, 5, 4])], |x| {
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        attention(&x[0], &x[1], &x[2], None, &options).unwrap()
    });
    close(&[random(&[4, 3, 5, 5]), random(&[3]), random(&[3])], |x| {
        let state = BatchNormState {
            weight: Some(&x[1]),
            bias: Some(&x[2]),
            running_mean: None,
            running_var: None,
        };
        batch_norm_relu(&x[0], None, state, true, 0.1, 1e-5).unwrap()
    });
    close(&[random(&[4, 3])], |x| dropout(&x[0], 0.0, None).unwrap());
}

/// By libtorch's operations, and by Brigade's kernels.
#[test]
fn feed_forward_layers_and_rotations() {
    let run = || {
        let inputs = [&[4, 6][..], &[6], &[4, 6], &[3, 6]].map(random);
        close(&inputs, |x| {
            let biased = Biased { values: &x[0], bias: Some(&x[1]) };
            let pair = GatedPair::Two { gate: biased, up: (&x[2]).into() };
            let one = activation(biased, Activation::GeluTanh).unwrap();
            let two = activation_linear(biased, Activation::Mish, &x[3], None).unwrap();
            let three = gated_linear(pair, Activation::Silu, &x[3], None).unwrap();
            one + (two + three).square().sum_dim_intlist([1i64].as_slice(), true, None::<Kind>)
        });
        close(&[random(&[2, 3, 5, 8]), random(&[2, 1, 5, 8]), random(&[1, 1, 5, 8])], |x| {
            let [cos, sin] = [x[2].detach().cos(), x[2].detach().sin()];
            let (queries, keys) = rotary_pair(&x[0], &x[1], &cos, &sin).unwrap();
            queries + keys + &x[2]
        });
    };
    run();
    kernels::emulated(run);
}

#[test]
fn recomputed_parts() {
    let weights = [random(&[4, 6]), random(&[3, 6])];
    close(&weights, |x| recomputed(&[&x[0], &x[1]], |x| x[0].matmul(&x[1].tr()).relu()).unwrap());
}

#[test]
fn losses() {
    fake::install(2).unwrap();
    let (logits, classes) = (random(&[4, 5]), Tensor::from_slice(&[1i64, -100, 4, 2]));
    let run = |device: Device| {
        let logits = logits.to_device(device).detach().set_requires_grad(true);
        let found =
            cross_entropy(&logits, &classes.to_device(device), &CrossEntropyOptions::default())
                .unwrap();
        found.loss.backward();
        assert_eq!(found.loss.device(), device);
        (
            found.count.int64_value(&[]),
            found.loss.double_value(&[]),
            Vec::<f32>::try_from(logits.grad().flatten(0, 1)).unwrap(),
        )
    };
    let (expected, found) = (run(Device::Cpu), run(Device::Cuda(0)));
    assert_eq!(found.0, expected.0);
    assert!((found.1 - expected.1).abs() < 1e-6);
    assert!(found.2.iter().zip(&expected.2).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn numbers_are_fetched_while_the_device_works() {
    fake::install(1).unwrap();
    let device = Device::Cuda(0);
    let count = Tensor::from(41i64).to_device(device) + 1;
    let mut fetch = None;
    assert_eq!(fake::synchronizations(|| fetch = Some(Fetch::start(&count).unwrap())), [""; 0]);
    let fetch = fetch.unwrap();
    // On the default stream the copy is complete, so nothing is waited for.
    assert_eq!(fake::synchronizations(|| assert_eq!(fetch.wait().unwrap(), 42)), [""; 0]);
    // On another stream the copy is deferred.
    let stream = fake::Stream::new(0).unwrap();
    let fetch = stream.run(|| Fetch::start(&count).unwrap());
    assert!(!stream.is_idle());
    assert_eq!(
        fake::synchronizations(|| assert_eq!(fetch.wait().unwrap(), 42)),
        ["synchronize: event"]
    );
    let gradient = Tensor::from_slice(&[3.0f32, 4.0]).to_device(device);
    assert_eq!(
        fake::synchronizations(|| assert_eq!(
            gradients::norm(&[&gradient], 2.0).unwrap().device(),
            device
        )),
        [""; 0]
    );
}

#[test]
fn memory_of_a_device_is_counted() {
    fake::install(1).unwrap();
    let _tensor = Tensor::zeros([1 << 18], (Kind::Float, Device::Cuda(0)));
    let memory = DeviceMemory::of(Device::Cuda(0)).unwrap().unwrap();
    assert_eq!((memory.allocated, memory.peak, memory.reserved), (1 << 20, 1 << 20, 1 << 20));
}
