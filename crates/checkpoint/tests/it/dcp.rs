//! Weights from folders that `torch.distributed.checkpoint` has written.

use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{
    StateKind, Target, WeightsOptions, convert, convert_like, convert_with,
};
use brigade_checkpoint::pth::{DcpKey, DcpMetadata, DcpPlace, dcp_metadata, write_dcp_metadata};
use brigade_checkpoint::{Error, Region, Safetensors, WeightsReader, dcp_folder};

use crate::saved;

const TARGET: Target = Target::Weights(&Safetensors);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dcp").join(name)
}

/// Returns the path of a checkpoint that Brigade has saved.
fn ours() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures/checkpoint_version_2")
}

/// Copies the folder that two ranks have written.
fn copied(to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        fs::copy(fixture("torch_2_13").join(file), to.join(file)).unwrap();
    }
}

fn values(file: &Path) -> Vec<(String, String, Vec<u8>)> {
    let weights = WeightsReader::open(file).unwrap();
    let read = |tensor: brigade_checkpoint::TensorReader<'_>| {
        let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
        tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
        (tensor.name().to_owned(), tensor.info().to_string(), bytes)
    };
    let mut all: Vec<_> = weights.tensors().map(read).collect();
    all.sort();
    all
}

#[test]
fn parts_of_two_ranks_are_joined() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copied(&folder.join("run"));
    copied(&folder.join("accelerate/pytorch_model_fsdp_0"));
    for from in ["run", "accelerate"] {
        let to = folder.join(format!("{from}.safetensors"));
        let report = convert(&folder.join(from), &to, TARGET).unwrap();
        assert_eq!(values(&to), values(&fixture("torch_2_13.safetensors")));
        let read = "a checkpoint of torch.distributed.checkpoint: 4 tensors in 8 parts in 2 files";
        assert_eq!(report.read[0], read);
        assert_eq!(report.left_out, ["optim: a weights file holds one model and nothing else"]);
    }
    // Adam's moments are under a key of their own.
    let options = WeightsOptions { key: Some("optim".into()), ..WeightsOptions::default() };
    let to = folder.join("optim.safetensors");
    convert_with(&folder.join("run"), &to, TARGET, &options).unwrap();
    let names: Vec<String> = values(&to).into_iter().map(|(name, ..)| name).collect();
    assert!(names.contains(&"state.0.weight.exp_avg".to_owned()), "{names:?}");
}

/// Reads a weight of which one rank has the left columns, the other the right ones.
#[test]
fn parts_of_columns_are_joined() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("out.safetensors");
    let report = convert(&fixture("fsdp"), &to, TARGET).unwrap();
    assert_eq!(values(&to), values(&fixture("fsdp.safetensors")));
    let read = "a checkpoint of torch.distributed.checkpoint: 4 tensors in 8 parts in 2 files";
    assert_eq!(report.read[0], read);
}

/// Reads parts that their ranks had in memory in another order than that of rows: transposed, with the channels last, and
/// columns of a larger tensor. `make_with_columns.py` has made the fixture.
#[test]
fn parts_with_strides_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("out.safetensors");
    let report = convert(&fixture("columns"), &to, TARGET).unwrap();
    assert_eq!(values(&to), values(&fixture("columns.safetensors")));
    let read = "a checkpoint of torch.distributed.checkpoint: 8 tensors in 14 parts in 2 files";
    assert_eq!(report.read[0], read);
}

/// Converts a checkpoint of two models and two optimizers to a folder and back.
#[test]
fn a_checkpoint_is_written_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (to, back) = (folder.path().join("dcp"), folder.path().join("back"));
    let ours = folder.path().join("ours");
    saved::before_a_window(&ours);
    let report = convert(&ours, &to, Target::Dcp).unwrap();
    assert_eq!(report.written, [to.join(".metadata"), to.join("__0_0.distcp")]);
    let left = report.left_out.join("\n");
    assert!(left.contains("scheduler_1: models and optimizers alone"), "{left}");
    let keep: Vec<StateKind> = StateKind::ALL
        .into_iter()
        .filter(|kind| ![StateKind::Model, StateKind::Optimizer].contains(kind))
        .collect();
    let report = convert_like(&to, &back, &ours, &keep).unwrap();
    assert_eq!(report.left_out, Vec::<String>::new());
    for file in ["model", "model_1", "optimizer", "optimizer_1"] {
        let file = format!("{file}.safetensors");
        assert_eq!(values(&back.join(&file)), values(&ours.join(&file)), "{file}");
    }
    let state = |folder: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(folder.join("optimizer.json")).unwrap()).unwrap()
    };
    assert_eq!(state(&back), state(&ours));

    // Only weights, from a checkpoint or a file.
    let options = WeightsOptions { key: Some("model".into()), ..WeightsOptions::default() };
    convert_with(&ours, &folder.path().join("one"), Target::Dcp, &options).unwrap();
    convert(&ours.join("model.safetensors"), &folder.path().join("file"), Target::Dcp).unwrap();
    for name in ["one", "file"] {
        let weights = folder.path().join(format!("{name}.safetensors"));
        let report = convert(&folder.path().join(name), &weights, TARGET).unwrap();
        assert_eq!(report.left_out, Vec::<String>::new(), "{name}");
        assert_eq!(values(&weights), values(&ours.join("model.safetensors")), "{name}");
    }
}

#[test]
fn what_has_no_place_in_a_folder_is_named_and_nothing_stays() {
    let folder = tempfile::tempdir().unwrap();
    let formats = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/formats");
    let error = convert(&formats.join("quantized.pth"), &folder.path().join("out"), Target::Dcp)
        .unwrap_err();
    let said = error.to_string();
    assert!(said.contains("torch.distributed.checkpoint has no tensors of q"), "{said}");
    let occupied = folder.path().join("there");
    fs::create_dir(&occupied).unwrap();
    let error = convert(&ours(), &occupied, Target::Dcp).unwrap_err();
    assert!(matches!(error, Error::Occupied { .. }), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_is_missing_or_cut_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let refused = |from: &str| {
        let to = folder.join("out.safetensors");
        let error = convert(&folder.join(from), &to, TARGET).unwrap_err();
        assert!(!to.exists());
        error
    };
    let no_key = WeightsOptions { key: Some("modle".into()), ..WeightsOptions::default() };
    copied(&folder.join("key"));
    let error =
        convert_with(&folder.join("key"), &folder.join("out"), TARGET, &no_key).unwrap_err();
    assert!(
        matches!(&error, Error::NoSuchKey { keys, .. } if *keys == ["model", "optim"]),
        "{error}"
    );

    copied(&folder.join("missing"));
    fs::remove_file(folder.join("missing/__1_0.distcp")).unwrap();
    let error = refused("missing");
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("__1_0.distcp")), "{error}");

    copied(&folder.join("cut"));
    let file = fs::OpenOptions::new().write(true).open(folder.join("cut/__1_0.distcp")).unwrap();
    file.set_len(3000).unwrap();
    let error = refused("cut");
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("are not in a file of 3000"), "{error}");

    // A changed bit of a weight, which only the checksum can detect.
    copied(&folder.join("changed"));
    let file = folder.join("changed/__0_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    let whole = values(&fixture("torch_2_13.safetensors"));
    let (_, _, weight) = whole.iter().find(|(name, ..)| name == "0.weight").unwrap();
    let at = bytes.windows(16).position(|found| found == &weight[..16]).unwrap();
    bytes[at + 3] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = refused("changed").to_string();
    assert!(error.contains("__0_0.distcp is damaged: the checksum of the entry"), "{error}");

    // Another rank's file in its place: no part matches the metadata.
    copied(&folder.join("exchanged"));
    let (one, other) =
        (folder.join("exchanged/__0_0.distcp"), folder.join("exchanged/__1_0.distcp"));
    fs::copy(&other, &one).unwrap();
    assert!(matches!(refused("exchanged"), Error::Damaged { .. } | Error::Unsupported { .. }));

    for model in ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"] {
        copied(&folder.join("several").join(model));
    }
    let error = dcp_folder(&folder.join("several")).unwrap_err().to_string();
    assert!(
        error.contains("pytorch_model_fsdp_0") && error.contains("pytorch_model_fsdp_1"),
        "{error}"
    );
    assert_eq!(dcp_folder(folder).unwrap(), None);
}

/// Checks metadata that only an attacker or a broken writer produces.
#[test]
fn metadata_that_do_not_fit_their_files_are_named() {
    let bytes = fs::read(fixture("torch_2_13/.metadata")).unwrap();
    let metadata = dcp_metadata(Path::new(".metadata"), &bytes).unwrap();
    let refused = |change: &dyn Fn(&mut DcpMetadata), expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        copied(&folder.path().join("from"));
        let mut metadata = metadata.clone();
        change(&mut metadata);
        let bytes = write_dcp_metadata(&metadata).unwrap();
        fs::write(folder.path().join("from/.metadata"), bytes).unwrap();
        let to = folder.path().join("out.safetensors");
        let error = convert(&folder.path().join("from"), &to, TARGET).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!to.exists());
    };
    // One weight under many names would make the files be read once per name.
    let copy = |metadata: &mut DcpMetadata| {
        let places = metadata.places.iter().filter(|it| it.name == "model.0.weight").cloned();
        let places: Vec<_> = places.collect();
        let whole = metadata.tensors["model.0.weight"].clone();
        for number in 0..20 {
            let other = format!("model.0.copy{number}");
            let keys = [DcpKey::Name("model".into()), DcpKey::Name(other.clone())];
            metadata.keys.insert(other.clone(), keys.into());
            metadata.tensors.insert(other.clone(), whole.clone());
            let mut of_copy = places.clone();
            of_copy.iter_mut().for_each(|it| it.name.clone_from(&other));
            metadata.places.extend(of_copy);
        }
    };
    refused(&copy, "are those of another part, too");
    let tensor = |metadata: &mut DcpMetadata, change: &dyn Fn(&mut Vec<Region>)| {
        change(&mut metadata.tensors.get_mut("model.0.weight").unwrap().chunks);
    };
    refused(
        &|it| {
            tensor(it, &|chunks| {
                chunks.pop();
            });
        },
        "`model.0.weight`: its chunks leave a gap: 16 elements are stored of 28",
    );
    refused(
        &|it| {
            tensor(it, &|chunks| chunks.push(chunks[0].clone()));
        },
        "its chunks overlap",
    );
    refused(
        &|it| {
            tensor(it, &|chunks| {
                chunks[0].shape[0] = 3;
                chunks[1] = Region { offset: vec![3, 0], shape: vec![4, 4] };
            });
        },
        "`model.0.weight` at [3, 4] at [0, 0]: expected [3, 4] of F32, found [4, 4] of F32",
    );
    let place = |metadata: &mut DcpMetadata, change: &dyn Fn(&mut DcpPlace)| {
        let found = metadata.places.iter_mut().find(|it| it.name == "model.0.weight");
        change(found.unwrap());
    };
    refused(&|it| place(it, &|place| place.file = "../x".into()), "../x");
    refused(&|it| place(it, &|place| place.start = 1 << 60), "are not in a file of 12808");
    refused(&|it| place(it, &|place| place.start += 3), "__0_0.distcp");
    refused(
        &|it| it.places.retain(|place| place.name != "model.0.weight"),
        "it does not say where the part [4, 4] at [0, 0] lies",
    );
}
