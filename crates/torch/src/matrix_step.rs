//! Optimizer steps that treat a parameter as a matrix: Adafactor and Muon, by tensor operations on any
//! device.

use tch::Tensor;

use crate::bridge::{borrow_all, ffi};
use crate::error::Error;

/// The numbers of one Adafactor step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorStep {
    /// The relative size of the step.
    pub rho: f64,
    /// The part of the squared gradient in its running mean.
    pub weight: f64,
    /// The variance is at least its square; the kind's machine epsilon when `None`.
    pub eps1: Option<f64>,
    /// Lower bound of the parameter's root mean square.
    pub eps2: f64,
    /// The root mean square that an update may have.
    pub threshold: f64,
    /// Multiplies the weight first.
    pub keep: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// What Adafactor keeps of a parameter.
#[derive(Debug, Clone, Copy)]
pub enum Variance<'a> {
    /// Of two or more dimensions: means over the last, of size 1 there, and over the one before it.
    Factored {
        /// Means over the last dimension.
        rows: &'a Tensor,
        /// Means over the one before the last.
        columns: &'a Tensor,
    },
    /// Of fewer: a tensor of the parameter's shape.
    Whole(&'a Tensor),
}

/// One Adafactor step (Shazeer and Stern, 2018), in place, as `torch.optim.Adafactor`.
///
/// # Errors
/// [`Error::Libtorch`] when shapes, kinds or devices do not fit.
///
/// ```
/// use brigade_torch::{Tensor, matrix_step::{AdafactorStep, Variance, adafactor}};
/// let (weight, gradient, square) = (Tensor::from(2f32), Tensor::from(3f32), Tensor::from(0f32));
/// let step = AdafactorStep {
///     rho: 0.25, weight: 1.0, eps1: None, eps2: 1e-3, threshold: 1.0, keep: 1.0, maximize: false,
/// };
/// adafactor(&weight, &gradient, Variance::Whole(&square), &step)?;
/// assert_eq!(weight.double_value(&[]), 1.5); // a quarter of the weight, whatever the gradient
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn adafactor(
    parameter: &Tensor,
    gradient: &Tensor,
    variance: Variance<'_>,
    step: &AdafactorStep,
) -> Result<(), Error> {
    let AdafactorStep { rho, weight, eps1, eps2, threshold, keep, maximize } = *step;
    let eps1 = eps1.unwrap_or(-1.0);
    let step = ffi::AdafactorStep { rho, weight, eps1, eps2, threshold, keep, maximize };
    let mut tensors = vec![parameter, gradient];
    match variance {
        Variance::Factored { rows, columns } => tensors.extend([rows, columns]),
        Variance::Whole(whole) => tensors.push(whole),
    }
    ffi::adafactor(&borrow_all(&tensors), &step)
        .map_err(|error| Error::libtorch("Adafactor step", &error))
}

/// The numbers of one Muon step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonStep {
    /// The learning rate, adjusted to the parameter's shape.
    pub size: f64,
    /// Momentum.
    pub momentum: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// The polynomial a x + b x^3 + c x^5 that the singular values go through.
    pub coefficients: (f64, f64, f64),
    /// How often they do.
    pub iterations: u32,
    /// Lower bound of the gradient's norm.
    pub eps: f64,
    /// Multiplies the weight first.
    pub keep: f64,
}

/// One Muon step (Jordan et al., 2024) of a matrix, in place, as `torch.optim.Muon`: a step along the
/// momentum, made nearly orthogonal in bfloat16.
///
/// # Errors
/// [`Error::Libtorch`] when the parameter is not a matrix, or shapes, kinds or devices do not fit.
///
/// ```
/// use brigade_torch::{Device, Kind, Tensor, matrix_step::{MuonStep, muon}};
/// let made = |size| Tensor::zeros([size, size], (Kind::Float, Device::Cpu));
/// let (weight, gradient) = (made(4), Tensor::eye(4, (Kind::Float, Device::Cpu)) * 100);
/// let step = MuonStep {
///     size: 1.0, momentum: 0.0, nesterov: false, coefficients: (3.4445, -4.775, 2.0315),
///     iterations: 5, eps: 1e-7, keep: 1.0,
/// };
/// muon(&weight, &gradient, &made(4), &step)?;
/// let singular = -weight.double_value(&[0, 0]); // near 1, whatever the gradient's size
/// assert!((0.5..1.5).contains(&singular));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn muon(
    parameter: &Tensor,
    gradient: &Tensor,
    momentum_buffer: &Tensor,
    step: &MuonStep,
) -> Result<(), Error> {
    let MuonStep { size, momentum, nesterov, coefficients: (a, b, c), iterations, eps, keep } =
        *step;
    let iterations = i64::from(iterations);
    let step = ffi::MuonStep { size, momentum, nesterov, a, b, c, iterations, eps, keep };
    ffi::muon(&borrow_all(&[parameter, gradient, momentum_buffer]), &step)
        .map_err(|error| Error::libtorch("Muon step", &error))
}
