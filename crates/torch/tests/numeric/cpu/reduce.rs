//! Every reduction on every kind of tensor.

use brigade_testkit::dist_test;
use brigade_torch::{Fault, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, assert_fault, values};

const FLOATS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
const INTEGERS: [Kind; 4] = [Kind::Int8, Kind::Uint8, Kind::Int, Kind::Int64];

/// How two whole numbers become one.
type Fold = fn(i64, i64) -> i64;

const ARITHMETIC: [(ReduceOp, Fold); 4] = [
    (ReduceOp::Sum, |a, b| a + b),
    (ReduceOp::Product, |a, b| a * b),
    (ReduceOp::Min, |a, b| a.min(b)),
    (ReduceOp::Max, |a, b| a.max(b)),
];
const BITWISE: [(ReduceOp, Fold); 3] = [
    (ReduceOp::BitAnd, |a, b| a & b),
    (ReduceOp::BitOr, |a, b| a | b),
    (ReduceOp::BitXor, |a, b| a ^ b),
];

/// Rank `rank`'s numbers: small, so that each type holds them and their products.
fn numbers(rank: i64) -> [i64; 3] {
    [rank + 1, 2 * rank + 1, 6 - rank]
}

fn expected(ranks: i64, fold: Fold) -> Vec<f64> {
    (0..3).map(|i| (0..ranks).map(|rank| numbers(rank)[i]).reduce(fold).unwrap() as f64).collect()
}

dist_test!(world = 3, dist_all_reduce_of_every_type, |world| {
    let group = rendezvous::group(&world);
    let mine = Tensor::from_slice(&numbers(group.rank() as i64));
    for kind in FLOATS.into_iter().chain(INTEGERS) {
        for (op, fold) in ARITHMETIC {
            let mut tensor = mine.copy().to_kind(kind);
            group.all_reduce(&mut tensor, op).unwrap();
            assert_eq!(values(&tensor), expected(3, fold), "{op:?} of {kind:?}");
            assert_eq!(tensor.kind(), kind);
        }
    }
    for kind in INTEGERS {
        for (op, fold) in BITWISE {
            let mut tensor = mine.copy().to_kind(kind);
            group.all_reduce(&mut tensor, op).unwrap();
            assert_eq!(values(&tensor), expected(3, fold), "{op:?} of {kind:?}");
        }
        let error =
            assert_fault(group.all_reduce(&mut mine.to_kind(kind), ReduceOp::Mean), Fault::Invalid);
        assert!(error.to_string().contains("mean"), "{error}");
    }
    for kind in FLOATS {
        let mut tensor = mine.copy().to_kind(kind);
        group.all_reduce(&mut tensor, ReduceOp::Mean).unwrap();
        assert_eq!(values(&tensor), [2.0, 3.0, 5.0], "mean of {kind:?}");
        for (op, _) in BITWISE {
            assert_fault(group.all_reduce(&mut mine.to_kind(kind), op), Fault::Invalid);
        }
    }
    let flags = Tensor::from_slice(&[group.rank() == 1, true, false]);
    let cases = [
        (ReduceOp::BitAnd, [0.0, 1.0, 0.0]),
        (ReduceOp::BitOr, [1.0, 1.0, 0.0]),
        (ReduceOp::BitXor, [1.0, 1.0, 0.0]),
        (ReduceOp::Min, [0.0, 1.0, 0.0]),
        (ReduceOp::Max, [1.0, 1.0, 0.0]),
    ];
    for (op, expected) in cases {
        let mut tensor = flags.copy();
        group.all_reduce(&mut tensor, op).unwrap();
        assert_eq!(values(&tensor), expected, "{op:?} of bool");
    }
});

dist_test!(world = 2, dist_all_reduce_of_every_shape, |world| {
    let group = rendezvous::group(&world);
    // Not contiguous: a transposed view, a column. Adjacent memory must not change.
    let whole = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    group.all_reduce(&mut whole.tr(), ReduceOp::Sum).unwrap();
    assert_eq!(values(&whole), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    let mut column = whole.narrow(1, 1, 1);
    group.all_reduce(&mut column, ReduceOp::Mean).unwrap();
    group.all_reduce(&mut column, ReduceOp::Sum).unwrap();
    assert_eq!(values(&whole), [0.0, 4.0, 4.0, 6.0, 16.0, 10.0]);
    let mut row = whole.narrow(0, 1, 1);
    group.all_reduce(&mut row, ReduceOp::Sum).unwrap();
    assert_eq!(values(&whole), [0.0, 4.0, 4.0, 12.0, 32.0, 20.0]);

    let mut empty = Tensor::zeros([0, 3], (Kind::Float, Device::Cpu));
    group.all_reduce(&mut empty, ReduceOp::Sum).unwrap();
    assert_eq!(empty.size(), [0, 3]);
    let mut scalar = Tensor::from(1.5);
    group.all_reduce(&mut scalar, ReduceOp::Sum).unwrap();
    assert_eq!((values(&scalar), scalar.size()), (vec![3.0], vec![]));
});

dist_test!(world = 2, dist_parameters_can_be_reduced, |world| {
    let group = rendezvous::group(&world);
    let mut leaf = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    group.all_reduce(&mut leaf, ReduceOp::Sum).unwrap();
    group.all_reduce(&mut leaf, ReduceOp::Mean).unwrap();
    assert!(leaf.requires_grad() && leaf.is_leaf());
    assert_eq!(values(&leaf), [2.0, 4.0]);
    (&leaf * 3.0).sum(Kind::Double).backward();
    assert_eq!(values(&leaf.grad()), [3.0, 3.0]);

    let wide = Tensor::ones([2, 2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let back = group.start_all_reduce(wide.tr(), ReduceOp::Mean).unwrap().wait().unwrap();
    assert_eq!(values(&back), [1.0; 4]);
});

dist_test!(world = 4, dist_all_ranks_get_the_same_bits, |world| {
    let group = rendezvous::group(&world);
    tch::manual_seed(group.rank() as i64);
    let mut tensor = Tensor::randn([10_007], (Kind::Float, Device::Cpu));
    group.all_reduce(&mut tensor, ReduceOp::Mean).unwrap();
    for other in group.all_gather(&tensor).unwrap() {
        assert!(other.equal(&tensor));
    }
});

dist_test!(world = 3, dist_reduce, |world| {
    let group = rendezvous::group(&world);
    for root in 0..3 {
        for (op, fold) in ARITHMETIC {
            let mut tensor = Tensor::from_slice(&numbers(group.rank() as i64));
            group.reduce(&mut tensor, op, root).unwrap();
            if group.rank() == root {
                assert_eq!(values(&tensor), expected(3, fold), "{op:?}");
            }
        }
        let mut tensor = Tensor::from_slice(&numbers(group.rank() as i64)).to_kind(Kind::Float);
        group.reduce(&mut tensor, ReduceOp::Mean, root).unwrap();
        if group.rank() == root {
            assert_eq!(values(&tensor), [2.0, 3.0, 5.0]);
        }
    }
    assert_fault(group.reduce(&mut Tensor::from(1.0), ReduceOp::Sum, 3), Fault::Invalid);
});

dist_test!(world = 3, dist_reduce_scatter, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as f64;
    // Part p of rank r holds 10 p + r.
    let part = |part: f64| Tensor::full([2, 2], 10.0 * part + rank, (Kind::Double, Device::Cpu));
    let parts: Vec<Tensor> = [0.0, 1.0, 2.0].map(part).into();
    let sum = group.reduce_scatter(&parts, ReduceOp::Sum).unwrap();
    assert_eq!(values(&sum), [30.0 * rank + 3.0; 4]);
    let mean = group.reduce_scatter(&parts, ReduceOp::Mean).unwrap();
    assert_eq!((values(&mean), mean.size()), (vec![10.0 * rank + 1.0; 4], vec![2, 2]));
    let flat = Tensor::cat(&parts, 0);
    let max = group.reduce_scatter_flat(&flat, ReduceOp::Max).unwrap();
    assert_eq!((values(&max), max.size()), (vec![10.0 * rank + 2.0; 4], vec![2, 2]));
    let mean = group.reduce_scatter_flat(&flat.tr().contiguous().tr(), ReduceOp::Mean).unwrap();
    assert_eq!(values(&mean), [10.0 * rank + 1.0; 4]);
    assert_eq!(values(&flat.narrow(0, 0, 1)), [rank; 2], "the input is only read");

    assert_fault(group.reduce_scatter(&parts[..2], ReduceOp::Sum), Fault::Invalid);
    let uneven = [part(0.0), part(1.0), Tensor::from(1.0)];
    assert_fault(group.reduce_scatter(&uneven, ReduceOp::Sum), Fault::Invalid);
    assert_fault(group.reduce_scatter_flat(&flat.narrow(0, 0, 4), ReduceOp::Sum), Fault::Invalid);
    assert_fault(group.reduce_scatter_flat(&Tensor::from(1.0), ReduceOp::Sum), Fault::Invalid);
    group.barrier().unwrap();
});
