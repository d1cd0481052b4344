//! Two ranks train as one process does with batches twice as large, and a run that was stopped goes on bit for bit.

use std::path::Path;

use brigade_learn::callback::{Callback, Step};
use brigade_learn::callbacks::Checkpoint;
use brigade_learn::{Error, Learner, LearnerState, Result};
use brigade_nn::StateDict;
use brigade_testkit::{World, dist_test, step};
use brigade_text::{LanguageLearnerOptions, TextLearnerOptions};
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::setup::*;

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
        let options = TextLearnerOptions { kind: Kind::Double, ..classifier_options(5) };
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
    // In the order of the data on both, though the longest texts come first.
    let (found, expected) = (two.predictions().unwrap(), one.predictions().unwrap());
    assert_eq!(found.targets, expected.targets);
    assert!(found.predictions.allclose(&expected.predictions, 1e-10, 1e-10, false));
});

/// Stops the program after so many trained batches.
#[derive(Debug)]
struct Interrupt(usize);

impl Callback for Interrupt {
    fn order(&self) -> i32 {
        200 // behind the checkpoint
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        match learner.is_training() && learner.train_iter() == self.0 {
            true => Err(Error::user("interrupted").into()),
            false => Ok(()),
        }
    }
}

fn with_dropout(accelerator: &Accelerator, folder: Option<&Path>) -> Learner {
    accelerator.set_seed(5);
    let data = language_data(accelerator, &TRAIN, &VALID, 4, 6);
    let mut options = language_options();
    options.model.encoder.dropout = brigade_models::AwdLstmOptions::language_model().dropout;
    let mut learner = language_learner(accelerator, data, options);
    if let Some(folder) = folder {
        learner.add(Checkpoint::new(folder).every(3));
    }
    learner
}

fn cycle(learner: &mut Learner, interrupt: Option<usize>) -> Result<()> {
    learner.fit_one_cycle(3, 0.02, interrupt.map(Interrupt).into_iter().collect::<Vec<_>>().boxed())
}

trait Boxed {
    fn boxed(self) -> Vec<Box<dyn Callback>>;
}

impl Boxed for Vec<Interrupt> {
    fn boxed(self) -> Vec<Box<dyn Callback>> {
        self.into_iter().map(|it| Box::new(it) as Box<dyn Callback>).collect()
    }
}

fn goes_on(accelerator: &Accelerator, folder: &Path) {
    let mut whole = with_dropout(accelerator, None);
    cycle(&mut whole, None).unwrap();
    let losses = whole.recorder().losses();
    let steps = losses.len() / 3;
    // In the middle of an epoch, at its last batch, and in the last epoch.
    for after in [steps + 3, 2 * steps, 2 * steps + 4] {
        step!("stopped after {after} batches");
        let folder = folder.join(after.to_string());
        let mut stopped = with_dropout(accelerator, Some(&folder));
        let error = cycle(&mut stopped, Some(after)).unwrap_err();
        println!(
            "ERR {error} {:?} {:?}",
            stopped.recorder().losses().len(),
            stopped.recorder().losses()
        );
        let mut resumed = with_dropout(accelerator, Some(&folder));
        cycle(&mut resumed, None).unwrap();
        assert_eq!(resumed.recorder().losses(), losses, "after {after} of {}", 3 * steps);
        for (name, tensor) in whole.state_dict().iter() {
            assert_eq!(resumed.state_dict().get(name), Some(tensor), "{name}");
        }
    }
}

dist_test!(world = 2, dist_a_stopped_fit_goes_on_with_its_hidden_states, |_world: World| {
    let accelerator = joined();
    let folder = accelerator.broadcast_object(tempfile::tempdir().unwrap().keep(), 0).unwrap();
    goes_on(&accelerator, &folder);
    accelerator.wait_for_everyone().unwrap();
    if accelerator.is_main_process() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
});

#[test]
fn a_stopped_fit_goes_on_with_its_hidden_state() {
    let folder = tempfile::tempdir().unwrap();
    goes_on(&alone(), folder.path());
}

#[test]
fn zz_debug() {
    let accelerator = alone();
    let run = |add: &dyn Fn(&mut Learner)| {
        let mut learner = with_dropout(&accelerator, None);
        add(&mut learner);
        cycle(&mut learner, None).unwrap();
        learner.recorder().losses()[..12].to_vec()
    };
    let folder = tempfile::tempdir().unwrap();
    println!("A {:?}", run(&|_| {}));
    println!("B {:?}", run(&|_| {}));
    println!("C {:?}", run(&|l| l.add(Checkpoint::new(folder.path().join("x")).every(3))));
    println!(
        "D {:?}",
        run(&|l| {
            l.add(Checkpoint::new(folder.path().join("y")).every(3));
            l.remove::<brigade_text::ModelResetter>();
        })
    );
}
