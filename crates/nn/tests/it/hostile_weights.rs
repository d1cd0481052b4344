//! Weights files that are damaged or made to deceive.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use brigade_checkpoint::{Error as FileError, WeightsReader};
use brigade_nn::{Linear, Model, ModelError, weights};
use brigade_testkit::archive;
use brigade_torch::{Error, TensorRead};
use proptest::prelude::*;
use tch::{Kind, Tensor};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

/// The error of a file with these bytes, or None where it is read.
fn error_of(bytes: &[u8]) -> Option<Error> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    weights::load(file.path()).err()
}

#[test]
fn truncated_files_are_damaged_at_every_length() {
    for name in ["small.pth", "kinds.safetensors"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        assert!(error_of(&whole).is_none());
        for length in (0..whole.len()).step_by(7) {
            let error = error_of(&whole[..length]).expect("a truncated file is not a file");
            assert!(
                matches!(
                    error.downcast_ref(),
                    Some(FileError::Damaged { .. } | FileError::UnknownFormat { .. })
                ),
                "{name} of {length} bytes: {error}"
            );
        }
    }
}

/// A checksum shows it before the model is changed; safetensors have none.
#[test]
fn files_that_are_cut_after_they_were_opened_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::new(|p| Linear::new(p, 40, 30)).unwrap();
    let before = model.state_dict().deep_clone().unwrap();
    let interrupted = |name: &str| {
        let path = folder.path().join(name);
        if name.ends_with(".pth") {
            weights::save_pth(&before, &path).unwrap();
        } else {
            weights::save(&before, &path).unwrap();
        }
        let file = WeightsReader::open(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(200).unwrap();
        let reads = model.state_dict().into_iter();
        let reads = reads.map(|(name, into)| TensorRead::whole(file.get(&name).unwrap(), into));
        weights::read(&file, reads.collect()).unwrap_err()
    };
    let error = interrupted("cut.pth");
    assert!(error.to_string().contains("`weight`: it ends too early"), "{error}");
    for (name, tensor) in model.state_dict() {
        assert_eq!(Some(&tensor), before.get(&name), "{name}");
    }
    let error = interrupted("cut.safetensors");
    assert!(
        matches!(error.downcast_ref(), Some(ModelError::Interrupted { path, .. }) if path.ends_with("cut.safetensors")),
        "{error}"
    );
    let said = error.to_string();
    assert!(said.contains("so the model is partly changed"), "{said}");
    assert!(said.contains("it was cut short while `weight` was read: expected "), "{said}");
}

#[test]
fn safetensors_headers_that_lie_are_damaged() {
    let file = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        error_of(&bytes).map_or_else(|| "it is read".to_owned(), |error| error.to_string())
    };
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    assert_eq!(file(&tensor("[2]", "[0,8]"), 8), "it is read");
    for (header, data, expected) in [
        (tensor("[2]", "[0,8]"), 7, "promises 8 bytes of tensors, the file has 7"),
        (tensor("[2]", "[0,8]"), 9, "promises 8 bytes of tensors, the file has 9"),
        (tensor("[3]", "[0,8]"), 8, "its header is wrong"),
        (tensor("[2]", "[4,12]"), 12, "its header is wrong"),
        (tensor("[2]", "[8,0]"), 8, "its header is wrong"),
        (tensor("[4611686018427387904,4]", "[0,0]"), 0, "its header is wrong"),
        (tensor("[-2]", "[0,8]"), 8, "its header is wrong"),
        (r#"{"a":1}"#.to_owned(), 0, "its header is wrong"),
        (format!("{{\"a\":{}", "[".repeat(100_000)), 0, "its header is wrong"),
        (tensor("[2]", "[0,8]").replace("F32", "F8_E8M0"), 2, "its header is wrong"),
        (r#"{"a":{"dtype":"U64","shape":[1],"data_offsets":[0,8]}}"#.to_owned(), 8, "`a` is U64"),
    ] {
        let error = file(&header, data);
        assert!(error.contains(expected), "{}: {error}", &header[..header.len().min(80)]);
    }
    let mut huge = u64::MAX.to_le_bytes().to_vec();
    huge.extend_from_slice(b"{}");
    let error = error_of(&huge).unwrap().to_string();
    assert!(error.contains("declares a header of 18446744073709551615 bytes"), "{error}");
}

/// `{"t": tensor}` over a storage `0` of `numel` floats.
fn tensor_pickle(numel: i32, offset: i32, size: &[i32], stride: &[i32]) -> Vec<u8> {
    let int = |value: i32| [b"J".as_slice(), &value.to_le_bytes()].concat();
    let text = |text: &str| {
        [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    };
    let tuple = |values: &[i32]| {
        let items: Vec<u8> = values.iter().flat_map(|&value| int(value)).collect();
        [b"(".as_slice(), &items, b"t"].concat()
    };
    [
        b"\x80\x02}".as_slice(),
        &text("t"),
        b"ctorch._utils\n_rebuild_tensor_v2\n((",
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text("0"),
        &text("cpu"),
        &int(numel),
        b"tQ",
        &int(offset),
        &tuple(size),
        &tuple(stride),
        b"\x89ccollections\nOrderedDict\n)RtRs.",
    ]
    .concat()
}

fn read_tensor(numel: i32, offset: i32, size: &[i32], stride: &[i32]) -> Result<Tensor, String> {
    let pickle = tensor_pickle(numel, offset, size, stride);
    let storage: Vec<u8> = (0..6u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&archive(&[("data.pkl", &pickle), ("data/0", &storage)])).unwrap();
    let state = weights::load(file.path()).map_err(|error| error.to_string())?;
    Ok(state.get("t").unwrap().shallow_clone())
}

#[test]
fn views_must_lie_in_their_storage() {
    let view = read_tensor(6, 1, &[2, 2], &[3, 1]).unwrap();
    assert_eq!(values(&view), [1.0, 2.0, 4.0, 5.0]);
    assert_eq!(read_tensor(6, 6, &[0, 9], &[9, 1]).unwrap().size(), [0, 9]);
    for (offset, size, stride) in [
        (0, vec![7], vec![1]),
        (1, vec![6], vec![1]),
        (-1, vec![1], vec![1]),
        (7, vec![0], vec![1]),
        (0, vec![2], vec![6]),
        (0, vec![-1], vec![1]),
        (0, vec![2, 2], vec![1]),
        (5, vec![2], vec![-1]),
        (0, vec![i32::MAX; 3], vec![0; 3]),
        (0, vec![i32::MAX, i32::MAX], vec![i32::MAX, 1]),
    ] {
        let error = read_tensor(6, offset, &size, &stride).unwrap_err();
        assert!(error.contains("reach outside its storage of 6 elements"), "{error}");
    }
    let error = read_tensor(6, 0, &[1; 40], &[1; 40]).unwrap_err();
    assert!(error.contains("has 40 dimensions"), "{error}");
    for numel in [5, 7, -1, i32::MAX] {
        let error = read_tensor(numel, 0, &[1], &[1]).unwrap_err();
        assert!(error.contains(&format!("declared as {numel} elements of F32 but has 24 bytes")));
    }
}

#[test]
fn hostile_pickles_end_in_errors() {
    let refused = |pickle: &[u8]| {
        let error = error_of(&archive(&[("data.pkl", pickle)])).expect("no state dictionary");
        error.to_string()
    };
    let deep_lists =
        [b"\x80\x02".as_slice(), &b"]".repeat(200_000), &b"a".repeat(199_999), b"."].concat();
    let tuples = [b"\x80\x02)".as_slice(), &b"\x85".repeat(200_000), b"."].concat();
    let marks = [b"\x80\x02".as_slice(), &b"(".repeat(200_000), b"."].concat();
    // Each list holds the one before twice: 2^60 elements to a reader that expands it.
    let laughs: Vec<u8> =
        (0..60u8).flat_map(|i| [b']', b'q', i + 1, b'(', b'h', i, b'h', i, b'e']).collect();
    let laughs = [b"\x80\x02]q\x00".as_slice(), &laughs, b"."].concat();
    let endless = [b"\x80\x02".as_slice(), &b"N".repeat(5 << 20)].concat();
    for (pickle, expected) in [
        (deep_lists.as_slice(), "its values lie over 64 deep"),
        (&tuples, "its values lie over 64 deep"),
        (&marks, "takes more values than it has"),
        (&laughs, "more than its size allows"),
        (&endless, "has over 4194304 instructions"),
        (b"\x80\x02", "a record ends too early"),
        (b"\x80\x02N", "a record ends too early"),
        (b"\x80\x02.", "takes more values than it has"),
        (b"\x80\x02X\xff\xff\xff\xffa", "a record ends too early"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "not UTF-8"),
        (b"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\x01.", "holds an object of Python (`builtins.int`)"),
        (b"\x80\x02h\x07.", "recalls what it never kept"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "holds None"),
        (b"\x80\x02NN\x85a.", "appends to something that is not a list"),
        (b"\x80\x02}(Nu.", "sets items of something that is not a dictionary"),
        (b"\x80\x02}q\0X\x01\0\0\0ah\0s.", "contain themselves"),
        (b"\x80\x02}K\x01K\x02s.", "holds a dictionary of `1` (an integer)"),
        (b"\x80\x02NQ.", "lacks a tuple"),
        (b"\x80\x02)Q.", "a reference to a storage is not as PyTorch writes it"),
        (b"\x80\x02N)R.", "calls something that is not a function"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage with arguments"),
        (b"\x80\x02)}b.", "sets the state of something that has none"),
        (
            b"\x80\x02cbuiltins\neval\n.",
            "holds an object of Python (`builtins.eval`), of which nothing was executed",
        ),
        (b"\x80\x02ctorch\nload\n.", "holds an object of Python (`torch.load`)"),
        (b"\x80\x02cos\nsystem", "a record ends too early"),
        (b"\x80\x02(i", "uses instruction 0x69"),
        (b"\x80\x05.", "takes more values than it has"),
        (b"\x80\x06.", "pickled in protocol 6"),
        (b"\x80\x02ccollections\nOrderedDict\n](](K\x01ee\x85R.", "is not made of pairs"),
        (b"\x80\x02]\x90.", "takes more values than it has"),
        (b"\x80\x02](\x90.", "adds to something that is not a set"),
        (b"\x80\x02C\xffa.", "a record ends too early"),
        (b"\x80\x02I1x\n.", "an integer of its pickle is not one"),
    ] {
        let error = refused(pickle);
        assert!(error.contains(expected), "{:?}: {error}", &pickle[..pickle.len().min(20)]);
    }
    let long = [b"\x80\x02c".as_slice(), &b"m".repeat(1 << 20), b"\nname\n."].concat();
    let error = refused(&long);
    assert!(error.len() < 1000 && error.contains("mmm…"), "{} bytes", error.len());
}

#[test]
fn hostile_archives_end_in_errors() {
    let empty: &[u8] = b"\x80\x02}.";
    let good = archive(&[("data.pkl", empty), ("data/0", &[1, 2, 3, 4])]);
    assert!(error_of(&good).is_none());
    let at = |mark: &[u8], nth: usize| {
        let found = good.windows(mark.len()).enumerate().filter(|(_, window)| *window == mark);
        found.map(|(at, _)| at).nth(nth).unwrap()
    };
    let (local, first, end) = (at(b"PK\x03\x04", 0), at(b"PK\x01\x02", 0), at(b"PK\x05\x06", 0));
    let second = at(b"PK\x01\x02", 1);
    let changed = |offset: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
        error_of(&file).map_or_else(|| "it is read".to_owned(), |error| error.to_string())
    };
    for (offset, bytes, expected) in [
        (end + 10, b"\xff\xff".as_slice(), "declares 65535 entries in a directory of"),
        (end + 12, b"\xff\xff\xff\x7f", "declares 2 entries in a directory of 2147483647 bytes"),
        (end + 16, b"\xff\xff\xff\x7f", "declares 2 entries"),
        (end + 20, b"\x01\x00", "it is read"),
        (end, b"PKXX", "directory is not at its end"),
        (first, b"PKXX", "directory is damaged"),
        (first + 10, b"\x08", "is compressed or encrypted"),
        (first + 8, b"\x01", "is compressed or encrypted"),
        (first + 24, b"\xff\xff\xff\x7f", "is compressed or encrypted"),
        (first + 20, b"\xff\xff\xff\x7f\xff\xff\xff\x7f", "reaches beyond"),
        (first + 20, b"\xff\xff\xff\xff\xff\xff\xff\xff", "a record ends too early"),
        // Both entries over the same bytes: what doubles the memory may be done a thousand times.
        (second + 42, b"\0\0\0\0", "reaches beyond"),
        (first + 16, b"\0\0\0\0", "the checksum of the entry w/data.pkl is"),
        (local, b"PKXX", "is neither a safetensors file"),
        (local + 28, b"\xff\x00", "runs into the next"),
        (first + 46, b"v/data.pkl", "the entry v/data.pkl has another name inside"),
        (second + 46, b"w/data.pkl"[..8].as_ref(), "it is read"),
    ] {
        let error = changed(offset, bytes);
        assert!(error.contains(expected), "{offset} {bytes:02x?}: {error}");
    }
    let twice = archive(&[("data.pkl", empty), ("data.pkl", empty)]);
    assert!(error_of(&twice).unwrap().to_string().contains("two entries of one name"));
    let big = archive(&[("data.pkl", empty), ("byteorder", b"big")]);
    assert!(error_of(&big).unwrap().to_string().contains("big-endian"));
    let script = archive(&[("data.pkl", empty), ("constants.pkl", empty)]);
    assert!(error_of(&script).unwrap().to_string().contains("its constants are not a tuple"));
    assert!(error_of(&archive(&[])).is_some());
    let missing = archive(&[("data.pkl", &tensor_pickle(1, 0, &[1], &[1]))]);
    let error = error_of(&missing).unwrap().to_string();
    assert!(error.contains("`t`: the entry w/data/0 is missing"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    /// Any bytes may be wrong: the reader answers, and does not panic.
    #[test]
    fn changed_files_are_read_or_refused(
        file in prop::sample::select(&["small.pth", "kinds.pth", "checkpoint.pth", "kinds.safetensors"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = std::fs::read(fixture(file)).unwrap();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let _ = error_of(&bytes);
    }

    /// The checksum would stop most changes of a pickle: here it is right.
    #[test]
    fn changed_pickles_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut pickle = tensor_pickle(6, 1, &[2, 2], &[3, 1]);
        for (index, byte) in changes {
            let index = index.index(pickle.len());
            pickle[index] = byte;
        }
        let _ = error_of(&archive(&[("data.pkl", &pickle), ("data/0", &[0; 24])]));
    }

    /// Instructions in any order.
    #[test]
    fn pickles_of_any_instructions_are_read_or_refused(
        code in prop::collection::vec(prop::sample::select(INSTRUCTIONS), 0..60),
    ) {
        let code: Vec<u8> = code.concat();
        let pickle = [b"\x80\x02".as_slice(), &code, b"."].concat();
        let _ = error_of(&archive(&[("data.pkl", &pickle), ("data/0", &[0; 4])]));
    }
}

const INSTRUCTIONS: &[&[u8]] = &[
    b"(",
    b"N",
    b"\x88",
    b"K\x01",
    b"M\x01\x02",
    b"J\xff\xff\xff\xff",
    b"\x8a\x01\x05",
    b"X\x07\0\0\0storage",
    b"X\x01\0\0\x000",
    b"]",
    b"}",
    b")",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"a",
    b"e",
    b"s",
    b"u",
    b"q\0",
    b"q\x01",
    b"h\0",
    b"h\x01",
    b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch\nFloatStorage\n",
    b"Q",
    b"R",
    b"b",
    b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ",
    b"K\0K\x01\x85K\x01\x85\x89}tR",
];
