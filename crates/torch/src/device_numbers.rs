//! Parameters of an optimizer step as tensors on a device.

use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi};
use crate::error::Error;

/// Parameters of an optimizer step as tensors on the parameters' device, so that the host neither waits for their
/// values nor passes them in kernel launches. Each is a floating-point tensor of one element.
///
/// If one of them is set, a step consists of operations on the device; this also works on the CPU, for tests.
///
/// ```
/// use brigade_torch::{DeviceNumbers, fused};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(f32::INFINITY));
/// let step = fused::SgdStep {
///     lr: 0.25, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, decoupled: false,
///     nesterov: false, maximize: false, first: true,
/// };
/// let found = Tensor::from(1f32);
/// let device = DeviceNumbers { found_inf: Some(&found), ..DeviceNumbers::default() };
/// fused::sgd(&[&weight], &[&gradient], &[], &step, &device)?;
/// assert_eq!(weight.double_value(&[]), 1.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceNumbers<'a> {
    /// Learning rate, in place of the step's own.
    pub lr: Option<&'a Tensor>,
    /// Number of steps including this one, in place of the step's own.
    pub steps: Option<&'a Tensor>,
    /// Loss scale by which the gradients are divided. The content of the gradients is unspecified afterwards.
    pub grad_scale: Option<&'a Tensor>,
    /// Overflow flag: if it is not 0, the step is skipped, and parameters and states keep their bits.
    pub found_inf: Option<&'a Tensor>,
}

impl DeviceNumbers<'_> {
    /// Runs `call` with the numbers in the form of the C++ functions: none, or four, of which some are undefined.
    pub(crate) fn lend<R>(&self, call: impl FnOnce(&[ffi::TensorRef<'_>]) -> R) -> R {
        let Self { lr, steps, grad_scale, found_inf } = *self;
        let numbers = [lr, steps, grad_scale, found_inf];
        if numbers.iter().all(Option::is_none) {
            return call(&[]);
        }
        let undefined = Tensor::new();
        let lent = numbers.map(|number| number.unwrap_or(&undefined));
        call(&lent.map(|tensor| ffi::TensorRef { tensor: borrow(tensor) }))
    }
}

/// Runs `call` with the tensors of several parameters, a list for each role, one role after the other, and
/// the count of parameters.
pub(crate) fn lend_roles<R>(
    what: &'static str,
    roles: &[&[&Tensor]],
    call: impl FnOnce(&[ffi::TensorRef<'_>], usize) -> Result<R, cxx::Exception>,
) -> Result<R, Error> {
    let count = roles.first().map_or(0, |role| role.len());
    if let Some(other) = roles.iter().find(|role| role.len() != count) {
        return Err(Error::invalid_argument(format!(
            "{what}: {count} parameters have {} gradients or states of a kind; give one for each",
            other.len()
        )));
    }
    call(&borrow_all(&roles.concat()), count).map_err(|error| Error::libtorch(what, &error))
}
