//! A model whose weights a device map has on the disk predicts as one in memory, also on two ranks, and is not trained.

use brigade_learn::{Learner, Loaders};
use brigade_nn::Model;
use brigade_sharding::device_map::DeviceMap;
use brigade_testkit::{World, dist_test};
use brigade_train::Accelerator;
use tch::Kind;

use crate::setup::*;

/// Each rank has a map of its own.
fn check(accelerator: &Accelerator) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let loaders = || Loaders::new(loader(data(49, 10), 8), loader(data(13, 20), 3)).unwrap();
    model(mlp).save_weights(&path).unwrap();
    let map = match accelerator.processes().process_index() {
        0 => DeviceMap::by_hand([("", "cpu"), ("0", "disk")]),
        _ => DeviceMap::by_hand([("", "disk")]),
    };
    let dispatched = Model::builder().kind(Kind::Double).deferred().build(mlp).unwrap();
    let dispatched = dispatched.dispatch(&path, &map).unwrap();
    let mut whole = Learner::new(accelerator, loaders(), model(mlp)).unwrap().quiet(true);
    let mut learner = Learner::new(accelerator, loaders(), dispatched).unwrap().quiet(true);
    let predicted = learner.predictions().unwrap();
    let expected = whole.predictions().unwrap();
    assert_eq!(predicted.predictions, expected.predictions);
    assert_eq!(predicted.predictions.size()[0], 13);
    let (validated, expected) = (learner.validate().unwrap(), whole.validate().unwrap());
    assert_eq!(validated.loss, expected.loss);
    let error = learner.fit(1, 0.1, ()).unwrap_err().to_string();
    assert!(error.contains("a device map has the weights"), "{error}");
    assert_eq!(learner.predictions().unwrap().predictions, predicted.predictions);
}

#[test]
fn a_model_on_the_disk_predicts_as_one_in_memory() {
    check(&alone());
}

dist_test!(world = 2, dist_models_on_the_disk_predict_as_one_in_memory, |_world: World| check(
    &joined()
));
