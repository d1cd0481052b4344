//! Our side of the checkpoint comparisons: 1 GB of weights, as in `peers/checkpoint.py`.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade::models::ResNet;
use brigade::nn::Init;
use brigade::prelude::*;
use brigade::train::{LoadOptions, ProjectConfiguration};

use super::training::status;

const TENSORS: usize = 64;
const ELEMENTS: i64 = 4_000_000;
const BYTES: f64 = TENSORS as f64 * ELEMENTS as f64 * 4.0;
const ROUNDS: usize = 3;
/// Number of steps before the first save, and maximum number while one is written.
const STEPS: usize = 20;
const SAVES: usize = 4;

/// Runs the measurement of these words: `checkpoint save FOLDER flush`.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match *words {
        ["save", folder, flushed] => save(Path::new(folder), flushed == "flushed"),
        ["load", folder, checked] => load(Path::new(folder), checked == "verified"),
        ["background", folder] => background(Path::new(folder)),
        _ => bail!("there is no measurement checkpoint {}", words.join(" ")),
    }
}

/// Creates the weights.
fn layers(path: &ParamPath<'_>, init: Init) -> Vec<Tensor> {
    (0..TENSORS)
        .map(|i| path.join(format!("layer{i}")).parameter("weight", &[ELEMENTS], init))
        .collect()
}

fn accelerator(flush: bool, background: bool) -> Result<Accelerator> {
    let project = ProjectConfiguration::default().flush(flush).background(background);
    Ok(Accelerator::builder().cpu(true).quiet(true).project(project).build()?)
}

/// Measures the seconds of each save to its end.
fn save(folder: &Path, flush: bool) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(flush, false)?;
    let model = Model::new(|path| layers(path, Init::Uniform { low: 0.0, high: 1.0 }))?;
    let _model = accelerator.prepare(model)?;
    let mut seconds = Vec::new();
    for _ in 0..ROUNDS {
        quiet_disk()?;
        let start = Instant::now();
        accelerator.save_state(folder.join("ours"))?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(vec![seconds])
}

/// Flushes the disk, so that no writes of either side's last save are left.
fn quiet_disk() -> Result<()> {
    let ended = std::process::Command::new("sync").status().context("cannot start sync")?;
    if !ended.success() {
        bail!("sync failed: {ended}");
    }
    Ok(())
}

/// Measures the seconds of each load into a model, and the peak memory above that of the process without a model, in
/// sizes of the model.
fn load(folder: &Path, verify: bool) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(true, false)?;
    let empty = status("VmRSS")?;
    let model = Model::new(|path| layers(path, Init::Zeros))?;
    let _model = accelerator.prepare(model)?;
    let mut seconds = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let options = LoadOptions::default().verify(verify);
        accelerator.checkpoints().load_with(folder.join("ours"), options)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let peak = (status("VmHWM")? - empty) / BYTES;
    Ok(vec![seconds, vec![peak]])
}

/// Measures the seconds of steps of ResNet-18 beside 1 GB of frozen weights, without other work and while a checkpoint
/// is written; the seconds of `save_state` itself, the first time and later; and those of a plain copy of as many
/// bytes, to new memory and to the same memory again. Nothing is being written to the disk when `save_state` begins, or
/// when the plain copies are made.
fn background(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(true, true)?;
    let mut model = Model::new(|path| {
        layers(&path.join("frozen"), Init::Zeros);
        ResNet::resnet18(path.join("net"), 1000)
    })?;
    model.requires_grad_under("frozen", false)?;
    let optimizer = AdamW::default().build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let images = Tensor::rand([32, 3, 128, 128], tch::kind::FLOAT_CPU);
    let labels = Tensor::randint(1000, [32], tch::kind::INT64_CPU);
    let mut step = || -> Result<f64> {
        let start = Instant::now();
        let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        Ok(start.elapsed().as_secs_f64())
    };
    for _ in 0..5 {
        step()?;
    }
    let before = (0..STEPS).map(|_| step()).collect::<Result<Vec<_>>>()?;
    let (mut during, mut stalls) = (Vec::new(), Vec::new());
    for _ in 0..SAVES {
        quiet_disk()?;
        let start = Instant::now();
        accelerator.save_state(folder.join("background"))?;
        stalls.push(start.elapsed().as_secs_f64());
        for _ in 0..STEPS {
            if !accelerator.checkpoints().is_saving() {
                break;
            }
            let seconds = step()?;
            // The last step ran only partly during the save.
            if accelerator.checkpoints().is_saving() {
                during.push(seconds);
            }
        }
        accelerator.checkpoints().wait()?;
    }
    let later = stalls.split_off(1);
    // Tensors like those of the save: the same pieces, the same threads. The trained weights have two moments of their
    // size.
    let frozen = (0..TENSORS).map(|_| vec![ELEMENTS]);
    let trained = model.inner().trainable_parameters();
    let trained = trained.iter().flat_map(|parameter| vec![parameter.tensor.size(); 3]);
    let saved: Vec<Tensor> =
        frozen.chain(trained).map(|shape| Tensor::ones(shape, tch::kind::FLOAT_CPU)).collect();
    let start = Instant::now();
    let mut copies: Vec<Tensor> = saved.iter().map(Tensor::copy).collect();
    let new_copy = start.elapsed().as_secs_f64();
    let mut again = Vec::new();
    for _ in 1..SAVES {
        let start = Instant::now();
        copies.iter_mut().zip(&saved).for_each(|(copy, tensor)| copy.copy_(tensor));
        again.push(start.elapsed().as_secs_f64());
    }
    drop(std::hint::black_box(copies));
    Ok(vec![before, during, stalls, later, vec![new_copy], again])
}
