//! Texts by a sharded model, whose units are gathered for each token, are those of a whole one.

use brigade_models::{CacheKind, GenerationOptions, Gpt2LmHead, StagedModel};
use brigade_nn::{Model, ParamPath};
use brigade_sharding::{Reshard, Sharding};
use brigade_torch::ReduceOp;
use tch::{Kind, Tensor};

use super::on_ranks;
use crate::net::fill;
use crate::tensor_parallel::gpt2;

/// Prompts of different lengths, which take different numbers of tokens.
const PROMPTS: [&[i64]; 3] = [&[3, 1, 4], &[1, 5], &[9, 2, 6, 5]];
const TOKENS: [i64; 3] = [5, 0, 3];

fn model() -> Model<Gpt2LmHead> {
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2());
    let mut model = Model::builder().kind(Kind::Double).build(new).unwrap();
    fill(&model);
    model.eval();
    model
}

#[test]
fn ranks_with_other_prompts_write_what_a_whole_model_writes() {
    for (sharding, num_beams, cache_kind) in [
        (Sharding::zero3(), 1, CacheKind::default()),
        (Sharding::zero3().reshard_after_forward(Reshard::No), 1, CacheKind::Int8),
        (Sharding::zero2(), 2, CacheKind::default()),
        (Sharding::zero3(), 2, CacheKind::default()),
    ] {
        on_ranks(3, |builder, rank| {
            let whole = model();
            let options = GenerationOptions {
                max_new_tokens: TOKENS[rank],
                num_beams,
                cache_kind,
                ..GenerationOptions::default()
            };
            let ids = Tensor::from_slice(PROMPTS[rank]).view([1, -1]);
            let expected = options.generate(&whole, &ids, None).unwrap();
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            let mut model = accelerator.prepare(whole).unwrap();
            model.eval();
            let sharded =
                StagedModel::new(|batch, next| Ok(vec![model.run(|model| next(model, batch))?]));
            let group = accelerator.processes().group().unwrap();
            let any_rank = |needed| {
                let mut needed = Tensor::from_slice(&[i64::from(needed)]);
                group.all_reduce(&mut needed, ReduceOp::Max)?;
                Ok(needed.f_int64_value(&[0])? > 0)
            };
            let found = if num_beams > 1 {
                let search = options.beam_search(&sharded, &ids, None).unwrap();
                search.synchronized(any_rank).run().unwrap().ids
            } else {
                let stream = options.stream(&sharded, &ids, None).unwrap();
                stream.synchronized(any_rank).finish().unwrap()
            };
            assert_eq!(found, expected, "rank {rank}");
            assert_eq!(found.size()[1], ids.size()[1] + TOKENS[rank]);
        });
    }
}
