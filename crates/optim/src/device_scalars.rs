//! The numbers of a step that are tensors.

use tch::Tensor;

/// Numbers of a step that are on the parameters' device: with [`Optimizer::step_with`] the host waits for none
/// of them, and what it launches holds none of their values, so that recorded steps can be run again with
/// others. Each is a floating-point tensor.
///
/// [`Optimizer::step_with`]: crate::Optimizer::step_with
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceScalars<'a> {
    /// The learning rate: one number, to which groups with a rate of their own keep its first ratio, or one for
    /// each of [`Optimizer::groups`](crate::Optimizer::groups). The optimizer's own when `None`.
    pub lr: Option<&'a Tensor>,
    /// Loss scale: the factor of the loss, by which gradients are divided. Its contents are not specified afterwards.
    pub grad_scale: Option<&'a Tensor>,
    /// Anything but 0 where a gradient is infinite or NaN: the step is left out. Parameters and states keep
    /// their bits, and no step is counted.
    pub found_inf: Option<&'a Tensor>,
}

impl DeviceScalars<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.lr.is_none() && self.grad_scale.is_none() && self.found_inf.is_none()
    }
}
