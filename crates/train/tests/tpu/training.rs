//! One training on both devices.

use brigade_models::Cnn;
use brigade_nn::{Model, ParamPath};
use brigade_optim::{Optimizer, Sgd};
use brigade_test_needs::needs;
use brigade_torch::{Result, TPU, Trainable};
use brigade_train::{Accelerator, AcceleratorBuilder, ClipNorm, Precision};
use tch::{Device, Kind, Tensor};

/// Settings of a training.
pub(crate) struct Settings {
    pub(crate) precision: Precision,
    pub(crate) accumulation: usize,
    /// Limits of the norm and of the values of gradients.
    pub(crate) clips: Option<(f64, f64)>,
    pub(crate) steps: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { precision: Precision::No, accumulation: 1, clips: None, steps: 4 }
    }
}

/// Losses, parameters and buffers of a training.
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f64>,
    pub(crate) weights: Vec<(String, Tensor)>,
}

pub(crate) fn builder(device: Device) -> AcceleratorBuilder {
    Accelerator::builder().device(device).quiet(true)
}

/// Trains a model on a device; `loss` gets the number of the batch.
pub(crate) fn train<M>(
    device: Device,
    settings: &Settings,
    build: impl FnOnce(&ParamPath<'_>) -> M,
    optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
    loss: impl Fn(&brigade_train::PreparedModel<M>, Device, usize) -> Result<Tensor>,
) -> Result<Outcome> {
    tch::manual_seed(7);
    let accelerator = builder(device)
        .mixed_precision(settings.precision)
        .gradient_accumulation_steps(settings.accumulation)
        .build()?;
    let model = Model::new(build)?;
    let optimizer = optimizer(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for batch in 0..settings.steps * settings.accumulation {
        let value = loss(&model, device, batch)?;
        accelerator.backward(&value)?;
        if let Some((norm, value)) = settings.clips
            && (batch + 1) % settings.accumulation == 0
        {
            let parameters = model.trainable_parameters();
            accelerator
                .clip_grad_norm(&parameters, ClipNorm { max_norm: norm, ..Default::default() })?;
            accelerator.clip_grad_value(&parameters, value)?;
        }
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(value.f_double_value(&[])?);
    }
    // With the running statistics of batch norms.
    let weights = model.inner().state_dict().into_iter().map(|(name, tensor)| {
        assert_eq!(tensor.device(), device, "{name}");
        (name, tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double))
    });
    Ok(Outcome { losses, weights: weights.collect() })
}

/// Returns the largest distance of losses, parameters and buffers, relative to the largest value of each.
pub(crate) fn distance(found: &Outcome, expected: &Outcome) -> f64 {
    let losses = found.losses.iter().zip(&expected.losses);
    let losses = losses.map(|(one, other)| (one - other).abs() / other.abs());
    let weights = found.weights.iter().zip(&expected.weights).map(|((_, one), (_, other))| {
        let size = other.abs().max().double_value(&[]).max(1e-3);
        (one - other).abs().max().double_value(&[]) / size
    });
    losses.chain(weights).fold(0.0, f64::max)
}

pub(crate) fn assert_near(found: &Outcome, expected: &Outcome, allowed: f64) {
    let apart = distance(found, expected);
    println!("{apart:.1e} apart");
    assert!(
        apart <= allowed,
        "{apart} apart, {allowed} allowed; losses {:?}, {:?} on the CPU",
        found.losses,
        expected.losses
    );
}

/// Images and labels that are the same on each device.
pub(crate) fn images(shape: [i64; 4], classes: i64, device: Device) -> (Tensor, Tensor) {
    let count: i64 = shape.iter().product();
    // Like random numbers, without libtorch's generator.
    let values = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898).sin() * 43758.5453;
    let values = (values.frac() * 2.0).to_kind(Kind::Float).reshape(shape);
    let labels = Tensor::arange(shape[0], (Kind::Int64, Device::Cpu)).remainder(classes);
    (values.to_device(device), labels.to_device(device))
}

fn cnn(device: Device, settings: &Settings) -> Outcome {
    let sgd = |model: &Model<Cnn>| Sgd::new(0.005).momentum(0.5).build(model);
    let loss = |model: &brigade_train::PreparedModel<Cnn>, device, batch: usize| {
        let (images, labels) = images([8, 1, 28, 28], 10, device);
        let output = model.forward(&(images + batch as f64 / 64.0))?;
        Ok(output.cross_entropy_for_logits(&labels))
    };
    train(device, settings, Cnn::new, sgd, loss).unwrap()
}

fn on_both(settings: &Settings, allowed: f64) {
    let expected = cnn(Device::Cpu, settings);
    assert!(expected.losses.last().unwrap() < &expected.losses[0], "{:?}", expected.losses);
    assert_near(&cnn(TPU, settings), &expected, allowed);
}

#[needs(Tpu)]
fn the_cnn_trains_as_on_the_cpu() {
    on_both(&Settings::default(), 2e-4);
}

#[needs(Tpu)]
fn the_cnn_trains_in_bf16_as_on_the_cpu() {
    on_both(&Settings { precision: Precision::Bf16, ..Settings::default() }, 0.05);
}

#[needs(Tpu)]
fn the_cnn_trains_in_fp16_with_a_loss_scale_as_on_the_cpu() {
    // As for bf16: small biases, whose roundings are large, decide.
    on_both(&Settings { precision: Precision::Fp16, ..Settings::default() }, 0.05);
}

#[needs(Tpu)]
fn gradients_of_several_batches_are_accumulated() {
    on_both(&Settings { accumulation: 3, ..Settings::default() }, 2e-4);
}

#[needs(Tpu)]
fn gradients_are_clipped() {
    on_both(&Settings { clips: Some((0.5, 0.01)), ..Settings::default() }, 2e-4);
}
