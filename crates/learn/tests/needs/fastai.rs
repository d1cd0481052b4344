//! fastai itself, on this machine: the same model, data, weights and order give the same losses.

use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::{Learner, Loaders};
use brigade_metrics::{Accuracy, TopK};
use brigade_models::XResNet;
use brigade_nn::{Model, StateDict, weights};
use brigade_test_needs::{Need, needs};
use brigade_train::Accelerator;
use tch::Kind;

#[needs(Fastai)]
fn two_epochs_agree_with_fastais() {
    let folder = tempfile::tempdir().unwrap();
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fastai/export.py");
    let python = brigade_test_needs::python(Need::Fastai).unwrap();
    let output = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let data = weights::load(folder.path().join("data.safetensors")).unwrap();
    for name in ["fit_one_cycle", "fit_flat_cos"] {
        let mut learner = learner(&data);
        match name {
            "fit_one_cycle" => learner.fit_one_cycle(2, 3e-3, ()).unwrap(),
            _ => learner.fit_flat_cos(2, 3e-3, ()).unwrap(),
        }
        agrees(&learner, folder.path(), name);
    }
}

fn learner(data: &StateDict) -> Learner {
    let loader = |part: &str| {
        let [x, y] =
            ["x", "y"].map(|of| data.get(&format!("{part}.{of}")).unwrap().shallow_clone());
        DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(8)
    };
    let mut first = StateDict::new();
    for (name, value) in data.iter() {
        if let Some(name) = name.strip_prefix("model.") {
            first.insert(name, value.shallow_clone()).unwrap();
        }
    }
    let mut model =
        Model::builder().kind(Kind::Double).build(|path| XResNet::xresnet18(path, 5)).unwrap();
    model.load_state_dict(&first).unwrap();
    // In fastai's memory format, so that both sides have the same kernels.
    let accelerator =
        Accelerator::builder().cpu(true).channels_last(false).quiet(true).build().unwrap();
    let loaders = Loaders::new(loader("train"), loader("valid")).unwrap();
    let learner = Learner::new(&accelerator, loaders, model).unwrap();
    learner.metrics((Accuracy, TopK(5))).quiet(true)
}

fn agrees(learner: &Learner, folder: &Path, name: &str) {
    let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
    let facts: serde_json::Value = serde_json::from_str(&text).unwrap();
    let numbers = |key: &str| -> Vec<f64> {
        facts[key].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
    };
    let recorder = learner.recorder();
    close(name, "lr", recorder.lrs(), &numbers("lr"), 1e-6);
    close(name, "momentum", recorder.momenta(), &numbers("mom"), 1e-6);
    // fastai's rates contain the rounding of float32, about 5e-8.
    close(name, "loss", recorder.losses(), &numbers("loss"), 1e-5);
    for (row, theirs) in recorder.rows().iter().zip(facts["epochs"].as_array().unwrap()) {
        let ours: Vec<f64> = row.values.iter().map(|it| it.unwrap()).collect();
        let theirs: Vec<f64> =
            theirs.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect();
        close(name, "row", &ours, &theirs, 1e-5);
    }
    assert_eq!(recorder.rows().len(), 2);
}

fn close(run: &str, what: &str, ours: &[f64], theirs: &[f64], relative: f64) {
    assert_eq!(ours.len(), theirs.len(), "{run}: {what}");
    for (place, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let far = (a - b).abs() / b.abs().max(1e-3);
        assert!(far <= relative, "{run}: {what} {place} is {a}, fastai's {b}: {far:e} apart");
    }
}
