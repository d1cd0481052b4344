//! Our side of sharded training, equivalent to PyTorch's FSDP2 in `peers/sharding.py`.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade::models::{Gpt2LmHead, Gpt2Options, Labelled};
use brigade::nn::{Init, Unit};
use brigade::prelude::*;
use brigade::sharding::Strategy;
use brigade::train::{LoadOptions, PreparedModel, PreparedOptimizer};

use super::training::status;

const WARM_UP: usize = 2;
const LAYERS: usize = 21;
const WIDTH: i64 = 2048;

/// Runs `step small|gpt2 STRATEGY`, `checkpoint FOLDER`, `write FILE`, `load FILE`, `memory STRATEGY`, or
/// `reshard-save|reshard-load FOLDER`.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match words {
        ["step", model, strategy] => step(model, strategy),
        ["checkpoint", folder] => checkpoint(Path::new(folder)),
        ["write", file] => write(Path::new(file)),
        ["load", file] => load(Path::new(file)),
        ["memory", strategy] => memory(strategy),
        ["reshard-save", folder] => reshard_save(Path::new(folder)),
        ["reshard-load", folder] => reshard_load(Path::new(folder)),
        other => bail!("there is no measurement of sharding {other:?}"),
    }
}

fn accelerator(sharding: Option<Sharding>) -> Result<Accelerator> {
    Ok(Accelerator::builder().cpu(true).quiet(true).sharding(sharding).build()?)
}

/// Returns the lists on the main process, and nothing on others.
fn of_main(accelerator: &Accelerator, lists: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    if accelerator.is_main_process() { lists } else { Vec::new() }
}

fn without_dropout() -> Gpt2Options {
    Gpt2Options { resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, ..Default::default() }
}

/// Returns a GPT of 5.8 M parameters for texts of 128 tokens, without dropout.
pub(super) fn small_gpt2() -> Gpt2Options {
    Gpt2Options {
        vocab_size: 4096,
        n_positions: 128,
        n_embd: 256,
        n_layer: 6,
        n_head: 8,
        ..without_dropout()
    }
}

fn step(model: &str, strategy: &str) -> Result<Vec<Vec<f64>>> {
    let (options, rows, steps) = match model {
        "small" => (small_gpt2(), 4, 20),
        "gpt2" => (without_dropout(), 2, 5),
        other => bail!("there is no model {other:?}"),
    };
    let accelerator = accelerator(Strategy::parse_setting(strategy)?.map(Sharding::from))?;
    accelerator.set_seed(1);
    let model = Model::deferred(|path| Gpt2LmHead::new(path, &options))?;
    let optimizer = AdamW::default().lr(1e-4).weight_decay(0.01).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let batches: Vec<Tensor> = (0..4)
        .map(|_| Tensor::randint(options.vocab_size, [rows, 128], tch::kind::INT64_CPU))
        .collect();
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + steps {
        let start = Instant::now();
        let ids = &batches[number % batches.len()];
        let loss = model.forward(Labelled::new(ids, ids))?.mean()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(of_main(&accelerator, vec![seconds]))
}

/// Linear layers without biases, each one a unit.
struct Layers(Vec<(Unit, Tensor)>);

impl Layers {
    fn new(path: &ParamPath<'_>, layers: usize) -> Self {
        let layer = |number| {
            let path = path / number;
            (path.unit(), path.parameter("weight", &[WIDTH, WIDTH], Init::KaimingUniform))
        };
        Self((0..layers).map(layer).collect())
    }
}

impl Module<&Tensor> for Layers {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor, Error> {
        self.0.iter().try_fold(input.shallow_clone(), |x, (unit, weight)| {
            unit.run(|| Ok(x.f_linear(weight, None::<&Tensor>)?))
        })
    }
}

/// Returns a model of [`LAYERS`] with its optimizer, after this many steps.
fn trained(
    accelerator: &Accelerator,
    steps: usize,
) -> Result<(PreparedModel<Layers>, PreparedOptimizer)> {
    let model = Model::deferred(|path| Layers::new(path, LAYERS))?;
    let optimizer = AdamW::default().build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    for _ in 0..steps {
        let output = model.forward(&Tensor::ones([1, WIDTH], tch::kind::FLOAT_CPU))?;
        accelerator.backward(&output.sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok((model, optimizer))
}

/// Returns the peak memory above the initial one, in bytes, and that of the plan.
fn memory(strategy: &str) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(Strategy::parse_setting(strategy)?.map(Sharding::from))?;
    accelerator.processes().wait_for_everyone()?;
    let before = status("VmRSS")?;
    fs::write("/proc/self/clear_refs", "5").context("cannot reset the highest memory")?;
    let objects = trained(&accelerator, 3)?;
    let peak = status("VmHWM")? - before;
    let report = accelerator.parallel().memory_report()?.context("no model is sharded")?;
    drop(objects);
    Ok(of_main(&accelerator, vec![vec![peak], vec![report.planned() as f64]]))
}

/// Saves a checkpoint, and returns the bytes of its tensors.
fn reshard_save(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(Some(Sharding::zero3()))?;
    let objects = trained(&accelerator, 1)?;
    accelerator.save_state(folder.join("of_four"))?;
    accelerator.checkpoints().wait()?;
    drop(objects);
    let bytes = 3 * LAYERS as i64 * WIDTH * WIDTH * 4;
    Ok(of_main(&accelerator, vec![vec![bytes as f64]]))
}

/// Measures the seconds of a load.
fn reshard_load(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(Some(Sharding::zero3()))?;
    let objects = trained(&accelerator, 0)?;
    accelerator.processes().wait_for_everyone()?;
    let start = Instant::now();
    accelerator.load_state(folder.join("of_four"))?;
    accelerator.processes().wait_for_everyone()?;
    let seconds = start.elapsed().as_secs_f64();
    drop(objects);
    Ok(of_main(&accelerator, vec![vec![seconds]]))
}

/// Measures the seconds for which a save blocks the training, those until it is on disk, and those of loads with and
/// without checksums.
fn checkpoint(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(Some(Sharding::zero3()))?;
    let (_model, _optimizer) = trained(&accelerator, 1)?;
    let (mut blocked, mut saves) = (Vec::new(), Vec::new());
    let (mut loads, mut unverified) = (Vec::new(), Vec::new());
    for number in 0..4 {
        let path = folder.join(format!("own_{number}"));
        accelerator.processes().wait_for_everyone()?;
        let start = Instant::now();
        accelerator.save_state(&path)?;
        blocked.push(start.elapsed().as_secs_f64());
        accelerator.checkpoints().wait()?;
        saves.push(start.elapsed().as_secs_f64());
        // Our saves bypass the page cache, DCP's leave their files in it: on both sides a first load reads them in.
        accelerator.load_state(&path)?;
        accelerator.processes().wait_for_everyone()?;
        let start = Instant::now();
        accelerator.load_state(&path)?;
        loads.push(start.elapsed().as_secs_f64());
        accelerator.processes().wait_for_everyone()?;
        let start = Instant::now();
        accelerator.checkpoints().load_with(&path, LoadOptions::default().verify(false))?;
        unverified.push(start.elapsed().as_secs_f64());
    }
    // The first of each creates files and allocates memory.
    let lists = [blocked, saves, loads, unverified].map(|list| list[1..].to_vec());
    Ok(of_main(&accelerator, lists.into()))
}

fn write(file: &Path) -> Result<Vec<Vec<f64>>> {
    Model::new(|path| Layers::new(path, 3 * LAYERS))?.save_weights(file)?;
    Ok(vec![vec![fs::metadata(file)?.len() as f64]])
}

/// Returns the seconds of a load, and the peak memory above the initial one in bytes.
fn load(file: &Path) -> Result<Vec<Vec<f64>>> {
    let accelerator = accelerator(Some(Sharding::zero3()))?;
    accelerator.processes().wait_for_everyone()?;
    let before = status("VmRSS")?;
    fs::write("/proc/self/clear_refs", "5").context("cannot reset the highest memory")?;
    let start = Instant::now();
    let mut model = Model::deferred(|path| Layers::new(path, 3 * LAYERS))?;
    model.load_weights(file)?;
    let model = accelerator.prepare(model)?;
    accelerator.processes().wait_for_everyone()?;
    let seconds = start.elapsed().as_secs_f64();
    let lists = vec![vec![seconds], vec![status("VmHWM")? - before]];
    drop(model);
    Ok(of_main(&accelerator, lists))
}
