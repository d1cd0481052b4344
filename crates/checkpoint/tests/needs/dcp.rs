//! Folders of `torch.distributed.checkpoint`, written for PyTorch and read from it.

use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_checkpoint::convert::{StateKind, Target, convert, convert_like};
use brigade_checkpoint::layout::Checkpoint;
use brigade_checkpoint::{Region, Value, WeightsReader};
use brigade_test_needs::{Need, needs};

use crate::saved;

/// The programs of the fixture, in PyTorch.
const PROGRAM: &str = r#"
import sys, torch
import torch.distributed.checkpoint as dcp
from collections import OrderedDict
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

def made():
    model = torch.nn.Sequential(OrderedDict(
        hidden=torch.nn.Linear(6, 8), norm=torch.nn.BatchNorm1d(8), head=torch.nn.Linear(8, 3)))
    return model, torch.optim.Adam(model.parameters(), lr=0.5)
"#;

fn python(script: &str, arguments: &[&Path]) {
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let output = Command::new(python)
        .args(["-W", "ignore", "-c", &format!("{PROGRAM}{script}")])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn ours() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures/checkpoint_version_2")
}

fn values(file: &Path) -> Vec<(String, String, Vec<u8>)> {
    let weights = WeightsReader::open(file).unwrap();
    let tensors = weights.tensors().map(|tensor| {
        let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
        tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
        (tensor.name().to_owned(), tensor.info().to_string(), bytes)
    });
    let mut all: Vec<_> = tensors.collect();
    all.sort();
    all
}

#[needs(Pytorch)]
fn peer_pytorch_loads_models_and_optimizers_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("dcp");
    convert(&ours(), &to, Target::Dcp).unwrap();
    let script = r#"
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
for number, suffix in enumerate(["", "_1"]):
    model, optimizer = made()
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.load({"model" + suffix: weights, "optim" + suffix: states}, checkpoint_id=sys.argv[1])
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, states)
    expected = load_file(f"{sys.argv[2]}/model{suffix}.safetensors")
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    expected = load_file(f"{sys.argv[2]}/optimizer{suffix}.safetensors")
    assert len(expected) == 18
    for name, parameter in model.named_parameters():
        for slot, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, expected[f"state.{name}.{slot}"]), (name, slot)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.04916518274408217 and group["betas"] == (0.9, 0.999), group
    assert group["amsgrad"] is False and group["fused"] is None, group
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
dcp_to_torch_save(sys.argv[1], sys.argv[1] + ".pth")
whole = torch.load(sys.argv[1] + ".pth", weights_only=True)
assert whole["optim"]["param_groups"][0]["params"][0] == "hidden.weight", whole["optim"]["param_groups"]
assert torch.equal(whole["model"]["head.bias"], load_file(f"{sys.argv[2]}/model.safetensors")["head.bias"])
"#;
    python(script, &[&to, &ours()]);
}

/// Converts the form of PyTorch's tutorial and torchtitan, with one key for each number of each parameter.
#[needs(Pytorch)]
fn peer_pytorchs_flattened_states_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
torch.manual_seed(1)
model, optimizer = made()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for _ in range(4):
    model(torch.rand(5, 6)).square().sum().backward()
    optimizer.step()
    scheduler.step()
for flat in False, True:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    weights = get_model_state_dict(model)
    app = {"model": weights, "optim": states, "scheduler": scheduler.state_dict()}
    dcp.save({"app": app}, checkpoint_id=f"{sys.argv[1]}/app_{flat}")
    # torchtitan has the weights outermost.
    dcp.save({**weights, "optimizer": states, "step": 4}, checkpoint_id=f"{sys.argv[1]}/top_{flat}")
import os
os.mkdir(f"{sys.argv[1]}/full")  # Accelerate's FULL_STATE_DICT
torch.save(weights, f"{sys.argv[1]}/full/pytorch_model_fsdp.bin")
torch.save(get_optimizer_state_dict(model, optimizer), f"{sys.argv[1]}/full/optimizer.bin")
save_file(weights, f"{sys.argv[1]}/model.safetensors")
states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
states = {f"state.{name}.{slot}": tensor for name, slots in states.items() for slot, tensor in slots.items()}
save_file(states, f"{sys.argv[1]}/optimizer.safetensors")
"#;
    python(script, &[folder.path()]);
    let like = folder.path().join("like");
    saved::before_a_window(&like);
    for name in ["app_False", "app_True", "top_False", "top_True", "full"] {
        let (from, to) = (folder.path().join(name), folder.path().join(format!("{name}_made")));
        let report = convert_like(&from, &to, &like, &StateKind::ALL).unwrap();
        for file in ["model.safetensors", "optimizer.safetensors"] {
            assert_eq!(values(&to.join(file)), values(&folder.path().join(file)), "{name} {file}");
        }
        let made = Checkpoint::open(&to).unwrap();
        assert_eq!(made.manifest().step, 4);
        let optimizer = made.manifest().of_kind("optimizer").next().unwrap();
        let state = made.state(optimizer).unwrap().unwrap();
        let group = &state.get("groups").unwrap().as_items().unwrap()[0];
        let rate = group.get("numbers").and_then(|numbers| numbers.get("lr")?.as_float());
        assert_eq!(rate, Some(0.5), "{name}");
        if name.starts_with("app") {
            let scheduler = made.manifest().of_kind("scheduler").next().unwrap();
            let state = made.state(scheduler).unwrap().unwrap();
            assert_eq!(state.get("position").and_then(Value::as_int), Some(4), "{report:?}");
        }
        let left = report.left_out.join("\n");
        assert_eq!(left.contains("`step`: the integer 4"), name.starts_with("top"), "{left}");
    }
}
