//! Weights files written by PyTorch, and by packages that were published with them, compared by name, type, shape and
//! value with `torch.load`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use brigade_checkpoint::convert::{Target, convert, read_weights};
use brigade_checkpoint::pth::{PthFile, TensorData};
use brigade_checkpoint::{Error, Safetensors, TensorInfo};
use brigade_test_needs::{Need, PUBLISHED_WEIGHTS, needs};

/// Type, shape and checksum of each tensor of a file, by place.
type Tensors = BTreeMap<String, (TensorInfo, u32)>;

/// Returns the output of `print_tensors` for each file, in order.
fn pytorchs(script: &str, arguments: &[&Path]) -> Vec<(String, Tensors)> {
    let script = [PRINT, script].concat();
    let mut python = Command::new(brigade_test_needs::python(Need::Torch).unwrap());
    let output = python.args(["-c", &script]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ours(path: &Path) -> Tensors {
    let mut file = PthFile::open(path).unwrap();
    let mut tensors = Tensors::new();
    let value = file.value().unwrap();
    let _ = value.try_map(&mut |place, tensor| {
        let bytes = file.read_tensor(&tensor)?;
        tensors.insert(place.to_owned(), (tensor.info(), crc32fast::hash(&bytes)));
        Ok::<_, Error>(())
    });
    tensors
}

/// Checks random types, shapes, views and sharing, in every protocol, in a zip archive and without one.
#[needs(Torch)]
fn peer_files_of_both_formats_are_read_as_pytorch_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
import random
random.seed(int(sys.argv[2]))
torch.manual_seed(int(sys.argv[2]))
def storage():
    dtype = random.choice(list(DTYPES))
    return torch.randint(0, 2, (random.randint(0, 400),)).to(dtype) if dtype == torch.bool else \
        (100 * torch.randn(random.randint(0, 400))).to(dtype)
def view(base):
    choice = random.randrange(6)
    if base.numel() < 24 or choice == 0: return base
    offset = random.randint(0, 11)
    if choice == 1: return base[offset:offset + 12].reshape(3, 4).t()
    if choice == 2: return base[offset:offset + 12].reshape(2, 3, 2)[:, 1]
    if choice == 3: return base[offset].expand(3, 2)
    if choice == 4: return base[offset]
    return torch.nn.Parameter(base[:6].reshape(1, 2, 3)) if base.is_floating_point() else base[::3]
files = []
for number in range(60):
    bases = [storage() for _ in range(random.randint(1, 4))]
    state = collections.OrderedDict((f"t{i}", view(random.choice(bases))) for i in range(random.randint(1, 9)))
    value = random.choice([state, {"epoch": 3, "model": {"state_dict": state}}, [state, (1.5, None, state)]])
    path = os.path.join(sys.argv[1], f"{number}.pth")
    torch.save(value, path, pickle_protocol=random.choice([2, 3, 4, 5]),
               _use_new_zipfile_serialization=number % 2 == 0)
    files.append(path)
print_tensors(files)
"#;
    let seed = brigade_test_needs::random().u32(..);
    let known = pytorchs(script, &[folder.path(), Path::new(&seed.to_string())]);
    assert_eq!(known.len(), 60);
    for (path, tensors) in known {
        assert_eq!(ours(Path::new(&path)), tensors, "{path}");
    }
}

/// Returns the folders of the packages that were published with weights.
fn published() -> Vec<String> {
    let python = brigade_test_needs::python(Need::PublishedWeights).unwrap();
    let script = "import importlib.util as it, sys\n\
                  for name in sys.argv[1:]: print(it.find_spec(name).submodule_search_locations[0])";
    let output =
        Command::new(python).args(["-c", script]).args(PUBLISHED_WEIGHTS).output().unwrap();
    let folders: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(folders.len(), PUBLISHED_WEIGHTS.len());
    folders
}

/// silero-vad is published as TorchScript.
#[needs(Torch, PublishedWeights)]
fn peer_published_torchscript_is_converted_as_pytorch_reads_it() {
    let folders = published();
    let folders: Vec<&Path> = folders.iter().map(Path::new).collect();
    let script = r#"
import pathlib
torch.load = lambda path, **named: torch.jit.load(path, map_location="cpu").state_dict()
print_tensors([str(path) for folder in sys.argv[1:] for path in sorted(pathlib.Path(folder).rglob("*.jit"))])
"#;
    let known = pytorchs(script, &folders);
    assert!(!known.is_empty());
    let out = tempfile::tempdir().unwrap();
    for (path, tensors) in known {
        assert!(!tensors.is_empty(), "{path}");
        let to = out.path().join("model.safetensors");
        convert(Path::new(&path), &to, Target::Weights(&Safetensors)).unwrap();
        let mut converted = Tensors::new();
        for (name, tensor) in read_weights(&to).unwrap() {
            let mut bytes = Vec::new();
            tensor.write_to(&mut bytes).unwrap();
            converted.insert(name, (tensor.info(), crc32fast::hash(&bytes)));
        }
        assert_eq!(converted, tensors, "{path}");
        std::fs::remove_file(to).unwrap();
    }
}

#[needs(Torch, PublishedWeights)]
fn peer_published_weights_are_read_as_pytorch_reads_them() {
    let folders = published();
    let folders: Vec<&Path> = folders.iter().map(Path::new).collect();
    let script = r#"
import pathlib
ENDINGS = (".pth", ".pt", ".ckpt", ".tar", ".bin")
paths = [path for folder in sys.argv[1:] for path in sorted(pathlib.Path(folder).rglob("*"))]
print_tensors([str(path) for path in paths if path.suffix in ENDINGS])
"#;
    let known = pytorchs(script, &folders);
    assert!(known.len() >= 17, "{} files", known.len());
    let out = tempfile::tempdir().unwrap();
    for (path, tensors) in known {
        let path = Path::new(&path);
        assert!(!tensors.is_empty(), "{}", path.display());
        assert_eq!(ours(path), tensors, "{}", path.display());
        // Each of them has one model, anywhere in the file.
        let state = PthFile::open(path).unwrap().state_dict(None).unwrap();
        let to = out.path().join("model.safetensors");
        convert(path, &to, Target::Weights(&Safetensors)).unwrap();
        let converted = read_weights(&to).unwrap();
        assert_eq!(converted.len(), state.tensors.len(), "{}", path.display());
        for (name, tensor) in converted {
            let mut bytes = Vec::new();
            tensor.write_to(&mut bytes).unwrap();
            let place = match state.key.as_str() {
                "" => name,
                key => format!("{key}.{name}"),
            };
            assert_eq!(tensors[&place], (tensor.info(), crc32fast::hash(&bytes)), "{place}");
        }
        std::fs::remove_file(to).unwrap();
        eprintln!("{}: {} tensors under `{}`", path.display(), state.tensors.len(), state.key);
    }
}

/// Prints the tensors of a file. A class that is not installed is replaced by a stand-in.
const PRINT: &str = r#"
import collections, json, os, pickle, sys, types, zlib
import torch
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "C128"}
class Unknown:
    def __init__(self, *arguments, **named): pass
    def __setstate__(self, state): pass
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        try: return super().find_class(module, name)
        except Exception: return Unknown
lenient = types.ModuleType("lenient")
lenient.Unpickler, lenient.load, lenient.__name__ = Unpickler, pickle.load, "lenient"
def walk(value, place, found):
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().flatten()
        raw = value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        found[place] = [{"dtype": DTYPES[value.dtype], "shape": None}, zlib.crc32(raw)]
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        below = f"{place}.{key}" if place else str(key)
        if isinstance(item, torch.Tensor):
            walk(item, below, found)
            found[below][0]["shape"] = list(item.shape)
        else:
            walk(item, below, found)
def print_tensors(paths):
    files = []
    for path in paths:
        found = {}
        walk(torch.load(path, map_location="cpu", weights_only=False, pickle_module=lenient), "", found)
        files.append([path, found])
    json.dump(files, sys.stdout)
"#;
