//! Operations in flight: several at once, out of order, dropped.

use brigade_testkit::dist_test;
use brigade_torch::ReduceOp;
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, values};

dist_test!(world = 2, dist_several_in_flight_waited_out_of_order, |world| {
    let group = rendezvous::group(&world);
    let mut works = Vec::new();
    for n in 0..20 {
        // The caller's own handle is dropped at once; the work owns the tensor.
        let tensor = Tensor::full([100_000], f64::from(n), (Kind::Float, Device::Cpu));
        works.push((n, group.start_all_reduce(tensor, ReduceOp::Sum).unwrap()));
    }
    let gathered = group.start_all_gather(&Tensor::from(group.rank() as f64)).unwrap();
    works.reverse();
    for (n, work) in works {
        let sum = work.wait().unwrap();
        let expected = 2.0 * f64::from(n);
        assert_eq!(
            (sum.min().double_value(&[]), sum.max().double_value(&[])),
            (expected, expected)
        );
    }
    assert_eq!(gathered.wait().unwrap().iter().flat_map(values).collect::<Vec<_>>(), [0.0, 1.0]);
});

dist_test!(world = 2, dist_works_that_nothing_waits_for, |world| {
    let group = rendezvous::group(&world);
    let watched = Tensor::full([1 << 20], 1.0, (Kind::Float, Device::Cpu));
    drop(group.start_all_reduce(watched.shallow_clone(), ReduceOp::Sum).unwrap());
    for _ in 0..5 {
        let tensor = Tensor::full([1 << 18], 1.0, (Kind::Float, Device::Cpu));
        drop(group.start_all_reduce(tensor.shallow_clone(), ReduceOp::Mean).unwrap());
        drop(group.start_all_gather(&tensor).unwrap());
        drop(group.start_all_gather_flat(&tensor).unwrap());
        drop(group.start_gather(&tensor, 1).unwrap());
        drop(group.start_broadcast(tensor.shallow_clone(), 1).unwrap());
        drop(group.start_reduce(tensor.shallow_clone(), ReduceOp::Sum, 1).unwrap());
        drop(group.start_all_to_all_flat(&tensor, &[], &[]).unwrap());
        drop(group.start_reduce_scatter_flat(&tensor, ReduceOp::Sum).unwrap());
        drop(group.start_barrier().unwrap());
    }
    // All ranks started the same operation, so the group can still be used. A tensor that the caller still holds was
    // copied, and keeps its values.
    group.barrier().unwrap();
    let mut one = Tensor::from(1.0);
    group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
    assert_eq!(values(&one), [2.0]);
    assert_eq!(watched.max().double_value(&[]), 1.0);
    // The group is dropped with an operation in flight: that ends too.
    drop(group.start_all_reduce(watched, ReduceOp::Sum).unwrap());
});

dist_test!(world = 2, dist_a_work_can_be_waited_for_elsewhere, |world| {
    let group = rendezvous::group(&world);
    let work = group.start_all_reduce(Tensor::from(1.0), ReduceOp::Mean).unwrap();
    assert_eq!(work.timeout(), group.timeout());
    assert_eq!(format!("{work:?}"), "Work(all_reduce on \"world\")");
    while !work.is_completed().unwrap() {}
    let sum = std::thread::spawn(move || work.wait().unwrap()).join().unwrap();
    assert_eq!(values(&sum), [1.0]);
});
