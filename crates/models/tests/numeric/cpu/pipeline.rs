//! Transformers that are cut into stages have the values of whole ones, and compute what those compute.

use std::collections::BTreeMap;
use std::sync::Mutex;

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertOptions, CausalLm, Gpt2LmHead, Gpt2Options,
    Labelled, LlamaForCausalLm, LlamaOptions, MixtralForCausalLm, MixtralOptions, TokenLoss,
};
use brigade_nn::{
    BatchNorm1d, Linear, Model, ModelBuilder, Module, ParamPath, PipelineParallel, Sequential,
    StageCut, StageOutput, weights,
};
use brigade_torch::Result;
use tch::{Device, Kind, Tensor};

/// Tests are threads, which share libtorch's generator.
static DRAWS: Mutex<()> = Mutex::new(());

const BLOCKS: usize = 5;

fn builder(pipeline: Option<PipelineParallel>) -> ModelBuilder {
    let builder = Model::builder().kind(Kind::Double);
    match pipeline {
        Some(pipeline) => builder.pipeline(pipeline),
        None => builder,
    }
}

fn stage(rank: usize, stage_ranks: &[usize]) -> PipelineParallel {
    PipelineParallel { stage_ranks: stage_ranks.to_vec(), rank, cut: StageCut::Even }
}

/// Compares first values, files and a loss of models on all ranks with those of a whole model.
fn check<M>(new: impl Fn(&ParamPath<'_>) -> M, loss: impl Fn(&Model<M>) -> Result<Tensor>) {
    let _one_by_one = DRAWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("whole.safetensors");
    let built = |pipeline: Option<PipelineParallel>| {
        tch::manual_seed(7);
        let model = builder(pipeline).build(&new).unwrap();
        // Later random numbers do not depend on the division into stages.
        (model, Tensor::rand([1], (Kind::Double, Device::Cpu)))
    };
    let (whole, next) = built(None);
    weights::save(&whole.state_dict(), &file).unwrap();
    let expected = loss(&whole).unwrap();
    let names: BTreeMap<String, Tensor> = whole.state_dict().into_iter().collect();
    let v = [0, 1, 2, 1, 0];
    for stage_ranks in [&[0][..], &[0, 1], &[0, 1, 2], &[0, 1, 2, 3], &v, &[0, 1, 0, 1]] {
        let ranks = stage_ranks.iter().max().unwrap() + 1;
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        let mut models = Vec::new();
        for rank in 0..ranks {
            let (mut model, then) = built(Some(stage(rank, stage_ranks)));
            assert_eq!(then, next);
            for again in [false, true] {
                for (name, value) in model.state_dict() {
                    assert_eq!(value, names[&name], "{name} of rank {rank} of {stage_ranks:?}");
                    *found.entry(name).or_default() += usize::from(!again);
                }
                // A rank reads its part of a file of the whole model.
                tch::no_grad(|| {
                    model.parameters().iter_mut().for_each(|it| {
                        let _ = it.tensor.zero_();
                    });
                });
                model.load_weights(&file).unwrap();
            }
            let unread = Model::builder().kind(Kind::Double).deferred();
            let mut unread = unread.pipeline(stage(rank, stage_ranks)).build(&new).unwrap();
            unread.load_weights(&file).unwrap();
            unread.materialize().unwrap();
            assert!(unread.state_dict().into_iter().all(|(name, value)| value == names[&name]));
            models.push(model);
        }
        let all: Vec<&String> = names.keys().collect();
        assert_eq!(found.keys().collect::<Vec<_>>(), all, "{stage_ranks:?}");
        let shared = models[0].pipeline().unwrap().shared();
        let twice: Vec<&String> =
            found.iter().filter(|(_, times)| **times > 1).map(|(name, _)| name).collect();
        for name in &twice {
            let first = whole.parameter_name(name).unwrap();
            assert!(shared.iter().any(|it| it.name == first), "{name} in {stage_ranks:?}");
        }
        assert_eq!(shared.is_empty(), twice.is_empty());

        let mut hidden = None;
        for (stage, &rank) in stage_ranks.iter().enumerate() {
            let model = &models[rank];
            let stages = model.pipeline().unwrap();
            if ranks > 1 {
                let error = loss(model).unwrap_err().to_string();
                assert!(error.contains("run the model by `Accelerator::forward_backward`"));
            }
            match stages.run(stage, hidden.take(), || loss(model)).unwrap() {
                StageOutput::Hidden(outputs) => hidden = Some(outputs),
                StageOutput::Value(value) | StageOutput::Split { value, .. } => {
                    assert_eq!(stage + 1, stage_ranks.len());
                    assert_eq!(value, expected, "{stage_ranks:?}");
                }
            }
        }
        assert!(hidden.is_none());
    }
}

fn ids(batch: i64, tokens: i64) -> Tensor {
    let places = Tensor::arange(batch * tokens, (Kind::Int64, Device::Cpu));
    (places * 7 + 3).remainder(23).view([batch, tokens])
}

fn gpt2() -> Gpt2Options {
    Gpt2Options {
        vocab_size: 23,
        n_positions: 8,
        n_embd: 12,
        n_layer: BLOCKS,
        n_head: 2,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    }
}

fn causal<B>(model: &Model<CausalLm<B>>) -> Result<Tensor>
where
    CausalLm<B>: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    let ids = ids(2, 6);
    model.forward(Labelled::new(&ids, &ids))?.mean()
}

#[test]
fn gpt2_in_stages() {
    check(|path| Gpt2LmHead::new(path, &gpt2()), causal);
    let untied = Gpt2Options { tie_word_embeddings: false, recompute: true, ..gpt2() };
    check(|path| Gpt2LmHead::new(path, &untied), causal);
}

#[test]
fn llama_in_stages() {
    let options = LlamaOptions {
        vocab_size: 23,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: BLOCKS,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    check(|path| LlamaForCausalLm::new(path, &options), causal);
}

#[test]
fn mixtral_in_stages_with_the_loss_of_its_routers() {
    for recompute in [false, true] {
        let options = MixtralOptions {
            vocab_size: 23,
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: BLOCKS,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            num_local_experts: 4,
            output_router_logits: true,
            router_aux_loss_coef: 0.5,
            recompute,
            ..Default::default()
        };
        check(|path| MixtralForCausalLm::new(path, &options), causal);
    }
}

#[test]
fn bert_in_stages() {
    let options = BertOptions {
        vocab_size: 23,
        hidden_size: 12,
        intermediate_size: 24,
        num_hidden_layers: BLOCKS,
        num_attention_heads: 2,
        max_position_embeddings: 8,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..Default::default()
    };
    check(
        |path| BertForMaskedLm::new(path, &options),
        |model: &Model<BertForMaskedLm>| {
            let ids = ids(2, 6);
            model.forward(Labelled::new(&ids, &ids))?.mean()
        },
    );
    check(
        |path| BertForSequenceClassification::new(path, &options),
        |model: &Model<BertForSequenceClassification>| {
            let logits = model.forward(&ids(2, 6))?;
            model.module().loss(&logits, &Tensor::from_slice(&[0i64, 1]), 0.0)?.mean()
        },
    );
}

#[test]
fn what_cannot_be_cut_is_named() {
    let _one_by_one = DRAWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let layers = |path: &ParamPath<'_>| {
        let layers = Sequential::new().add(Linear::new(path / 0, 4, 4));
        layers.add(Linear::new(path / 1, 4, 4)).in_stages(path.stages(0..2))
    };
    let error = |pipeline: PipelineParallel| {
        Model::builder().pipeline(pipeline).build(layers).unwrap_err().to_string()
    };
    let few = error(stage(0, &[0, 1, 2]));
    assert!(few.contains("2 layers cannot be cut into 3 stages"), "{few}");
    assert!(few.contains("take 2 stages or fewer"), "{few}");
    let none = error(stage(2, &[0, 1]));
    assert!(none.contains("rank 2 has no stage of the pipeline"), "{none}");
    let at = |names: &[&str]| {
        let cut = StageCut::At(names.iter().map(|&name| name.to_owned()).collect());
        error(PipelineParallel { cut, ..stage(0, &[0, 1]) })
    };
    assert!(at(&["2"]).contains("there is no layer 2"));
    assert!(at(&[]).contains("the first blocks of 1 stages, and the pipeline has 2"));
    let costs = StageCut::Costs(vec![1.0; 3]);
    let costs = error(PipelineParallel { cut: costs, ..stage(0, &[0, 1]) });
    assert!(costs.contains("the costs of 3 blocks, and there are 2"), "{costs}");

    let build = |new: fn(&ParamPath<'_>) -> Linear| {
        Model::builder().pipeline(stage(0, &[0, 1])).build(new).unwrap_err().to_string()
    };
    let no_row = build(|path| Linear::new(path, 4, 4));
    assert!(no_row.contains("has none, or several"), "{no_row}");
    let between = build(|path| {
        let _row = path.stages([0, 2]);
        let _first = Linear::new(path / 0, 4, 4);
        let between = Linear::new(path / 1, 4, 4);
        let _last = Linear::new(path / 2, 4, 4);
        between
    });
    assert!(between.contains("`1.weight` was registered between the blocks"), "{between}");

    let whole = Model::new(|path: &ParamPath<'_>| BatchNorm1d::new(path / "norm", 4)).unwrap();
    assert_eq!(whole.unshared_batch_norm(), Some("norm"));
    let model = Model::builder().pipeline(stage(1, &[0, 1])).build(layers).unwrap();
    assert_eq!(model.unshared_batch_norm(), None);
    let error = model.save_weights("nowhere.safetensors").unwrap_err().to_string();
    assert!(error.contains("`0.weight` is of another stage"), "{error}");
    let stages = model.pipeline().unwrap();
    let wrong = stages.run(0, None, || Ok(())).unwrap_err().to_string();
    assert_eq!(wrong, "stage 0 is not of rank 1 of the pipeline");
    let missing = stages.run(1, None, || Ok(())).unwrap_err().to_string();
    assert_eq!(missing, "stage 1 takes the output of the stage before");
    let input = Tensor::zeros([1, 4], (Kind::Float, Device::Cpu));
    let received = || Some(vec![input.shallow_clone()]);
    let idle = stages.run(1, received(), || Ok(())).unwrap_err().to_string();
    assert!(idle.contains("did not run the model's blocks"), "{idle}");
    let several = Some(vec![input.shallow_clone(), input.shallow_clone()]);
    let several = stages.run(1, several, || model.forward(&input)).unwrap_err().to_string();
    assert!(several.contains("passed on 2 tensors, and this one takes 1"), "{several}");
    let twice = stages.run(1, received(), || {
        let _first = model.forward(&input)?;
        model.forward(&input)
    });
    let twice = twice.unwrap_err().to_string();
    assert!(twice.contains("ran twice in one call"), "{twice}");
    let first = Model::builder().pipeline(stage(0, &[0, 1])).build(layers).unwrap();
    let swallowed = first.pipeline().unwrap().run(0, None, || {
        drop(first.forward(&input));
        Ok(())
    });
    let swallowed = swallowed.unwrap_err().to_string();
    assert!(swallowed.contains("went on after stage 0 had ended"), "{swallowed}");
}
