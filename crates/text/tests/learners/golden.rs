//! Trainings of fastai 2.8.12, with gradual unfreezing; files of encoders and pretrained models; text that goes on.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_learn::Learner;
use brigade_learn::callback::{Callback, Step};
use brigade_learn::{LearnerState, Rates};
use brigade_text::{
    Generate, LanguageLearnerOptions, TextLearner, TextLoaders, language_model_learner,
};
use brigade_tokens::TextSource;
use serde_json::Value;

use crate::setup::*;

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/learners.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn lengths(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

/// What a fit did.
#[derive(Debug, Default)]
struct Seen {
    rates: Vec<Vec<f64>>,
    momenta: Vec<Vec<f64>>,
    backward: Vec<f64>,
}

#[derive(Debug)]
struct Watch(Rc<RefCell<Seen>>);

impl Callback for Watch {
    fn order(&self) -> i32 {
        100
    }

    fn before_backward(&mut self, learner: &mut LearnerState) -> Step {
        let mut seen = self.0.borrow_mut();
        seen.rates.push(learner.hypers().iter().map(|hyper| hyper.lr).collect());
        seen.momenta.push(learner.hypers().iter().map(|hyper| hyper.momentum).collect());
        seen.backward.push(learner.loss_for_backward().unwrap().double_value(&[]));
        Ok(())
    }
}

#[track_caller]
fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} {expected:?}");
    for (found, expected) in found.iter().zip(expected) {
        let apart = (found - expected).abs();
        assert!(apart <= tolerance * expected.abs().max(1.0), "{what}: {found} {expected}");
    }
}

fn rates(value: &Value) -> Rates {
    match value.get("slice") {
        None => value.as_f64().unwrap().into(),
        Some(range) => {
            let range = numbers(range);
            (range[0]..range[1]).into()
        }
    }
}

/// Calls the Learner as the case does, and compares each fit.
fn calls(learner: &mut Learner, case: &Value) {
    let noise = case["noise"]["loss"].as_f64().unwrap();
    // The schedules' positions are in float32 there.
    let schedule = 1e-6;
    let mut fits = case["fits"].as_array().unwrap().iter();
    for call in case["calls"].as_array().unwrap() {
        let (name, with) = (call[0].as_str().unwrap(), &call[1]);
        let epochs = || with["n_epoch"].as_u64().unwrap() as usize;
        let seen = Rc::new(RefCell::new(Seen::default()));
        let watch = Watch(Rc::clone(&seen));
        match name {
            "freeze" => learner.freeze().unwrap(),
            "unfreeze" => learner.unfreeze().unwrap(),
            "freeze_to" => learner.freeze_to(with["n"].as_i64().unwrap() as isize).unwrap(),
            "fit" => learner.fit(epochs(), rates(&with["lr"]), watch).unwrap(),
            "fit_one_cycle" => {
                learner.fit_one_cycle(epochs(), rates(&with["lr_max"]), watch).unwrap();
            }
            other => panic!("there is no call {other}"),
        }
        if !name.starts_with("fit") {
            continue;
        }
        let expected = fits.next().unwrap();
        let what = |part: &str| format!("{} {name} {part}", case["name"]);
        let seen = seen.take();
        for (key, found) in [("lr", &seen.rates), ("mom", &seen.momenta)] {
            let steps = expected[key].as_array().unwrap();
            assert_eq!(found.len(), steps.len());
            for (found, expected) in found.iter().zip(steps) {
                close(found, &numbers(expected), schedule, &what(key));
            }
        }
        let tolerance = 4.0 * noise + 1e-6;
        close(learner.recorder().losses(), &numbers(&expected["loss"]), tolerance, &what("loss"));
        close(&seen.backward, &numbers(&expected["backward_loss"]), tolerance, &what("backward"));
        let smooth = numbers(&expected["smooth_loss"]);
        close(learner.recorder().smooth_losses(), &smooth, tolerance, &what("smooth"));
        let trainable: Vec<String> = learner
            .parameters()
            .into_iter()
            .filter(|it| it.tensor.requires_grad())
            .map(|it| it.name)
            .collect();
        let names: Vec<String> = serde_json::from_value(expected["trainable"].clone()).unwrap();
        assert_eq!(trainable, names, "{}", what("trainable"));
        let epochs = expected["epochs"].as_array().unwrap();
        assert_eq!(learner.recorder().rows().len(), epochs.len());
        for (row, expected) in learner.recorder().rows().iter().zip(epochs) {
            let found: Vec<f64> = row.values.iter().map(|value| value.unwrap()).collect();
            let expected = numbers(expected);
            let same = if is_language_model(case) { expected.len() } else { 1 };
            close(&found[..same], &expected[..same], 2e-5 + 4.0 * noise, &what("epoch"));
        }
    }
}

fn is_language_model(case: &Value) -> bool {
    case["kind"] == "language_model"
}

/// The text to validate classifiers with whose last word fastai does not read: padding at the end of a longer one
/// makes it take the part for one without words of the shortest. Loss and metrics of the set differ by it.
const UNREAD: usize = 4;

/// The sums of all values of the model.
#[track_caller]
fn ends(learner: &Learner, expected: &Value, tolerance: f64) {
    let state = learner.state_dict();
    let expected = expected.as_object().unwrap();
    assert_eq!(state.len(), expected.len());
    for (name, tensor) in state.iter() {
        let [sum, size] = sums(tensor);
        let values = numbers(&expected[name]);
        let apart = (sum - values[0]).abs().max((size - values[1]).abs());
        assert!(apart <= tolerance * values[1].max(1.0), "{name}: {sum} {size} {values:?}");
    }
}

#[test]
fn trainings_are_fastais() {
    let accelerator = alone();
    for case in golden()["learners"]["cases"].as_array().unwrap() {
        let size = |key: &str| case[key].as_u64().unwrap() as usize;
        let (train, valid) = (lengths(&case["train_lens"]), lengths(&case["valid_lens"]));
        let (batch, seq_len) = (size("bs"), size("seq_len"));
        let penalty = |key: &str, default: f64| case["args"][key].as_f64().unwrap_or(default);
        let (alpha, beta) = (penalty("alpha", 2.0), penalty("beta", 1.0));
        let mut learner = match case["kind"].as_str().unwrap() {
            "language_model" => {
                let data = language_data(&accelerator, &train, &valid, batch, seq_len);
                let options = LanguageLearnerOptions { alpha, beta, ..language_options() };
                language_learner(&accelerator, data, options)
            }
            _ => {
                let classes = size("n_out");
                let data = labelled_data(&accelerator, &train, &valid, batch, seq_len, classes);
                let options =
                    brigade_text::TextLearnerOptions { alpha, beta, ..classifier_options(seq_len) };
                classifier_learner(&accelerator, data, options)
            }
        };
        calls(&mut learner, case);
        let noise = &case["noise"];
        ends(&learner, &case["final"], 4.0 * noise["final"].as_f64().unwrap() + 1e-6);
        let tolerance = 4.0 * noise["loss"].as_f64().unwrap() + 2e-5;
        if is_language_model(case) {
            let found = learner.validate().unwrap();
            let metrics = found.metrics.iter().map(|it| it.1);
            let found: Vec<f64> = [found.loss].into_iter().chain(metrics).collect();
            close(&found, &numbers(&case["validate"]), tolerance, "validate");
        }
        if let Some(expected) = case.get("get_preds") {
            // In the order of the data, though the longest text is predicted first.
            let found = learner.predictions().unwrap();
            let rows = |tensor: &tch::Tensor| -> Vec<Vec<f64>> {
                let table = tensor.to_kind(tch::Kind::Double).view([valid.len() as i64, -1]);
                table.try_into().unwrap()
            };
            let of = |index: usize| -> Vec<Vec<f64>> {
                let list = expected[index].as_array().unwrap();
                let row = |value: &Value| match value.as_array() {
                    Some(_) => numbers(value),
                    None => vec![value.as_f64().unwrap()],
                };
                list.iter().map(row).collect()
            };
            let targets = found.targets.unwrap();
            assert_eq!(rows(&targets), of(1));
            let parts = [(&found.predictions, 0), (&found.decoded, 2), (&found.losses.unwrap(), 3)];
            for (tensor, index) in parts {
                for (row, (found, expected)) in rows(tensor).iter().zip(of(index)).enumerate() {
                    if row != UNREAD {
                        close(found, &expected, 4.0 * tolerance, &format!("text {row}"));
                    }
                }
            }
        }
    }
}

#[test]
fn an_encoder_goes_from_a_language_model_to_a_classifier() {
    let golden = golden();
    let expected = &golden["learners"]["load_encoder"];
    let accelerator = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("encoder.pth");
    let data = language_data(&accelerator, &[23, 41], &[30], 2, 6);
    let language_model = language_learner(&accelerator, data, language_options());
    fill(&language_model, 100);
    language_model.save_encoder(&file).unwrap();
    let saved = brigade_nn::weights::load(&file).unwrap();
    let keys: Vec<String> = serde_json::from_value(expected["saved_keys"].clone()).unwrap();
    assert_eq!(saved.names().collect::<Vec<_>>(), keys);

    let data = labelled_data(&accelerator, &[12, 5, 9, 20], &[10, 4], 2, 5, 3);
    let mut options = classifier_options(5);
    options.model.dropout = None;
    options.model.encoder.dropout.output = 0.4;
    let mut classifier = classifier_learner(&accelerator, data, options);
    let before = classifier.state_dict().deep_clone().unwrap();
    classifier.load_encoder(&file).unwrap();
    let found: Vec<&str> =
        expected["final"].as_object().unwrap().keys().map(String::as_str).collect();
    let state = classifier.state_dict();
    let mut names: Vec<&str> = state.names().collect();
    names.sort_unstable();
    let mut found = found;
    found.sort_unstable();
    assert_eq!(names.len(), found.len(), "{names:?} {found:?}");
    let changed: Vec<&str> = state
        .iter()
        .filter(|(name, it)| before.get(name).unwrap() != *it)
        .map(|(name, _)| name)
        .collect();
    let expected_changes: Vec<&str> =
        expected["changed"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(changed, expected_changes);
    assert_eq!(classifier.frozen_groups() as u64, expected["frozen_idx"].as_u64().unwrap());
    // What no encoder fits is refused, and changes nothing.
    let missing = classifier.load_encoder(folder.path().join("absent.pth")).unwrap_err();
    assert!(missing.to_string().contains("absent.pth"), "{missing}");
}

#[test]
fn text_goes_on_as_fastais() {
    let golden = golden();
    let expected = &golden["learners"]["predict"];
    let rows: Vec<(String, String, String, bool)> =
        serde_json::from_value(golden["rows"].clone()).unwrap();
    let valid: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].3).collect();
    let texts: Vec<String> = rows.into_iter().map(|(text, ..)| text).collect();
    let accelerator = alone();
    let data = TextLoaders::from_source(move || TextSource::memory(texts))
        .language_model()
        .valid_indices(valid)
        .seq_len(6)
        .min_freq(1)
        .shuffle(false)
        .loaders(&accelerator, 2)
        .unwrap();
    let vocabulary: Vec<String> = serde_json::from_value(expected["vocab"].clone()).unwrap();
    assert_eq!(data.vocabulary.tokens().collect::<Vec<_>>(), vocabulary);
    let mut learner =
        language_model_learner(&accelerator, data, language_options()).unwrap().quiet(true);
    fill(&learner, 0);
    learner.fit(12, 3e-2, ()).unwrap();
    let last = &learner.recorder().rows().last().unwrap().values;
    let last: Vec<f64> = last.iter().map(|value| value.unwrap()).collect();
    close(&last, &numbers(&expected["last_epoch"]), 1e-4, "last epoch");
    for case in expected["cases"].as_array().unwrap() {
        let with = &case["args"];
        let options = Generate {
            // The file takes the most probable word for a drawn one.
            temperature: 0.0,
            min_p: with["min_p"].as_f64(),
            only_last_word: with["only_last_word"].as_bool().unwrap_or(false),
            ..Generate::default()
        };
        let words = case["n_words"].as_u64().unwrap() as usize;
        let found = learner.generate(case["text"].as_str().unwrap(), words, &options).unwrap();
        assert_eq!(found, case["result"].as_str().unwrap(), "{case}");
    }
}
