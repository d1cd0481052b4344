//! Folders with a config and weights.

use std::fs;

use brigade_models::{
    Bert, BertForMaskedLm, BertForSequenceClassification, BertOptions, Gpt2, Gpt2LmHead,
    Gpt2Options, LlamaForCausalLm, LlamaOptions, Transformer, TransformerOptions,
};
use brigade_nn::{StateDict, weights};
use tch::{Kind, Tensor};

use super::common::{Inputs, builder, fill_all, filled, golden, options};

#[test]
fn whole_models_bodies_and_heads_load_from_each_other() {
    let (golden, inputs) = (golden(), Inputs::new());
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let case = &golden["models"]["gpt2"];
    let model = filled(case, Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    Gpt2LmHead::save_pretrained(&model, folder).unwrap();
    // The head is the embedding, and is written once.
    let names: Vec<String> = weights::load(folder.join("model.safetensors"))
        .unwrap()
        .names()
        .map(str::to_owned)
        .collect();
    assert_eq!(names.len(), 28);
    assert!(!names.contains(&"lm_head.weight".to_owned()));
    let mut again = Gpt2LmHead::from_pretrained_as(folder, builder()).unwrap();
    again.eval();
    assert_eq!(again.module().options(), model.module().options());
    assert_eq!(again.forward(&inputs.ids).unwrap(), model.forward(&inputs.ids).unwrap());

    let body = Gpt2::from_pretrained_as(folder, builder()).unwrap();
    Gpt2::save_pretrained(&body, folder).unwrap();
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    assert!(config.contains("GPT2Model") && config.contains("\"gelu_new\""), "{config}");
    let mut again = Gpt2LmHead::from_pretrained_as(folder, builder()).unwrap();
    again.eval();
    assert_eq!(again.forward(&inputs.ids).unwrap(), model.forward(&inputs.ids).unwrap());

    // A classifier from a language model: the head and the pooler are new.
    let case = &golden["models"]["bert_masked_lm"];
    let language = filled(case, Kind::Float, |path, options| BertForMaskedLm::new(path, options));
    BertForMaskedLm::save_pretrained(&language, folder).unwrap();
    let options = options::<BertOptions>(case).with_classes(5);
    let mut classifier =
        builder().build(|path| BertForSequenceClassification::new(path, &options)).unwrap();
    let report = BertForSequenceClassification::load_pretrained(&mut classifier, folder).unwrap();
    assert_eq!(
        report.head,
        [
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
            "classifier.weight",
            "classifier.bias"
        ]
    );
    assert_eq!(report.unused.len(), 5, "{:?}", report.unused);
    assert_eq!(report.loaded, 37);
    // New parameters have initial values.
    let other = BertForSequenceClassification::from_pretrained_as(folder, builder()).unwrap();
    let state = other.state_dict();
    let classifier_weight = state.get("classifier.weight").unwrap();
    assert_eq!(classifier_weight.size(), [3, 32]);
    assert!(classifier_weight.abs().max().double_value(&[]) > 0.0);
    // The other direction: the language model's head is not in the classifier's file.
    BertForSequenceClassification::save_pretrained(&classifier, folder).unwrap();
    let mut body = builder().build(|path| Bert::new(path, &options)).unwrap();
    let report = Bert::load_pretrained(&mut body, folder).unwrap();
    assert_eq!((report.loaded, report.renamed), (39, 39));
    assert_eq!(report.unused, ["classifier.weight", "classifier.bias"]);
    let read = BertOptions::from_folder(folder).unwrap();
    assert_eq!(read, options);
}

#[test]
fn parts_of_a_maximal_size_are_read_and_replaced() {
    let (golden, inputs) = (golden(), Inputs::new());
    let folder = tempfile::tempdir().unwrap();
    let case = &golden["models"]["llama"];
    let model = filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options));
    let expected = model.forward(&inputs.ids).unwrap();
    let files = || {
        let entries = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|it| it.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    LlamaForCausalLm::save_pretrained(&model, folder.path()).unwrap();
    assert_eq!(files(), ["config.json", "model.safetensors"]);
    LlamaForCausalLm::save_pretrained_in_parts(&model, folder.path(), 30_000).unwrap();
    assert_eq!(files().len(), 5, "{:?}", files());
    assert!(!files().contains(&"model.safetensors".to_owned()));
    let mut again = LlamaForCausalLm::from_pretrained_as(folder.path(), builder()).unwrap();
    again.eval();
    assert_eq!(again.forward(&inputs.ids).unwrap(), expected);
    // A part that lacks a tensor of the index.
    let part = folder.path().join("model-00001-of-00003.safetensors");
    let mut state = StateDict::new();
    state.insert("other", Tensor::from(0f32)).unwrap();
    weights::save(&state, &part).unwrap();
    let found =
        LlamaForCausalLm::from_pretrained_as(folder.path(), builder()).unwrap_err().to_string();
    assert!(
        found.contains("is not in model-00001-of-00003.safetensors, where it is to be"),
        "{found}"
    );
    LlamaForCausalLm::save_pretrained(&model, folder.path()).unwrap();
    assert_eq!(files(), ["config.json", "model.safetensors"]);
    let builder = builder().kind(Kind::Double);
    let double = LlamaForCausalLm::from_pretrained_as(folder.path(), builder).unwrap();
    for (own, double) in model.parameters().iter().zip(double.parameters()) {
        assert_eq!(own.tensor.to_kind(Kind::Double), double.tensor);
    }
}

#[test]
fn old_names_and_buffers_are_understood() {
    let golden = golden();
    let case = &golden["models"]["bert_classifier"];
    let model = filled(case, Kind::Float, |path, options| {
        BertForSequenceClassification::new(path, options)
    });
    let mut old = StateDict::new();
    for (name, tensor) in model.state_dict() {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        old.insert(name.replace("LayerNorm.bias", "LayerNorm.beta"), tensor).unwrap();
    }
    old.insert("bert.embeddings.position_ids", Tensor::arange(40, tch::kind::INT64_CPU)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("old.safetensors");
    weights::save(&old, &file).unwrap();
    let options: BertOptions = options(case);
    let mut other =
        builder().build(|path| BertForSequenceClassification::new(path, &options)).unwrap();
    let report = BertForSequenceClassification::load_pretrained(&mut other, &file).unwrap();
    assert_eq!((report.loaded, report.renamed, report.unused.len()), (41, 10, 0));
    for (left, right) in model.parameters().iter().zip(other.parameters()) {
        assert_eq!(left.tensor, right.tensor, "{}", left.name);
    }
}

#[test]
fn weights_that_do_not_fit_change_nothing_and_are_named() {
    let golden = golden();
    let folder = tempfile::tempdir().unwrap();
    let case = &golden["models"]["gpt2"];
    let model = filled(case, Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    Gpt2LmHead::save_pretrained(&model, folder.path()).unwrap();
    let own: Gpt2Options = options(case);
    let refused = |options: Gpt2Options| {
        let mut model = builder().build(|path| Gpt2LmHead::new(path, &options)).unwrap();
        fill_all(&model);
        let before = model.state_dict().deep_clone().unwrap();
        let error = Gpt2LmHead::load_pretrained(&mut model, folder.path()).unwrap_err();
        for ((name, left), (_, right)) in before.iter().zip(model.state_dict().iter()) {
            assert_eq!(left, right, "{name}");
        }
        error.to_string()
    };
    let found = refused(Gpt2Options { vocab_size: 60, ..own.clone() });
    assert!(found.contains("the model has 60 tokens (vocab_size), the weights have 50"), "{found}");
    let found = refused(Gpt2Options { n_layer: 1, ..own.clone() });
    assert!(found.contains("unexpected in the weights: transformer.h.1.ln_1.weight"), "{found}");
    let found = refused(Gpt2Options { n_layer: 3, ..own.clone() });
    assert!(found.contains("missing in the weights: transformer.h.2.ln_1.weight"), "{found}");
    let found = refused(Gpt2Options { n_positions: 41, ..own });
    assert!(found.contains("transformer.wpe.weight ([41, 32] in the model, [40, 32]"), "{found}");
    let empty = tempfile::tempdir().unwrap();
    let found = Gpt2LmHead::from_pretrained(empty.path()).unwrap_err().to_string();
    assert!(found.contains("config.json"), "{found}");
    fs::write(empty.path().join("config.json"), "{\"n_layer\": 1,").unwrap();
    let found = Gpt2LmHead::from_pretrained(empty.path()).unwrap_err().to_string();
    assert!(found.contains("the config cannot be read"), "{found}");
}

#[test]
fn configs_keep_what_they_do_not_know() {
    let text = r#"{"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"type": "llama3",
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}, "eos_token_id": [128001, 128009],
        "torch_dtype": "bfloat16", "my_entry": {"a": 1}}"#;
    let options = LlamaOptions::from_config(serde_json::from_str(text).unwrap()).unwrap();
    assert_eq!(options.rope_theta, 500_000.0);
    assert_eq!(options.eos_token_id, [128_001, 128_009]);
    assert_eq!(options.rope_scaling.unwrap().factor, 8.0);
    let config = options.to_config();
    assert_eq!(config["my_entry"]["a"], 1);
    assert!(!config.contains_key("torch_dtype"));
    assert_eq!(config["rope_parameters"]["rope_type"], "llama3");
    assert_eq!(LlamaOptions::from_config(config).unwrap(), options);
}
