//! Measurements of models with device maps.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade::models::{GenerationOptions, LlamaForCausalLm, LlamaOptions, Transformer};
use brigade::nn::{Model, Module, Weights};
use brigade::sharding::device_map::DeviceMap;
use brigade::tch::{self, Device, Kind, Tensor};

use super::training::status;

const WARM_UP: usize = 2;
const PASSES: usize = 5;

/// Name of the weights file that `save_pretrained` writes.
const WEIGHTS: &str = "model.safetensors";

/// Returns options of a model of 2 GB in float32, most of it in 30 blocks.
fn options() -> LlamaOptions {
    LlamaOptions {
        vocab_size: 1000,
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 30,
        num_attention_heads: 16,
        ..Default::default()
    }
}

pub(super) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    tch::set_num_threads(2);
    match words {
        ["write", folder] => write(Path::new(folder)),
        ["load", folder, place] => load(Path::new(folder), place),
        ["forward", folder, how, tokens] => forward(Path::new(folder), how, tokens.parse()?),
        ["cold", folder, tokens] => cold(Path::new(folder), tokens.parse()?),
        ["read", folder] => read(Path::new(folder)),
        ["generate", folder, how, tokens] => generate(Path::new(folder), how, tokens.parse()?),
        _ => bail!("no measurement of device maps {words:?}"),
    }
}

/// Writes the model, and returns its size in bytes.
fn write(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let model = Model::new(|path| LlamaForCausalLm::new(path, &options()))?;
    LlamaForCausalLm::save_pretrained(&model, folder)?;
    Ok(vec![vec![model.num_parameters() as f64 * 4.0]])
}

/// Returns a map with the first blocks in memory, and the others in another place.
fn map(place: &str, in_memory: usize) -> DeviceMap {
    let blocks = (0..in_memory).map(|block| (format!("model.layers.{block}"), "cpu"));
    let others = [("model.layers".to_owned(), place), (String::new(), "cpu")];
    let names: Vec<(String, &str)> = blocks.chain(others).collect();
    DeviceMap::by_hand(names.iter().map(|(name, place)| (name.as_str(), *place)))
}

fn load(folder: &Path, place: &str) -> Result<Vec<Vec<f64>>> {
    fs::write("/proc/self/clear_refs", "5")?;
    let before = status("VmRSS")?;
    let start = Instant::now();
    let builder = Model::builder().kind(Kind::BFloat16).deferred();
    let model = LlamaForCausalLm::from_pretrained_as(folder, builder)?.place(&map(place, 1))?;
    let seconds = start.elapsed().as_secs_f64();
    let peak = status("VmHWM")? - before;
    drop(model);
    Ok(vec![vec![seconds], vec![peak]])
}

fn forward(folder: &Path, how: &str, tokens: i64) -> Result<Vec<Vec<f64>>> {
    let model = LlamaForCausalLm::from_pretrained_on(
        folder,
        &map(if how == "memory" { "cpu" } else { "disk" }, 0),
        &Weights::default(),
    )?;
    let ids = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).remainder(1000).view([1, -1]);
    let mut seconds = Vec::new();
    for pass in 0..WARM_UP + PASSES {
        let start = Instant::now();
        let _ = tch::no_grad(|| Module::forward(&model, &ids))?;
        if pass >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(vec![seconds])
}

/// Measures forwards with all blocks on the disk, each with a cold page cache.
fn cold(folder: &Path, tokens: i64) -> Result<Vec<Vec<f64>>> {
    let model = LlamaForCausalLm::from_pretrained_on(folder, &map("disk", 0), &Weights::default())?;
    let ids = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).remainder(1000).view([1, -1]);
    let mut seconds = Vec::new();
    for pass in 0..1 + PASSES {
        drop_pages(folder)?;
        let start = Instant::now();
        let _ = tch::no_grad(|| Module::forward(&model, &ids))?;
        // The first pass also takes checksums of all weights.
        if pass >= 1 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(vec![seconds])
}

/// Measures reads of the whole weights file with a cold page cache, in as many threads as a ring of weights has.
fn read(folder: &Path) -> Result<Vec<Vec<f64>>> {
    const THREADS: u64 = 2;
    const PIECE: u64 = 1 << 20;
    let path = folder.join(WEIGHTS);
    let mut seconds = Vec::new();
    for _ in 0..PASSES {
        drop_pages(folder)?;
        let start = Instant::now();
        let share = fs::metadata(&path)?.len().div_ceil(THREADS);
        let read = |thread: u64| -> io::Result<()> {
            let file = File::open(&path)?;
            let mut piece = vec![0; PIECE as usize];
            let (mut at, end) = (thread * share, (thread + 1) * share);
            while at < end {
                match file.read_at(&mut piece, at)? {
                    0 => break,
                    read => at += read as u64,
                }
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || read(thread))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(read) => read.context("cannot read the weights file"),
                Err(_) => bail!("a thread that reads the weights file panicked"),
            })
        })?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(vec![seconds])
}

/// Removes the weights file from the page cache.
fn drop_pages(folder: &Path) -> Result<()> {
    let file = File::open(folder.join(WEIGHTS))?;
    // Only pages that are on the disk can be dropped.
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

fn generate(folder: &Path, how: &str, tokens: i64) -> Result<Vec<Vec<f64>>> {
    let half = options().num_hidden_layers / 2;
    let model = LlamaForCausalLm::from_pretrained_on(
        folder,
        &map(if how == "memory" { "cpu" } else { "disk" }, half),
        &Weights::default(),
    )?;
    let ids = Tensor::arange(8, (Kind::Int64, Device::Cpu)).view([1, -1]);
    let greedy = GenerationOptions { max_new_tokens: tokens, ..Default::default() };
    let mut seconds = Vec::new();
    for pass in 0..1 + 3 {
        let start = Instant::now();
        let _ = greedy.generate(&model, &ids, None)?;
        if pass >= 1 {
            seconds.push(start.elapsed().as_secs_f64() / tokens as f64);
        }
    }
    Ok(vec![seconds])
}
