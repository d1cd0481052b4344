//! Ranks that divide layers and sequences send what the formulas of `brigade_sharding` say, on groups of up to 1,024.

use std::collections::BTreeMap;

use brigade_models::{
    Gpt2LmHead, Gpt2Options, Labelled, LlamaForCausalLm, LlamaOptions, TokenLoss,
};
use brigade_nn::TensorParallelPlan;
use brigade_nn::{ContextParallel, Model, ModelBuilder, Module, ParamPath, TensorParallel};
use brigade_sharding::{ContextMethod, Mesh, Phase, TransformerStep};
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Store, backward};
use tch::{Device, Kind, Tensor};

type Sent = BTreeMap<String, (u64, u64)>;

fn group(ranks: usize) -> ProcessGroup {
    let store = Store::hash().unwrap();
    ProcessGroup::new(&store, 0, ranks, Backend::Fake, GroupOptions::default()).unwrap()
}

fn counted(group: &ProcessGroup) -> Sent {
    let sent = group.traffic().into_iter().map(|(name, it)| (name, (it.messages, it.bytes)));
    let sent = sent.collect();
    group.reset_traffic();
    sent
}

/// What the formulas say of a phase.
fn expected(step: &TransformerStep, mesh: &Mesh, phase: Phase) -> Sent {
    let mut sent = Sent::new();
    for messages in step.messages(mesh, 0).into_iter().filter(|it| it.phase == phase) {
        let sum = sent.entry(messages.operation.to_owned()).or_default();
        *sum = (sum.0 + messages.messages, sum.1 + messages.bytes);
    }
    sent
}

/// Counts a forward and a backward of a model whose loss is of `samples` texts of `tokens`.
fn measured<M>(
    group: &ProcessGroup,
    builder: ModelBuilder,
    new: impl Fn(&ParamPath<'_>) -> M,
    [samples, tokens]: [i64; 2],
) -> [Sent; 2]
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    let model = builder.kind(Kind::Double).without_first_values().build(new).unwrap();
    for parameter in model.parameters() {
        let _ = tch::no_grad(|| parameter.tensor.shallow_clone().fill_(0.01));
    }
    let ids = Tensor::arange(samples * tokens, (Kind::Int64, Device::Cpu)).remainder(7);
    let ids = ids.view([samples, tokens]);
    group.reset_traffic();
    let loss = model.forward(Labelled::new(&ids, &ids)).unwrap();
    let loss = loss.mean().unwrap();
    let forward = counted(group);
    backward(&loss).unwrap();
    [forward, counted(group)]
}

#[test]
fn tensor_ranks_with_and_without_sequence_regions() {
    for ranks in [2, 8, 64, 1024] {
        let heads = ranks as i64;
        let hidden = 2 * heads;
        let mesh = Mesh::builder().tensor(ranks).build(ranks).unwrap();
        for sequence_regions in [false, true] {
            // The ranks divide the tokens of regions.
            let tokens = if sequence_regions { heads } else { 8 };
            let group = group(ranks);
            let step = TransformerStep {
                layers: 2,
                hidden: hidden as u64,
                key_width: hidden as u64,
                heads: heads as u64,
                vocabulary: 4 * heads as u64,
                samples: 1,
                tokens: tokens as u64,
                element_bytes: 8,
                sequence_regions,
                ..Default::default()
            };
            let builder = |plan: brigade_sharding::TensorPlan| {
                let plan = plan.sequence_regions(sequence_regions);
                Model::builder()
                    .tensor_parallel(TensorParallel { group: Some(group.clone()), plan })
            };
            let llama = LlamaOptions {
                vocab_size: 4 * heads,
                hidden_size: hidden,
                intermediate_size: 3 * heads,
                num_hidden_layers: 2,
                num_attention_heads: heads,
                ..Default::default()
            };
            let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama);
            let plan = LlamaForCausalLm::tensor_plan();
            let [forward, back] = measured(&group, builder(plan), new, [1, tokens]);
            assert_eq!(forward, expected(&step, &mesh, Phase::Forward), "Llama, {step:?}");
            assert_eq!(back, expected(&step, &mesh, Phase::Backward), "Llama, {step:?}");

            let step = TransformerStep { region_vectors: 6, ..step };
            let gpt2 = Gpt2Options {
                vocab_size: 4 * heads,
                n_positions: tokens,
                n_embd: hidden,
                n_layer: 2,
                n_head: heads,
                n_inner: Some(hidden),
                resid_pdrop: 0.0,
                embd_pdrop: 0.0,
                attn_pdrop: 0.0,
                ..Default::default()
            };
            let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2);
            let plan = Gpt2LmHead::tensor_plan();
            let [forward, back] = measured(&group, builder(plan), new, [1, tokens]);
            assert_eq!(forward, expected(&step, &mesh, Phase::Forward), "GPT-2, {step:?}");
            assert_eq!(back, expected(&step, &mesh, Phase::Backward), "GPT-2, {step:?}");
        }
    }
}

#[test]
fn context_ranks_by_each_method() {
    for ranks in [2, 8, 64, 1024] {
        for method in ContextMethod::ALL {
            let is_by_heads = method == ContextMethod::Ulysses;
            let (heads, shared) = if is_by_heads { (ranks as i64, ranks as i64) } else { (4, 2) };
            let (hidden, tokens) = (2 * heads, 4 * ranks as i64);
            let step = TransformerStep {
                layers: 2,
                hidden: hidden as u64,
                key_width: 2 * shared as u64,
                heads: heads as u64,
                vocabulary: 11,
                samples: 2,
                tokens: tokens as u64,
                element_bytes: 8,
                method,
                ..Default::default()
            };
            let mesh = if is_by_heads {
                Mesh::builder().sequence(ranks)
            } else {
                Mesh::builder().context(ranks)
            };
            let mesh = mesh.build(ranks).unwrap();
            let options = LlamaOptions {
                vocab_size: 11,
                hidden_size: hidden,
                intermediate_size: 3,
                num_hidden_layers: 2,
                num_attention_heads: heads,
                num_key_value_heads: Some(shared),
                ..Default::default()
            };
            let group = group(ranks);
            let context = ContextParallel { group: Some(group.clone()), method };
            let builder = Model::builder().context_parallel(context);
            let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &options);
            let [forward, back] = measured(&group, builder, new, [2, tokens]);
            assert_eq!(forward, expected(&step, &mesh, Phase::Forward), "{step:?}");
            assert_eq!(back, expected(&step, &mesh, Phase::Backward), "{step:?}");
        }
    }
}
