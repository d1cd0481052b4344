//! What a checkpoint holds, as a table or as JSON.

use std::fmt::Write;
use std::path::Path;

use brigade_checkpoint::convert::{WeightsOptions, find_weights};
use brigade_checkpoint::layout::{Checkpoint, MANIFEST, MeshAxis, Object, Placement, TensorEntry};
use brigade_checkpoint::pth::{PthFile, TensorData};
use brigade_checkpoint::{Error, TensorInfo};
use serde_json::{Value, json};

use super::bytes;

pub(super) fn answer(path: &Path, json: bool) -> anyhow::Result<String> {
    let is_checkpoint = path.is_dir() && (path.join(MANIFEST).exists() || !has_weights(path));
    if !is_checkpoint {
        let weights = match find_weights(path, &WeightsOptions::default()) {
            // All of the file is shown, not one dictionary of it.
            Ok(found) if path.is_file() && !(found.key.is_empty() && found.left_out.is_empty()) => {
                return states(path, json);
            }
            Err(
                Error::Unsupported { .. }
                | Error::NoStateDict { .. }
                | Error::SeveralStateDicts { .. },
            ) if path.is_file() => return states(path, json),
            weights => weights?,
        };
        let tensors = weights.tensors.into_iter().map(|(name, tensor)| (name, tensor.info()));
        let tensors: Vec<(String, TensorInfo)> = tensors.collect();
        return Ok(if json {
            format!("{:#}\n", json!({ "tensors": tensors_json(&tensors) }))
        } else {
            format!("{}: weights\n{}", path.display(), table(&tensors))
        });
    }
    let checkpoint = Checkpoint::open(path)?;
    if json { as_json(&checkpoint) } else { as_text(&checkpoint) }
}

/// A file of torch.save with more than weights: an optimizer's state, a dictionary of several. Objects
/// that are not plain values are shown by their names.
fn states(path: &Path, json: bool) -> anyhow::Result<String> {
    let mut tensors = Vec::new();
    let tree = PthFile::open(path)?.value()?.try_map(&mut |place, tensor| {
        tensors.push((place.to_owned(), tensor.info()));
        Ok::<_, Error>(place.to_owned())
    })?;
    let state = tree.to_json();
    if json {
        return Ok(format!("{:#}\n", json!({ "state": state, "tensors": tensors_json(&tensors) })));
    }
    let mut text = format!("{}: {} of torch.save\n", path.display(), tree.describe());
    lines(&mut text, &state, "  ")?;
    if !tensors.is_empty() {
        text.push_str(&table(&tensors));
    }
    Ok(text)
}

fn has_weights(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
        .iter()
        .any(|name| folder.join(name).is_file())
}

fn as_text(checkpoint: &Checkpoint) -> anyhow::Result<String> {
    let manifest = checkpoint.manifest();
    let mut text = String::new();
    let plural = |count: u64, what: &str| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    writeln!(
        text,
        "{}: manifest version {}, made by {}",
        checkpoint.folder().display(),
        manifest.version,
        manifest.made_by
    )?;
    writeln!(
        text,
        "{}, {}, {}; {} in {}",
        plural(manifest.step, "optimizer step"),
        plural(manifest.samples, "sample"),
        plural(manifest.world_size as u64, "rank"),
        bytes(manifest.bytes()),
        plural(manifest.files.len() as u64, "file"),
    )?;
    if manifest.mesh.len() > 1 {
        let axis = |axis: &MeshAxis| format!("{} {}", axis.name, axis.size);
        let axes: Vec<String> = manifest.mesh.iter().map(axis).collect();
        writeln!(text, "mesh of ranks: {}", axes.join(" x "))?;
    }
    let mut used = Vec::new();
    for object in &manifest.objects {
        used.extend(object.files());
        writeln!(text, "\n{}", object.name)?;
        if let Some(state) = checkpoint.state(object)? {
            lines(&mut text, &state.to_json(), "  ")?;
        }
        // Compares what the manifest says with the files.
        checkpoint.chunks(object)?;
        if !object.tensors.is_empty() {
            text.push_str(&table(&infos(object)));
        }
        for (name, tensor) in object.tensors.iter().filter(|(_, tensor)| is_sharded(tensor)) {
            let placements: Vec<String> =
                tensor.placements.iter().map(ToString::to_string).collect();
            writeln!(
                text,
                "  {name}: {} over the mesh, stored in {}",
                placements.join(" "),
                plural(tensor.chunks.len() as u64, "chunk")
            )?;
        }
    }
    let others: Vec<&str> = manifest
        .files
        .keys()
        .filter(|name| !used.contains(name))
        .map(|name| name.as_str())
        .collect();
    if !others.is_empty() {
        writeln!(text, "\nother files: {}", others.join(", "))?;
    }
    Ok(text)
}

/// The plain values of a state: a line each, without those that are long.
fn lines(text: &mut String, state: &Value, indent: &str) -> std::fmt::Result {
    let Value::Object(entries) = state else { return Ok(()) };
    for (key, value) in entries {
        match value {
            Value::Object(inner) if inner.contains_key("$tensor") => {}
            Value::Object(inner) => match inner.get("$bytes").and_then(Value::as_str) {
                Some(encoded) => {
                    let size = bytes(encoded.trim_end_matches('=').len() as u64 * 3 / 4);
                    writeln!(text, "{indent}{key}: {size}")?;
                }
                None if inner.values().all(only_tensors) => {}
                None => {
                    writeln!(text, "{indent}{key}:")?;
                    lines(text, value, &format!("{indent}  "))?;
                }
            },
            Value::Array(items) => match items.len() {
                0..=3 if items.iter().all(|item| !item.is_object()) => {
                    writeln!(text, "{indent}{key}: {value}")?;
                }
                _ => {
                    let plain = items.iter().all(|item| !item.is_object());
                    writeln!(text, "{indent}{key}: {} items", items.len())?;
                    for (place, item) in items.iter().enumerate().filter(|_| !plain) {
                        writeln!(text, "{indent}  {place}:")?;
                        lines(text, item, &format!("{indent}    "))?;
                    }
                }
            },
            Value::Null => {}
            value => writeln!(text, "{indent}{key}: {value}")?,
        }
    }
    Ok(())
}

fn only_tensors(value: &Value) -> bool {
    match value {
        Value::Object(inner) => inner.contains_key("$tensor") || inner.values().all(only_tensors),
        _ => false,
    }
}

fn table(tensors: &[(String, TensorInfo)]) -> String {
    let shapes: Vec<String> = tensors.iter().map(|(_, info)| format!("{:?}", info.shape)).collect();
    // One long name does not widen all lines.
    let widest = |lengths: &mut dyn Iterator<Item = usize>| {
        lengths.max().unwrap_or_default().min(MAX_COLUMN)
    };
    let wide = widest(&mut tensors.iter().map(|(name, _)| name.len()));
    let shape_wide = widest(&mut shapes.iter().map(String::len));
    let mut text = String::new();
    for ((name, info), shape) in tensors.iter().zip(&shapes) {
        let size = bytes(info.bytes().unwrap_or_default());
        text.push_str(&format!(
            "  {name:wide$}  {shape:shape_wide$}  {:4}  {size:>9}\n",
            info.dtype
        ));
    }
    let sizes = tensors.iter().filter_map(|(_, info)| info.bytes());
    let total = sizes.fold(0u64, u64::saturating_add);
    text.push_str(&format!("  {} tensors, {}\n", tensors.len(), bytes(total)));
    text
}

/// The tensors of an object, by name, with their global shapes.
fn infos(object: &Object) -> Vec<(String, TensorInfo)> {
    object.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.info())).collect()
}

fn is_sharded(tensor: &TensorEntry) -> bool {
    tensor.chunks.len() > 1
        || tensor.placements.iter().any(|placement| *placement != Placement::Replicate)
}

fn as_json(checkpoint: &Checkpoint) -> anyhow::Result<String> {
    let manifest = checkpoint.manifest();
    let mut objects = Vec::new();
    for object in &manifest.objects {
        let state = checkpoint.state(object)?.map(|state| state.to_json());
        checkpoint.chunks(object)?;
        let tensors = object.tensors.iter().map(|(name, tensor)| {
            json!({
                "name": name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.info().bytes(),
                "placements": tensor.placements,
                "chunks": tensor.chunks,
            })
        });
        let tensors: Vec<Value> = tensors.collect();
        objects.push(json!({
            "name": object.name,
            "kind": object.kind,
            "files": object.files().collect::<Vec<_>>(),
            "state": state,
            "tensors": tensors,
        }));
    }
    let all = json!({
        "format": manifest.format,
        "version": manifest.version,
        "made_by": manifest.made_by,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "step": manifest.step,
        "samples": manifest.samples,
        "bytes": manifest.bytes(),
        "files": manifest.files,
        "objects": objects,
    });
    Ok(format!("{all:#}\n"))
}

fn tensors_json(tensors: &[(String, TensorInfo)]) -> Value {
    let tensor = |(name, info): &(String, TensorInfo)| json!({ "name": name, "dtype": info.dtype, "shape": info.shape, "bytes": info.bytes() });
    tensors.iter().map(tensor).collect()
}

const MAX_COLUMN: usize = 100;
