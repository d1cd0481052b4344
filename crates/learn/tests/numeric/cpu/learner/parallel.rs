//! Several devices of one process: replicas on the CPU compute what the model alone computes.

use brigade_learn::{Learner, Loaders};
use brigade_nn::{BatchNorm1d, Linear, Model, ParamPath, Relu, Sequential};
use brigade_testkit::{World, dist_test};
use brigade_train::{Accelerator, Precision};
use tch::{Device, Kind, Tensor};

use brigade_learn::callbacks::{GradientAccumulation, GradientClip};

use crate::setup::*;

const THREE: [Device; 3] = [Device::Cpu; 3];

fn floats(rows: i64, stream: u64) -> (Tensor, Tensor) {
    let (inputs, classes) = data(rows, stream);
    (inputs.to_kind(Kind::Float), classes)
}

/// In `f32`, as the replicas' constructor builds them. The last batch of 49 has one sample.
fn learner(accelerator: &Accelerator, build: impl Fn(&ParamPath<'_>) -> Sequential) -> Learner {
    let data = Loaders::new(loader(floats(49, 10), 8), loader(floats(13, 20), 3)).unwrap();
    let mut first: Model<Sequential> = model(build);
    first.to_kind(Kind::Float).unwrap();
    Learner::new(accelerator, data, first).unwrap().quiet(true)
}

#[test]
fn three_replicas_train_as_the_model_alone() {
    let accelerator = alone();
    let run = |learner: Learner| {
        let mut learner = learner.with((GradientClip::new(1.0), GradientAccumulation::new(16)));
        learner.fit(2, 0.01, ()).unwrap();
        learner
    };
    let mut single = run(learner(&accelerator, mlp));
    let mut several = run(learner(&accelerator, mlp).parallel::<Tensor, _>(&THREE, mlp).unwrap());
    close(several.recorder().losses(), single.recorder().losses(), 1e-5);
    assert!(apart(&single.state_dict(), &several.state_dict()) < 1e-4);
    let predictions = |learner: &mut Learner| learner.predictions().unwrap().predictions;
    let distance = predictions(&mut single) - predictions(&mut several);
    assert!(distance.abs().max().double_value(&[]) < 1e-4);
    let item = || floats(1, 20).0.get(0);
    let (one, other) = (single.predict(item()).unwrap(), several.predict(item()).unwrap());
    assert!((one.probabilities - other.probabilities).abs().max().double_value(&[]) < 1e-4);
    // Frozen parameters stay, on replicas too.
    let split = |learner: Learner| learner.split_by_prefix(&[&["0", "1"], &["3"]]).unwrap();
    let mut learner = split(learner(&accelerator, mlp)).parallel::<Tensor, _>(&THREE, mlp).unwrap();
    let before = weights(&learner);
    learner.freeze().unwrap();
    learner.fit(1, 0.01, ()).unwrap();
    let mut changed: Vec<String> = weights(&learner)
        .into_iter()
        .zip(before)
        .filter(|(new, old)| new != old)
        .map(|(new, _)| new.0)
        .collect();
    changed.sort();
    // Normalisations train in frozen groups.
    assert_eq!(changed, ["1.bias", "1.weight", "3.bias", "3.weight"]);
}

#[test]
fn half_precision_and_buffers() {
    let accelerator = alone();
    let halved = |learner: Learner| {
        let mut learner = learner.mixed_precision(Precision::Bf16).unwrap();
        learner.fit(2, 0.01, ()).unwrap();
        learner.recorder().losses().to_vec()
    };
    let single = halved(learner(&accelerator, mlp));
    let several = halved(learner(&accelerator, mlp).parallel::<Tensor, _>(&THREE, mlp).unwrap());
    close(&several, &single, 0.05);

    fn normalised(path: &ParamPath<'_>) -> Sequential {
        Sequential::new()
            .add(BatchNorm1d::new(path / 0, FEATURES))
            .add(Linear::new(path / 1, FEATURES, 8))
            .add(Relu)
            .add(Linear::new(path / 3, 8, CLASSES))
    }
    let data = || loader(floats(6, 10), 6);
    let mut first: Model<Sequential> = model(normalised);
    first.to_kind(Kind::Float).unwrap();
    let mut learner = Learner::new(&accelerator, Loaders::train_only(data()).unwrap(), first)
        .unwrap()
        .quiet(true)
        .parallel::<Tensor, _>(&THREE, normalised)
        .unwrap();
    learner.fit(1, 0.01, ()).unwrap();
    // The statistics are those of the first device's part: two of the six rows.
    let mean = floats(6, 10).0.narrow(0, 0, 2).mean_dim(0, false, Kind::Float) * 0.1;
    let found =
        learner.buffers().into_iter().find(|it| it.name == "0.running_mean").unwrap().tensor;
    assert!((mean - found).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn devices_and_constructors_that_do_not_fit() {
    let accelerator = alone();
    let refused = |devices: &[Device], expected: &str| {
        let error =
            learner(&accelerator, mlp).parallel::<Tensor, _>(devices, mlp).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&[], "the first device of `parallel` must be the Learner's, cpu; found []");
    refused(&[Device::Cuda(0), Device::Cpu], "must be the Learner's, cpu; found [cuda:0, cpu]");
    let other =
        |path: &ParamPath<'_>| Sequential::new().add(Linear::new(path / 0, FEATURES, CLASSES));
    let error =
        learner(&accelerator, mlp).parallel::<Tensor, _>(&THREE, other).unwrap_err().to_string();
    assert!(error.contains("the constructor of another model than the Learner's"), "{error}");
    // A single device is no replica.
    let mut one = learner(&accelerator, mlp).parallel::<Tensor, _>(&[Device::Cpu], mlp).unwrap();
    let mut plain = learner(&accelerator, mlp);
    one.fit(1, 0.01, ()).unwrap();
    plain.fit(1, 0.01, ()).unwrap();
    assert_eq!(weights(&one), weights(&plain));
}

dist_test!(world = 2, dist_replicas_are_for_one_process, |_world: World| {
    let error = learner(&joined(), mlp).parallel::<Tensor, _>(&THREE, mlp).unwrap_err().to_string();
    assert!(error.contains("`parallel` is for one process, and this job has several"), "{error}");
});
