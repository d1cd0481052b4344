//! Feed-forward layers on GPUs made of host memory: with emulated kernels, whose activations add the biases of the layers
//! in front of them, against the layers one after the other.

use std::sync::{Arc, Mutex};

use brigade_nn::{Linear, Model, Module, ParamPath, PreActivation, SwiGlu, SwiGluOptions};
use brigade_test_device::{fake, kernels};
use brigade_torch::{Activation, Autocast, GatedPair, Result, gated_activation, gradient};
use tch::{Device, Kind, Tensor};

const DEVICE: Device = Device::Cuda(0);

struct FeedForward {
    first: Linear,
    second: Linear,
    gated: SwiGlu,
}

impl FeedForward {
    fn new(path: &ParamPath<'_>) -> Self {
        let options = SwiGluOptions { bias: true, activation: Activation::Gelu };
        Self {
            first: Linear::new(path / "first", 8, 24),
            second: Linear::new(path / "second", 24, 8),
            gated: SwiGlu::with_options(path / "gated", 8, 24, options),
        }
    }
}

impl Module<&Tensor> for FeedForward {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.first.forward_pre_activation(input)?;
        self.gated.forward(&self.second.forward_activated(&hidden, Activation::ReluSquared)?)
    }
}

/// The same by the layers one after the other.
fn one_by_one(layers: &FeedForward, input: &Tensor) -> Tensor {
    let FeedForward { first, second, gated } = layers;
    let hidden = second.forward(&first.forward(input).unwrap().relu().square()).unwrap();
    let [gate, up, down] = gated.linear().map(|layer| move |input: &Tensor| layer.forward(input));
    let (gate, up) = (gate(&hidden).unwrap(), up(&hidden).unwrap());
    let pair = GatedPair::Two { gate: (&gate).into(), up: (&up).into() };
    down(&gated_activation(pair, Activation::Gelu).unwrap()).unwrap()
}

/// Output and gradients of all parameters of a forward, in bfloat16 where `kind` is set.
fn results(
    model: &mut Model<FeedForward>,
    input: &Tensor,
    kind: Option<Kind>,
    forward: impl Fn(&Model<FeedForward>, &Tensor) -> Tensor,
) -> Vec<Tensor> {
    model.zero_grad().unwrap();
    let output = {
        let _scope = kind.map(|kind| Autocast::enter(input.device(), kind, true).unwrap());
        forward(model, input)
    };
    let weights = Tensor::arange(output.numel() as i64, (Kind::Float, input.device())).sin();
    (output.to_kind(Kind::Float).view([-1]) * weights).sum(Kind::Float).backward();
    let parameters = model.parameters();
    let gradients = parameters.iter().map(|it| gradient(&it.tensor).unwrap().unwrap());
    [output.detach()].into_iter().chain(gradients).map(|it| it.to_device(Device::Cpu)).collect()
}

fn fused(model: &Model<FeedForward>, input: &Tensor) -> Tensor {
    model.forward(input).unwrap()
}

fn apart(model: &Model<FeedForward>, input: &Tensor) -> Tensor {
    one_by_one(model.module(), input)
}

#[test]
fn without_kernels_it_is_the_layers_one_after_the_other_bit_for_bit() {
    tch::manual_seed(6);
    let mut model = Model::new(FeedForward::new).unwrap();
    let input = Tensor::randn([5, 8], (Kind::Float, Device::Cpu));
    for kind in [None, Some(Kind::BFloat16)] {
        let found = results(&mut model, &input, kind, fused);
        let expected = results(&mut model, &input, kind, apart);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.equal(expected), "{index}, {kind:?}");
        }
    }
}

#[test]
fn kernels_are_no_less_exact_than_the_layers_one_after_the_other_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    tch::manual_seed(6);
    let mut model = Model::builder().device(DEVICE).build(FeedForward::new).unwrap();
    let input = Tensor::randn([5, 8], (Kind::Float, DEVICE));
    let exact = results(&mut model, &input, None, apart);
    let plain = results(&mut model, &input, Some(Kind::BFloat16), apart);
    let found = kernels::emulated(|| results(&mut model, &input, Some(Kind::BFloat16), fused));
    let apart = |one: &Tensor, exact: &Tensor| {
        let exact = exact.to_kind(Kind::Double);
        let difference = (one.to_kind(Kind::Double) - &exact).abs().max();
        difference.double_value(&[]) / exact.abs().max().double_value(&[])
    };
    for (index, exact) in exact.iter().enumerate() {
        let errors = [&found, &plain].map(|it| apart(&it[index], exact));
        // A unit in the last place beside the error of the operations.
        assert!(errors[0] <= errors[1] + 2f64.powi(-7), "{index}: {errors:?}");
    }
    let account = fake::account(|| {
        kernels::counted(|| drop(results(&mut model, &input, Some(Kind::BFloat16), fused)));
    });
    for (name, expected) in [
        ("activation", 1),
        ("activation_backward", 1),
        ("activation_gated", 1),
        ("activation_gated_backward", 1),
        ("activation_sums", 2),
    ] {
        let found = account.0.get(&format!("brigade::{name}")).map_or(0, |entry| entry.calls);
        assert_eq!(found, expected, "{name} in {account}");
    }
}

#[test]
fn hooks_see_outputs_with_their_biases_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    tch::manual_seed(6);
    let mut model = Model::builder().device(DEVICE).build(FeedForward::new).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&seen);
    let _hook = model.forward_hook("first", move |_, output| {
        own.lock().unwrap().push(output.to_device(Device::Cpu));
        None
    });
    let input = Tensor::randn([5, 8], (Kind::Float, DEVICE));
    kernels::emulated(|| {
        let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
        let _ = model.forward(&input).unwrap();
        let _ = model.module().first.forward(&input).unwrap();
    });
    let seen = seen.lock().unwrap();
    assert!(seen.len() == 2 && seen[0].equal(&seen[1]), "{} outputs", seen.len());
}

#[test]
fn an_error_names_the_layer() {
    let model = Model::new(FeedForward::new).unwrap();
    let layer = &model.module().second;
    let wrong = PreActivation::new(Tensor::zeros([2, 9], (Kind::Float, Device::Cpu)));
    let right = PreActivation::new(Tensor::zeros([2, 24], (Kind::Float, Device::Cpu)));
    for error in [
        layer.forward_activated(&wrong, Activation::Silu),
        layer.forward_gated(&wrong, &right, Activation::Silu),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("second") && error.contains("[2, 9]"), "{error}");
    }
    let bias = Some(Tensor::zeros([3], (Kind::Float, Device::Cpu)));
    let error = PreActivation { bias, ..right }.activate(Activation::Silu).unwrap_err();
    assert!(error.to_string().contains("[3]"), "{error}");
}
