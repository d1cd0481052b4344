//! Our side of the training loops, equivalent to PyTorch's in `peers/train.py` and `peers/adamw.py`.

use std::fs;
use std::io::{self, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use brigade::models::ResNet;
use brigade::prelude::*;
use brigade::torch::{Products, make_products_reproducible};
use brigade_torch::{Error, ProcessGroup};

use super::nets::Net;
use super::products::Product;

const WARM_UP: usize = 5;
const STEPS: usize = 40;
const MEMORY_STEPS: usize = 10;
const SHARE_STEPS: usize = 20;

/// Settings from the words of a measurement: `train resnet18 bf16`.
#[derive(Clone, Copy, Default)]
struct Settings {
    bf16: bool,
    nchw: bool,
    memory: bool,
    unchecked: bool,
    products: Option<Products>,
    steps: Option<usize>,
}

/// Training loop that is ready for its next step.
struct Loop {
    accelerator: Accelerator,
    net: Net,
    settings: Settings,
    step: Box<dyn FnMut() -> Result<()>>,
}

/// Returns the seconds of each step, or the resident and peak memory in bytes.
pub(crate) fn train(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    let mut training = Loop::new(words)?;
    let steps = match training.settings {
        Settings { memory: true, .. } => MEMORY_STEPS,
        Settings { steps, .. } => steps.unwrap_or(STEPS),
    };
    training.warm_up()?;
    let seconds = (0..steps).map(|_| training.step()).collect::<Result<Vec<_>>>()?;
    if training.settings.memory {
        return Ok(vec![vec![status("VmRSS")?], vec![status("VmHWM")?]]);
    }
    // Under the launcher, one rank prints for all: they step together.
    Ok(if training.accelerator.is_main_process() { vec![seconds] } else { Vec::new() })
}

/// Takes a step for each line of standard input, and answers with one line: its seconds. So two processes can take
/// turns step by step.
pub(crate) fn train_on_demand(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    let mut training = Loop::new(words)?;
    training.warm_up()?;
    for line in io::stdin().lines() {
        line.context("cannot read when to step")?;
        let seconds = training.step()?;
        let mut out = io::stdout();
        writeln!(out, "{seconds}")?;
        out.flush()?;
    }
    Ok(Vec::new())
}

/// Returns the floating-point operations per second of steps, and of matrix products, in turns.
pub(crate) fn matmul_share(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    let mut training = Loop::new(words)?;
    let flops = training.net.flops()?;
    let kind = if training.settings.bf16 { Kind::BFloat16 } else { Kind::Float };
    let product = Product::fastest(kind)?;
    training.warm_up()?;
    let (mut steps, mut products) = (Vec::new(), Vec::new());
    for _ in 0..SHARE_STEPS {
        steps.push(flops / training.step()?);
        // Its operands are not in the cache any more.
        product.rate()?;
        products.push(product.rate()?);
    }
    Ok(vec![steps, products])
}

impl Loop {
    fn new(words: &[&str]) -> Result<Self> {
        let Some((net, rest)) = words.split_first() else {
            bail!("which model?");
        };
        let net = Net::named(net)?;
        let mut settings = Settings::default();
        for word in rest {
            match *word {
                "bf16" => settings.bf16 = true,
                "nchw" => settings.nchw = true,
                "memory" => settings.memory = true,
                "unchecked" => settings.unchecked = true,
                "reproducible" => settings.products = Some(Products::Reproducible),
                "turned-off" => settings.products = Some(Products::TurnedOff),
                other => match other.strip_prefix("steps=") {
                    Some(steps) => settings.steps = Some(steps.parse()?),
                    None => bail!("there is no setting {other:?}"),
                },
            }
        }
        tch::manual_seed(1);
        let mut builder = Accelerator::builder().cpu(true).quiet(true);
        if settings.bf16 {
            builder = builder.mixed_precision(Precision::Bf16);
        }
        if settings.nchw {
            builder = builder.channels_last(false);
        }
        if settings.unchecked {
            builder = builder.check_loss(false);
        }
        let accelerator = builder.build()?;
        if let Some(expected) = settings.products {
            // The Accelerator has called it first; the result is the same now.
            let found = make_products_reproducible();
            ensure!(found == expected, "products of matrices are {found:?}, not {expected:?}");
        }
        let model = Model::new(|path| net.build(path))?;
        let optimizer = net.optimizer(1e-3, &model)?;
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        model.train();
        // Each rank has its part of a global batch.
        let mut shape = net.shape().to_vec();
        shape[0] /= accelerator.processes().num_processes() as i64;
        let batches: Vec<(Tensor, Tensor)> = (0..4)
            .map(|_| {
                let inputs = Tensor::rand(&shape, tch::kind::FLOAT_CPU);
                (inputs, Tensor::randint(net.classes(), [shape[0]], tch::kind::INT64_CPU))
            })
            .collect();
        let mut next = (0..batches.len()).cycle();
        let stepping = accelerator.clone();
        let step = Box::new(move || {
            let (inputs, labels) = &batches[next.next().unwrap_or_default()];
            let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
            optimizer.zero_grad()?;
            stepping.backward(&loss)?;
            Ok(optimizer.step()?)
        });
        Ok(Self { accelerator, net, settings, step })
    }

    fn warm_up(&mut self) -> Result<()> {
        (0..WARM_UP).try_for_each(|_| (self.step)())
    }

    /// Returns the seconds of the next step.
    fn step(&mut self) -> Result<f64> {
        let start = Instant::now();
        (self.step)()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Measures a step of AdamW on ResNet-18's parameters alone.
pub(crate) fn adamw() -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = Model::new(|path| ResNet::resnet18(path, 1000))?;
    let optimizer = AdamW::default().build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let parameters = model.inner().trainable_parameters();
    // A backward pass gives every parameter its gradient.
    let mut loss = Tensor::from(0f32);
    for parameter in &parameters {
        loss += (&parameter.tensor * parameter.tensor.rand_like()).sum(Kind::Float);
    }
    loss.backward();
    let mut seconds = Vec::with_capacity(STEPS);
    for number in 0..WARM_UP + STEPS {
        let start = Instant::now();
        optimizer.step()?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(vec![seconds])
}

/// Measures the seconds of all-reduces of ResNet-18's gradients, and of one number, as in `peers/collectives.py`.
pub(crate) fn all_reduce() -> Result<Vec<Vec<f64>>> {
    let mut tensors = [11_689_512, 1].map(|numbers| Tensor::zeros([numbers], tch::kind::FLOAT_CPU));
    collectives(|group, operation| group.all_reduce(&mut tensors[operation], ReduceOp::Sum))
}

/// Measures the seconds of all-gathers into 16 MB, and of reduce-scatters of 16 MB, as in `peers/collectives.py`.
pub(crate) fn shards() -> Result<Vec<Vec<f64>>> {
    let zeros = |numbers| [Tensor::zeros([numbers], tch::kind::FLOAT_CPU)];
    let (mut whole, mut shard) = (zeros(4 << 20), zeros(2 << 20));
    collectives(|group, operation| match operation {
        0 => group.all_gather_into(&mut whole, &shard),
        _ => group.reduce_scatter_into(&mut shard, &whole, ReduceOp::Sum),
    })
}

/// Measures the seconds of two operations, on the main process.
fn collectives(
    mut run: impl FnMut(&ProcessGroup, usize) -> Result<(), Error>,
) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let group = accelerator.processes().group().context("collectives are of several ranks")?;
    let mut lists = Vec::new();
    for operation in 0..2 {
        let mut seconds = Vec::with_capacity(STEPS);
        for number in 0..WARM_UP + STEPS {
            let start = Instant::now();
            run(&group, operation)?;
            if number >= WARM_UP {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        lists.push(seconds);
    }
    Ok(if accelerator.is_main_process() { lists } else { Vec::new() })
}

/// Returns a line of /proc/self/status, in bytes.
pub(crate) fn status(name: &str) -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let kilobytes = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim_start_matches(':').trim().split(' ').next())
        .with_context(|| format!("/proc/self/status has no {name}"))?;
    Ok(kilobytes.parse::<f64>()? * 1024.0)
}
