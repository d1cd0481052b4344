//! Steps of Adam, AdamW, SGD and Adagrad: one pass over all parameters of a device and kind.
//!
//! On NVIDIA GPUs from compute capability 8.0 on, Adam, AdamW and SGD of float32 parameters are a kernel of this crate
//! (`optimizer`, which `BRIGADE_FUSED=-optimizer` turns off) with the formulas of libtorch's fused kernels, for up to 56
//! parameters in one launch. It also writes the 16-bit copies of the parameters that autocast's products read, so that
//! the next forward pass does not cast them. Other steps on CUDA are libtorch's fused kernels. On the CPU they are loops of this crate with the same order of
//! operations: 16-bit parameters and states are computed in float32 and rounded at the end, and the result of an
//! element depends on its numbers alone, not on its place, the size of its tensor, the number of threads or the
//! processor (the bits of a NaN excepted). libtorch's kernels for the CPU do not have that property, which sharded
//! training needs: the elements of a shard must be updated as they are within the whole tensor.
//!
//! If tensors of a list share memory, their values afterwards are unspecified, because all are updated at the same
//! time.

use tch::Tensor;

use crate::bridge::{borrow_all, ffi};
use crate::device_numbers::DeviceNumbers;
use crate::error::Error;

/// Hyperparameters of an Adam or AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient.
    pub beta2: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// Factor of the weight decay, which is added to the gradient, or subtracted from the weight if `decoupled` is set.
    pub weight_decay: f64,
    /// `true` if the maximum of all second moments so far is used (AMSGrad).
    pub amsgrad: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
    /// `true` if the weight decay is decoupled from the gradient, as in AdamW.
    pub decoupled: bool,
}

/// Makes an Adam or AdamW step, in place, as `torch.optim.Adam(fused=True)` does.
///
/// All slices have one entry per parameter, of the parameter's shape; `steps` contains float32 scalars that the caller
/// has already incremented, unless the step is skipped; `max_exp_avg_sqs` is empty without `amsgrad`.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices do not match, or the device has no such kernel.
///
/// ```
/// use brigade_torch::{DeviceNumbers, fused};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square, steps) = (Tensor::from(0f32), Tensor::from(0f32), Tensor::from(1f32));
/// let step = fused::AdamStep {
///     lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0,
///     amsgrad: false, maximize: false, decoupled: false,
/// };
/// let device = DeviceNumbers::default();
/// fused::adam(&[&weight], &[&gradient], &[&mean], &[&square], &[], &[&steps], &step, &device)?;
/// assert!((weight.double_value(&[]) - 0.9).abs() < 1e-6); // the first step is as long as the rate
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[expect(clippy::too_many_arguments, reason = "a list for each role, as the kernel has them")]
pub fn adam(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    max_exp_avg_sqs: &[&Tensor],
    steps: &[&Tensor],
    step: &AdamStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let AdamStep { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled } = *step;
    let step = ffi::AdamStep { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled };
    device
        .lend(|device| {
            ffi::fused_adam(
                &borrow_all(parameters),
                &borrow_all(gradients),
                &borrow_all(exp_avgs),
                &borrow_all(exp_avg_sqs),
                &borrow_all(max_exp_avg_sqs),
                &borrow_all(steps),
                &step,
                device,
            )
        })
        .map_err(|error| Error::libtorch("fused Adam step", &error))
}

/// Hyperparameters of an SGD step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Momentum factor. 0 means no momentum.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// Factor of the weight decay, which is added to the gradient, or subtracted from the weight if `decoupled` is set.
    pub weight_decay: f64,
    /// `true` if the weight decay shrinks the weight by the learning rate times the decay, instead of being added to
    /// the gradient.
    pub decoupled: bool,
    /// `true` for Nesterov momentum.
    pub nesterov: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
    /// `true` if the momentum buffers are not initialised yet: they are set to the gradient.
    pub first: bool,
}

/// Makes an SGD step, in place, as `torch.optim.SGD(fused=True)` does. `momentum_buffers` is empty without momentum.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices do not match, or the device has no such kernel.
///
/// ```
/// use brigade_torch::{DeviceNumbers, fused};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let step = fused::SgdStep {
///     lr: 0.25, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, decoupled: false,
///     nesterov: false, maximize: false, first: true,
/// };
/// fused::sgd(&[&weight], &[&gradient], &[], &step, &DeviceNumbers::default())?;
/// assert_eq!(weight.double_value(&[]), 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn sgd(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &SgdStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let SgdStep { lr, momentum, dampening, weight_decay, decoupled, nesterov, maximize, first } =
        *step;
    let step = ffi::SgdStep {
        lr,
        momentum,
        dampening,
        weight_decay,
        decoupled,
        nesterov,
        maximize,
        first,
    };
    device
        .lend(|device| {
            ffi::fused_sgd(
                &borrow_all(parameters),
                &borrow_all(gradients),
                &borrow_all(momentum_buffers),
                &step,
                device,
            )
        })
        .map_err(|error| Error::libtorch("fused SGD step", &error))
}

/// Hyperparameters of an Adagrad step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Decay of the learning rate, which is divided by 1 + this times the number of earlier steps.
    pub lr_decay: f64,
    /// Factor of the weight decay, which is added to the gradient.
    pub weight_decay: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes an Adagrad step, in place, as `torch.optim.Adagrad(fused=True)` does. On other devices than the CPU, and with
/// scalars on a device, it consists of foreach operations: parameters that have the same tensor in `steps` are updated
/// together.
///
/// All slices have one entry per parameter; `steps` contains float32 scalars that the caller has already incremented.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices do not match, or the device has no such kernel.
///
/// ```
/// use brigade_torch::{DeviceNumbers, fused};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (sum, steps) = (Tensor::from(0f32), Tensor::from(1f32));
/// let step = fused::AdagradStep {
///     lr: 0.5, lr_decay: 0.0, weight_decay: 0.0, eps: 0.0, maximize: false,
/// };
/// fused::adagrad(&[&weight], &[&gradient], &[&sum], &[&steps], &step, &DeviceNumbers::default())?;
/// assert_eq!(weight.double_value(&[]), 0.5); // the first step is as long as the rate
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn adagrad(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    state_sums: &[&Tensor],
    steps: &[&Tensor],
    step: &AdagradStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let AdagradStep { lr, lr_decay, weight_decay, eps, maximize } = *step;
    let step = ffi::AdagradStep { lr, lr_decay, weight_decay, eps, maximize };
    device
        .lend(|device| {
            ffi::fused_adagrad(
                &borrow_all(parameters),
                &borrow_all(gradients),
                &borrow_all(state_sums),
                &borrow_all(steps),
                &step,
                device,
            )
        })
        .map_err(|error| Error::libtorch("fused Adagrad step", &error))
}
