//! Tests of `brigade checkpoint split`: one file of weights becomes several with an index.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::{Dtype, Region, TensorInfo, WeightsReader};

/// Writes four weights of 40, 8, 40 and 200 bytes, with consecutive values.
fn weights(file: &Path) {
    let shapes: [(&str, &[u64]); 4] =
        [("a.weight", &[5, 2]), ("b.bias", &[2]), ("c.weight", &[10]), ("d.weight", &[50])];
    let infos =
        shapes.map(|(name, shape)| (name, TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }));
    let mut bytes = layout(Path::new("weights"), &infos).unwrap().header;
    for value in 0..72u16 {
        bytes.extend(f32::from(value).to_le_bytes());
    }
    fs::write(file, bytes).unwrap();
}

fn values(path: &Path) -> Vec<(String, Vec<u8>)> {
    let weights = WeightsReader::open(path).unwrap();
    let tensors = weights.tensors().map(|tensor| {
        let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
        tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
        (tensor.name().to_owned(), bytes)
    });
    let mut all: Vec<_> = tensors.collect();
    all.sort();
    all
}

/// Returns the output of the command, and `true` if it succeeds.
fn brigade(folder: &Path, arguments: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.arg("checkpoint").args(arguments.split_whitespace());
    let output = command.current_dir(folder).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.success(), said)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> =
        entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn files_keep_the_size_and_hold_what_the_index_says() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    weights(&folder.join("model.safetensors"));
    let (is_well, said) = brigade(folder, "convert model.safetensors model.pth");
    assert!(is_well, "{said}");
    for file in ["model.safetensors", "model.pth"] {
        let to = folder.join(format!("of-{file}"));
        let (is_well, said) =
            brigade(folder, &format!("split {file} of-{file} --max-shard-size 48"));
        assert!(is_well && said.contains("model-00001-of-00003.safetensors"), "{said}");
        // The last tensor is larger than the limit of a file.
        let expected = [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
        ];
        assert_eq!(names(&to), expected, "{file}");
        assert_eq!(values(&to), values(&folder.join("model.safetensors")), "{file}");
        let index = fs::read(to.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 288);
        assert_eq!(index["weight_map"]["b.bias"], "model-00001-of-00003.safetensors");
        assert_eq!(index["weight_map"]["d.weight"], "model-00003-of-00003.safetensors");
        let first = values(&to.join("model-00001-of-00003.safetensors"));
        assert_eq!(first.iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), 48);
    }
    // The default limit is 5 GB: everything in one file, without an index.
    let (is_well, said) = brigade(folder, "split model.pth one");
    assert!(is_well, "{said}");
    assert_eq!(names(&folder.join("one")), ["model.safetensors"]);
}

#[test]
fn what_cannot_be_split_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    weights(&folder.join("model.safetensors"));
    fs::write(folder.join("notes.txt"), "nothing").unwrap();
    fs::create_dir(folder.join("there")).unwrap();
    let refused = |arguments: &str, expected: &str| {
        let (is_well, said) = brigade(folder, &format!("split {arguments}"));
        assert!(!is_well && said.contains(expected), "{arguments}: {said}");
    };
    refused("model.safetensors out --max-shard-size many", "not a number of bytes");
    refused("model.safetensors out --max-shard-size 0", "not a number of bytes");
    refused("missing.safetensors out", "cannot read missing.safetensors");
    refused("model.safetensors there", "there cannot become a checkpoint: it already exists");
    refused("notes.txt out", "notes.txt is neither a safetensors file nor");
    refused("model.safetensors out --key ema", "has no dictionary under `ema`");
    refused("model.safetensors", "<TO>");
    assert_eq!(names(folder), ["model.safetensors", "notes.txt", "there"]);
}
