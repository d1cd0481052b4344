//! A Learner whose model is spread over the ranks finds what one with whole models finds.

use brigade_learn::callbacks::{Ema, GradientAccumulation, GradientClip, SaveModel, Swa};
use brigade_learn::{Learner, Loaders, Part, Predictor};
use brigade_metrics::Accuracy;
use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential};
use brigade_optim::{AdamW, Lamb};
use brigade_sharding::Sharding;
use brigade_testkit::{World, dist_test, step};
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::setup::*;

fn strategies() -> [Sharding; 3] {
    [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()]
}

/// Two parameter groups; 13 samples to validate with, so that the ranks have unequal numbers of them.
fn grouped(accelerator: &Accelerator, sharding: Option<Sharding>) -> Learner {
    let data = loaders(8 / accelerator.processes().num_processes());
    Learner::new(accelerator, data, model(mlp))
        .unwrap()
        .split_by_prefix(&[&["0", "1"], &["3"]])
        .unwrap()
        .optimizer(AdamW::fastai())
        .metrics(Accuracy)
        .sharding(sharding)
        .unwrap()
        .quiet(true)
}

/// The recorder's numbers but for the times.
fn recorded(learner: &Learner) -> Vec<f64> {
    let recorder = learner.recorder();
    let rows = recorder.rows().iter().flat_map(|row| row.values.iter().flatten());
    let numbers = recorder.losses().iter().chain(recorder.lrs()).chain(recorder.momenta());
    numbers.chain(rows).copied().collect()
}

type Recipe = (&'static str, fn(&mut Learner));

const RECIPES: [Recipe; 5] = [
    ("frozen, then not", |learner| {
        learner.freeze().unwrap();
        learner.fit_one_cycle(1, 1e-2, ()).unwrap();
        learner.unfreeze().unwrap();
        learner.fit_one_cycle(2, 1e-3..1e-2, ()).unwrap();
    }),
    ("clipped", |learner| learner.fit(2, 1e-2, GradientClip::new(0.1)).unwrap()),
    ("averages", |learner| {
        learner.fit(2, 1e-2, (Ema::new(0.7), Swa::new(0))).unwrap();
    }),
    ("the best epoch", |learner| {
        let folder = tempfile::tempdir().unwrap();
        let path = learner.accelerator().processes().broadcast_object(folder.path().to_owned(), 0);
        let save = SaveModel::new(path.unwrap().join("best.pth")).with_optimizer(true);
        learner.fit(3, 0.2, save).unwrap();
        // Other ranks read the files that rank 0 has sent, before its folder is removed.
        learner.accelerator().processes().wait_for_everyone().unwrap();
    }),
    ("a rate is looked for", |learner| {
        let found = learner.lr_find().unwrap();
        assert!(found.losses().len() > 20);
        learner.fit(1, found.valley().unwrap(), ()).unwrap();
    }),
];

dist_test!(world = 2, seconds = 120, dist_fits_have_the_bits_of_whole_models, |_world: World| {
    let accelerator = joined();
    for (name, fit) in RECIPES {
        let mut whole = grouped(&accelerator, None);
        fit(&mut whole);
        let (expected, numbers) = (weights(&whole), recorded(&whole));
        for sharding in strategies() {
            step!("{name}, {}", sharding.strategy);
            let mut learner = grouped(&accelerator, Some(sharding));
            fit(&mut learner);
            assert!(learner.is_sharded());
            if name == "clipped" {
                // A norm over shards is summed in another order.
                close(&recorded(&learner), &numbers, 1e-12);
            } else {
                let bits =
                    |numbers: &[f64]| numbers.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&recorded(&learner)), bits(&numbers), "{name}");
                assert_eq!(weights(&learner), expected, "{name}");
            }
            ranks_agree(&learner);
        }
    }
});

dist_test!(world = 3, dist_accumulated_windows_and_uneven_rows, |_world: World| {
    // 16 rows of the first layer and 3 classes over 3 ranks; windows of several batches.
    let accelerator = joined();
    let fit = |sharding: Option<Sharding>| {
        let mut learner = grouped(&accelerator, sharding);
        learner.fit(2, 1e-2, GradientAccumulation::new(20)).unwrap();
        learner
    };
    let whole = fit(None);
    let expected = whole.state_dict().deep_clone().unwrap();
    for sharding in strategies() {
        let learner = fit(Some(sharding));
        close(learner.recorder().losses(), whole.recorder().losses(), 1e-12);
        if let Some(state) = learner.full_state_dict().unwrap() {
            assert!(apart(&expected, &state) < 1e-12);
        }
        // 13 samples in batches of 3: the third rank has none in the second round.
        for (rows, batch) in [(13, 3), (4, 2), (1, 3)] {
            let valid = || loader(data(rows, 20), batch);
            let predicted = |accelerator: &Accelerator, from: &Learner| {
                let data = Loaders::new(loader(data(48, 10), 2), valid()).unwrap();
                let mut other = learner_of(accelerator, data).metrics(Accuracy);
                let sharded = accelerator.processes().use_distributed();
                other = other.sharding(sharded.then(Sharding::zero3)).unwrap();
                let state = from.full_state_dict().unwrap();
                let state = from.accelerator().processes().broadcast_object(
                    state.map(|it| {
                        it.iter()
                            .map(|(name, it)| (name.to_owned(), values(it), it.size()))
                            .collect::<Vec<_>>()
                    }),
                    0,
                );
                let mut here = brigade_nn::StateDict::new();
                for (name, values, size) in state.unwrap().unwrap() {
                    here.insert(name, Tensor::from_slice(&values).reshape(size)).unwrap();
                }
                other.state_mut().load_state_dict(&here).unwrap();
                let found = other.validate().unwrap();
                let all = other.predictions_on(Part::Valid).unwrap();
                let one = other.predict(data_row(rows)).unwrap();
                let numbers = [found.loss, found.metric("accuracy").unwrap()];
                (
                    numbers,
                    [all.predictions, all.targets.unwrap(), all.losses.unwrap(), one.probabilities],
                )
            };
            let (expected, found) =
                (predicted(&alone(), &learner), predicted(&accelerator, &learner));
            close(&found.0, &expected.0, 1e-12);
            for (found, expected) in found.1.iter().zip(&expected.1) {
                assert_eq!(found.size(), expected.size());
                close(&values(found), &values(expected), 1e-12);
            }
        }
    }
});

fn data_row(rows: i64) -> Tensor {
    data(rows, 20).0.get(0)
}

fn wide(path: &ParamPath<'_>) -> Sequential {
    Sequential::new().add(Linear::new(path / 0, FEATURES, 16)).add(Relu).add(Linear::new(
        path / 2,
        16,
        CLASSES,
    ))
}

dist_test!(world = 2, dist_a_model_without_memory_is_trained_saved_and_loaded, |_world: World| {
    let accelerator = joined();
    let folder = tempfile::tempdir().unwrap();
    let path = accelerator.processes().broadcast_object(folder.path().to_owned(), 0).unwrap();
    let made = |model: Model<Sequential>, sharding: Option<Sharding>, accelerator: &Accelerator| {
        let data = Loaders::new(
            loader(data(48, 10), 8 / accelerator.processes().num_processes()),
            loader(data(13, 20), 3),
        );
        Learner::new(accelerator, data.unwrap(), model)
            .unwrap()
            .optimizer(Lamb::default().lr(0.02))
            .sharding(sharding)
            .unwrap()
            .quiet(true)
    };
    let drawn = || {
        accelerator.set_seed(7);
        Model::builder().kind(Kind::Double)
    };
    let mut whole = made(drawn().build(wide).unwrap(), None, &accelerator);
    let deferred = drawn().deferred().build(wide).unwrap();
    let mut learner = made(deferred, Some(Sharding::zero3()), &accelerator);
    whole.fit(1, 0.02, ()).unwrap();
    learner.fit(1, 0.02, ()).unwrap();
    let expected = whole.state_dict().deep_clone().unwrap();
    let state = learner.full_state_dict().unwrap();
    assert_eq!(state.is_some(), accelerator.is_main_process());
    assert!(state.is_none_or(|state| apart(&expected, &state) < 1e-12));

    // The files are those of a Learner with whole models, and each reads the other's.
    learner.save(path.join("sharded.pth"), true).unwrap();
    whole.save(path.join("whole.pth"), true).unwrap();
    learner.export(path.join("export.pth")).unwrap();
    learner.fit(1, 0.02, ()).unwrap();
    let goes_on = learner.full_state_dict().unwrap();
    for (file, sharding) in [
        ("whole.pth", Some(Sharding::zero3())),
        ("sharded.pth", Some(Sharding::zero2())),
        ("sharded.pth", None),
    ] {
        step!("{file} with {sharding:?}");
        let other = Model::builder().kind(Kind::Double).build(wide).unwrap();
        let mut other = made(other, sharding, &accelerator);
        other.load(path.join(file), true).unwrap();
        other.fit(1, 0.02, ()).unwrap();
        let state = other.full_state_dict().unwrap();
        assert!(state.zip(goes_on.as_ref()).is_none_or(|(it, at)| apart(at, &it) < 1e-11));
    }
    if accelerator.is_main_process() {
        let one = alone();
        let other = Model::builder().kind(Kind::Double).build(wide).unwrap();
        let mut other = made(other, None, &one);
        other.load(path.join("sharded.pth"), true).unwrap();
        assert!(apart(&expected, &other.state_dict()) < 1e-12);
        let model = Model::builder().kind(Kind::Double).build(wide).unwrap();
        let mut predictor =
            Predictor::load::<Tensor, _>(&one, path.join("export.pth"), model).unwrap();
        let row = data_row(1);
        let found = predictor.predict(row.shallow_clone()).unwrap().probabilities;
        close(&values(&found), &values(&other.predict(row).unwrap().probabilities), 1e-6);
    }
    // Weights that do not fit are the same error on all ranks, and change nothing.
    let before = weights(&learner);
    let narrow = |path: &ParamPath<'_>| Sequential::new().add(Linear::new(path / 0, 6, 3));
    let narrow = Model::builder().kind(Kind::Double).build(narrow).unwrap();
    let mut narrow = made(narrow, None, &accelerator);
    narrow.fit(1, 0.02, ()).unwrap();
    narrow.save(path.join("narrow.pth"), true).unwrap();
    narrow.save(path.join("alone.pth"), false).unwrap();
    let wrong =
        [("narrow.pth", true), ("narrow.pth", false), ("alone.pth", true), ("none.pth", true)];
    for (file, with_optimizer) in wrong {
        assert!(learner.load(path.join(file), with_optimizer).is_err(), "{file}");
        assert_eq!(weights(&learner), before, "{file}");
    }
    learner.fit(1, 0.02, ()).unwrap();
    // Folders of ranks stay until all have read them.
    accelerator.processes().wait_for_everyone().unwrap();
});
