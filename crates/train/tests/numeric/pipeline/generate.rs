//! Models in stages write the tokens that whole ones write.

use std::sync::{Mutex, PoisonError};

use brigade_models::{
    CacheKind, CausalLm, CausalModel, GenerationOptions, Gpt2LmHead, KeyValueCache,
    LlamaForCausalLm, LlamaOptions, StagedModel, UncachedModel,
};
use brigade_nn::{Model, ParamPath, TensorParallelPlan};
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Mesh, Sharding};
use brigade_train::{Accelerator, PipelineOptions, PreparedModel};
use tch::{Kind, Tensor};

use super::{DRAWS, gpt2};
use crate::sharding::on_ranks;

/// Two texts, of which the second is padded on the left.
fn prompt() -> (Tensor, Tensor) {
    let ids = Tensor::from_slice(&[3i64, 7, 11, 0, 5, 2]).view([2, 3]);
    let mask = Tensor::from_slice(&[1i64, 1, 1, 0, 1, 1]).view([2, 3]);
    (ids, mask)
}

fn options() -> [GenerationOptions; 2] {
    let greedy = GenerationOptions { max_new_tokens: 3, ..Default::default() };
    let sampled = GenerationOptions {
        do_sample: true,
        temperature: 1.5,
        top_k: Some(12),
        seed: Some(5),
        ..greedy.clone()
    };
    [greedy, sampled]
}

fn written(accelerator: &Accelerator, model: &PreparedModel<Gpt2LmHead>) -> Vec<Tensor> {
    let staged = UncachedModel::new(|tokens| {
        let batch = (tokens.ids, tokens.attention_mask, tokens.position_ids);
        let logits = accelerator.parallel().forward_stages(
            model,
            &batch,
            |model, (ids, mask, positions)| {
                let tokens = brigade_models::Tokens {
                    attention_mask: mask.as_ref(),
                    position_ids: positions.as_ref(),
                    ..brigade_models::Tokens::from(ids)
                };
                Ok(model.forward(tokens)?.f_select(1, -1)?)
            },
        );
        Ok(Tensor::f_cat(&logits?, 0)?)
    });
    let (ids, mask) = prompt();
    let write = |options: GenerationOptions| {
        let short = options.generate(&staged, &ids.narrow(0, 0, 1), None).unwrap();
        [options.generate(&staged, &ids, Some(&mask)).unwrap(), short]
    };
    options().into_iter().flat_map(write).collect()
}

#[test]
fn stages_write_what_one_process_writes() {
    let build = |accelerator: &Accelerator| {
        let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(7);
        let builder =
            accelerator.parallel().model_builder(Gpt2LmHead::tensor_plan()).kind(Kind::Double);
        let mut model =
            builder.build(|path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(4))).unwrap();
        model.eval();
        // Larger weights, so that tokens differ.
        tch::no_grad(|| {
            model.parameters().iter_mut().for_each(|it| drop(it.tensor.g_mul_scalar_(3.0)));
        });
        model
    };
    let accelerator = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
    let whole: Model<Gpt2LmHead> = build(&accelerator);
    let (ids, mask) = prompt();
    let expected = options().into_iter().flat_map(|options| {
        let short = options.generate(&whole, &ids.narrow(0, 0, 1), None).unwrap();
        [options.generate(&whole, &ids, Some(&mask)).unwrap(), short]
    });
    let expected: Vec<Tensor> = expected.collect();
    assert_ne!(expected[0], expected[2], "sampled texts are others");
    let expected = Mutex::new(expected);
    let pipeline = || Mesh::builder().pipeline(2);
    for (mesh, sharding, schedule) in [
        (pipeline().build(2), None, Schedule::OneForwardOneBackward),
        (pipeline().build(2), None, Schedule::Interleaved),
        (pipeline().tensor(2).build(4), None, Schedule::OneForwardOneBackward),
        (pipeline().shard(2).build(4), Some(Sharding::zero3()), Schedule::OneForwardOneBackward),
    ] {
        let mesh = mesh.unwrap();
        on_ranks(mesh.world_size(), |builder, _| {
            tch::set_num_threads(1);
            let builder = builder.sharding(sharding.clone()).mesh(mesh.clone());
            let options = PipelineOptions::new(2).schedule(schedule);
            let accelerator = builder.pipeline_options(options).build().unwrap();
            let model = accelerator.prepare(build(&accelerator)).unwrap();
            let found = written(&accelerator, &model);
            assert_eq!(found, *expected.lock().unwrap());
        });
    }
}

/// Ways of generation that select rows of caches, and that read prompts in parts.
fn with_caches() -> Vec<GenerationOptions> {
    let [greedy, sampled] = options();
    let seven = GenerationOptions { max_new_tokens: 7, ..sampled };
    vec![
        GenerationOptions { max_new_tokens: 7, prefill_chunk: Some(2), ..greedy.clone() },
        seven.clone(),
        GenerationOptions { num_return_sequences: 3, cache_kind: CacheKind::Int8, ..seven },
        GenerationOptions { max_new_tokens: 7, num_beams: 3, num_return_sequences: 2, ..greedy },
    ]
}

fn texts<M: CausalModel>(model: &M) -> Vec<Tensor> {
    let (ids, mask) = prompt();
    let write = |options: GenerationOptions| {
        let short = options.generate(model, &ids.narrow(0, 0, 1), None).unwrap();
        [options.generate(model, &ids, Some(&mask)).unwrap(), short]
    };
    with_caches().into_iter().flat_map(write).collect()
}

/// Checks generation with caches in stages against one process.
fn check_caches<B>(new: impl Fn(&ParamPath<'_>) -> CausalLm<B> + Sync)
where
    CausalLm<B>: CausalModel<State = KeyValueCache> + TensorParallelPlan,
{
    let build = |accelerator: &Accelerator| {
        let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(7);
        let plan = <CausalLm<B>>::tensor_plan();
        let builder = accelerator.parallel().model_builder(plan).kind(Kind::Double);
        let mut model = builder.build(&new).unwrap();
        model.eval();
        // Larger weights, so that tokens differ.
        tch::no_grad(|| {
            model.parameters().iter_mut().for_each(|it| drop(it.tensor.g_mul_scalar_(3.0)));
        });
        model
    };
    let accelerator = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
    let whole: Model<CausalLm<B>> = build(&accelerator);
    let expected = texts(&whole);
    assert_ne!(expected[0], expected[2], "sampled texts are others");
    let expected = Mutex::new(expected);
    let pipeline = || Mesh::builder().pipeline(2);
    for (mesh, sharding, schedule) in [
        (pipeline().build(2), None, Schedule::OneForwardOneBackward),
        (pipeline().build(2), None, Schedule::Interleaved),
        (pipeline().build(2), None, Schedule::ZeroBubbleV),
        (pipeline().tensor(2).build(4), None, Schedule::OneForwardOneBackward),
        (pipeline().shard(2).build(4), Some(Sharding::zero3()), Schedule::OneForwardOneBackward),
    ] {
        let mesh = mesh.unwrap();
        on_ranks(mesh.world_size(), |builder, _| {
            tch::set_num_threads(1);
            let builder = builder.sharding(sharding.clone()).mesh(mesh.clone());
            let options = PipelineOptions::new(4).schedule(schedule);
            let accelerator = builder.pipeline_options(options).build().unwrap();
            let model = accelerator.prepare(build(&accelerator)).unwrap();
            let computed = Mutex::new(0);
            let stages = StagedModel::new(|batch, next| {
                accelerator.parallel().forward_stages(&model, batch, |model, micro| {
                    *computed.lock().unwrap() += micro.tokens().ids.numel();
                    next(model.inner(), micro)
                })
            });
            let found = texts(&stages);
            assert_eq!(found, *expected.lock().unwrap(), "{mesh} {schedule}");
            // Two prompts of three tokens, and six further tokens.
            *computed.lock().unwrap() = 0;
            let (ids, mask) = prompt();
            let _ids = with_caches()[1].generate(&stages, &ids, Some(&mask)).unwrap();
            let chunks = schedule.least_chunks();
            assert_eq!(*computed.lock().unwrap(), 2 * (3 + 6) * chunks, "{mesh} {schedule}");
        });
    }
}

#[test]
fn stages_with_caches_write_what_one_process_writes() {
    let gpt2 = brigade_models::Gpt2Options { n_positions: 16, ..gpt2(4) };
    check_caches(|path| Gpt2LmHead::new(path, &gpt2));
    let llama = LlamaOptions {
        vocab_size: 19,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    check_caches(|path| LlamaForCausalLm::new(path, &llama));
}
