//! Trainings of fastai 2.8.12, with gradual unfreezing; files of encoders and pretrained models; text that goes on.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use brigade_learn::callback::{Callback, Step};
use brigade_learn::{Learner, LearnerState, Rates, Recorder};
use brigade_test_device::{changes, perturb};
use brigade_text::{
    Generate, LanguageLearnerOptions, TextLearner, TextLearnerOptions, TextLoaders,
    language_model_learner,
};
use brigade_tokens::TextSource;
use brigade_train::Accelerator;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::setup::*;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../golden/learners.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn lengths(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

/// What a fit did.
#[derive(Debug, Default)]
struct Fit {
    rates: Vec<Vec<f64>>,
    momenta: Vec<Vec<f64>>,
    backward: Vec<f64>,
    trainable: Vec<String>,
    recorder: Recorder,
}

/// Notes what a fit does; perturbs all weights before each batch where a seed is given.
#[derive(Debug)]
struct Watch {
    fit: Rc<RefCell<Fit>>,
    seed: Option<u64>,
}

impl Callback for Watch {
    fn order(&self) -> i32 {
        100
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        if let Some(seed) = self.seed.as_mut().filter(|_| learner.is_training()) {
            *seed += 1;
            perturb(learner.parameters().into_iter().map(|it| it.tensor), *seed);
        }
        Ok(())
    }

    fn before_backward(&mut self, learner: &mut LearnerState) -> Step {
        let mut fit = self.fit.borrow_mut();
        fit.rates.push(learner.hypers().iter().map(|hyper| hyper.lr).collect());
        fit.momenta.push(learner.hypers().iter().map(|hyper| hyper.momentum).collect());
        fit.backward.push(learner.loss_for_backward().unwrap().double_value(&[]));
        Ok(())
    }
}

/// What all calls of a case leave.
#[derive(Debug)]
struct Outcome {
    fits: Vec<Fit>,
    /// The sum and the sum of absolute values of each tensor of the model.
    last: BTreeMap<String, [f64; 2]>,
    /// The loss and the metrics of a language model's validation.
    validation: Vec<f64>,
    /// Predictions, targets, decisions and losses: the rows of each.
    predictions: Option<[Vec<Vec<f64>>; 4]>,
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

fn is_language_model(case: &Value) -> bool {
    case["kind"] == "language_model"
}

/// The text to validate classifiers with whose last word fastai does not read: padding at the end of a longer one
/// makes it take the part for one without words of the shortest. Loss and metrics of the set differ by it.
const UNREAD: usize = 4;

/// The Learner of a case, with the golden file's weights.
fn learner_of(accelerator: &Accelerator, case: &Value) -> Learner {
    let size = |key: &str| case[key].as_u64().unwrap() as usize;
    let (train, valid) = (lengths(&case["train_lens"]), lengths(&case["valid_lens"]));
    let (batch, seq_len) = (size("bs"), size("seq_len"));
    let penalty = |key: &str, default: f64| case["args"][key].as_f64().unwrap_or(default);
    let (alpha, beta) = (penalty("alpha", 2.0), penalty("beta", 1.0));
    if is_language_model(case) {
        let data = language_data(accelerator, &train, &valid, batch, seq_len);
        let options = LanguageLearnerOptions { alpha, beta, ..language_options() };
        language_learner(accelerator, data, options)
    } else {
        let classes = size("n_out");
        let data = labelled_data(accelerator, &train, &valid, batch, seq_len, classes);
        let options = TextLearnerOptions { alpha, beta, ..classifier_options(seq_len) };
        classifier_learner(accelerator, data, options)
    }
}

/// Makes all calls of a case, with weights that are perturbed at the start and before each batch where a seed is given.
fn make(accelerator: &Accelerator, case: &Value, seed: Option<u64>) -> Outcome {
    // So small that threads only wait for each other; fastai's runs had one thread, too.
    tch::set_num_threads(1);
    let mut learner = learner_of(accelerator, case);
    if let Some(seed) = seed {
        perturb(learner.parameters().into_iter().map(|it| it.tensor), 10_000 * seed);
    }
    let mut fits = Vec::new();
    for (place, call) in case["calls"].as_array().unwrap().iter().enumerate() {
        let (name, with) = (call[0].as_str().unwrap(), &call[1]);
        let epochs = || with["n_epoch"].as_u64().unwrap() as usize;
        let fit = Rc::new(RefCell::new(Fit::default()));
        let seed = seed.map(|seed| 10_000 * seed + 1000 * (1 + place as u64));
        let watch = Watch { fit: Rc::clone(&fit), seed };
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
        let mut fit = fit.take();
        fit.recorder = learner.recorder().clone();
        let trainable = learner.parameters().into_iter().filter(|it| it.tensor.requires_grad());
        fit.trainable = trainable.map(|it| it.name).collect();
        fits.push(fit);
    }
    let state = learner.state_dict();
    let last = state.iter().map(|(name, tensor)| (name.to_owned(), sums(tensor))).collect();
    let validation = if is_language_model(case) {
        let found = learner.validate().unwrap();
        [found.loss].into_iter().chain(found.metrics.iter().map(|it| it.1)).collect()
    } else {
        Vec::new()
    };
    let predictions = case.get("get_preds").map(|_| {
        // In the order of the data, although the longest text is predicted first.
        let found = learner.predictions().unwrap();
        let rows = |tensor: &Tensor| -> Vec<Vec<f64>> {
            let table = tensor.to_kind(Kind::Double);
            table.view([table.size()[0], -1]).try_into().unwrap()
        };
        let (targets, losses) = (found.targets.unwrap(), found.losses.unwrap());
        [&found.predictions, &targets, &found.decoded, &losses].map(rows)
    });
    Outcome { fits, last, validation, predictions }
}

/// How many times the change in perturbed runs is allowed: fastai's was rounded otherwise, and so is ours.
const TIMES: f64 = 5.0;

/// How far lists of numbers may be from the golden ones: what perturbed runs show, and the rounding of `f32`.
fn allowed(found: &[f64], perturbed: &[&[f64]]) -> Vec<f64> {
    changes(found, perturbed).into_iter().map(|it| TIMES * it + 1e-6).collect()
}

/// Compares each number, relative to those above 1.
#[track_caller]
fn within(found: &[f64], expected: &[f64], allowed: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} {expected:?}");
    for ((found, expected), allowed) in found.iter().zip(expected).zip(allowed) {
        assert!(*allowed < 0.01, "{what}: perturbed runs are too far apart to compare: {allowed}");
        let apart = (found - expected).abs();
        assert!(apart <= allowed * expected.abs().max(1.0), "{what}: {found} {expected} {allowed}");
    }
}

/// Compares the fits of a case; `perturbed` are the same calls with perturbed weights.
fn compare_fits(case: &Value, ours: &Outcome, perturbed: &[Outcome]) {
    // The schedules' positions are in float32 there.
    let schedule = 1e-6;
    let fits = case["fits"].as_array().unwrap();
    assert_eq!(ours.fits.len(), fits.len());
    for (at, (fit, expected)) in ours.fits.iter().zip(fits).enumerate() {
        let what = |part: &str| format!("{} fit {at} {part}", case["name"]);
        for (key, found) in [("lr", &fit.rates), ("mom", &fit.momenta)] {
            let steps = expected[key].as_array().unwrap();
            assert_eq!(found.len(), steps.len());
            for (found, expected) in found.iter().zip(steps) {
                close(found, &numbers(expected), schedule, &what(key));
            }
        }
        type List = fn(&Fit) -> &[f64];
        let lists: [(&str, List); 3] = [
            ("loss", |fit| fit.recorder.losses()),
            ("backward_loss", |fit| &fit.backward),
            ("smooth_loss", |fit| fit.recorder.smooth_losses()),
        ];
        let mut largest = 0.0;
        for (key, list) in lists {
            let others: Vec<&[f64]> = perturbed.iter().map(|it| list(&it.fits[at])).collect();
            let mut allowed = allowed(list(fit), &others);
            if key == "smooth_loss" {
                // fastai averages in float32.
                allowed.iter_mut().for_each(|it| *it += 3e-6);
            }
            within(list(fit), &numbers(&expected[key]), &allowed, &what(key));
            largest = allowed.into_iter().fold(largest, f64::max);
        }
        let names: Vec<String> = serde_json::from_value(expected["trainable"].clone()).unwrap();
        assert_eq!(fit.trainable, names, "{}", what("trainable"));
        let epochs = expected["epochs"].as_array().unwrap();
        assert_eq!(fit.recorder.rows().len(), epochs.len());
        for (row, expected) in fit.recorder.rows().iter().zip(epochs) {
            let found: Vec<f64> = row.values.iter().map(|value| value.unwrap()).collect();
            let expected = numbers(expected);
            let same = if is_language_model(case) { expected.len() } else { 1 };
            // Means of means in float32, where fastai has them.
            let by = vec![largest + 2e-5; same];
            within(&found[..same], &expected[..same], &by, &what("epoch"));
        }
    }
}

#[test]
fn trainings_are_fastais() {
    let accelerator = alone();
    for case in golden()["learners"]["cases"].as_array().unwrap() {
        let ours = make(&accelerator, case, None);
        let perturbed = [1, 2].map(|seed| make(&accelerator, case, Some(seed)));
        compare_fits(case, &ours, &perturbed);

        let expected = case["final"].as_object().unwrap();
        assert_eq!(ours.last.len(), expected.len());
        for (name, found) in &ours.last {
            let expected = numbers(&expected[name]);
            let size = expected[1].max(1.0);
            // The signs of changes of a tensor's elements vary: those of its sum may cancel.
            let others = perturbed.iter().flat_map(|it| it.last[name].into_iter().zip(found));
            let change = others.map(|(it, found)| (it - found).abs()).fold(0.0, f64::max) / size;
            assert!(change < 0.01, "{name}: perturbed runs are {change} apart");
            let apart = found.iter().zip(&expected).map(|it| (it.0 - it.1).abs());
            let apart = apart.fold(0.0, f64::max);
            let allowed = (TIMES * change + 1e-6) * size;
            assert!(apart <= allowed, "{name}: {found:?} {expected:?} {allowed}");
        }

        if is_language_model(case) {
            let others: Vec<&[f64]> = perturbed.iter().map(|it| &it.validation[..]).collect();
            let allowed: Vec<f64> =
                allowed(&ours.validation, &others).into_iter().map(|it| it + 2e-5).collect();
            within(&ours.validation, &numbers(&case["validate"]), &allowed, "validate");
        }
        if let (Some(found), Some(expected)) = (&ours.predictions, case.get("get_preds")) {
            for (part, found) in found.iter().enumerate() {
                let all = |parts: &Option<[Vec<Vec<f64>>; 4]>| -> Vec<f64> {
                    parts.as_ref().unwrap()[part].concat()
                };
                let others: Vec<Vec<f64>> =
                    perturbed.iter().map(|it| all(&it.predictions)).collect();
                // One allowance for all texts: a change may pass through zero for one of them.
                let change = changes(&found.concat(), &others).last().copied().unwrap_or(0.0);
                let expected = expected[part].as_array().unwrap();
                assert_eq!(found.len(), expected.len());
                for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let expected = match expected.as_array() {
                        Some(_) => numbers(expected),
                        None => vec![expected.as_f64().unwrap()],
                    };
                    // Targets are the same for every text.
                    if row != UNREAD || part == 1 {
                        let allowed = vec![TIMES * change + 1e-6; found.len()];
                        within(found, &expected, &allowed, &format!("text {row}"));
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
    // Weights that fit no encoder are refused, and change nothing.
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
            // The file contains the most probable word in place of a drawn one.
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
