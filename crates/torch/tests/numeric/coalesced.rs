//! Several tensors in one operation: what one after another would give, the same bits.

use brigade_test_device::{gpu, numeric_device, on_device};
use brigade_testkit::{World, dist_test};
use brigade_torch::{DeviceExt, Fault, GroupOptions, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, LIMIT, assert_fault, values};

const OPERATIONS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

/// Numbers of several types and lengths, one of them in another order than its memory's. Rows divide by 3.
fn tensors(rank: usize) -> Vec<Tensor> {
    let wave = |rows: i64, kind: Kind| {
        let places = Tensor::arange(rows * 4, (Kind::Double, Device::Cpu));
        let waves = (places * 0.37 + 1.7 * rank as f64).sin() * 3.0;
        on_device(&waves.to_kind(kind).reshape([rows, 4]))
    };
    vec![
        wave(3, Kind::Float),
        wave(30_000, Kind::Float),
        wave(6, Kind::Double),
        wave(4, Kind::Float).transpose(0, 1).narrow(0, 0, 3),
        wave(3, Kind::BFloat16),
        wave(0, Kind::Float),
    ]
}

fn equal(found: &[Tensor], expected: &[Tensor], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((found.kind(), found.device()), (expected.kind(), expected.device()), "{what}");
        assert!(found.equal(expected), "{what}, tensor {place}");
    }
}

fn same_as_one_after_another(group: &ProcessGroup) {
    let mine = tensors(group.rank());
    for op in OPERATIONS {
        let what = format!("{op:?} of {} ranks", group.size());
        let mut single: Vec<Tensor> = mine.iter().map(Tensor::copy).collect();
        for tensor in &mut single {
            group.all_reduce(tensor, op).unwrap();
        }
        let mut together: Vec<Tensor> = tensors(group.rank());
        group.all_reduce_coalesced(&mut together, op).unwrap();
        equal(&together, &single, &what);
        // The lent tensors are not changed.
        let work = group.start_all_reduce_coalesced(tensors(group.rank()), op).unwrap();
        let shared = group
            .start_all_reduce_coalesced(mine.iter().map(Tensor::shallow_clone).collect(), op)
            .unwrap();
        equal(&shared.wait().unwrap(), &single, &what);
        equal(&work.wait().unwrap(), &single, &what);
        equal(&mine, &tensors(group.rank()), &what);

        let single: Vec<Tensor> =
            mine.iter().map(|it| group.reduce_scatter_flat(it, op).unwrap()).collect();
        equal(&group.reduce_scatter_flat_coalesced(&mine, op).unwrap(), &single, &what);
        let work = group.start_reduce_scatter_flat_coalesced(&mine, op).unwrap();
        equal(&work.wait().unwrap(), &single, &what);
    }
    let single: Vec<Tensor> = mine.iter().map(|it| group.all_gather_flat(it).unwrap()).collect();
    equal(&group.all_gather_flat_coalesced(&mine).unwrap(), &single, "gathered");
    let work = group.start_all_gather_flat_coalesced(&mine).unwrap();
    equal(&work.wait().unwrap(), &single, "gathered");
    assert_eq!(single[0].size(), [3 * group.size() as i64, 4]);
}

dist_test!(world = 3, dist_several_tensors_as_one_after_another, |world| {
    let group = rendezvous::group(&world);
    same_as_one_after_another(&group);
    // Whole numbers, whose sums are Gloo's own.
    let mut counts = [1i64, 10].map(|it| on_device(&Tensor::from_slice(&[it, it])));
    group.all_reduce_coalesced(&mut counts, ReduceOp::Sum).unwrap();
    assert_eq!(counts.each_ref().map(values), [vec![3.0, 3.0], vec![30.0, 30.0]]);
    group.all_reduce_coalesced(&mut counts, ReduceOp::BitOr).unwrap();
    // None at all, and scalars.
    group.all_reduce_coalesced(&mut [], ReduceOp::Sum).unwrap();
    assert!(group.all_gather_flat_coalesced(&[]).unwrap().is_empty());
    let scalar = on_device(&Tensor::from(group.rank() as f64));
    let all = group.all_gather_flat_coalesced(&[scalar]).unwrap();
    assert_eq!(values(&all[0]), [0.0, 1.0, 2.0]);
});

fn over_tcp(world: &World) -> ProcessGroup {
    let options = GroupOptions { timeout: LIMIT, share_memory: false, ..GroupOptions::default() };
    let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
    let store = rendezvous::store(world);
    ProcessGroup::new(&store, rank, size, rendezvous::gloo(), options).unwrap()
}

dist_test!(world = 3, dist_several_tensors_over_tcp, |world| {
    same_as_one_after_another(&over_tcp(&world));
});

// Of two ranks' numbers Gloo adds up those that are not in shared memory.
dist_test!(world = 2, dist_several_tensors_by_gloo_itself, |world| {
    let group = over_tcp(&world);
    let mut together = tensors(group.rank());
    let mut single = tensors(group.rank());
    group.all_reduce_coalesced(&mut together, ReduceOp::Sum).unwrap();
    for tensor in &mut single {
        group.all_reduce(tensor, ReduceOp::Sum).unwrap();
    }
    equal(&together, &single, "two ranks");
});

dist_test!(world = 2, dist_what_cannot_be_one_operation_is_named, |world| {
    let group = rendezvous::group(&world);
    let float = || Tensor::zeros([3], (Kind::Float, numeric_device()));
    let integer = || Tensor::zeros([2], (Kind::Int64, numeric_device()));
    let mixed = &mut [float(), integer()];
    let error = assert_fault(group.all_reduce_coalesced(mixed, ReduceOp::Mean), Fault::Invalid);
    assert!(error.to_string().contains("the mean of Int64"), "{error}");
    let odd = group.reduce_scatter_flat_coalesced(&[integer(), float()], ReduceOp::Sum);
    let error = assert_fault(odd, Fault::Invalid);
    assert!(error.to_string().contains("shape [3] has no equal parts for 2 ranks"), "{error}");
    // A peer that does not arrive.
    if group.rank() == 0 {
        let lost = group.all_reduce_coalesced(&mut [float(), integer()], ReduceOp::Sum);
        let error = assert_fault(lost, Fault::PeerLost);
        assert!(error.to_string().contains("all_reduce_coalesced on group"), "{error}");
    }
});

dist_test!(world = 2, dist_tensors_of_a_gpu_go_by_the_hosts_memory, |world| {
    let group = rendezvous::group(&world);
    let (device, _alone) = gpu();
    let zeros = |device| Tensor::zeros([2], (Kind::Float, device));
    let apart = [zeros(device), zeros(Device::Cpu)];
    let error = assert_fault(group.all_gather_flat_coalesced(&apart), Fault::Invalid);
    let both = format!("tensors on {} and cpu", device.label());
    assert!(error.to_string().contains(&both), "{error}");
    let mut sums = apart.map(|it| it.to_device(device) + 1.0);
    group.all_reduce_coalesced(&mut sums, ReduceOp::Sum).unwrap();
    assert_eq!((values(&sums[0]), sums[1].device()), (vec![2.0, 2.0], device));
});
