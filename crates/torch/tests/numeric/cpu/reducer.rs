//! The reducer: one process and many give the same gradients, in every mode.

use brigade_testkit::{assert_close, dist_test};
use brigade_torch::{
    Error, ErrorKind, ProcessGroup, ReduceOp, Reducer, ReducerOptions, TorchError, clear_gradient,
    gradient,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, values};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Three layers in float64, named `0.weight`, `0.bias`, …; without normalisation, so that a step on
/// many ranks is a step on one.
fn layers(seed: i64) -> Vec<(String, Tensor)> {
    tch::manual_seed(seed);
    [(8, 6), (5, 8), (3, 5)]
        .into_iter()
        .enumerate()
        .flat_map(|(n, (outputs, inputs))| {
            let new = |shape: &[i64]| (Tensor::randn(shape, DOUBLE) * 0.5).set_requires_grad(true);
            let weight = new(&[outputs, inputs]);
            [(format!("{n}.weight"), weight), (format!("{n}.bias"), new(&[outputs]))]
        })
        .collect()
}

fn forward(layers: &[(String, Tensor)], input: &Tensor) -> Tensor {
    layers.chunks(2).enumerate().fold(input.shallow_clone(), |x, (n, layer)| {
        let x = if n == 0 { x } else { x.tanh() };
        x.linear(&layer[0].1, Some(&layer[1].1))
    })
}

fn data(step: i64, rows: i64) -> (Tensor, Tensor) {
    let x = Tensor::arange(rows * 6, DOUBLE).view([rows, 6]);
    let y = Tensor::arange(rows * 3, DOUBLE).view([rows, 3]);
    ((x * 0.37 + step as f64).sin(), (y * 0.7 - step as f64).cos())
}

fn descend(layers: &[(String, Tensor)]) {
    tch::no_grad(|| {
        for (_, parameter) in layers {
            let gradient = gradient(parameter).unwrap().unwrap();
            let _ = parameter.shallow_clone().g_sub_(&(gradient * 0.1));
            clear_gradient(parameter).unwrap();
        }
    });
}

fn all_values(layers: &[(String, Tensor)]) -> Vec<f64> {
    layers.iter().flat_map(|(_, parameter)| values(parameter)).collect()
}

fn gradients(layers: &[(String, Tensor)]) -> Vec<f64> {
    layers.iter().flat_map(|(_, p)| values(&gradient(p).unwrap().unwrap())).collect()
}

const ROWS: i64 = 12;
const STEPS: i64 = 6;

/// The weights after some steps on this rank alone, on all rows.
fn alone() -> Vec<f64> {
    let layers = layers(1);
    for step in 0..STEPS {
        let (x, y) = data(step, ROWS);
        forward(&layers, &x).mse_loss(&y, tch::Reduction::Mean).backward();
        descend(&layers);
    }
    all_values(&layers)
}

/// The weights after the same steps by all ranks, each on its part of the rows.
fn together(group: &ProcessGroup, options: ReducerOptions) -> Vec<f64> {
    let part = ROWS / group.size() as i64;
    let first = part * group.rank() as i64;
    // Each rank starts with different values: rank 0's are used on all.
    let layers = layers(1 + group.rank() as i64);
    let reducer = Reducer::new(group, &layers, &[], options).unwrap();
    for step in 0..STEPS {
        let (x, y) = data(step, ROWS);
        reducer.before_forward(true).unwrap();
        let output = forward(&layers, &x.narrow(0, first, part));
        let output = reducer.after_forward(output, true).unwrap();
        output.mse_loss(&y.narrow(0, first, part), tch::Reduction::Mean).f_backward().unwrap();
        descend(&layers);
    }
    all_values(&layers)
}

fn variants() -> Vec<ReducerOptions> {
    let plain = ReducerOptions::default();
    vec![
        plain.clone(),
        ReducerOptions { gradient_as_bucket_view: false, ..plain.clone() },
        ReducerOptions { bucket_bytes: 1, first_bucket_bytes: 1, ..plain.clone() },
        ReducerOptions { find_unused_parameters: true, ..plain.clone() },
        ReducerOptions { static_graph: true, ..plain.clone() },
        ReducerOptions { static_graph: true, find_unused_parameters: true, ..plain.clone() },
        ReducerOptions { static_graph: true, gradient_as_bucket_view: false, ..plain },
    ]
}

fn many_are_one(group: &ProcessGroup) {
    let expected = alone();
    for options in variants() {
        assert_close(&together(group, options.clone()), &expected, 1e-12, 1e-14);
    }
}

dist_test!(world = 2, dist_two_with_half_the_rows_are_one, |world| many_are_one(
    &rendezvous::group(&world)
));
dist_test!(world = 4, dist_four_with_a_quarter_of_the_rows_are_one, |world| many_are_one(
    &rendezvous::group(&world)
));

dist_test!(world = 2, dist_accumulation_without_sync, |world| {
    let group = rendezvous::group(&world);
    let layers = layers(1);
    let reducer = Reducer::new(&group, &layers, &[], ReducerOptions::default()).unwrap();
    for round in 0..3 {
        for micro in 0..3 {
            let sync = micro == 2;
            let (x, y) = data(10 * round + micro, ROWS);
            let mine = |t: Tensor| t.narrow(0, 6 * group.rank() as i64, 6);
            reducer.before_forward(sync).unwrap();
            let output = reducer.after_forward(forward(&layers, &mine(x)), sync).unwrap();
            output.mse_loss(&mine(y), tch::Reduction::Mean).f_backward().unwrap();
            let here = Tensor::from_slice(&gradients(&layers));
            let all = group.all_gather(&here).unwrap();
            assert_eq!(all[0].equal(&all[1]), sync, "micro-batch {micro} of round {round}");
        }
        let found = gradients(&layers);
        for (_, parameter) in &layers {
            clear_gradient(parameter).unwrap();
        }
        for micro in 0..3 {
            let (x, y) = data(10 * round + micro, ROWS);
            forward(&layers, &x).mse_loss(&y, tch::Reduction::Mean).backward();
        }
        assert_close(&found, &gradients(&layers), 1e-12, 1e-14);
        for (_, parameter) in &layers {
            clear_gradient(parameter).unwrap();
        }
    }
});

/// `used * x`, and `sometimes * x` on the ranks that say so.
fn branches() -> Vec<(String, Tensor)> {
    ["used", "sometimes"]
        .map(|name| (name.to_owned(), Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true)))
        .into()
}

fn branch_step(reducer: &Reducer, branches: &[(String, Tensor)], both: bool) -> Result<(), Error> {
    for (_, parameter) in branches {
        clear_gradient(parameter).unwrap();
    }
    reducer.before_forward(true)?;
    let mut output = &branches[0].1 * 3.0;
    if both {
        output += &branches[1].1 * 4.0;
    }
    let output = reducer.after_forward(output, true)?;
    output.sum(Kind::Double).f_backward()?;
    Ok(())
}

dist_test!(world = 2, dist_unused_parameters_are_found, |world| {
    let group = rendezvous::group(&world);
    for views in [true, false] {
        let branches = branches();
        let options = ReducerOptions {
            find_unused_parameters: true,
            gradient_as_bucket_view: views,
            ..ReducerOptions::default()
        };
        let reducer = Reducer::new(&group, &branches, &[], options).unwrap();
        let sometimes = || gradient(&branches[1].1).unwrap().map(|g| values(&g));
        for _ in 0..2 {
            // On one rank only: the mean with zero.
            branch_step(&reducer, &branches, group.rank() == 0).unwrap();
            assert_eq!(gradients(&branches[..1]), [3.0, 3.0]);
            assert_eq!(sometimes().unwrap(), [2.0, 2.0]);
            // On no rank: no gradient at all.
            branch_step(&reducer, &branches, false).unwrap();
            assert_eq!(gradients(&branches[..1]), [3.0, 3.0]);
            assert_eq!(sometimes(), None);
            branch_step(&reducer, &branches, true).unwrap();
            assert_eq!(sometimes().unwrap(), [4.0, 4.0]);
        }
    }
});

dist_test!(world = 2, dist_a_static_graph_learns_what_is_unused, |world| {
    let group = rendezvous::group(&world);
    let branches = branches();
    let options = ReducerOptions { static_graph: true, ..ReducerOptions::default() };
    let reducer = Reducer::new(&group, &branches, &[], options).unwrap();
    for _ in 0..4 {
        branch_step(&reducer, &branches, false).unwrap();
        assert_eq!(gradients(&branches[..1]), [3.0, 3.0]);
    }
});

dist_test!(world = 2, dist_an_unused_parameter_is_explained, |world| {
    let group = rendezvous::group(&world);
    let branches = branches();
    let reducer = Reducer::new(&group, &branches, &[], ReducerOptions::default()).unwrap();
    branch_step(&reducer, &branches, false).unwrap();
    let error = branch_step(&reducer, &branches, false).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error.downcast_ref(), Some(TorchError::Libtorch { .. })), "{text}");
    assert!(text.contains("find_unused_parameters"), "{text}");
    assert!(text.contains("sometimes"), "{text}");
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_buckets_have_the_size_asked_for, |world| {
    let group = rendezvous::group(&world);
    let parameters: Vec<(String, Tensor)> = (0..8)
        .map(|n| {
            let tensor = Tensor::ones([256], (Kind::Float, Device::Cpu));
            (format!("p{n}"), tensor.set_requires_grad(true))
        })
        .collect();
    let options = ReducerOptions {
        bucket_bytes: 3000,
        first_bucket_bytes: 1000,
        ..ReducerOptions::default()
    };
    let reducer = Reducer::new(&group, &parameters, &[], options.clone()).unwrap();
    assert_eq!((reducer.options().bucket_bytes, reducer.group().size()), (3000, 2));
    assert_eq!(reducer.bucket_bytes().unwrap(), [8192], "one, until the order is known");
    for _ in 0..3 {
        reducer.before_forward(true).unwrap();
        let sum =
            parameters.iter().fold(Tensor::from(0f32), |sum, (_, p)| sum + p.sum(Kind::Float));
        let sum = reducer.after_forward(sum, true).unwrap();
        sum.f_backward().unwrap();
    }
    // 1 KiB each: the first is full with one, the others with three, the last has what is left.
    assert_eq!(reducer.bucket_bytes().unwrap(), [1024, 3072, 3072, 1024]);

    let searching = ReducerOptions { find_unused_parameters: true, ..options };
    let reducer = Reducer::new(&group, &parameters, &[], searching).unwrap();
    assert_eq!(reducer.bucket_bytes().unwrap(), [1024, 3072, 3072, 1024], "known from the start");
});

dist_test!(world = 3, dist_everybody_starts_from_rank_0, |world| {
    let group = rendezvous::group(&world);
    let rank = group.rank() as f64;
    let weight = Tensor::full([2, 2], rank, DOUBLE).set_requires_grad(true);
    let view = Tensor::full([2, 3], rank, (Kind::Float, Device::Cpu)).tr().set_requires_grad(true);
    let parameters = [("weight".to_owned(), weight), ("view".to_owned(), view)];
    let mean = Tensor::full([3], rank, (Kind::Float, Device::Cpu));
    let count = Tensor::from(group.rank() as i64 + 10);
    let buffers = [("mean".to_owned(), mean), ("count".to_owned(), count)];
    let reducer = Reducer::new(&group, &parameters, &buffers, ReducerOptions::default()).unwrap();
    assert_eq!(all_values(&parameters), [0.0; 10]);
    assert_eq!(all_values(&buffers), [0.0, 0.0, 0.0, 10.0]);
    assert!(parameters.iter().all(|(_, p)| p.requires_grad() && p.is_leaf()));

    let add = |number: f64| {
        let _ = buffers[0].1.shallow_clone().g_add_scalar_(number);
    };
    let pass = |sync: bool| {
        reducer.before_forward(sync).unwrap();
        let seen = all_values(&buffers)[0];
        let sum =
            parameters.iter().fold(Tensor::from(0.0), |sum, (_, p)| sum + p.sum(Kind::Double));
        let _ = reducer.after_forward(sum, sync).unwrap().f_backward();
        seen
    };
    add(rank + 1.0);
    assert_eq!(pass(true), 1.0, "rank 0's, before the forward");
    add(rank + 1.0);
    assert_eq!(pass(false), 2.0, "after a forward that was synchronised");
    add(rank + 1.0);
    assert_eq!(pass(true), 3.0 + rank, "not after one that was not");
    assert_eq!(pass(true), 3.0);
});

dist_test!(world = 2, dist_buffers_are_left_alone_on_request, |world| {
    let group = rendezvous::group(&world);
    let parameters = branches();
    let buffers = [("buffer".to_owned(), Tensor::from(group.rank() as f64))];
    let options = ReducerOptions { broadcast_buffers: false, ..ReducerOptions::default() };
    let reducer = Reducer::new(&group, &parameters, &buffers, options).unwrap();
    let rank = group.rank() as f64;
    let _ = buffers[0].1.shallow_clone().fill_(rank);
    branch_step(&reducer, &parameters, true).unwrap();
    assert_eq!(values(&buffers[0].1), [rank]);
    // Evaluation needs no peer from its second forward on.
    tch::no_grad(|| {
        for _ in 0..3 * group.rank() {
            reducer.before_forward(true).unwrap();
            let output = reducer.after_forward(&parameters[0].1 * 2.0, true).unwrap();
            assert!(!output.requires_grad());
        }
    });
    group.barrier().unwrap();
    let mut one = Tensor::from(1.0);
    group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
});

dist_test!(world = 3, dist_models_that_differ, |world| {
    let group = rendezvous::group(&world);
    let tensor = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let model = |changed: &[(usize, &str, Tensor)], count: usize| {
        let mut list: Vec<(String, Tensor)> = ["a.weight", "a.bias", "b.weight"]
            .map(|name| (name.to_owned(), tensor(&[2, 3], Kind::Float)))
            .into();
        for (place, name, other) in changed {
            list[*place] = ((*name).to_owned(), other.shallow_clone());
        }
        list.truncate(count);
        list.into_iter().map(|(name, t)| (name, t.set_requires_grad(true))).collect::<Vec<_>>()
    };
    let buffer = |kind| vec![("running".to_owned(), tensor(&[4], kind))];
    let plain = || (model(&[], 3), buffer(Kind::Float));
    type Model = (Vec<(String, Tensor)>, Vec<(String, Tensor)>);
    // The rank that differs, the difference, and the names in the error.
    let cases: [(usize, Model, &str, &str); 6] = [
        (
            2,
            (model(&[(1, "a.bias", tensor(&[3, 2], Kind::Float))], 3), buffer(Kind::Float)),
            "parameter a.bias [2, 3] float32",
            "parameter a.bias [3, 2] float32",
        ),
        (
            1,
            (model(&[(0, "a.w", tensor(&[2, 3], Kind::Float))], 3), buffer(Kind::Float)),
            "parameter a.weight [2, 3] float32",
            "parameter a.w [2, 3] float32",
        ),
        (
            1,
            (model(&[(2, "b.weight", tensor(&[2, 3], Kind::Double))], 3), buffer(Kind::Float)),
            "parameter b.weight [2, 3] float32",
            "parameter b.weight [2, 3] float64",
        ),
        (
            2,
            (model(&[], 2), buffer(Kind::Float)),
            "parameter b.weight [2, 3] float32",
            "buffer running [4] float32",
        ),
        (2, (model(&[], 3), Vec::new()), "buffer running [4] float32", "only 3 tensors"),
        (
            1,
            (model(&[], 3), buffer(Kind::Int64)),
            "buffer running [4] float32",
            "buffer running [4] int64",
        ),
    ];
    for (different, model, expected_line, found_line) in cases {
        let (parameters, buffers) = if group.rank() == different { model } else { plain() };
        let made = Reducer::new(&group, &parameters, &buffers, ReducerOptions::default());
        let error = made.unwrap_err();
        match error.downcast_ref() {
            Some(TorchError::ModelsDiffer { rank, expected, found }) => {
                assert_eq!(
                    (*rank, &expected[..], &found[..]),
                    (different, expected_line, found_line)
                );
            }
            _ => panic!("{error}"),
        }
    }
    // Rank 0 is the one that differs: the error contains the first other rank.
    let (parameters, buffers) =
        if group.rank() == 0 { (model(&[], 1), Vec::new()) } else { plain() };
    let made = Reducer::new(&group, &parameters, &buffers, ReducerOptions::default());
    assert!(matches!(
        made.unwrap_err().downcast_ref(),
        Some(TorchError::ModelsDiffer { rank: 1, .. })
    ));

    assert!(
        matches!(Reducer::new(&group, &[], &buffers, ReducerOptions::default()), Err(error) if error.kind() == ErrorKind::InvalidArgument)
    );
    let (parameters, buffers) = plain();
    Reducer::new(&group, &parameters, &buffers, ReducerOptions::default()).unwrap();
    group.barrier().unwrap();
});
