//! all_gather, gather and scatter.

use brigade_testkit::dist_test;
use brigade_torch::Fault;
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, assert_fault, values};

dist_test!(world = 3, dist_broadcast, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as f64;
    for root in 0..3 {
        let mut tensor = Tensor::from_slice(&[rank, rank + 0.5]);
        group.broadcast(&mut tensor, root).unwrap();
        assert_eq!(values(&tensor), [root as f64, root as f64 + 0.5]);
    }
    let square = Tensor::full([2, 2], rank, (Kind::Int64, Device::Cpu));
    group.broadcast(&mut square.narrow(1, 0, 1), 1).unwrap();
    assert_eq!(values(&square), [1.0, rank, 1.0, rank]);

    let mut leaf = Tensor::from(rank).set_requires_grad(true);
    group.broadcast(&mut leaf, 2).unwrap();
    assert!(leaf.requires_grad());
    assert_eq!(values(&leaf), [2.0]);
    group.broadcast(&mut Tensor::zeros([0], (Kind::Float, Device::Cpu)), 0).unwrap();

    let error = assert_fault(group.broadcast(&mut leaf, 3), Fault::Invalid);
    assert_eq!(
        error.to_string(),
        format!(
            "broadcast on group \"world\" failed on rank {} of 3 (invalid arguments): rank 3 does \
             not exist among 3 ranks",
            group.rank()
        )
    );
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_broadcast_coalesced, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as f64;
    let tensors: Vec<Tensor> = (1..20)
        .map(|n| Tensor::full([n, 3], rank + 1.0, (Kind::Float, Device::Cpu)))
        .chain([Tensor::from(rank), Tensor::from(rank as i64)])
        .collect();
    // Several messages: the largest tensor alone is more than 128 bytes.
    group.broadcast_coalesced(&tensors.iter().collect::<Vec<_>>(), 128, 1).unwrap();
    for tensor in &tensors[..19] {
        assert!(values(tensor).iter().all(|&value| value == 2.0));
    }
    assert_eq!((values(&tensors[19]), values(&tensors[20])), (vec![1.0], vec![1.0]));
    assert_fault(group.broadcast_coalesced(&[], 128, 2), Fault::Invalid);
});

dist_test!(world = 3, dist_all_gather, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as i64;
    let mine = Tensor::from_slice(&[rank, -rank]);
    let all = group.all_gather(&mine).unwrap();
    assert_eq!(all.iter().map(values).collect::<Vec<_>>(), [[0.0, 0.0], [1.0, -1.0], [2.0, -2.0]]);
    let flat = group.all_gather_flat(&mine).unwrap();
    assert_eq!((values(&flat), flat.size()), (vec![0.0, 0.0, 1.0, -1.0, 2.0, -2.0], vec![6]));

    let scalar = group.all_gather_flat(&Tensor::from(rank)).unwrap();
    assert_eq!((values(&scalar), scalar.size()), (vec![0.0, 1.0, 2.0], vec![3]));
    let rows = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) + rank as f64;
    let columns = group.all_gather(&rows.tr()).unwrap();
    assert_eq!(values(&columns[2]), [2.0, 5.0, 3.0, 6.0, 4.0, 7.0]);
    assert_eq!(columns[2].size(), [3, 2]);
    let empty = group.all_gather_flat(&rows.narrow(0, 0, 0)).unwrap();
    assert_eq!(empty.size(), [0, 3]);
    let grown = group.all_gather(&rows.set_requires_grad(true)).unwrap();
    assert!(!grown[0].requires_grad());
});

dist_test!(world = 3, dist_gather_and_scatter, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank();
    for root in 0..3 {
        let all = group.gather(&Tensor::from_slice(&[rank as f64, 7.0]), root).unwrap();
        assert_eq!(all.is_some(), rank == root);
        if let Some(all) = all {
            let all: Vec<Vec<f64>> = all.iter().map(values).collect();
            assert_eq!(all, [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]);
        }

        let list: Vec<Tensor> = (0..3).map(|to| Tensor::from(10.0 * to as f64)).collect();
        let mut mine = Tensor::from(-1.0);
        group.scatter(&mut mine, (rank == root).then_some(&list[..]), root).unwrap();
        assert_eq!(values(&mine), [10.0 * rank as f64]);
    }
    let mut mine = Tensor::zeros([2, 2], (Kind::Double, Device::Cpu));
    let list: Vec<Tensor> = (0..3)
        .map(|to| Tensor::arange(4, (Kind::Double, Device::Cpu)).view([2, 2]).tr() + f64::from(to))
        .collect();
    group.scatter(&mut mine.tr(), (rank == 0).then_some(&list[..]), 0).unwrap();
    let offset = rank as f64;
    assert_eq!(values(&mine), [0.0, 1.0, 2.0, 3.0].map(|value| value + offset));

    assert_fault(group.gather(&mine, 9), Fault::Invalid);
    assert_fault(group.scatter(&mut mine, None, 9), Fault::Invalid);
    if rank == 0 {
        assert_fault(group.scatter(&mut mine, None, 0), Fault::Invalid);
        assert_fault(group.scatter(&mut mine, Some(&list[..2]), 0), Fault::Invalid);
        let wrong_type = list.iter().map(|t| t.to_kind(Kind::Float)).collect::<Vec<_>>();
        assert_fault(group.scatter(&mut mine, Some(&wrong_type), 0), Fault::Invalid);
        assert_fault(group.scatter(&mut Tensor::from(1.0), Some(&list), 0), Fault::Invalid);
    } else {
        assert_fault(group.scatter(&mut mine, Some(&list), 0), Fault::Invalid);
    }
    group.barrier().unwrap();
});
