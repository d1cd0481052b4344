//! First values of all sizes against torchvision's.

use brigade_models::{ResNet, ResNetOptions};
use brigade_nn::{Model, ParamPath, StateDict};
use serde_json::Value;
use tch::Kind;

use crate::resnet::on_device;

/// A size: its name in torchvision and its constructor.
type Size = (&'static str, fn(&ParamPath<'_>) -> ResNet);

#[test]
fn a_seed_gives_torchvisions_first_values_and_all_sizes_are_its() {
    let golden: Value =
        serde_json::from_str(include_str!("../../fixtures/resnet_seed.json")).unwrap();
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
