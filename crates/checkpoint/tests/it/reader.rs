//! Weights that stay open: reading of whole tensors and of regions.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{FileTensor, WeightsOptions, find_weights, read_weights};
use brigade_checkpoint::pth::TensorData;
use brigade_checkpoint::{
    Dtype, Error, Region, Safetensors, Stack, TensorInfo, TensorReader, WeightsFormat,
    WeightsReader,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Returns the file for these tests: its tensor `base` is a matrix, of which `transposed` is a view.
fn kinds() -> Vec<u8> {
    fs::read(fixtures().join("weights/kinds_protocol_4.pth")).unwrap()
}

fn bytes(tensor: &FileTensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_to(&mut bytes).unwrap();
    bytes
}

fn read(tensor: TensorReader<'_>, region: &Region) -> Result<Vec<u8>, Error> {
    let info = TensorInfo { dtype: tensor.info().dtype, shape: region.shape.clone() };
    let mut bytes = vec![0; info.bytes().unwrap() as usize];
    tensor.read(region, &mut bytes).map(|()| bytes)
}

fn read_whole(tensor: TensorReader<'_>) -> Result<Vec<u8>, Error> {
    read(tensor, &Region::whole(&tensor.info().shape))
}

/// Covers all weights files among the fixtures: zip archives, the format before them, TorchScript, exported programs.
#[test]
fn tensors_are_those_that_conversions_copy() {
    let (mut files, mut tensors) = (0, 0);
    for folder in ["weights", "formats"] {
        for entry in fs::read_dir(fixtures().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let Ok(reader) = WeightsReader::open(&path) else {
                assert!(
                    find_weights(&path, &WeightsOptions::default()).is_err(),
                    "{}",
                    path.display()
                );
                continue;
            };
            reader.verify().unwrap();
            files += 1;
            let found = find_weights(&path, &WeightsOptions::default()).unwrap();
            assert_eq!(reader.tensors().len(), found.tensors.len());
            assert_eq!(reader.key(), found.key);
            for (tensor, (name, expected)) in reader.tensors().zip(&found.tensors) {
                // Conversions remove the prefixes of wrappers.
                assert!(tensor.name().ends_with(name), "{}", tensor.name());
                assert_eq!(tensor.info(), &expected.info(), "{name} of {}", path.display());
                match read_whole(tensor) {
                    Ok(read) => assert!(read == bytes(expected), "{name} of {}", path.display()),
                    Err(error) => {
                        let dtype = expected.info().dtype;
                        assert!(dtype.bits() % 8 > 0 || dtype.name().starts_with('q'), "{error}");
                        assert!(
                            error.to_string().contains("cannot be read by themselves"),
                            "{error}"
                        );
                    }
                }
                tensors += 1;
            }
        }
    }
    assert!(files > 10 && tensors > 100, "{files} files, {tensors} tensors");
}

#[test]
fn parts_of_tensors_are_read_whatever_their_order() {
    let reader = WeightsReader::open(fixtures().join("weights/kinds_protocol_4.pth")).unwrap();
    let read = |name: &str, offset: [u64; 2], shape: [u64; 2]| {
        let region = Region { offset: offset.to_vec(), shape: shape.to_vec() };
        let bytes = read(reader.get(name).unwrap(), &region).unwrap();
        bytes.chunks(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect::<Vec<_>>()
    };
    let whole = read("base", [0, 0], [3, 4]);
    assert_eq!(read("base", [1, 1], [2, 2]), [whole[5], whole[6], whole[9], whole[10]]);
    assert_eq!(read("transposed", [1, 1], [2, 2]), [whole[5], whole[9], whole[6], whole[10]]);
    assert!(read("base", [3, 0], [0, 4]).is_empty());
}

#[test]
fn a_region_that_a_tensor_lacks_is_named() {
    let reader = WeightsReader::open(fixtures().join("weights/kinds_protocol_4.pth")).unwrap();
    let tensor = reader.get("base").unwrap();
    assert!(reader.get("absent").is_none());
    let beyond = Region::whole(&[3, 4]).narrow(0, 2, 2);
    for (region, length) in [(beyond, 32), (Region::whole(&[3, 4]), 47), (Region::whole(&[12]), 48)]
    {
        let error = tensor.read(&region, &mut vec![0; length]).unwrap_err();
        assert!(matches!(error, Error::NoSuchRegion { .. }), "{error}");
        let said = error.to_string();
        assert!(said.starts_with("cannot read `base` of "), "{said}");
        assert!(
            said.ends_with(&format!(
                "kinds_protocol_4.pth: {region} into {length} bytes, of a tensor [3, 4] of F32"
            )),
            "{said}"
        );
    }
}

#[test]
fn a_file_that_is_cut_after_it_was_opened_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let safetensors = folder.path().join("kinds.safetensors");
    let weights = read_weights(&fixtures().join("weights/kinds_protocol_4.pth")).unwrap();
    let weights =
        weights.into_iter().filter(|(_, tensor)| tensor.info().dtype == Dtype::F32).collect();
    Safetensors.write(&safetensors, &weights).unwrap();
    let pth = folder.path().join("kinds_protocol_4.pth");
    fs::write(&pth, kinds()).unwrap();
    for path in [safetensors, pth] {
        let reader = WeightsReader::open(&path).unwrap();
        let whole = path.metadata().unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
        for name in ["base", "transposed"] {
            let error = read_whole(reader.get(name).unwrap()).unwrap_err();
            assert!(matches!(error, Error::Damaged { .. }), "{error}");
            let expected = format!(
                "it was cut short while `{name}` was read: expected {whole} bytes, found 100"
            );
            assert!(error.to_string().ends_with(&expected), "{error}");
        }
    }
}

#[test]
fn a_storage_that_is_not_what_was_written_is_found_with_a_tensor_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.pth");
    fs::write(&path, kinds()).unwrap();
    let reader = WeightsReader::open(&path).unwrap();
    reader.verify().unwrap();
    let base = read_whole(reader.get("base").unwrap()).unwrap();
    let at = kinds().windows(base.len()).position(|window| window == base).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[99], at as u64 + 5).unwrap();
    let error = reader.verify().unwrap_err().to_string();
    assert!(error.contains("`base`: the checksum of the entry "), "{error}");
}

/// Writes files with these float32 tensors, and opens them.
fn written(folder: &Path, tensors: &[(&str, &[u64], &[f32])]) -> WeightsReader {
    let path = folder.join("parts.safetensors");
    let infos: Vec<(&str, TensorInfo)> = tensors
        .iter()
        .map(|&(name, shape, _)| (name, TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }))
        .collect();
    let mut content = brigade_checkpoint::safetensors::layout(&path, &infos).unwrap().header;
    let values = tensors.iter().flat_map(|(.., values)| *values);
    content.extend(values.flat_map(|value| value.to_le_bytes()));
    fs::write(&path, content).unwrap();
    WeightsReader::open(path).unwrap()
}

#[test]
fn a_stack_is_read_from_where_its_parts_lie() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0u8..24).map(f32::from).collect();
    // Two elements, each of 1 and 2 rows, with 4 columns.
    let parts = [
        ("a.0", &[1u64, 4][..], &values[..4]),
        ("b.0", &[2, 4], &values[4..12]),
        ("a.1", &[1, 4], &values[12..16]),
        ("b.1", &[2, 4], &values[16..]),
    ];
    let mut weights = written(folder.path(), &parts);
    let stack = |name: &str, elements: &[&[&str]]| {
        let names = |parts: &&[&str]| parts.iter().map(|&part| part.to_owned()).collect();
        Stack { name: name.to_owned(), elements: elements.iter().map(names).collect() }
    };
    let all = stack("all", &[&["a.0", "b.0"], &["a.1", "b.1"]]);
    for (name, elements, fact) in [
        ("all", [&["a.0", "b.0"][..], &["a.1", "c.1"]], "`c.1` is missing"),
        ("all", [&["a.0", "b.0"], &["a.0", "b.1"]], "`a.0` is missing"),
        ("all", [&["a.0", "b.0"], &["b.1", "b.0"]], "`b.0` is missing"),
        ("all", [&["a.0"], &["b.1"]], "b.1 differ from the first ones"),
        ("all", [&["a.0"], &[]], " differ from the first ones"),
        ("a.1", [&["a.0"], &["b.0"]], "the weights have it, too"),
    ] {
        let error = weights.stack(vec![stack(name, &elements)]).unwrap_err().to_string();
        assert!(error.contains("cannot be put together") && error.contains(fact), "{error}");
    }
    // After an error, the first stack is not applied either.
    let error = weights.stack(vec![all.clone(), stack("none", &[])]).unwrap_err().to_string();
    assert!(error.contains("`none` cannot be put together: it has no parts"), "{error}");
    assert_eq!(weights.tensors().len(), 4);

    weights.stack(vec![all]).unwrap();
    weights.rename(|name| (name == "all").then(|| "experts".to_owned()));
    let names: Vec<&str> = weights.tensors().map(|tensor| tensor.name()).collect();
    assert_eq!(names, ["experts"]);
    let stack = weights.get("experts").unwrap();
    assert_eq!(stack.info().shape, [2, 3, 4]);
    for (elements, rows, columns) in [
        (0..2, 0..3, 0..4),
        (1..2, 0..3, 0..4),
        (0..2, 1..3, 1..3),
        (0..1, 0..1, 3..4),
        (1..2, 2..3, 0..4),
        (0..2, 0..2, 2..4),
        (0..0, 0..3, 0..4),
    ] {
        let region = Region {
            offset: vec![elements.start, rows.start, columns.start],
            shape: [&elements, &rows, &columns].map(|it| it.end - it.start).to_vec(),
        };
        let expected: Vec<u8> = elements
            .flat_map(|element| rows.clone().map(move |row| element * 3 + row))
            .flat_map(|row| columns.clone().map(move |column| row * 4 + column))
            .flat_map(|place| values[place as usize].to_le_bytes())
            .collect();
        assert_eq!(read(stack, &region).unwrap(), expected, "{region}");
    }
    let beyond = Region { offset: vec![1, 0, 0], shape: vec![2, 3, 4] };
    assert!(matches!(read(stack, &beyond), Err(Error::NoSuchRegion { .. })));
}
