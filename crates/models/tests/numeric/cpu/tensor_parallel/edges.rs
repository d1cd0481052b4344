//! Heads that ranks do not divide, generated texts, folders of Hugging Face's, and dropout of attention.

use std::path::Path;
use std::sync::Mutex;

use brigade_models::{
    BertForSequenceClassification, BertOptions, CausalModel, GenerationOptions, Gpt2LmHead,
    Gpt2Options, LlamaForCausalLm, LlamaOptions, Tokens, Transformer,
};
use brigade_nn::{Model, ModelError, Module, ParamPath, TensorParallel, TensorParallelPlan};
use brigade_rank_env::StoreHost;
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{
    Backend, GlooDevice, GroupOptions, ProcessGroup, TcpStore, backward, gradient, inherited_socket,
};
use tch::{Kind, Tensor};

use super::{bert, built, gpt2, ids, llama, on_ranks, same_state};

/// The problems of a model that 4 ranks cannot divide.
fn check_refusal<M: TensorParallelPlan>(
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    expected: &[&str],
) {
    on_ranks(4, |group| {
        let error = built(Some((&group, M::tensor_plan())), true, &new).map(drop).unwrap_err();
        let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!(problems, expected);
    });
}

#[test]
fn heads_that_ranks_do_not_divide() {
    let nearest = "take 4 or 8, or other ranks";
    let heads = format!("4 tensor ranks do not divide 6 heads: {nearest}");
    let keys = format!("4 tensor ranks do not divide 6 heads of keys and values: {nearest}");

    let options = Gpt2Options { n_head: 6, n_layer: 1, ..gpt2(53) };
    let expected = format!("transformer.h.0.attn: {heads}");
    check_refusal(|path| Gpt2LmHead::new(path, &options), &[&expected]);

    let layer = "model.layers.0.self_attn";
    let options = LlamaOptions { num_attention_heads: 6, num_hidden_layers: 1, ..llama(2) };
    check_refusal(|path| LlamaForCausalLm::new(path, &options), &[&format!("{layer}: {heads}")]);
    let options = LlamaOptions { num_hidden_layers: 1, ..llama(6) };
    check_refusal(|path| LlamaForCausalLm::new(path, &options), &[&format!("{layer}: {keys}")]);

    let options = BertOptions { num_attention_heads: 6, num_hidden_layers: 1, ..bert() };
    let expected = format!("bert.encoder.layer.0.attention.self: {heads}");
    check_refusal(|path| BertForSequenceClassification::new(path, &options), &[&expected]);
}

/// Compares what ranks write with what one rank writes.
fn check_texts<M>(ranks: usize, new: impl Fn(&ParamPath<'_>) -> M + Sync)
where
    M: TensorParallelPlan + CausalModel,
{
    // Without a seed one is drawn from the generator that all ranks share here, while others draw their models.
    let greedy = GenerationOptions { max_new_tokens: 8, seed: Some(3), ..Default::default() };
    let sampled =
        GenerationOptions { do_sample: true, temperature: 0.9, top_k: Some(20), ..greedy.clone() };
    let texts = |model: &Model<M>| -> Vec<Vec<i64>> {
        let ids = ids(53, 3, 6);
        let padding = Tensor::from_slice(&[0i64, 0, 1, 1, 1, 1]).expand([3, 6], true);
        let filtered = GenerationOptions {
            top_k: Some(5),
            top_p: 0.9,
            min_p: Some(0.001),
            seed: Some(4),
            ..sampled.clone()
        };
        let penalized =
            GenerationOptions { repetition_penalty: 1.3, seed: Some(6), ..filtered.clone() };
        // Sampling from the whole vocabulary, of which each rank computes its part.
        let any = GenerationOptions { top_k: None, seed: Some(8), ..sampled.clone() };
        let probable = GenerationOptions { min_p: Some(0.02), seed: Some(9), ..any.clone() };
        let unlike = GenerationOptions { repetition_penalty: 1.5, seed: Some(10), ..any.clone() };
        let nucleus = GenerationOptions { top_p: 0.8, seed: Some(11), ..any.clone() };
        let repeated = GenerationOptions { repetition_penalty: 2.0, ..greedy.clone() };
        let of_any = [&any, &probable, &unlike, &nucleus, &repeated];
        let all = [&greedy, &sampled, &filtered, &penalized].into_iter().chain(of_any);
        let written = all.flat_map(|options| {
            [None, Some(&padding)].map(|mask| options.generate(model, &ids, mask).unwrap())
        });
        written.map(|ids| Vec::try_from(ids.reshape([-1])).unwrap()).collect()
    };
    let mut whole = built(None, false, &new).unwrap();
    whole.eval();
    let expected = texts(&whole);
    for (place, text) in expected.iter().enumerate() {
        assert!(!expected[..place].contains(text), "each way writes a text of its own");
    }
    on_ranks(ranks, |group| {
        let mut model = built(Some((&group, M::tensor_plan())), false, &new).unwrap();
        model.eval();
        assert_eq!(texts(&model), expected);
    });
}

#[test]
fn generated_texts_are_those_of_the_whole_model() {
    // Large first values, so that logits are far from each other.
    let options = Gpt2Options { initializer_range: 0.5, ..gpt2(53) };
    for ranks in [2, 3] {
        check_texts(ranks, |path| Gpt2LmHead::new(path, &options));
    }
    for (ranks, keys) in [(2, 12), (4, 2)] {
        let options = LlamaOptions { initializer_range: 0.5, ..llama(keys) };
        check_texts(ranks, |path| LlamaForCausalLm::new(path, &options));
    }
}

/// Weights whose vocabulary another program has padded are refused with both sizes, and what to do.
#[test]
fn padding_of_a_vocabulary_is_told_from_another_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let padded = save(folder.path(), |path| Gpt2LmHead::new(path, &gpt2(128))).state_dict();
    let padded = Mutex::new(padded);
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(101));
    let refused = |mut model: Model<Gpt2LmHead>| {
        let error = Gpt2LmHead::load_pretrained(&mut model, folder.path().join("one")).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("the model has 101 tokens (vocab_size), the weights have 128"),
            "{error}"
        );
        assert!(
            error.contains("27 rows of padding") && error.ends_with("vocab_size 128"),
            "{error}"
        );
        let error = model.load_state_dict(&padded.lock().unwrap()).unwrap_err().to_string();
        assert!(
            error.contains("27 rows of padding") && error.contains("vocab_size 128"),
            "{error}"
        );
    };
    refused(built(None, false, &new).unwrap());
    on_ranks(2, |group| {
        refused(built(Some((&group, Gpt2LmHead::tensor_plan())), false, &new).unwrap());
    });
}

/// Predictions of a divided vocabulary are those of whole logits, and send a few numbers of each row.
#[test]
fn predictions_need_no_logits_of_other_ranks() {
    let options = Gpt2Options { initializer_range: 0.5, ..gpt2(53) };
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &options);
    let found = |model: &Model<Gpt2LmHead>| {
        let logits = model.module().vocabulary_logits(&ids(53, 3, 9)).unwrap();
        assert_eq!(logits.vocabulary(), 53);
        let (values, tokens) = logits.top_k(4).unwrap();
        (logits.argmax().unwrap(), tokens, super::values(&values), logits.is_divided())
    };
    let mut whole = built(None, false, &new).unwrap();
    whole.eval();
    let (first, tokens, values, is_divided) = found(&whole);
    assert!(!is_divided);
    assert_eq!(first, whole.forward(&ids(53, 3, 9)).unwrap().argmax(-1, false));
    let (first, tokens) = (super::values(&first), super::values(&tokens));
    on_ranks(3, |group| {
        let mut model = built(Some((&group, Gpt2LmHead::tensor_plan())), false, &new).unwrap();
        model.eval();
        let found = found(&model);
        assert!(found.3);
        assert_eq!(
            (super::values(&found.0), super::values(&found.1)),
            (first.clone(), tokens.clone())
        );
        assert_close(&found.2, &values, 1e-12, 1e-13);
    });

    let group = ProcessGroup::new(
        &brigade_torch::Store::hash().unwrap(),
        0,
        2,
        Backend::Fake,
        GroupOptions::default(),
    );
    let group = group.unwrap();
    let mut model = built(Some((&group, Gpt2LmHead::tensor_plan())), false, &new).unwrap();
    model.eval();
    let gathered = |options: &GenerationOptions| {
        group.reset_traffic();
        let _ = options.generate(&model, &ids(53, 3, 9), None).unwrap();
        group.traffic()["all_gather"].bytes
    };
    let greedy = GenerationOptions { max_new_tokens: 2, ..GenerationOptions::default() };
    // 16 bytes for each of 3 texts and candidates of the other rank, for each token.
    assert_eq!(gathered(&greedy), 2 * 3 * 16);
    let best =
        GenerationOptions { do_sample: true, top_k: Some(2), seed: Some(1), ..greedy.clone() };
    assert_eq!(gathered(&best), 2 * 3 * 16 * 3);
    let penalized = GenerationOptions { repetition_penalty: 1.2, ..greedy };
    assert_eq!(gathered(&penalized), 2 * 3 * 16);
    // The largest score and the sum of each row.
    let any = GenerationOptions { top_k: None, min_p: Some(0.1), ..best };
    assert_eq!(gathered(&any), 2 * 3 * 16);
    let nucleus = GenerationOptions { top_p: 0.9, ..any };
    assert!(gathered(&nucleus) >= 2 * 3 * 26 * 8);
}

fn save<M: Transformer>(folder: &Path, new: impl Fn(&ParamPath<'_>) -> M) -> Model<M> {
    let model = built(None, false, &new).unwrap();
    M::save_pretrained(&model, folder.join("one")).unwrap();
    M::save_pretrained_in_parts(&model, folder.join("parts"), 9000).unwrap();
    assert!(folder.join("parts/model.safetensors.index.json").exists());
    model
}

fn check_folders<M>(new: impl Fn(&ParamPath<'_>) -> M + Sync)
where
    M: Transformer + TensorParallelPlan,
{
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let state = Mutex::new(save(folder, &new).state_dict());
    for ranks in [2, 3] {
        on_ranks(ranks, |group| {
            for name in ["one", "parts"] {
                let tensor =
                    || TensorParallel { group: Some(group.clone()), plan: M::tensor_plan() };
                let builder = || Model::builder().kind(Kind::Double).tensor_parallel(tensor());
                let (name, mut found) = (folder.join(name), Vec::new());
                found.push(M::from_pretrained_as(&name, builder()).unwrap());
                let mut deferred = M::from_pretrained_as(&name, builder().deferred()).unwrap();
                assert!(deferred.is_deferred());
                deferred.materialize().unwrap();
                found.push(deferred);
                let built = builder().without_first_values();
                let mut built = built.build(|path: &ParamPath<'_>| new(path)).unwrap();
                M::load_pretrained(&mut built, &name).unwrap();
                found.push(built);
                for model in found {
                    assert!(!model.divided_parameters().is_empty());
                    let whole = model.whole_state_dict().unwrap();
                    same_state(&whole, &state.lock().unwrap());
                }
            }
        });
    }
}

#[test]
fn folders_of_whole_gpt2s_load_into_divided_ones() {
    for tie_word_embeddings in [true, false] {
        let options = Gpt2Options { tie_word_embeddings, ..gpt2(53) };
        check_folders(|path| Gpt2LmHead::new(path, &options));
    }
}

#[test]
fn folders_of_whole_llamas_and_berts_load_into_divided_ones() {
    // All ranks share the one head of keys.
    check_folders(|path| LlamaForCausalLm::new(path, &llama(1)));
    let classes = bert().with_classes(3);
    check_folders(|path| BertForSequenceClassification::new(path, &classes));
}

#[test]
fn divided_models_are_not_saved_as_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("gpt2");
    on_ranks(2, |group| {
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(53));
        let model = built(Some((&group, Gpt2LmHead::tensor_plan())), false, &new).unwrap();
        let error = Gpt2LmHead::save_pretrained(&model, &folder).unwrap_err().to_string();
        for part in ["save_pretrained", "`transformer.wte.weight`", "save_model"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!folder.exists());
    });
}

pub(in super::super) fn joined(world: &World) -> ProcessGroup {
    let store = match world.store.host {
        StoreHost::Rank0Fd(fd) => {
            TcpStore::server_on_socket(inherited_socket(fd).unwrap()).unwrap()
        }
        _ => TcpStore::client(&world.store.addr, world.store.port),
    };
    let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
    let (rank, ranks) = (world.rank.as_usize(), world.world_size.as_usize());
    ProcessGroup::new(&store.open().unwrap(), rank, ranks, gloo, GroupOptions::default()).unwrap()
}

/// Outputs and gradients of what every rank has whole are equal on all ranks, and each call drops other weights.
fn check_dropout<M>(group: &ProcessGroup, new: impl Fn(&ParamPath<'_>) -> M)
where
    M: TensorParallelPlan + for<'a> Module<Tokens<'a>, Output = Tensor>,
{
    let mut model = built(Some((group, M::tensor_plan())), false, &new).unwrap();
    let divided: Vec<String> =
        model.divided_parameters().into_iter().map(|part| part.name).collect();
    let ids = ids(41, 2, 9);
    let run = |model: &Model<M>| model.forward(Tokens::from(&ids)).unwrap();
    let outputs = [run(&model), run(&model)];
    backward(&outputs[0].square().sum(Kind::Double)).unwrap();
    let whole = model.parameters().into_iter().filter(|it| !divided.contains(&it.name));
    let gradients = whole.filter_map(|it| gradient(&it.tensor).unwrap());
    let mut compared: Vec<Tensor> = gradients.collect();
    assert!(compared.len() > 4);
    compared.extend(outputs.iter().map(Tensor::detach));
    model.eval();
    let evaluated = tch::no_grad(|| run(&model));
    for (left, right) in
        [(&outputs[0], &outputs[1]), (&outputs[0], &evaluated), (&outputs[1], &evaluated)]
    {
        assert!(!left.allclose(right, 1e-6, 1e-6, false));
    }
    for own in &compared {
        for theirs in group.all_gather(own).unwrap() {
            assert_eq!(&theirs, own);
        }
    }
}

dist_test!(
    world = 2,
    dist_dropout_of_attention_leaves_outputs_equal_on_all_ranks,
    |world: World| {
        let group = joined(&world);
        let range = 0.5;
        let options = Gpt2Options { attn_pdrop: 0.3, initializer_range: range, ..gpt2(53) };
        check_dropout(&group, |path| Gpt2LmHead::new(path, &options));
        // With dropout of what every rank has whole, too.
        let options = Gpt2Options { resid_pdrop: 0.2, embd_pdrop: 0.2, ..options };
        check_dropout(&group, |path| Gpt2LmHead::new(path, &options));
        for keys in [2, 1] {
            let options =
                LlamaOptions { attention_dropout: 0.3, initializer_range: range, ..llama(keys) };
            check_dropout(&group, |path| LlamaForCausalLm::new(path, &options));
        }
        let options = BertOptions {
            attention_probs_dropout_prob: 0.3,
            initializer_range: range,
            ..bert().with_classes(3)
        };
        check_dropout(&group, |path| BertForSequenceClassification::new(path, &options));
        group.barrier().unwrap();
    }
);
