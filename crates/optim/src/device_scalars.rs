//! Learning rate, loss scale and `found_inf` of a step as tensors on a device.

use tch::Tensor;

/// Learning rate, loss scale and `found_inf` of a step as floating-point tensors on the parameters' device.
/// [`Optimizer::step_with`] does not wait for their values, and the kernels that it launches read them from memory, so
/// that a step captured in a CUDA graph can be replayed with other values.
///
/// [`Optimizer::step_with`]: crate::Optimizer::step_with
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceScalars<'a> {
    /// Learning rate: one number for the optimizer, to which groups with a rate of their own keep their initial ratio,
    /// or one number for each of [`Optimizer::groups`](crate::Optimizer::groups). `None` stands for the optimizer's own
    /// rate.
    pub lr: Option<&'a Tensor>,
    /// Loss scale, by which gradients are divided. The content of the gradients is unspecified afterwards.
    pub grad_scale: Option<&'a Tensor>,
    /// Flag that is not 0 if a gradient is infinite or NaN. The step is then skipped: parameters and states keep their
    /// bits, and no step is counted.
    pub found_inf: Option<&'a Tensor>,
}

impl DeviceScalars<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.lr.is_none() && self.grad_scale.is_none() && self.found_inf.is_none()
    }
}
