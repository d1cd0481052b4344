//! Optimizer steps that treat a parameter as a matrix, Adafactor and Muon, by tensor operations on any device.
//!
//! On the CPU parameters are updated one by one. On other devices, and in steps with scalars on a device, all
//! parameters of a device and kind are updated together, without waiting for the device: Adafactor reduces each
//! parameter by operations of its own, Muon multiplies all matrices of one shape in one batched product, and the rest
//! are foreach operations.

use tch::Tensor;

use crate::bridge::ffi;
use crate::device_numbers::{DeviceNumbers, lend_roles};
use crate::error::Error;

/// Hyperparameters of an Adafactor step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorStep {
    /// Maximum relative size of the step, which is also limited to 1 over the root of the number of steps.
    pub lr: f64,
    /// Number of steps of the parameters, including this one.
    pub steps: f64,
    /// Exponent of the decay of second moments: the newest squared gradient has the weight `steps^beta2_decay` in the
    /// running mean.
    pub beta2_decay: f64,
    /// Root of the minimum variance. `None` stands for the kind's machine epsilon.
    pub eps1: Option<f64>,
    /// Minimum of the parameter's root mean square.
    pub eps2: f64,
    /// Maximum root mean square of an update.
    pub threshold: f64,
    /// Factor of the decoupled weight decay.
    pub weight_decay: f64,
    /// `true` if the step maximizes instead of minimizing.
    pub maximize: bool,
}

/// The second moments of Adafactor.
#[derive(Debug, Clone, Copy)]
pub enum Variances<'a> {
    /// Factored moments of parameters with two or more dimensions: means over the last dimension, which has size 1 in
    /// them, and over the one before it.
    Factored {
        /// Means over the last dimension.
        rows: &'a [&'a Tensor],
        /// Means over the dimension before the last.
        columns: &'a [&'a Tensor],
    },
    /// Moments of parameters with fewer dimensions: tensors of the parameters' shapes.
    Whole(&'a [&'a Tensor]),
}

/// Makes an Adafactor step (Shazeer and Stern, 2018), in place, as `torch.optim.Adafactor` does.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes, kinds or devices do not match; [`crate::ErrorKind::InvalidArgument`] if
/// the lists differ in length.
///
/// ```
/// use brigade_torch::DeviceNumbers;
/// use brigade_torch::matrix_step::{AdafactorStep, Variances, adafactor};
/// use tch::Tensor;
/// let (weight, gradient, square) = (Tensor::from(2f32), Tensor::from(3f32), Tensor::from(0f32));
/// let step = AdafactorStep {
///     lr: 0.25, steps: 1.0, beta2_decay: -0.8, eps1: None, eps2: 1e-3, threshold: 1.0,
///     weight_decay: 0.0, maximize: false,
/// };
/// let squares = Variances::Whole(&[&square]);
/// adafactor(&[&weight], &[&gradient], squares, &step, &DeviceNumbers::default())?;
/// assert_eq!(weight.double_value(&[]), 1.5); // a quarter of the weight, whatever the gradient
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn adafactor(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    variances: Variances<'_>,
    step: &AdafactorStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    step_adafactor(parameters, gradients, variances, step, device, false)
}

fn step_adafactor(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    variances: Variances<'_>,
    step: &AdafactorStep,
    device: &DeviceNumbers<'_>,
    operations: bool,
) -> Result<(), Error> {
    let AdafactorStep { lr, steps, beta2_decay, eps1, eps2, threshold, weight_decay, maximize } =
        *step;
    let eps1 = eps1.unwrap_or(-1.0);
    let step = ffi::AdafactorStep {
        lr,
        steps,
        beta2_decay,
        eps1,
        eps2,
        threshold,
        weight_decay,
        maximize,
    };
    let mut roles = vec![parameters, gradients];
    match variances {
        Variances::Factored { rows, columns } => roles.extend([rows, columns]),
        Variances::Whole(whole) => roles.push(whole),
    }
    lend_roles("Adafactor step", &roles, |tensors, count| {
        device.lend(|device| ffi::adafactor(tensors, count, &step, device, operations))
    })
}

/// Hyperparameters of a Muon step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// `true` if the learning rate is multiplied by 0.2 times the root of a matrix's longer side, so that the update's
    /// root mean square is about AdamW's; otherwise by the root of rows over columns, if there are more rows.
    pub match_rms_adamw: bool,
    /// Factor of the momentum.
    pub momentum: f64,
    /// `true` for Nesterov momentum.
    pub nesterov: bool,
    /// Coefficients of the polynomial a x + b x^3 + c x^5 that is applied to the singular values.
    pub coefficients: (f64, f64, f64),
    /// Number of times that the polynomial is applied.
    pub iterations: u32,
    /// Minimum of the gradient's norm.
    pub eps: f64,
    /// Factor of the decoupled weight decay.
    pub weight_decay: f64,
}

/// Makes a Muon step (Jordan et al., 2024) of matrices, in place, as `torch.optim.Muon` does: a step along the
/// momentum, made nearly orthogonal in bfloat16.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when a parameter is not a matrix, or shapes, kinds or devices do not match;
/// [`crate::ErrorKind::InvalidArgument`] if the lists differ in length.
///
/// ```
/// use brigade_torch::DeviceNumbers;
/// use brigade_torch::matrix_step::{MuonStep, muon};
/// use tch::{Device, Kind, Tensor};
/// let made = |size| Tensor::zeros([size, size], (Kind::Float, Device::Cpu));
/// let (weight, gradient) = (made(4), Tensor::eye(4, (Kind::Float, Device::Cpu)) * 100);
/// let step = MuonStep {
///     lr: 1.0, match_rms_adamw: false, momentum: 0.0, nesterov: false,
///     coefficients: (3.4445, -4.775, 2.0315), iterations: 5, eps: 1e-7, weight_decay: 0.0,
/// };
/// muon(&[&weight], &[&gradient], &[&made(4)], &step, &DeviceNumbers::default())?;
/// let singular = -weight.double_value(&[0, 0]); // near 1, whatever the gradient's size
/// assert!((0.5..1.5).contains(&singular));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn muon(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &MuonStep,
    device: &DeviceNumbers<'_>,
) -> Result<(), Error> {
    step_muon(parameters, gradients, momentum_buffers, step, device, false)
}

fn step_muon(
    parameters: &[&Tensor],
    gradients: &[&Tensor],
    momentum_buffers: &[&Tensor],
    step: &MuonStep,
    device: &DeviceNumbers<'_>,
    operations: bool,
) -> Result<(), Error> {
    let MuonStep {
        lr,
        match_rms_adamw,
        momentum,
        nesterov,
        coefficients: (a, b, c),
        iterations,
        eps,
        weight_decay,
    } = *step;
    let iterations = i64::from(iterations);
    let step = ffi::MuonStep {
        lr,
        match_rms_adamw,
        momentum,
        nesterov,
        a,
        b,
        c,
        iterations,
        eps,
        weight_decay,
    };
    lend_roles("Muon step", &[parameters, gradients, momentum_buffers], |tensors, count| {
        device.lend(|device| ffi::muon(tensors, count, &step, device, operations))
    })
}

#[cfg(test)]
mod tests {
    //! Tests that updating parameters one by one and together has the same results.

    use super::*;
    use tch::{Device, Kind};

    fn values(shape: &[i64], number: f64, kind: Kind) -> Tensor {
        let i = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        (i * 0.37 + number * 1.7).sin().reshape(shape).to_kind(kind)
    }

    fn list(shapes: &[Vec<i64>], role: f64, kind: Kind) -> Vec<Tensor> {
        let each = shapes.iter().enumerate();
        each.map(|(index, shape)| values(shape, role + 10.0 * index as f64, kind)).collect()
    }

    fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
        tensors.iter().collect()
    }

    fn assert_close(found: &[Tensor], expected: &[Tensor], tolerance: f64) {
        for (found, expected) in found.iter().zip(expected) {
            let difference = (found - expected).abs().max().double_value(&[]);
            assert!(difference <= tolerance, "{difference} of {:?}", found.size());
        }
    }

    #[test]
    fn adafactor_is_the_same_one_by_one_and_together() {
        let matrices = vec![vec![4, 3], vec![7, 2], vec![2, 3, 3, 3], vec![600, 5]];
        let vectors = vec![vec![7], vec![], vec![700]];
        for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 2e-5)] {
            for (maximize, weight_decay, eps1) in [(false, 0.0, None), (true, 0.1, Some(1e-3))] {
                for (shapes, factored) in [(&matrices, true), (&vectors, false)] {
                    let run = |operations: bool| {
                        let (p, g) = (list(shapes, 0.0, kind), list(shapes, 1.0, kind));
                        let reduced = |from_end: usize| {
                            let shape = |shape: &Vec<i64>| {
                                let mut shape = shape.clone();
                                if factored {
                                    let dimensions = shape.len();
                                    shape[dimensions - from_end] = 1;
                                }
                                shape
                            };
                            list(&shapes.iter().map(shape).collect::<Vec<_>>(), 2.0, kind)
                                .iter()
                                .map(|tensor| tensor.square() + 1)
                                .collect::<Vec<_>>()
                        };
                        let (rows, columns) = (reduced(1), reduced(2));
                        for steps in 1..4 {
                            let step = AdafactorStep {
                                lr: 0.6,
                                steps: f64::from(steps),
                                beta2_decay: -0.8,
                                eps1,
                                eps2: 1e-3,
                                threshold: 1.5,
                                weight_decay,
                                maximize,
                            };
                            let (rows, columns) = (refs(&rows), refs(&columns));
                            let variances = if factored {
                                Variances::Factored { rows: &rows, columns: &columns }
                            } else {
                                Variances::Whole(&rows)
                            };
                            let device = DeviceNumbers::default();
                            step_adafactor(
                                &refs(&p),
                                &refs(&g),
                                variances,
                                &step,
                                &device,
                                operations,
                            )
                            .unwrap();
                        }
                        (p, rows, columns)
                    };
                    let (one, all) = (run(false), run(true));
                    assert_close(&all.0, &one.0, tolerance);
                    assert_close(&all.1, &one.1, tolerance);
                    assert_close(&all.2, &one.2, tolerance);
                    assert_ne!(one.0[0], list(shapes, 0.0, kind)[0], "nothing was stepped");
                }
            }
        }
    }

    #[test]
    fn muon_is_the_same_one_by_one_and_together() {
        let shapes = vec![vec![6, 4], vec![4, 9], vec![6, 4], vec![6, 4], vec![5, 5]];
        for (nesterov, match_rms_adamw) in [(true, false), (false, true)] {
            let step = MuonStep {
                lr: 0.02,
                match_rms_adamw,
                momentum: 0.9,
                nesterov,
                coefficients: (3.4445, -4.775, 2.0315),
                iterations: 5,
                eps: 1e-7,
                weight_decay: 0.1,
            };
            let run = |operations: bool| {
                let made = |role| list(&shapes, role, Kind::Float);
                let (p, g, m) = (made(0.0), made(1.0), made(2.0));
                for _ in 0..3 {
                    let device = DeviceNumbers::default();
                    step_muon(&refs(&p), &refs(&g), &refs(&m), &step, &device, operations).unwrap();
                }
                (p, m)
            };
            let (one, all) = (run(false), run(true));
            // Products in bfloat16 are rounded differently if several are computed together.
            assert_close(&all.0, &one.0, 2e-3);
            assert_close(&all.1, &one.1, 1e-6);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let (matrix, vector) = (zeros(&[2, 3]), zeros(&[3]));
        let step = AdafactorStep {
            lr: 0.1,
            steps: 1.0,
            beta2_decay: -0.8,
            eps1: None,
            eps2: 1e-3,
            threshold: 1.0,
            weight_decay: 0.0,
            maximize: false,
        };
        let device = DeviceNumbers::default();
        let error = adafactor(
            &[&matrix],
            &[&zeros(&[2, 3])],
            Variances::Whole(&[&zeros(&[2, 3])]),
            &step,
            &device,
        );
        assert!(error.unwrap_err().to_string().contains("two factors"));
        let error = muon(
            &[&vector],
            &[&zeros(&[3])],
            &[&zeros(&[3])],
            &MuonStep {
                lr: 0.1,
                match_rms_adamw: false,
                momentum: 0.9,
                nesterov: true,
                coefficients: (1.0, 0.0, 0.0),
                iterations: 1,
                eps: 1e-7,
                weight_decay: 0.0,
            },
            &device,
        );
        assert!(error.unwrap_err().to_string().contains("[3]"));
    }
}
