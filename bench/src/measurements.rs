//! Measurements that run in a process of their own.

mod checkpoint;
mod dispatch;
mod generation;
mod gpu;
mod gpu_account;
pub(crate) mod gpu_training;
mod images;
mod learner;
mod nets;
mod pipeline;
mod products;
mod sharding;
mod tensor_parallel;
mod text;
mod tpu;
mod training;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use brigade::data::DataLoader;
use brigade::datasets::LabelledImages;
use brigade::prelude::*;
use brigade::torch::DeviceNumbers;
use brigade::torch::fused::{self, AdamStep};
use brigade::torch::{Backend, GroupOptions, ProcessGroup, Reducer, ReducerOptions, Store};
use brigade::torch::{clear_gradient, gradient};

const BATCH: i64 = 64;
const WARM_UP: usize = 10;
const STEPS: usize = 60;
const PAIRS: usize = 120;
const LR: f64 = 5e-3;

/// Training step on a batch of images and labels.
type Step = Box<dyn FnMut(&Tensor, &Tensor) -> Result<()>>;

/// Runs a measurement by name. Returns the seconds of each step, or bytes per second; two lists for two sides that take
/// turns step by step.
pub(crate) fn run(name: &str) -> Result<Vec<Vec<f64>>> {
    let words: Vec<&str> = name.split_whitespace().collect();
    match *words.first().unwrap_or(&"") {
        "step-accelerated" => Ok(vec![timed(&mut accelerated()?, WARM_UP, STEPS)?]),
        "steps-accelerated-and-by-hand" => in_turns([accelerated()?, by_hand()?]),
        "steps-reduced-and-plain" => in_turns([with_reducer(true)?, with_reducer(false)?]),
        "first-step" => Ok(vec![timed(&mut accelerated()?, 0, 1)?]),
        "loader-bytes-per-second" => Ok(vec![loader()?]),
        "memcpy-bytes-per-second" => Ok(vec![memcpy()]),
        "train" => training::train(&words[1..]),
        "train-on-demand" => training::train_on_demand(&words[1..]),
        "matmul-share" => training::matmul_share(&words[1..]),
        "images" => images::run(&words[1..]),
        "text" => text::run(&words[1..]),
        "gpu" => gpu::run(&words[1..]),
        "learner" => learner::run(&words[1..]),
        "adamw" => training::adamw(),
        "all-reduce" => training::all_reduce(),
        "shards" => training::shards(),
        "dispatch" => dispatch::run(&words[1..]),
        "generation" => generation::run(&words[1..]),
        "sharding" => sharding::run(&words[1..]),
        "pipeline" => pipeline::run(&words[1..]),
        "tensor-parallel" => tensor_parallel::run(&words[1..]),
        "checkpoint" => checkpoint::run(&words[1..]),
        "tpu" => tpu::run(&words[1..]),
        other => bail!("there is no measurement {other:?}"),
    }
}

/// Returns several batches, so that no side trains on data that are in the cache from its last step.
fn batches() -> Vec<(Tensor, Tensor)> {
    tch::manual_seed(1);
    (0..8)
        .map(|_| {
            let images = Tensor::rand([BATCH, 1, 28, 28], tch::kind::FLOAT_CPU);
            (images, Tensor::randint(10, [BATCH], tch::kind::INT64_CPU))
        })
        .collect()
}

fn timed(step: &mut Step, warm_up: usize, steps: usize) -> Result<Vec<f64>> {
    let batches = batches();
    let mut seconds = Vec::with_capacity(steps);
    for number in 0..warm_up + steps {
        let (images, labels) = &batches[number % batches.len()];
        let start = Instant::now();
        step(images, labels)?;
        if number >= warm_up {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Runs two steps in one process in turns, so that disturbances of the machine affect both.
fn in_turns(mut steps: [Step; 2]) -> Result<Vec<Vec<f64>>> {
    let batches = batches();
    let mut seconds = vec![Vec::new(), Vec::new()];
    for number in 0..WARM_UP + PAIRS {
        let (images, labels) = &batches[number % batches.len()];
        for turn in 0..2 {
            let side = (number + turn) % 2;
            let start = Instant::now();
            steps[side](images, labels)?;
            if number >= WARM_UP {
                seconds[side].push(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(seconds)
}

/// Uses the memory format of the other side.
fn accelerated() -> Result<Step> {
    let accelerator = Accelerator::builder().channels_last(false).quiet(true).build()?;
    let model = Model::new(Cnn::new)?;
    let optimizer = Adam::default().lr(LR).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    Ok(Box::new(move |images, labels| {
        let loss = model.forward(images)?.cross_entropy_for_logits(labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        Ok(optimizer.step()?)
    }))
}

/// Implements the same arithmetic on plain tensors: without model, optimizer object and Accelerator.
fn by_hand() -> Result<Step> {
    let shapes: [&[i64]; 12] = [
        &[32, 1, 5, 5],
        &[32],
        &[32],
        &[32],
        &[64, 32, 5, 5],
        &[64],
        &[64],
        &[64],
        &[64, 3136],
        &[64],
        &[10, 64],
        &[10],
    ];
    tch::manual_seed(1);
    let mut p: Vec<Tensor> =
        shapes.iter().map(|shape| Tensor::randn(*shape, tch::kind::FLOAT_CPU) * 0.05).collect();
    for scale in [2, 6] {
        p[scale] = Tensor::ones(shapes[scale], tch::kind::FLOAT_CPU);
    }
    let p: Vec<Tensor> = p.into_iter().map(|tensor| tensor.set_requires_grad(true)).collect();
    let zeros = || p.iter().map(|t| t.detach().zeros_like()).collect::<Vec<_>>();
    let (m, v) = (zeros(), zeros());
    let counts: Vec<Tensor> = p.iter().map(|_| Tensor::from(0f32)).collect();
    let statistics = |channels| {
        let zeros = Tensor::zeros([channels], tch::kind::FLOAT_CPU);
        (zeros, Tensor::ones([channels], tch::kind::FLOAT_CPU), Tensor::from(0i64))
    };
    let (first, second) = (statistics(32), statistics(64));
    let block = |p: &[Tensor], x: &Tensor, at: usize, statistics: &(Tensor, Tensor, Tensor)| {
        let (mean, var, count) = statistics;
        let _ = count.shallow_clone().g_add_scalar_(1);
        let x = x.conv2d(&p[at], Some(&p[at + 1]), [1, 1], [2, 2], [1, 1], 1);
        Tensor::batch_norm(
            &x,
            Some(&p[at + 2]),
            Some(&p[at + 3]),
            Some(mean),
            Some(var),
            true,
            0.1,
            1e-5,
            true,
        )
        .relu()
        .max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
    };
    Ok(Box::new(move |images, labels| {
        let x = block(&p, &block(&p, images, 0, &first), 4, &second).flatten(1, -1);
        let x = x.linear(&p[8], Some(&p[9])).relu().linear(&p[10], Some(&p[11]));
        let loss = x.cross_entropy_for_logits(labels);
        for parameter in &p {
            clear_gradient(parameter)?;
        }
        loss.backward();
        let gradients: Vec<Tensor> = p.iter().map(Tensor::grad).collect();
        for count in &counts {
            let _ = count.shallow_clone().g_add_scalar_(1.0);
        }
        fused::adam(
            &p.iter().collect::<Vec<_>>(),
            &gradients.iter().collect::<Vec<_>>(),
            &m.iter().collect::<Vec<_>>(),
            &v.iter().collect::<Vec<_>>(),
            &[],
            &counts.iter().collect::<Vec<_>>(),
            &AdamStep {
                lr: LR,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                amsgrad: false,
                maximize: false,
                decoupled: false,
            },
            &DeviceNumbers::default(),
        )?;
        Ok(())
    }))
}

/// Creates a step of one rank, with or without the reducer of a group of two whose collectives return at once.
fn with_reducer(reduced: bool) -> Result<Step> {
    // Programs have the memory settings that an Accelerator makes.
    let _accelerator = Accelerator::builder().channels_last(false).quiet(true).build()?;
    let mut model = Model::new(Cnn::new)?;
    let mut optimizer = Adam::default().lr(LR).build(&model)?;
    let named = |list: Vec<brigade::torch::NamedTensor>| {
        list.into_iter().map(|named| (named.name, named.tensor)).collect::<Vec<_>>()
    };
    let reducer = if reduced {
        let store = Store::hash()?;
        let group = ProcessGroup::new(&store, 0, 2, Backend::Fake, GroupOptions::default())?;
        let (parameters, buffers) = (named(model.trainable_parameters()), named(model.buffers()));
        Some(Reducer::new(&group, &parameters, &buffers, ReducerOptions::default())?)
    } else {
        None
    };
    model.train();
    Ok(Box::new(move |images, labels| {
        if let Some(reducer) = &reducer {
            reducer.before_forward(true)?;
        }
        let mut output = model.forward(images)?;
        if let Some(reducer) = &reducer {
            output = reducer.after_forward(output, true)?;
        }
        let loss = output.cross_entropy_for_logits(labels);
        optimizer.zero_grad()?;
        loss.f_backward()?;
        debug_assert!(gradient(&model.parameters()[0].tensor)?.is_some());
        Ok(optimizer.step()?)
    }))
}

const IMAGES: usize = 20_000;
const PIXELS: usize = 28 * 28;
const LOADER_BATCH: usize = 256;

/// Returns the bytes per second of shuffled batches from a loader without threads.
fn loader() -> Result<Vec<f64>> {
    let pixels: Vec<u8> = (0..IMAGES * PIXELS).map(|i| (i * 7 % 251) as u8).collect();
    let labels: Vec<u8> = (0..IMAGES).map(|i| (i % 10) as u8).collect();
    let images = LabelledImages::new(pixels, labels, 28, 28)?;
    let bytes = (images.len() * PIXELS * size_of::<f32>()) as f64;
    let loader = DataLoader::new(images).batch_size(LOADER_BATCH).shuffle(true).seed(1);
    let mut rates = Vec::new();
    for _ in 0..6 {
        let (mut spent, mut batches) = (Duration::ZERO, loader.iter());
        loop {
            let start = Instant::now();
            let Some(batch) = batches.next() else { break };
            let batch = batch?;
            spent += start.elapsed();
            drop(std::hint::black_box(batch));
        }
        rates.push(bytes / spent.as_secs_f64());
    }
    // The first epoch accesses the memory for the first time.
    Ok(rates.split_off(1))
}

/// Returns the bytes per second of copies as large as a batch, into newly allocated memory like a batch's.
fn memcpy() -> Vec<f64> {
    let batch = LOADER_BATCH * PIXELS * size_of::<f32>();
    let source = vec![1u8; IMAGES * PIXELS * size_of::<f32>()];
    let mut rates = Vec::new();
    for _ in 0..6 {
        let mut spent = Duration::ZERO;
        for chunk in source.chunks(batch) {
            let start = Instant::now();
            let copy = chunk.to_vec();
            spent += start.elapsed();
            drop(std::hint::black_box(copy));
        }
        rates.push(source.len() as f64 / spent.as_secs_f64());
    }
    rates.split_off(1)
}
