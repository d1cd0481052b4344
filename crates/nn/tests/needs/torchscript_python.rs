//! Files that Python's timm and transformers wrote here, and what they take back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_nn::{Model, Module, TorchScript, weights};
use brigade_test_needs::{Need, needs};
use brigade_torch::{backward, gradient};
use tch::{Kind, Tensor};

fn python(arguments: &[&Path]) {
    let script =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/make_torchscript.py");
    let python = brigade_test_needs::python(Need::TorchModels).unwrap();
    let output = Command::new(python).arg(script).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

fn largest_difference(left: &Tensor, right: &Tensor) -> f64 {
    (left - right).abs().max().double_value(&[])
}

/// A step in evaluation and in training: every parameter that takes part gets a gradient.
fn trains<M>(model: &Model<M>, loss: &Tensor, without_gradient: usize) {
    backward(loss).unwrap();
    let parameters = model.trainable_parameters();
    let missing = parameters.iter().filter(|it| gradient(&it.tensor).unwrap().is_none()).count();
    assert_eq!(missing, without_gradient);
}

#[needs(TorchModels)]
fn resnet50d_and_bert_go_there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    python(&[folder.path()]);

    let expected = weights::load(at("resnet50d_expected.safetensors")).unwrap();
    let mut model = Model::<TorchScript>::from_torchscript(at("resnet50d.pt")).unwrap();
    model.eval();
    let images = expected.get("images").unwrap();
    let output = tch::no_grad(|| model.forward(images).unwrap());
    assert!(largest_difference(&output, expected.get("output").unwrap()) < 1e-4);
    model.train();
    let trained = tch::no_grad(|| model.forward(images).unwrap());
    assert!(largest_difference(&output, &trained) > 1e-3, "the batch's statistics");
    trains(&model, &model.forward(images).unwrap().square().mean(Kind::Float), 0);
    model.save_weights(at("resnet50d.safetensors")).unwrap();

    let expected = weights::load(at("bert_expected.safetensors")).unwrap();
    type Output = BTreeMap<String, Tensor>;
    let mut model = Model::<TorchScript<Output>>::from_torchscript(at("bert.pt")).unwrap();
    let (tokens, mask) = (expected.get("tokens").unwrap(), expected.get("mask").unwrap());
    let output = Module::forward(&model, (tokens, mask)).unwrap();
    for (name, wanted) in [("last_hidden_state", "hidden"), ("pooler_output", "pooled")] {
        assert!(largest_difference(&output[name], expected.get(wanted).unwrap()) < 1e-5, "{name}");
    }
    trains(&model, &output["pooler_output"].square().mean(Kind::Float), 0);
    // transformers makes them with persistent=False.
    for buffer in ["embeddings.position_ids", "embeddings.token_type_ids"] {
        model.set_persistent(buffer, false).unwrap();
    }
    model.save_weights(at("bert.safetensors")).unwrap();

    python(&[Path::new("check"), folder.path()]);
}
