//! What cannot be: an error that says it, and a Learner that can be used afterwards.

use std::fs;

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::callbacks::{
    CutMix, EarlyStopping, GradientAccumulation, MixUp, ParamScheduler, ReduceLrOnPlateau,
    SaveModel,
};
use brigade_learn::interpretation::{ClassInterpretation, Interpretation};
use brigade_learn::loss::loss_from;
use brigade_learn::{
    Event, FitOptions, Hyper, LearnError, Learner, Loaders, Part, Predictor, Rates,
};
use brigade_metrics::{Accuracy, ErrorRate, Fold, Folded, Metric, Mse};
use brigade_nn::{Flatten, Linear, Model, ParamPath, Sequential};
use brigade_schedule::Annealing;
use brigade_sharding::Sharding;
use brigade_testkit::{World, dist_test};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::setup::*;

fn simple() -> Learner {
    learner(&alone())
}

fn refused<T>(outcome: Result<T>, expected: &str) {
    let error = outcome.err().unwrap_or_else(|| panic!("no error: {expected}")).to_string();
    assert!(error.contains(expected), "{error}");
}

fn usable(learner: &mut Learner) {
    learner.fit(1, 0.1, ()).unwrap();
    assert!(learner.recorder().last("valid_loss").unwrap().is_finite());
}

#[test]
fn data_that_cannot_be_trained_with() {
    let accelerator = alone();
    let empty = || loader((data(1, 1).0.narrow(0, 0, 0), data(1, 1).1.narrow(0, 0, 0)), 4);
    refused(Loaders::new(empty(), loader(data(8, 1), 4)), "the training loader has no sample");
    refused(Loaders::new(loader(data(8, 1), 4), empty()), "the validation loader has no sample");
    let dropped = || loader(data(8, 1), 16).drop_last(true);
    let mut learner =
        learner_of(&accelerator, Loaders::new(dropped(), loader(data(8, 1), 4)).unwrap());
    refused(learner.fit(1, 0.1, ()), "batch");
    let mut learner = learner_of(&accelerator, Loaders::train_only(loader(data(8, 1), 4)).unwrap());
    refused(learner.validate(), "the Loaders have no validation data");
    refused(learner.predictions(), "the Loaders have no validation data");
    refused(learner.tta(2, 0.25), "test-time augmentation needs validation data");
    refused(learner.show_batch(2), "these data cannot be drawn");
    learner.fit(1, 0.1, ()).unwrap();
    assert_eq!(learner.recorder().names(), ["train_loss"]);
    assert!(learner.validate_on(Part::Train).unwrap().loss.is_finite());

    // A label beyond the classes, in validation and in training.
    let beyond = |rows| (data(rows, 20).0, data(rows, 20).1 + 2);
    let data_with = |train, valid| Loaders::new(loader(train, 8), loader(valid, 3)).unwrap();
    let mut learner = learner_of(&accelerator, data_with(data(48, 10), beyond(13)));
    refused(learner.fit(1, 0.1, ()), "out of bounds");
    refused(learner.validate(), "out of bounds");
    let mut learner = learner_of(&accelerator, data_with(beyond(48), data(13, 20)));
    refused(learner.fit(1, 0.1, ()), "out of bounds");
    let negative = (data(48, 10).0, data(48, 10).1 - 7);
    refused(
        learner_of(&accelerator, data_with(negative, data(13, 20))).fit(1, 0.1, ()),
        "out of bounds",
    );
    // Numbers where classes are expected, and another width than the model's.
    let floats = || (data(48, 10).0, data(48, 10).1.to_kind(Kind::Double));
    let learner = |train| learner_of(&accelerator, Loaders::train_only(loader(train, 8)).unwrap());
    refused(learner(floats()).fit(1, 0.1, ()), "expected class numbers");
    let narrow = (data(48, 10).0.narrow(1, 0, 5), data(48, 10).1);
    refused(learner(narrow).fit(1, 0.1, ()), "");
    // Training with only one class is possible.
    let one = (data(48, 10).0, data(48, 10).1.zeros_like());
    let mut learner = learner(one);
    learner.fit(1, 0.1, ()).unwrap();
}

#[test]
fn batches_without_targets() {
    let bare = |rows, stream, batch| {
        let set = TensorDataset::new((data(rows, stream).0, None::<Tensor>)).unwrap();
        DataLoader::new(set).batch_size(batch).threads(0)
    };
    let mut learner = learner_of(&alone(), Loaders::new(bare(48, 10, 8), bare(13, 20, 3)).unwrap())
        .metrics(Accuracy);
    refused(
        learner.fit(1, 0.1, ()),
        "a training batch has no targets, and no callback has set a loss",
    );
    // A callback may compute the loss.
    let own = At::new([Event::AfterLoss], |_, learner| {
        let loss = learner.predictions().unwrap().square().mean(None::<Kind>);
        learner.set_loss_for_backward(loss);
        Ok(())
    });
    let before = weights(&learner);
    learner.fit(1, 0.1, own).unwrap();
    assert_ne!(weights(&learner), before);
    assert_eq!(learner.recorder().last("valid_loss"), None);
    let predicted = learner.predictions().unwrap();
    assert_eq!((predicted.predictions.size(), predicted.targets.is_none()), (vec![13, 3], true));
    assert!(predicted.losses.is_none());
    refused(Interpretation::from_learner(&mut learner), "an interpretation needs targets");
}

/// A metric that does as it is told.
#[derive(Debug)]
struct Odd(&'static str);

impl Metric for Odd {
    type Value = f64;

    fn name(&self) -> String {
        "odd".to_owned()
    }

    fn fold(&self, _predictions: &Tensor, _targets: &Tensor) -> Result<Fold> {
        match self.0 {
            "panics" => panic!("on purpose"),
            "fails" => Err(Error::custom("on purpose")),
            _ => Ok(Fold::Sums(Tensor::from_slice(&[1f64]))),
        }
    }

    fn value(&self, _folded: &Folded) -> Result<f64> {
        match self.0 {
            "panics in the end" => panic!("{} purpose", "on"),
            "is nothing" => Ok(f64::NAN),
            _ => Err(Error::custom("on purpose")),
        }
    }
}

#[test]
fn metrics_and_columns() {
    for how in ["panics", "fails", "panics in the end", "fails in the end"] {
        let mut learner = simple().metrics(Odd(how));
        let panicked = if how.starts_with("panics") { "it panicked: " } else { "" };
        let expected = format!("the metric `odd` failed: {panicked}on purpose");
        refused(learner.fit(1, 0.1, ()), &expected);
        refused(learner.validate(), &expected);
        usable(&mut learner.metrics(()));
    }
    let mut learner = simple().metrics(Odd("is nothing"));
    learner.fit(4, 0.1, EarlyStopping::new(2).monitor("odd")).unwrap();
    assert_eq!(learner.recorder().rows().len(), 2, "a NaN is never the best");
    let mut twice = simple().metrics((Accuracy, ErrorRate, Accuracy));
    refused(twice.fit(1, 0.1, ()), "two columns of the recorder are named `accuracy`");
    refused(twice.validate(), "two columns of the recorder are named `accuracy`");
    simple().metrics((Accuracy, Accuracy.named("again"))).fit(1, 0.1, ()).unwrap();
    let mut learner = simple().metrics(Accuracy.named("valid_loss"));
    refused(learner.fit(1, 0.1, ()), "two columns of the recorder are named `valid_loss`");
    let unknown =
        "it monitors `acuracy`, which is not recorded; there are train_loss, valid_loss, accuracy";
    let mut learner = simple().metrics(Accuracy);
    refused(learner.fit(1, 0.1, EarlyStopping::new(1).monitor("acuracy")), unknown);
    refused(learner.fit(1, 0.1, ReduceLrOnPlateau::new(1).monitor("acuracy")), unknown);
    refused(learner.fit(1, 0.1, SaveModel::new("x.pth").monitor("acuracy")), unknown);
    usable(&mut learner);
}

#[test]
fn rates_and_numbers() {
    let two = || simple().split_by_prefix(&[&["0", "1"], &["3"]]).unwrap();
    let length = "found 3 rates for 2 parameter groups";
    refused(two().fit(1, vec![0.1, 0.2, 0.3], ()), length);
    refused(two().fit_one_cycle(1, vec![0.1, 0.2, 0.3], ()), length);
    for rate in [-0.1, f64::NAN, f64::INFINITY] {
        let expected = format!("a learning rate is {rate}");
        refused(two().fit(1, rate, ()), &expected);
        refused(two().fit_flat_cos(1, Rates::up_to(rate), ()), "a learning rate is");
        let options = FitOptions { weight_decay: Some(rate), ..FitOptions::default() };
        refused(two().fit_with(1, options, ()), &format!("weight_decay cannot be {rate}"));
        let schedule = ParamScheduler::new(Hyper::Momentum, Annealing::Constant(rate));
        refused(two().fit(1, 0.1, schedule), &format!("momentum cannot be {rate}"));
        let mut learner = two();
        learner.fit(1, 0.1, ()).unwrap();
        assert!(learner.state_mut().set_hyper(Hyper::Lr, &[0.1, rate]).is_err());
        assert_eq!(learner.hypers()[0].lr, 0.1, "nothing was changed");
    }
    refused(two().fit(1, 0.0..0.1, ()), "a learning rate is NaN");
    let schedules = vec![Annealing::Constant(0.1); 3];
    refused(
        two().fit(1, 0.1, ParamScheduler::each_group(Hyper::Lr, schedules)),
        "found 3 values of lr for 2 parameter groups",
    );
    refused(two().freeze_to(3), "freeze_to(3): the model has 2 parameter groups");
    refused(two().freeze_to(-3), "freeze_to(-3)");
    for callback in [MixUp::new(-1.0), MixUp::new(f64::NAN)] {
        refused(two().fit(1, 0.1, callback), "the parameter of its Beta distribution is");
    }
    refused(
        two().fit(1, 0.1, CutMix::new(1.0)),
        "CutMix needs images [n, channels, height, width]",
    );
    // No epochs are no training: as fastai's, which prints a header.
    let mut learner = two();
    let before = weights(&learner);
    learner.fit(0, 0.1, GradientAccumulation::new(16)).unwrap();
    learner.fit_one_cycle(0, 0.1, ()).unwrap();
    assert_eq!(weights(&learner), before);
    assert!(learner.recorder().rows().is_empty() && learner.recorder().names().len() == 2);
    usable(&mut learner);
}

#[test]
fn sharded_models() {
    let mut learner = simple().sharding(Sharding::zero3()).unwrap();
    let constructor = |path: &ParamPath<'_>| mlp(path);
    let several = simple().sharding(Sharding::zero3()).unwrap();
    let several = several.parallel::<Tensor, _>(&[Device::Cpu, Device::Cpu], constructor);
    refused(
        several,
        "`parallel` keeps the whole model on each device, and the Accelerator shards it (zero3)",
    );
    usable(&mut learner);
    // Whole weights can be read only within a scope.
    let weight = |state: &brigade_learn::LearnerState| Ok(state.parameters()[0].tensor.f_norm()?);
    refused(weight(&learner), "gathered");
    assert!(learner.gathered(weight).unwrap().double_value(&[]) > 0.0);
    refused(learner.gathered(|it| it.gathered(weight)), "gathered");
    usable(&mut learner);
    refused(learner.sharding(Sharding::zero2()), "`sharding` comes after the model was prepared");
    refused(simple().sharding(Sharding::hybrid(2)), "1");
}

#[test]
fn models_without_memory() {
    let deferred = || Model::builder().kind(Kind::Double).deferred().build(mlp).unwrap();
    let learner = || Learner::new(&alone(), loaders(8), deferred()).unwrap().quiet(true);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.pth");
    let mut first = learner();
    assert!(first.lr_find().unwrap().losses().len() > 10);
    usable(&mut first);
    first.save(&path, false).unwrap();
    let mut second = learner();
    second.load(&path, false).unwrap();
    assert_eq!(weights(&second), weights(&first));
}

#[test]
fn models_and_groups() {
    let nothing = |_: &ParamPath<'_>| Sequential::new().add(Flatten);
    refused(Learner::new(&alone(), loaders(8), nothing), "the model has no parameter to train");
    refused(simple().split_by_prefix(&[&["0"], &["3"]]), "parameter `1.");
    refused(simple().split_by_prefix(&[&["0", "1"], &["1", "3"]]), "is in 2 parameter groups");
    refused(simple().split_by_prefix(&[&["0", "1", "3"], &["9"]]), "a parameter group is empty");
    let all: Vec<String> = simple().parameters().into_iter().map(|it| it.name).collect();
    let unknown = vec![all, vec!["head".to_owned()]];
    refused(
        simple().split_parameters(unknown),
        "a parameter group has `head`, which the model lacks",
    );
    // Another number of tensors than the model takes.
    let more = At::new([Event::BeforeBatch], |_, learner| {
        let twice = [0, 0].map(|index: usize| learner.inputs()[index].shallow_clone());
        learner.set_inputs(twice.into());
        Ok(())
    });
    let mut learner = simple();
    refused(learner.fit(1, 0.1, more), "another number of tensors as the model's input");
    usable(&mut learner);
}

#[test]
fn files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("text.pth"), b"a text").unwrap();
    let mut learner = simple();
    let before = weights(&learner);
    refused(learner.load(path("none.pth"), false), "none.pth");
    refused(learner.load(path("text.pth"), false), "text.pth cannot be loaded");
    // A whole file of another model, and one cut short.
    let small = |path: &ParamPath<'_>| Linear::new(path, FEATURES, CLASSES);
    let other = Learner::new(&alone(), loaders(8), model(small)).unwrap();
    other.save(path("other.pth"), false).unwrap();
    assert!(learner.load(path("other.pth"), false).is_err());
    learner.save(path("own.pth"), false).unwrap();
    let whole = fs::read(path("own.pth")).unwrap();
    fs::write(path("half.pth"), &whole[..whole.len() / 2]).unwrap();
    refused(learner.load(path("half.pth"), false), "half.pth cannot be loaded");
    assert_eq!(weights(&learner), before);

    // A custom loss cannot be serialized.
    let closure = loss_from("mine", |predictions, _| Ok(predictions.square().mean(None::<Kind>)));
    refused(
        simple().loss(closure).export(path("mine.pth")),
        "the loss `mine` is defined by the program",
    );
    assert!(!path("mine.pth").exists());
    learner.export(path("whole.pth")).unwrap();
    let load =
        |name: &str| Predictor::load::<Tensor, _>(&alone(), path(name), model(mlp)).map(drop);
    load("whole.pth").unwrap();
    refused(load("own.pth"), "it is not an export of a Learner");
    refused(load("text.pth"), "text.pth cannot be loaded");
    let error =
        Predictor::load::<Tensor, _>(&alone(), path("whole.pth"), model(small)).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(LearnError::Format { .. })), "{error}");
    let mut predictor =
        Predictor::load::<Tensor, _>(&alone(), path("whole.pth"), model(mlp)).unwrap();
    refused(predictor.predict("dog.jpg"), "the data do not define how an item is read");
    assert!(predictor.predict(Tensor::from_slice(&[1f64, 2.0])).is_err());
    let row = data(1, 20).0.get(0);
    let ours = learner.predict(row.copy()).unwrap().probabilities;
    let theirs = predictor.predict(row).unwrap().probabilities;
    assert!((ours - theirs).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn interpretations() {
    let mut learner = simple().loss(Mse);
    let error = ClassInterpretation::from_learner(&mut learner).unwrap_err().to_string();
    assert!(error.contains("the confusion of classes needs a loss of classes"), "{error}");
}

/// What one rank alone sees of the data is an error on it; the other ends, too.
fn on_one(accelerator: &Accelerator) -> String {
    let world = accelerator.processes().num_processes() as i64;
    let (inputs, classes) = data(13, 20);
    // The second batch of three, which is rank 1's.
    let _ = classes.narrow(0, 3, 3).fill_(9);
    let data =
        Loaders::new(loader(data(48, 10), (8 / world) as usize), loader((inputs, classes), 3));
    learner_of(accelerator, data.unwrap()).fit(1, 0.1, ()).unwrap_err().to_string()
}

dist_test!(world = 2, dist_an_error_of_one_rank_ends_both, |_world: World| {
    let accelerator = joined();
    let error = on_one(&accelerator);
    let mine = accelerator.processes().process_index() == 1;
    assert_eq!(error.contains("out of bounds"), mine, "{error}");
});
