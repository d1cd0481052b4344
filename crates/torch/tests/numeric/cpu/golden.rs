//! The curve that PyTorch's DistributedDataParallel gave for the CNN of the FashionMNIST example. The
//! optimizer steps are those of `fused`, so those are proved too.

use std::collections::BTreeMap;

use brigade_test_device::{changes, perturb};
use brigade_testkit::{World, assert_close, dist_test, step};
use brigade_torch::fused::{AdamStep, SgdStep, adam, sgd};
use brigade_torch::{
    DeviceNumbers, ProcessGroup, ReduceOp, Reducer, ReducerOptions, clear_gradient, from_vec,
    gradient,
};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::rendezvous::{self, values};

/// How many times the change in perturbed runs is allowed: the golden run was rounded otherwise, and so is ours.
const TIMES: f64 = 5.0;
/// Relative difference that is allowed without a change in perturbed runs: four roundings of float32.
const ROUNDING: f64 = 2.5e-7;
/// Largest relative change of a loss or a sum in perturbed runs with which the comparison still proves something.
const LARGEST_CHANGE: f64 = 1e-4;

const ADAM_RATE: f64 = 0.0005;

#[derive(Deserialize)]
struct Table {
    parameter_names: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    config: Config,
    losses: Vec<f64>,
    weight_sums: BTreeMap<String, f64>,
    weight_abs_sums: BTreeMap<String, f64>,
    buffers: BTreeMap<String, f64>,
}

#[derive(Deserialize, Debug)]
struct Config {
    world: i64,
    per_rank: i64,
    accumulate: i64,
    opt: String,
    steps: i64,
    phase: f64,
}

dist_test!(world = 1, seconds = 240, dist_ddp_cnn_alone, |world| reproduce(&world));
dist_test!(world = 2, seconds = 240, dist_ddp_cnn_on_two, |world| reproduce(&world));
dist_test!(world = 4, seconds = 240, dist_ddp_cnn_on_four, |world| reproduce(&world));

fn reproduce(world: &World) {
    let group = rendezvous::group(world);
    let table: Table = serde_json::from_str(include_str!("../../golden/ddp_cnn.json")).unwrap();
    let mine = |case: &&Case| case.config.world == group.size() as i64;
    let mut seen = 0;
    for case in table.cases.iter().filter(mine) {
        let perturbed = [1, 2].map(|seed| {
            step!("{:?}, perturbed with seed {seed}", case.config);
            train(&group, &table.parameter_names, case, true, Some(seed))
        });
        for views in [true, false] {
            step!("{:?}, gradients as views: {views}", case.config);
            let ours = train(&group, &table.parameter_names, case, views, None);
            compare(&group, case, &ours, &perturbed);
            seen += 1;
        }
    }
    assert!(seen > 0, "no case for {} ranks", group.size());
}

/// Result of a training.
struct Outcome {
    losses: Vec<f64>,
    parameters: Vec<Summed>,
    buffers: Vec<Summed>,
}

/// Sums of a tensor after the training.
struct Summed {
    name: String,
    numel: usize,
    sum: f64,
    sum_of_absolutes: f64,
}

impl Summed {
    fn of((name, tensor): &(String, Tensor)) -> Self {
        let sum = |tensor: &Tensor| tensor.sum(Kind::Double).double_value(&[]);
        let (name, numel) = (name.clone(), tensor.numel());
        Self { name, numel, sum: sum(tensor), sum_of_absolutes: sum(&tensor.abs()) }
    }

    /// Returns how far the sum may be from that of the golden run, from the sums of the perturbed runs. Terms of both
    /// signs cancel: the error goes with the sum of their sizes.
    fn allowance<'a>(&self, perturbed: impl Iterator<Item = &'a Self>) -> f64 {
        let apart = |other: &Self| {
            let absolutes = (other.sum_of_absolutes - self.sum_of_absolutes).abs();
            absolutes.max((other.sum - self.sum).abs())
        };
        let change = perturbed.map(apart).fold(0.0, f64::max);
        let most = LARGEST_CHANGE * self.sum_of_absolutes;
        assert!(change <= most, "{}: perturbed runs are {change} apart", self.name);
        TIMES * change + ROUNDING * self.sum_of_absolutes
    }

    /// How far the sum can be off when each element goes Adam's full way in whatever direction.
    fn noise(&self, steps: i64) -> f64 {
        ADAM_RATE * steps as f64 * self.numel as f64
    }
}

/// Compares an outcome with the golden one. What rounding makes of the figures is measured by perturbed runs.
fn compare(group: &ProcessGroup, case: &Case, ours: &Outcome, perturbed: &[Outcome]) {
    let Config { ref opt, steps, .. } = case.config;
    let others: Vec<&[f64]> = perturbed.iter().map(|other| &other.losses[..]).collect();
    let changes = changes(&ours.losses, &others);
    assert_eq!(ours.losses.len(), case.losses.len());
    for ((found, expected), change) in ours.losses.iter().zip(&case.losses).zip(changes) {
        assert!(change <= LARGEST_CHANGE * expected, "perturbed runs are {change} apart");
        let allowed = TIMES * change + ROUNDING * expected;
        assert_close(&[*found], &[*expected], 0.0, allowed);
    }
    for (place, parameter) in ours.parameters.iter().enumerate() {
        let name = &parameter.name;
        // The bias of a convolution before a BatchNorm has no influence: its gradient is only rounding, and Adam makes
        // full steps of it, in a direction that rounding determines.
        let free = opt == "adam" && ["module1.0.bias", "module2.0.bias"].contains(&&name[..]);
        let bound = if free {
            parameter.noise(steps)
        } else {
            parameter.allowance(perturbed.iter().map(|other| &other.parameters[place]))
        };
        assert_close(&[parameter.sum_of_absolutes], &[case.weight_abs_sums[name]], 0.0, bound);
        assert_close(&[parameter.sum], &[case.weight_sums[name]], 0.0, bound);
    }
    // The file contains rank 0's.
    if group.rank() == 0 {
        assert_eq!(case.buffers.len(), ours.buffers.len());
        for (place, buffer) in ours.buffers.iter().enumerate() {
            // The mean of an output to which such a bias is added changes with it.
            let bound = if opt == "adam" && buffer.name.ends_with("running_mean") {
                buffer.noise(steps)
            } else {
                buffer.allowance(perturbed.iter().map(|other| &other.buffers[place]))
            };
            assert_close(&[buffer.sum], &[case.buffers[&buffer.name]], 0.0, bound);
        }
    }
}

/// Trains as the golden run did, with `perturbed` from weights that differ by their rounding.
fn train(
    group: &ProcessGroup,
    names: &[String],
    case: &Case,
    gradient_as_bucket_view: bool,
    perturbed: Option<u64>,
) -> Outcome {
    let Config { per_rank, accumulate, ref opt, steps, phase, .. } = case.config;
    let mut model = Cnn::new(names, phase);
    if let Some(seed) = perturbed {
        perturb(model.parameters.iter().map(|(_, tensor)| tensor.shallow_clone()), seed);
    }
    let options = ReducerOptions { gradient_as_bucket_view, ..ReducerOptions::default() };
    let reducer = Reducer::new(group, &model.parameters, &model.buffers, options).unwrap();
    let mut optimizer = Optimizer::new(opt, &model.parameters);
    let mut losses = Vec::new();
    for step in 0..steps {
        for (_, parameter) in &model.parameters {
            clear_gradient(parameter).unwrap();
        }
        let mut total = 0.0;
        for micro in 0..accumulate {
            let (images, labels) = batch(group, step * accumulate + micro, per_rank, phase);
            let sync = micro == accumulate - 1;
            reducer.before_forward(sync).unwrap();
            let output = reducer.after_forward(model.forward(&images), sync).unwrap();
            let loss = output.cross_entropy_for_logits(&labels) / accumulate as f64;
            loss.f_backward().unwrap();
            total += loss.double_value(&[]);
        }
        let mut mean = Tensor::from(total);
        group.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
        losses.push(mean.double_value(&[]));
        optimizer.step(&model.parameters);
    }
    assert_eq!(reducer.bucket_bytes().unwrap().iter().sum::<usize>(), 4 * model.elements());
    Outcome {
        losses,
        parameters: model.parameters.iter().map(Summed::of).collect(),
        buffers: model.buffers.iter().map(Summed::of).collect(),
    }
}

/// `float32(scale * sin(0.37 i + 1.7 j + phase))`, i the flat index.
fn fill(shape: &[i64], j: i64, scale: f64, phase: f64) -> Tensor {
    let elements: i64 = shape.iter().product();
    let value = |i: i64| (scale * (0.37 * i as f64 + 1.7 * j as f64 + phase).sin()) as f32;
    from_vec((0..elements).map(value).collect(), shape).unwrap()
}

/// This rank's rows of global batch `i`.
fn batch(group: &ProcessGroup, i: i64, per_rank: i64, phase: f64) -> (Tensor, Tensor) {
    let (rank, samples) = (group.rank() as i64, per_rank * group.size() as i64);
    let images = fill(&[samples, 1, 28, 28], 100 + i, 0.5, phase) + 0.5;
    let labels: Vec<i64> = (0..samples).map(|k| (7 * i + 3 * k + k * k) % 10).collect();
    let rows = |tensor: Tensor| tensor.narrow(0, rank * per_rank, per_rank);
    (rows(images), rows(Tensor::from_slice(&labels)))
}

struct Cnn {
    parameters: Vec<(String, Tensor)>,
    buffers: Vec<(String, Tensor)>,
}

const SHAPES: [(&str, &[i64]); 12] = [
    ("module1.0.weight", &[32, 1, 5, 5]),
    ("module1.0.bias", &[32]),
    ("module1.1.weight", &[32]),
    ("module1.1.bias", &[32]),
    ("module2.0.weight", &[64, 32, 5, 5]),
    ("module2.0.bias", &[64]),
    ("module2.1.weight", &[64]),
    ("module2.1.bias", &[64]),
    ("linear1.weight", &[64, 3136]),
    ("linear1.bias", &[64]),
    ("linear2.weight", &[10, 64]),
    ("linear2.bias", &[10]),
];

impl Cnn {
    fn new(names: &[String], phase: f64) -> Self {
        assert_eq!(names, SHAPES.map(|(name, _)| name));
        let parameters = (0..).zip(SHAPES).map(|(j, (name, shape))| {
            let normal = name.ends_with(".1.weight");
            let tensor = fill(shape, j, 0.05, phase) + if normal { 1.0 } else { 0.0 };
            (name.to_owned(), tensor.set_requires_grad(true))
        });
        let buffers = [("module1.1", 32), ("module2.1", 64)].into_iter().flat_map(|(name, n)| {
            let float = (Kind::Float, tch::Device::Cpu);
            [
                (format!("{name}.running_mean"), Tensor::zeros([n], float)),
                (format!("{name}.running_var"), Tensor::ones([n], float)),
                (format!("{name}.num_batches_tracked"), Tensor::from(0i64)),
            ]
        });
        Self { parameters: parameters.collect(), buffers: buffers.collect() }
    }

    fn forward(&mut self, images: &Tensor) -> Tensor {
        let x = self.block(images, 0, 0);
        let x = self.block(&x, 4, 3);
        let p = |n: usize| &self.parameters[n].1;
        x.flatten(1, -1).linear(p(8), Some(p(9))).relu().linear(p(10), Some(p(11)))
    }

    /// Convolution, BatchNorm in training, ReLU, MaxPool.
    fn block(&mut self, x: &Tensor, parameter: usize, buffer: usize) -> Tensor {
        let p = |n: usize| Some(&self.parameters[parameter + n].1);
        let x = x.conv2d(p(0).unwrap(), p(1), [1, 1], [2, 2], [1, 1], 1);
        let (mean, variance) = (&self.buffers[buffer].1, &self.buffers[buffer + 1].1);
        let x = x.batch_norm(p(2), p(3), Some(mean), Some(variance), true, 0.1, 1e-5, false);
        let _ = self.buffers[buffer + 2].1.g_add_scalar_(1);
        x.relu().max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
    }

    fn elements(&self) -> usize {
        self.parameters.iter().map(|(_, parameter)| parameter.numel()).sum()
    }
}

enum Optimizer {
    Sgd { momentum: Vec<Tensor>, first: bool },
    Adam { means: Vec<Tensor>, squares: Vec<Tensor>, steps: Vec<Tensor> },
}

impl Optimizer {
    fn new(name: &str, parameters: &[(String, Tensor)]) -> Self {
        let zeros = || parameters.iter().map(|(_, p)| p.detach().zeros_like()).collect();
        match name {
            "sgd" => Self::Sgd { momentum: zeros(), first: true },
            "adam" => Self::Adam {
                means: zeros(),
                squares: zeros(),
                steps: parameters.iter().map(|_| Tensor::from(0f32)).collect(),
            },
            other => panic!("the table asks for {other}"),
        }
    }

    fn step(&mut self, parameters: &[(String, Tensor)]) {
        fn all(tensors: &[Tensor]) -> Vec<&Tensor> {
            tensors.iter().collect()
        }
        let gradients: Vec<Tensor> =
            parameters.iter().map(|(_, p)| gradient(p).unwrap().unwrap()).collect();
        let parameters: Vec<&Tensor> = parameters.iter().map(|(_, p)| p).collect();
        let host = DeviceNumbers::default();
        match self {
            Self::Sgd { momentum, first } => {
                let step = SgdStep {
                    lr: 0.002,
                    momentum: 0.9,
                    dampening: 0.0,
                    weight_decay: 0.0,
                    decoupled: false,
                    nesterov: false,
                    maximize: false,
                    first: std::mem::replace(first, false),
                };
                sgd(&parameters, &all(&gradients), &all(momentum), &step, &host).unwrap();
            }
            Self::Adam { means, squares, steps } => {
                for step in steps.iter_mut() {
                    let _ = step.g_add_scalar_(1);
                }
                let step = AdamStep {
                    lr: ADAM_RATE,
                    beta1: 0.9,
                    beta2: 0.999,
                    eps: 1e-8,
                    weight_decay: 0.0,
                    amsgrad: false,
                    maximize: false,
                    decoupled: false,
                };
                let (means, squares, steps) = (all(means), all(squares), all(steps));
                adam(&parameters, &all(&gradients), &means, &squares, &[], &steps, &step, &host)
                    .unwrap();
            }
        }
        assert!(parameters.iter().all(|p| values(p).iter().all(|value| value.is_finite())));
    }
}
