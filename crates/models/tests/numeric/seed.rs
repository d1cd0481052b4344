//! First values of the CNN: for a seed they are those that PyTorch draws.

use brigade_models::Cnn;
use brigade_nn::Model;
use serde_json::Value;
use tch::{Device, Kind};

#[test]
fn a_seed_gives_pytorchs_first_values() {
    let golden: Value = serde_json::from_str(include_str!("../fixtures/cnn_seed.json")).unwrap();
    tch::manual_seed(golden["seed"].as_i64().unwrap());
    let model = Model::builder().device(brigade_test_device::device()).build(Cnn::new).unwrap();
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
    let wide = Model::builder().kind(Kind::Double).device(Device::Cpu).build(Cnn::new).unwrap();
    for (narrow, wide) in model.parameters().iter().zip(wide.parameters()) {
        assert_eq!(wide.tensor.kind(), Kind::Double);
        assert_eq!(
            narrow.tensor.to_kind(Kind::Double).to_device(Device::Cpu),
            wide.tensor,
            "{}",
            wide.name
        );
    }
}
