//! The optimizers against torch.optim: golden/optimizers.json, six steps on tensors that both sides fill
//! by a formula.

#![allow(clippy::unwrap_used)] // also in what the tests share

use brigade_models::{Init, Model, Path};
use brigade_testkit::assert_close;
use brigade_train::{Adam, Optimizer, Result, Sgd, Tensor};
use serde_json::Value;

/// `golden/optimizers.json`'s fill: float32 of `scale * sin(0.37 i + 1.7 j)`.
fn fill(shape: &[i64], number: i64, scale: f64) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i| (scale * (0.37 * i as f64 + 1.7 * number as f64).sin()) as f32)
        .collect();
    Tensor::from_slice(&values).reshape(shape)
}

const SHAPES: [&[i64]; 3] = [&[4, 3], &[7], &[2, 3, 3, 3]];

struct Parameters(Vec<Tensor>);

impl Parameters {
    fn new(path: &Path<'_>) -> Self {
        Self(
            SHAPES
                .iter()
                .enumerate()
                .map(|(number, shape)| {
                    let parameter = path.parameter(&format!("p{number}"), shape, Init::Zeros);
                    tch::no_grad(|| {
                        parameter.shallow_clone().copy_(&fill(shape, number as i64, 0.5));
                    });
                    parameter
                })
                .collect(),
        )
    }
}

fn follows(case: &str, build: impl Fn(&Model<Parameters>) -> Result<Optimizer>) {
    let golden: Value = serde_json::from_str(include_str!("golden/optimizers.json")).unwrap();
    let expected = &golden["cases"][case]["params"];
    let model = Model::new(Parameters::new).unwrap();
    let mut optimizer = build(&model).unwrap();
    for step in 0..6 {
        optimizer.zero_grad().unwrap();
        // The gradient of sum(p * g) is g.
        let loss: Tensor = model
            .module()
            .0
            .iter()
            .enumerate()
            .map(|(number, parameter)| {
                let gradient = fill(SHAPES[number], number as i64 + 10 * (step + 1), 0.3);
                (parameter * gradient).sum(tch::Kind::Float)
            })
            .sum();
        loss.backward();
        optimizer.step().unwrap();
    }
    for (number, parameter) in model.module().0.iter().enumerate() {
        let expected: Vec<f64> =
            expected[number].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let found: Vec<f64> =
            Vec::<f64>::try_from(parameter.detach().to_kind(tch::Kind::Double).reshape([-1]))
                .unwrap();
        assert_close(&found, &expected, 2e-6, 2e-7);
    }
}

#[test]
fn sgd() {
    follows("sgd", |model| Sgd::new(0.1).build(model));
}

#[test]
fn sgd_with_momentum_and_weight_decay() {
    follows("sgd_momentum_wd", |model| {
        Sgd::new(0.1).momentum(0.9).weight_decay(0.0005).build(model)
    });
}

#[test]
fn sgd_with_nesterovs_momentum() {
    follows("sgd_nesterov", |model| Sgd::new(0.1).momentum(0.9).nesterov(true).build(model));
}

#[test]
fn sgd_with_dampening() {
    follows("sgd_dampening", |model| Sgd::new(0.1).momentum(0.9).dampening(0.1).build(model));
}

#[test]
fn adam() {
    follows("adam", |model| Adam::default().lr(0.005).build(model));
}

#[test]
fn adam_with_amsgrad_and_weight_decay() {
    follows("adam_wd_amsgrad", |model| {
        Adam::default().lr(0.005).weight_decay(0.01).amsgrad(true).build(model)
    });
}

#[test]
fn adamw() {
    follows("adamw", |model| {
        Adam::decoupled().lr(0.005).betas(0.9, 0.95).eps(1e-7).weight_decay(0.1).build(model)
    });
}

#[test]
fn a_parameter_without_a_gradient_stays_and_a_late_one_starts_afresh() {
    let model = Model::new(Parameters::new).unwrap();
    let mut optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
    let parameters = &model.module().0;
    let before = parameters[1].detach().copy();
    for late in [false, true] {
        optimizer.zero_grad().unwrap();
        let mut loss = parameters[0].sum(tch::Kind::Float);
        if late {
            loss += parameters[1].sum(tch::Kind::Float);
        }
        loss.backward();
        optimizer.step().unwrap();
        if !late {
            assert_eq!(parameters[1].detach(), before);
        }
    }
    // Its first step with momentum is a plain one.
    assert!(parameters[1].detach().allclose(&(before - 0.1), 1e-6, 1e-7, false));
}

#[test]
fn slips_are_refused() {
    let model = Model::new(Parameters::new).unwrap();
    for error in [
        Sgd::new(-0.1).build(&model).unwrap_err(),
        Sgd::new(f64::NAN).build(&model).unwrap_err(),
        Sgd::new(0.1).nesterov(true).build(&model).unwrap_err(),
        Adam::default().betas(0.9, 1.0).build(&model).unwrap_err(),
    ] {
        assert!(!error.to_string().is_empty());
    }
    let frozen = Model::new(|_: &Path<'_>| ()).unwrap();
    let text = Adam::default().build(&frozen).unwrap_err().to_string();
    assert!(text.contains("this model has none"), "{text}");
}
