//! Optimizer steps that libtorch has no fused kernel for, in one pass over a parameter's memory.
//!
//! Each function steps one parameter. On the CPU, in float32 and float64, where the parameter, its
//! gradient and its state lie alike, everything is read once, in parallel; sums do not depend on the
//! number of threads. Elsewhere (CUDA, half precision) tensor operations do the same.
//!
//! In all of them `keep` multiplies the weight first (decoupled weight decay: 1 - rate x decay; 1 for
//! none) and `l2` times the weight is added to the gradient.

use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi};
use crate::error::Error;

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
    /// Added to the gradient, times the weight.
    pub l2: f64,
    /// Multiplies the weight first.
    pub keep: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One RMSprop step, in place: `grad_avg` makes it centered, `momentum_buffer` is needed where there is
/// a momentum.
///
/// # Errors
/// [`Error::Libtorch`] when tensors are missing, or shapes, kinds or devices differ.
///
/// ```
/// use brigade_torch::{Tensor, flat};
/// let (weight, gradient, square) = (Tensor::from(1f32), Tensor::from(2f32), Tensor::from(0f32));
/// let step = flat::RmsPropStep {
///     lr: 0.5, alpha: 0.0, eps: 0.0, momentum: 0.0, momentum_of_gradient: false, l2: 0.0,
///     keep: 1.0, maximize: false,
/// };
/// flat::rmsprop(&weight, &gradient, &square, None, None, &step)?;
/// assert_eq!(weight.double_value(&[]), 0.5); // without a mean the step is as long as the rate
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rmsprop(
    parameter: &Tensor,
    gradient: &Tensor,
    square_avg: &Tensor,
    grad_avg: Option<&Tensor>,
    momentum_buffer: Option<&Tensor>,
    step: &RmsPropStep,
) -> Result<(), Error> {
    let RmsPropStep { lr, alpha, eps, momentum, momentum_of_gradient, l2, keep, maximize } = *step;
    let centered = grad_avg.is_some();
    let mut tensors = vec![parameter, gradient, square_avg];
    tensors.extend(grad_avg);
    tensors.extend(momentum_buffer.filter(|_| momentum != 0.0));
    let step = ffi::RmsPropStep {
        lr,
        alpha,
        eps,
        momentum,
        l2,
        keep,
        centered,
        momentum_of_gradient,
        maximize,
    };
    ffi::rmsprop(&borrow_all(&tensors), &step, false)
        .map_err(|error| Error::libtorch("RMSprop step", &error))
}

/// The numbers of one step along a running mean of the gradient, divided by the root of a running mean
/// of its square where that is known well enough (RAdam).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RectifiedStep {
    /// The learning rate with all that corrects it.
    pub size: f64,
    /// Whether the step is divided by `root_scale` x root + `eps`.
    pub adaptive: bool,
    /// Multiplies the root.
    pub root_scale: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the gradient, times the weight.
    pub l2: f64,
    /// Multiplies the weight first.
    pub keep: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One RAdam step, in place.
///
/// # Errors
/// [`Error::Libtorch`] when shapes, kinds or devices differ.
///
/// ```
/// use brigade_torch::{Tensor, flat};
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::RectifiedStep {
///     size: 0.25, adaptive: false, root_scale: 1.0, eps: 0.0, beta1: 0.0, beta2: 0.0, l2: 0.0,
///     keep: 1.0, maximize: false,
/// };
/// flat::rectified(&weight, &gradient, &mean, &square, &step)?;
/// assert_eq!(weight.double_value(&[]), 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn rectified(
    parameter: &Tensor,
    gradient: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    step: &RectifiedStep,
) -> Result<(), Error> {
    let RectifiedStep { size, adaptive, root_scale, eps, beta1, beta2, l2, keep, maximize } = *step;
    let step =
        ffi::RectifiedStep { size, root_scale, adaptive, beta1, beta2, eps, l2, keep, maximize };
    ffi::rectified(&borrow_all(&[parameter, gradient, exp_avg, exp_avg_sq]), &step, false)
        .map_err(|error| Error::libtorch("RAdam step", &error))
}

/// The numbers of one LAMB step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambStep {
    /// Learning rate.
    pub lr: f64,
    /// Multiplies the running mean: 1 over its bias.
    pub mean_scale: f64,
    /// Multiplies the root of the running mean of squares: 1 over the root of its bias.
    pub root_scale: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// The highest ratio of the weight's norm to the update's that the rate is multiplied by.
    pub max_trust: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the gradient, times the weight.
    pub l2: f64,
    /// Multiplies the weight first.
    pub keep: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One LAMB step, in place: two passes, as the length of the update depends on all of it.
///
/// # Errors
/// [`Error::Libtorch`] when shapes, kinds or devices differ.
///
/// ```
/// use brigade_torch::{Tensor, flat};
/// let (weight, gradient) = (Tensor::from(1f32), Tensor::from(2f32));
/// let (mean, square) = (Tensor::from(0f32), Tensor::from(0f32));
/// let step = flat::LambStep {
///     lr: 0.5, mean_scale: 1.0, root_scale: 1.0, eps: 0.0, max_trust: 10.0, beta1: 0.0, beta2: 0.0,
///     l2: 0.0, keep: 1.0, maximize: false,
/// };
/// flat::lamb(&weight, &gradient, &mean, &square, &step)?;
/// assert_eq!(weight.double_value(&[]), 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn lamb(
    parameter: &Tensor,
    gradient: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    step: &LambStep,
) -> Result<(), Error> {
    let LambStep { lr, mean_scale, root_scale, eps, max_trust, beta1, beta2, l2, keep, maximize } =
        *step;
    let step = ffi::LambStep {
        lr,
        mean_scale,
        root_scale,
        max_trust,
        beta1,
        beta2,
        eps,
        l2,
        keep,
        maximize,
    };
    ffi::lamb(&borrow_all(&[parameter, gradient, exp_avg, exp_avg_sq]), &step, false)
        .map_err(|error| Error::libtorch("LAMB step", &error))
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
    /// In the denominator only.
    pub weight_decay: f64,
    /// In the denominator.
    pub eps: f64,
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// Added to the gradient, times the weight.
    pub l2: f64,
    /// Multiplies the weight first.
    pub keep: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// One LARS or LARC step, in place; `momentum_buffer` is needed where there is a momentum.
///
/// # Errors
/// [`Error::Libtorch`] when tensors are missing, or shapes, kinds or devices differ.
///
/// ```
/// use brigade_torch::{Tensor, flat};
/// let (weight, gradient) = (Tensor::from(2f32), Tensor::from(4f32));
/// let step = flat::LarcStep {
///     lr: 1.0, trust: 0.5, clip: true, weight_decay: 0.0, eps: 0.0, momentum: 0.0, l2: 0.0,
///     keep: 1.0, maximize: false,
/// };
/// flat::larc(&weight, &gradient, None, &step)?;
/// assert_eq!(weight.double_value(&[]), 1.0); // half of the weight, whatever the gradient
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn larc(
    parameter: &Tensor,
    gradient: &Tensor,
    momentum_buffer: Option<&Tensor>,
    step: &LarcStep,
) -> Result<(), Error> {
    let LarcStep { lr, trust, clip, weight_decay, eps, momentum, l2, keep, maximize } = *step;
    let mut tensors = vec![parameter, gradient];
    tensors.extend(momentum_buffer.filter(|_| momentum != 0.0));
    let step = ffi::LarcStep { lr, trust, clip, weight_decay, momentum, eps, l2, keep, maximize };
    ffi::larc(&borrow_all(&tensors), &step, false)
        .map_err(|error| Error::libtorch("LARC step", &error))
}

/// Moves `slow` the part `alpha` of the way to `fast`, and sets `fast` to it (Lookahead).
///
/// # Errors
/// [`Error::Libtorch`] when shapes, kinds or devices differ.
///
/// ```
/// use brigade_torch::{Tensor, flat};
/// let (fast, slow) = (Tensor::from(3f32), Tensor::from(1f32));
/// flat::look_ahead(&fast, &slow, 0.5)?;
/// assert_eq!((fast.double_value(&[]), slow.double_value(&[])), (2.0, 2.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn look_ahead(fast: &Tensor, slow: &Tensor, alpha: f64) -> Result<(), Error> {
    ffi::look_ahead(&borrow_all(&[fast, slow]), alpha, false)
        .map_err(|error| Error::libtorch("Lookahead", &error))
}

/// Whether two tensors have the same device, kind, shape and strides.
///
/// # Errors
/// [`Error::Libtorch`] when one is not defined.
///
/// ```
/// use brigade_torch::{Device, Kind, Tensor, flat};
/// let matrix = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
/// assert!(!flat::same_layout(&matrix.tr(), &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)))?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn same_layout(first: &Tensor, second: &Tensor) -> Result<bool, Error> {
    ffi::same_layout(borrow(first), borrow(second))
        .map_err(|error| Error::libtorch("compare layouts", &error))
}

#[cfg(test)]
mod tests {
    //! One pass over memory and tensor operations give the same, for all flags.

    use super::*;
    use tch::{Device, Kind};

    const ELEMENTS: i64 = 40_003;

    fn values(number: i64, kind: Kind) -> Tensor {
        let i = Tensor::arange(ELEMENTS, (Kind::Double, Device::Cpu));
        (i * 0.37 + number as f64 * 1.7).sin().to_kind(kind)
    }

    /// Runs both on equal tensors; the first is the parameter, state begins at the third.
    fn same(count: usize, run: impl Fn(&[ffi::TensorRef<'_>], bool)) {
        for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 2e-5)] {
            let made = || -> Vec<Tensor> {
                (0..count as i64)
                    // A mean of squares, well above the square of any mean.
                    .map(|n| if n == 2 { values(n, kind).square() + 2 } else { values(n, kind) })
                    .collect()
            };
            let (one_pass, operations) = (made(), made());
            for (tensors, as_operations) in [(&one_pass, false), (&operations, true)] {
                let refs: Vec<&Tensor> = tensors.iter().collect();
                for _ in 0..3 {
                    run(&borrow_all(&refs), as_operations);
                }
            }
            for (index, (a, b)) in one_pass.iter().zip(&operations).enumerate() {
                let difference = (a - b).abs().max().double_value(&[]);
                assert!(difference <= tolerance, "tensor {index} of {kind:?}: {difference}");
            }
            assert_ne!(one_pass[0], values(0, kind), "nothing was stepped");
        }
    }

    const DECAYS: [(f64, f64, bool); 3] =
        [(0.0, 1.0, false), (0.01, 1.0, true), (0.0, 0.99, false)];

    #[test]
    fn rmsprop_is_the_same_in_one_pass_and_by_operations() {
        for (l2, keep, maximize) in DECAYS {
            for (centered, momentum, momentum_of_gradient) in
                [(false, 0.0, false), (true, 0.0, false), (true, 0.9, false), (false, 0.9, true)]
            {
                let step = ffi::RmsPropStep {
                    lr: 0.01,
                    alpha: 0.9,
                    eps: 1e-3,
                    momentum,
                    l2,
                    keep,
                    centered,
                    momentum_of_gradient,
                    maximize,
                };
                let count = 3 + usize::from(centered) + usize::from(momentum != 0.0);
                same(count, |tensors, operations| {
                    ffi::rmsprop(tensors, &step, operations).unwrap();
                });
            }
        }
    }

    #[test]
    fn radam_is_the_same_in_one_pass_and_by_operations() {
        for (l2, keep, maximize) in DECAYS {
            for adaptive in [false, true] {
                let step = ffi::RectifiedStep {
                    size: 0.01,
                    root_scale: 1.1,
                    adaptive,
                    beta1: 0.9,
                    beta2: 0.99,
                    eps: 1e-3,
                    l2,
                    keep,
                    maximize,
                };
                same(4, |tensors, operations| {
                    // Swapped, so that the square is the last.
                    let swapped = [tensors[0], tensors[1], tensors[3], tensors[2]];
                    ffi::rectified(&swapped, &step, operations).unwrap();
                });
            }
        }
    }

    #[test]
    fn lamb_is_the_same_in_one_pass_and_by_operations() {
        for (l2, keep, maximize) in DECAYS {
            let step = ffi::LambStep {
                lr: 0.01,
                mean_scale: 1.2,
                root_scale: 1.1,
                max_trust: 10.0,
                beta1: 0.9,
                beta2: 0.99,
                eps: 1e-3,
                l2,
                keep,
                maximize,
            };
            same(4, |tensors, operations| {
                let swapped = [tensors[0], tensors[1], tensors[3], tensors[2]];
                ffi::lamb(&swapped, &step, operations).unwrap();
            });
        }
    }

    #[test]
    fn larc_is_the_same_in_one_pass_and_by_operations() {
        for (l2, keep, maximize) in DECAYS {
            for (clip, momentum) in [(true, 0.0), (false, 0.9)] {
                let step = ffi::LarcStep {
                    lr: 0.1,
                    trust: 0.02,
                    clip,
                    weight_decay: 0.01,
                    momentum,
                    eps: 1e-8,
                    l2,
                    keep,
                    maximize,
                };
                let count = 2 + usize::from(momentum != 0.0);
                same(count, |tensors, operations| {
                    ffi::larc(tensors, &step, operations).unwrap();
                });
            }
        }
    }

    #[test]
    fn look_ahead_is_the_same_in_one_pass_and_by_operations() {
        same(2, |tensors, operations| ffi::look_ahead(tensors, 0.3, operations).unwrap());
    }

    #[test]
    fn a_gradient_in_another_layout_is_read_by_its_places() {
        let step = RectifiedStep {
            size: 1.0,
            adaptive: false,
            root_scale: 1.0,
            eps: 0.0,
            beta1: 0.0,
            beta2: 0.0,
            l2: 0.0,
            keep: 1.0,
            maximize: false,
        };
        let gradient = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([3, 2]).tr();
        let zeros = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let parameter = zeros();
        rectified(&parameter, &gradient, &zeros(), &zeros(), &step).unwrap();
        assert_eq!(parameter, -gradient);
    }

    #[test]
    fn other_shapes_are_refused() {
        let tensor = |size: i64| Tensor::zeros([size], (Kind::Float, Device::Cpu));
        let error = look_ahead(&tensor(3), &tensor(2), 0.5).unwrap_err().to_string();
        assert!(error.contains("[3]") && error.contains("[2]"), "{error}");
    }
}
