//! State saved and loaded: a run that goes on from it is the run that was not stopped, bit for bit.

use brigade_nn::Model;
use brigade_optim::{
    Adafactor, Adagrad, Adam, AdamW, Group, Lars, Lookahead, Muon, Optimizer, RAdam, RmsProp, Sgd,
    StateMismatch, all_optimizers,
};
use brigade_torch::Result;

use tch::{Kind, Tensor};

use crate::filled::{Filled, MATRICES, SHAPES, build_any, model, model_of, take, values};

type Build = fn(&Model<Filled>) -> Result<Optimizer>;

/// Kinds of states beyond those of [`all_optimizers`].
const KINDS: [(&str, Build); 9] = [
    ("sgd", |m| Sgd::new(0.1).build(m)),
    ("adam with amsgrad", |m| Adam::default().amsgrad(true).build(m)),
    ("adamw in groups", |m| {
        AdamW::default().group(Group::matching("p1").lr(0.1).weight_decay(0.0)).build(m)
    }),
    ("rmsprop, all on", |m| RmsProp::default().centered(true).momentum(0.9).build(m)),
    ("adagrad", |m| Adagrad::default().lr_decay(0.1).initial_accumulator_value(0.1).build(m)),
    ("radam", |m| RAdam::default().betas(0.9, 0.9).build(m)),
    ("ranger", |m| RAdam::ranger().build(m)),
    ("sgd with lookahead", |m| Sgd::new(0.1).lookahead(Lookahead::default().every(4)).build(m)),
    ("larc", |m| Lars::larc(0.1).build(m)),
];

fn resumes(
    name: &str,
    shapes: &[&[i64]],
    kind: Kind,
    build: impl Fn(&Model<Filled>) -> Result<Optimizer>,
) {
    let whole = model_of(shapes, kind);
    let mut optimizer = build(&whole).unwrap();
    take(&whole, &mut optimizer, 0..10);
    let expected = values(&whole);

    for stop in [0, 1, 4, 7] {
        let first = model_of(shapes, kind);
        let mut optimizer = build(&first).unwrap();
        take(&first, &mut optimizer, 0..stop);
        let state = optimizer.state_dict().unwrap().deep_clone().unwrap();

        let mut second = model_of(shapes, kind);
        second.load_state_dict(&first.state_dict()).unwrap();
        let mut optimizer = build(&second).unwrap();
        optimizer.load_state_dict(&state).unwrap();
        assert_eq!(optimizer.steps(), stop as u64);
        take(&second, &mut optimizer, stop..10);
        assert_eq!(values(&second), expected, "{name}, {kind:?}, stopped at {stop}");
    }
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    for (name, build) in KINDS {
        for kind in [Kind::Float, Kind::Double] {
            resumes(name, &SHAPES, kind, build);
        }
    }
    for (name, settings) in all_optimizers() {
        for kind in [Kind::Float, Kind::Double] {
            resumes(name, &SHAPES, kind, |model| build_any(&*settings, model));
        }
    }
    resumes("muon", &MATRICES, Kind::Float, |m| Muon::default().build(m));
}

#[test]
fn names_are_pytorchs() {
    let names = |build: Build| -> Vec<String> {
        let model = model();
        let mut optimizer = build(&model).unwrap();
        take(&model, &mut optimizer, 0..1);
        let state = optimizer.state_dict().unwrap();
        state.parameters[0].tensors.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(
        names(|m| Adam::default().amsgrad(true).build(m)),
        ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    );
    assert_eq!(names(|m| Sgd::new(0.1).momentum(0.9).build(m)), ["momentum_buffer"]);
    assert_eq!(
        names(|m| RmsProp::default().centered(true).momentum(0.9).build(m)),
        ["step", "square_avg", "grad_avg", "momentum_buffer"]
    );
    assert_eq!(names(|m| Adagrad::default().build(m)), ["step", "sum"]);
    assert_eq!(names(|m| Adafactor::default().build(m)), ["step", "row_var", "col_var"]);
}

/// A state after three steps.
fn saved(build: Build) -> brigade_optim::OptimizerState {
    let model = model();
    let mut optimizer = build(&model).unwrap();
    take(&model, &mut optimizer, 0..3);
    optimizer.state_dict().unwrap()
}

#[test]
fn mismatched_states_are_named_and_change_nothing() {
    let adam: Build = |m| Adam::default().build(m);
    type Corrupt = fn(&mut brigade_optim::OptimizerState);
    let faults: [(&str, Corrupt); 9] = [
        ("is of SGD, but this optimizer is Adam", |s| s.kind = "SGD".to_owned()),
        ("parameter 1 of the model is `other`", |s| s.parameters[1].name = "other".into()),
        ("parameter 2 of the model is none", |s| drop(s.parameters.pop())),
        ("has 2 parameter groups, but this optimizer has 1", |s| {
            s.groups.push(s.groups[0].clone());
        }),
        ("eps = 0.1 in group 0", |s| *s.groups[0].numbers.get_mut("eps").unwrap() = 0.1),
        ("lr = NaN in group 0", |s| *s.groups[0].numbers.get_mut("lr").unwrap() = f64::NAN),
        ("p2 lacks `exp_avg_sq`", |s| drop(s.parameters[2].tensors.pop())),
        ("p2 has `slow`", |s| s.parameters[2].tensors.push(("slow".to_owned(), Tensor::from(1.0)))),
        ("`exp_avg` of p2 has shape [3]", |s| {
            s.parameters[2].tensors[1].1 = Tensor::from_slice(&[1.0, 2.0, 3.0]);
        }),
    ];
    for (named, spoil) in faults {
        let mut state = saved(adam);
        spoil(&mut state);

        let (model, untouched) = (model(), model());
        let mut optimizer = adam(&model).unwrap();
        take(&model, &mut optimizer, 0..2);
        let error = optimizer.load_state_dict(&state).unwrap_err();
        assert!(error.downcast_ref::<StateMismatch>().is_some(), "{error:?}");
        assert!(error.to_string().contains(named), "{error}");
        take(&model, &mut optimizer, 2..4);

        let mut reference = adam(&untouched).unwrap();
        take(&untouched, &mut reference, 0..4);
        assert_eq!(values(&model), values(&untouched), "after: {error}");
    }
}

#[test]
fn a_step_that_is_not_a_count_is_refused() {
    let mut state = saved(|m| Adam::default().build(m));
    state.parameters[0].tensors[0].1 = Tensor::from(-1f32);
    let model = model();
    let error = Adam::default().build(&model).unwrap().load_state_dict(&state).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(StateMismatch::Step { found, .. }) if *found == -1.0),
        "{error}"
    );
}

#[test]
fn learning_rates_come_from_the_state() {
    let model = model();
    let build: Build = |m| Sgd::new(0.1).group(Group::matching("p1").lr(0.3)).build(m);
    let mut first = build(&model).unwrap();
    first.set_lr(0.05).unwrap();
    let mut second = build(&model).unwrap();
    second.load_state_dict(&first.state_dict().unwrap()).unwrap();
    assert_eq!(second.groups(), first.groups());
    assert_eq!(second.lr(), 0.05);
}

#[test]
fn state_follows_another_memory_format() {
    let (plain, other) = (model(), model());
    let build: Build = |m| Adam::default().lr(0.1).build(m);
    let (mut a, mut b) = (build(&plain).unwrap(), build(&other).unwrap());
    take(&plain, &mut a, 0..2);
    take(&other, &mut b, 0..2);
    // As channels_last would: the same numbers in another order of memory.
    let mut parameter = other.module().0[2].shallow_clone();
    let last = parameter.detach().permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
    parameter.set_data(&last);
    assert_ne!(parameter.stride(), plain.module().0[2].stride());
    take(&plain, &mut a, 2..5);
    take(&other, &mut b, 2..5);
    assert_eq!(values(&plain), values(&other));
}
