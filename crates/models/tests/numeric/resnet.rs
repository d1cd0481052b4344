//! Residual networks: branches that start at zero, and what is refused.

use brigade_models::{ResNet, ResNetOptions};
use brigade_nn::{Model, ModelError, ParamPath};
use brigade_test_device::numeric_device;
use brigade_torch::Result;

/// A network on the device of the tests.
pub(crate) fn on_device(build: impl FnOnce(&ParamPath<'_>) -> ResNet) -> Result<Model<ResNet>> {
    Model::builder().device(numeric_device()).build(build)
}

#[test]
fn residual_branches_can_start_at_zero_and_wrong_shapes_are_refused() {
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
    for width_per_group in [-64, i64::MAX] {
        let options = ResNetOptions { width_per_group, ..ResNetOptions::bottleneck([1, 1, 1, 1]) };
        let error = on_device(|p| ResNet::new(p, 10, options)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ModelError::Build { .. })), "{error}");
    }
}
