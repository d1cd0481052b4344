//! First values: for a seed they are those that PyTorch draws.
//!
//! libtorch has one generator per process, so these tests have a file, and a lock, of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::path::Path;
use std::sync::Mutex;

use brigade_models::{
    BatchNorm2d, Cnn, Conv2d, Conv2dOptions, Device, Embedding, Kind, Linear, Model,
};
use serde_json::Value;

static GENERATOR: Mutex<()> = Mutex::new(());

#[test]
fn a_seed_gives_pytorchs_first_values() {
    let golden: Value = serde_json::from_str(include_str!("fixtures/cnn_seed.json")).unwrap();
    let _alone = GENERATOR.lock().unwrap();
    tch::manual_seed(golden["seed"].as_i64().unwrap());
    let model = Model::new(Cnn::new).unwrap();
    for (parameter, expected) in
        model.parameters().iter().zip(golden["parameters"].as_array().unwrap())
    {
        assert_eq!(parameter.name, expected["name"].as_str().unwrap());
        let first: Vec<f32> = serde_json::from_value(expected["first"].clone()).unwrap();
        let found = Vec::<f32>::try_from(parameter.tensor.flatten(0, -1).narrow(0, 0, 4)).unwrap();
        assert_eq!(found, first, "{}", parameter.name);
        let sum = parameter.tensor.sum(Kind::Double).double_value(&[]);
        let expected = expected["sum"].as_f64().unwrap();
        assert!((sum - expected).abs() < 1e-9, "{}: {sum}, PyTorch has {expected}", parameter.name);
    }

    tch::manual_seed(golden["seed"].as_i64().unwrap());
    let wide = Model::build().kind(Kind::Double).device(Device::Cpu).build(Cnn::new).unwrap();
    for (narrow, wide) in model.parameters().iter().zip(wide.parameters()) {
        assert_eq!(wide.tensor.kind(), Kind::Double);
        assert_eq!(narrow.tensor.to_kind(Kind::Double), wide.tensor, "{}", wide.name);
    }
}

#[test]
fn weights_of_pytorch_are_what_the_same_seed_draws_here() {
    let _alone = GENERATOR.lock().unwrap();
    let small = |p: &brigade_models::Path<'_>| {
        Conv2d::new(p / "block" / 0, 1, 2, [3, 3], Conv2dOptions::default());
        BatchNorm2d::new(p / "block" / 1, 2);
        Linear::new(p / "head", 4, 3);
        Embedding::new(p / "table", 5, 2);
    };
    tch::manual_seed(0);
    let drawn = Model::new(small).unwrap();
    for name in ["small.pth", "small_ddp.pth"] {
        let mut model = Model::new(small).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let report = model.load_weights(path).unwrap();
        assert_eq!((report.loaded, report.is_complete()), (10, true), "{name}");
        for ((name, loaded), (_, drawn)) in model.state_dict().iter().zip(drawn.state_dict()) {
            assert_eq!(loaded, &drawn, "{name}");
        }
    }
}
