//! Models and tensors on the device of the tests.

use brigade_nn::{Model, ParamPath};
use brigade_test_device::numeric_device;
use tch::{Device, Kind};

/// A model on the device of the tests.
pub(crate) fn build<M>(
    constructor: impl FnOnce(&ParamPath<'_>) -> M,
) -> brigade_torch::Result<Model<M>> {
    Model::builder().device(numeric_device()).build(constructor)
}

/// What a tensor of 32-bit floats is made of.
pub(crate) fn float() -> (Kind, Device) {
    (Kind::Float, numeric_device())
}
