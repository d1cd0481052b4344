//! Folders that Accelerate has offloaded weights into. `fixtures/make_offload_folder.py` wrote one.

use std::fs;
use std::path::Path;

use brigade_checkpoint::{Region, WeightsReader, open_weights};

fn fixture() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/offload_folder"))
}

fn read(weights: &WeightsReader, name: &str) -> (String, Vec<u8>) {
    let tensor = weights.get(name).unwrap();
    let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
    tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
    (tensor.info().to_string(), bytes)
}

#[test]
fn tensors_in_files_of_their_own_and_in_safetensors_are_read() {
    for place in [fixture().to_owned(), fixture().join("index.json")] {
        let weights = WeightsReader::open(place).unwrap();
        let values: Vec<u8> = (0..6).flat_map(|it| (it as f32 / 4.0).to_le_bytes()).collect();
        assert_eq!(read(&weights, "block.weight"), ("[2, 3] of F32".to_owned(), values));
        let half = vec![0, 0, 0x80, 0x3f, 0, 0x40, 0x40, 0x40];
        assert_eq!(read(&weights, "block.half"), ("[4] of BF16".to_owned(), half));
        assert_eq!(
            read(&weights, "block.scale"),
            ("[] of F32".to_owned(), 2.5f32.to_le_bytes().to_vec())
        );
        let steps = (0..3i64).flat_map(i64::to_le_bytes).collect();
        assert_eq!(read(&weights, "block.steps"), ("[3] of I64".to_owned(), steps));
        assert_eq!(read(&weights, "block.eight").0, "[4] of F8_E4M3");
        let bias = [7f32, 7.0].map(f32::to_le_bytes).as_flattened().to_vec();
        assert_eq!(read(&weights, "head.bias"), ("[2] of F32".to_owned(), bias));
        assert_eq!(weights.tensors().len(), 6);
    }
}

/// Each file of a tensor is closed, so that a folder can have more of them than a process may have open.
#[test]
fn files_of_single_tensors_are_not_kept_open() {
    let folder = tempfile::tempdir().unwrap();
    let count = 50;
    let entries: Vec<String> = (0..count)
        .map(|index| {
            let name = format!("layer.{index}");
            fs::write(folder.path().join(format!("{name}.dat")), f32::to_le_bytes(1.5)).unwrap();
            format!("\"{name}\": {{\"dtype\": \"float32\", \"shape\": [1]}}")
        })
        .collect();
    fs::write(folder.path().join("index.json"), format!("{{{}}}", entries.join(","))).unwrap();
    let weights = WeightsReader::open(folder.path()).unwrap();
    let is_ours = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|path| path.starts_with(folder.path()))
    };
    let open = fs::read_dir("/proc/self/fd").unwrap().filter(|it| it.as_ref().is_ok_and(is_ours));
    assert_eq!(open.count(), 0);
    for index in 0..count {
        let (_, bytes) = read(&weights, &format!("layer.{index}"));
        assert_eq!(bytes, f32::to_le_bytes(1.5));
    }
}

#[test]
fn a_file_of_a_single_tensor_that_is_replaced_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weight.dat");
    fs::write(&file, f32::to_le_bytes(1.5)).unwrap();
    let index = r#"{"weight": {"dtype": "float32", "shape": [1]}}"#;
    fs::write(folder.path().join("index.json"), index).unwrap();
    let weights = WeightsReader::open(folder.path()).unwrap();
    let other = folder.path().join("other");
    fs::write(&other, f32::to_le_bytes(2.5)).unwrap();
    fs::rename(other, &file).unwrap();
    let tensor = weights.get("weight").unwrap();
    let read = tensor.read(&Region::whole(&[1]), &mut [0; 4]).unwrap_err();
    let text = format!("{read:?}");
    assert!(text.contains("was replaced while the weights were in use"), "{text}");
    assert!(tensor.stamp().is_err());
}

/// Opening a named pipe waits for a writer, unless it is opened without blocking.
#[test]
fn named_pipes_in_the_place_of_weights_are_errors_and_do_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weight.dat");
    let pipe = |path: &Path| {
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
    };
    let safetensors = folder.path().join("model.safetensors");
    pipe(&safetensors);
    let error = format!("{:?}", WeightsReader::open(&safetensors).unwrap_err());
    assert!(error.contains("not a regular file"), "{error}");

    fs::write(&file, f32::to_le_bytes(1.5)).unwrap();
    let index = r#"{"weight": {"dtype": "float32", "shape": [1]}}"#;
    fs::write(folder.path().join("index.json"), index).unwrap();
    fs::remove_file(&safetensors).unwrap();
    let weights = WeightsReader::open(folder.path()).unwrap();
    fs::remove_file(&file).unwrap();
    pipe(&file);
    let read = weights.get("weight").unwrap().read(&Region::whole(&[1]), &mut [0; 4]);
    let error = format!("{:?}", read.unwrap_err());
    assert!(error.contains("not a regular file"), "{error}");
    let error = format!("{:?}", WeightsReader::open(folder.path()).unwrap_err());
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn folders_that_contradict_their_index_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let error = || open_weights(folder.path(), None).unwrap_err().to_string();
    let index = fs::read_to_string(folder.path().join("index.json")).unwrap();
    let with = |old: &str, new: &str| {
        assert!(index.contains(old), "{old}");
        fs::write(folder.path().join("index.json"), index.replacen(old, new, 1)).unwrap();
    };
    with("\"float32\"", "\"float31\"");
    assert!(
        error().contains("`block.weight` has the dtype float31, which is not supported"),
        "{}",
        error()
    );
    with("block.weight", "../block.weight");
    assert!(error().contains("is not a file name"), "{}", error());
    with("inner", "inside");
    assert!(error().contains("`inside` is not in"), "{}", error());
    with("\"shape\": []", "\"shape\": [1099511627776, 1099511627776]");
    assert!(error().contains("more than 2^64 bytes"), "{}", error());
    fs::write(folder.path().join("index.json"), "[1]").unwrap();
    assert!(
        error().contains("neither an index of shards nor one of offloaded weights"),
        "{}",
        error()
    );
    fs::write(folder.path().join("index.json"), &index).unwrap();
    fs::write(folder.path().join("block.half.dat"), [0; 7]).unwrap();
    assert!(
        error().contains("a tensor [4] of BF16 has 8 bytes, and the file has 7"),
        "{}",
        error()
    );
    fs::remove_file(folder.path().join("block.half.dat")).unwrap();
    assert!(error().contains("block.half.dat"), "{}", error());
    let keyed = open_weights(folder.path(), Some("model")).unwrap_err().to_string();
    assert!(keyed.contains("model"), "{keyed}");
}
