//! Averages of weights, and what is put back when a fit does not end well.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_learn::callback::Level;
use brigade_learn::callbacks::{Ema, Swa};
use brigade_learn::{Event, Learner, LearnerState};
use brigade_nn::StateDict;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::Error;
use brigade_train::Accelerator;

use crate::setup::*;

type Kept = Rc<RefCell<Vec<StateDict>>>;

/// Keeps the model's values at these events, before or after EMA's place 40.
fn keeping(events: &[Event], order: i32) -> (Kept, At) {
    let kept = Kept::default();
    let keep = Rc::clone(&kept);
    let callback = At::new(events.iter().copied(), move |_, learner| {
        keep.borrow_mut().push(learner.state_dict().deep_clone()?);
        Ok(())
    });
    (kept, callback.order(order))
}

/// `one + weight (other - one)` of every value.
fn between(one: &StateDict, other: &StateDict, weight: f64) -> StateDict {
    let mut mixed = StateDict::new();
    for (name, value) in one.iter() {
        mixed.insert(name, value.lerp(other.get(name).unwrap(), weight)).unwrap();
    }
    mixed
}

fn copy(learner: &LearnerState) -> StateDict {
    learner.state_dict().deep_clone().unwrap()
}

fn exponential(accelerator: &Accelerator) {
    step!("EMA");
    let run = |ema: Ema| {
        let mut learner = learner(accelerator);
        let first = copy(&learner);
        let (stepped, after_step) = keeping(&[Event::AfterStep], 41);
        let (validated, in_validation) = keeping(&[Event::AfterValidate], 41);
        learner.fit(2, 0.1, (ema, after_step, in_validation)).unwrap();
        ranks_agree(&learner);
        let (stepped, validated) = (stepped.take(), validated.take());
        let averages = stepped.iter().scan(first, |average, now| {
            *average = between(average, now, 1.0 - 0.9);
            Some(average.deep_clone().unwrap())
        });
        let averages: Vec<StateDict> = averages.collect();
        (learner, averages, stepped, validated)
    };
    let same = |a: &StateDict, b: &StateDict| assert!(apart(a, b) < 1e-14);
    let (learner, averages, stepped, validated) = run(Ema::new(0.9));
    assert_eq!(averages.len(), 12);
    // Validation uses the average at the end of its epoch, training continues with the weights, and the last average is
    // kept.
    same(&validated[0], &averages[5]);
    same(&validated[1], &averages[11]);
    same(&learner.state_dict(), &averages[11]);
    let mut plain = crate::setup::learner(accelerator);
    plain.fit(2, 0.1, ()).unwrap();
    assert_eq!(state_bits(&stepped[11]), weights(&plain), "training is the same without it");
    let (learner, _, stepped, validated) = run(Ema::new(0.9).keep(false));
    same(&validated[1], &averages[11]);
    assert_eq!(weights(&learner), state_bits(&stepped[11]));
    let (learner, _, stepped, validated) = run(Ema::new(0.9).validate(false));
    assert_eq!(state_bits(&validated[1]), state_bits(&stepped[11]));
    same(&learner.state_dict(), &averages[11]);

    step!("EMA put back");
    // After an error or a cancellation within the validation, the weights are restored, or the average is kept.
    let interrupted = |fails: bool, ema: Ema| {
        let mut learner = crate::setup::learner(accelerator);
        let (stepped, after_step) = keeping(&[Event::AfterStep], 41);
        let stop =
            At::new([Event::AfterLoss], move |_, learner| match (learner.is_training(), fails) {
                (true, _) => Ok(()),
                (false, true) => Err(Error::custom("on purpose").into()),
                (false, false) => Level::Fit.cancel(),
            });
        let outcome = learner.fit(2, 0.1, (ema, after_step, stop));
        assert_eq!(outcome.is_err(), fails);
        let live = state_bits(stepped.borrow().last().unwrap());
        (learner, live)
    };
    let (learner, live) = interrupted(true, Ema::new(0.9));
    assert_eq!(weights(&learner), live);
    let (learner, live) = interrupted(false, Ema::new(0.9).keep(false));
    assert_eq!(weights(&learner), live);
    let (learner, live) = interrupted(false, Ema::new(0.9));
    assert_ne!(weights(&learner), live);
    same(&learner.state_dict(), &averages[5]);
}

fn stochastic(accelerator: &Accelerator) {
    step!("SWA");
    let mut learner = learner(accelerator);
    let (ends, at_end) = keeping(&[Event::AfterTrain], 41);
    learner.fit(4, 0.1, (Swa::new(1), at_end)).unwrap();
    let ends = ends.take();
    let mean = between(&between(&ends[1], &ends[2], 0.5), &ends[3], 1.0 / 3.0);
    assert!(apart(&learner.state_dict(), &mean) < 1e-14);
    ranks_agree(&learner);
    // A fit that ends before has no average.
    let unaveraged = |mut learner: Learner| {
        let (ends, at_end) = keeping(&[Event::AfterTrain], 41);
        learner.fit(2, 0.1, (Swa::new(5), at_end)).unwrap();
        assert_eq!(weights(&learner), state_bits(&ends.borrow()[1]));
    };
    unaveraged(crate::setup::learner(accelerator));
}

#[test]
fn averages_alone() {
    exponential(&alone());
    stochastic(&alone());
    let error = learner(&alone()).fit(1, 0.1, Ema::new(1.0)).unwrap_err().to_string();
    assert!(error.contains("the decay of the average is 1"), "{error}");
}

dist_test!(world = 2, dist_averages, |_world: World| {
    let accelerator = joined();
    exponential(&accelerator);
    stochastic(&accelerator);
});
