//! AWD-LSTM against fastai: names, outputs with given weights, steps of training, files.

mod behaviour;
mod classifier;
mod encoder;
mod files;
mod language_model;

use std::collections::BTreeMap;

use brigade_models::{AwdLstmDropout, AwdLstmOptions, LanguageModelOptions};
use brigade_nn::{LayerGroups, Model};
use brigade_test_device::{changes, numeric_device, on_device, perturb, tolerance};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::fill::fill;

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/awd_lstm.json")).unwrap()
}

/// Both kinds compute the golden float32 numbers; how far these are from the exact ones.
const CPU_NOISE: f64 = 2e-6;

/// On a real GPU cuDNN's LSTM has approximations of tanh and of the sigmoid.
fn noise() -> f64 {
    if is_real_gpu() { 1e-4 } else { CPU_NOISE }
}

fn is_real_gpu() -> bool {
    tolerance(Kind::Float) > 0.0
}

const KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

/// Gives every parameter the golden file's values.
fn filled<M>(model: &Model<M>, first_stream: u64) {
    for (stream, parameter) in (first_stream..).zip(model.parameters()) {
        let shape = parameter.tensor.size();
        let (low, high) = match shape.as_slice() {
            [_] if parameter.name.ends_with("weight") => (0.8, 1.2),
            [_] => (-0.1, 0.1),
            [_, row @ ..] => {
                let bound = (9.0 / row.iter().product::<i64>() as f64).sqrt();
                (-bound, bound)
            }
            [] => unreachable!("no parameter is a scalar"),
        };
        let values = fill(&shape, stream, low, high);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
}

/// A model on the device of the tests, with its own first values.
fn try_build<M>(
    constructor: impl FnOnce(&brigade_nn::ParamPath<'_>) -> M,
) -> brigade_torch::Result<Model<M>> {
    Model::builder().device(numeric_device()).build(constructor)
}

fn build<M>(kind: Kind, constructor: impl FnOnce(&brigade_nn::ParamPath<'_>) -> M) -> Model<M> {
    let model = Model::builder().device(numeric_device()).kind(kind).build(constructor).unwrap();
    filled(&model, 0);
    model
}

/// The sizes of all small models, and the dropouts of a golden `config`.
fn options(config: &Value) -> AwdLstmOptions {
    let number = |name: &str| config[name].as_f64().unwrap_or_else(|| panic!("{name}: {config}"));
    AwdLstmOptions {
        embedding: number("emb_sz") as i64,
        hidden: number("n_hid") as i64,
        layers: number("n_layers") as usize,
        padding: number("pad_token") as i64,
        bidirectional: config["bidir"].as_bool().unwrap(),
        dropout: AwdLstmDropout {
            embedding: number("embed_p"),
            input: number("input_p"),
            weight: number("weight_p"),
            hidden: number("hidden_p"),
            output: number("output_p"),
        },
    }
}

/// The small sizes without dropout.
fn small() -> AwdLstmOptions {
    AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::language_model() }.drop_mult(0.0)
}

fn small_language_model() -> LanguageModelOptions {
    LanguageModelOptions { encoder: small(), ..LanguageModelOptions::default() }
}

fn words(rows: &Value) -> Tensor {
    let rows: Vec<Vec<i64>> = serde_json::from_value(rows.clone()).unwrap();
    on_device(&Tensor::from_slice(&rows.concat())).view([rows.len() as i64, rows[0].len() as i64])
}

/// Document `number` of the recipe: so many words of a vocabulary of 26.
fn doc(number: i64, length: i64) -> Tensor {
    let word = |t: i64| 2 + (5 * number + 3 * t + t / 4) % 24;
    on_device(&Tensor::from_slice(&(0..length).map(word).collect::<Vec<_>>()))
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        Value::Bool(bit) => vec![f64::from(u8::from(*bit))],
        number => vec![number.as_f64().unwrap_or_else(|| panic!("{number} is not a number"))],
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn assert_close(found: &[f64], expected: &[f64], noise: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= noise * expected.abs().max(1.0),
            "{what}[{place}]: {found}, fastai has {expected}"
        );
    }
}

fn assert_tensor(found: &Tensor, expected: &Value, what: &str) {
    assert_close(&values(found), &numbers(expected), noise(), what);
}

/// A golden digest: shape, sums, and the first and last numbers.
fn assert_digest(found: &Tensor, expected: &Value, what: &str) {
    let shape: Vec<i64> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(found.size(), shape, "{what}");
    let all = values(found);
    // Rounding errors add up like a random walk; this bound assumes that all have the same sign.
    let sums = [all.iter().sum(), all.iter().map(|value| value.abs()).sum::<f64>()];
    let allowed = noise() * all.len() as f64;
    for (found, name) in sums.into_iter().zip(["sum", "abs_sum"]) {
        let expected = expected[name].as_f64().unwrap();
        assert!(
            (found - expected).abs() <= allowed,
            "{what}: {name} {found}, fastai has {expected}"
        );
    }
    let first = numbers(&expected["first"]);
    assert_close(&all[..first.len()], &first, noise(), what);
    let last = numbers(&expected["last"]);
    assert_close(&all[all.len() - last.len()..], &last, noise(), what);
}

/// Names and shapes of the state dictionary, names of the parameters, and their number.
fn assert_names<M>(model: &Model<M>, golden: &Value) {
    let expected: Vec<(String, Vec<i64>)> =
        serde_json::from_value(golden["state_dict"].clone()).unwrap();
    let state = model.state_dict();
    let found: Vec<(String, Vec<i64>)> =
        state.iter().map(|(name, tensor)| (name.to_owned(), tensor.size())).collect();
    assert_eq!(found, expected);
    if let Some(names) = golden.get("named_parameters") {
        let found: Vec<String> = model.parameters().into_iter().map(|it| it.name).collect();
        assert_eq!(found, serde_json::from_value::<Vec<String>>(names.clone()).unwrap());
    }
    if let Some(count) = golden.get("parameters") {
        assert_eq!(model.num_parameters() as u64, count.as_u64().unwrap());
    }
}

fn assert_groups<M: LayerGroups>(model: &Model<M>, expected: &Value) {
    let expected: Vec<Vec<String>> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(model.param_groups().unwrap(), expected);
}

/// What steps of training leave.
struct Trained {
    losses: Vec<f64>,
    /// The sum of absolute values of each parameter's gradient in the first step.
    gradients: BTreeMap<String, f64>,
    /// The sum and the sum of absolute values of each name of the state dictionary after the last step.
    last: BTreeMap<String, [f64; 2]>,
}

impl Trained {
    /// Makes a step for each loss that `loss` computes of the model and the step's number, with weights that are
    /// perturbed before each where a seed is given.
    fn new<M>(
        mut model: Model<M>,
        mut sgd: Sgd,
        steps: usize,
        loss: impl Fn(&Model<M>, usize) -> Tensor,
        seed: Option<u64>,
    ) -> Self {
        let absolute = |tensor: &Tensor| values(tensor).iter().map(|it| it.abs()).sum::<f64>();
        // So small that threads only wait for each other.
        tch::set_num_threads(1);
        let (mut losses, mut gradients) = (Vec::new(), BTreeMap::new());
        for step in 0..steps {
            if let Some(seed) = seed {
                let weights = model.parameters().into_iter().map(|it| it.tensor);
                perturb(weights, 1000 * seed + step as u64);
            }
            let loss = loss(&model, step);
            losses.push(loss.double_value(&[]));
            loss.backward();
            if step == 0 {
                let parameters = model.parameters().into_iter();
                gradients = parameters.map(|it| (it.name, absolute(&it.tensor.grad()))).collect();
            }
            sgd.step(&mut model);
        }
        let sums = |tensor: &Tensor| [values(tensor).iter().sum(), absolute(tensor)];
        let state = model.state_dict();
        let last = state.iter().map(|(name, it)| (name.to_owned(), sums(it))).collect();
        Self { losses, gradients, last }
    }
}

/// How many times the change in perturbed trainings is allowed: fastai's were rounded otherwise, and so are ours. On a
/// real GPU cuDNN's tanh and sigmoid are approximations, some 1e-5 off, which is forty times the perturbation.
fn times() -> f64 {
    if is_real_gpu() { 200.0 } else { 5.0 }
}

/// Compares steps of training with the golden `losses`, `first_grad_abs_sums` and `final`, within what perturbed
/// trainings show that rounding changes.
fn assert_training(expected: &Value, train: impl Fn(Option<u64>) -> Trained) {
    let ours = train(None);
    let perturbed = [train(Some(1)), train(Some(2))];
    let near = |found: f64, expected: f64, change: f64, size: f64, what: &str| {
        let allowed = times() * change + 2.0 * f64::from(f32::EPSILON) * size;
        let apart = (found - expected).abs();
        assert!(
            apart <= allowed && change <= 0.01 * size.max(1.0),
            "{what}: {found}, fastai has {expected}; {allowed} allowed, since perturbed trainings \
             are {change} apart"
        );
    };
    let losses = numbers(&expected["losses"]);
    assert_eq!(ours.losses.len(), losses.len());
    let of_losses = changes(&ours.losses, &perturbed.each_ref().map(|it| &it.losses));
    for (step, expected) in losses.iter().enumerate() {
        let what = format!("loss {step}");
        near(ours.losses[step], *expected, of_losses[step], expected.abs(), &what);
    }
    let gradients = expected["first_grad_abs_sums"].as_object().unwrap();
    assert_eq!(ours.gradients.len(), gradients.len());
    for (name, expected) in gradients {
        let (found, expected) = (ours.gradients[name], expected.as_f64().unwrap());
        let change = perturbed.iter().map(|it| (it.gradients[name] - found).abs());
        near(found, expected, change.fold(0.0, f64::max), expected, &format!("gradient of {name}"));
    }
    let last = expected["final"].as_object().unwrap();
    assert_eq!(ours.last.len(), last.len());
    for (name, expected) in last {
        let expected = numbers(expected);
        let found = ours.last[name];
        // The signs of changes of a tensor's elements vary: those of its sum may cancel.
        let change = perturbed.iter().flat_map(|run| {
            run.last[name].into_iter().zip(found).map(|(other, ours)| (other - ours).abs())
        });
        let change = change.fold(0.0, f64::max);
        for (found, sum) in found.into_iter().zip(&expected) {
            near(found, *sum, change, expected[1], &format!("final {name}"));
        }
    }
}

/// PyTorch's SGD.
struct Sgd {
    rate: f64,
    momentum: f64,
    decay: f64,
    velocities: Vec<Tensor>,
}

impl Sgd {
    fn new(options: &Value) -> Self {
        let number = |name: &str| options.get(name).map_or(0.0, |value| value.as_f64().unwrap());
        Self {
            rate: number("lr"),
            momentum: number("momentum"),
            decay: number("weight_decay"),
            velocities: Vec::new(),
        }
    }

    fn step<M>(&mut self, model: &mut Model<M>) {
        tch::no_grad(|| {
            for (place, parameter) in model.parameters().into_iter().enumerate() {
                let mut tensor = parameter.tensor;
                let gradient = tensor.grad() + &tensor * self.decay;
                let velocity = match self.velocities.get(place) {
                    Some(velocity) => velocity * self.momentum + gradient,
                    None => gradient,
                };
                let _ = tensor.g_add_(&(&velocity * -self.rate));
                if place < self.velocities.len() {
                    self.velocities[place] = velocity;
                } else {
                    self.velocities.push(velocity);
                }
            }
        });
        model.zero_grad().unwrap();
    }
}

/// Of each group: how many parameters, the first, the last.
fn assert_group_ends<M: LayerGroups>(model: &Model<M>, expected: &Value) {
    let expected: Vec<(usize, String, String)> = serde_json::from_value(expected.clone()).unwrap();
    let groups = model.param_groups().unwrap();
    let ends =
        groups.iter().map(|group| (group.len(), group[0].clone(), group[group.len() - 1].clone()));
    assert_eq!(ends.collect::<Vec<_>>(), expected);
}
