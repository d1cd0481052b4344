//! What forwards under autocast keep for their backwards with the kernels of a GPU, against the formula of plans and
//! `brigade estimate`.

use brigade_models::{Bert, BertOptions, Gpt2, Gpt2Options, Llama, LlamaOptions};
use brigade_nn::{Model, Module, ParamPath};
use brigade_sharding::{Mesh, TransformerStep};
use brigade_test_device::{fake, kernels};
use brigade_torch::Autocast;
use tch::{Device, Kind, Tensor};

const DEVICE: Device = Device::Cuda(0);
const TEXTS: i64 = 4;
const TOKENS: i64 = 128;
const HIDDEN: i64 = 128;
const HEADS: i64 = 4;
const INTERMEDIATE: i64 = 192;
/// Not a multiple of 1/16, with which attention is the flash kernel on any GPU.
const DROPOUT: f64 = 0.1;

/// Returns the bytes that a forward in training adds to the memory of the device.
fn kept<M>(new: impl FnOnce(&ParamPath<'_>) -> M) -> u64
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let model = Model::builder().device(DEVICE).build(new).unwrap();
    let ids = Tensor::zeros([TEXTS, TOKENS], (Kind::Int64, DEVICE));
    let forward = || {
        let _scope = Autocast::enter(DEVICE, Kind::BFloat16, true).unwrap();
        model.forward(&ids).unwrap()
    };
    // The first step also makes the copies of weights in 16 bits, and the gradients.
    forward().sum(Kind::Float).backward();
    let before = fake::memory(0).unwrap().allocated;
    let output = forward();
    let after = fake::memory(0).unwrap().allocated;
    assert!(output.requires_grad());
    after - before
}

/// Checks that layers keep what the formula says, each tensor rounded up to 512 bytes.
fn check<M>(step: TransformerStep, new: impl Fn(&ParamPath<'_>, usize) -> M)
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    const LAYERS: u64 = 3;
    /// More than the tensors that a layer keeps, with the states of its random numbers.
    const TENSORS: u64 = 24;
    let mut found = 0;
    // Attention is a fused operator within an account, as on a real GPU.
    fake::account(|| {
        kernels::counted(|| {
            let [few, many] = [2, 2 + LAYERS as usize].map(|layers| kept(|path| new(path, layers)));
            found = many - few;
        });
    });
    let step = TransformerStep {
        layers: LAYERS,
        hidden: HIDDEN as u64,
        key_width: HIDDEN as u64,
        heads: HEADS as u64,
        samples: TEXTS as u64,
        tokens: TOKENS as u64,
        element_bytes: 2,
        kernels: true,
        ..step
    };
    let expected = step.activations(&Mesh::builder().build(1).unwrap(), 0);
    // The emulated kernel of attention keeps its mask of dropout, where that of a GPU keeps the state of its generator.
    let expected = expected + LAYERS * (TEXTS * HEADS * TOKENS * TOKENS) as u64;
    let most = expected + LAYERS * TENSORS * 511;
    // RMSNorm keeps the inverse of each row's deviation, without a mean.
    let fewest =
        if step.gated { expected - 2 * LAYERS * 4 * (TEXTS * TOKENS) as u64 } else { expected };
    assert!((fewest..=most).contains(&found), "{found} bytes, expected {fewest} to {most}");
}

#[test]
fn gpt2_keeps_what_the_formula_says() {
    fake::install(1).unwrap();
    check(TransformerStep::default(), |path, layers| {
        let options = Gpt2Options {
            vocab_size: 20,
            n_positions: TOKENS,
            n_embd: HIDDEN,
            n_head: HEADS,
            n_layer: layers,
            attn_pdrop: DROPOUT,
            ..Gpt2Options::default()
        };
        Gpt2::new(path, &options)
    });
}

#[test]
fn bert_keeps_what_the_formula_says() {
    fake::install(1).unwrap();
    check(TransformerStep::default(), |path, layers| {
        let options = BertOptions {
            vocab_size: 20,
            max_position_embeddings: TOKENS,
            hidden_size: HIDDEN,
            intermediate_size: 4 * HIDDEN,
            num_hidden_layers: layers,
            num_attention_heads: HEADS,
            attention_probs_dropout_prob: DROPOUT,
            ..BertOptions::default()
        };
        Bert::new(path, &options)
    });
}

#[test]
fn llama_keeps_what_the_formula_says() {
    fake::install(1).unwrap();
    let step = TransformerStep {
        intermediate: INTERMEDIATE as u64,
        gated: true,
        ..TransformerStep::default()
    };
    check(step, |path, layers| {
        let options = LlamaOptions {
            vocab_size: 20,
            hidden_size: HIDDEN,
            intermediate_size: INTERMEDIATE,
            num_hidden_layers: layers,
            num_attention_heads: HEADS,
            attention_dropout: DROPOUT,
            ..LlamaOptions::default()
        };
        Llama::new(path, &options)
    });
}
