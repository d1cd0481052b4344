//! The recipe of the golden file: its models, data, metrics, losses, optimizers and callbacks, of a run's JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::callback::Callback;
use brigade_learn::callbacks::{
    CsvLog, CutMix, EarlyStopping, GradientAccumulation, GradientClip, MixDraw, MixSource, MixUp,
    NormFreeze, ParamScheduler, ReduceLrOnPlateau, SaveModel, ShortEpoch, TerminateOnNan,
};
use brigade_learn::loss::{BceWithLogits, CrossEntropy, Focal, LabelSmoothingCrossEntropy, Loss};
use brigade_learn::{Hyper, Learner, Loaders, Rates};
use brigade_metrics::{
    Accuracy, AccuracyMulti, ErrorRate, Fold, Folded, Mae, Metric, Mse, R2, Rmse, TopK,
};
use brigade_nn::{
    BatchNorm1d, BatchNorm2d, Conv2d, Conv2dOptions, Flatten, Linear, LinearOptions, ParamPath,
    Relu, Sequential,
};
use brigade_optim::{Adam, AdamW, Lamb, Lars, QHAdam, RAdam, RmsProp, Sgd};
use brigade_schedule::Annealing;
use brigade_torch::Result;
use brigade_train::Accelerator;
use serde_json::Value;
use tch::Tensor;

use crate::fill::{u, uniform, uniform_tensor};

const FEATURES: i64 = 6;
const HIDDEN: i64 = 16;
const CLASSES: i64 = 3;
const BATCH: usize = 8;
const IMAGE: [i64; 3] = [2, 8, 8];

fn mlp(path: &ParamPath<'_>, outputs: i64) -> Sequential {
    let without_bias = LinearOptions { bias: false };
    Sequential::new()
        .add(Linear::with_options(path / 0, FEATURES, HIDDEN, without_bias))
        .add(BatchNorm1d::new(path / 1, HIDDEN))
        .add(Relu)
        .add(Linear::new(path / 3, HIDDEN, outputs))
}

fn conv(path: &ParamPath<'_>) -> Sequential {
    let block = |index: usize, inputs: i64, outputs: i64, stride: i64| {
        let path = path / index;
        let options = Conv2dOptions {
            stride: [stride; 2],
            padding: [1, 1],
            bias: false,
            ..Conv2dOptions::default()
        };
        Sequential::new()
            .add(Conv2d::new(&path / 0, inputs, outputs, [3, 3], options))
            .add(BatchNorm2d::new(&path / 1, outputs))
            .add(Relu)
    };
    let head = path / 2;
    Sequential::new().add(block(0, IMAGE[0], 4, 1)).add(block(1, 4, 8, 2)).add(
        Sequential::new()
            .add_fn(|maps| maps.adaptive_avg_pool2d([1, 1]))
            .add(Flatten)
            .add(Linear::new(&head / 2, 8, CLASSES)),
    )
}

/// Sets a model's weights to the golden ones.
fn fill_weights(learner: &Learner) {
    let _without_autograd = tch::no_grad_guard();
    for (stream, it) in learner.parameters().into_iter().enumerate() {
        let size = it.tensor.size();
        let stream = stream as u64;
        let values = match size.as_slice() {
            [_] if it.name.ends_with("bias") => uniform_tensor(&size, -0.1, 0.1, stream),
            [_] => uniform_tensor(&size, 0.8, 1.2, stream),
            [_, row @ ..] => {
                let bound = (6.0 / row.iter().product::<i64>() as f64).sqrt();
                uniform_tensor(&size, -bound, bound, stream)
            }
            [] => panic!("{} is a number", it.name),
        };
        it.tensor.shallow_clone().copy_(&values);
    }
}

/// Inputs and targets of a data set of the recipe.
pub(crate) fn data(kind: &str, training: bool) -> (Tensor, Tensor) {
    let rows = if training { 70 } else { 22 };
    let stream = match kind {
        "image" => 1020,
        "regression" => 1040,
        _ => 1000,
    } + if training { 0 } else { 10 };
    let class = |row: i64| (CLASSES as f64 * u(row as u64, stream + 1)).floor() as i64;
    let width = if kind == "image" { IMAGE.iter().product() } else { FEATURES };
    let input = |row: i64, at: i64| {
        let plus = match kind {
            "image" => (at / IMAGE[2] % IMAGE[1] + at % IMAGE[2]) % CLASSES == class(row),
            "regression" => false,
            _ => at % CLASSES == class(row),
        };
        let drawn = 2.0 * u((row * width + at) as u64, stream) - 1.0;
        (drawn + if plus { 0.7 } else { 0.0 }) as f32
    };
    let values: Vec<f32> = (0..rows)
        .flat_map(|row| (0..width).map(move |at| (row, at)))
        .map(|(r, a)| input(r, a))
        .collect();
    let inputs = Tensor::from_slice(&values).view([rows, width]);
    let inputs =
        if kind == "image" { inputs.view([rows, IMAGE[0], IMAGE[1], IMAGE[2]]) } else { inputs };
    if kind == "nan" && training {
        let _ = inputs.get(33).get(0).fill_(f64::NAN);
    }
    let classes: Vec<i64> = (0..rows).map(class).collect();
    let targets = match kind {
        "regression" => {
            let target = |row: i64| {
                let drawn = (2.0 * u(row as u64, stream + 1) - 1.0) * 0.5;
                (drawn + f64::from(input(row, 0)) - 0.5 * f64::from(input(row, 1))) as f32
            };
            Tensor::from_slice(&(0..rows).map(target).collect::<Vec<f32>>()).view([rows, 1])
        }
        "onehot" => Tensor::from_slice(&classes).one_hot(CLASSES).to_kind(tch::Kind::Float),
        _ => Tensor::from_slice(&classes),
    };
    (inputs, targets)
}

/// Makes loaders of two sets of tensors, in order, with the last batch kept.
pub(crate) fn loaders(train: (Tensor, Tensor), valid: (Tensor, Tensor), batch: usize) -> Loaders {
    let loader = |data| DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(batch);
    Loaders::new(loader(train), loader(valid)).unwrap()
}

/// Makes a Learner of the recipe, with its weights.
pub(crate) fn learner_of(model: &str, loaders: Loaders) -> Learner {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let learner = match model {
        "mlp" => Learner::new(&accelerator, loaders, |path: &ParamPath<'_>| mlp(path, CLASSES)),
        "mlp1" => Learner::new(&accelerator, loaders, |path: &ParamPath<'_>| mlp(path, 1)),
        "conv" => Learner::new(&accelerator, loaders, conv),
        other => panic!("model {other}"),
    };
    let learner = learner.unwrap().quiet(true);
    fill_weights(&learner);
    learner
}

/// Divides the parameters as the recipe's `groups` say: by children of the model.
pub(crate) fn split(learner: Learner, model: &str, groups: &str) -> Learner {
    let split = match (groups, model) {
        ("one", _) => return learner,
        ("two", "conv") => learner.split_by_prefix(&[&["0", "1"], &["2"]]),
        ("two", _) => learner.split_by_prefix(&[&["0", "1"], &["3"]]),
        ("three", "conv") => learner.split_by_prefix(&[&["0"], &["1"], &["2"]]),
        ("three", _) => learner.split_by_prefix(&[&["0"], &["1"], &["3"]]),
        (other, _) => panic!("groups {other}"),
    };
    split.unwrap()
}

/// A metric that is a list: its value in each epoch.
#[derive(Debug)]
struct Sequence {
    name: String,
    values: Vec<f64>,
    epoch: Arc<AtomicUsize>,
}

impl Metric for Sequence {
    type Value = f64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, _predictions: &Tensor, _targets: &Tensor) -> Result<Fold> {
        Ok(Fold::Sums(Tensor::from_slice(&[0f64])))
    }

    fn value(&self, _folded: &Folded) -> Result<f64> {
        Ok(self.values[self.epoch.load(Ordering::Relaxed)])
    }
}

/// A name and its arguments: `"name"` or `["name", {…}]`.
fn named(value: &Value) -> (&str, &Value) {
    match value {
        Value::Array(parts) => (parts[0].as_str().unwrap(), &parts[1]),
        name => (name.as_str().unwrap(), &Value::Null),
    }
}

pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

/// A number of the golden file, where those that JSON lacks are words.
pub(crate) fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some("NaN") => f64::NAN,
        Some("Infinity") => f64::INFINITY,
        Some("-Infinity") => f64::NEG_INFINITY,
        _ => value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}")),
    }
}

fn metric(value: &Value, epoch: &Arc<AtomicUsize>) -> Arc<dyn Metric<Value = f64>> {
    let (name, args) = named(value);
    match name {
        "accuracy" => Arc::new(Accuracy),
        "error_rate" => Arc::new(ErrorRate),
        "top_k_accuracy" => Arc::new(TopK(args["k"].as_i64().unwrap())),
        "accuracy_multi" => Arc::new(AccuracyMulti::new()),
        "mse" => Arc::new(Mse),
        "mae" => Arc::new(Mae),
        "rmse" => Arc::new(Rmse),
        "R2Score" => Arc::new(R2),
        "sequence" => Arc::new(Sequence {
            name: args["name"].as_str().unwrap().to_owned(),
            values: numbers(&args["values"]),
            epoch: Arc::clone(epoch),
        }),
        other => panic!("metric {other}"),
    }
}

fn with_loss(learner: Learner, value: &Value) -> Learner {
    fn set(learner: Learner, loss: impl Loss + 'static) -> Learner {
        learner.loss(loss)
    }
    let (name, args) = named(value);
    match name {
        "CrossEntropyLoss" => set(learner, CrossEntropy::default()),
        "LabelSmoothingCrossEntropyFlat" | "LabelSmoothingCrossEntropy" => {
            let eps = args["eps"].as_f64().unwrap_or(0.1);
            set(learner, LabelSmoothingCrossEntropy::new(eps))
        }
        "FocalLossFlat" => set(learner, Focal::new(args["gamma"].as_f64().unwrap())),
        "BCEWithLogitsLossFlat" => set(learner, BceWithLogits::default()),
        "MSELossFlat" => set(learner, Mse),
        other => panic!("loss {other}"),
    }
}

fn with_optimizer(learner: Learner, value: &Value) -> Learner {
    let (name, args) = named(value);
    let lr = args["lr"].as_f64().unwrap_or(1e-3);
    let number = |name: &str, default: f64| args[name].as_f64().unwrap_or(default);
    let decoupled = args["decouple_wd"].as_bool().unwrap_or(true);
    match name {
        "Adam" if decoupled => learner.optimizer(AdamW::fastai()),
        "Adam" => {
            let adam = Adam::default().betas(0.9, 0.99).eps(1e-5);
            learner.optimizer(adam.weight_decay(number("wd", 0.01)))
        }
        "SGD" => {
            let sgd = Sgd::new(lr).momentum(number("mom", 0.0)).weight_decay(number("wd", 0.0));
            learner.optimizer(sgd.decoupled_weight_decay(decoupled))
        }
        "RMSProp" => {
            let rms = RmsProp::default().momentum(number("mom", 0.0)).momentum_of_gradient(true);
            learner.optimizer(rms.decoupled_weight_decay(true))
        }
        "RAdam" => learner.optimizer(RAdam::fastai()),
        "QHAdam" => learner.optimizer(QHAdam::default()),
        "Lamb" => learner.optimizer(Lamb::default()),
        "Larc" => learner.optimizer(Lars::larc(lr)),
        "ranger" => learner.optimizer(RAdam::ranger()),
        // A wrapped optimizer of torch decays norms and biases as well.
        "OptimWrapper" => match args["opt"].as_str().unwrap() {
            "AdamW" => learner
                .optimizer(AdamW::default().weight_decay(number("weight_decay", 0.01)))
                .decay_norms_and_biases(true),
            "Adam" => learner.optimizer(Adam::default()).decay_norms_and_biases(true),
            "SGD" => learner
                .optimizer(Sgd::new(lr).momentum(number("momentum", 0.0)))
                .decay_norms_and_biases(true),
            other => panic!("torch optimizer {other}"),
        },
        other => panic!("optimizer {other}"),
    }
}

/// A schedule of the golden file.
pub(crate) fn annealing(value: &Value) -> Annealing {
    let parts = value.as_array().unwrap();
    let at = |index: usize| number(&parts[index]);
    match parts[0].as_str().unwrap() {
        "SchedLin" => Annealing::linear(at(1), at(2)),
        "SchedCos" => Annealing::cosine(at(1), at(2)),
        "SchedExp" => Annealing::exponential(at(1), at(2)),
        "SchedNo" => Annealing::Constant(at(1)),
        "SchedPoly" => Annealing::polynomial(at(1), at(2), at(3)),
        "combined_cos" => Annealing::two_cosines(at(1), [at(2), at(3), at(4)]).unwrap(),
        "combine" => {
            let each = parts[2].as_array().unwrap().iter().map(annealing);
            Annealing::combined(numbers(&parts[1]).into_iter().zip(each)).unwrap()
        }
        other => panic!("schedule {other}"),
    }
}

/// The golden file's draws for mixtures, where fastai draws at random.
#[derive(Debug)]
struct Forced;

impl MixSource for Forced {
    fn draw(&mut self, batch: usize, rows: usize, lambdas: usize, _alpha: f64) -> MixDraw {
        let batch = batch as u64;
        let lambda = uniform(0.0, 1.0, 1500 + batch, lambdas).into_iter().map(f64::from).collect();
        let rows = rows as i64;
        let partners =
            (0..rows).map(|row| (rows - 1 - row + batch as i64).rem_euclid(rows)).collect();
        MixDraw { lambda, partners, center: [0, 1].map(|axis| u(axis, 1600 + batch)) }
    }
}

/// Sets what trackers have in common.
macro_rules! monitored {
    ($callback:expr, $args:expr) => {{
        let mut callback = $callback;
        if let Some(name) = $args["monitor"].as_str() {
            callback = callback.monitor(name);
        }
        if let Some(delta) = $args["min_delta"].as_f64() {
            callback = callback.min_delta(delta);
        }
        if let Some(reset) = $args["reset_on_fit"].as_bool() {
            callback = callback.reset_on_fit(reset);
        }
        callback
    }};
}

fn callback(value: &Value, folder: &Path) -> Box<dyn Callback> {
    let (name, args) = named(value);
    let whole = |name: &str, default: u64| args[name].as_u64().unwrap_or(default) as usize;
    match name {
        "GradientAccumulation" => Box::new(GradientAccumulation::new(whole("n_acc", 32))),
        "GradientClip" => Box::new(
            GradientClip::new(number(&args["max_norm"]))
                .norm_type(args["norm_type"].as_f64().unwrap_or(2.0)),
        ),
        "MixUp" => Box::new(MixUp::new(number(&args["alpha"])).source(Forced)),
        "CutMix" => Box::new(CutMix::new(number(&args["alpha"])).source(Forced)),
        "BnFreeze" => Box::new(NormFreeze::new()),
        "ShortEpochCallback" => {
            let short = args["short_valid"].as_bool().unwrap_or(true);
            Box::new(ShortEpoch::new(number(&args["pct"])).validation(short))
        }
        "CSVLogger" => {
            let name = args["fname"].as_str().unwrap_or("history.csv");
            Box::new(CsvLog::new(folder.join(name)).append(args["append"] == true))
        }
        "TerminateOnNaNCallback" => Box::new(TerminateOnNan::new()),
        "EarlyStoppingCallback" => {
            Box::new(monitored!(EarlyStopping::new(whole("patience", 1)), args))
        }
        "ReduceLROnPlateau" => {
            let reduce = monitored!(ReduceLrOnPlateau::new(whole("patience", 1)), args);
            let reduce = reduce.factor(args["factor"].as_f64().unwrap_or(10.0));
            Box::new(reduce.min_lr(args["min_lr"].as_f64().unwrap_or(0.0)))
        }
        "SaveModelCallback" => {
            let name = args["fname"].as_str().unwrap_or("model");
            let path = folder.join("models").join(format!("{name}.pth"));
            let mut save = monitored!(SaveModel::new(path), args)
                .at_end(args["at_end"] == true)
                .with_optimizer(args["with_opt"] == true);
            if let Some(every) = args["every_epoch"].as_u64() {
                save = save.every(every as usize);
            }
            Box::new(save)
        }
        "ParamScheduler" => {
            let schedules: BTreeMap<String, Value> =
                serde_json::from_value(args["scheds"].clone()).unwrap();
            let mut schedules = schedules.iter().map(|(name, schedule)| {
                let hyper = match name.as_str() {
                    "lr" => Hyper::Lr,
                    "mom" => Hyper::Momentum,
                    "wd" => Hyper::WeightDecay,
                    other => panic!("hyperparameter {other}"),
                };
                (hyper, annealing(schedule))
            });
            let (hyper, first) = schedules.next().unwrap();
            let scheduler = ParamScheduler::new(hyper, first);
            Box::new(schedules.fold(scheduler, |all, (hyper, it)| all.and(hyper, it)))
        }
        other => panic!("callback {other}"),
    }
}

/// Learning rates: a number, a list, `{"slice": [first or null, last]}`, or none.
pub(crate) fn rates(value: &Value) -> Option<Rates> {
    match value {
        Value::Null => None,
        Value::Array(_) => Some(Rates::Each(numbers(value))),
        Value::Object(slice) => {
            let [first, last] = slice["slice"].as_array().unwrap().as_slice() else {
                panic!("{value}")
            };
            Some(match first {
                Value::Null => Rates::up_to(number(last)),
                first => Rates::between(number(first), number(last)),
            })
        }
        rate => Some(Rates::Same(number(rate))),
    }
}

/// Makes a run's Learner. `epoch` is what metrics that are lists read.
pub(crate) fn learner(run: &Value, folder: &Path, epoch: &Arc<AtomicUsize>) -> Learner {
    let (model, kind) = (run["model"].as_str().unwrap(), run["data"].as_str().unwrap());
    let mut learner = learner_of(model, loaders(data(kind, true), data(kind, false), BATCH));
    learner = split(learner, model, run["groups"].as_str().unwrap());
    let metrics: Vec<Arc<dyn Metric<Value = f64>>> =
        run["metrics"].as_array().unwrap().iter().map(|it| metric(it, epoch)).collect();
    learner = learner.metrics(metrics).train_metrics(run["train_metrics"] == true);
    if !run["loss"].is_null() {
        learner = with_loss(learner, &run["loss"]);
    }
    if !run["opt"].is_null() {
        learner = with_optimizer(learner, &run["opt"]);
    }
    let options = &run["learner"];
    // A partial optimizer's rate replaces the Learner's in fastai; in ours settings always have a rate, and the
    // Learner's own replaces it.
    if let (Some(lr), true) = (options["lr"].as_f64(), run["opt"][1]["lr"].is_null()) {
        learner = learner.lr(lr);
    }
    if let Some(decay) = options["wd"].as_f64() {
        learner = learner.weight_decay(decay);
    }
    if let Some(on) = options["wd_bn_bias"].as_bool() {
        learner = learner.decay_norms_and_biases(on);
    }
    if let Some(on) = options["train_bn"].as_bool() {
        learner = learner.train_norms(on);
    }
    if !options["moms"].is_null() {
        learner = learner.momenta(numbers(&options["moms"]).try_into().unwrap());
    }
    for it in run["cbs"].as_array().into_iter().flatten() {
        learner.add(vec![callback(it, folder)]);
    }
    learner
}
