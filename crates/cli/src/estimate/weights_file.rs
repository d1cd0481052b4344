//! Sizes of a model from its weights file, of which no tensor is read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use brigade_checkpoint::convert::{WeightsOptions, find_weights};
use brigade_checkpoint::pth::TensorData;
use brigade_checkpoint::shards::Index;
use brigade_plan::{ModelSize, Shape};
use serde::Deserialize;

/// What the header of a weights file tells.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) size: ModelSize,
    pub(super) tensors: usize,
    /// How many values of each type there are.
    pub(super) types: BTreeMap<String, u64>,
    /// Which state dictionary was read, a line each.
    pub(super) notes: Vec<String>,
}

/// Reads a weights file, the index of several, or a folder with either; of a file of `torch.save` the state
/// dictionary at `key`, or the only one.
pub(super) fn read(path: &Path, key: Option<&str>, side: Option<u64>) -> anyhow::Result<Weights> {
    let file = if path.is_dir() { in_folder(path)? } else { path.to_owned() };
    let mut shapes = Vec::new();
    let mut types = BTreeMap::new();
    let mut notes = Vec::new();
    let mut add = |file: &Path, name: String, dtype: String, shape: Vec<u64>| {
        let count = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
        let count = count.with_context(|| {
            format!("{}: the shape {shape:?} of {name} is impossible", file.display())
        })?;
        let known = types.entry(dtype).or_insert(0_u64);
        *known = known.saturating_add(count);
        shapes.push((name, shape, count));
        anyhow::Ok(())
    };
    for shard in shards(&file)? {
        if key.is_none() && shard.extension().is_some_and(|extension| extension == "safetensors") {
            let header =
                header(&shard).with_context(|| format!("cannot read {}", shard.display()))?;
            for (name, tensor) in header {
                let Entry::Tensor { dtype, shape } = tensor else { continue };
                add(&shard, name, dtype, shape)?;
            }
            continue;
        }
        let options = WeightsOptions { key: key.map(str::to_owned), ..WeightsOptions::default() };
        let found = find_weights(&shard, &options)?;
        notes.extend(found.read.into_iter().map(|line| format!("read {line}")));
        for (name, tensor) in found.tensors {
            let info = tensor.info();
            add(&shard, name, info.dtype.to_string(), info.shape)?;
        }
    }
    ensure!(!shapes.is_empty(), "{} has no tensors", file.display());
    let learned = |name: &str| !BUFFERS.iter().any(|ending| name.ends_with(ending));
    let parameters: Vec<_> = shapes.iter().filter(|(name, ..)| learned(name)).collect();
    let size = ModelSize {
        parameters: parameters.iter().fold(0, |sum, (.., count)| sum.saturating_add(*count)),
        largest: parameters.iter().map(|(.., count)| *count).max().unwrap_or(0),
        shape: transformer(&file, &shapes)?.or_else(|| convolutional(&shapes, side)),
    };
    Ok(Weights { size, tensors: shapes.len(), types, notes })
}

type Tensor = (String, Vec<u64>, u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor {
        dtype: String,
        shape: Vec<u64>,
    },
    /// `__metadata__`.
    Other(serde::de::IgnoredAny),
}

fn in_folder(folder: &Path) -> anyhow::Result<PathBuf> {
    for name in FILES {
        let file = folder.join(name);
        if file.is_file() {
            return Ok(file);
        }
    }
    bail!("{} holds none of {}", folder.display(), FILES.join(", "))
}

fn shards(file: &Path) -> anyhow::Result<Vec<PathBuf>> {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("json") => {
            let index = Index::read(file)?;
            Ok(index.files().into_iter().map(|name| file.with_file_name(name)).collect())
        }
        _ => Ok(vec![file.to_owned()]),
    }
}

fn header(file: &Path) -> anyhow::Result<BTreeMap<String, Entry>> {
    let mut file = File::open(file)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).context("it is shorter than the header of a safetensors file")?;
    let length = u64::from_le_bytes(length);
    ensure!(
        length <= MAX_HEADER_LEN,
        "its header would have {length} bytes, at most {MAX_HEADER_LEN} are allowed: it is not a \
         safetensors file"
    );
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text)?;
    ensure!(text.len() as u64 == length, "it ends inside its header: it is cut short");
    serde_json::from_slice(&text).context("its header is not JSON: it is not a safetensors file")
}

/// The shape that Hugging Face's config.json beside the file tells, or the tensors' names.
fn transformer(file: &Path, tensors: &[Tensor]) -> anyhow::Result<Option<Shape>> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(alias = "n_embd", alias = "d_model", alias = "dim")]
        hidden_size: Option<u64>,
        #[serde(alias = "n_layer", alias = "num_layers", alias = "n_layers")]
        num_hidden_layers: Option<u64>,
        #[serde(alias = "n_head", alias = "num_heads", alias = "n_heads")]
        num_attention_heads: Option<u64>,
        vocab_size: Option<u64>,
    }
    let config = file.with_file_name("config.json");
    if let Ok(text) = fs::read_to_string(&config) {
        let config: Config = serde_json::from_str(&text)
            .with_context(|| format!("cannot understand {}", config.display()))?;
        if let (Some(hidden), Some(layers), Some(heads)) =
            (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
        {
            let vocabulary = config.vocab_size.unwrap_or(0);
            return Ok(Some(Shape::Transformer { layers, hidden, heads, vocabulary }));
        }
    }
    // Convolutions mean images, also where blocks of attention follow them.
    if tensors.iter().any(|(_, shape, _)| shape.len() == 4) {
        return Ok(None);
    }
    let blocks: BTreeSet<u64> = tensors
        .iter()
        .filter(|(name, ..)| name.contains("attn") || name.contains("attention"))
        .filter_map(|(name, ..)| name.split('.').find_map(|part| part.parse().ok()))
        .collect();
    let Some(hidden) = tensors
        .iter()
        .filter(|(_, shape, _)| shape.len() == 1)
        .filter(|(name, ..)| name.contains("ln") || name.contains("norm"))
        .map(|(_, shape, _)| shape[0])
        .max()
    else {
        return Ok(None);
    };
    if blocks.is_empty() || hidden == 0 {
        return Ok(None);
    }
    let vocabulary = tensors
        .iter()
        .filter(|(_, shape, _)| shape.len() == 2 && shape[1] == hidden)
        .map(|(_, shape, _)| shape[0])
        .filter(|rows| *rows > 4 * hidden)
        .max();
    Ok(Some(Shape::Transformer {
        layers: blocks.len() as u64,
        hidden,
        heads: (hidden / USUAL_HEAD).max(1),
        vocabulary: vocabulary.unwrap_or(0),
    }))
}

/// A pyramid, as nearly all are: a side is halved where the number of channels doubles.
fn convolutional(tensors: &[Tensor], side: Option<u64>) -> Option<Shape> {
    let side = side?;
    let convolutions: Vec<u64> = tensors
        .iter()
        .filter(|(_, shape, _)| shape.len() == 4)
        .map(|(_, shape, _)| shape[0])
        .collect();
    let narrowest = *convolutions.iter().min()?;
    let outputs = convolutions.iter().map(|channels| {
        let side = (side.saturating_mul(narrowest) / channels.max(&1)).max(1);
        channels.saturating_mul(side).saturating_mul(side)
    });
    Some(Shape::Convolutional { outputs: outputs.fold(0, u64::saturating_add) })
}

/// In the order in which they are looked for.
const FILES: [&str; 5] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
/// What the format itself allows.
const MAX_HEADER_LEN: u64 = 100_000_000;
/// Width of an attention head in most models.
const USUAL_HEAD: u64 = 64;
/// Names of values that are not learned.
const BUFFERS: [&str; 3] = ["running_mean", "running_var", "num_batches_tracked"];
