//! Parameters and gradients filled by the formula of the golden files, and steps along them.

use brigade_nn::{Init, Model, ParamPath};
use brigade_optim::{Optimizer, OptimizerSettings, Overrides};
use brigade_test_device::{numeric_device, on_device};
use brigade_testkit::assert_close;
use brigade_torch::Result;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// float32 of `scale * sin(0.37 i + 1.7 j)`.
pub(crate) fn fill(shape: &[i64], number: i64, scale: f64, kind: Kind) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i| (scale * (0.37 * i as f64 + 1.7 * number as f64).sin()) as f32)
        .collect();
    on_device(&Tensor::from_slice(&values).to_kind(kind).reshape(shape))
}

pub(crate) const SHAPES: [&[i64]; 3] = [&[4, 3], &[7], &[2, 3, 3, 3]];
pub(crate) const MATRICES: [&[i64]; 2] = [&[4, 3], &[3, 8]];

pub(crate) struct Filled(pub(crate) Vec<Tensor>);

/// `p0`, `p1`, … of these shapes.
pub(crate) fn model_of(shapes: &[&[i64]], kind: Kind) -> Model<Filled> {
    model_on(numeric_device(), shapes, kind)
}

pub(crate) fn model_on(device: Device, shapes: &[&[i64]], kind: Kind) -> Model<Filled> {
    let constructor = |path: &ParamPath<'_>| {
        let parameter = |(number, shape): (usize, &&[i64])| {
            let parameter = path.parameter(&format!("p{number}"), shape, Init::Zeros);
            let values = fill(shape, number as i64, 0.5, kind);
            tch::no_grad(|| parameter.shallow_clone().copy_(&values));
            parameter
        };
        Filled(shapes.iter().enumerate().map(parameter).collect())
    };
    Model::builder().kind(kind).device(device).build(constructor).unwrap()
}

pub(crate) fn model() -> Model<Filled> {
    model_of(&SHAPES, Kind::Float)
}

/// Takes the golden files' steps of these numbers.
pub(crate) fn take(model: &Model<Filled>, optimizer: &mut Optimizer, steps: std::ops::Range<i64>) {
    for step in steps {
        optimizer.zero_grad().unwrap();
        backward(model, step, 1.0, None);
        optimizer.step().unwrap();
    }
}

/// Makes the golden files' gradients of a step, times `scale`, but for one parameter.
pub(crate) fn backward(model: &Model<Filled>, step: i64, scale: f64, without: Option<usize>) {
    // The gradient of sum(p * g) is g.
    let all = model.module().0.iter().enumerate().filter(|(number, _)| Some(*number) != without);
    let terms = all.map(|(number, parameter)| {
        let number = number as i64 + 10 * (step + 1);
        let gradient = fill(&parameter.size(), number, 0.3, parameter.kind());
        let gradient = gradient.to_device(parameter.device());
        (parameter * gradient).sum(Kind::Double) * scale
    });
    terms.sum::<Tensor>().backward();
}

pub(crate) fn values(model: &Model<Filled>) -> Vec<Vec<f64>> {
    let values = |tensor: &Tensor| {
        Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
    };
    model.module().0.iter().map(values).collect()
}

pub(crate) fn numbers(values: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(values.clone()).unwrap()
}

pub(crate) fn assert_all_close(
    found: &[Vec<f64>],
    expected: &[Vec<f64>],
    relative: f64,
    absolute: f64,
) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_close(found, expected, relative, absolute);
    }
}

pub(crate) fn torch_golden() -> Value {
    serde_json::from_str(include_str!("../golden/torch_optimizers.json")).unwrap()
}

/// Builds an optimizer of all parameters, or of the matrices if it takes nothing else.
pub(crate) fn build_any(
    settings: &dyn OptimizerSettings,
    model: &Model<Filled>,
) -> Result<Optimizer> {
    let mut parameters = model.trainable_parameters();
    if settings.build_with(&parameters, Overrides::default()).is_err() {
        parameters.retain(|parameter| parameter.tensor.dim() == 2);
    }
    settings.build_with(&parameters, Overrides::default())
}
