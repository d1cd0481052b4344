//! Two ranks train as one process does with batches twice as large, and a run that was stopped goes on bit for bit.

use std::path::Path;

use brigade_learn::callback::{Callback, Step};
use brigade_learn::callbacks::Checkpoint;
use brigade_learn::{Learner, LearnerState};
use brigade_models::AwdLstmOptions;
use brigade_nn::StateDict;
use brigade_testkit::{World, dist_test, step};
use brigade_text::{LanguageLearnerOptions, TextLearnerOptions};
use brigade_torch::{Error, Result};
use brigade_train::{Accelerator, Precision};
use tch::{Kind, Tensor};

use super::setup::*;

const TRAIN: [usize; 6] = [23, 41, 17, 60, 33, 29];
const VALID: [usize; 3] = [30, 22, 25];

fn double(accelerator: &Accelerator) -> Learner {
    let data = language_data(accelerator, &TRAIN, &VALID, 4, 6);
    let options = LanguageLearnerOptions { kind: Kind::Double, ..language_options() };
    language_learner(accelerator, data, options)
}

/// The largest distance between the values of two models.
fn apart(one: &StateDict, other: &StateDict) -> f64 {
    let distance = |(name, tensor): (&str, &Tensor)| {
        let other = other.get(name).unwrap();
        (tensor.to_kind(Kind::Double) - other.to_kind(Kind::Double)).abs().max().double_value(&[])
    };
    one.iter().map(distance).fold(0.0, f64::max)
}

#[track_caller]
fn close(ours: &[f64], theirs: &[f64], limit: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a - b).abs() <= limit * b.abs().max(1.0), "{ours:?} and {theirs:?}");
    }
}

fn columns(learner: &Learner) -> Vec<f64> {
    let rows = learner.recorder().rows().iter();
    rows.flat_map(|row| row.values.iter().map(|value| value.unwrap())).collect()
}

dist_test!(world = 2, dist_language_models_train_as_on_one_process, |_world: World| {
    let (mut one, mut two) = (double(&alone()), double(&joined()));
    for learner in [&mut one, &mut two] {
        learner.fit_one_cycle(2, 0.02, ()).unwrap();
    }
    close(two.recorder().losses(), one.recorder().losses(), 1e-11);
    close(&columns(&two), &columns(&one), 1e-11);
    assert!(apart(&two.state_dict(), &one.state_dict()) < 1e-11);
    let (found, expected) = (two.validate().unwrap(), one.validate().unwrap());
    close(&[found.loss], &[expected.loss], 1e-11);
});

dist_test!(world = 2, dist_classifiers_train_as_on_one_process, |_world: World| {
    let fitted = |ranks: usize| {
        let builder = Accelerator::builder().cpu(true).quiet(true).sync_batch_norm(true);
        let accelerator = match ranks {
            1 => builder.world(World::alone()).build().unwrap(),
            _ => builder.build().unwrap(),
        };
        let lengths = [12, 5, 9, 20, 3, 7, 16, 4, 11, 8, 6, 14];
        let data = labelled_data(&accelerator, &lengths, &[10, 13, 4, 18, 6], 4, 5, 2);
        // AR and TAR are means over padded outputs, and ranks pad to their own longest text.
        let mut options = TextLearnerOptions {
            kind: Kind::Double,
            alpha: 0.0,
            beta: 0.0,
            ..classifier_options(5)
        };
        options.model.fastai_last = false;
        let mut learner = classifier_learner(&accelerator, data, options);
        learner.freeze().unwrap();
        learner.fit_one_cycle(1, 0.02, ()).unwrap();
        learner.unfreeze().unwrap();
        learner.fit_one_cycle(1, 1e-4..1e-2, ()).unwrap();
        learner
    };
    let (mut one, mut two) = (fitted(1), fitted(2));
    close(two.recorder().losses(), one.recorder().losses(), 1e-10);
    close(&columns(&two), &columns(&one), 1e-10);
    assert!(apart(&two.state_dict(), &one.state_dict()) < 1e-10);
    // In the order of the data on both ranks, although the longest texts come first.
    let (found, expected) = (two.predictions().unwrap(), one.predictions().unwrap());
    assert_eq!(found.targets, expected.targets);
    assert!(found.predictions.allclose(&expected.predictions, 1e-10, 1e-10, false));
});

dist_test!(world = 2, dist_bf16_trains_with_the_fused_loss, |_world: World| {
    let group = joined();
    let fitted = |precision: Precision| {
        let accelerator =
            Accelerator::builder().sharing(&group).cpu(true).quiet(true).build().unwrap();
        let data = language_data(&accelerator, &TRAIN, &VALID, 4, 6);
        let learner = language_learner(&accelerator, data, language_options());
        let mut learner = learner.mixed_precision(precision).unwrap();
        learner.fit_one_cycle(2, 0.02, ()).unwrap();
        // The fit has ended: the model gives scores, and they have float32's type.
        assert_eq!(learner.validate().unwrap().metrics.len(), 2);
        learner.recorder().losses().to_vec()
    };
    let (half, whole) = (fitted(Precision::Bf16), fitted(Precision::No));
    assert_ne!(half, whole, "nothing was computed in 16 bits");
    // Products of 8 bits of mantissa, over some twenty steps.
    close(&half, &whole, 2e-2);
});

#[test]
fn metrics_of_training_batches_look_at_scores() {
    let accelerator = alone();
    let fitted = |train_metrics: bool| {
        let data = language_data(&accelerator, &TRAIN, &VALID, 4, 6);
        let learner = language_learner(&accelerator, data, language_options());
        let mut learner = learner.train_metrics(train_metrics);
        learner.fit(2, 0.02, ()).unwrap();
        learner
    };
    let (fused, scored) = (fitted(false), fitted(true));
    close(scored.recorder().losses(), fused.recorder().losses(), 1e-5);
    let accuracy = scored.recorder().last("train_accuracy").unwrap();
    let perplexity = scored.recorder().last("train_perplexity").unwrap();
    assert!((0.0..1.0).contains(&accuracy) && perplexity < 30.0, "{accuracy} {perplexity}");
}

/// Stops the program after so many trained batches.
#[derive(Debug)]
struct Interrupt(usize);

impl Callback for Interrupt {
    fn order(&self) -> i32 {
        200 // behind the checkpoint
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        if learner.is_training() && learner.train_iter() == self.0 {
            Err(Error::custom("interrupted").into())
        } else {
            Ok(())
        }
    }
}

/// A new process: its own random numbers, and nothing but the folder.
fn program(
    accelerator: &Accelerator,
    folder: &Path,
    seed: i64,
    stop: Option<usize>,
) -> (Learner, Result<()>) {
    let accelerator =
        Accelerator::builder().sharing(accelerator).cpu(true).quiet(true).build().unwrap();
    accelerator.processes().set_seed_per_process(seed);
    let data = language_data(&accelerator, &TRAIN, &VALID, 4, 6);
    let mut options = language_options();
    options.model.encoder.dropout = AwdLstmOptions::language_model().dropout;
    let mut learner = language_learner(&accelerator, data, options);
    learner.add(Checkpoint::new(folder).every(3));
    if let Some(stop) = stop {
        learner.add(Interrupt(stop));
    }
    let outcome = learner.fit_one_cycle(3, 0.02, ());
    accelerator.trackers().finish().unwrap();
    (learner, outcome)
}

fn goes_on(accelerator: &Accelerator) {
    let shared = || {
        // All ranks use one folder.
        let folder = tempfile::tempdir().unwrap();
        let path = accelerator.processes().broadcast_object(folder.path().join("last"), 0).unwrap();
        (folder, path)
    };
    let (_kept, path) = shared();
    let (whole, outcome) = program(accelerator, &path, 1, None);
    outcome.unwrap();
    let losses = whole.recorder().losses();
    let steps = losses.len() / 3;
    assert!(steps > 5, "{steps} steps in an epoch");
    // In the middle of an epoch, at its last batch, and in the last epoch.
    for stop in [steps + 5, 2 * steps, 2 * steps + 4] {
        step!("stopped after {stop} batches");
        let (_kept, path) = shared();
        let (_, outcome) = program(accelerator, &path, 1, Some(stop));
        assert!(outcome.unwrap_err().to_string().contains("interrupted"));
        let (resumed, outcome) = program(accelerator, &path, 2, None);
        outcome.unwrap();
        assert_eq!(resumed.recorder().losses(), losses, "after {stop} of {}", 3 * steps);
        for (name, tensor) in whole.state_dict().iter() {
            assert_eq!(resumed.state_dict().get(name), Some(tensor), "{name}");
        }
    }
}

dist_test!(world = 2, dist_a_stopped_fit_goes_on_with_its_hidden_states, |_world: World| {
    goes_on(&joined());
});

#[test]
fn a_stopped_fit_goes_on_with_its_hidden_state() {
    goes_on(&alone());
}
