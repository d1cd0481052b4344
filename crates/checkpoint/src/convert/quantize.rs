//! Quantization of weights to 8 or 4 bits.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::{bf16, f16};

use super::{Report, must_be_free};
use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::pattern::matches_pattern;
use crate::pth::shown;
use crate::quantized::{
    PackedPart, PackedWeight, QuantizedDescription, QuantizedFormat, is_head_layer,
};
use crate::reader::{TensorReader, WeightsReader};
use crate::region::Region;
use crate::safetensors::layout_with;
use crate::weights_files::is_weights;

/// Options of a quantization: the weights that are quantized, and their format.
///
/// Tensors `NAME.weight` with two dimensions are quantized, and the stacked experts of transformers 5,
/// `NAME.experts.gate_up_proj` `[experts, 2 · inner, hidden]` and `NAME.experts.down_proj` `[experts, hidden, inner]`.
/// Embeddings, heads ([`is_head_layer`]), routers (`gate`) and stacks of other shapes keep their type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// Format of the quantized weights.
    pub format: QuantizedFormat,
    /// `true` to choose ranges with the least squared error, see [`PackedWeight::quantize`].
    pub is_calibrated: bool,
    /// Patterns of additional layers to quantize. `*` stands for any characters.
    pub also: Vec<String>,
    /// Patterns of layers to leave as they are. Takes precedence over `also`.
    pub skip: Vec<String>,
}

/// Layers whose weights have the shape `[in, out]` in GPT-2.
const GPT2_LAYERS: [&str; 3] = ["c_attn", "c_proj", "c_fc"];
/// Maximum size of a file that is copied along with the weights: tokenizers take some MB.
const MOST_COPIED_BYTES: u64 = 256 << 20;

/// Quantizes the weights of a folder, or of weights files, into a folder with one file, `model.safetensors` in
/// Brigade's layout. Tensors are read, quantized and written one at a time. Other files of the source, such as
/// `config.json` and those of tokenizers, are copied. `to` must not exist. It appears complete, or not at all after an
/// error.
///
/// ```
/// use brigade_checkpoint::convert::{QuantizeOptions, quantize};
/// use brigade_checkpoint::{QuantizedFormat, WeightsReader};
/// # let folder = tempfile::tempdir()?;
/// # let out = folder.path().join("out");
///
/// let format = QuantizedFormat::Int8;
/// let options = QuantizeOptions { format, is_calibrated: false, also: Vec::new(), skip: Vec::new() };
/// // Here from what GPTQ has packed in groups that are no format of libtorch's kernels.
/// quantize("tests/fixtures/quantized/gptq8_groups".as_ref(), &out, &options)?;
/// assert!(WeightsReader::open(&out)?.get("fc.weight").unwrap().is_quantized());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails with [`Error::Occupied`] if `to` exists, with [`Error::Unsupported`] for a tensor that cannot be quantized and
/// for a pattern that matches no layer, with [`Error::Io`], or with an error about the source.
pub fn quantize(from: &Path, to: &Path, options: &QuantizeOptions) -> Result<Report, Error> {
    must_be_free(to)?;
    let parent = match to.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let partial = tempfile::Builder::new()
        .prefix(".")
        .suffix(".partial")
        .tempdir_in(parent)
        .map_err(Error::temporary(to, parent))?;
    let made = partial.path().join("quantized");
    fs::create_dir(&made).map_err(Error::io("make", &made))?;
    let written = write(from, &made, options).and_then(|report| {
        fs::rename(&made, to).map_err(Error::io("rename", &made))?;
        Ok(report)
    });
    let mut report = written.map_err(|error| error.renamed(partial.path(), to))?;
    report.written.iter_mut().for_each(|path| *path = to.join(&*path));
    report.written.sort();
    Ok(report)
}

/// A tensor of the source, with its planned form in the target.
struct Planned<'r> {
    tensor: TensorReader<'r>,
    /// Format, and `true` if the parameter has the shape `[in, out]`. `None` for a tensor that is copied.
    quantized: Option<(QuantizedFormat, bool)>,
    /// Index of its first part in the list of written tensors.
    first: usize,
}

fn write(from: &Path, into: &Path, options: &QuantizeOptions) -> Result<Report, Error> {
    let weights = WeightsReader::open(from)?;
    weights.verify()?;
    let source = if from.is_dir() { from } else { from.parent().unwrap_or_else(|| Path::new("")) };
    let is_gpt2 = fs::read(source.join("config.json")).is_ok_and(|text| {
        serde_json::from_slice::<serde_json::Value>(&text).is_ok_and(|config| {
            config.get("model_type").and_then(|value| value.as_str()) == Some("gpt2")
        })
    });
    check_patterns(from, &weights, options)?;
    let path = into.join("model.safetensors");
    let mut description = QuantizedDescription::default();
    let mut infos: Vec<(String, TensorInfo)> = Vec::new();
    let mut planned = Vec::new();
    let mut report = Report::default();
    let mut unfit = Vec::new();
    for tensor in weights.tensors() {
        let (name, info) = (tensor.name(), tensor.info());
        let first = infos.len();
        let layer = layer_of(&weights, tensor);
        if layer.is_none() && is_float_stack(tensor) {
            unfit.push(name);
        }
        let layer = layer.filter(|layer| chooses(options, layer, info));
        let packed = if tensor.is_quantized() { tensor.read_packed()? } else { None };
        let quantized = match (layer, packed) {
            // Already quantized to 8 or 4 bits.
            (_, Some(packed)) => {
                let parts = description
                    .add_packed(name, &packed, tensor.is_transposed(), matrices(tensor))
                    .map_err(|error| unsupported(tensor, &error))?;
                infos.extend(parts.into_iter().map(|(name, part)| (name, part.info)));
                Some((packed.format, tensor.is_transposed()))
            }
            (Some(_), None) if info.shape.len() == 3 => {
                let [count, rows, columns] = [0, 1, 2].map(|dimension| info.shape[dimension]);
                let format = options.format;
                format.check(columns as usize).map_err(|error| unsupported(tensor, &error))?;
                for matrix in description.add_stack(name, format, count, [rows, columns]) {
                    infos.extend(empty_parts(&matrix, format, rows, columns));
                }
                Some((format, false))
            }
            (Some(layer), None) => {
                let last = layer.rsplit('.').next().unwrap_or_default();
                let is_transposed = is_gpt2 && GPT2_LAYERS.contains(&last);
                let (rows, columns) = match (info.shape[0], info.shape[1]) {
                    (inputs, outputs) if is_transposed => (outputs, inputs),
                    shape => shape,
                };
                let format = options.format;
                format.check(columns as usize).map_err(|error| unsupported(tensor, &error))?;
                infos.extend(empty_parts(name, format, rows, columns));
                description.add(name, format, [rows, columns], is_transposed);
                Some((format, is_transposed))
            }
            (None, None) => {
                infos.push((name.to_owned(), info.clone()));
                None
            }
        };
        planned.push(Planned { tensor, quantized, first });
    }
    let list: Vec<_> = infos.iter().map(|(name, info)| (name.as_str(), info.clone())).collect();
    let layout = layout_with(&path, &list, &HashMap::from([description.to_metadata()]))?;
    let mut offsets = vec![0u64; infos.len()];
    let mut at = layout.header.len() as u64;
    for &place in &layout.order {
        offsets[place] = at;
        at += infos[place].1.bytes().unwrap_or(0);
    }
    let file = File::create_new(&path).map_err(Error::io("write", &path))?;
    let put =
        |bytes: &[u8], at: u64| file.write_all_at(bytes, at).map_err(Error::io("write", &path));
    put(&layout.header, 0)?;
    file.set_len(layout.bytes).map_err(Error::io("write", &path))?;
    let mut count = 0;
    for Planned { tensor, quantized, first } in planned {
        let Some((format, is_transposed)) = quantized else {
            let info = tensor.info();
            // Copy some rows at a time, 16 MB.
            let whole = Region::whole(&info.shape);
            let mut at = offsets[first];
            for part in whole.parts((16 << 20) / info.dtype.bytes()) {
                let mut bytes = vec![0; part.elements() as usize * info.dtype.bytes() as usize];
                tensor.read(&part, &mut bytes)?;
                put(&bytes, at)?;
                at += bytes.len() as u64;
            }
            continue;
        };
        count += 1;
        let mut offsets = offsets[first..].iter();
        let mut put_next = |part: &PackedPart| match offsets.next() {
            Some(at) => put(&part.bytes, *at),
            None => Ok(()),
        };
        if let Some(packed) = tensor.read_packed()? {
            let parts = QuantizedDescription::default()
                .add_packed(tensor.name(), &packed, is_transposed, matrices(tensor))
                .map_err(|error| unsupported(tensor, &error))?;
            parts.iter().try_for_each(|(_, part)| put_next(part))?;
            continue;
        }
        // One matrix of a stack at a time.
        let whole = Region::whole(&tensor.info().shape);
        for matrix in 0..matrices(tensor).unwrap_or(1) {
            let region = match matrices(tensor) {
                Some(_) => whole.narrow(0, matrix, 1),
                None => whole.clone(),
            };
            let packed = packed_of(tensor, &region, format, is_transposed, options.is_calibrated)?;
            packed.to_parts().iter().try_for_each(&mut put_next)?;
        }
    }
    file.sync_all().map_err(Error::io("write", &path))?;
    report.changed.push(format!("{count} weights are stored in {}", options.format));
    if let Some(first) = unfit.first() {
        let first = shown(first);
        let kept = match unfit.len() {
            1 => format!("{first} keeps its type"),
            count => format!("{count} stacks of experts keep their types, such as {first}"),
        };
        report.changed.push(format!(
            "{kept}: only experts stacked as gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, \
             hidden, inner] are quantised"
        ));
    }
    report.written.push("model.safetensors".into());
    if from.is_dir() {
        copy_beside(from, into, &mut report)?;
    }
    Ok(report)
}

/// Stacks of all experts of a layer, in transformers 5: gate and up projections, and down projections.
const STACKS: [&str; 2] = [".experts.gate_up_proj", ".experts.down_proj"];

/// Returns the layer of a weight, by which it is chosen: the name before `.weight`, or the name of a stack of experts.
/// `None` for other tensors.
fn layer_of<'r>(weights: &WeightsReader, tensor: TensorReader<'r>) -> Option<&'r str> {
    let name = tensor.name();
    match tensor.info().shape.len() {
        2 => name.strip_suffix(".weight"),
        3 => is_expert_stack(weights, name).then_some(name),
        _ => None,
    }
}

/// Returns `true` for a stack of experts whose matrices are `[out, in]`. In other models those of the same names are
/// `[in, out]`, which the shapes of the two stacks of a layer show.
fn is_expert_stack(weights: &WeightsReader, name: &str) -> bool {
    let Some(layer) = STACKS.iter().find_map(|stack| name.strip_suffix(stack)) else {
        return false;
    };
    let stacks = STACKS.map(|stack| weights.get(&format!("{layer}{stack}")));
    let [Some(gate_up), Some(down)] = stacks else { return false };
    match (&gate_up.info().shape[..], &down.info().shape[..]) {
        (&[experts, both, hidden], &[others, outputs, inner]) => {
            experts == others && hidden == outputs && inner.checked_mul(2) == Some(both)
        }
        _ => false,
    }
}

/// Returns `true` for a stack of matrices of floating-point numbers, as experts have.
fn is_float_stack(tensor: TensorReader<'_>) -> bool {
    let info = tensor.info();
    info.shape.len() == 3
        && FLOATS.contains(&info.dtype)
        && !tensor.is_quantized()
        && tensor.name().contains(".experts.")
}

/// Types of weights that are quantized.
const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16];

fn chooses(options: &QuantizeOptions, layer: &str, info: &TensorInfo) -> bool {
    let has = |patterns: &[String]| patterns.iter().any(|it| matches_pattern(it, layer));
    let last = layer.rsplit('.').next().unwrap_or_default();
    let stays = is_head_layer(layer)
        || last == "gate"
        || layer.contains("embed")
        || ["wte", "wpe", "shared"].contains(&last);
    !info.shape.contains(&0)
        && FLOATS.contains(&info.dtype)
        && !has(&options.skip)
        && (has(&options.also) || !stays)
}

fn check_patterns(
    from: &Path,
    weights: &WeightsReader,
    options: &QuantizeOptions,
) -> Result<(), Error> {
    let fits = |pattern: &String| {
        let mut layers = weights.tensors().filter_map(|tensor| {
            tensor.name().strip_suffix(".weight").or_else(|| layer_of(weights, tensor))
        });
        layers.any(|layer| matches_pattern(pattern, layer))
    };
    match options.also.iter().chain(&options.skip).find(|pattern| !fits(pattern)) {
        Some(pattern) => Err(Error::Unsupported {
            path: from.to_owned(),
            fact: format!("`{}` matches no layer with a weight", shown(pattern)),
        }),
        None => Ok(()),
    }
}

/// Returns the number of matrices of a stack of weights. `None` for a single weight.
fn matrices(tensor: TensorReader<'_>) -> Option<u64> {
    match tensor.info().shape[..] {
        [count, _, _] => Some(count),
        _ => None,
    }
}

/// Returns names, types and shapes of a weight's parts after quantization. Scales are bfloat16.
fn empty_parts(
    name: &str,
    format: QuantizedFormat,
    rows: u64,
    columns: u64,
) -> Vec<(String, TensorInfo)> {
    let width = format.row_bytes(columns as usize) as u64;
    let groups = format.scales_per_row(columns as usize) as u64;
    let shape = if format.has_zeros() { vec![rows, groups] } else { vec![rows] };
    let scales = TensorInfo { dtype: Dtype::BF16, shape };
    let packed = TensorInfo { dtype: format.dtype(), shape: vec![rows, width] };
    let mut parts = vec![(".packed", packed), (".scales", scales.clone())];
    if format.has_zeros() {
        parts.push((".zeros", scales));
    }
    parts.into_iter().map(|(suffix, info)| (format!("{name}{suffix}"), info)).collect()
}

/// Reads a weight, or a matrix of a stack, and quantizes it.
fn packed_of(
    tensor: TensorReader<'_>,
    region: &Region,
    format: QuantizedFormat,
    is_transposed: bool,
    is_calibrated: bool,
) -> Result<PackedWeight, Error> {
    let info = tensor.info();
    let mut bytes = vec![0; region.elements() as usize * info.dtype.bytes() as usize];
    tensor.read(region, &mut bytes)?;
    let mut values: Vec<f32> = match info.dtype {
        Dtype::F64 => bytes.as_chunks().0.iter().map(|&it| f64::from_le_bytes(it) as f32).collect(),
        Dtype::F16 => {
            bytes.as_chunks().0.iter().map(|&it| f16::from_le_bytes(it).to_f32()).collect()
        }
        Dtype::BF16 => {
            bytes.as_chunks().0.iter().map(|&it| bf16::from_le_bytes(it).to_f32()).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|&it| f32::from_le_bytes(it)).collect(),
    };
    drop(bytes);
    let [.., first, second] = info.shape[..] else { return Err(no_matrix(tensor)) };
    let (first, second) = (first as usize, second as usize);
    let columns = if is_transposed { first } else { second };
    if is_transposed {
        let at = |place: usize| values[place % first * second + place / first];
        values = (0..values.len()).map(at).collect();
    }
    PackedWeight::quantize(&values, columns, format, is_calibrated)
        .map_err(|error| unsupported(tensor, &error))
}

fn no_matrix(tensor: TensorReader<'_>) -> Error {
    Error::Unsupported {
        path: tensor.path().to_owned(),
        fact: format!("`{}` is no matrix: it cannot be quantised", shown(tensor.name())),
    }
}

fn unsupported(tensor: TensorReader<'_>, error: &dyn std::error::Error) -> Error {
    Error::Unsupported {
        path: tensor.path().to_owned(),
        fact: format!("`{}` cannot be quantised: {error}", shown(tensor.name())),
    }
}

/// Copies the files other than weights and reports folders and files that are too large. Removes the source's
/// quantization method from a configuration.
fn copy_beside(from: &Path, into: &Path, report: &mut Report) -> Result<(), Error> {
    for entry in fs::read_dir(from).map_err(Error::io("read", from))? {
        let path = entry.map_err(Error::io("read", from))?.path();
        let Some(file) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            continue;
        };
        if is_weights(&file) || file.ends_with(".index.json") || file.starts_with('.') {
            continue;
        }
        let metadata = fs::metadata(&path).map_err(Error::io("read", &path))?;
        if !metadata.is_file() || metadata.len() > MOST_COPIED_BYTES {
            report.left_out.push(format!("{file}: not a file of a model's configuration"));
            continue;
        }
        let copy = into.join(&file);
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        let text = if file == "config.json" { without_method(text) } else { text };
        fs::write(&copy, text).map_err(Error::io("write", &copy))?;
        report.written.push(file.into());
    }
    Ok(())
}

/// Returns a configuration without the quantization method of its old weights.
fn without_method(text: Vec<u8>) -> Vec<u8> {
    let config = serde_json::from_slice(&text);
    let Ok(serde_json::Value::Object(mut config)) = config else { return text };
    match config.remove("quantization_config") {
        Some(_) => serde_json::Value::Object(config).to_string().into_bytes(),
        None => text,
    }
}
