//! Checkpoints as a program saves them, with zeros as tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use brigade_checkpoint::layout::{
    Checkpoint, ChecksumWriter, FileFacts, Manifest, Object, Placement, Staging,
};
use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::{Dtype, FileName, TensorInfo};
use serde_json::{Value, json};

/// An object: its kind, its name, its state, and its tensors of 32-bit floats.
pub(crate) type Entry<'a> = (&'a str, &'a str, Option<Value>, Vec<(&'a str, Vec<u64>)>);

/// Writes a checkpoint of these objects, and of those that every run has.
pub(crate) fn write(folder: &Path, ranks: usize, step: u64, entries: &[Entry<'_>]) {
    let staging = Staging::create(folder, "test").unwrap();
    let (mut files, mut objects) = (BTreeMap::new(), Vec::new());
    let names: Vec<String> = (0..ranks).map(|rank| format!("rank_{rank}")).collect();
    let ranks_states = names.iter().map(|name| {
        let state = json!({ "random": { "cpu": { "$bytes": "AAECAwQF" } }, "gradients": {} });
        ("rank", name.as_str(), Some(state), Vec::new())
    });
    let run = ("run", "run", Some(json!({ "accumulation_position": 0 })), Vec::new());
    for (kind, name, state, tensors) in entries.iter().cloned().chain([run]).chain(ranks_states) {
        let name = FileName::new(name).unwrap();
        let mut object = Object::new(kind, name.clone());
        if let Some(state) = state {
            let file = name.json();
            let mut out = ChecksumWriter::create(staging.path().join(&file)).unwrap();
            out.put(format!("{state:#}\n").as_bytes()).unwrap();
            files.insert(file.clone(), out.finish(false).unwrap());
            object.state = Some(file);
        }
        if !tensors.is_empty() {
            let infos: Vec<_> = tensors
                .into_iter()
                .map(|(name, shape)| (name, TensorInfo { dtype: Dtype::F32, shape }))
                .collect();
            let file = FileName::new(format!("{name}.safetensors")).unwrap();
            let laid = layout(Path::new("tensors"), &infos).unwrap();
            let mut out = ChecksumWriter::create(staging.path().join(&file)).unwrap();
            out.put(&laid.header).unwrap();
            let bytes: u64 = infos.iter().map(|(_, info)| info.bytes().unwrap()).sum();
            out.put(&vec![0; bytes as usize]).unwrap();
            files.insert(file.clone(), out.finish(false).unwrap());
            object.add_file(&file, infos, &[Placement::Replicate]);
        }
        objects.push(object);
    }
    let manifest = Manifest { step, objects, files, ..Manifest::new("a test", ranks) };
    staging.commit(&manifest, false).unwrap();
}

/// Writes a copy of the checkpoint of `crates/train` whose program is not within an accumulation window.
pub(crate) fn before_a_window(folder: &Path) {
    let from =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures/checkpoint_version_2");
    let checkpoint = Checkpoint::open(&from).unwrap();
    let staging = Staging::create(folder, "test").unwrap();
    let mut manifest = checkpoint.manifest().clone();
    for file in manifest.files.keys() {
        fs::copy(from.join(file), staging.path().join(file)).unwrap();
    }
    let run = FileName::new("run.json").unwrap();
    let path = staging.path().join(&run);
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    state["accumulation_position"] = json!(0);
    fs::write(&path, format!("{state:#}\n")).unwrap();
    manifest.files.insert(run, FileFacts::of(&path, false).unwrap());
    staging.commit(&manifest, false).unwrap();
}
