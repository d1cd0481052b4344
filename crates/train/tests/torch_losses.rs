//! Losses of a CNN and a ResNet-18 against those of the PyTorch of this machine, on the device of the tests.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use brigade_models::{Cnn, ResNet};
use brigade_nn::{Model, Module};
use brigade_optim::{Adam, Optimizer, Sgd};
use brigade_test_device::numeric_device;
use brigade_test_needs::{Need, needs};
use brigade_torch::DeviceExt;
use brigade_train::{Accelerator, Precision};
use tch::{Device, Kind, Reduction, Tensor};

const STEPS: i64 = 8;

/// How far apart two losses may be, over their size. On a GPU both sides call the same kernels, on a CPU some layers
/// are Brigade's own; then what was rounded otherwise once is carried on by the training, and a normalisation over few
/// values makes it several times as large in each step. A mistake shows in float64.
const F64: f64 = 1e-9;
const F32: f64 = 1e-2;
const LOW: f64 = 1e-1;

#[needs(Torch)]
fn peer_losses_are_pytorchs() {
    let device = numeric_device();
    let mut cases = vec![
        ("cnn-f64", Precision::No, F64),
        ("cnn-f32", Precision::No, F32),
        ("cnn-bf16", Precision::Bf16, LOW),
        ("resnet18-f64", Precision::No, F64),
        ("resnet18-f32", Precision::No, F32),
        ("resnet18-bf16", Precision::Bf16, LOW),
    ];
    if device != Device::Cpu {
        cases.extend([("cnn-fp16", Precision::Fp16, LOW), ("resnet18-fp16", Precision::Fp16, LOW)]);
    }
    let names: Vec<&str> = cases.iter().map(|it| it.0).collect();
    let expected = pytorchs(device, &names);
    for (name, precision, most) in cases {
        let losses = match name.split_once('-') {
            Some(("cnn", kind)) => cnn(device, kind, precision),
            Some((_, kind)) => resnet18(device, kind, precision),
            None => unreachable!(),
        };
        let expected = &expected[name];
        assert_eq!(losses.len(), expected.len(), "{name}");
        for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
            let apart = (loss - expected).abs() / expected.abs().max(1.0);
            assert!(
                apart <= most,
                "{name}, step {step}: {loss}, PyTorch has {expected}, {apart:e} apart"
            );
        }
    }
}

fn pytorchs(device: Device, cases: &[&str]) -> BTreeMap<String, Vec<f64>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/losses.py");
    let mut python = Command::new(brigade_test_needs::python(Need::Torch).unwrap());
    // On GPUs made of host memory the numbers are the CPU's.
    let place = if brigade_test_device::fake::is_installed() { Device::Cpu } else { device };
    python.arg(script).arg(place.label()).args(cases);
    let output = python.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn cnn(device: Device, kind: &str, precision: Precision) -> Vec<f64> {
    let model = Model::builder().device(device).kind(kind_of(kind)).build(Cnn::new).unwrap();
    fill_parameters(&model);
    let optimizer = Adam::default().lr(1e-3).build(&model).unwrap();
    losses(model, optimizer, device, precision, [32, 1, 28, 28])
}

fn resnet18(device: Device, kind: &str, precision: Precision) -> Vec<f64> {
    let model = Model::builder().device(device).kind(kind_of(kind));
    let model = model.build(|path| ResNet::resnet18(path, 10)).unwrap();
    fill_parameters(&model);
    let optimizer = Sgd::new(1e-3).momentum(0.9).weight_decay(1e-3).nesterov(true);
    let optimizer = optimizer.build(&model).unwrap();
    losses(model, optimizer, device, precision, [8, 3, 48, 48])
}

fn kind_of(kind: &str) -> Kind {
    if kind == "f64" { Kind::Double } else { Kind::Float }
}

fn losses<M>(
    model: Model<M>,
    optimizer: Optimizer,
    device: Device,
    precision: Precision,
    shape: [i64; 4],
) -> Vec<f64>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor> + 'static,
{
    let kind = model.kind();
    let builder = Accelerator::builder().device(device).tf32(false).quiet(true);
    let accelerator = builder.mixed_precision(precision).build().unwrap();
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    model.train();
    let losses = (0..STEPS).map(|step| {
        let images = filled(&shape, 1000 + step, 1.0).to_kind(kind).to_device(device);
        let labels: Vec<i64> = (0..shape[0]).map(|k| (7 * step + 3 * k + k * k) % 10).collect();
        let labels = Tensor::from_slice(&labels).to_device(device);
        let scores = model.forward(&images).unwrap();
        // tch's `cross_entropy_for_logits` would make a float32 of it.
        let loss = scores.cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.0);
        optimizer.zero_grad().unwrap();
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
        loss.double_value(&[])
    });
    losses.collect()
}

/// In the order of names, as the script does.
fn fill_parameters<M>(model: &Model<M>) {
    let mut parameters = model.parameters();
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    for (number, parameter) in (0..).zip(parameters) {
        let shape = parameter.tensor.size();
        let values = match shape.as_slice() {
            [_] if parameter.name.ends_with("weight") => filled(&shape, number, 0.1) + 1.0,
            [_] => filled(&shape, number, 0.1),
            [_, inputs @ ..] => {
                let inputs: i64 = inputs.iter().product();
                filled(&shape, number, (6.0 / inputs as f64).sqrt())
            }
            [] => unreachable!("a parameter has a dimension"),
        };
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
}

/// Numbers from -scale to scale, by a hash of their index.
fn filled(shape: &[i64], number: i64, scale: f64) -> Tensor {
    const MASK: u64 = 0xFFFF_FFFF;
    let count: i64 = shape.iter().product();
    let value = |index: i64| {
        let mixed = (index as u64 * 2_654_435_761 + number as u64 * 97_531) & MASK;
        let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(2_246_822_519) & MASK;
        let mixed = mixed ^ (mixed >> 13);
        ((mixed as f64 / 4_294_967_296.0 - 0.5) * (2.0 * scale)) as f32
    };
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_slice(&values).view(shape)
}

brigade_test_needs::main!();
