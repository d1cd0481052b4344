//! Errors and correlations of numbers.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::read;
use crate::{Fold, Folded, Metric};

/// Folds a batch into the sum of what `of` makes of predictions and targets, and their count.
fn summed(
    metric: &str,
    predictions: &Tensor,
    targets: &Tensor,
    of: impl Fn(&Tensor, &Tensor) -> Result<Tensor, tch::TchError>,
) -> Result<Fold> {
    let (predictions, targets) = read::numeric(metric, predictions, targets)?;
    let sum = of(&predictions, &targets)?.f_sum(Kind::Double)?;
    let count = read::count(targets.numel(), sum.device())?;
    Fold::sums(&[sum, count])
}

fn mean(metric: &str, folded: &Folded) -> Result<f64> {
    let [sum, count] = read::numbers(metric, folded)?;
    Ok(sum / count)
}

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident $column:literal $of:expr, $value:expr;)+) => {
        $($(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name;

        impl Metric for $name {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                summed($column, predictions, targets, $of)
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                Ok(($value)(mean($column, folded)?))
            }
        })+
    };
}

fn as_it_is(mean: f64) -> f64 {
    mean
}

errors! {
    /// Mean squared error, `mean((prediction - target)²)`, which is a metric in `f64` and also a loss.
    ///
    /// Predictions and targets of one shape; `[n, 1]` and `[n]` fit, too.
    Mse "mse" |p: &Tensor, t: &Tensor| p.f_sub(t)?.f_square(), as_it_is;
    /// Mean absolute error, `mean(|prediction - target|)`. Shapes as for [`Mse`].
    Mae "mae" |p: &Tensor, t: &Tensor| p.f_sub(t)?.f_abs(), as_it_is;
    /// Root mean squared error. Shapes as for [`Mse`].
    Rmse "_rmse" |p: &Tensor, t: &Tensor| p.f_sub(t)?.f_square(), f64::sqrt;
    /// Mean squared logarithmic error, `mean((ln(1 + prediction) - ln(1 + target))²)`. It is NaN if a number is below
    /// -1. Shapes as for [`Mse`].
    Msle "msle" |p: &Tensor, t: &Tensor| p.f_log1p()?.f_sub(&t.f_log1p()?)?.f_square(), as_it_is;
    /// Root mean squared percentage error of the exponentials of predictions and targets, `√ mean(((eᵗ - eᵖ) / eᵗ)²)`:
    /// for predictions of logarithms. Shapes as for [`Mse`].
    ExpRmspe "_exp_rmspe" |p: &Tensor, t: &Tensor| p.f_sub(t)?.f_expm1()?.f_square(), f64::sqrt;
}

/// Reads all rows as numbers. Sums of them would lose digits where the mean is far from 0.
fn pairs(metric: &str, folded: &Folded) -> Result<(Vec<f64>, Vec<f64>)> {
    Ok(match read::rows(metric, folded)? {
        Some((predictions, targets)) => (read::to_vec(predictions)?, read::to_vec(targets)?),
        None => (Vec::new(), Vec::new()),
    })
}

fn average(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

/// Returns the differences from the mean.
fn centred(numbers: &[f64]) -> Vec<f64> {
    let mean = average(numbers);
    numbers.iter().map(|it| it - mean).collect()
}

fn squares(numbers: &[f64]) -> f64 {
    numbers.iter().map(|it| it * it).sum()
}

/// Returns `1 - error / variance`; of constant targets 1 without an error, else 0, as scikit-learn does.
fn explained(error: f64, variance: f64) -> f64 {
    match (error, variance) {
        (error, variance) if variance != 0.0 => 1.0 - error / variance,
        (error, _) if error.is_nan() => f64::NAN,
        (0.0, _) => 1.0,
        _ => 0.0,
    }
}

/// Returns the correlation, from -1 to 1; NaN where one of both is constant.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (centred(a), centred(b));
    let (norm_a, norm_b) = (squares(&a).sqrt(), squares(&b).sqrt());
    let product: f64 = a.iter().zip(&b).map(|(a, b)| (a / norm_a) * (b / norm_b)).sum();
    product.clamp(-1.0, 1.0)
}

/// Returns the ranks of the numbers; equal numbers get the mean of their ranks.
fn ranks(numbers: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_unstable_by(|&a, &b| numbers[a].total_cmp(&numbers[b]));
    let mut ranks = vec![0.0; numbers.len()];
    let mut before = 0;
    for tied in order.chunk_by(|&a, &b| numbers[a] == numbers[b]) {
        let rank = before as f64 + (tied.len() as f64 + 1.0) / 2.0;
        tied.iter().for_each(|&it| ranks[it] = rank);
        before += tied.len();
    }
    ranks
}

macro_rules! of_all {
    ($($(#[$doc:meta])* $name:ident $column:literal $of:expr;)+) => {
        $($(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name;

        impl Metric for $name {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                let (predictions, targets) = read::numeric($column, predictions, targets)?;
                Ok(Fold::Rows(predictions.f_reshape([-1])?, targets.f_reshape([-1])?))
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                let (predictions, targets) = pairs($column, folded)?;
                if targets.len() < 2 {
                    return Ok(f64::NAN);
                }
                Ok(($of)(&predictions[..], &targets[..]))
            }
        })+
    };
}

fn errors(predictions: &[f64], targets: &[f64]) -> Vec<f64> {
    targets.iter().zip(predictions).map(|(target, prediction)| target - prediction).collect()
}

of_all! {
    /// Coefficient of determination (R²): `1 - Σ (target - prediction)² / Σ (target - mean)²`.
    ///
    /// Shapes as for [`Mse`]. NaN with fewer than two numbers; of constant targets 1 for exact predictions, else 0.
    /// Keeps all numbers.
    R2 "r2_score" |p: &[f64], t: &[f64]| explained(squares(&errors(p, t)), squares(&centred(t)));
    /// Explained variance: `1 - var(target - prediction) / var(target)`, which is [`R2`] without the error of a
    /// constant offset. Keeps all numbers in memory.
    ExplainedVariance "explained_variance_score" |p: &[f64], t: &[f64]| {
        explained(squares(&centred(&errors(p, t))), squares(&centred(t)))
    };
    /// Pearson correlation of predictions and targets. It is NaN if either is constant. Keeps all numbers in memory.
    Pearson "pearsonr" correlation;
    /// Spearman correlation: the Pearson correlation of the ranks, in which equal numbers get the mean of their ranks.
    /// Keeps all numbers in memory.
    Spearman "spearmanr" |p: &[f64], t: &[f64]| if p.iter().chain(t).any(|it| it.is_nan()) { f64::NAN } else { correlation(&ranks(p), &ranks(t)) };
}
