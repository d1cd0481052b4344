//! all_to_all, even and uneven, in lists and flat.

use brigade_testkit::dist_test;
use brigade_torch::Fault;
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, assert_fault, values};

dist_test!(world = 3, dist_all_to_all, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank();
    // What rank r sends to rank i: 10 r + i.
    let parts: Vec<Tensor> =
        (0..3).map(|to| Tensor::from_slice(&[(10 * rank + to) as f32; 2])).collect();
    let all = group.all_to_all(&parts, None).unwrap();
    let expected: Vec<Vec<f64>> = (0..3).map(|from| vec![(10 * from + rank) as f64; 2]).collect();
    assert_eq!(all.iter().map(values).collect::<Vec<_>>(), expected);

    // Uneven: rank r sends i + 1 rows of r + 1 columns to rank i, of mixed types.
    let kind = |from: usize| [Kind::Uint8, Kind::Double, Kind::Half][from];
    let part = |from: usize, to: usize| {
        let shape = [to as i64 + 1, from as i64 + 1];
        Tensor::full(shape, (10 * from + to) as f64, (kind(from), Device::Cpu))
    };
    let parts: Vec<Tensor> = (0..3).map(|to| part(rank, to)).collect();
    let places: Vec<Tensor> = (0..3).map(|from| part(from, rank).zeros_like()).collect();
    let given: Vec<Tensor> = places.iter().map(Tensor::shallow_clone).collect();
    let all = group.all_to_all(&parts, Some(given)).unwrap();
    for from in 0..3 {
        assert!(all[from].equal(&part(from, rank)), "from {from}: {:?}", all[from]);
        assert!(places[from].equal(&all[from]), "the caller's own tensors are filled");
    }
    // One of the places is not contiguous.
    let wide = Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
    let parts: Vec<Tensor> = (0..3).map(|to| Tensor::from_slice(&[to as f32, 1.0])).collect();
    let places = (0..3)
        .map(|_| Tensor::zeros([2], (Kind::Float, Device::Cpu)))
        .take(2)
        .chain([wide.narrow(1, 0, 1).squeeze()])
        .collect();
    group.all_to_all(&parts, Some(places)).unwrap();
    assert_eq!(values(&wide), [rank as f64, 0.0, 1.0, 0.0]);

    assert_fault(group.all_to_all(&parts[..1], None), Fault::Invalid);
    assert_fault(group.all_to_all(&parts, Some(Vec::new())), Fault::Invalid);
    group.barrier().unwrap();
});

dist_test!(world = 3, dist_all_to_all_flat, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as i64;
    let rows = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([6, 1]) + 10 * rank;
    let even = group.all_to_all_flat(&rows, &[], &[]).unwrap();
    let expected = [0, 1, 10, 11, 20, 21].map(|value| (value + 2 * rank) as f64);
    assert_eq!((values(&even), even.size()), (expected.to_vec(), vec![6, 1]));

    // Rank r sends 0, 1 and 2 rows to ranks r, r + 1 and r + 2.
    let sends = |from: i64, to: i64| (to - from).rem_euclid(3);
    let send: Vec<i64> = (0..3).map(|to| sends(rank, to)).collect();
    let receive: Vec<i64> = (0..3).map(|from| sends(from, rank)).collect();
    let rows = rows.narrow(0, 0, 3);
    let mine = group.all_to_all_flat(&rows, &send, &receive).unwrap();
    let mut expected = Vec::new();
    for from in 0..3 {
        let first: i64 = (0..rank).map(|to| sends(from, to)).sum();
        expected.extend((first..first + sends(from, rank)).map(|row| (10 * from + row) as f64));
    }
    assert_eq!((values(&mine), mine.size()), (expected, vec![3, 1]));

    for (send, receive) in [
        (&[1, 1][..], &[1, 1, 1][..]),
        (&[1, 1, 1], &[]),
        (&[1, 1, 2], &[1, 1, 1]),
        (&[4, -1, 0], &[1, 1, 1]),
        (&[i64::MAX, i64::MAX, 5], &[1, 1, 1]),
    ] {
        assert_fault(group.all_to_all_flat(&rows, send, receive), Fault::Invalid);
    }
    assert_fault(group.all_to_all_flat(&rows.narrow(0, 0, 2), &[], &[]), Fault::Invalid);
    assert_fault(group.all_to_all_flat(&Tensor::from(1), &[0, 0, 0], &[0, 0, 0]), Fault::Invalid);
    group.barrier().unwrap();
});
