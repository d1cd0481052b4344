//! Architectures whose parameters get their memory later have the first values that a seed gives at once.

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertOptions, Cnn, Gpt2LmHead, Gpt2Options,
    LanguageModel, LanguageModelOptions, LlamaForCausalLm, LlamaOptions, XResNet, XResNetOptions,
    convnext_tiny, resnet18, vit_tiny,
};
use brigade_nn::{Model, ParamPath};
use brigade_torch::{has_memory, rng_state};
use tch::Device;

/// Builds a model at once and deferred, from the same seed.
fn check<M>(name: &str, new: impl Fn(&ParamPath<'_>) -> M) {
    tch::manual_seed(3);
    let plain = Model::new(&new).unwrap();
    let after = rng_state(Device::Cpu).unwrap();
    tch::manual_seed(3);
    let mut model = Model::deferred(&new).unwrap();
    assert!(model.parameters().iter().all(|it| !has_memory(&it.tensor)), "{name}");
    model.materialize().unwrap();
    let all = |model: &Model<M>| {
        model.parameters().into_iter().chain(model.buffers()).collect::<Vec<_>>()
    };
    for (found, expected) in all(&model).iter().zip(all(&plain)) {
        assert!(found.tensor.equal(&expected.tensor), "{name}: {}", found.name);
    }
    assert_eq!(rng_state(Device::Cpu).unwrap(), after, "{name}");
}

#[test]
fn a_seed_gives_the_same_first_values() {
    let gpt2 = Gpt2Options {
        vocab_size: 20,
        n_positions: 8,
        n_embd: 8,
        n_layer: 2,
        n_head: 2,
        ..Default::default()
    };
    check("gpt2", |path| Gpt2LmHead::new(path, &gpt2));
    let llama = LlamaOptions {
        vocab_size: 20,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        pad_token_id: Some(3),
        ..Default::default()
    };
    check("llama", |path| LlamaForCausalLm::new(path, &llama));
    for tie_word_embeddings in [true, false] {
        let bert = BertOptions {
            vocab_size: 20,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            max_position_embeddings: 8,
            tie_word_embeddings,
            ..Default::default()
        };
        check("bert", |path| BertForMaskedLm::new(path, &bert));
        check("bert classifier", |path| BertForSequenceClassification::new(path, &bert));
    }
    let mut language = LanguageModelOptions::default();
    language.encoder.embedding = 6;
    language.encoder.hidden = 10;
    check("awd-lstm", |path| LanguageModel::new(path, 20, &language));
    check("cnn", Cnn::new);
    check("resnet", resnet18(3));
    check("xresnet", |path| {
        XResNet::new(
            path,
            3,
            XResNetOptions { self_attention: true, ..XResNetOptions::basic([1, 1, 1, 1]) },
        )
    });
    check("convnext", convnext_tiny(3));
    check("vit", vit_tiny(3));
}
