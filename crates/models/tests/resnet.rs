//! Residual networks: first values against torchvision's, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Mutex;

use brigade_gpukit::numeric_device;
use brigade_models::{ResNet, ResNetOptions};
use brigade_nn::{Error, Kind, Model, ParamPath, StateDict};
use serde_json::Value;

/// libtorch has one generator per process.
static GENERATOR: Mutex<()> = Mutex::new(());

/// A network on the device of the tests.
fn on_device(build: impl FnOnce(&ParamPath<'_>) -> ResNet) -> brigade_nn::Result<Model<ResNet>> {
    Model::builder().device(numeric_device()).build(build)
}

/// A size: its name in torchvision and its constructor.
type Size = (&'static str, fn(&ParamPath<'_>) -> ResNet);

#[test]
fn a_seed_gives_torchvisions_first_values_and_all_sizes_are_its() {
    let golden: Value = serde_json::from_str(include_str!("fixtures/resnet_seed.json")).unwrap();
    let next =
        ResNetOptions { groups: 32, width_per_group: 4, ..ResNetOptions::bottleneck([3, 4, 6, 3]) };
    let wide = ResNetOptions { groups: 1, width_per_group: 128, ..next };
    let networks: [Size; 5] = [
        ("resnet18", |path| ResNet::resnet18(path, 10)),
        ("resnet34", |path| ResNet::resnet34(path, 10)),
        ("resnet50", |path| ResNet::resnet50(path, 10)),
        ("resnet101", |path| ResNet::resnet101(path, 10)),
        ("resnet152", |path| ResNet::resnet152(path, 10)),
    ];
    let _alone = GENERATOR.lock().unwrap();
    let compare = |name: &str, model: &Model<ResNet>| {
        let golden = &golden["models"][name];
        assert_eq!(model.num_parameters() as u64, golden["parameters"].as_u64().unwrap(), "{name}");
        assert_eq!(model.state_dict().len() as u64, golden["tensors"].as_u64().unwrap(), "{name}");
        let state: StateDict = model.state_dict();
        for expected in golden["weights"].as_array().into_iter().flatten() {
            let name = expected["name"].as_str().unwrap();
            let found = state.get(name).unwrap();
            let first: Vec<f32> = serde_json::from_value(expected["first"].clone()).unwrap();
            let begin = Vec::<f32>::try_from(found.flatten(0, -1).narrow(0, 0, 3)).unwrap();
            let close = begin.iter().zip(&first).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs());
            assert!(close, "{name}: {begin:?}, torchvision has {first:?}");
            let sum = found.sum(Kind::Double).double_value(&[]);
            let expected = expected["sum"].as_f64().unwrap();
            assert!((sum - expected).abs() < 1e-5, "{name}: {sum}, torchvision has {expected}");
        }
    };
    for (name, build) in networks {
        tch::manual_seed(golden["seed"].as_i64().unwrap());
        compare(name, &on_device(build).unwrap());
    }
    compare("resnext50_32x4d", &on_device(|path| ResNet::new(path, 10, next)).unwrap());
    compare("wide_resnet50_2", &on_device(|path| ResNet::new(path, 10, wide)).unwrap());
}

#[test]
fn residual_branches_can_start_at_zero_and_wrong_shapes_are_refused() {
    let _alone = GENERATOR.lock().unwrap();
    let zero = ResNetOptions { zero_init_residual: true, ..ResNetOptions::basic([1, 1, 1, 1]) };
    let model = on_device(|path| ResNet::new(path, 2, zero)).unwrap();
    for parameter in model.parameters().iter().filter(|p| p.name.contains(".bn")) {
        let largest = parameter.tensor.abs().max().double_value(&[]);
        let expected = if parameter.name.ends_with("bn1.weight") { 1.0 } else { 0.0 };
        assert_eq!(largest, expected, "{}", parameter.name);
    }
    let grouped = ResNetOptions { groups: 2, ..ResNetOptions::basic([1, 1, 1, 1]) };
    let error = on_device(|path| ResNet::new(path, 2, grouped)).unwrap_err();
    assert!(error.to_string().contains("bottleneck"), "{error}");
}

#[test]
fn impossible_widths_are_refused() {
    let _alone = GENERATOR.lock().unwrap();
    for width_per_group in [-64, i64::MAX] {
        let options = ResNetOptions { width_per_group, ..ResNetOptions::bottleneck([1, 1, 1, 1]) };
        let error = on_device(|p| ResNet::new(p, 10, options)).unwrap_err();
        assert!(matches!(error, Error::Build { .. }), "{error}");
    }
}
