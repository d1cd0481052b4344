//! Transformers whose layers the ranks of a group divide compute what one rank computes.

mod edges;

use std::sync::Mutex;
use std::thread;

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertOptions, CausalLm, Gpt2LmHead, Gpt2Options,
    Labelled, LlamaForCausalLm, LlamaOptions, TokenLoss,
};
use brigade_nn::{
    Model, Module, ParamPath, StateDict, TensorParallel, TensorParallelPlan, TensorRegion,
};
use brigade_sharding::TensorPlan;
use brigade_testkit::assert_close;
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Result, Store, backward, gradient};
use tch::{Device, Kind, Tensor};

/// Ranks are threads, which share libtorch's generator: models are drawn one after the other.
static DRAWS: Mutex<()> = Mutex::new(());

fn on_ranks(ranks: usize, body: impl Fn(ProcessGroup) + Sync) {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || {
                let gloo = Backend::Gloo(Default::default());
                let options = GroupOptions::default();
                body(ProcessGroup::new(&store, rank, ranks, gloo, options).unwrap());
            });
        }
    });
}

fn built<M>(
    tensor: Option<(&ProcessGroup, TensorPlan)>,
    deferred: bool,
    new: &impl Fn(&ParamPath<'_>) -> M,
) -> Result<Model<M>> {
    let _one_by_one = DRAWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    tch::manual_seed(7);
    let mut builder = Model::builder().kind(Kind::Double);
    if let Some((group, plan)) = tensor {
        builder = builder.tensor_parallel(TensorParallel { group: Some(group.clone()), plan });
    }
    let mut model = if deferred { builder.deferred() } else { builder }.build(new)?;
    model.materialize()?;
    Ok(model)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

fn same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    assert_close(&values(found), &values(expected), 1e-12, 1e-13);
}

fn same_state(found: &StateDict, expected: &StateDict) {
    let names =
        |state: &StateDict| state.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    for (name, value) in expected.iter() {
        assert_eq!(found.get(name).unwrap(), value, "{name}");
    }
}

/// Compares first values, a loss, all gradients, whole states there and back, and deferred models.
fn check<M>(
    ranks: usize,
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    loss: impl Fn(&Model<M>) -> Tensor + Sync,
) where
    M: TensorParallelPlan,
{
    let whole = built(None, false, &new).unwrap();
    let expected = loss(&whole);
    backward(&expected).unwrap();
    let gradients: Vec<(String, Option<Tensor>)> =
        whole.parameters().into_iter().map(|it| (it.name, gradient(&it.tensor).unwrap())).collect();
    let (expected, state) = (expected.double_value(&[]), whole.state_dict());
    let shared = Mutex::new((gradients, state));
    on_ranks(ranks, |group| {
        let mut model = built(Some((&group, M::tensor_plan())), false, &new).unwrap();
        let deferred = built(Some((&group, M::tensor_plan())), true, &new).unwrap();
        let divided = model.divided_parameters();
        assert!(!divided.is_empty());
        let found = loss(&model);
        assert_close(&[found.double_value(&[])], &[expected], 1e-12, 1e-13);
        backward(&found).unwrap();
        let region = TensorRegion::new(group);
        let whole_gradients: Vec<(String, Option<Tensor>)> = model
            .parameters()
            .into_iter()
            .map(|it| {
                let own = gradient(&it.tensor).unwrap();
                let part = divided.iter().find(|part| part.name == it.name);
                let whole = own.map(|own| match part {
                    Some(it) => region.whole(&own, &it.part).unwrap(),
                    None => own,
                });
                (it.name, whole)
            })
            .collect();
        let whole_state = model.whole_state_dict().unwrap();
        let deferred_state = deferred.whole_state_dict().unwrap();
        {
            let shared = shared.lock().unwrap();
            let (gradients, state) = &*shared;
            for ((name, found), (expected_name, expected)) in whole_gradients.iter().zip(gradients)
            {
                assert_eq!((name, found.is_some()), (expected_name, expected.is_some()));
                if let (Some(found), Some(expected)) = (found, expected) {
                    same(found, expected, name);
                }
            }
            same_state(&whole_state, state);
            same_state(&deferred_state, state);
        }
        // Whole values go in again, and each rank keeps its part of them.
        let mut other = StateDict::new();
        for (name, value) in whole_state.iter() {
            let changed = if value.kind() == Kind::Double { value + 1.0 } else { value.copy() };
            other.insert(name, changed).unwrap();
        }
        model.load_state_dict(&other).unwrap();
        same_state(&model.whole_state_dict().unwrap(), &other);
        let error = model.save_weights("nowhere.safetensors").unwrap_err().to_string();
        assert!(error.contains("whole_state_dict"), "{error}");
    });
}

fn ids(vocabulary: i64, batch: i64, tokens: i64) -> Tensor {
    let places = Tensor::arange(batch * tokens, (Kind::Int64, Device::Cpu));
    (places * 7 + 3).remainder(vocabulary).view([batch, tokens])
}

fn gpt2(vocabulary: i64) -> Gpt2Options {
    Gpt2Options {
        vocab_size: vocabulary,
        n_positions: 16,
        n_embd: 24,
        n_layer: 2,
        n_head: 12,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    }
}

fn llama(key_heads: i64) -> LlamaOptions {
    LlamaOptions {
        vocab_size: 53,
        hidden_size: 24,
        intermediate_size: 36,
        num_hidden_layers: 2,
        num_attention_heads: 12,
        num_key_value_heads: Some(key_heads),
        ..Default::default()
    }
}

fn bert() -> BertOptions {
    BertOptions {
        vocab_size: 41,
        hidden_size: 24,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 12,
        max_position_embeddings: 16,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..Default::default()
    }
}

fn mean(loss: Result<TokenLoss>) -> Tensor {
    loss.unwrap().mean().unwrap()
}

fn causal<B>(model: &Model<CausalLm<B>>) -> Tensor
where
    CausalLm<B>: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    let ids = ids(41, 2, 9);
    mean(model.forward(Labelled { smoothing: 0.1, ..Labelled::new(&ids, &ids) }))
}

#[test]
fn gpt2_over_two_three_and_four_ranks() {
    // The ranks do not divide the vocabulary.
    for ranks in [2, 3, 4] {
        check(ranks, |path| Gpt2LmHead::new(path, &gpt2(53)), causal);
    }
    let untied = Gpt2Options { tie_word_embeddings: false, ..gpt2(48) };
    check(2, |path| Gpt2LmHead::new(path, &untied), causal);
}

#[test]
fn llama_with_keys_divided_and_shared() {
    for (ranks, key_heads) in [(2, 12), (2, 2), (4, 2), (3, 1), (4, 1)] {
        check(ranks, |path| LlamaForCausalLm::new(path, &llama(key_heads)), causal);
    }
}

#[test]
fn bert_with_its_heads() {
    let masked = |model: &Model<BertForMaskedLm>| {
        let tokens = ids(41, 2, 9);
        let labels = tokens.masked_fill(&tokens.remainder(3).ne(0), -100);
        mean(model.forward(Labelled::new(&tokens, &labels)))
    };
    for tie_word_embeddings in [true, false] {
        let options = BertOptions { tie_word_embeddings, ..bert() };
        for ranks in [2, 4] {
            check(ranks, |path| BertForMaskedLm::new(path, &options), masked);
        }
    }
    let classes = bert().with_classes(3);
    check(
        3,
        |path| BertForSequenceClassification::new(path, &classes),
        |model| {
            let tokens = ids(41, 2, 9);
            let logits = model.forward(&tokens).unwrap();
            let labels = Tensor::from_slice(&[2i64, 0]);
            mean(model.module().loss(&logits, &labels, 0.0))
        },
    );
}
