//! Files of `torch.save` that are written and read back, by this crate and by PyTorch.

use std::fs::File;
use std::io::{self, Write};
use std::process::Command;

use brigade_checkpoint::pth::{PthFile, TensorData, write};
use brigade_checkpoint::{Dtype, Error, TensorInfo, Value};
use brigade_test_needs::{Need, needs};

struct Bytes(TensorInfo, Vec<u8>);

impl TensorData for Bytes {
    fn info(&self) -> TensorInfo {
        self.0.clone()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.1)
    }
}

fn floats(shape: &[u64], values: &[f32]) -> Value<Bytes> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Value::Tensor(Bytes(TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }, bytes))
}

/// Returns an optimizer's state with a value of every kind.
fn state() -> Value<Bytes> {
    let moments = Value::dict([
        ("step", floats(&[], &[3.0])),
        ("exp_avg", floats(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        ("none", floats(&[0, 4], &[])),
    ]);
    let group = Value::dict([
        ("lr", Value::Float(1e-3)),
        ("betas", Value::Tuple(vec![Value::Float(0.9), Value::Float(0.999)])),
        ("amsgrad", Value::Bool(false)),
        ("fused", Value::None),
        ("name", Value::Str("ä group".into())),
        (
            "numbers",
            Value::List(
                [-1, 0, 255, 256, 70_000, -70_000, 1 << 40, i64::MIN].map(Value::Int).into(),
            ),
        ),
        ("params", Value::List(vec![Value::Int(0)])),
    ]);
    Value::dict([
        ("state", Value::Dict(vec![(Value::Int(0), moments)])),
        ("param_groups", Value::List(vec![group])),
    ])
}

#[needs()]
fn what_is_written_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.bin");
    let state = state();
    write(File::create(&path).unwrap(), &state).unwrap();
    let mut file = PthFile::open(&path).unwrap();
    let read = file.value().unwrap();
    let read =
        read.try_map(&mut |_, tensor| Ok::<_, Error>((tensor.info(), file.read_tensor(&tensor)?)));
    let written = state.try_map(&mut |_, tensor| Ok::<_, Error>((tensor.0, tensor.1)));
    assert_eq!(read.unwrap(), written.unwrap());
}

#[needs()]
fn a_tensor_that_lies_about_its_size_is_refused() {
    let short = Value::Tensor(Bytes(TensorInfo { dtype: Dtype::F64, shape: vec![2] }, vec![0; 8]));
    let error = write(io::Cursor::new(Vec::new()), &short).unwrap_err();
    assert!(error.to_string().contains("gave 8 bytes, not 16"), "{error}");
    let foreign: Value<Bytes> = Value::Foreign("os.system".into());
    assert!(write(io::Cursor::new(Vec::new()), &foreign).is_err());
}

#[needs(Pytorch)]
fn peer_pytorch_reads_what_is_written_and_its_files_are_read() {
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("ours.bin");
    write(File::create(&ours).unwrap(), &state()).unwrap();
    let script = r#"
import sys, torch, random, numpy
state = torch.load(sys.argv[1], weights_only=True)
group = state["param_groups"][0]
assert group["betas"] == (0.9, 0.999) and group["lr"] == 1e-3 and group["amsgrad"] is False
assert group["fused"] is None and group["name"] == "ä group"
assert group["numbers"] == [-1, 0, 255, 256, 70000, -70000, 2**40, -2**63]
one = state["state"][0]
assert one["step"].item() == 3.0 and one["exp_avg"].tolist() == [[1, 2, 3], [4, 5, 6]]
assert tuple(one["none"].shape) == (0, 4)
torch.load(sys.argv[1], weights_only=True, mmap=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
torch.save(optimizer.state_dict(), sys.argv[2])
torch.save({"step": 5, "numpy": numpy.random.get_state(), "random": random.getstate(),
            "torch": torch.get_rng_state(), "t": model.weight.detach().t()}, sys.argv[3])
print(model.weight.detach().t().flatten().tolist())
"#;
    let (theirs, states) = (folder.path().join("theirs.bin"), folder.path().join("states.pkl"));
    let output =
        Command::new(python).args(["-c", script]).args([&ours, &theirs, &states]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let read = PthFile::open(&theirs).unwrap().value().unwrap();
    let group = &read.get("param_groups").unwrap().as_items().unwrap()[0];
    assert_eq!(group.get("lr").unwrap().as_float(), Some(0.25));
    let (place, first) = &read.get("state").unwrap().as_dict().unwrap()[0];
    assert_eq!(place.as_int(), Some(0));
    assert_eq!(first.get("exp_avg").unwrap().as_tensor().unwrap().size, [2, 3]);

    let mut file = PthFile::open(&states).unwrap();
    let read = file.value().unwrap();
    assert!(matches!(read.get("numpy"), Some(Value::Tuple(_))), "{read:?}");
    assert_eq!(read.get("step").unwrap().as_int(), Some(5));
    let turned = read.get("t").unwrap().as_tensor().unwrap().clone();
    let values: Vec<f64> = file
        .read_tensor(&turned)
        .unwrap()
        .chunks_exact(4)
        .map(|bytes| f64::from(f32::from_le_bytes(bytes.try_into().unwrap())))
        .collect();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(format!("{values:?}"), printed.trim());
}
