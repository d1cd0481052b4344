//! Collectives with gradients: what several ranks compute together is what one computes, forward and backward.

use brigade_test_device::numeric_device;
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::regions::{
    all_to_all, all_to_all_rows, copy_to_region, gather_from_region, gather_from_sequence_region,
    reduce_from_region, reduce_scatter_to_sequence_region, scatter_to_region,
};
use brigade_torch::{ErrorKind, ProcessGroup, backward, gradient};
use tch::{Kind, Tensor};

use crate::rendezvous;

/// The same values on each rank.
fn wave(size: &[i64], phase: f64) -> Tensor {
    let count = size.iter().product::<i64>();
    let places = Tensor::arange(count, (Kind::Double, numeric_device()));
    (places * 0.37 + phase).sin().view(size)
}

fn leaf(values: &Tensor) -> Tensor {
    values.detach().contiguous().copy().set_requires_grad(true)
}

fn of_rank(group: &ProcessGroup, whole: &Tensor, dim: i64) -> Tensor {
    whole.chunk(group.size() as i64, dim)[group.rank()].contiguous()
}

fn same(found: &Tensor, expected: &Tensor) {
    let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.detach().reshape([-1])).unwrap();
    assert_eq!(found.size(), expected.size());
    assert_close(&values(found), &values(expected), 1e-13, 1e-13);
}

fn grad(leaf: &Tensor) -> Tensor {
    gradient(leaf).unwrap().unwrap()
}

const BATCH: i64 = 2;
const LENGTH: i64 = 12;
const HIDDEN: i64 = 5;
const INNER: i64 = 24;

/// A norm and two linear layers, as in a transformer's block; and the loss's weights.
struct Whole {
    input: Tensor,
    norm: Tensor,
    up: Tensor,
    down: Tensor,
    target: Tensor,
}

impl Whole {
    fn new() -> Self {
        Self {
            input: leaf(&wave(&[BATCH, LENGTH, HIDDEN], 0.1)),
            norm: leaf(&(wave(&[HIDDEN], 0.2) + 2.0)),
            up: leaf(&wave(&[INNER, HIDDEN], 0.3)),
            down: leaf(&wave(&[HIDDEN, INNER], 0.4)),
            target: wave(&[BATCH, LENGTH, HIDDEN], 0.5),
        }
    }

    fn output(&self) -> Tensor {
        let hidden = normed(&self.input, &self.norm).linear(&self.up, None::<&Tensor>).gelu("none");
        &self.input + hidden.linear(&self.down, None::<&Tensor>)
    }
}

fn normed(input: &Tensor, norm: &Tensor) -> Tensor {
    input.layer_norm([HIDDEN], Some(norm), None::<&Tensor>, 1e-5, false)
}

fn column_and_row(world: &World) {
    let group = rendezvous::group(world);
    let whole = Whole::new();
    let expected = whole.output();
    backward(&(&expected * &whole.target).sum(Kind::Double)).unwrap();

    // Tensor parallelism: the norm on every rank, rows of one weight and columns of the other.
    let (input, norm) = (leaf(&whole.input), leaf(&whole.norm));
    let up = leaf(&of_rank(&group, &whole.up.detach(), 0));
    let down = leaf(&of_rank(&group, &whole.down.detach(), 1));
    let hidden = copy_to_region(&group, &normed(&input, &norm)).unwrap();
    let part = hidden.linear(&up, None::<&Tensor>).gelu("none").linear(&down, None::<&Tensor>);
    let output = &input + reduce_from_region(&group, &part).unwrap();
    same(&output, &expected);
    backward(&(&output * &whole.target).sum(Kind::Double)).unwrap();
    same(&grad(&input), &grad(&whole.input));
    same(&grad(&norm), &grad(&whole.norm));
    same(&grad(&up), &of_rank(&group, &grad(&whole.up), 0));
    same(&grad(&down), &of_rank(&group, &grad(&whole.down), 1));

    // With the sequence spread outside of the layers: each rank norms its part, whose gradient of the norm is a part of
    // the sum.
    let (input, norm) = (leaf(&whole.input), leaf(&whole.norm));
    let (up, down) = (leaf(&up), leaf(&down));
    let own = scatter_to_region(&group, &input, 1).unwrap();
    let hidden = gather_from_sequence_region(&group, &normed(&own, &norm), 1).unwrap();
    let part = hidden.linear(&up, None::<&Tensor>).gelu("none").linear(&down, None::<&Tensor>);
    let own = own + reduce_scatter_to_sequence_region(&group, &part, -2).unwrap();
    same(&own, &of_rank(&group, &expected, 1));
    let output = gather_from_region(&group, &own, 1).unwrap();
    same(&output, &expected);
    backward(&(&output * &whole.target).sum(Kind::Double)).unwrap();
    same(&grad(&input), &grad(&whole.input));
    let mut of_norm = grad(&norm);
    group.all_reduce(&mut of_norm, brigade_torch::ReduceOp::Sum).unwrap();
    same(&of_norm, &grad(&whole.norm));
    same(&grad(&up), &of_rank(&group, &grad(&whole.up), 0));
    same(&grad(&down), &of_rank(&group, &grad(&whole.down), 1));
}

dist_test!(world = 2, dist_two_ranks_compute_a_block, |world| column_and_row(&world));
dist_test!(world = 3, dist_three_ranks_compute_a_block, |world| column_and_row(&world));
dist_test!(world = 4, dist_four_ranks_compute_a_block, |world| column_and_row(&world));

dist_test!(world = 3, dist_heads_in_the_place_of_a_sequence, |world| {
    let group = rendezvous::group(&world);
    let whole = leaf(&wave(&[BATCH, LENGTH, 6, 4], 0.7));
    let target = wave(&[BATCH, LENGTH, 6, 4], 0.9);
    // Something that needs all places of a head.
    let of_heads = |heads: &Tensor| heads.cumsum(1, Kind::Double).sin() * heads;
    let expected = of_heads(&whole);
    backward(&(&expected * &target).sum(Kind::Double)).unwrap();

    let own = leaf(&of_rank(&group, &whole.detach(), 1));
    let heads = all_to_all(&group, &own, 2, 1).unwrap();
    same(&heads, &of_rank(&group, &whole, 2));
    let output = all_to_all(&group, &of_heads(&heads), 1, 2).unwrap();
    same(&output, &of_rank(&group, &expected, 1));
    backward(&(&output * of_rank(&group, &target, 1)).sum(Kind::Double)).unwrap();
    same(&grad(&own), &of_rank(&group, &grad(&whole), 1));
});

type Edge = fn(&ProcessGroup, &Tensor) -> Tensor;

dist_test!(world = 2, dist_gradients_are_finite_differences, |world| {
    let group = rendezvous::group(&world);
    let edges: [(&str, Edge); 7] = [
        ("copy", |group, x| copy_to_region(group, x).unwrap()),
        ("reduce", |group, x| reduce_from_region(group, x).unwrap()),
        ("scatter", |group, x| scatter_to_region(group, x, 0).unwrap()),
        ("gather", |group, x| gather_from_region(group, x, 1).unwrap()),
        ("gather sequence", |group, x| gather_from_sequence_region(group, x, 1).unwrap()),
        ("reduce-scatter", |group, x| reduce_scatter_to_sequence_region(group, x, 0).unwrap()),
        ("all-to-all", |group, x| all_to_all(group, x, 0, 1).unwrap()),
    ];
    // What is equal on all ranks has one gradient, that of the whole loss. The loss is the sum of the ranks' losses where
    // outputs differ, and one rank's where they are equal.
    for (name, run) in edges {
        let replicated_input = matches!(name, "copy" | "scatter");
        let replicated_output = matches!(name, "reduce" | "gather");
        let phase = if replicated_input { 0.0 } else { group.rank() as f64 };
        let values = wave(&[4, 2], phase);
        let loss = |x: &Tensor| {
            let output = run(&group, x);
            let phase = if replicated_output { 0.3 } else { 0.3 + group.rank() as f64 };
            let weights = wave(&output.size(), phase);
            (output.sin() * weights).sum(Kind::Double)
        };
        let total = |x: &Tensor| {
            let mut sum = tch::no_grad(|| loss(x));
            if !replicated_output {
                group.all_reduce(&mut sum, brigade_torch::ReduceOp::Sum).unwrap();
            }
            sum.double_value(&[])
        };
        let x = leaf(&values);
        backward(&loss(&x)).unwrap();
        let found = grad(&x);
        // Each rank's elements in turn; of equal inputs all ranks move theirs together.
        for mover in 0..if replicated_input { 1 } else { group.size() } {
            for place in 0..values.numel() as i64 {
                let moved = |step: f64| {
                    let shifted = values.copy();
                    if replicated_input || group.rank() == mover {
                        let _ = shifted
                            .view([-1])
                            .get(place)
                            .fill_(values.view([-1]).double_value(&[place]) + step);
                    }
                    total(&shifted)
                };
                let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                if replicated_input || group.rank() == mover {
                    let ours = found.view([-1]).double_value(&[place]);
                    assert!((ours - slope).abs() < 1e-8, "{name} {place}: {ours} and {slope}");
                }
            }
        }
    }
});

dist_test!(world = 3, dist_what_does_not_divide_is_named, |world| {
    let group = rendezvous::group(&world);
    let x = wave(&[4, 6], 0.0);
    let refused = |outcome: Result<Tensor, brigade_torch::Error>, text: &str| {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(
        scatter_to_region(&group, &x, 0),
        "dimension 0 has 4 elements, which 3 ranks do not divide; take 3 or 6",
    );
    refused(reduce_scatter_to_sequence_region(&group, &x, -2), "dimension -2 has 4 elements");
    refused(all_to_all(&group, &x, 0, 1), "dimension 0 has 4 elements");
    refused(all_to_all(&group, &x, 1, 2), "there is no dimension 2 in a tensor of shape [4, 6]");
    refused(gather_from_region(&group, &x, -3), "there is no dimension -3");
    // Nothing was sent: the next messages still match.
    assert_eq!(gather_from_region(&group, &x, 0).unwrap().size(), [12, 6]);
    // Gradients of gradients would need messages of their own.
    let x = leaf(&x);
    let output = reduce_from_region(&group, &copy_to_region(&group, &x).unwrap()).unwrap();
    let slope = Tensor::f_run_backward(&[output.sum(Kind::Double)], &[&x], true, true);
    assert!(slope.unwrap_err().to_string().contains("create_graph"));
});

dist_test!(world = 3, dist_rows_go_to_ranks_and_their_gradients_back, |world| {
    let group = rendezvous::group(&world);
    // Rows from each rank to each: one rank sends none, one gets none, and one block is empty.
    let counts = [[2i64, 3, 0], [0, 0, 0], [1, 4, 0]];
    let (rank, width) = (group.rank(), 2);
    let send = counts[rank];
    let receive = counts.map(|row| row[rank]);
    let starts = |from: usize, to: usize| counts[from][..to].iter().sum::<i64>();
    let rows_of = |from: usize| wave(&[counts[from].iter().sum(), width], from as f64);
    let x = leaf(&rows_of(rank));
    let received = all_to_all_rows(&group, &x, &send, &receive).unwrap();
    let blocks: Vec<Tensor> = (0..3)
        .map(|from| rows_of(from).narrow(0, starts(from, rank), counts[from][rank]))
        .collect();
    same(&received, &Tensor::cat(&blocks, 0));
    // Each rank multiplies the rows that it received by its own number.
    backward(&(&received * (rank as f64 + 2.0)).sum(Kind::Double)).unwrap();
    let factors: Vec<Tensor> = (0..3)
        .map(|to| Tensor::full([send[to], width], to as f64 + 2.0, (Kind::Double, x.device())))
        .collect();
    same(&grad(&x), &Tensor::cat(&factors, 0));
    // And sends them back.
    same(&all_to_all_rows(&group, &received, &receive, &send).unwrap(), &rows_of(rank));

    let refused = |input: &Tensor, send: &[i64], receive: &[i64], text: &str| {
        let error = all_to_all_rows(&group, input, send, receive).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(text), "{error}");
    };
    let rows = wave(&[4, 2], 0.0);
    refused(&rows, &[1, 1, 1], &[0, 0, 0], "the input has 4 rows, but [1, 1, 1] are to be sent");
    refused(&rows, &[4, 0], &[0, 0, 0], "expected 3 numbers of rows");
    refused(&rows, &[5, -1, 0], &[0, 0, 0], "expected 3 numbers of rows");
    refused(&rows, &[4, 0, 0], &[i64::MAX, 1, 0], "expected 3 numbers of rows");
    let scalar = Tensor::from(1.0);
    refused(&scalar, &[1, 0, 0], &[0, 0, 0], "without dimensions has no rows");
    // Nothing was sent: the next messages still match.
    same(&all_to_all_rows(&group, &received, &receive, &send).unwrap(), &rows_of(rank));
});
