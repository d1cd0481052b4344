//! Callbacks that look at layers or freeze them, short epochs, and measurements.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_learn::callbacks::{
    ActivationStats, BINS, EarlyStopping, FreezeSchedule, NormFreeze, ShortEpoch, Timing,
};
use brigade_learn::{Event, Learner, Loaders};
use brigade_nn::{BatchNorm1d, Linear, ParamPath, Relu, Sequential};
use brigade_testkit::{World, dist_test, step};
use brigade_train::Accelerator;

use crate::setup::*;

fn normalised(path: &ParamPath<'_>) -> Sequential {
    Sequential::new()
        .add(Linear::new(path / 0, FEATURES, 8))
        .add(BatchNorm1d::new(path / 1, 8))
        .add(Relu)
        .add(Linear::new(path / 3, 8, CLASSES))
}

fn split(accelerator: &Accelerator) -> Learner {
    let data = loaders(8 / accelerator.processes().num_processes());
    let learner = Learner::new(accelerator, data, model(normalised)).unwrap().quiet(true);
    learner.split_by_prefix(&[&["0"], &["1"], &["3"]]).unwrap().train_norms(false)
}

/// The names of what each epoch has changed.
fn changes() -> (Rc<RefCell<Vec<Vec<String>>>>, At) {
    let changed: Rc<RefCell<Vec<Vec<String>>>> = Rc::default();
    let note = Rc::clone(&changed);
    let mut before = Vec::new();
    let events = [Event::BeforeTrain, Event::AfterTrain];
    let noting = At::new(events, move |event, learner| {
        let now = weights(learner);
        if event == Event::AfterTrain {
            let pairs = now.iter().zip(&before).filter(|(new, old)| new != old);
            note.borrow_mut().push(pairs.map(|(new, _)| new.0.clone()).collect());
        }
        before = now;
        Ok(())
    });
    (changed, noting)
}

fn freezes(accelerator: &Accelerator) {
    step!("gradual unfreezing");
    let mut learner = split(accelerator);
    let (changed, noting) = changes();
    let schedule = FreezeSchedule::new([(2, 0), (0, -1), (1, -2)]);
    learner.fit(3, 0.01, (schedule, NormFreeze::new(), noting)).unwrap();
    let head = ["3.bias", "3.weight"].map(str::to_owned).to_vec();
    let norm = ["1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"];
    let body = ["0.bias", "0.weight"];
    let all = |parts: &[&[&str]]| -> Vec<String> {
        let mut names: Vec<String> =
            parts.concat().into_iter().map(str::to_owned).chain(head.clone()).collect();
        names.sort();
        names
    };
    let mut found = changed.take();
    found.iter_mut().for_each(|names| names.sort());
    // Statistics of a frozen normalisation do not change.
    assert_eq!(found, [head.clone(), all(&[&norm]), all(&[&norm, &body])]);
    assert_eq!(learner.frozen_groups(), 0);
    ranks_agree(&learner);

    step!("without NormFreeze its statistics move");
    let mut learner = split(accelerator);
    learner.freeze().unwrap();
    let (changed, noting) = changes();
    learner.fit(1, 0.01, noting).unwrap();
    let mut names = changed.take().remove(0);
    names.sort();
    let moving = ["1.num_batches_tracked", "1.running_mean", "1.running_var"];
    assert_eq!(names, all(&[&moving]));
    // In the next fit they are frozen, and released after it.
    let (changed, noting) = changes();
    learner.fit(1, 0.01, (NormFreeze::new(), noting)).unwrap();
    assert_eq!(changed.take().remove(0).len(), 2);
    let (changed, noting) = changes();
    learner.fit(1, 0.01, noting).unwrap();
    assert_eq!(changed.take().remove(0).len(), 5);
}

fn short(accelerator: &Accelerator) {
    step!("short epochs");
    let ranks = accelerator.processes().num_processes();
    let mut learner = learner(accelerator);
    learner.fit(2, 0.1, ShortEpoch::new(0.5)).unwrap();
    // The batch that ends an epoch is cancelled before the recorder's callback, as in fastai.
    assert_eq!(learner.recorder().iters(), [3, 6]);
    // Of 5 validation batches one rank has 3 and the other 2: both get the cancellation of either one.
    for rows in [13, 3, 9] {
        let data =
            Loaders::new(loader(data(48, 10), 8 / ranks), loader(data(rows, 20), 3)).unwrap();
        let mut learner = learner_of(accelerator, data);
        learner.fit(5, 0.1, (ShortEpoch::new(0.5), EarlyStopping::new(2))).unwrap();
        ranks_agree(&learner);
        let names: Vec<bool> =
            learner.recorder().rows().iter().map(|row| row.values[1].is_some()).collect();
        same_on_all(accelerator, names);
    }
    let mut learner = crate::setup::learner(accelerator);
    learner.fit(1, 0.1, ShortEpoch::new(0.5).validation(false)).unwrap();
    let found = learner.recorder().last("valid_loss");
    assert_eq!(found, Some(learner.validate().unwrap().loss));
    let error = learner.fit(1, 0.1, ShortEpoch::new(1.5)).unwrap_err().to_string();
    assert!(error.contains("the share of an epoch is 1.5"), "{error}");
}

fn measures(accelerator: &Accelerator) {
    step!("times and activations");
    let mut learner = learner(accelerator);
    learner.add((Timing::new(), ActivationStats::new(["0", "1"]).every(2)));
    learner.fit(1, 0.1, ()).unwrap();
    let times = learner.callback::<Timing>().unwrap().times();
    assert_eq!(times.batches, 6);
    let parts = [times.data, times.forward, times.backward, times.step, times.validation];
    assert!(parts.iter().all(|time| !time.is_zero()), "{times:?}");
    let stats = learner.callback::<ActivationStats>().unwrap().stats().to_vec();
    assert_eq!(stats.len(), 2);
    let values = 8 / accelerator.processes().num_processes() * 16;
    for layer in &stats {
        assert_eq!(layer.steps, [0, 2, 4]);
        for histogram in &layer.histograms {
            assert_eq!(histogram.len() as i64, BINS);
            assert_eq!(histogram.iter().sum::<f64>(), values as f64, "each output is in one bin");
            // The bins reach to 10, and these outputs do not.
            assert_eq!(histogram.last(), Some(&0.0));
        }
    }
    // The output of a layer norm with weights near 1 has a deviation near 1.
    assert!(stats[1].deviations.iter().all(|it| (0.6..1.4).contains(it)), "{:?}", stats[1]);
    let error = learner.fit(1, 0.1, ActivationStats::new(["9"])).unwrap_err().to_string();
    assert!(error.contains('9'), "{error}");
}

#[test]
fn layers_alone() {
    freezes(&alone());
    short(&alone());
    measures(&alone());
}

dist_test!(world = 2, dist_layers, |_world: World| {
    let accelerator = joined();
    freezes(&accelerator);
    short(&accelerator);
    measures(&accelerator);
});
