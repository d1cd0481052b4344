//! send, recv and recv_any.

use brigade_testkit::dist_test;
use brigade_torch::Fault;
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, assert_fault, values};

dist_test!(world = 2, dist_send_and_receive, |world| {
    let group = rendezvous::group(&world);
    let square = || Tensor::arange(4, (Kind::Float, Device::Cpu)).view([2, 2]);
    if group.rank() == 0 {
        group.send(&square().tr(), 1, 0).unwrap();
        // Tags distinguish messages, in any order.
        let late = group.start_send(&Tensor::from(1.0), 1, 1).unwrap();
        let early = group.start_send(&Tensor::from(2.0), 1, 2).unwrap();
        let _ = early.wait().unwrap();
        let _ = late.wait().unwrap();
    } else {
        let place = Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
        group.recv(&mut place.tr(), 0, 0).unwrap();
        assert_eq!(values(&place), [0.0, 1.0, 2.0, 3.0]);
        let mut numbers = [Tensor::from(0.0), Tensor::from(0.0)];
        group.recv(&mut numbers[1], 0, 2).unwrap();
        group.recv(&mut numbers[0], 0, 1).unwrap();
        assert_eq!((values(&numbers[0]), values(&numbers[1])), (vec![1.0], vec![2.0]));
    }
    let me = group.rank();
    assert_fault(group.send(&Tensor::from(1.0), me, 0), Fault::Invalid);
    assert_fault(group.recv(&mut Tensor::from(1.0), 2, 0), Fault::Invalid);
    group.barrier().unwrap();
});

dist_test!(world = 3, dist_receive_from_any, |world| {
    let group = rendezvous::group(&world);
    if group.rank() == 0 {
        let mut seen = [false; 3];
        for _ in 0..2 {
            let mut number = Tensor::from(0.0);
            let from = group.recv_any(&mut number, 5).unwrap();
            assert_eq!(values(&number), [from as f64]);
            assert!(!std::mem::replace(&mut seen[from], true));
        }
        assert_eq!(seen, [false, true, true]);
    } else {
        group.send(&Tensor::from(group.rank() as f64), 0, 5).unwrap();
    }
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_a_send_that_is_dropped_still_arrives, |world| {
    let group = rendezvous::group(&world);
    let large = Tensor::full([1 << 20], 3.0, (Kind::Float, Device::Cpu));
    if group.rank() == 0 {
        drop(group.start_send(&large, 1, 0).unwrap());
        drop(large);
        group.barrier().unwrap();
    } else {
        let mut place = large.zeros_like();
        group.recv(&mut place, 0, 0).unwrap();
        assert!(place.equal(&large));
        group.barrier().unwrap();
    }
});
