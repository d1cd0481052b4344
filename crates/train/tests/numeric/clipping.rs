//! Clipping: PyTorch's values in float64.

use brigade_data::{DataLoader, TensorDataset};
use brigade_test_device::{numeric_device, on_device, tolerance};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{NamedTensor, Result};
use brigade_train::{Accelerator, ClipNorm, TrainError};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::{device, net};

fn accelerator() -> Accelerator {
    device::builder().build().unwrap()
}

/// Parameters whose gradients are the given values: those of `(parameter · values).sum()`.
fn parameters(values: &[Tensor]) -> Vec<NamedTensor> {
    values
        .iter()
        .map(|values| {
            let tensor = values.zeros_like().set_requires_grad(true);
            (&tensor * values).sum(Kind::Double).backward();
            NamedTensor { name: String::new(), tensor }
        })
        .collect()
}

fn values() -> [Tensor; 2] {
    // On the CPU: a GPU's sine may have another last digit.
    let sines = |n: i64, k: f64| {
        on_device(&((Tensor::arange(n, tch::kind::DOUBLE_CPU) + 3.0 * k).sin() * 2.0))
    };
    [sines(6, 0.0).view([2, 3]), sines(4, 1.0)]
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.reshape([-1])).unwrap()
}

#[test]
fn any_norm_is_pytorchs() {
    let golden: Value = serde_json::from_str(include_str!("../golden/numerics.json")).unwrap();
    for case in golden["clipping"].as_array().unwrap() {
        let parameters = parameters(&values());
        let options = ClipNorm {
            max_norm: case["max_norm"].as_f64().unwrap(),
            norm_type: case["p"].as_f64().unwrap_or(f64::INFINITY),
            error_if_nonfinite: true,
        };
        let norm = accelerator().clip_grad_norm(&parameters, options).unwrap().unwrap();
        assert_close(
            &[norm.double_value(&[])],
            &[case["norm"].as_f64().unwrap()],
            tolerance(Kind::Double).max(1e-13),
            0.0,
        );
        for (parameter, expected) in parameters.iter().zip(case["gradients"].as_array().unwrap()) {
            let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
            assert_close(
                &flat(&parameter.tensor.grad()),
                &expected,
                tolerance(Kind::Double).max(1e-13),
                1e-15,
            );
        }
    }
}

#[test]
fn values_are_brought_within_the_limit() {
    let parameters = parameters(&values());
    accelerator().clip_grad_value(&parameters, 0.5).unwrap();
    for (parameter, value) in parameters.iter().zip(values()) {
        let expected: Vec<f64> = flat(&value).iter().map(|value| value.clamp(-0.5, 0.5)).collect();
        assert_eq!(flat(&parameter.tensor.grad()), expected);
    }
}

#[test]
fn gradients_that_are_not_finite_are_an_error_when_asked_for() {
    for wild in [f64::NAN, f64::INFINITY] {
        let parameters = parameters(&[on_device(&Tensor::from_slice(&[1.0, wild]))]);
        let strict = ClipNorm { max_norm: 1.0, norm_type: 2.0, error_if_nonfinite: true };
        let error = accelerator().clip_grad_norm(&parameters, strict).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(TrainError::GradientNorm { .. })), "{error}");
        assert_eq!(flat(&parameters[0].tensor.grad())[0], 1.0, "left as they are");
        let norm = accelerator().clip_grad_norm(&parameters, 1.0).unwrap().unwrap();
        assert!(!norm.double_value(&[]).is_finite());
    }
    for invalid in [-1.0, f64::NAN] {
        assert!(accelerator().clip_grad_norm(&parameters(&values()), invalid).is_err());
        assert!(accelerator().clip_grad_value(&parameters(&values()), invalid).is_err());
        let options = ClipNorm { max_norm: 1.0, norm_type: invalid, error_if_nonfinite: false };
        assert!(accelerator().clip_grad_norm(&parameters(&values()), options).is_err());
    }
    let nothing: Vec<NamedTensor> = Vec::new();
    let norm = accelerator().clip_grad_norm(&nothing, 1.0).unwrap().unwrap();
    assert_eq!(norm.double_value(&[]), 0.0);
}

dist_test!(world = 2, dist_clips_what_was_averaged_and_only_then, |_world: World| -> Result<()> {
    let accelerator = device::builder().gradient_accumulation_steps(2).build()?;
    let rows = Tensor::arange(40, (Kind::Double, tch::Device::Cpu)).sin().view([8, 5]);
    let loader = DataLoader::new(TensorDataset::new(rows.shallow_clone())?).batch_size(2);
    let (model, loader) = accelerator.prepare((net::model(Kind::Double), loader))?;
    let mut norms = Vec::new();
    for batch in &loader {
        let batch = batch?;
        accelerator.accumulate(&model, &batch, || {
            accelerator.backward(&model.forward(&*batch)?.square().mean(Kind::Double))?;
            norms.push(accelerator.clip_grad_norm(&model, 1e-3)?);
            Ok(())
        })?;
    }
    assert!(norms[0].is_none(), "gradients were still being added up");
    let mut plain = net::model(Kind::Double);
    plain.to_device(numeric_device())?;
    plain.forward(&on_device(&rows)).unwrap().square().mean(Kind::Double).backward();
    let gradients = plain.parameters().into_iter().map(|p| p.tensor.grad().reshape([-1]));
    let expected = Tensor::cat(&gradients.collect::<Vec<_>>(), 0).norm().double_value(&[]);
    let found = norms[1].as_ref().unwrap().double_value(&[]);
    assert_close(&[found], &[expected], tolerance(Kind::Double).max(1e-12), 0.0);
    Ok(())
});
