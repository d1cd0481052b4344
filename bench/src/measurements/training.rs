//! Our side of the training loops: what `peers/train.py` and `peers/adamw.py` do with PyTorch.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade::models::ResNet;
use brigade::prelude::*;

const WARM_UP: usize = 5;
const STEPS: usize = 40;
const MEMORY_STEPS: usize = 10;

/// What the words of a measurement ask for: `train resnet18 bf16`.
#[derive(Clone, Copy, Default)]
struct Settings {
    bf16: bool,
    nchw: bool,
    memory: bool,
    unchecked: bool,
}

/// Seconds of each step, or resident and highest memory in bytes.
pub(crate) fn train(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    let Some((net, rest)) = words.split_first() else {
        bail!("which model: cnn or resnet18?");
    };
    let mut settings = Settings::default();
    for word in rest {
        match *word {
            "bf16" => settings.bf16 = true,
            "nchw" => settings.nchw = true,
            "memory" => settings.memory = true,
            "unchecked" => settings.unchecked = true,
            other => bail!("there is no setting {other:?}"),
        }
    }
    match *net {
        "cnn" => run(Cnn::new, [64, 1, 28, 28], 10, Adam::default(), settings),
        "resnet18" => run(
            |path| ResNet::resnet18(path, 1000),
            [32, 3, 128, 128],
            1000,
            Adam::decoupled(),
            settings,
        ),
        other => bail!("there is no model {other:?}"),
    }
}

fn run<M>(
    constructor: impl FnOnce(&Path<'_>) -> M,
    shape: [i64; 4],
    classes: i64,
    optimizer: Adam,
    settings: Settings,
) -> Result<Vec<Vec<f64>>>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
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
    let model = Model::new(constructor)?;
    let optimizer = optimizer.lr(1e-3).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    // Of a global batch, each rank has its part.
    let [images, rest @ ..] = shape;
    let images = images / accelerator.num_processes() as i64;
    let shape = [images, rest[0], rest[1], rest[2]];
    let batches: Vec<(Tensor, Tensor)> = (0..4)
        .map(|_| {
            let pixels = Tensor::rand(shape, tch::kind::FLOAT_CPU);
            (pixels, Tensor::randint(classes, [images], tch::kind::INT64_CPU))
        })
        .collect();
    let steps = if settings.memory { MEMORY_STEPS } else { STEPS };
    let mut seconds = Vec::with_capacity(steps);
    for number in 0..WARM_UP + steps {
        let (images, labels) = &batches[number % batches.len()];
        let start = Instant::now();
        let loss = model.forward(images)?.cross_entropy_for_logits(labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    if settings.memory {
        return Ok(vec![vec![status("VmRSS")?], vec![status("VmHWM")?]]);
    }
    // Under the launcher, one rank speaks for all: they step together.
    Ok(if accelerator.is_main_process() { vec![seconds] } else { Vec::new() })
}

/// A step of AdamW on ResNet-18's parameters and nothing else.
pub(crate) fn adamw() -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = Model::new(|path| ResNet::resnet18(path, 1000))?;
    let optimizer = Adam::decoupled().build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let parameters = model.inner().trainable_parameters();
    // A backward gives every parameter its gradient.
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

/// Seconds of all-reduces of ResNet-18's gradients, and of one number, as `peers/all_reduce.py` has them.
pub(crate) fn all_reduce() -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let group = accelerator.group().context("all-reduces are of several ranks")?;
    let mut lists = Vec::new();
    for numbers in [11_689_512, 1] {
        let mut tensor = Tensor::zeros([numbers], tch::kind::FLOAT_CPU);
        let mut seconds = Vec::with_capacity(STEPS);
        for number in 0..WARM_UP + STEPS {
            let start = Instant::now();
            group.all_reduce(&mut tensor, ReduceOp::Sum)?;
            if number >= WARM_UP {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        lists.push(seconds);
    }
    Ok(if accelerator.is_main_process() { lists } else { Vec::new() })
}

/// A line of /proc/self/status, in bytes.
pub(crate) fn status(name: &str) -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let kilobytes = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim_start_matches(':').trim().split(' ').next())
        .with_context(|| format!("/proc/self/status has no {name}"))?;
    Ok(kilobytes.parse::<f64>()? * 1024.0)
}
