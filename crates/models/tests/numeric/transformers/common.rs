//! The golden files and their inputs.

use brigade_models::{Tokens, TransformerOptions};
use brigade_nn::{Model, ModelBuilder, ParamPath};
use brigade_test_device::{numeric_device, on_device, tolerance};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::fill::fill;

/// Golden numbers are of 32 bits.
pub(crate) const TOLERANCE: f64 = 2e-5;

pub(crate) fn golden() -> Value {
    serde_json::from_str(include_str!("../../golden/transformers.json")).unwrap()
}

pub(crate) fn more() -> Value {
    serde_json::from_str(include_str!("../../golden/transformers_more.json")).unwrap()
}

pub(crate) fn options<O: TransformerOptions>(case: &Value) -> O {
    O::from_config(case["config"].as_object().unwrap().clone()).unwrap()
}

pub(crate) fn builder() -> ModelBuilder {
    Model::builder().device(numeric_device())
}

/// A model of a golden file's sizes and weights.
pub(crate) fn filled<M, O: TransformerOptions>(
    case: &Value,
    kind: Kind,
    new: impl FnOnce(&ParamPath<'_>, &O) -> M,
) -> Model<M> {
    let options = options::<O>(case);
    let mut model = builder().kind(kind).build(|path| new(path, &options)).unwrap();
    fill_all(&model);
    model.eval();
    model
}

pub(crate) fn fill_all<M>(model: &Model<M>) {
    for (stream, parameter) in (0..).zip(model.parameters()) {
        let shape = parameter.tensor.size();
        let (low, high) = match shape.as_slice() {
            [_] if parameter.name.ends_with("weight") => (0.8, 1.2),
            [_] => (-0.1, 0.1),
            shape => {
                let bound = (3.0 / shape[1..].iter().product::<i64>() as f64).sqrt();
                (-bound, bound)
            }
        };
        let values = fill(&shape, stream, low, high);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
}

pub(crate) const LENGTHS: [i64; 3] = [9, 6, 4];

/// The ids `[3, 9]`, and masks that hide the ends or the beginnings of the rows.
pub(crate) struct Inputs {
    pub(crate) ids: Tensor,
    pub(crate) right: Tensor,
    pub(crate) left: Tensor,
    pub(crate) types: Tensor,
}

impl Inputs {
    pub(crate) fn new() -> Self {
        let ids = [
            [35i64, 2, 37, 40, 10, 2, 38, 40, 22],
            [32, 28, 22, 43, 20, 5, 21, 17, 42],
            [37, 49, 47, 47, 5, 17, 39, 28, 8],
        ];
        let right: Vec<i64> =
            LENGTHS.iter().flat_map(|&n| (0..9).map(move |place| i64::from(place < n))).collect();
        let right = on_device(&Tensor::from_slice(&right).view([3, 9]));
        Self {
            ids: on_device(&Tensor::from_slice(&ids.concat()).view([3, 9])),
            left: right.flip([1]),
            right,
            types: on_device(&Tensor::from_slice(&[0i64, 0, 0, 0, 1, 1, 1, 1, 1])).repeat([3, 1]),
        }
    }

    pub(crate) fn right(&self) -> Tokens<'_> {
        (&self.ids, &self.right).into()
    }

    pub(crate) fn left(&self) -> Tokens<'_> {
        (&self.ids, &self.left).into()
    }

    pub(crate) fn pair(&self) -> Tokens<'_> {
        (&self.ids, &self.right, &self.types).into()
    }

    /// The ids, with −100 at padding.
    pub(crate) fn causal_labels(&self) -> Tensor {
        self.ids.masked_fill(&self.right.eq(0), -100)
    }
}

/// Numbers of a nested list, flattened.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        value => vec![value.as_f64().unwrap()],
    }
}

pub(crate) fn flat(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).contiguous().view([-1])).unwrap()
}

/// Says that two rows of numbers agree, relative to the largest: on a real GPU at least as closely as sums of float32 do.
#[track_caller]
pub(crate) fn close(what: &str, found: &[f64], expected: &[f64], on_the_cpu: f64) {
    let tolerance = on_the_cpu.max(tolerance(Kind::Float));
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f64, |max, value| max.max(value.abs()));
    let worst =
        found.iter().zip(expected).map(|(left, right)| (left - right).abs()).fold(0f64, f64::max);
    assert!(worst <= tolerance * largest, "{what}: {worst} off, the largest is {largest}");
}

/// A golden digest: shape, sums, first and last numbers.
#[track_caller]
pub(crate) fn matches_digest(what: &str, found: &Tensor, digest: &Value) {
    assert_eq!(serde_json::json!(found.size()), digest["shape"], "{what}");
    let all = flat(found);
    let magnitude = digest["abs_sum"].as_f64().unwrap();
    let sum: f64 = all.iter().sum();
    assert!((sum - digest["sum"].as_f64().unwrap()).abs() < TOLERANCE * magnitude, "{what}: {sum}");
    let sum: f64 = all.iter().map(|value| value.abs()).sum();
    assert!((sum - magnitude).abs() < TOLERANCE * magnitude, "{what}: {sum} of {magnitude}");
    let (first, last) = (numbers(&digest["first"]), numbers(&digest["last"]));
    close(what, &all[..first.len()], &first, 1e-4);
    close(what, &all[all.len() - last.len()..], &last, 1e-4);
}

/// The rows `[tokens, width]` of what is attended.
pub(crate) fn attended(output: &Tensor, mask: &Tensor) -> Tensor {
    output.flatten(0, 1).index_select(0, &mask.flatten(0, 1).nonzero().squeeze_dim(-1))
}

/// Gradients as sums of absolute values. Those that are 0 but for rounding are compared with `floor`.
#[track_caller]
pub(crate) fn gradients_match<M>(model: &Model<M>, expected: &Value) {
    const FLOOR: f64 = 1e-5;
    let expected = expected.as_object().unwrap();
    let parameters = model.parameters();
    assert_eq!(parameters.len(), expected.len());
    for parameter in parameters {
        let found = parameter.tensor.grad().abs().sum(Kind::Double).double_value(&[]);
        let sum = expected[&parameter.name].as_f64().unwrap();
        let off = (found - sum).abs();
        assert!(off < 1e-4 * sum + FLOOR, "{}: {found}, expected {sum}", parameter.name);
    }
}

/// Names and shapes of all weights, and names of parameters.
#[track_caller]
pub(crate) fn names_match<M>(model: &Model<M>, case: &Value) {
    let state: Vec<_> =
        model.state_dict().iter().map(|(name, it)| serde_json::json!([name, it.size()])).collect();
    let buffers = ["position_ids", "token_type_ids"];
    let theirs = case["state_dict"].as_array().unwrap().iter().filter(|entry| {
        let name = entry[0].as_str().unwrap();
        !buffers.iter().any(|buffer| name.ends_with(buffer))
    });
    assert_eq!(Value::Array(state), Value::Array(theirs.cloned().collect()));
    let names: Vec<_> = model.parameters().into_iter().map(|it| it.name).collect();
    assert_eq!(serde_json::json!(names), case["named_parameters"]);
    assert_eq!(model.num_parameters() as u64, case["parameters"].as_u64().unwrap());
}
