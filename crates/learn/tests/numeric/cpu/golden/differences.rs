//! Runs in which this crate does otherwise than fastai on purpose: what agrees, what does not, and why.

use brigade_learn::callback::{Callback, Level, Step};
use brigade_learn::{Learner, LearnerState};
use serde_json::Value;

use super::check::{Check, of_schedule};
use super::noter::FitNotes;
use super::recipe::{learner, number};
use super::runs::{Outcome, is_not_finite, make, run};

/// The runs of this file.
pub(crate) const DIFFERENT: &[&str] = &[
    "flat_cos_start_epoch",
    "nan_without_callback",
    "sgdr_three",
    "terminate_on_nan",
    "unfrozen_then_frozen",
];

fn assert_agrees(check: Check) {
    let wrong = check.finish();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// A list up to a place.
fn first(value: &Value, count: usize) -> Value {
    value.as_array().unwrap()[..count].into()
}

#[test]
fn flat_cos_honours_start_epoch() {
    // fastai ignores it, and trains all epochs. Here the schedule begins in the middle: the rates are those of the
    // golden run's second epoch, and so is the last one.
    let run = run("flat_cos_start_epoch");
    let ours = make(run);
    ours.result.as_ref().unwrap();
    let mut check = Check::new(run, &ours);
    let theirs = run["fits"][0]["lr"].as_array().unwrap();
    let [fit] = ours.fits.as_slice() else { panic!("{} fits", ours.fits.len()) };
    assert_eq!(fit.hypers.len(), 9);
    for (ours, theirs) in fit.hypers.iter().zip(&theirs[9..]) {
        check.near("lr", ours[0].lr, number(&theirs[0]), of_schedule(0.01));
    }
    // The weights are the first ones: so are the losses, while the rate is flat.
    check.losses("loss", 0, FitNotes::loss, &fit.loss[..5], &first(&run["fits"][0]["loss"], 5));
    assert_eq!(fit.recorder.iters(), [0, 9]);
    assert!(fit.recorder.rows()[0].values.iter().all(Option::is_none));
    assert!(fit.recorder.rows()[1].values.iter().all(Option::is_some));
    assert_agrees(check);
}

/// Ends a fit before a batch of the training.
#[derive(Debug)]
struct StopBefore(usize);

impl Callback for StopBefore {
    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        if learner.train_iter() == self.0 { Level::Fit.cancel() } else { Ok(()) }
    }
}

/// The parameters after the four batches that come before the NaN.
fn after_four_batches(run: &Value) -> Learner {
    let folder = tempfile::tempdir().unwrap();
    let mut learner = learner(run, folder.path(), &Default::default());
    learner.fit(1, 0.01, StopBefore(4)).unwrap();
    learner
}

/// What holds of both ways to end at a loss that is NaN.
fn ended_before_the_nan(run: &Value, ours: &Outcome, losses: &[f64]) {
    let mut check = Check::new(run, ours);
    assert_eq!(losses.len(), 5);
    check.losses("loss", 0, FitNotes::loss, losses, &first(&run["fits"][0]["loss"], 5));
    assert!(losses[4].is_nan());
    let recorder = ours.learner.recorder();
    assert_eq!((recorder.losses().len(), recorder.rows().len()), (4, 0));
    let expected = after_four_batches(run);
    for (ours, expected) in ours.learner.parameters().iter().zip(expected.parameters()) {
        assert_eq!(ours.tensor, expected.tensor, "{}", expected.name);
    }
    assert_agrees(check);
}

#[test]
fn a_loss_that_is_nan_is_an_error_before_any_weight_changes() {
    // fastai continues, and all weights are NaN at the end.
    let run = run("nan_without_callback");
    let ours = make(run);
    assert!(is_not_finite(&ours.result), "{:?}", ours.result);
    ended_before_the_nan(run, &ours, &ours.fits[0].loss);
}

#[test]
fn terminate_on_nan_keeps_the_weights_before_the_batch() {
    // fastai checks the loss after the step, when the weights are NaN.
    let run = run("terminate_on_nan");
    let ours = make(run);
    ours.result.as_ref().unwrap();
    ended_before_the_nan(run, &ours, &ours.fits[0].loss);
}

#[test]
fn restarts_come_at_their_batch() {
    // fastai computes the position within a cycle in f32, so that the first batch of the third cycle still belongs to
    // the second one, with a rate of nearly 0. Up to there all values agree.
    let run = run("sgdr_three");
    let ours = make(run);
    ours.result.as_ref().unwrap();
    let mut check = Check::new(run, &ours);
    let (fit, theirs) = (&ours.fits[0], &run["fits"][0]);
    let rates = theirs["lr"].as_array().unwrap();
    assert_eq!(fit.hypers.len(), rates.len());
    for (batch, (ours, theirs)) in fit.hypers.iter().zip(rates).enumerate() {
        let theirs = number(&theirs[0]);
        if batch == 27 {
            assert!(theirs < 1e-15 && (ours[0].lr - 0.01).abs() < 1e-15);
        } else {
            check.near(format_args!("lr[{batch}]"), ours[0].lr, theirs, of_schedule(0.01));
        }
    }
    check.losses("loss", 0, FitNotes::loss, &fit.loss[..28], &first(&theirs["loss"], 28));
    assert_agrees(check);
}

#[test]
fn groups_frozen_after_a_fit_do_not_decay() {
    // fastai's `zero_grad` leaves gradients of zero, so that weight decay continues in groups that were frozen later.
    let run = run("unfrozen_then_frozen");
    let ours = make(run);
    ours.result.as_ref().unwrap();
    let mut check = Check::new(run, &ours);
    check.fit(0, &ours.fits[0], &run["fits"][0]);
    let (fit, theirs) = (&ours.fits[1], &run["fits"][1]);
    check.losses("loss", 1, FitNotes::loss, &fit.loss[..1], &first(&theirs["loss"], 1));
    let mut theirs: Vec<String> = serde_json::from_value(theirs["changed"][0].clone()).unwrap();
    theirs.retain(|name| name != "0.weight");
    let mut changed = fit.changed[0].clone();
    changed.sort_unstable();
    theirs.sort_unstable();
    assert_eq!(changed, theirs);
    assert_eq!(run["fits"][1]["changed"][0].as_array().unwrap().len(), theirs.len() + 1);
    assert_agrees(check);
}
