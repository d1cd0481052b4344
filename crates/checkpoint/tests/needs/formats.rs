//! Files of every dtype and format that PyTorch and safetensors write, and files of other kinds.
//!
//! `fixtures/make_formats.py` has made the files, and `expected.json` with the values that PyTorch reads from them.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_checkpoint::convert::{Target, convert, read_weights};
use brigade_checkpoint::pth::{PthFile, Quantizer, TensorData};
use brigade_checkpoint::{Error, Safetensors, Torch, Value};
use brigade_test_needs::{Need, needs};
use serde_json::{Value as Json, json};

fn formats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/formats")
}

fn expected() -> serde_json::Map<String, Json> {
    let text = fs::read(formats().join("expected.json")).unwrap();
    let Ok(Json::Object(files)) = serde_json::from_slice(&text) else { panic!("an object") };
    files
}

/// Returns names, dtypes, shapes and bytes, as in `expected.json`.
fn found(path: &Path) -> Json {
    let tensors = read_weights(path).unwrap().into_iter().map(|(name, tensor)| {
        let (info, mut bytes) = (tensor.info(), Vec::new());
        tensor.write_to(&mut bytes).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        (name, json!({ "dtype": info.dtype, "shape": info.shape, "bytes": hex }))
    });
    tensors.collect::<serde_json::Map<_, _>>().into()
}

#[needs()]
fn every_dtype_and_format_is_read() {
    for (file, expected) in expected() {
        assert_eq!(found(&formats().join(&file)), expected, "{file}");
    }
}

#[needs()]
fn every_dtype_that_the_target_has_is_converted() {
    let folder = tempfile::tempdir().unwrap();
    for (file, expected) in expected() {
        let pth = folder.path().join(format!("{file}.pth"));
        convert(&formats().join(&file), &pth, Target::Weights(&Torch)).unwrap();
        assert_eq!(found(&pth), expected, "{file} as .pth");
        let safetensors = folder.path().join(format!("{file}.safetensors"));
        match convert(&formats().join(&file), &safetensors, Target::Weights(&Safetensors)) {
            Ok(_) => assert_eq!(found(&safetensors), expected, "{file} as safetensors"),
            Err(error) => {
                let lacks = ["dtypes.pth", "dtypes_legacy.pth", "quantized.pth"];
                assert!(lacks.contains(&file.as_str()), "{file}: {error}");
            }
        }
    }
}

#[needs()]
fn what_the_target_lacks_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("out.safetensors");
    let error =
        convert(&formats().join("quantized.pth"), &to, Target::Weights(&Safetensors)).unwrap_err();
    let said = error.to_string();
    assert!(said.starts_with(&to.display().to_string()), "{said}");
    assert!(
        said.contains("cannot hold `qint32` of qint32") && said.contains("dequantize()"),
        "{said}"
    );

    // Three values of 6 bits would not end at a byte, but four do.
    let header = r#"{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#;
    let six = folder.path().join("six.safetensors");
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3]].concat();
    fs::write(&six, bytes).unwrap();
    assert_eq!(found(&six)["w"], json!({ "dtype": "F6_E2M3", "shape": [4], "bytes": "010203" }));
    let error = convert(&six, &folder.path().join("six.pth"), Target::Weights(&Torch)).unwrap_err();
    assert!(error.to_string().contains("`w`: PyTorch has no type for F6_E2M3"), "{error}");
    convert(&six, &folder.path().join("copy.safetensors"), Target::Weights(&Safetensors)).unwrap();
    assert_eq!(found(&folder.path().join("copy.safetensors")), found(&six));
    assert!(!to.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left of what failed");
}

#[needs()]
fn quantizers_are_read() {
    let mut file = PthFile::open(formats().join("quantized.pth")).unwrap();
    let tree = file.value().unwrap();
    let quantizer = |name: &str| match tree.get(name) {
        Some(Value::Tensor(tensor)) => *tensor.quantizer.clone().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(quantizer("qint32"), Quantizer::PerTensor { scale: 0.25, zero_point: -7 });
    let Quantizer::PerChannel { scales, zero_points, axis: 0 } = quantizer("quint8") else {
        panic!("one scale for each row")
    };
    let expected: Vec<u8> =
        [0.5f64, 1.0, 2.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    assert_eq!(file.read_tensor(&scales).unwrap(), expected);
    let expected: Vec<u8> = [0i64, 1, 2].iter().flat_map(|zero| zero.to_le_bytes()).collect();
    assert_eq!(file.read_tensor(&zero_points).unwrap(), expected);
}

/// Reads a frozen module: `torch.jit.freeze` turns parameters into constants, whose names are lost.
#[needs()]
fn a_frozen_script_has_the_constants_of_its_code() {
    let found = found(&formats().join("frozen.jit"));
    let names: Vec<&String> = found.as_object().unwrap().keys().collect();
    assert!(names.iter().all(|name| name.starts_with("CONSTANTS.c")), "{names:?}");
    let scripted = &expected()["script.jit"]["inner.linear.weight"];
    assert!(found.as_object().unwrap().values().any(|it| it == scripted), "{found}");
}

#[needs()]
fn files_that_are_cut_short_say_so() {
    let folder = tempfile::tempdir().unwrap();
    for name in
        ["dtypes.safetensors", "quantized.pth", "script.jit", "exported.pt2", "exported_2_7.pt2"]
    {
        let whole = fs::read(formats().join(name)).unwrap();
        for length in (16..whole.len()).step_by(61) {
            let path = folder.path().join(name);
            fs::write(&path, &whole[..length]).unwrap();
            let error = read_weights(&path).unwrap_err();
            let said = error.to_string();
            assert!(matches!(error, Error::Damaged { .. }), "{name} of {length} bytes: {said}");
            assert!(said.contains("was cut short, as by a download"), "{name} of {length}: {said}");
        }
    }
}

#[needs()]
fn archives_around_weights_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.pth");
    // `zip` with method 0 of one empty file, as APPNOTE.TXT has it.
    let zip = |name: &str| {
        let (name, size) = (name.as_bytes(), (name.len() as u16).to_le_bytes());
        let local =
            [b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0".as_slice(), &[0; 12], &size, &[0; 2], name];
        let local = local.concat();
        let central =
            [b"PK\x01\x02\x14\0\x14\0\0\0\0\0\0\0\0\0".as_slice(), &[0; 12], &size, &[0; 16], name];
        let central = central.concat();
        let (bytes, at) =
            ((central.len() as u32).to_le_bytes(), (local.len() as u32).to_le_bytes());
        [&local[..], &central, b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &bytes, &at, &[0; 2]].concat()
    };
    fs::write(&path, zip("model/pytorch_model.bin")).unwrap();
    let said = read_weights(&path).unwrap_err().to_string();
    assert!(said.contains("a zip archive around weights"), "{said}");
    assert!(said.contains("`unzip`") && said.contains("`model/pytorch_model.bin`"), "{said}");
    fs::write(&path, zip("photo.jpg")).unwrap();
    let said = read_weights(&path).unwrap_err().to_string();
    assert!(said.contains("a zip archive, but not one of torch.save"), "{said}");
    // The file as packed by other programs.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&fs::read(formats().join("views.pth")).unwrap()).unwrap();
    fs::write(&path, gzip.finish().unwrap()).unwrap();
    let said = read_weights(&path).unwrap_err().to_string();
    assert!(said.contains("compressed with gzip") && said.contains("gunzip"), "{said}");
}

#[needs()]
fn errors_name_the_users_file() {
    let folder = tempfile::tempdir().unwrap();
    let from = formats().join("views.pth");
    let to = folder.path().join("missing/out.safetensors");
    let said = convert(&from, &to, Target::Weights(&Safetensors)).unwrap_err().to_string();
    assert_eq!(
        said,
        format!("cannot write {}: No such file or directory (os error 2)", to.display())
    );
    // A damaged storage is found while the target is written.
    let mut bytes = fs::read(&from).unwrap();
    let place = bytes.windows(12).position(|window| {
        window == [0, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e, 0x50, 0x51, 0x52, 0x53]
    });
    bytes[place.unwrap() + 3] ^= 1;
    let damaged = folder.path().join("damaged.pth");
    fs::write(&damaged, bytes).unwrap();
    for (name, target) in
        [("out.safetensors", Target::Weights(&Safetensors)), ("out.pth", Target::Weights(&Torch))]
    {
        let said = convert(&damaged, &folder.path().join(name), target).unwrap_err().to_string();
        assert!(
            said.starts_with(&format!("{} is damaged: the checksum", damaged.display())),
            "{said}"
        );
    }
}

#[needs(Pytorch)]
fn peer_pytorch_reads_what_is_converted() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = |name: &str| formats().join(name);
    for name in ["dtypes.pth", "quantized.pth", "script.jit", "exported.pt2", "bin"] {
        convert(&from(name), &at(&format!("{name}.out.pth")), Target::Weights(&Torch)).unwrap();
    }
    convert(&from("dtypes.safetensors"), &at("from_safetensors.pth"), Target::Weights(&Torch))
        .unwrap();
    convert(&from("dtypes.safetensors"), &at("out.safetensors"), Target::Weights(&Safetensors))
        .unwrap();
    let script = r#"
import sys, torch
from safetensors.torch import load_file
theirs = sys.argv[1]
def same(ours, theirs):
    assert set(ours) == set(theirs), (set(ours), set(theirs))
    for name in theirs:
        a, b = ours[name], theirs[name].detach()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if b.is_quantized:
            assert a.qscheme() == b.qscheme() and torch.equal(a.dequantize(), b.dequantize()), name
            assert a.dequantize().numel() == 15
        else:
            bits = lambda it: it.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(bits(a), bits(b)), name
load = lambda name: torch.load(name, weights_only=True)
for name in ["dtypes.pth", "quantized.pth"]:
    same(load(f"{name}.out.pth"), load(f"{theirs}/{name}"))
same(load("script.jit.out.pth"), torch.jit.load(f"{theirs}/script.jit").state_dict())
same(load("exported.pt2.out.pth"), torch.export.load(f"{theirs}/exported.pt2").state_dict)
shards = [load(f"{theirs}/bin/pytorch_model-0000{n}-of-00002.bin") for n in (1, 2)]
same(load("bin.out.pth"), shards[0] | shards[1])
same(load("from_safetensors.pth"), load_file(f"{theirs}/dtypes.safetensors"))
same(load_file("out.safetensors"), load_file(f"{theirs}/dtypes.safetensors"))
"#;
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let output = Command::new(python)
        .args(["-c", script])
        .arg(formats())
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
