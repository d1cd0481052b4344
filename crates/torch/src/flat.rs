//! Optimizer steps that libtorch has no fused kernel for.
//!
//! Each function steps a list of parameters, with a list of gradients and of each state beside it. On the
//! CPU a parameter, its gradient and its state are read once, in parallel, by loops of this crate; sums do not
//! depend on the number of threads, and what [`rmsprop`], [`rectified`], [`qhadam`] and [`look_ahead`] give an element
//! depends on its numbers alone ([`fused`](crate::fused)). Elsewhere (CUDA; 16 bits of [`lamb`] and [`larc`]), and
//! where numbers of the step are on a device, libtorch's foreach operations step all parameters of a device and
//! kind together: as many operations for a hundred parameters as for one, up to 2^25 elements, and none
//! waits for the device. 16-bit parameters and states are computed in float32 and rounded at the end. Where tensors
//! of a list share memory, their values afterwards are not specified.
//!
//! In all of them a decoupled weight decay shrinks the weight first, by the learning rate times itself; else
//! it is added to the gradient, times the weight.

use tch::{Kind, Tensor};

use crate::bridge::{borrow, borrow_all, ffi};
use crate::device_numbers::{DeviceNumbers, lend_roles};
use crate::error::Error;
use ffi::StepPart;

/// Whether the loops of this crate, here and in [`batch_norm_relu`](crate::batch_norm_relu), run on
/// libtorch's threads. Else on one: they do where libtorch brings the OpenMP library of GNU's compiler
/// and that compiler has built this crate.
#[must_use]
pub const fn loops_are_parallel() -> bool {
    cfg!(parallel_loops)
}

/// The numbers of one RMSprop step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsPropStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the squared gradient's running mean.
    pub alpha: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// The buffer holds gradients before the division (fastai) instead of after it (PyTorch).
    pub momentum_of_gradient: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether it is decoupled.
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One RMSprop step, in place: `grad_avgs` make it centered, `momentum_buffers` are needed where there is a
/// momentum; both are empty else.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// The numbers of one RAdam step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RectifiedStep {
    /// Learning rate.
    pub lr: f64,
    /// How many steps the parameters have taken, this one included.
    pub steps: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// `eps` is added to the root of the mean without its bias (fastai) instead of the mean itself (PyTorch).
    pub eps_of_unbiased: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether it is decoupled.
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One RAdam step (Liu et al., 2020), in place: along a running mean of the gradient, divided by the root of a
/// running mean of its square where that rests on enough steps.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// The numbers of one QHAdam step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QhAdamStep {
    /// Learning rate.
    pub lr: f64,
    /// How many steps the parameters have taken, this one included.
    pub steps: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// The share of the gradient's running mean in the numerator; the rest is the gradient's own.
    pub nu1: f64,
    /// The share of the squared gradient's running mean in the denominator; the rest is the squared gradient's own.
    pub nu2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether it is decoupled.
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One QHAdam step (Ma and Yarats, 2019), in place: Adam's, with a share of the gradient itself beside its running
/// mean, and of its square beside that one's.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// The numbers of one LAMB step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambStep {
    /// Learning rate.
    pub lr: f64,
    /// How many steps the parameters have taken, this one included.
    pub steps: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// The highest ratio of the weight's norm to the update's that the rate is multiplied by.
    pub max_trust: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether it is decoupled.
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One LAMB step, in place: two passes, as the length of the update depends on all of it.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// The first pass of [`lamb`] alone, for parameters of which each rank has a part: moves the moments, shrinks the weights
/// by decoupled weight decay, and returns for each parameter the sum of squares of this part's weights and of its updates,
/// in double precision. [`lamb_update`] makes the second pass with the sums of all parts.
///
/// # Errors
/// As [`lamb`].
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

/// The second pass of [`lamb`], with the sums of squares of whole parameters.
///
/// # Errors
/// As [`lamb`].
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

/// Memory for two sums of squares of each parameter.
fn squares_of(parameters: &[&Tensor]) -> Result<Vec<Tensor>, Error> {
    let pair = |parameter: &&Tensor| Tensor::f_empty([2], (Kind::Double, parameter.device()));
    Ok(parameters.iter().map(pair).collect::<Result<_, _>>()?)
}

/// The numbers of one LARS or LARC step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarcStep {
    /// Learning rate.
    pub lr: f64,
    /// The rate of a parameter is `lr` x `trust` x |weight| / (|gradient| + `weight_decay` x |weight| +
    /// `eps`).
    pub trust: f64,
    /// That rate is at most `lr` (LARC).
    pub clip: bool,
    /// In the denominator.
    pub eps: f64,
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// Weight decay, which is in the denominator as well.
    pub weight_decay: f64,
    /// Whether it is decoupled.
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One LARS or LARC step, in place; `momentum_buffers` are needed where there is a momentum.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// The first pass of [`larc`] alone, for parameters of which each rank has a part: returns for each parameter the sum of
/// squares of this part's weights, after their decay, and of its gradients, in double precision. [`larc_update`] makes the
/// second pass with the sums of all parts, and the same step; between them neither weights nor gradients change.
///
/// # Errors
/// As [`larc`].
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

/// The second pass of [`larc`], with the sums of squares of whole parameters.
///
/// # Errors
/// As [`larc`].
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

/// Moves each of `slow` the part `alpha` of the way to its one of `fast`, and sets that to it (Lookahead).
///
/// With a count of steps in `device` only where that is a multiple of `every`; else the caller decides.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices differ; [`crate::ErrorKind::InvalidArgument`] when
/// lists do.
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

/// Whether two tensors have the same device, kind, shape and strides.
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
