//! Two ranks measure, decide and choose as one process does with batches twice as large.

use brigade_learn::callbacks::{EarlyStopping, ReduceLrOnPlateau, SaveModel};
use brigade_learn::{Learner, Loaders, Part};
use brigade_metrics::{Accuracy, Average, F1, RocAuc};
use brigade_sampling::Sampler;
use brigade_testkit::{World, dist_test, step};
use brigade_train::Accelerator;

use crate::setup::*;

fn measured(accelerator: &Accelerator, rows: i64, batch: usize) -> Learner {
    let train = loader(data(48, 10), 8 / accelerator.processes().num_processes()).shuffle(true);
    let data = Loaders::new(train, loader(data(rows, 20), batch)).unwrap();
    learner_of(accelerator, data).metrics((
        Accuracy,
        F1::new().average(Average::Macro),
        RocAuc::new(),
    ))
}

/// Loss and metrics as bits, and all that is predicted.
fn measures(learner: &mut Learner, part: Part) -> (Vec<u64>, Vec<Vec<u64>>) {
    let found = learner.validate_on(part).unwrap();
    assert!(found.loss.is_finite() && found.metric("accuracy").is_some());
    let numbers = std::iter::once(found.loss).chain(found.metrics.iter().map(|it| it.1));
    let predicted = learner.predictions_on(part).unwrap();
    let (targets, losses) = (predicted.targets.unwrap(), predicted.losses.unwrap());
    let tensors = [&predicted.predictions, &predicted.decoded, &targets, &losses];
    (numbers.map(f64::to_bits).collect(), tensors.map(bits).to_vec())
}

dist_test!(
    world = 2,
    dist_validation_and_predictions_have_the_bits_of_one_process,
    |_world: World| {
        let (one, two) = (alone(), joined());
        // The last batch is smaller; one rank has a batch less; one has none.
        for (rows, batch) in [(13, 3), (12, 4), (5, 8)] {
            step!("{rows} rows in batches of {batch}");
            let (mut single, mut both) = (measured(&one, rows, batch), measured(&two, rows, batch));
            let expected = measures(&mut single, Part::Valid);
            assert_eq!(measures(&mut both, Part::Valid), expected);
            let targets = bits(&data(rows, 20).1);
            assert_eq!(expected.1[2], targets, "in the order of the data");
            same_on_all(&two, expected);
        }
        // Training data are predicted in order and once, and the position in them does not change.
        let order = |learner: &mut Learner| {
            let (_, predicted) = measures(learner, Part::Train);
            assert_eq!(predicted[2], bits(&data(48, 10).1));
            learner.fit(1, 0.1, ()).unwrap();
            learner.recorder().losses().to_vec()
        };
        let losses = order(&mut measured(&two, 13, 3));
        close(&losses, &order(&mut measured(&one, 13, 3)), 1e-13);
        let mut untouched = measured(&two, 13, 3);
        untouched.fit(1, 0.1, ()).unwrap();
        assert_eq!(untouched.recorder().losses(), losses);
    }
);

/// The samples from the last one to the first.
#[derive(Debug)]
struct Backwards(usize);

impl Sampler for Backwards {
    fn len(&self) -> usize {
        self.0
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        (0..self.0).rev().collect()
    }
}

dist_test!(world = 2, dist_predictions_come_in_the_order_of_the_data, |_world: World| {
    let predicted = |learner: &mut Learner| {
        let found = learner.predictions_on(Part::Valid).unwrap();
        let exact = [&found.decoded, found.targets.as_ref().unwrap()].map(bits);
        let rounded = [&found.predictions, found.losses.as_ref().unwrap()].map(values);
        (exact, rounded)
    };
    let expected = predicted(&mut measured(&alone(), 13, 3));
    for accelerator in [alone(), joined()] {
        let train = loader(data(48, 10), 4).shuffle(true);
        let valid = loader(data(13, 20), 3).sampler(Backwards(13));
        let learner = learner_of(&accelerator, Loaders::new(train, valid).unwrap());
        let found = predicted(&mut learner.metrics(Accuracy));
        assert_eq!(found.0, expected.0);
        // Each sample is in another batch now, and one of them alone in its own: a product's last bit may depend on how
        // many rows there are, and on the place of a row.
        for (found, expected) in found.1.iter().zip(&expected.1) {
            close(found, expected, 1e-12);
        }
    }
});

dist_test!(world = 2, dist_a_fit_decides_as_one_process, |_world: World| {
    let (one, two) = (alone(), joined());
    let folder = tempfile::tempdir().unwrap();
    let fit = |accelerator: &Accelerator, name: &str| {
        let mut learner = measured(accelerator, 13, 3);
        let path = folder.path().join(name);
        let save = SaveModel::new(&path).monitor("accuracy");
        // A rate with which the loss rises and falls.
        let stop = EarlyStopping::new(4);
        learner.add((save, ReduceLrOnPlateau::new(1).factor(3.0), stop));
        learner.fit(40, 1.6, ()).unwrap();
        assert_eq!(path.exists(), accelerator.is_main_process(), "rank 0 alone writes");
        learner
    };
    let (single, both) = (fit(&one, "one.pth"), fit(&two, "two.pth"));
    let (expected, found) = (single.recorder(), both.recorder());
    assert!(expected.rows().len() < 40, "it never stopped");
    let mut rates = expected.lrs().to_vec();
    rates.dedup();
    assert!(rates.len() > 2, "the rates were never reduced");
    assert_eq!(found.rows().len(), expected.rows().len());
    assert_eq!(found.lrs(), expected.lrs());
    close(found.losses(), expected.losses(), 1e-11);
    for name in expected.names() {
        let column = |learner: &Learner| -> Vec<f64> {
            learner.recorder().column(name).into_iter().map(Option::unwrap).collect()
        };
        match name.as_str() {
            // These do not depend on the last bits of the weights.
            "accuracy" | "f1_score" => assert_eq!(column(&both), column(&single), "{name}"),
            _ => close(&column(&both), &column(&single), 1e-11),
        }
    }
    // The best epoch's weights are loaded on both ranks.
    assert!(apart(&single.state_dict(), &both.state_dict()) < 1e-11);
    let chosen = |learner: &Learner| learner.callback::<SaveModel>().unwrap().best();
    assert_eq!(chosen(&single), chosen(&both));
    let best = expected.column("accuracy").into_iter().flatten().fold(0.0, f64::max);
    assert_eq!(chosen(&both), Some(best));
    ranks_agree(&both);
    let mut both = both;
    assert_eq!(both.validate().unwrap().metric("accuracy"), Some(best));
});
