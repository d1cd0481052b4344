//! Checkpoints between the CPU and the TPU.

use std::path::Path;

use brigade_models::Cnn;
use brigade_nn::Model;
use brigade_optim::AdamW;
use brigade_test_needs::needs;
use brigade_torch::TPU;
use tch::{Device, Kind, Tensor};

use crate::training::{builder, images};

/// Makes some steps, behind those of a checkpoint, and saves; returns the losses.
fn steps(device: Device, from: Option<&Path>, count: usize, to: &Path) -> Vec<f64> {
    tch::manual_seed(if from.is_some() { 8 } else { 7 });
    let accelerator = builder(device).build().unwrap();
    let model = Model::new(Cnn::new).unwrap();
    let optimizer = AdamW::default().build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    if let Some(from) = from {
        accelerator.load_state(from).unwrap();
    }
    let losses = (0..count)
        .map(|_| {
            let (images, labels) = images([8, 1, 28, 28], 10, device);
            let loss = model.forward(&images).unwrap().cross_entropy_for_logits(&labels);
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            loss.double_value(&[])
        })
        .collect();
    accelerator.save_state(to).unwrap();
    accelerator.checkpoints().wait().unwrap();
    losses
}

fn near(found: &[f64], expected: &[f64]) {
    for (one, other) in found.iter().zip(expected) {
        assert!((one - other).abs() < 1e-3 * other.abs(), "{found:?}, expected {expected:?}");
    }
}

#[needs(Tpu)]
fn a_run_goes_on_from_a_checkpoint_of_the_other_device() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let all = steps(Device::Cpu, None, 6, &at("all"));
    for (first, second) in [(Device::Cpu, TPU), (TPU, Device::Cpu), (TPU, TPU)] {
        let name = format!("{first:?}-{second:?}");
        near(&steps(first, None, 3, &at(&name)), &all[..3]);
        near(&steps(second, Some(&at(&name)), 3, &at(&format!("{name}-end"))), &all[3..]);
    }
}

#[needs(Tpu)]
fn weights_files_are_read_and_written_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cnn.safetensors");
    tch::manual_seed(1);
    let model = Model::builder().device(TPU).build(Cnn::new).unwrap();
    model.save_weights(&path).unwrap();
    tch::manual_seed(2);
    for device in [Device::Cpu, TPU] {
        let mut other = Model::builder().device(device).build(Cnn::new).unwrap();
        other.load_weights(&path).unwrap();
        for ((name, one), (_, two)) in model.state_dict().iter().zip(other.state_dict()) {
            assert_eq!(one.to_device(Device::Cpu), two.to_device(Device::Cpu), "{name}");
        }
    }
    let input = Tensor::ones([1, 1, 28, 28], (Kind::Float, TPU));
    assert_eq!(model.forward(&input).unwrap().size(), [1, 10]);
}
