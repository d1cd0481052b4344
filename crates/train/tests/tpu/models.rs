//! The architectures, in fp32 and in bf16.

use brigade_models::{BertForSequenceClassification, BertOptions, Gpt2LmHead, Gpt2Options, ResNet};
use brigade_nn::Model;
use brigade_optim::{AdamW, Optimizer, Sgd};
use brigade_test_needs::needs;
use brigade_torch::{Autocast, Result, TPU};
use brigade_train::{Precision, PreparedModel};
use tch::{Device, Kind, Tensor};

use crate::training::{Outcome, Settings, assert_near, distance, images, train};

/// Compares in both types; roundings of bf16 are 2⁻⁸ of each value.
fn on_both(run: impl Fn(Device, &Settings) -> Outcome, steps: usize) {
    for (precision, allowed) in [(Precision::No, 1e-4), (Precision::Bf16, 0.05)] {
        let settings = Settings { precision, steps, ..Settings::default() };
        assert_near(&run(TPU, &settings), &run(Device::Cpu, &settings), allowed);
    }
}

/// SGD: AdamW makes the roundings of gradients that are 0, such as those of the keys' bias, as large as all others.
fn sgd<M>(model: &Model<M>) -> Result<Optimizer> {
    Sgd::new(0.05).build(model)
}

fn tokens(rows: i64, length: i64, vocabulary: i64, device: Device) -> Tensor {
    let numbers = Tensor::arange(rows * length, (Kind::Int64, Device::Cpu));
    (numbers * 7).remainder(vocabulary).reshape([rows, length]).to_device(device)
}

#[needs(Tpu)]
fn resnet18_trains_as_on_the_cpu() {
    let run = |device, settings: &Settings, scale: f64| {
        let momentum = |model: &Model<ResNet>| Sgd::new(0.002).momentum(0.9).build(model);
        let loss = |model: &PreparedModel<ResNet>, device, _| {
            let (images, labels) = images([8, 3, 64, 64], 10, device);
            Ok(model.forward(&(images * scale))?.cross_entropy_for_logits(&labels))
        };
        train(device, settings, |path| ResNet::resnet18(path, 10), momentum, loss).unwrap()
    };
    for (precision, rounding) in [(Precision::No, 2f64.powi(-22)), (Precision::Bf16, 2f64.powi(-8))]
    {
        let settings = Settings { precision, steps: 2, ..Settings::default() };
        let expected = run(Device::Cpu, &settings, 1.0);
        // What roundings of the input come to.
        let amplified = distance(&run(Device::Cpu, &settings, 1.0 + rounding), &expected);
        println!("{amplified:.1e} by one rounding");
        assert_near(&run(TPU, &settings, 1.0), &expected, 10.0 * amplified);
    }
}

/// Gradients of one step of ResNet-18 with the same weights, in float64, by the name of the parameter.
fn gradients_of_resnet18(device: Device, kind: Kind, bf16: bool) -> Vec<(String, Tensor)> {
    tch::manual_seed(7);
    let builder = Model::builder().kind(kind);
    let mut model = builder.build(|path| ResNet::resnet18(path, 10)).unwrap();
    // Nearly all activations are far from the kink of ReLU, where a rounding would change gradients by more than itself.
    tch::no_grad(|| {
        for parameter in model.parameters() {
            if parameter.name.contains("bn") && parameter.name.ends_with("bias") {
                let _ = parameter.tensor.shallow_clone().fill_(5.0);
            }
        }
    });
    model.to_device(device).unwrap();
    let (images, labels) = images([8, 3, 64, 64], 10, device);
    let scope = bf16.then(|| Autocast::enter(device, Kind::BFloat16, true).unwrap());
    let output = model.forward(&images.to_kind(kind)).unwrap();
    drop(scope);
    output.to_kind(kind).cross_entropy_for_logits(&labels).backward();
    let parameters = model.parameters();
    let gradients = parameters.iter().map(|it| {
        let gradient = it.tensor.grad().to_device(Device::Cpu).to_kind(Kind::Double);
        (it.name.clone(), gradient)
    });
    gradients.collect()
}

#[needs(Tpu)]
fn gradients_of_resnet18_are_as_near_to_float64_as_the_cpus() {
    let exact = gradients_of_resnet18(Device::Cpu, Kind::Double, false);
    let errors = |found: &[(String, Tensor)]| -> Vec<f64> {
        let each = found.iter().zip(&exact);
        let error = |(found, exact): (&Tensor, &Tensor)| {
            let scale = exact.abs().max().double_value(&[]);
            (found - exact).abs().max().double_value(&[]) / scale
        };
        each.map(|((_, found), (_, exact))| error((found, exact))).collect()
    };
    for bf16 in [false, true] {
        let [cpu, tpu] =
            [Device::Cpu, TPU].map(|it| errors(&gradients_of_resnet18(it, Kind::Float, bf16)));
        let ratios = tpu.iter().zip(&cpu).map(|(tpu, cpu)| tpu / cpu);
        let largest = ratios.fold(0.0, f64::max);
        let [most_of_cpu, most] = [&cpu, &tpu].map(|it| it.iter().copied().fold(0.0, f64::max));
        println!(
            "bf16 {bf16}: {most:.1e} apart, the CPU {most_of_cpu:.1e}; ratio up to {largest:.1}"
        );
        // Sums of other orders have other roundings. Where the CPU's cancel by chance, a layer differs by more.
        assert!(
            most <= 4.0 * most_of_cpu,
            "bf16 {bf16}: {most} apart, and {most_of_cpu} on the CPU"
        );
        for ((name, _), (tpu, cpu)) in exact.iter().zip(tpu.iter().zip(&cpu)) {
            assert!(*tpu <= 16.0 * cpu, "{name}, bf16 {bf16}: {tpu} apart, and {cpu} on the CPU");
        }
    }
}

#[needs(Tpu)]
fn gpt2_trains_as_on_the_cpu() {
    let options = Gpt2Options {
        vocab_size: 97,
        n_positions: 32,
        n_embd: 32,
        n_head: 4,
        n_layer: 2,
        // Each device draws random numbers of its own.
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let run = |device, settings: &Settings| {
        let loss = |model: &PreparedModel<Gpt2LmHead>, device, _| {
            let ids = tokens(3, 16, 97, device);
            let logits = model.forward(&ids)?;
            let (logits, next) = (logits.f_narrow(1, 0, 15)?, ids.f_narrow(1, 1, 15)?);
            let flat = logits.f_reshape([-1, 97])?;
            Ok(flat.cross_entropy_for_logits(&next.f_reshape([-1])?))
        };
        train(device, settings, |path| Gpt2LmHead::new(path, &options), sgd, loss).unwrap()
    };
    on_both(run, 3);
}

#[needs(Tpu)]
fn bert_trains_as_on_the_cpu() {
    let options = BertOptions {
        vocab_size: 97,
        hidden_size: 32,
        num_attention_heads: 4,
        num_hidden_layers: 2,
        intermediate_size: 64,
        max_position_embeddings: 32,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..Default::default()
    };
    let run = |device, settings: &Settings| {
        let loss = |model: &PreparedModel<BertForSequenceClassification>, device, _| {
            let logits = model.forward(&tokens(4, 12, 97, device))?;
            let labels = Tensor::from_slice(&[0i64, 1, 1, 0]).to_device(device);
            Ok(logits.cross_entropy_for_logits(&labels))
        };
        let build =
            |path: &brigade_nn::ParamPath<'_>| BertForSequenceClassification::new(path, &options);
        train(device, settings, build, sgd, loss).unwrap()
    };
    on_both(run, 3);
}

#[needs(Tpu)]
fn dropout_trains_on_the_tpu() {
    let options = Gpt2Options {
        vocab_size: 97,
        n_positions: 32,
        n_embd: 32,
        n_head: 4,
        n_layer: 1,
        ..Default::default()
    };
    let settings = Settings { steps: 6, ..Settings::default() };
    let adam = |model: &Model<Gpt2LmHead>| AdamW::default().lr(3e-3).build(model);
    let loss = |model: &PreparedModel<Gpt2LmHead>, device, _| {
        let ids = tokens(3, 16, 97, device);
        let flat = model.forward(&ids)?.f_reshape([-1, 97])?;
        Ok(flat.cross_entropy_for_logits(&ids.f_reshape([-1])?))
    };
    let found = train(TPU, &settings, |path| Gpt2LmHead::new(path, &options), adam, loss).unwrap();
    assert!(found.losses[5] < found.losses[0], "{:?}", found.losses);
}
