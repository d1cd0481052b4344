//! Numbers of a step that are tensors.

use tch::Tensor;

/// Numbers of a step that are on the parameters' device: [`Optimizer::step_with`] does not make the host wait for them,
/// and launched kernels do not contain their values, so recorded steps can be run again with others. Each is a
/// floating-point tensor.
///
/// [`Optimizer::step_with`]: crate::Optimizer::step_with
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceScalars<'a> {
    /// Learning rate: one number, to which groups with a rate of their own keep their initial ratio, or one for each of
    /// [`Optimizer::groups`](crate::Optimizer::groups). Defaults to the optimizer's own.
    pub lr: Option<&'a Tensor>,
    /// Loss scale: the factor of the loss, by which gradients are divided. Its contents are not specified afterwards.
    pub grad_scale: Option<&'a Tensor>,
    /// Overflow flag: not 0 if a gradient is infinite or NaN. The step is skipped then: parameters and states are
    /// bitwise unchanged, and no step is counted.
    pub found_inf: Option<&'a Tensor>,
}

impl DeviceScalars<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.lr.is_none() && self.grad_scale.is_none() && self.found_inf.is_none()
    }
}
