//! Models on GPUs made of host memory whose kernels are emulated, against those whose operations are libtorch's.

use brigade_models::{
    Bert, BertOptions, Gpt2, Gpt2Options, Llama, LlamaOptions, Mixtral, MixtralOptions, ResNet,
    ResNetOptions, VisionTransformer, VisionTransformerOptions, XResNet, XResNetOptions,
};
use brigade_nn::{Model, Module, ParamPath};
use brigade_test_device::{fake, kernels};
use brigade_torch::{Autocast, gradient};
use tch::{Device, Kind, Tensor};

const DEVICE: Device = Device::Cuda(0);

/// Returns the outputs and the gradients of all parameters.
fn results<M>(model: &mut Model<M>, input: &Tensor, autocast: bool) -> [Tensor; 2]
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    model.zero_grad().unwrap();
    let output = {
        let _scope = autocast.then(|| Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap());
        model.forward(input).unwrap().to_kind(Kind::Float)
    };
    let weights = Tensor::arange(output.numel() as i64, (Kind::Float, DEVICE)).sin();
    (output.view([-1]) * weights).sum(Kind::Float).backward();
    let gradients: Vec<Tensor> = model
        .parameters()
        .iter()
        .filter_map(|parameter| gradient(&parameter.tensor).unwrap().map(|own| own.reshape([-1])))
        .collect();
    [output.detach(), Tensor::cat(&gradients, 0)].map(|it| it.to_device(Device::Cpu))
}

fn apart(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[]) / other.abs().max().double_value(&[])
}

/// Checks that outputs and gradients in bfloat16 with the kernels are as close to those in float32 as with libtorch's
/// operations. Returns the model.
fn compared<M>(new: impl FnOnce(&ParamPath<'_>) -> M, input: &Tensor) -> Model<M>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    compared_model(built(new), input)
}

fn built<M>(new: impl FnOnce(&ParamPath<'_>) -> M) -> Model<M> {
    tch::manual_seed(4);
    Model::builder().device(DEVICE).build(new).unwrap()
}

fn compared_model<M>(mut model: Model<M>, input: &Tensor) -> Model<M>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let exact = results(&mut model, input, false);
    let operations = results(&mut model, input, true);
    let found = kernels::emulated(|| results(&mut model, input, true));
    for (index, name) in ["output", "gradients"].into_iter().enumerate() {
        let errors = [&found, &operations].map(|it| apart(&it[index], &exact[index]));
        // Roundings of other operations, as many of them: not twice the error.
        assert!(errors[0] <= 2.0 * errors[1], "{name}: {errors:?}");
    }
    model
}

/// Does the same as [`compared`], and checks that a forward has as many launches of each kernel.
fn check<M>(new: impl FnOnce(&ParamPath<'_>) -> M, input: &Tensor, launches: &[(&str, u64)])
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let model = compared(new, input);
    let account = fake::account(|| {
        kernels::counted(|| {
            let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
            let _ = tch::no_grad(|| model.forward(input).unwrap());
        });
    });
    for (name, launches) in launches {
        let found = account.0.get(&format!("brigade::{name}")).map_or(0, |it| it.calls);
        assert_eq!(found, *launches, "{name} in {account}");
    }
}

fn ids() -> Tensor {
    Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9]).view([2, 3]).to_device(DEVICE)
}

#[test]
fn gpt2_is_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = Gpt2Options {
        vocab_size: 20,
        n_embd: 32,
        n_head: 2,
        n_layer: 2,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let launches = [("embedding", 1), ("norm_residual_1", 5), ("activation", 2)];
    check(|path| Gpt2::new(path, &options), &ids(), &launches);
    // Each block keeps one tensor, to which its branch has been added.
    let options = Gpt2Options { recompute: true, ..options };
    check(|path| Gpt2::new(path, &options), &ids(), &launches);
}

#[test]
fn llama_is_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = LlamaOptions {
        vocab_size: 20,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        ..Default::default()
    };
    check(
        |path| Llama::new(path, &options),
        &ids(),
        &[("norm_residual_1", 5), ("activation_gated", 2), ("rotary", 2)],
    );
}

#[test]
fn mixtral_is_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = MixtralOptions {
        vocab_size: 20,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        // All experts: a rounding cannot change the choice.
        num_local_experts: 2,
        num_experts_per_tok: 2,
        ..Default::default()
    };
    // Without values, there are no numbers of rows that the host could read.
    let model = compared(|path| Mixtral::new(path, &options), &ids());
    let account = fake::account(|| {
        kernels::emulated(|| {
            let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
            let _ = tch::no_grad(|| model.forward(&ids()).unwrap());
        });
    });
    // Two experts in each of two layers.
    assert_eq!(account.0["brigade::activation_gated"].calls, 4, "{account}");
}

#[test]
fn bert_is_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = BertOptions {
        vocab_size: 20,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..Default::default()
    };
    let launches = [("embedding", 1), ("norm_residual_1", 4), ("activation", 2)];
    check(|path| Bert::new(path, &options), &ids(), &launches);
}

#[test]
fn a_vision_transformer_is_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = VisionTransformerOptions {
        image_size: 8,
        patch_size: 4,
        depth: 2,
        ..VisionTransformerOptions::new(32, 2)
    };
    let images = Tensor::arange(2 * 3 * 64, (Kind::Float, DEVICE)).sin().view([2, 3, 8, 8]);
    check(
        |path| VisionTransformer::new(path, 10, options),
        &images,
        &[("norm_residual_1", 5), ("activation", 2)],
    );
}

/// The seeds of all layers are drawn at once.
#[test]
fn dropout_of_all_layers_depends_on_the_seed_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    let options = Gpt2Options {
        vocab_size: 20,
        n_embd: 32,
        n_head: 2,
        n_layer: 2,
        resid_pdrop: 0.5,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let model = Model::builder().device(DEVICE).build(|path| Gpt2::new(path, &options)).unwrap();
    let account = fake::account(|| {
        kernels::counted(|| {
            let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
            let _ = model.forward(&ids()).unwrap();
        });
    });
    assert_eq!(account.0["aten::random_"].calls, 1, "{account}");
    let run = |seed: i64| {
        tch::manual_seed(seed);
        let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
        kernels::emulated(|| model.module().hidden_states(&ids()).unwrap())
    };
    let (first, same, other) = (run(1), run(1), run(2));
    for (first, same) in first.iter().zip(&same) {
        assert!(first.equal(same), "other numbers for the same seed");
    }
    assert!(first[0].equal(&other[0]), "the embeddings have no dropout");
    assert!(!first[1].equal(&other[1]) && !first[2].equal(&other[2]));
}

/// Returns how often a step launches a kernel.
fn launches<M>(model: &mut Model<M>, input: &Tensor, name: &str) -> u64
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let account = fake::account(|| {
        kernels::counted(|| drop(results(model, input, true)));
    });
    account.0.get(&format!("brigade::{name}")).map_or(0, |it| it.calls)
}

#[test]
fn residual_networks_are_as_exact_with_the_kernels_in_16_bits() {
    if fake::install(1).is_err() {
        return;
    }
    tch::manual_seed(4);
    // Odd and even sizes. No image is two values wide in front of a stride of two: there oneDNN's convolution for AMX
    // reads memory that was never written, and has NaN where that had one.
    let images = Tensor::randn([4, 3, 37, 34], (Kind::Float, DEVICE));
    let options = ResNetOptions::basic([3, 1, 1, 1]);
    let mut model = built(|path| ResNet::new(path, 10, options));
    model.to_channels_last().unwrap();
    let mut model = compared_model(model, &images);
    for (name, expected) in [
        ("activate_pool", 1),
        ("gradient_sums_pool", 1),
        ("activate_shortcut", 6),
        // The output of the last block has one use.
        ("gradient_sums_two_uses", 5),
        ("gradient_sums_shortcut", 1),
    ] {
        assert_eq!(launches(&mut model, &images, name), expected, "{name}");
    }
    let options = XResNetOptions::basic([2, 1]);
    let mut model = built(|path| XResNet::new(path, 10, &options));
    model.to_channels_last().unwrap();
    let mut model = compared_model(model, &images);
    assert_eq!(launches(&mut model, &images, "activate_pool"), 1);
    assert_eq!(launches(&mut model, &images, "gradient_sums_two_uses"), 2);
}
