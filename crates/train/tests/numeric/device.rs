//! Accelerators on the device of the tests.

use brigade_test_device::numeric_device;
use brigade_torch::Backend;
use brigade_train::{Accelerator, AcceleratorBuilder};
use tch::Device;

/// On a GPU with all digits of float32, and with Gloo: NCCL refuses several ranks on one GPU.
pub(crate) fn builder() -> AcceleratorBuilder {
    let device = numeric_device();
    let builder = Accelerator::builder().device(device).tf32(false).quiet(true);
    match device {
        Device::Cpu => builder,
        _ => builder.backend(Backend::Gloo(Default::default())),
    }
}
