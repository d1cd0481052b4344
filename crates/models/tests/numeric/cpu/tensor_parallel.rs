//! Transformers whose layers the ranks of a group divide compute what one rank computes.

pub(super) mod edges;

use std::sync::Mutex;
use std::thread;

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertOptions, CausalLm, Gpt2LmHead, Gpt2Options,
    Labelled, LlamaForCausalLm, LlamaOptions, MixtralForCausalLm, MixtralOptions, TokenLoss,
};
use brigade_nn::{
    Model, Module, ParamPath, StateDict, TensorParallel, TensorParallelPlan, TensorRegion,
};
use brigade_sharding::TensorPlan;
use brigade_testkit::assert_close;
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Result, Store, backward, gradient};
use tch::{Device, Kind, Tensor};

/// Ranks are threads, which share libtorch's generator: models are drawn one after the other.
pub(super) static DRAWS: Mutex<()> = Mutex::new(());

pub(super) fn on_ranks(ranks: usize, body: impl Fn(ProcessGroup) + Sync) {
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

pub(super) fn values(tensor: &Tensor) -> Vec<f64> {
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
    check_plan(ranks, &M::tensor_plan(), new, loss);
}

fn check_plan<M>(
    ranks: usize,
    plan: &TensorPlan,
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    loss: impl Fn(&Model<M>) -> Tensor + Sync,
) {
    let whole = built(None, false, &new).unwrap();
    let expected = loss(&whole);
    backward(&expected).unwrap();
    let gradients: Vec<(String, Option<Tensor>)> =
        whole.parameters().into_iter().map(|it| (it.name, gradient(&it.tensor).unwrap())).collect();
    let (expected, state) = (expected.double_value(&[]), whole.state_dict());
    let shared = Mutex::new((gradients, state));
    on_ranks(ranks, |group| {
        let mut model = built(Some((&group, plan.clone())), false, &new).unwrap();
        let deferred = built(Some((&group, plan.clone())), true, &new).unwrap();
        let divided = model.divided_parameters();
        assert!(!divided.is_empty());
        let found = loss(&model);
        assert_close(&[found.double_value(&[])], &[expected], 1e-12, 1e-13);
        backward(&found).unwrap();
        let region = TensorRegion::new(group);
        let whole_gradients: Vec<(String, Option<Tensor>)> = model
            .parameters()
            .into_iter()
            .map(|parameter| {
                let own = gradient(&parameter.tensor).unwrap();
                let part = divided.iter().find(|part| part.name == parameter.name);
                let whole = own.map(|own| match part {
                    Some(divided) => region.whole(&own, &divided.part).unwrap(),
                    None => own,
                });
                (parameter.name, whole)
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
        // Whole values are loaded again, and each rank keeps its part of them.
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

pub(super) fn ids(vocabulary: i64, batch: i64, tokens: i64) -> Tensor {
    let places = Tensor::arange(batch * tokens, (Kind::Int64, Device::Cpu));
    (places * 7 + 3).remainder(vocabulary).view([batch, tokens])
}

pub(super) fn gpt2(vocabulary: i64) -> Gpt2Options {
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

pub(super) fn llama(key_heads: i64) -> LlamaOptions {
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

pub(super) fn mixtral() -> MixtralOptions {
    MixtralOptions {
        vocab_size: 53,
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 12,
        num_key_value_heads: Some(2),
        num_local_experts: 12,
        // Far from ties between experts.
        initializer_range: 0.2,
        ..Default::default()
    }
}

pub(super) fn bert() -> BertOptions {
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

pub(super) fn mean(loss: Result<TokenLoss>) -> Tensor {
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

/// Attention is divided; every rank has all experts.
#[test]
fn mixtral_with_the_loss_of_its_routers() {
    for (ranks, key_heads) in [(2, 2), (3, 3), (4, 2)] {
        let options = MixtralOptions {
            num_key_value_heads: Some(key_heads),
            output_router_logits: true,
            router_aux_loss_coef: 0.2,
            ..mixtral()
        };
        check(ranks, |path| MixtralForCausalLm::new(path, &options), causal);
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

/// Between divided layers each rank has a part of the sequence.
#[test]
fn with_sequence_regions() {
    let plan = |plan: TensorPlan| plan.sequence_regions(true);
    fn causal<B>(model: &Model<CausalLm<B>>) -> Tensor
    where
        CausalLm<B>: for<'a> Module<Labelled<'a>, Output = TokenLoss>
            + for<'a> Module<&'a Tensor, Output = Tensor>,
    {
        let ids = ids(41, 2, 12);
        let loss = mean(model.forward(Labelled::new(&ids, &ids)));
        loss + (model.forward(&ids).unwrap().square() * 0.01).mean(Kind::Double)
    }
    for ranks in [2, 3, 4] {
        let of_gpt2 = plan(Gpt2LmHead::tensor_plan());
        check_plan(ranks, &of_gpt2, |path| Gpt2LmHead::new(path, &gpt2(53)), causal);
        let recomputed = Gpt2Options { recompute: true, ..gpt2(53) };
        check_plan(ranks, &of_gpt2, |path| Gpt2LmHead::new(path, &recomputed), causal);
    }
    for (ranks, key_heads) in [(2, 12), (4, 2), (3, 1)] {
        let of_llama = plan(LlamaForCausalLm::tensor_plan());
        check_plan(ranks, &of_llama, |path| LlamaForCausalLm::new(path, &llama(key_heads)), causal);
        // A layer that every rank has whole, between others.
        let partly = of_llama.clone().replicated("*mlp.*");
        check_plan(ranks, &partly, |path| LlamaForCausalLm::new(path, &llama(key_heads)), causal);
    }
    for (ranks, key_heads) in [(2, 12), (4, 2), (3, 3)] {
        let options = MixtralOptions {
            num_key_value_heads: Some(key_heads),
            output_router_logits: true,
            recompute: ranks == 4,
            ..mixtral()
        };
        let of_mixtral = plan(MixtralForCausalLm::tensor_plan());
        check_plan(ranks, &of_mixtral, |path| MixtralForCausalLm::new(path, &options), causal);
    }
    let masked = |model: &Model<BertForMaskedLm>| {
        let tokens = ids(41, 2, 12);
        let labels = tokens.masked_fill(&tokens.remainder(3).ne(0), -100);
        mean(model.forward(Labelled::new(&tokens, &labels)))
    };
    let of_bert = plan(BertForMaskedLm::tensor_plan());
    check_plan(3, &of_bert, |path| BertForMaskedLm::new(path, &bert()), masked);

    let shared = Mutex::new(Vec::new());
    on_ranks(2, |group| {
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(53));
        let tensor = Some((&group, plan(Gpt2LmHead::tensor_plan())));
        let error = built(tensor, false, &new).unwrap().forward(&ids(41, 2, 9)).unwrap_err();
        shared.lock().unwrap().push(error.to_string());
    });
    for error in shared.into_inner().unwrap() {
        let expected = "2 tensor ranks do not divide sequences of 9 tokens into sequence regions: pad or cut the texts to 8 \
                        or 10 tokens";
        assert!(error.contains(expected), "{error}");
    }
}

/// The messages of a forward and backward, as the documentation has them: sums of hidden numbers before and behind divided
/// layers, and a few numbers for each label.
#[test]
fn messages_on_groups_of_any_size() {
    for ranks in [2, 8, 64, 1024] {
        let store = Store::hash().unwrap();
        let options = GroupOptions::default();
        let group = ProcessGroup::new(&store, 0, ranks, Backend::Fake, options).unwrap();
        let heads = ranks as i64;
        let options = LlamaOptions {
            vocab_size: 4 * heads,
            hidden_size: 2 * heads,
            intermediate_size: 3 * heads,
            num_hidden_layers: 2,
            num_attention_heads: heads,
            num_key_value_heads: Some(heads),
            ..Default::default()
        };
        let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &options);
        let plan = LlamaForCausalLm::tensor_plan();
        let model = built(Some((&group, plan)), false, &new).unwrap();
        // Of a rank: its head of queries, keys and values, its part of the perceptron and of both vocabularies.
        let layer = 4 * (2 * 2 * heads) + 3 * (3 * 2 * heads) + 2 * (2 * heads);
        let whole = 2 * layer + 2 * (4 * 2 * heads) + 2 * heads;
        assert_eq!(model.num_parameters() as i64, whole);
        group.reset_traffic();
        let ids = ids(4 * heads, 2, 9);
        let loss = mean(model.forward(Labelled::new(&ids, &ids)));
        let sent = group.traffic();
        // The embedding, and attention's and the perceptron's output of each layer.
        let others = ranks as u64 - 1;
        // In a ring; the number of ranks divides the bytes.
        let hidden = (2 * 9 * 2 * 8) * 2 * others;
        assert_eq!((sent["all_reduce"].messages, sent["all_reduce"].bytes), (5, 5 * hidden));
        // Three numbers for each of 16 labels.
        assert_eq!((sent["all_gather"].messages, sent["all_gather"].bytes), (1, 16 * 24 * others));
        group.reset_traffic();
        backward(&loss).unwrap();
        let sent = group.traffic();
        // The inputs of attention and perceptron of each layer, and of the head.
        assert_eq!((sent["all_reduce"].messages, sent["all_reduce"].bytes), (5, 5 * hidden));
        assert_eq!(sent.len(), 1);

        // With sequence regions, a gather before and a scatter after divided layers have as many bytes as a sum.
        let plan = LlamaForCausalLm::tensor_plan().sequence_regions(true);
        let model = built(Some((&group, plan)), false, &new).unwrap();
        let tokens = heads;
        let ids = ids.view([-1]).narrow(0, 0, 1).expand([1, tokens], true).contiguous();
        group.reset_traffic();
        let loss = mean(model.forward(Labelled::new(&ids, &ids)));
        let sent = group.traffic();
        let bytes = (tokens as u64 * 2 * heads as u64 * 8 / ranks as u64) * others;
        // The sequence before attention and perceptron of each layer, and behind the last, beside the numbers of labels.
        let labels = (tokens as u64 - 1) * 24 * others;
        assert_eq!(
            (sent["all_gather"].messages, sent["all_gather"].bytes),
            (6, 5 * bytes + labels)
        );
        let scattered = (sent["reduce_scatter"].messages, sent["reduce_scatter"].bytes);
        assert_eq!(scattered, (4, 4 * bytes));
        // The embedding's output is summed whole.
        assert_eq!((sent["all_reduce"].messages, sent["all_reduce"].bytes), (1, 2 * bytes));
        group.reset_traffic();
        backward(&loss).unwrap();
        let sent = group.traffic();
        // Of what was scattered, and of what was cut in front of the first layer.
        assert_eq!((sent["all_gather"].messages, sent["all_gather"].bytes), (5, 5 * bytes));
        let scattered = (sent["reduce_scatter"].messages, sent["reduce_scatter"].bytes);
        assert_eq!(scattered, (4, 4 * bytes));
        // The head's input, and two normalisations of each layer.
        let norms = 4 * 2 * (2 * heads as u64 * 8) * others / ranks as u64;
        assert_eq!((sent["all_reduce"].messages, sent["all_reduce"].bytes), (5, 2 * bytes + norms));
    }
}
