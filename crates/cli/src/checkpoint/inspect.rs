//! Contents of a checkpoint, as a table or as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade_checkpoint::convert::{WeightsOptions, find_weights};
use brigade_checkpoint::layout::{
    Checkpoint, MANIFEST, MeshAxis, Object, Placement, TensorEntry, latest, numbered, numbered_path,
};
use brigade_checkpoint::pth::{PthFile, TensorData};
use brigade_checkpoint::{
    DeepSpeedFolder, Error, TensorInfo, dcp_folder, deepspeed_folder, format_of, weights_file,
};
use brigade_rank_env::text::{counted, escaped, printable};
use serde_json::{Value, json};

use super::bytes;

/// Amount of detail that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Full,
    /// One line for each object.
    Short,
    Json,
}

pub(super) fn answer(path: &Path, form: Form) -> anyhow::Result<String> {
    if path.is_dir() && !path.join(MANIFEST).exists() {
        if let Some(folder) = deepspeed_folder(path)? {
            return deepspeed(path, &DeepSpeedFolder::open(&folder)?, form);
        }
        if let Some(project) = Project::find(path)? {
            return project.answer(form);
        }
        if let Some(file) = weights_file(path) {
            return weights(path, Some(&file), form);
        }
        if dcp_folder(path)?.is_some() {
            return weights(path, None, form);
        }
    }
    if path.is_dir() {
        checkpoint(&Checkpoint::open(path)?, form, None)
    } else {
        weights(path, Some(path), form)
    }
}

/// Describes the weights at `path`. `file` is that file, or the file of a folder; `None` if the weights are in several
/// files.
fn weights(path: &Path, file: Option<&Path>, form: Form) -> anyhow::Result<String> {
    // For an index, the weights of all its files are shown.
    let is_one = path.is_file() && !is_index(path);
    let found = match find_weights(path, &WeightsOptions::default()) {
        // The whole file is shown, not one dictionary of it.
        Ok(found) if is_one && !(found.key.is_empty() && found.left_out.is_empty()) => {
            return states(path, form);
        }
        Err(
            Error::Unsupported { .. } | Error::NoStateDict { .. } | Error::SeveralStateDicts { .. },
        ) if is_one => return states(path, form),
        found => found?,
    };
    let tensors = found.tensors.into_iter().map(|(name, tensor)| (name, tensor.info()));
    let tensors: Vec<(String, TensorInfo)> = tensors.collect();
    let metadata = file.map(metadata).transpose()?.unwrap_or_default();
    if form == Form::Json {
        let all = json!({
            "read": found.read,
            "left_out": found.left_out,
            "tensors": tensors_json(&tensors),
            "metadata": metadata,
        });
        return Ok(format!("{all:#}\n"));
    }
    let mut text = format!("{}: weights\n", escaped(path.display()));
    for line in &found.read {
        writeln!(text, "  read {}", escaped(line))?;
    }
    for line in &found.left_out {
        writeln!(text, "  left out {}", escaped(line))?;
    }
    if !metadata.is_empty() {
        text.push_str("  metadata:\n");
        for (key, value) in &metadata {
            writeln!(text, "    {}: {}", printable(key), printable(value))?;
        }
    }
    text.push_str(&match form {
        Form::Short => groups(&tensors),
        _ => table(&tensors),
    });
    Ok(text)
}

/// Describes a step that DeepSpeed has saved: its weights, and the states of its optimizer by parameter.
fn deepspeed(path: &Path, run: &DeepSpeedFolder, form: Form) -> anyhow::Result<String> {
    let weights = run.weights().iter().map(|(name, tensor)| (name.clone(), tensor.info()));
    let weights: Vec<(String, TensorInfo)> = weights.collect();
    let mut states = Vec::new();
    for (name, slots) in run.moments()? {
        states.extend(slots.iter().map(|(slot, it)| (format!("{name}.{slot}"), it.info())));
    }
    if form == Form::Json {
        let all = json!({
            "stage": run.stage(),
            "ranks": run.ranks(),
            "step": run.step(),
            "tensors": tensors_json(&weights),
            "optimizer": tensors_json(&states),
        });
        return Ok(format!("{all:#}\n"));
    }
    let shown = match form {
        Form::Short => groups,
        _ => table,
    };
    let (weights, path) = (shown(&weights), escaped(path.display()));
    let mut text = format!("{path}: {}\n{weights}", escaped(run));
    if !states.is_empty() {
        write!(text, "\noptimizer\n{}", shown(&states))?;
    }
    Ok(text)
}

/// Returns `true` if the file is the index of several files.
fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// Returns the metadata that the user of a safetensors file has written into it; empty for other files.
fn metadata(path: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    if is_index(path) {
        return Ok(BTreeMap::new());
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(format_of(path, &file)?.metadata(path, &file)?.into_iter().collect())
}

/// Describes a file of torch.save with more than weights: an optimizer's state, or a dictionary of several. Objects
/// that are not plain values are shown by their names.
fn states(path: &Path, form: Form) -> anyhow::Result<String> {
    let mut tensors = Vec::new();
    let tree = PthFile::open(path)?.value()?.try_map(&mut |place, tensor| {
        tensors.push((place.to_owned(), tensor.info()));
        Ok::<_, Error>(place.to_owned())
    })?;
    let state = tree.to_json();
    if form == Form::Json {
        return Ok(format!("{:#}\n", json!({ "state": state, "tensors": tensors_json(&tensors) })));
    }
    let mut text = format!("{}: {} of torch.save\n", escaped(path.display()), tree.describe());
    if form == Form::Short {
        text.push_str(&groups(&tensors));
        return Ok(text);
    }
    lines(&mut text, &state, "  ")?;
    if !tensors.is_empty() {
        text.push_str(&table(&tensors));
    }
    Ok(text)
}

/// Checkpoints of a project's folder.
struct Project {
    /// Folder of the checkpoints.
    folder: PathBuf,
    newest: PathBuf,
    /// Older checkpoints, the oldest first.
    others: Vec<PathBuf>,
}

impl Project {
    /// Searches a folder and its `checkpoints`; `None` if neither contains a checkpoint.
    fn find(path: &Path) -> Result<Option<Self>, Error> {
        for folder in [path.join(CHECKPOINTS), path.to_owned()] {
            let numbers = numbered(&folder)?;
            let newest = match latest(&folder) {
                Ok(newest) => newest,
                Err(Error::NotACheckpoint { .. }) => continue,
                Err(error) => return Err(error),
            };
            let others = numbers.into_iter().map(|number| numbered_path(&folder, number));
            let is_other = |path: &PathBuf| *path != newest && path.join(MANIFEST).is_file();
            let others = others.filter(is_other).collect();
            return Ok(Some(Self { folder, newest, others }));
        }
        Ok(None)
    }

    fn answer(&self, form: Form) -> anyhow::Result<String> {
        let others: Vec<String> = self
            .others
            .iter()
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect();
        let mut heading = format!(
            "{}: {}",
            escaped(self.folder.display()),
            counted(1 + others.len(), "checkpoint")
        );
        if !others.is_empty() {
            write!(heading, ", the newest is shown; the others: {}", escaped(others.join(", ")))?;
        }
        let opened = Checkpoint::open(&self.newest).with_context(|| heading.clone())?;
        let answer = checkpoint(&opened, form, Some(&self.others))?;
        Ok(match form {
            Form::Json => answer,
            Form::Full | Form::Short => format!("{heading}\n\n{answer}"),
        })
    }
}

/// Describes a checkpoint; `others` are those beside it in a project's folder.
fn checkpoint(
    checkpoint: &Checkpoint,
    form: Form,
    others: Option<&[PathBuf]>,
) -> anyhow::Result<String> {
    match form {
        Form::Json => as_json(checkpoint, others),
        Form::Full => as_text(checkpoint),
        Form::Short => {
            let manifest = checkpoint.manifest();
            let rows = manifest.objects.iter().map(|object| {
                let files = object.files().filter_map(|name| manifest.files.get(name));
                let bytes = files.fold(0u64, |sum, facts| sum.saturating_add(facts.bytes));
                Group { name: object.name.to_string(), tensors: object.tensors.len(), bytes }
            });
            Ok(heading(checkpoint)? + &rows_of(&rows.collect::<Vec<_>>()))
        }
    }
}

/// Tensors with a common prefix.
struct Group {
    name: String,
    tensors: usize,
    bytes: u64,
}

/// Sums tensors by the first part of their names, in the order of first occurrence, with the total.
fn groups(tensors: &[(String, TensorInfo)]) -> String {
    let mut groups: Vec<Group> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, info) in tensors {
        let first = name.split('.').next().unwrap_or(name);
        let place = *places.entry(first).or_insert_with(|| {
            groups.push(Group { name: first.to_owned(), tensors: 0, bytes: 0 });
            groups.len() - 1
        });
        groups[place].tensors += 1;
        groups[place].bytes = groups[place].bytes.saturating_add(info.bytes().unwrap_or_default());
    }
    rows_of(&groups) + &total(tensors)
}

fn rows_of(groups: &[Group]) -> String {
    let names: Vec<String> = groups.iter().map(|group| escaped(&group.name).to_string()).collect();
    let counts: Vec<String> = groups.iter().map(|group| counted(group.tensors, "tensor")).collect();
    let wide = widest(names.iter().map(|name| name.chars().count()));
    let count_wide = widest(counts.iter().map(String::len));
    let rows = groups.iter().zip(&names).zip(&counts).map(|((group, name), count)| {
        format!("  {name:wide$}  {count:>count_wide$}  {:>9}\n", bytes(group.bytes))
    });
    rows.collect()
}

/// Returns the width of the column; a single long name does not widen all lines.
fn widest(lengths: impl Iterator<Item = usize>) -> usize {
    lengths.max().unwrap_or_default().min(MAX_COLUMN)
}

fn total(tensors: &[(String, TensorInfo)]) -> String {
    let sizes = tensors.iter().filter_map(|(_, info)| info.bytes());
    let total = sizes.fold(0u64, u64::saturating_add);
    format!("  {}, {}\n", counted(tensors.len(), "tensor"), bytes(total))
}

/// Describes the checkpoint as a whole.
fn heading(checkpoint: &Checkpoint) -> Result<String, std::fmt::Error> {
    let manifest = checkpoint.manifest();
    let mut text = String::new();
    writeln!(
        text,
        "{}: manifest version {}, made by {}",
        escaped(checkpoint.folder().display()),
        manifest.version,
        escaped(&manifest.made_by)
    )?;
    writeln!(
        text,
        "{}, {}, {}; {} in {}",
        counted(manifest.step, "optimizer step"),
        counted(manifest.samples, "sample"),
        counted(manifest.world_size, "rank"),
        bytes(manifest.bytes()),
        counted(manifest.files.len(), "file"),
    )?;
    if manifest.mesh.len() > 1 {
        let axis = |axis: &MeshAxis| format!("{} {}", axis.name, axis.size);
        let axes: Vec<String> = manifest.mesh.iter().map(axis).collect();
        writeln!(text, "mesh of ranks: {}", escaped(axes.join(" x ")))?;
    }
    Ok(text)
}

fn as_text(checkpoint: &Checkpoint) -> anyhow::Result<String> {
    let manifest = checkpoint.manifest();
    let mut text = heading(checkpoint)?;
    let mut used = Vec::new();
    for object in &manifest.objects {
        used.extend(object.files());
        writeln!(text, "\n{}", escaped(&object.name))?;
        if let Some(state) = checkpoint.state(object)? {
            lines(&mut text, &state.to_json(), "  ")?;
        }
        // Compares the manifest with the files.
        checkpoint.chunks(object)?;
        if !object.tensors.is_empty() {
            text.push_str(&table(&infos(object)));
        }
        for (name, tensor) in object.tensors.iter().filter(|(_, tensor)| is_sharded(tensor)) {
            let placements: Vec<String> =
                tensor.placements.iter().map(ToString::to_string).collect();
            writeln!(
                text,
                "  {}: {} over the mesh, stored in {}",
                escaped(name),
                placements.join(" "),
                counted(tensor.chunks.len(), "chunk")
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
        writeln!(text, "\nother files: {}", escaped(others.join(", ")))?;
    }
    Ok(text)
}

/// Writes the plain values of a state, one line each, without long ones.
fn lines(text: &mut String, state: &Value, indent: &str) -> std::fmt::Result {
    let Value::Object(entries) = state else { return Ok(()) };
    for (key, value) in entries {
        let key = escaped(key);
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
                    writeln!(text, "{indent}{key}: {}", escaped(value))?;
                }
                _ => {
                    let plain = items.iter().all(|item| !item.is_object());
                    writeln!(text, "{indent}{key}: {}", counted(items.len(), "item"))?;
                    for (place, item) in items.iter().enumerate().filter(|_| !plain) {
                        writeln!(text, "{indent}  {place}:")?;
                        lines(text, item, &format!("{indent}    "))?;
                    }
                }
            },
            Value::Null => {}
            value => writeln!(text, "{indent}{key}: {}", escaped(value))?,
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
    let names: Vec<String> = tensors.iter().map(|(name, _)| escaped(name).to_string()).collect();
    let wide = widest(names.iter().map(|name| name.chars().count()));
    let shape_wide = widest(shapes.iter().map(String::len));
    let dtype_wide = widest(tensors.iter().map(|(_, info)| info.dtype.name().len())).max(4);
    let mut text = String::new();
    for (((_, info), name), shape) in tensors.iter().zip(&names).zip(&shapes) {
        let size = bytes(info.bytes().unwrap_or_default());
        text.push_str(&format!(
            "  {name:wide$}  {shape:shape_wide$}  {:dtype_wide$}  {size:>9}\n",
            info.dtype
        ));
    }
    text + &total(tensors)
}

/// Returns the tensors of an object, by name, with their global shapes.
fn infos(object: &Object) -> Vec<(String, TensorInfo)> {
    object.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.info())).collect()
}

fn is_sharded(tensor: &TensorEntry) -> bool {
    tensor.chunks.len() > 1
        || tensor.placements.iter().any(|placement| *placement != Placement::Replicate)
}

fn as_json(checkpoint: &Checkpoint, others: Option<&[PathBuf]>) -> anyhow::Result<String> {
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
    let mut all = json!({
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
    if let Some(others) = others {
        let path = |path: &PathBuf| path.display().to_string();
        all["path"] = json!(path(&checkpoint.folder().to_owned()));
        all["others"] = others.iter().map(path).collect();
    }
    Ok(format!("{all:#}\n"))
}

fn tensors_json(tensors: &[(String, TensorInfo)]) -> Value {
    let tensor = |(name, info): &(String, TensorInfo)| json!({ "name": name, "dtype": info.dtype, "shape": info.shape, "bytes": info.bytes() });
    tensors.iter().map(tensor).collect()
}

const MAX_COLUMN: usize = 100;
/// Name of the folder of a project's checkpoints.
const CHECKPOINTS: &str = "checkpoints";
