//! All-gathers and reduce-scatters: the values of the ranks one after the other, and the bits of an all-reduce.

use brigade_testkit::{World, dist_test, step};
use brigade_torch::{GroupOptions, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, LIMIT};

const KINDS: [Kind; 6] =
    [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Half, Kind::Int, Kind::Int64];

const OPERATIONS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean];

/// Rows of each rank: none, one, odd ones, and those of several slots.
const ROWS: [i64; 5] = [0, 1, 7, 1025, SEVERAL_SLOTS];
const SEVERAL_SLOTS: i64 = 180_001;

fn group(world: &World, shared: bool) -> ProcessGroup {
    let options = GroupOptions { timeout: LIMIT, share_memory: shared, ..GroupOptions::default() };
    let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
    let store = rendezvous::store(world);
    let group = ProcessGroup::new(&store, rank, size, rendezvous::gloo(), options).unwrap();
    assert_eq!(group.shares_memory(), shared);
    group
}

/// Values of a rank, of which another order of summation gives other bits.
fn wave(rank: usize, rows: i64, kind: Kind) -> Tensor {
    let places = Tensor::arange(rows * 3, (Kind::Double, Device::Cpu));
    let values = ((places * 0.7311 + 2.1 * rank as f64).sin() * 4.0).exp();
    values.to_kind(kind).reshape([rows, 3])
}

/// The tensor's numbers as integers, so that a comparison is one of bits.
fn bits(tensor: &Tensor) -> Tensor {
    let kind = match tensor.kind() {
        Kind::Float => Kind::Int,
        Kind::Double => Kind::Int64,
        Kind::Half | Kind::BFloat16 => Kind::Int16,
        kind => kind,
    };
    tensor.contiguous().view_dtype(kind)
}

#[track_caller]
fn same_bits(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{what}");
    assert!(bits(found).equal(&bits(expected)), "{what}");
}

/// Rows of rank `rank` among as many of each rank.
fn rows_of(whole: &Tensor, rank: usize, size: usize) -> Tensor {
    let rows = whole.size()[0] / size as i64;
    whole.narrow(0, rank as i64 * rows, rows)
}

fn gathered(size: usize, rows: i64, kind: Kind) -> Tensor {
    Tensor::cat(&(0..size).map(|rank| wave(rank, rows, kind)).collect::<Vec<_>>(), 0)
}

fn lists_have_the_bits_of_all_reduces(group: &ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    for rows in ROWS {
        // Further chunks of other types and operations are the same code.
        let is_large = rows == SEVERAL_SLOTS;
        let kinds = if is_large { &KINDS[..2] } else { &KINDS[..] };
        for &kind in kinds {
            step!("{rows} rows of {kind:?}");
            let mine = wave(rank, rows, kind);
            let all = gathered(size, rows, kind);
            let what = format!("{rows} rows of {kind:?} of {size} ranks");
            same_bits(&group.all_gather_flat(&mine).unwrap(), &all, &what);
            let list = group.all_gather(&mine).unwrap();
            same_bits(&Tensor::cat(&list, 0), &all, &what);

            let whole = wave(rank, rows * size as i64, kind);
            let has_mean = !matches!(kind, Kind::Int | Kind::Int64);
            let ops = match (is_large, has_mean) {
                (true, _) => &OPERATIONS[..1],
                (false, true) => &OPERATIONS[..],
                (false, false) => &OPERATIONS[..4],
            };
            for &op in ops {
                let what = format!("{op:?} of {what}");
                let mut reduced = whole.copy();
                group.all_reduce(&mut reduced, op).unwrap();
                let expected = rows_of(&reduced, rank, size);
                same_bits(&group.reduce_scatter_flat(&whole, op).unwrap(), &expected, &what);
                let parts: Vec<Tensor> = (0..size).map(|it| rows_of(&whole, it, size)).collect();
                same_bits(&group.reduce_scatter(&parts, op).unwrap(), &expected, &what);
            }
        }
    }
}

/// A list of several types and lengths, an empty one and scalars among them.
const LIST: [(i64, Kind); 6] = [
    (5, Kind::BFloat16),
    (0, Kind::Float),
    (200_003, Kind::Float),
    (1, Kind::Double),
    (100_001, Kind::Half),
    (3, Kind::Int64),
];

fn lists_are_filled_in_place(group: &ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let expected: Vec<Tensor> =
        LIST.iter().map(|&(rows, kind)| gathered(size, rows, kind)).collect();
    let filled = |place: &dyn Fn(&Tensor, usize) -> Tensor| {
        let mut outputs: Vec<Tensor> = expected.iter().map(|it| it.full_like(-7.0)).collect();
        let inputs: Vec<Tensor> = outputs
            .iter()
            .zip(LIST)
            .enumerate()
            .map(|(index, (output, (rows, kind)))| {
                let mut input = place(output, index);
                input.copy_(&wave(rank, rows, kind));
                input
            })
            .collect();
        group.all_gather_into(&mut outputs, &inputs).unwrap();
        for (index, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
            same_bits(output, expected, &format!("tensor {index}"));
        }
    };
    step!("inputs apart");
    filled(&|output, _| rows_of(output, rank, size).copy());
    step!("inputs are the own rows");
    filled(&|output, _| rows_of(output, rank, size));
    step!("some are, and some are other rows");
    filled(&|output, index| match index % 3 {
        0 => rows_of(output, rank, size),
        1 => rows_of(output, rank, size).copy(),
        _ => rows_of(output, (rank + 1) % size, size),
    });

    let wholes = || LIST.map(|(rows, kind)| wave(rank, rows * size as i64, kind));
    let sums: Vec<Tensor> = wholes()
        .into_iter()
        .map(|mut whole| {
            group.all_reduce(&mut whole, ReduceOp::Sum).unwrap();
            rows_of(&whole, rank, size)
        })
        .collect();
    for shift in 0..size {
        step!("sums in the rows of rank + {shift}");
        let inputs = wholes();
        let mut outputs = inputs.each_ref().map(|it| rows_of(it, (rank + shift) % size, size));
        group.reduce_scatter_into(&mut outputs, &inputs, ReduceOp::Sum).unwrap();
        for (index, (output, sum)) in outputs.iter().zip(&sums).enumerate() {
            same_bits(output, sum, &format!("tensor {index}, shift {shift}"));
        }
    }

    step!("columns of a larger tensor");
    let wide = Tensor::zeros([4 * size as i64, 10], (Kind::Float, Device::Cpu));
    let mine = wave(rank, 4, Kind::Float);
    let turned = mine.tr().contiguous();
    group.all_gather_into(&mut [wide.narrow(1, 2, 3)], &[turned.tr()]).unwrap();
    same_bits(&wide.narrow(1, 2, 3), &gathered(size, 4, Kind::Float), "columns");
    assert_eq!(wide.narrow(1, 5, 5).abs().sum(Kind::Float).double_value(&[]), 0.0);
    group
        .reduce_scatter_into(
            &mut [rows_of(&wide, 0, size).narrow(1, 7, 3)],
            &[wide.narrow(1, 2, 3)],
            ReduceOp::Max,
        )
        .unwrap();
    let own = rows_of(&gathered(size, 4, Kind::Float), rank, size);
    same_bits(&wide.narrow(0, 0, 4).narrow(1, 7, 3), &own, "columns reduced");
    let mut all = [Tensor::zeros([size as i64], (Kind::Int64, Device::Cpu))];
    group.all_gather_into(&mut all, &[Tensor::from(rank as i64)]).unwrap();
    let mut sum = [Tensor::from(0i64)];
    group.reduce_scatter_into(&mut sum, &all, ReduceOp::Sum).unwrap();
    assert_eq!(sum[0].int64_value(&[]), (rank * size) as i64);
}

fn both(world: &World, shared: bool) {
    let group = group(world, shared);
    lists_have_the_bits_of_all_reduces(&group);
    lists_are_filled_in_place(&group);
    // Types and reductions that are Gloo's own.
    let rank = group.rank() as i64;
    for kind in [Kind::Uint8, Kind::Int8] {
        let flags = Tensor::full([2 * group.size() as i64], 1i64 << rank, (kind, Device::Cpu));
        let all = group.reduce_scatter_flat(&flags, ReduceOp::BitOr).unwrap();
        assert_eq!(rendezvous::values(&all), [((1 << group.size()) - 1) as f64; 2]);
    }
    for kind in [Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Bool, Kind::ComplexFloat] {
        let mine = Tensor::full([3], rank % 2, (kind, Device::Cpu));
        let all = group.all_gather_flat(&mine).unwrap();
        let expected = Tensor::arange(3 * group.size() as i64, (Kind::Int64, Device::Cpu))
            .divide_scalar_mode(3, "floor")
            .remainder(2);
        assert!(all.eq_tensor(&expected.to_kind(kind)).all().int64_value(&[]) != 0, "{kind:?}");
    }
    let turned = Tensor::from(0.5 + rank as f64).to_kind(Kind::ComplexDouble);
    let turned = (turned * Tensor::from_slice(&[0.0, 1.0]).view_as_complex()).conj();
    let all = group.all_gather_flat(&turned).unwrap();
    let imaginary = rendezvous::values(&all.imag());
    let expected: Vec<f64> = (0..group.size()).map(|it| -0.5 - it as f64).collect();
    assert_eq!(imaginary, expected, "a conjugate is not only a flag");
}

dist_test!(world = 2, seconds = 120, dist_lists_of_two_ranks_in_shared_memory, |world| {
    both(&world, true);
});

dist_test!(world = 4, seconds = 120, dist_lists_of_four_ranks_in_shared_memory, |world| {
    both(&world, true);
});

dist_test!(world = 2, seconds = 120, dist_lists_of_two_ranks_over_tcp, |world| {
    both(&world, false);
});

dist_test!(world = 3, seconds = 120, dist_lists_of_three_ranks_over_tcp, |world| {
    both(&world, false);
});
