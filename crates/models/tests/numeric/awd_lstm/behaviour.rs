//! Dropouts, and what a hidden state does between batches and over a resume.

use brigade_models::{
    AwdLstm, AwdLstmDropout, AwdLstmOptions, LanguageModel, LanguageModelOptions,
};
use brigade_nn::{LstmState, Model};
use brigade_test_device::{numeric_device, on_device};
use brigade_torch::Autocast;
use tch::{Device, Kind, Tensor};

use super::{build, doc, small, small_language_model};

const NONE: AwdLstmDropout =
    AwdLstmDropout { embedding: 0.0, input: 0.0, weight: 0.0, hidden: 0.0, output: 0.0 };

fn with(dropout: AwdLstmDropout) -> AwdLstmOptions {
    AwdLstmOptions { dropout, ..small() }
}

fn words() -> Tensor {
    doc(0, 24).view([3, 8])
}

/// Where the gradient of the output's sum by the words' table is 0.
fn rows_without_gradient(dropout: AwdLstmDropout) -> Vec<bool> {
    let model = build(Kind::Double, |path| AwdLstm::new(path, 26, &with(dropout)));
    tch::manual_seed(3);
    model.forward(&words()).unwrap().sum(Kind::Double).backward();
    let gradient = model.module().embedding().grad();
    Vec::try_from(gradient.abs().sum_dim_intlist(1, false, Kind::Double).eq(0.0)).unwrap()
}

#[test]
fn words_are_dropped_whole() {
    let used: Vec<bool> = {
        let present = Vec::<i64>::try_from(words().view([-1])).unwrap();
        (0..26).map(|word| present.contains(&word)).collect()
    };
    let without = rows_without_gradient(NONE);
    assert!(used.iter().zip(&without).all(|(used, zero)| used != zero));
    let dropped = rows_without_gradient(AwdLstmDropout { embedding: 0.5, ..NONE });
    let lost = used.iter().zip(&dropped).filter(|(used, zero)| **used && **zero).count();
    let words = used.iter().filter(|used| **used).count();
    assert!(lost > 0 && lost < words, "{lost} of {words} words");
}

/// One mask for all time steps: with the input's dropout a number of a row is 0 always or never.
#[test]
fn masks_are_the_same_for_a_whole_sequence() {
    let options = LanguageModelOptions {
        encoder: with(AwdLstmDropout { output: 0.5, ..NONE }),
        ..LanguageModelOptions::default()
    };
    let model = build(Kind::Double, |path| LanguageModel::new(path, 26, &options));
    tch::manual_seed(1);
    let hidden = model.module().decoder_input(&words()).unwrap();
    let zero = hidden.eq(0.0);
    let (always, once) = (zero.all_dim(1, false), zero.any_dim(1, false));
    assert!(always.equal(&once));
    let share = always.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!(share > 0.2 && share < 0.8, "{share}");
    assert!(!always.get(0).equal(&always.get(1)), "rows have masks of their own");
}

#[test]
fn dropped_weights_get_no_gradient_and_stay_in_place() {
    let model = build(Kind::Double, |path| {
        AwdLstm::new(path, 26, &with(AwdLstmDropout { weight: 0.5, ..NONE }))
    });
    let raw =
        |name: &str| model.parameters().into_iter().find(|it| it.name == name).unwrap().tensor;
    let weight = raw("rnns.0.weight_hh_l0_raw");
    let before = weight.copy();
    tch::manual_seed(2);
    model.forward(&words()).unwrap().sum(Kind::Double).backward();
    let zero = weight.grad().eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!((zero - 0.5).abs() < 0.1, "{zero} of the weights have no gradient");
    assert_eq!(weight, before);
    let other = raw("rnns.0.module.weight_ih_l0").grad().eq(0.0).any();
    assert_eq!(other.int64_value(&[]), 0);
}

#[test]
fn evaluation_drops_nothing() {
    let all = AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::classifier() };
    let mut dropping = build(Kind::Double, |path| AwdLstm::new(path, 26, &all));
    let plain = build(Kind::Double, |path| AwdLstm::new(path, 26, &small()));
    assert_ne!(dropping.forward(&words()).unwrap(), plain.forward(&words()).unwrap());
    dropping.eval();
    dropping.module().state().reset();
    plain.module().state().reset();
    assert_eq!(dropping.forward(&words()).unwrap(), plain.forward(&words()).unwrap());
}

#[test]
fn a_saved_state_goes_on_bit_for_bit() {
    let model = build(Kind::Float, |path| LanguageModel::new(path, 26, &small_language_model()));
    let state = model.module().state().clone();
    let _ = model.forward(&words()).unwrap();
    let saved = state.hidden_state();
    let expected = model.forward(&doc(1, 24).view([3, 8])).unwrap();
    // Training continued, and the saved weights did not change.
    state.reset();
    state.set_hidden_state(saved).unwrap();
    assert_eq!(model.forward(&doc(1, 24).view([3, 8])).unwrap(), expected);
    assert!(state.hidden_state().iter().all(|layer| !layer.hidden.requires_grad()));
}

#[test]
fn a_state_of_another_model_is_refused() {
    let model = build(Kind::Float, |path| LanguageModel::new(path, 26, &small_language_model()));
    let state = model.module().state();
    let _ = model.forward(&words()).unwrap();
    let mut saved = state.hidden_state();
    saved.truncate(2);
    let error = state.set_hidden_state(saved.clone()).unwrap_err().to_string();
    assert_eq!(error, "a hidden state of 2 layers for a model of 3");
    saved.push(LstmState::zeros(1, 3, 12, &saved[0].hidden).unwrap());
    let error = state.set_hidden_state(saved).unwrap_err().to_string();
    assert!(
        error.starts_with("the hidden state of layer 2: expected two tensors of [1, 3, 8]"),
        "{error}"
    );
}

#[test]
fn outputs_are_kept_where_they_are_asked_for_and_handed_out_once() {
    let mut model =
        build(Kind::Double, |path| LanguageModel::new(path, 26, &small_language_model()));
    let state = model.module().state().clone();
    let _ = model.forward(&words()).unwrap();
    assert!(state.take_outputs().is_none());
    state.keep_outputs(true);
    let loss = model.forward(&words()).unwrap().square().mean(Kind::Double);
    let outputs = state.take_outputs().unwrap();
    assert_eq!((outputs.raw.size(), outputs.dropped.size()), (vec![3, 8, 8], vec![3, 8, 8]));
    let penalty = outputs.regularization(2.0, 1.0).unwrap();
    (loss + &penalty).backward();
    assert!(penalty.double_value(&[]) > 0.0);
    assert!(state.take_outputs().is_none());
    model.eval();
    let _ = model.forward(&words()).unwrap();
    assert!(state.take_outputs().is_none());
}

#[test]
fn sixteen_bits_compute_nearly_the_same() {
    let model = build(Kind::Float, |path| LanguageModel::new(path, 26, &small_language_model()));
    let exact = [words(), doc(1, 24).view([3, 8])].map(|words| model.forward(&words).unwrap());
    model.module().state().reset();
    let scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
    let short = [words(), doc(1, 24).view([3, 8])].map(|words| model.forward(&words).unwrap());
    drop(scope);
    for (exact, short) in exact.iter().zip(&short) {
        assert_eq!(short.kind(), Kind::BFloat16);
        let error = (exact - short).abs().max().double_value(&[]);
        assert!(error > 0.0 && error < 0.1, "{error}");
    }
    short[1].to_kind(Kind::Float).sum(Kind::Float).backward();
    for parameter in model.parameters() {
        let gradient = parameter.tensor.grad();
        assert!(gradient.defined() && gradient.kind() == Kind::Float, "{}", parameter.name);
    }
}

#[test]
fn a_word_outside_of_the_vocabulary_is_named_with_its_layer() {
    if super::is_real_gpu() {
        // On a GPU the kernel detects it, and ends all work of the process on the device.
        return;
    }
    let model =
        super::try_build(|path| LanguageModel::new(path, 26, &small_language_model())).unwrap();
    let error = model
        .forward(&on_device(&Tensor::from_slice(&[26i64])).unsqueeze(0))
        .unwrap_err()
        .to_string();
    // A device cannot be queried for the id after an error.
    let said = match numeric_device() {
        Device::Cpu => "0.encoder: id 26 at [0, 0] is beyond its table, which has the ids 0 to 25",
        _ => "0.encoder cannot take an input of [1, 1]: index out of range",
    };
    assert!(error.starts_with(said), "{error}");
}

#[test]
fn words_beyond_the_vocabulary_are_named() {
    // On a GPU they would end the tests.
    let model = Model::builder().device(Device::Cpu).build(|path| AwdLstm::new(path, 26, &small()));
    let ids = Tensor::from_slice(&[7i64, 8, 9, 25, 3, 26]).view([2, 3]);
    let error = model.unwrap().forward(&ids).unwrap_err().to_string();
    assert!(error.starts_with("encoder: id 26 at [1, 2] is beyond its table"), "{error}");
}
