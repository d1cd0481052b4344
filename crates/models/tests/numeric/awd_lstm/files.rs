//! Encoders and pretrained language models from files.

use std::path::Path;

use brigade_models::{
    AwdLstmModel, LanguageModel, PretrainedLanguageModel, TextClassifier, TextClassifierOptions,
    load_encoder, save_encoder,
};
use brigade_nn::{Model, StateDict, weights};
use brigade_test_device::on_device;
use tch::{Kind, Tensor};

use serde_json::Value;

use super::{
    assert_close, assert_tensor, build, filled, golden, numbers, small, small_language_model,
    values,
};

fn classifier() -> Model<TextClassifier> {
    let options = TextClassifierOptions {
        encoder: small(),
        hidden: vec![6],
        dropout: Some(vec![0.0]),
        ..TextClassifierOptions::default()
    };
    build(Kind::Float, |path| TextClassifier::new(path, 26, 2, &options))
}

fn language_model(words: i64, first_stream: u64) -> Model<LanguageModel> {
    let model = build(Kind::Float, |path| LanguageModel::new(path, words, &small_language_model()));
    filled(&model, first_stream);
    model
}

fn same(left: &StateDict, right: &StateDict) -> bool {
    left.names().eq(right.names())
        && left.iter().all(|(name, tensor)| right.get(name) == Some(tensor))
}

/// Compares the sum and the sum of absolute values of every name of the state dictionary, whose values were read.
fn assert_sums<M>(model: &Model<M>, expected: &Value) {
    let expected = expected.as_object().unwrap();
    let state = model.state_dict();
    assert_eq!(state.len(), expected.len());
    for (name, tensor) in state.iter() {
        let all = values(tensor);
        let sums = [all.iter().sum(), all.iter().map(|value| value.abs()).sum::<f64>()];
        assert_close(&sums, &numbers(&expected[name]), 1e-6 * (all.len() as f64).sqrt(), name);
    }
}

#[test]
fn an_encoder_goes_from_a_language_model_into_a_classifier() {
    let golden = golden();
    let golden = &golden["load_encoder"];
    let folder = tempfile::tempdir().unwrap();
    for name in ["encoder.pth", "encoder.safetensors"] {
        let file = folder.path().join(name);
        save_encoder(&language_model(26, 100), &file).unwrap();
        let saved: Vec<String> = serde_json::from_value(golden["saved_keys"].clone()).unwrap();
        let state = weights::load(&file).unwrap();
        let mut found: Vec<&str> = state.names().collect();
        let mut expected: Vec<&str> = saved.iter().map(String::as_str).collect();
        if name.ends_with("safetensors") {
            // The format has an order of its own.
            found.sort_unstable();
            expected.sort_unstable();
        }
        assert_eq!(found, expected);

        let mut model = classifier();
        let before = model.state_dict().deep_clone().unwrap();
        assert_eq!(load_encoder(&mut model, &file).unwrap(), saved.len());
        assert_sums(&model, &golden["final"]);
        let after = model.state_dict();
        let changed = after.iter().filter(|&(name, tensor)| before.get(name) != Some(tensor));
        let changed: Vec<&str> = changed.map(|(name, _)| name).collect();
        let expected: Vec<String> = serde_json::from_value(golden["changed"].clone()).unwrap();
        assert_eq!(changed, expected);
    }
    // The other direction: the decoder's weight is tied to the embedding, and gets the same values.
    let file = folder.path().join("back.pth");
    save_encoder(&classifier(), &file).unwrap();
    let mut model = language_model(26, 100);
    load_encoder(&mut model, &file).unwrap();
    let state = model.state_dict();
    assert_eq!(
        state.get("1.decoder.weight"),
        classifier().state_dict().get("0.module.encoder.weight")
    );
    assert_eq!(
        state.get("1.decoder.bias"),
        language_model(26, 100).state_dict().get("1.decoder.bias")
    );
}

#[test]
fn an_encoder_of_another_size_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("encoder.pth");
    save_encoder(&language_model(27, 0), &file).unwrap();
    let mut model = classifier();
    let before = model.state_dict().deep_clone().unwrap();
    let error = load_encoder(&mut model, &file).unwrap_err().to_string();
    assert!(
        error.contains("0.module.encoder.weight ([26, 8] in the model, [27, 8] in the weights)"),
        "{error}"
    );
    // A whole language model is not an encoder.
    language_model(26, 0).save_weights(&file).unwrap();
    let error = load_encoder(&mut model, &file).unwrap_err().to_string();
    assert!(error.contains("missing in the weights: 0.module.encoder.weight"), "{error}");
    assert!(same(&before, &model.state_dict()));
}

fn vocabulary(golden: &Value, name: &str) -> Vec<String> {
    serde_json::from_value(golden[name].clone()).unwrap()
}

/// As old versions of fastai wrote them: a copy of each raw weight, and the model beside an optimizer's state.
fn old_file(model: &Model<LanguageModel>, folder: &Path) -> std::path::PathBuf {
    let mut state = StateDict::new();
    for (name, tensor) in model.state_dict() {
        if let Some(layer) = name.strip_suffix(".weight_hh_l0_raw") {
            let copy = Tensor::zeros(tensor.size(), (tensor.kind(), tensor.device()));
            state.insert(format!("{layer}.module.weight_hh_l0"), copy).unwrap();
        }
        state.insert(name, tensor).unwrap();
    }
    let file = folder.join("old.pth");
    weights::save_pth(&state, &file).unwrap();
    file
}

#[test]
fn pretrained_words_are_matched_by_token() {
    let golden = golden();
    let golden = &golden["match_embeds"];
    let (old, new) = (vocabulary(golden, "old_vocab"), vocabulary(golden, "new_vocab"));
    let folder = tempfile::tempdir().unwrap();
    let file = old_file(&language_model(28, 200), folder.path());
    let pretrained = PretrainedLanguageModel::load(&file, old).unwrap();

    let mut model = language_model(26, 0);
    let report = pretrained.load_into(&mut model, &new).unwrap();
    assert_eq!((report.loaded, report.known, report.unknown.len()), (16, 9, 17));
    assert_eq!(report.unknown[..2], ["w1", "w2"]);
    assert!(report.unused.is_empty());
    let state = model.state_dict();
    assert_tensor(state.get("0.encoder.weight").unwrap(), &golden["embedding"], "embedding");
    assert_tensor(state.get("1.decoder.bias").unwrap(), &golden["decoder_bias"], "decoder_bias");
    assert_sums(&model, &golden["lm_final"]);

    let mut model = classifier();
    let report = pretrained.load_into(&mut model, &new).unwrap();
    assert_eq!(report.unused, ["1.decoder.weight", "1.decoder.bias"]);
    assert_sums(&model, &golden["classifier_final"]);
}

#[test]
fn a_vocabulary_that_does_not_fit_is_refused() {
    let golden = golden();
    let golden = &golden["match_embeds"];
    let (old, new) = (vocabulary(golden, "old_vocab"), vocabulary(golden, "new_vocab"));
    let state = || language_model(28, 200).state_dict();
    let error = PretrainedLanguageModel::new(state(), old[1..].to_vec()).unwrap_err().to_string();
    assert_eq!(
        error,
        "a vocabulary of 27 words does not fit the weights, whose `0.encoder.weight` has 28 rows: take the \
         vocabulary that they were trained with"
    );
    let pretrained = PretrainedLanguageModel::new(state(), old.clone()).unwrap();
    let mut model = language_model(26, 0);
    let before = model.state_dict().deep_clone().unwrap();
    let error = pretrained.load_into(&mut model, &new[1..]).unwrap_err().to_string();
    assert_eq!(error, "a vocabulary of 25 words does not fit the model, which has 26");

    // Names that another network has: fastai would copy them by position.
    let renamed = StateDict::new();
    let renamed = state().into_iter().fold(renamed, |mut renamed, (name, tensor)| {
        renamed.insert(name.replace("rnns.1", "rnns.7"), tensor).unwrap();
        renamed
    });
    let pretrained = PretrainedLanguageModel::new(renamed, old).unwrap();
    let error = pretrained.load_into(&mut model, &new).unwrap_err().to_string();
    assert!(error.contains("missing in the weights: 0.rnns.1.weight_hh_l0_raw"), "{error}");
    assert!(error.contains("unexpected in the weights: 0.rnns.7.weight_hh_l0_raw"), "{error}");
    assert!(same(&before, &model.state_dict()));
    let error =
        PretrainedLanguageModel::new(classifier().state_dict(), new).unwrap_err().to_string();
    assert!(error.starts_with("the weights have no table of words `0.encoder.weight`"), "{error}");
}

#[test]
fn hidden_states_belong_to_no_file() {
    let model = language_model(26, 0);
    let _ = model.forward(&on_device(&Tensor::from_slice(&[2i64, 3]).unsqueeze(0))).unwrap();
    assert_eq!(model.state_dict().len(), 16);
    assert_eq!(values(&model.module().encoder().state().hidden_state()[0].hidden).len(), 12);
}
