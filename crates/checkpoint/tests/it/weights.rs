//! Weights files as PyTorch's users have them: both formats of `torch.save`, objects next to the weights, and weights
//! in dictionaries. `fixtures/weights/make.py` wrote them, and the values that PyTorch reads from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{
    Target, Weights, WeightsOptions, convert, convert_with, find_weights, read_weights,
};
use brigade_checkpoint::pth::{PthFile, TensorData, write};
use brigade_checkpoint::{Dtype, Error, Safetensors, TensorInfo, Torch, Value};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/weights").join(name)
}

/// Type, shape and bytes of each tensor, by name.
type Known = BTreeMap<String, (TensorInfo, Vec<u8>)>;

/// Type, shape and hexadecimal bytes of each tensor, as in a JSON file.
type Hex = BTreeMap<String, (Dtype, Vec<u64>, String)>;

/// Returns the tensors that PyTorch reads, by file.
fn expected() -> BTreeMap<String, Known> {
    let text = fs::read(fixture("weights.json")).unwrap();
    let files: BTreeMap<String, Hex> = serde_json::from_slice(&text).unwrap();
    let bytes = |hex: &str| -> Vec<u8> {
        let digits = hex.as_bytes().chunks(2);
        digits.map(|it| u8::from_str_radix(std::str::from_utf8(it).unwrap(), 16).unwrap()).collect()
    };
    let known = |tensors: Hex| {
        let tensors = tensors.into_iter();
        tensors
            .map(|(name, (dtype, shape, hex))| (name, (TensorInfo { dtype, shape }, bytes(&hex))))
    };
    files.into_iter().map(|(file, tensors)| (file, known(tensors).collect())).collect()
}

fn read(weights: &Weights) -> Known {
    let read = weights.iter().map(|(name, tensor)| {
        let mut bytes = Vec::new();
        tensor.write_to(&mut bytes).unwrap();
        (name.clone(), (tensor.info(), bytes))
    });
    read.collect()
}

/// Returns the key of a file's weights, and `true` if it must be given.
fn key(file: &str) -> (&'static str, bool) {
    match file {
        "lightning.ckpt" | "lightning_legacy.ckpt" | "python_2.pth" => ("state_dict", false),
        "nested_state_dict.pth" => ("model.state_dict", false),
        "nested.pth" => ("a.b.deep.state_dict", false),
        "several.pth" => ("model_ema", true),
        file if file.starts_with("objects") => ("model", false),
        _ => ("", false),
    }
}

#[test]
fn names_types_shapes_and_values_are_pytorchs() {
    let files = expected();
    assert!(files.len() >= 14);
    for (name, tensors) in files {
        let (key, must_be_given) = key(&name);
        let mut file = PthFile::open(fixture(&name)).unwrap();
        let state = file.state_dict(must_be_given.then_some(key)).unwrap();
        assert_eq!(state.key, key, "{name}");
        let mut read = Known::new();
        for (tensor_name, tensor) in state.tensors {
            let bytes = file.read_tensor(&tensor).unwrap();
            read.insert(tensor_name, (tensor.info(), bytes));
        }
        assert_eq!(read, tensors, "{name}");
        // The key may also be given, whole or in part.
        for key in [Some(key), key.rsplit_once('.').map(|(first, _)| first)].into_iter().flatten() {
            let again = file.state_dict(Some(key).filter(|key| !key.is_empty())).unwrap();
            assert_eq!(again.tensors.len(), tensors.len(), "{name} at {key}");
        }
    }
}

#[test]
fn the_weights_go_through_conversions() {
    let folder = tempfile::tempdir().unwrap();
    for (name, mut tensors) in expected() {
        let (key, must_be_given) = key(&name);
        let options = WeightsOptions {
            key: must_be_given.then(|| key.to_owned()),
            ..WeightsOptions::default()
        };
        // Reported, as is the prefix of DistributedDataParallel.
        let mut lines = Vec::new();
        if !key.is_empty() {
            lines.push(format!("the state dictionary under `{key}`"));
        }
        if name == "data_parallel_legacy.pth" {
            lines.push(format!("{} names, without the prefix `module.`", tensors.len()));
            tensors = tensors
                .into_iter()
                .map(|(name, tensor)| (name["module.".len()..].to_owned(), tensor))
                .collect();
        }
        let torch = folder.path().join(format!("{name}.bin"));
        let report =
            convert_with(&fixture(&name), &torch, Target::Weights(&Torch), &options).unwrap();
        assert_eq!(report.read, lines, "{name}");
        assert_eq!(read(&read_weights(&torch).unwrap()), tensors, "{name}");

        let safe = folder.path().join(format!("{name}.safetensors"));
        let converted =
            convert_with(&fixture(&name), &safe, Target::Weights(&Safetensors), &options);
        if tensors.values().any(|(info, _)| info.dtype == Dtype::C128) {
            let error = converted.unwrap_err().to_string();
            assert!(error.contains("safetensors cannot hold"), "{error}");
        } else {
            converted.unwrap();
            assert_eq!(read(&read_weights(&safe).unwrap()), tensors, "{name}");
        }
    }
}

#[test]
fn objects_are_named_and_nothing_more() {
    for name in ["objects.pth", "objects_protocol_5.pth", "objects_legacy.pth"] {
        let file = PthFile::open(fixture(name)).unwrap();
        let value = file.value().unwrap();
        let foreign = |key: &str| match value.get(key) {
            Some(Value::Foreign(name)) => name.clone(),
            other => panic!("{key} is {other:?}"),
        };
        assert_eq!(foreign("args"), "argparse.Namespace");
        assert_eq!(foreign("path"), "pathlib.PurePosixPath");
        assert_eq!(foreign("config"), "omegaconf.listconfig.ListConfig");
        assert!(foreign("accuracy").ends_with("multiarray.scalar"));
        assert_eq!(foreign("big").rsplit_once('.').unwrap().1, "int");
        assert!(foreign("names").ends_with(".set") && foreign("frozen").ends_with(".frozenset"));
        assert_eq!(value.get("epoch"), Some(&Value::Int(3)));
        // Subclasses of list and dict keep the items that were put into them.
        assert_eq!(value.get("bag"), Some(&Value::List(vec![Value::Int(7)])), "{name}");
        let default = value.get("default").unwrap();
        assert_eq!(default.get("a"), Some(&Value::List(vec![Value::Int(1)])));
        let left_out = file.state_dict(None).unwrap().left_out;
        let args =
            "`args`: an object of Python (`argparse.Namespace`), which is not among the weights";
        assert!(left_out.iter().any(|line| line == args), "{left_out:?}");
        let epoch = "`epoch`: the integer 3, which is not among the weights";
        assert!(left_out.iter().any(|line| line == epoch), "{left_out:?}");
    }
    let raw = PthFile::open(fixture("objects_protocol_5.pth")).unwrap().value().unwrap();
    assert_eq!(raw.get("raw"), Some(&Value::Bytes(vec![0xff, 0])));
    let old = PthFile::open(fixture("python_2.pth")).unwrap().value().unwrap();
    assert_eq!(old.get("raw"), Some(&Value::Bytes(vec![0xff, 0xfe])));
    assert_eq!(old.get("epoch"), Some(&Value::Int(5_000_000_000)));
    assert_eq!(old.get("best"), Some(&Value::Bool(true)));
    assert_eq!(old.get("old"), Some(&Value::Foreign("__main__.OldStyle".into())));
}

#[test]
fn a_file_without_one_state_dictionary_says_what_it_has() {
    let error = |name: &str, key: Option<&str>| {
        let error = PthFile::open(fixture(name)).unwrap().state_dict(key).unwrap_err();
        let message = error.to_string();
        (error, message)
    };
    let (kind, message) = error("several.pth", None);
    assert!(matches!(kind, Error::SeveralStateDicts { .. }));
    assert!(
        message.contains(
            "several.pth holds 2 state dictionaries: `model`, `model_ema`; choose one (`--key`"
        ),
        "{message}"
    );
    let (kind, message) = error("several.pth", Some("ema"));
    assert!(matches!(kind, Error::NoSuchKey { .. }));
    assert!(
        message.ends_with(
            "several.pth has no dictionary under `ema`; its state dictionaries are `model`, `model_ema`"
        ),
        "{message}"
    );
    let (kind, message) = error("no_weights.pth", None);
    assert!(matches!(kind, Error::NoStateDict { .. }));
    assert!(
        message.contains(
            "holds a dictionary of `module` (an object of Python (`omegaconf.listconfig.ListConfig`), of \
             which nothing was executed: in Python, save its `state_dict()` instead), `epoch` (an integer); a \
             state dictionary (tensors by name) is not in it"
        ),
        "{message}"
    );
    // An optimizer's state is not a state dictionary, and a tensor is not a dictionary.
    assert!(matches!(error("optimizer.pth", None).0, Error::NoStateDict { .. }));
    assert!(matches!(error("several.pth", Some("model.weight")).0, Error::NoSuchKey { .. }));
    // Items of a list have their index as a key.
    let file = PthFile::open(fixture("several.pth")).unwrap();
    assert_eq!(file.state_dict(Some("lists.0")).unwrap().tensors.len(), 2);
    let file = PthFile::open(fixture("optimizer.pth")).unwrap();
    assert_eq!(file.state_dict(Some("state.0")).unwrap().tensors.len(), 3);
}

#[test]
fn a_prefix_and_a_type_are_taken_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model.safetensors");
    let options = |prefix: &str, dtype| WeightsOptions {
        prefix: Some(prefix.into()),
        dtype,
        ..WeightsOptions::default()
    };
    let found = convert_with(
        &fixture("lightning.ckpt"),
        &to,
        Target::Weights(&Safetensors),
        &options("model", Some(Dtype::BF16)),
    )
    .unwrap();
    assert_eq!(
        found.read,
        ["the state dictionary under `state_dict`", "2 names, without the prefix `model.`"]
    );
    let line = "`loss.weight`: its name does not begin with `model.`";
    assert!(found.left_out.iter().any(|it| it == line), "{:?}", found.left_out);
    let read = read(&read_weights(&to).unwrap());
    let values = [1.0f32, 2.0].map(|it| [0, 0, it.to_le_bytes()[2], it.to_le_bytes()[3]]);
    let bias: Vec<u8> = values.iter().flat_map(|it| it[2..].to_owned()).collect();
    assert_eq!(read["bias"], (TensorInfo { dtype: Dtype::BF16, shape: vec![2] }, bias));
    assert_eq!(read.len(), 2);

    let error =
        |options| find_weights(&fixture("lightning.ckpt"), &options).unwrap_err().to_string();
    let message = error(options("backbone.", None));
    assert!(message.ends_with("no name begins with `backbone.`; names begin with `model`, `loss`"));
    let message = error(options("model.", Some(Dtype::I64)));
    assert!(message.contains("cannot be converted to I64"), "{message}");
    // Integers are not converted.
    let options = WeightsOptions { dtype: Some(Dtype::F64), ..WeightsOptions::default() };
    let found = find_weights(&fixture("legacy_state_dict.pth"), &options).unwrap();
    let dtypes: Vec<Dtype> = found.tensors.iter().map(|(_, it)| it.info().dtype).collect();
    assert!(dtypes.contains(&Dtype::I64) && !dtypes.contains(&Dtype::F16), "{dtypes:?}");
    // A value that becomes infinite is counted.
    let large = folder.path().join("large.safetensors");
    let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  "#;
    let bytes = [
        &(header.len() as u64).to_le_bytes()[..],
        header,
        &1f32.to_le_bytes(),
        &1e5f32.to_le_bytes(),
    ];
    fs::write(&large, bytes.concat()).unwrap();
    let options = WeightsOptions { dtype: Some(Dtype::F16), ..WeightsOptions::default() };
    let to = folder.path().join("half.bin");
    let report = convert_with(&large, &to, Target::Weights(&Torch), &options).unwrap();
    assert_eq!(report.changed, ["`a`: 1 value is infinite, being too large for F16"]);
}

#[test]
fn an_old_file_that_is_cut_short_or_changed_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    let whole = fs::read(fixture("legacy_state_dict.pth")).unwrap();
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let read = PthFile::open(&path).and_then(|file| file.value());
        read.err().map_or_else(|| "it is read".to_owned(), |error| error.to_string())
    };
    assert_eq!(error(&whole), "it is read");
    for length in 0..whole.len() {
        let message = error(&whole[..length]);
        let known =
            ["is neither a safetensors file", "ends within its", "it is cut short: storage"];
        assert!(known.iter().any(|it| message.contains(it)), "{length}: {message}");
    }
    // Number of elements before the last storage.
    let mut counted = whole.clone();
    let last = whole.len() - 8 - 8;
    assert_eq!(counted[last..last + 8], 1u64.to_le_bytes());
    counted[last] = 3;
    let message = error(&counted);
    assert!(message.contains("is declared as 1 elements but has 3"), "{message}");
    // Version of the format.
    let at = whole.windows(3).position(|it| it == b"M\xe9\x03").unwrap();
    let mut other = whole.clone();
    other[at + 1] = 0xea;
    let message = error(&other);
    assert!(message.contains("version 1002 of torch.save's format"), "{message}");
    // On a machine with the other byte order, PyTorch before 1.6 wrote these numbers in that order, and elements in
    // little-endian order.
    let mut swapped = whole;
    let at = swapped.windows(13).position(|it| it == b"little_endian").unwrap();
    let truth = at + 13 + 2;
    assert_eq!(swapped[truth], 0x88);
    swapped[truth] = 0x89;
    swapped[last..last + 8].reverse();
    assert_eq!(error(&swapped), "it is read");
    swapped[truth] = 0x88;
    assert!(error(&swapped).contains("is declared as 1 elements but has"));
}

#[test]
fn a_view_of_a_storage_stays_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    let whole = fs::read(fixture("python_2.pth")).unwrap();
    // 4 elements from the third on, of a storage of 6.
    let view = [b"U\x0212J".as_slice(), &2u32.to_le_bytes(), b"J", &4u32.to_le_bytes()].concat();
    let at = whole.windows(view.len()).position(|it| it == view).unwrap();
    for (first, elements, expected) in [
        (3i32, 4i32, "a view of 4 elements from 3 on reaches outside its storage of 6"),
        (-1, 4, "a view of 4 elements from -1 on"),
        (2, i32::MAX, "from 2 on reaches outside"),
        (2, 3, "reach outside its storage of 3 elements"),
    ] {
        let mut changed = whole.clone();
        changed[at + 5..at + 9].copy_from_slice(&first.to_le_bytes());
        changed[at + 10..at + 14].copy_from_slice(&elements.to_le_bytes());
        fs::write(&path, changed).unwrap();
        let error = PthFile::open(&path).unwrap().value().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn no_file_stays_of_a_conversion_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("out.safetensors");
    for name in ["several.pth", "no_weights.pth", "optimizer.pth"] {
        convert(&fixture(name), &to, Target::Weights(&Safetensors)).unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{name}");
    }
}

#[test]
fn shards_hold_what_their_index_says() {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let shard = |name: &str, tensors: &[&str]| {
        let entries = tensors.iter().enumerate().map(|(i, tensor)| {
            let (begin, end) = (4 * i, 4 * i + 4);
            format!(r#""{tensor}":{{"dtype":"F32","shape":[1],"data_offsets":[{begin},{end}]}}"#)
        });
        let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
        let length = (header.len() as u64).to_le_bytes();
        let bytes = [&length[..], header.as_bytes(), &vec![0; 4 * tensors.len()]].concat();
        fs::write(folder.path().join(name), bytes).unwrap();
    };
    let map = r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#;
    fs::write(&index, map).unwrap();
    let read = || read_weights(&index).map_err(|error| error.to_string());
    shard("1.safetensors", &["a"]);
    shard("2.safetensors", &["b"]);
    assert_eq!(read().unwrap().len(), 2);
    shard("2.safetensors", &["c"]);
    let error = read().unwrap_err();
    assert!(error.ends_with("`b` is not in 2.safetensors, where it is to be"), "{error}");
    shard("2.safetensors", &["a", "b"]);
    let error = read().unwrap_err();
    assert!(error.ends_with("`a` is in two shards, 1.safetensors and 2.safetensors"), "{error}");
    shard("1.safetensors", &["a", "b"]);
    shard("2.safetensors", &[]);
    let error = read().unwrap_err();
    assert!(error.ends_with("`b` is not in 2.safetensors, where it is to be"), "{error}");
    // Two files of torch.save, one with its weights in a dictionary.
    for (name, key, tensor) in [("1.bin", "state_dict", "weight"), ("2.bin", "model", "bias")] {
        let weights = find_weights(&fixture("lightning.ckpt"), &WeightsOptions::default()).unwrap();
        let (_, value) = weights.tensors.into_iter().next().unwrap();
        let state = Value::dict([(tensor, Value::Tensor(value))]);
        let mut bytes = std::io::Cursor::new(Vec::new());
        write(&mut bytes, &Value::dict([(key, state)])).unwrap();
        fs::write(folder.path().join(name), bytes.into_inner()).unwrap();
    }
    fs::write(&index, r#"{"weight_map":{"weight":"1.bin","bias":"2.bin"}}"#).unwrap();
    let error = read().unwrap_err();
    let expected =
        "the state dictionary of 1.bin is under the key `state_dict`, that of 2.bin under `model`";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_file_that_is_one_state_dictionary_has_no_keys() {
    let safe =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trainer/model.safetensors");
    let options = WeightsOptions { key: Some("model".into()), ..WeightsOptions::default() };
    for path in [safe, fixture("legacy_state_dict.pth")] {
        let error = find_weights(&path, &options).unwrap_err().to_string();
        let expected = "has no dictionary under `model`; all of it is one state dictionary, without a key: leave \
                        the key out (`--key` on the command line)";
        assert!(error.ends_with(expected), "{error}");
    }
}

/// For a pickle that is too long for its contents, the size of the file does not count as its size.
#[test]
fn an_old_file_whose_pickle_does_not_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.pth");
    let whole = fs::read(fixture("legacy_state_dict.pth")).unwrap();
    // The first pickle is the magic number. The second one continues to the end of the file.
    let end = whole.iter().position(|byte| *byte == b'.').unwrap() + 1;
    let mut long = whole[..end].to_vec();
    long.extend([b"\x80\x02T".as_slice(), &(80u32 << 20).to_le_bytes()].concat());
    long.resize(90 << 20, 0);
    fs::write(&path, long).unwrap();
    let error = PthFile::open(&path).and_then(|file| file.value()).unwrap_err().to_string();
    assert!(error.contains("does not end within the 67108864 bytes"), "{error}");
}
