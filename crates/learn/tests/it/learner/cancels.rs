//! Cancellations: everywhere, at every level, on all ranks, on one, and where none is allowed.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_learn::callback::{Callback, Level, Ranks, Step};
use brigade_learn::callbacks::{EarlyStopping, Ema, GradientAccumulation};
use brigade_learn::{Event, Learner, LearnerState};
use brigade_testkit::{World, dist_test, step};
use brigade_train::Accelerator;

use crate::setup::*;

const EVENTS: [Event; 23] = [
    Event::BeforeFit,
    Event::BeforeEpoch,
    Event::BeforeTrain,
    Event::BeforeBatch,
    Event::AfterPred,
    Event::AfterLoss,
    Event::BeforeBackward,
    Event::AfterCancelBackward,
    Event::AfterBackward,
    Event::BeforeStep,
    Event::AfterCancelStep,
    Event::AfterStep,
    Event::AfterCancelBatch,
    Event::AfterBatch,
    Event::AfterCancelTrain,
    Event::AfterTrain,
    Event::BeforeValidate,
    Event::AfterCancelValidate,
    Event::AfterValidate,
    Event::AfterCancelEpoch,
    Event::AfterEpoch,
    Event::AfterCancelFit,
    Event::AfterFit,
];

const LEVELS: [Level; 7] = [
    Level::Batch,
    Level::Backward,
    Level::Step,
    Level::Train,
    Level::Validate,
    Level::Epoch,
    Level::Fit,
];

/// Cancels a level at an event, the second time that it comes; on chosen ranks alone where it is asked for.
#[derive(Debug)]
struct Cancels {
    event: Event,
    level: Level,
    ranks: Ranks,
    /// The rank that cancels; all of them without.
    only: Option<usize>,
    times: usize,
    in_validation: bool,
}

impl Cancels {
    fn new(event: Event, level: Level) -> Self {
        Self { event, level, ranks: Ranks::All, only: None, times: 0, in_validation: true }
    }

    fn at(&mut self, event: Event, learner: &mut LearnerState) -> Step {
        if event != self.event || (!self.in_validation && !learner.is_training()) {
            return Ok(());
        }
        self.times += 1;
        let mine =
            self.only.is_none_or(|rank| rank == learner.accelerator().processes().process_index());
        let due = self.times == 2 || matches!(event, Event::BeforeFit | Event::AfterFit);
        if due && mine { self.level.cancel() } else { Ok(()) }
    }
}

impl Callback for Cancels {
    fn order(&self) -> i32 {
        45
    }

    fn ranks(&self) -> Ranks {
        self.ranks
    }

    forwards!();
}

/// Two epochs in which one cancellation happens; says how the fit ended.
fn cancelled(accelerator: &Accelerator, event: Event, level: Level) -> Result<(), String> {
    let mut learner = learner(accelerator);
    let outcome = learner.fit(3, 0.1, (Cancels::new(event, level), Ema::new(0.5).keep(false)));
    ranks_agree(&learner);
    assert!(!learner.is_distributed());
    // The Learner can be used after any outcome.
    if outcome.is_err() || level == Level::Fit {
        learner.fit(1, 0.1, ()).unwrap();
        assert_eq!(learner.recorder().rows().len(), 1);
    }
    outcome.map_err(|error| error.to_string())
}

#[test]
fn every_level_at_every_event_ends_there_or_is_refused() {
    let accelerator = alone();
    let mut allowed = 0;
    for event in EVENTS {
        for level in LEVELS {
            match cancelled(&accelerator, event, level) {
                Ok(()) => allowed += 1,
                Err(error) => {
                    let expected =
                        format!("Cancels cancelled the {level} at {event}, where no {level} runs");
                    assert!(error.contains(&expected), "{error}");
                }
            }
        }
    }
    // Every event can cancel something, except the last two, and those after a cancellation, which do not occur here.
    assert!(allowed > 60, "{allowed}");
}

dist_test!(world = 2, dist_cancellations_of_all_ranks, |_world: World| {
    let accelerator = joined();
    for (event, level) in [
        (Event::BeforeFit, Level::Fit),
        (Event::AfterPred, Level::Batch),
        (Event::BeforeBackward, Level::Backward),
        (Event::BeforeStep, Level::Step),
        (Event::AfterLoss, Level::Epoch),
        (Event::AfterBatch, Level::Train),
        (Event::BeforeValidate, Level::Validate),
        (Event::AfterEpoch, Level::Fit),
        (Event::AfterEpoch, Level::Epoch),
    ] {
        step!("{level} at {event}");
        let outcome = cancelled(&accelerator, event, level);
        assert_eq!(outcome.is_err(), (event, level) == (Event::AfterEpoch, Level::Epoch));
    }
});

/// What one rank cancels, all cancel.
fn one_cancels(
    accelerator: &Accelerator,
    event: Event,
    level: Level,
    only: usize,
    training: bool,
) -> Learner {
    step!("{level} at {event} by rank {only}");
    let mut learner = learner(accelerator);
    let events: &'static [Event] = &EVENTS;
    let cancels = Cancels {
        ranks: Ranks::Any(events),
        only: Some(only),
        in_validation: !training,
        ..Cancels::new(event, level)
    };
    learner.fit(3, 0.1, (cancels, EarlyStopping::new(9))).unwrap();
    ranks_agree(&learner);
    learner
}

dist_test!(world = 2, dist_a_cancellation_of_one_rank_is_one_of_all, |_world: World| {
    let accelerator = joined();
    let batches = |learner: &Learner| learner.recorder().losses().len();
    for only in [0, 1] {
        assert_eq!(
            batches(&one_cancels(&accelerator, Event::AfterBatch, Level::Fit, only, true)),
            1
        );
        assert_eq!(
            batches(&one_cancels(&accelerator, Event::AfterLoss, Level::Train, only, true)),
            13
        );
        let learner = one_cancels(&accelerator, Event::BeforeStep, Level::Batch, only, true);
        assert_eq!(batches(&learner), 18);
        let learner = one_cancels(&accelerator, Event::BeforeEpoch, Level::Epoch, only, false);
        assert_eq!(batches(&learner), 12);
    }
    // In validation the ranks have 3 and 2 batches, and synchronise after the last: also about a cancellation in the
    // third.
    #[derive(Debug)]
    struct InThird(Level);
    impl Callback for InThird {
        fn ranks(&self) -> Ranks {
            Ranks::Any(&[Event::AfterPred])
        }
        fn after_pred(&mut self, learner: &mut LearnerState) -> Step {
            if !learner.is_training() && learner.iter() == 2 { self.0.cancel() } else { Ok(()) }
        }
    }
    for (level, epochs) in
        [(Level::Fit, 0), (Level::Epoch, 3), (Level::Validate, 3), (Level::Batch, 3)]
    {
        step!("{level} in the third validation batch");
        let mut learner = learner(&accelerator);
        learner.fit(3, 0.1, (InThird(level), EarlyStopping::new(9))).unwrap();
        ranks_agree(&learner);
        assert_eq!(learner.recorder().rows().len(), epochs, "{level}");
        let valid = learner.recorder().last("valid_loss");
        assert_eq!(valid.is_some(), level == Level::Batch, "{level}");
    }
});

/// Cancels from rank 0 alone, which no other rank would hear of.
fn from_main() -> Cancels {
    Cancels { ranks: Ranks::Main, ..Cancels::new(Event::AfterEpoch, Level::Fit) }
}

#[test]
fn a_callback_of_rank_0_cannot_cancel() {
    let error = learner(&alone()).fit(3, 0.1, from_main()).unwrap_err().to_string();
    let expected = "Cancels failed at after_epoch: it cancelled the fit, but is called on rank 0 alone; return \
                    another `Ranks` from its method `ranks`";
    assert_eq!(error, expected);
}

dist_test!(world = 2, dist_a_callback_of_rank_0_cannot_cancel, |_world: World| {
    let accelerator = joined();
    let main = accelerator.is_main_process();
    let mut learner = learner(&accelerator);
    let error = learner.fit(3, 0.1, from_main()).unwrap_err().to_string();
    // Rank 0 returns the reason and ends; the other detects that, and does not wait.
    assert_eq!(error.contains("called on rank 0 alone"), main, "{error}");
});

#[test]
fn a_cancelled_validation_is_no_result() {
    let cancelling = |level| learner(&alone()).with(Cancels::new(Event::AfterBatch, level));
    let error = cancelling(Level::Validate).validate().unwrap_err().to_string();
    assert!(error.contains("a callback has cancelled the validation"), "{error}");
    let error = cancelling(Level::Validate).predictions().unwrap_err().to_string();
    assert!(error.contains("a callback has cancelled the prediction"), "{error}");
    let error = cancelling(Level::Fit).validate().unwrap_err().to_string();
    assert!(error.contains("cancelled the fit at after_batch, where no fit runs"), "{error}");
}

#[test]
fn gradients_of_a_cancelled_batch_stay_and_an_open_window_goes_on() {
    let steps: Rc<RefCell<usize>> = Rc::default();
    let count = Rc::clone(&steps);
    let counting = At::new([Event::AfterStep], move |_, _| {
        *count.borrow_mut() += 1;
        Ok(())
    });
    let mut learner = learner(&alone());
    let cancels = Cancels { in_validation: false, ..Cancels::new(Event::AfterPred, Level::Batch) };
    learner.fit(1, 0.1, (GradientAccumulation::new(16), cancels, counting)).unwrap();
    // Of six batches one is left out: two windows of two are full.
    assert_eq!(*steps.borrow(), 2);
}
