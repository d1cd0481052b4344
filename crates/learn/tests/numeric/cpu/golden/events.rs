//! The order of events, and what a cancellation at each of them does.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::LazyLock;

use brigade_learn::callback::{Callback, Level, Phases, Step};
use brigade_learn::{Event, LearnError, Learner, LearnerState};
use brigade_metrics::Accuracy;
use brigade_torch::{Error, Result};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::recipe::{data, learner_of, loaders, number, numbers};

static FILE: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../golden/events.json")).unwrap());

/// Where a case cancels.
#[derive(Clone, Debug)]
struct Place {
    event: String,
    epoch: Option<usize>,
    training: Option<bool>,
    iter: Option<usize>,
    level: Level,
}

impl Place {
    fn of(case: &Value) -> Option<Self> {
        let level = match case["exception"].as_str()? {
            "CancelBatchException" => Level::Batch,
            "CancelBackwardException" => Level::Backward,
            "CancelStepException" => Level::Step,
            "CancelTrainException" => Level::Train,
            "CancelValidException" => Level::Validate,
            "CancelEpochException" => Level::Epoch,
            "CancelFitException" => Level::Fit,
            other => panic!("exception {other}"),
        };
        let place = &case["place"];
        let whole = |name: &str| place[name].as_u64().map(|it| it as usize);
        Some(Self {
            event: place["event"].as_str()?.to_owned(),
            epoch: whole("epoch"),
            training: place["phase"].as_str().map(|phase| phase == "train"),
            iter: whole("iter"),
            level,
        })
    }

    fn is_at(&self, event: Event, learner: &LearnerState) -> bool {
        self.event == event.name()
            && self.epoch.is_none_or(|epoch| epoch == learner.epoch())
            && self.training.is_none_or(|training| training == learner.is_training())
            && self.iter.is_none_or(|iter| iter == learner.iter())
    }
}

/// Notes the events, and cancels once.
#[derive(Debug)]
struct Canceller {
    place: Option<Place>,
    events: Rc<RefCell<Vec<&'static str>>>,
}

impl Canceller {
    fn at(&mut self, event: Event, learner: &LearnerState) -> Step {
        self.events.borrow_mut().push(event.name());
        match self.place.take_if(|place| place.is_at(event, learner)) {
            Some(place) => place.level.cancel(),
            None => Ok(()),
        }
    }
}

macro_rules! noted {
    ($($method:ident $event:ident),+ $(,)?) => {
        impl Callback for Canceller {
            fn phases(&self) -> Phases {
                Phases::Both
            }

            $(fn $method(&mut self, learner: &mut LearnerState) -> Step {
                self.at(Event::$event, learner)
            })+
        }
    };
}

noted! {
    before_fit BeforeFit,
    before_epoch BeforeEpoch,
    before_train BeforeTrain,
    before_batch BeforeBatch,
    after_pred AfterPred,
    after_loss AfterLoss,
    before_backward BeforeBackward,
    after_cancel_backward AfterCancelBackward,
    after_backward AfterBackward,
    before_step BeforeStep,
    after_cancel_step AfterCancelStep,
    after_step AfterStep,
    after_cancel_batch AfterCancelBatch,
    after_batch AfterBatch,
    after_cancel_train AfterCancelTrain,
    after_train AfterTrain,
    before_validate BeforeValidate,
    after_cancel_validate AfterCancelValidate,
    after_validate AfterValidate,
    after_cancel_epoch AfterCancelEpoch,
    after_epoch AfterEpoch,
    after_cancel_fit AfterCancelFit,
    after_fit AfterFit,
}

struct Outcome {
    learner: Learner,
    events: String,
    result: Result<()>,
}

fn make(place: Option<Place>) -> Outcome {
    let (inputs, targets) = data("class", true);
    let part = |from: i64, rows: i64| (inputs.narrow(0, from, rows), targets.narrow(0, from, rows));
    let mut learner = learner_of("mlp", loaders(part(0, 10), part(10, 5), 5)).metrics(Accuracy);
    let events = Rc::default();
    let result = learner.fit(2, 1e-2, Canceller { place, events: Rc::clone(&events) });
    let events = events.borrow().join(" ");
    Outcome { learner, events, result }
}

fn close(ours: f64, theirs: f64) -> bool {
    (ours - theirs).abs() <= 5e-6 * theirs.abs().max(1.0)
}

/// fastai's smoothed loss.
fn smoothed(losses: &[f64]) -> f64 {
    let mean = losses.iter().fold(0.0, |mean, loss| loss + 0.98 * (mean - loss));
    mean / (1.0 - 0.98f64.powi(losses.len() as i32))
}

/// What fastai recorded, with the parts that were cancelled missing as in ours.
fn expected_rows(case: &Value, place: Option<&Place>) -> Vec<Vec<Option<f64>>> {
    let rows = case["recorded_epochs"].as_array().into_iter().flatten();
    rows.map(|row| {
        let values = numbers(row);
        let missing = std::iter::repeat_n(None, 3 - values.len());
        let values = values.into_iter().map(Some);
        match place.map(|place| place.level) {
            Some(Level::Train) => missing.chain(values).collect(),
            _ => values.chain(missing).collect(),
        }
    })
    .collect()
}

/// Returns what of a case differs.
fn check(case: &Value) -> Vec<String> {
    let place = Place::of(case);
    let ours = make(place.clone());
    let mut wrong = Vec::new();
    let mut events = case["events"].as_str().unwrap().to_owned();
    let mut losses = case["recorded_losses"].as_u64().unwrap_or(0) as usize;
    let mut rows = expected_rows(case, place.as_ref());
    let mut weights = Some(number(&case["final_weight_sum"]));
    let recorder = ours.learner.recorder();
    let mut left = case["left_fit_as"].as_str();
    if let Some(place) = &place {
        let before_loss = ["before_batch", "after_pred"].contains(&place.event.as_str());
        let batch = place.level == Level::Batch && before_loss;
        if batch && place.training == Some(true) {
            // fastai records the loss of the batch before, or 0 for the first; ours records nothing of a batch
            // that has no loss.
            losses -= 1;
            let first = usize::from(!recorder.losses().is_empty());
            rows[0][0] = recorder.losses().get(..first).map(smoothed);
            rows[1][0] = Some(smoothed(recorder.losses()));
        }
        if batch && place.training == Some(false) {
            // fastai uses the loss of the last training batch as that of the validation; ours has none.
            rows[0][1..].fill(None);
        }
        if place.event == "before_epoch" && place.level == Level::Epoch {
            // fastai's recorder fails at an epoch whose beginning it has not seen; ours has an empty row, and the
            // second epoch follows: what the first one of a fit is.
            assert_eq!(left.take(), Some("AttributeError"));
            let plain = FILE["plain"]["events"].as_str().unwrap();
            let epoch = plain.split_once(" after_epoch before_epoch ").unwrap().1;
            events = format!("{events} before_epoch {epoch}");
            let first = numbers(&FILE["plain"]["recorded_epochs"][0]).into_iter().map(Some);
            rows = vec![vec![None; 3], first.collect()];
            losses = 2;
            weights = None;
        }
    }
    if ours.events != events {
        wrong.push(format!("events\n  {}\ninstead of\n  {events}", ours.events));
    }
    let cancelled = |error: &Error| match error.downcast_ref() {
        Some(LearnError::Cancel { level, event, .. }) => Some((*level, *event)),
        _ => None,
    };
    match (&ours.result, left, &place) {
        (Ok(()), None, _) => {}
        (Err(error), Some(_), Some(place))
            if cancelled(error).is_some_and(|(level, event)| {
                level == place.level && event.name() == place.event
            }) => {}
        (result, left, _) => wrong.push(format!("{result:?} instead of {left:?}")),
    }
    if recorder.losses().len() != losses {
        wrong.push(format!("{} losses instead of {losses}", recorder.losses().len()));
    }
    let found: Vec<Vec<Option<f64>>> =
        recorder.rows().iter().map(|row| row.values.clone()).collect();
    let same = |ours: &Option<f64>, theirs: &Option<f64>| match (ours, theirs) {
        (Some(ours), Some(theirs)) => close(*ours, *theirs),
        (ours, theirs) => ours == theirs,
    };
    let equal = found.len() == rows.len()
        && found.iter().zip(&rows).all(|(ours, theirs)| {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| same(a, b))
        });
    if !equal {
        wrong.push(format!("rows {found:?} instead of {rows:?}"));
    }
    let state = ours.learner.state_dict();
    let sum = state.get("3.weight").map(|it: &Tensor| it.sum(Kind::Double).double_value(&[]));
    if let (Some(sum), Some(theirs)) = (sum, weights)
        && !close(sum, theirs)
    {
        wrong.push(format!("the weights add up to {sum} instead of {theirs}"));
    }
    wrong.into_iter().map(|it| format!("{place:?}: {it}")).collect()
}

fn agree(cases: impl Iterator<Item = &'static Value>) {
    let wrong: Vec<String> = cases.flat_map(check).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn of_a_fit_come_in_order() {
    agree(std::iter::once(&FILE["plain"]));
}

#[test]
fn after_each_cancellation_at_each_event() {
    let cases = FILE["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 140);
    agree(cases.iter());
}
