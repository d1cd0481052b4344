//! Sizes of a model from its weights file, without reading any tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use brigade_checkpoint::convert::{WeightsOptions, find_weights};
use brigade_checkpoint::pth::TensorData;
use brigade_checkpoint::{Dtype, TensorInfo};
use brigade_sharding::Parameter;
use brigade_sharding::device_map::{MappedTensor, ModuleTree};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::memory::{Mixture, ModelSize, Shape};

/// Sizes in a weights file.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(super) size: ModelSize,
    pub(super) tensors: usize,
    /// Number of values of each data type.
    pub(super) types: BTreeMap<String, u64>,
    /// State dictionary that was read, in lines.
    pub(super) read: Vec<String>,
    /// Parameters as in training: floats in 32 bits.
    pub(super) parameters: Vec<Parameter>,
    /// Size of the buffers in bytes.
    pub(super) buffers: u64,
    /// Modules with the tensors as they are in the file.
    pub(crate) tree: ModuleTree,
}

/// Reads a weights file of any format, the index of several, or a folder with either. Of a file of `torch.save`, reads
/// the state dictionary at `key`, or the only one.
pub(crate) fn read(path: &Path, key: Option<&str>, side: Option<u64>) -> anyhow::Result<Weights> {
    let options = WeightsOptions { key: key.map(str::to_owned), ..WeightsOptions::default() };
    let found = find_weights(path, &options)?;
    let mut shapes = Vec::new();
    let mut infos = Vec::new();
    let mut types = BTreeMap::new();
    for (name, tensor) in found.tensors {
        let info = tensor.info();
        let count = info.elements().with_context(|| {
            format!("{}: the shape {:?} of {name} is impossible", path.display(), info.shape)
        })?;
        let known = types.entry(info.dtype.name().to_owned()).or_insert(0_u64);
        *known = known.saturating_add(count);
        shapes.push((name.clone(), info.shape.clone(), count));
        infos.push((name, info));
    }
    ensure!(!shapes.is_empty(), "{} has no tensors", path.display());
    let learned: Vec<_> = shapes.iter().filter(|(name, ..)| is_learned(name)).collect();
    let size = ModelSize {
        parameters: learned.iter().fold(0, |sum, (.., count)| sum.saturating_add(*count)),
        largest: learned.iter().map(|(.., count)| *count).max().unwrap_or(0),
        shape: transformer(path, &shapes)?.or_else(|| convolutional(&shapes, side)),
    };
    let tree = module_tree(&infos, ties_head(path)?)?;
    let (parameters, buffers) = parameters(infos);
    let (tensors, read) = (shapes.len(), found.read);
    Ok(Weights { size, tensors, types, read, parameters, buffers, tree })
}

/// Returns the parameters among the tensors of a weights file, in units derived from their names, and the bytes of the
/// buffers. Floats have 32 bits, as in training; tensors that cannot be trained are frozen.
pub(crate) fn parameters(
    tensors: impl IntoIterator<Item = (String, TensorInfo)>,
) -> (Vec<Parameter>, u64) {
    let mut parameters = Vec::new();
    let mut buffers = 0u64;
    for (name, info) in tensors {
        if !is_learned(&name) {
            buffers = buffers.saturating_add(info.bytes().unwrap_or(u64::MAX));
            continue;
        }
        let trained = matches!(info.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let dtype = match info.dtype {
            Dtype::F16 | Dtype::BF16 => Dtype::F32,
            own => own,
        };
        let is_expert = name.contains(EXPERTS);
        let parameter = Parameter::new(name, &info.shape, dtype).in_block_of_name();
        let parameter = if is_expert { parameter.of_experts() } else { parameter };
        parameters.push(if trained { parameter } else { parameter.frozen() });
    }
    (parameters, buffers)
}

fn is_learned(name: &str) -> bool {
    !BUFFERS.iter().any(|ending| name.ends_with(ending))
}

/// Reads the config.json beside the weights, if there is one.
fn read_config<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    let config =
        if path.is_dir() { path.join("config.json") } else { path.with_file_name("config.json") };
    let Ok(text) = fs::read_to_string(&config) else { return Ok(None) };
    let read = serde_json::from_str(&text);
    read.map(Some).with_context(|| format!("cannot understand {}", config.display()))
}

/// Returns `true` if, by config.json, the language head shares the embedding's weights; `None` if it has no such key,
/// for a model with a language head.
fn ties_head(path: &Path) -> anyhow::Result<Option<bool>> {
    #[derive(Deserialize)]
    struct Config {
        tie_word_embeddings: Option<bool>,
        #[serde(default)]
        architectures: Vec<String>,
    }
    let Some(config) = read_config::<Config>(path)? else { return Ok(Some(false)) };
    let has_head = |name: &String| name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel");
    let has_head = config.architectures.iter().any(has_head);
    Ok(if has_head { config.tie_word_embeddings } else { Some(false) })
}

/// Builds modules from the tensors of a weights file in the usual order of models, which files do not contain:
/// embeddings, blocks by number, the rest, the head. The blocks are units.
pub(crate) fn module_tree(
    tensors: &[(String, TensorInfo)],
    ties_head: Option<bool>,
) -> anyhow::Result<ModuleTree> {
    let mut units = BTreeSet::new();
    let mut mapped = Vec::new();
    let embedding = tensors.iter().find(|(name, _)| EMBEDDINGS.iter().any(|it| name.ends_with(it)));
    let has_head = tensors.iter().any(|(name, _)| name == HEAD);
    for (name, info) in tensors {
        let unit = Parameter::new(name, &info.shape, info.dtype).in_block_of_name().unit;
        let mut tensor = if is_learned(name) {
            MappedTensor::parameter(name, &info.shape, info.dtype)
        } else {
            MappedTensor::buffer(name, &info.shape, info.dtype)
        };
        if let Some((embedding, of)) = embedding
            && name == HEAD
            && ties_head == Some(true)
            && of.shape == info.shape
        {
            tensor = tensor.tied_to(embedding);
        }
        mapped.push((order(name, unit.as_deref()), tensor));
        units.extend(unit);
    }
    if let Some((embedding, info)) = embedding
        && !has_head
        && ties_head != Some(false)
    {
        let head = MappedTensor::parameter(HEAD, &info.shape, info.dtype);
        mapped.push((order(HEAD, None), head.tied_to(embedding)));
    }
    mapped.sort_by(|(first, _), (second, _)| first.cmp(second));
    Ok(ModuleTree::new(mapped.into_iter().map(|(_, tensor)| tensor), units)?)
}

/// Returns the usual position of a tensor in a model.
fn order(name: &str, unit: Option<&str>) -> (u8, String, u64) {
    let numbered = unit.and_then(|unit| unit.rsplit_once('.'));
    let numbered = numbered.and_then(|(outer, number)| Some((outer, number.parse().ok()?)));
    match numbered {
        Some((outer, number)) => (1, outer.to_owned(), number),
        None if EARLY.iter().any(|part| name.contains(part)) => (0, String::new(), 0),
        None if name == HEAD => (3, String::new(), 0),
        None => (2, String::new(), 0),
    }
}

type Tensor = (String, Vec<u64>, u64);

/// Returns the shape from Hugging Face's config.json beside the file, or from the tensors' names.
fn transformer(path: &Path, tensors: &[Tensor]) -> anyhow::Result<Option<Shape>> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(alias = "n_embd", alias = "d_model", alias = "dim")]
        hidden_size: Option<u64>,
        #[serde(alias = "n_layer", alias = "num_layers", alias = "n_layers")]
        num_hidden_layers: Option<u64>,
        #[serde(alias = "n_head", alias = "num_heads", alias = "n_heads")]
        num_attention_heads: Option<u64>,
        num_key_value_heads: Option<u64>,
        head_dim: Option<u64>,
        vocab_size: Option<u64>,
        #[serde(alias = "n_inner")]
        intermediate_size: Option<u64>,
        #[serde(alias = "num_experts", alias = "n_routed_experts")]
        num_local_experts: Option<u64>,
        num_experts_per_tok: Option<u64>,
        moe_intermediate_size: Option<u64>,
    }
    if let Some(config) = read_config::<Config>(path)?
        && let (Some(hidden), Some(layers), Some(heads)) =
            (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    {
        let vocabulary = config.vocab_size.unwrap_or(0);
        let head = config.head_dim.unwrap_or_else(|| hidden / heads.max(1));
        let keys = config.num_key_value_heads.map_or(hidden, |keys| keys.saturating_mul(head));
        let mixture = config.num_local_experts.filter(|experts| *experts > 0).map(|experts| {
            let intermediate = config.moe_intermediate_size.or(config.intermediate_size);
            Mixture {
                experts,
                chosen: config.num_experts_per_tok.unwrap_or(1),
                intermediate: intermediate.unwrap_or_else(|| hidden.saturating_mul(4)),
            }
        });
        let intermediate = match mixture {
            Some(mixture) => mixture.intermediate,
            None => config.intermediate_size.unwrap_or_else(|| hidden.saturating_mul(4)),
        };
        return Ok(Some(Shape::Transformer {
            layers,
            hidden,
            heads,
            keys,
            vocabulary,
            mixture,
            intermediate,
            gated: has_gates(tensors),
        }));
    }
    // Convolutions indicate images, even if blocks of attention follow them.
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
    let intermediate = tensors
        .iter()
        .filter(|(name, shape, _)| {
            shape.len() == 2 && shape[1] == hidden && name.contains("gate_proj")
        })
        .map(|(_, shape, _)| shape[0])
        .max();
    Ok(Some(Shape::Transformer {
        layers: blocks.len() as u64,
        hidden,
        heads: (hidden / USUAL_HEAD).max(1),
        keys: hidden,
        vocabulary: vocabulary.unwrap_or(0),
        mixture: None,
        intermediate: intermediate.unwrap_or_else(|| hidden.saturating_mul(4)),
        gated: has_gates(tensors),
    }))
}

/// Returns `true` if feed-forward layers are gated pairs, by the names of Llama, Mixtral and fused projections.
fn has_gates(tensors: &[Tensor]) -> bool {
    let is_gate = |part: &str| matches!(part, "gate_proj" | "gate_up_proj" | "w3");
    tensors.iter().any(|(name, ..)| name.split('.').any(is_gate))
}

/// Returns the shape of a pyramid, as nearly all are: the side is halved where the number of channels doubles.
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

/// Width of an attention head in most models.
const USUAL_HEAD: u64 = 64;
/// Part of the names of experts.
const EXPERTS: &str = ".experts.";
/// Names of values that are not trained.
const BUFFERS: [&str; 3] = ["running_mean", "running_var", "num_batches_tracked"];
/// Names of embeddings whose weights a language head may share.
const EMBEDDINGS: [&str; 3] = ["embed_tokens.weight", "wte.weight", "word_embeddings.weight"];
/// Parts of the names of tensors before the blocks.
const EARLY: [&str; 4] = ["embed", "wte.", "wpe.", "shared."];
/// Name of a language head's weights.
const HEAD: &str = "lm_head.weight";
