//! Weights that stay open: whole tensors and parts of them.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{FileTensor, WeightsOptions, find_weights, read_weights};
use brigade_checkpoint::pth::TensorData;
use brigade_checkpoint::{
    Dtype, Error, Region, Safetensors, TensorInfo, TensorReader, WeightsFormat, WeightsReader,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The file that is read in these tests: its tensor `base` is a matrix, of which `transposed` is a view.
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

/// All files of weights among the fixtures: zip archives, the format before them, TorchScript, exported programs.
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
                // Conversions take the prefixes of wrappers off.
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
