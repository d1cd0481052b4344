//! Optimizer steps that libtorch has no fused kernel for.
//!
//! Each function updates a list of parameters, given lists of their gradients and states. On the CPU a parameter, its
//! gradient and its state are read once, in parallel, by loops of this crate. Sums do not depend on the number of
//! threads, and with [`rmsprop`], [`rectified`], [`qhadam`] and [`look_ahead`] the result of an element depends on its
//! own values alone ([`fused`](crate::fused)). Elsewhere (CUDA; 16 bits of [`lamb`] and [`larc`]), and in steps with
//! scalars on a device, libtorch's foreach operations update all parameters of a device and kind together: the number
//! of operations is the same for a hundred parameters as for one, up to 2^25 elements, and none waits for the device.
//! 16-bit parameters and states are computed in float32 and rounded at the end. If tensors of a list share memory,
//! their values afterwards are unspecified.
//!
//! In all functions decoupled weight decay first multiplies the weight by 1 minus the learning rate times the decay;
//! otherwise the decay times the weight is added to the gradient.

use tch::{Kind, Tensor};

use crate::bridge::{borrow, borrow_all, ffi};
use crate::device_numbers::{DeviceNumbers, lend_roles};
use crate::error::Error;
use ffi::StepPart;

/// Returns `true` if the loops of this crate, in this module and in [`batch_norm_relu`](crate::batch_norm_relu), run on
/// libtorch's threads, otherwise on one thread. They do if libtorch comes with GNU's OpenMP library and this crate was
/// compiled by GNU's compiler.
#[must_use]
pub const fn loops_are_parallel() -> bool {
    cfg!(parallel_loops)
}

/// Hyperparameters of an RMSprop step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsPropStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Decay of the running mean of the squared gradient.
    pub alpha: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// Momentum factor. 0 means no momentum.
    pub momentum: f64,
    /// `true` if the momentum buffer holds gradients before the division (fastai) instead of after it (PyTorch).
    pub momentum_of_gradient: bool,
    /// Factor of the weight decay.
    pub weight_decay: f64,
    /// `true` if the weight decay is decoupled from the gradient.
    pub decoupled: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes an RMSprop step, in place. With `grad_avgs` the step is centered. `momentum_buffers` are needed with momentum.
/// Both lists may be empty otherwise.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient, square) = (Tensor::from(1f32), Tensor::from(2f32), Tensor::from(0f32));
/// let step = flat::RmsPropStep {
///     lr: 0.5, alpha: 0.0, eps: 0.0, momentum: 0.0, momentum_of_gradient: false, weight_decay: 0.0,
///     decoupled: false, maximize: false,
/// };
/// let device = DeviceNumbers::default();
/// flat::rmsprop(&[&weight], &[&gradient], &[&square], &[], &[], &step, &device)?;
/// assert_eq!(weight.double_value(&[]), 0.5); // without a mean the step is as long as the rate
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rmsprop(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    square_avgs: &[&Tensor],
    grad_avgs: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &RmsPropStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let RmsPropStep {
        lr,
        alpha,
        eps,
        momentum,
        momentum_of_gradient,
        weight_decay,
        decoupled,
        maximize,
    } = *step;
    let centered = !grad_avgs.is_empty();
    let mut roles = vec![parameters, gradients, square_avgs];
    roles.extend(centered.then_some(grad_avgs));
    roles.extend((momentum != 0.0).then_some(momentum_buffers));
    let step = ffi::RmsPropStep {
        lr,
        alpha,
        eps,
        momentum,
        weight_decay,
        decoupled,
        centered,
        momentum_of_gradient,
        maximize,
    };
    lend_roles("RMSprop step", &roles, |tensors, count| {
        device.lend(|device| ffi::rmsprop(tensors, count, &step, device, false))
    })
}

/// Hyperparameters of a RAdam step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RectifiedStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Number of steps of the parameters, including this one.
    pub steps: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient.
    pub beta2: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// `true` if `eps` is added to the root of the bias-corrected mean (fastai) instead of the mean itself (PyTorch).
    pub eps_of_unbiased: bool,
    /// Factor of the weight decay.
    pub weight_decay: f64,
    /// `true` if the weight decay is decoupled from the gradient.
    pub decoupled: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes a RAdam step (Liu et al., 2020), in place: along a running mean of the gradient, divided by the root of a
/// running mean of its square once that is based on enough steps.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::RectifiedStep {
///     lr: 0.25, steps: 1.0, beta1: 0.9, beta2: 0.999, eps: 0.0, eps_of_unbiased: false,
///     weight_decay: 0.0, decoupled: false, maximize: false,
/// };
/// flat::rectified(&[&weight], &[&gradient], &[&mean], &[&square], &step, &DeviceNumbers::default())?;
/// assert!((weight.double_value(&[]) - 0.5).abs() < 1e-6); // the first steps are not divided
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rectified(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    step: &RectifiedStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let RectifiedStep {
        lr,
        steps,
        beta1,
        beta2,
        eps,
        eps_of_unbiased,
        weight_decay,
        decoupled,
        maximize,
    } = *step;
    let step = ffi::RectifiedStep {
        lr,
        steps,
        beta1,
        beta2,
        eps,
        eps_of_unbiased,
        weight_decay,
        decoupled,
        maximize,
    };
    lend_roles("RAdam step", &[parameters, gradients, exp_avgs, exp_avg_sqs], |tensors, count| {
        device.lend(|device| ffi::rectified(tensors, count, &step, device, false))
    })
}

/// Hyperparameters of a QHAdam step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QhAdamStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Number of steps of the parameters, including this one.
    pub steps: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient.
    pub beta2: f64,
    /// Weight of the gradient's running mean in the numerator; the gradient itself has the rest.
    pub nu1: f64,
    /// Weight of the squared gradient's running mean in the denominator; the squared gradient itself has the rest.
    pub nu2: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// Factor of the weight decay.
    pub weight_decay: f64,
    /// `true` if the weight decay is decoupled from the gradient.
    pub decoupled: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes a QHAdam step (Ma and Yarats, 2019), in place: Adam's, in which the running means of the gradient and of its
/// square are mixed with their current values.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::QhAdamStep {
///     lr: 0.25, steps: 1.0, beta1: 0.9, beta2: 0.999, nu1: 0.7, nu2: 1.0, eps: 0.0,
///     weight_decay: 0.0, decoupled: false, maximize: false,
/// };
/// flat::qhadam(&[&weight], &[&gradient], &[&mean], &[&square], &step, &DeviceNumbers::default())?;
/// assert!((weight.double_value(&[]) - 0.75).abs() < 1e-6); // a first step is as long as the rate
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn qhadam(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    step: &QhAdamStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let QhAdamStep { lr, steps, beta1, beta2, nu1, nu2, eps, weight_decay, decoupled, maximize } =
        *step;
    let step = ffi::QhAdamStep {
        lr,
        steps,
        beta1,
        beta2,
        nu1,
        nu2,
        eps,
        weight_decay,
        decoupled,
        maximize,
    };
    lend_roles("QHAdam step", &[parameters, gradients, exp_avgs, exp_avg_sqs], |tensors, count| {
        device.lend(|device| ffi::qhadam(tensors, count, &step, device, false))
    })
}

/// Hyperparameters of a LAMB step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Number of steps of the parameters, including this one.
    pub steps: f64,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// Maximum trust ratio: the ratio of the weight's norm to the update's norm, by which the learning rate is
    /// multiplied.
    pub max_trust: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient.
    pub beta2: f64,
    /// Factor of the weight decay.
    pub weight_decay: f64,
    /// `true` if the weight decay is decoupled from the gradient.
    pub decoupled: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes a LAMB step, in place, in two passes, because the norm of an update depends on all of its values.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::LambStep {
///     lr: 0.5, steps: 1.0, eps: 0.0, max_trust: 10.0, beta1: 0.0, beta2: 0.0, weight_decay: 0.0,
///     decoupled: true, maximize: false,
/// };
/// flat::lamb(&[&weight], &[&gradient], &[&mean], &[&square], &step, &DeviceNumbers::default())?;
/// assert_eq!(weight.double_value(&[]), 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn lamb(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    step: &LambStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let roles = [parameters, gradients, exp_avgs, exp_avg_sqs];
    lamb_part(&roles, step, StepPart::Whole, &[], device)
}

/// Makes the first pass of [`lamb`], for parameters of which each rank has a part: updates the moments, applies
/// decoupled weight decay, and returns for each parameter the sum of squares of this part's weights and of its updates,
/// in double precision. [`lamb_update`] makes the second pass with the sums of all parts.
///
/// # Errors
/// Returns the same errors as [`lamb`].
pub fn lamb_squares(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    step: &LambStep,
    device: &DeviceNumbers<'_>,
) -> Result<Vec<Tensor>, Error> {
    let roles = [parameters, gradients, exp_avgs, exp_avg_sqs];
    let squares = squares_of(parameters)?;
    lamb_part(&roles, step, StepPart::Sums, &squares, device)?;
    Ok(squares)
}

/// Makes the second pass of [`lamb`], with the sums of squares of whole parameters.
///
/// # Errors
/// Returns the same errors as [`lamb`].
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::LambStep {
///     lr: 0.5, steps: 1.0, eps: 0.0, max_trust: 10.0, beta1: 0.0, beta2: 0.0, weight_decay: 0.0,
///     decoupled: true, maximize: false,
/// };
/// let (lists, device) = ([[&weight], [&gradient], [&mean], [&square]], DeviceNumbers::default());
/// let [p, g, m, s] = &lists;
/// let squares = flat::lamb_squares(p, g, m, s, &step, &device)?;
/// assert_eq!(squares[0], Tensor::from_slice(&[1.0, 1.0]));
/// // Another rank's part has a weight of the root of three, and no gradient.
/// let all = [Tensor::from_slice(&[4.0, 1.0])];
/// flat::lamb_update(p, g, m, s, &all, &step, &device)?;
/// assert_eq!(weight.double_value(&[]), 0.0); // twice as far as alone
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn lamb_update(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    squares: &[Tensor],
    step: &LambStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let roles = [parameters, gradients, exp_avgs, exp_avg_sqs];
    lamb_part(&roles, step, StepPart::Update, squares, device)
}

fn lamb_part(
    roles: &[&[&Tensor]],
    step: &LambStep,
    part: StepPart,
    squares: &[Tensor],
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let LambStep { lr, steps, eps, max_trust, beta1, beta2, weight_decay, decoupled, maximize } =
        *step;
    let step = ffi::LambStep {
        lr,
        steps,
        max_trust,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
        maximize,
    };
    let squares = borrow_all(squares);
    lend_roles("LAMB step", roles, |tensors, count| {
        device.lend(|device| ffi::lamb(tensors, count, &step, part, &squares, device, false))
    })
}

/// Allocates memory for two sums of squares of each parameter.
fn squares_of(parameters: &[&Tensor]) -> Result<Vec<Tensor>, Error> {
    let pair = |parameter: &&Tensor| Tensor::f_empty([2], (Kind::Double, parameter.device()));
    Ok(parameters.iter().map(pair).collect::<Result<_, _>>()?)
}

/// Hyperparameters of a LARS or LARC step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarcStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Trust coefficient: the rate of a parameter is `lr` x `trust` x |weight| / (|gradient| + `weight_decay` x
    /// |weight| + `eps`).
    pub trust: f64,
    /// `true` if the rate of a parameter is limited to `lr` (LARC).
    pub clip: bool,
    /// Value added to the denominator (epsilon).
    pub eps: f64,
    /// Momentum factor. 0 means no momentum.
    pub momentum: f64,
    /// Factor of the weight decay, which is also part of the denominator.
    pub weight_decay: f64,
    /// `true` if the weight decay is decoupled from the gradient.
    pub decoupled: bool,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// Makes a LARS or LARC step, in place. `momentum_buffers` are needed with momentum.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(2f32), Tensor::from(4f32));
/// let step = flat::LarcStep {
///     lr: 1.0, trust: 0.5, clip: true, weight_decay: 0.0, decoupled: true, eps: 0.0, momentum: 0.0,
///     maximize: false,
/// };
/// flat::larc(&[&weight], &[&gradient], &[], &step, &DeviceNumbers::default())?;
/// assert_eq!(weight.double_value(&[]), 1.0); // half of the weight, whatever the gradient
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn larc(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &LarcStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    larc_part(&[parameters, gradients, momentum_buffers], step, StepPart::Whole, &[], device)
}

/// Makes the first pass of [`larc`], for parameters of which each rank has a part: returns for each parameter the sum
/// of squares of this part's weights, after their decay, and of its gradients, in double precision. [`larc_update`]
/// makes the second pass with the sums of all parts and the same step; between the passes neither weights nor gradients
/// may change.
///
/// # Errors
/// Returns the same errors as [`larc`].
pub fn larc_squares(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &LarcStep,
    device: &DeviceNumbers<'_>,
) -> Result<Vec<Tensor>, Error> {
    let squares = squares_of(parameters)?;
    let roles = [parameters, gradients, momentum_buffers];
    larc_part(&roles, step, StepPart::Sums, &squares, device)?;
    Ok(squares)
}

/// Makes the second pass of [`larc`], with the sums of squares of whole parameters.
///
/// # Errors
/// Returns the same errors as [`larc`].
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (weight, gradient) = (Tensor::from(3f32), Tensor::from(4f32));
/// let step = flat::LarcStep {
///     lr: 1.0, trust: 0.5, clip: true, weight_decay: 0.0, decoupled: true, eps: 0.0, momentum: 0.0,
///     maximize: false,
/// };
/// let device = DeviceNumbers::default();
/// let squares = flat::larc_squares(&[&weight], &[&gradient], &[], &step, &device)?;
/// assert_eq!(squares[0], Tensor::from_slice(&[9.0, 16.0]));
/// // Another rank's part has a weight of the root of seven, and no gradient.
/// let all = [Tensor::from_slice(&[16.0, 16.0])];
/// flat::larc_update(&[&weight], &[&gradient], &[], &all, &step, &device)?;
/// assert_eq!(weight.double_value(&[]), 1.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn larc_update(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    squares: &[Tensor],
    step: &LarcStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let roles = [parameters, gradients, momentum_buffers];
    larc_part(&roles, step, StepPart::Update, squares, device)
}

fn larc_part(
    roles: &[&[&Tensor]; 3],
    step: &LarcStep,
    part: StepPart,
    squares: &[Tensor],
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let LarcStep { lr, trust, clip, weight_decay, decoupled, eps, momentum, maximize } = *step;
    let roles = if momentum == 0.0 { &roles[..2] } else { &roles[..] };
    let step = ffi::LarcStep { lr, trust, clip, weight_decay, decoupled, momentum, eps, maximize };
    let squares = borrow_all(squares);
    lend_roles("LARC step", roles, |tensors, count| {
        device.lend(|device| ffi::larc(tensors, count, &step, part, &squares, device, false))
    })
}

/// Makes a Lookahead step: moves each tensor of `slow` by the share `alpha` towards its counterpart in `fast`, and
/// copies it into that.
///
/// If `device` contains a count of steps, the step is only made if the count is a multiple of `every`; otherwise it is
/// always made.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] if the
/// lists differ in length.
///
/// ```
/// use brigade_torch::{DeviceNumbers, flat};
/// use tch::Tensor;
/// let (fast, slow) = (Tensor::from(3f32), Tensor::from(1f32));
/// flat::look_ahead(&[&fast], &[&slow], 0.5, 6, &DeviceNumbers::default())?;
/// assert_eq!((fast.double_value(&[]), slow.double_value(&[])), (2.0, 2.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn look_ahead(
    fast: &[&Tensor],
    slow: &[&Tensor],
    alpha: f64,
    every: u64,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    let step = ffi::LookAheadStep { alpha, every };
    lend_roles("Lookahead", &[fast, slow], |tensors, count| {
        device.lend(|device| ffi::look_ahead(tensors, count, &step, device, false))
    })
}

/// Returns `true` if two tensors have the same device, kind, shape and strides.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when one is not defined.
///
/// ```
/// use brigade_torch::flat;
/// use tch::{Device, Kind, Tensor};
/// let matrix = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
/// assert!(!flat::same_layout(&matrix.tr(), &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)))?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn same_layout(first: &Tensor, second: &Tensor) -> Result<bool, Error> {
    ffi::same_layout(borrow(first), borrow(second))
        .map_err(|error| Error::libtorch("compare layouts", &error))
}

#[cfg(test)]
#[path = "flat_tests.rs"]
mod tests;
