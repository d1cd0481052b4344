//! Metrics: a fold over the batches of all ranks, and the number that is computed of it.
//!
//! A metric never averages over batches or ranks. Of each batch it takes numbers that add up, which are added in
//! the order of the data, or rows, which are put in the order of the data; so its value is the same to the last
//! digit on any number of ranks. Duplicates that complete uneven batches are left out before it sees a batch.

use std::fmt;

use tch::Tensor;

use crate::error::Result;

/// What a metric keeps of a batch.
#[derive(Debug)]
pub enum Fold {
    /// Numbers that add up over batches and ranks: `[k]` in `f64`, on the device of the predictions. Nothing
    /// waits for the device until the end of the epoch.
    Sums(Tensor),
    /// Rows that are needed whole, such as scores of which a curve is made: predictions and targets, each with
    /// one row for a sample (or for a token or pixel, the same number in both).
    Rows(Tensor, Tensor),
}

/// What was kept of all batches of all ranks.
#[derive(Debug)]
pub enum Folded {
    /// The sums of all batches.
    Sums(Vec<f64>),
    /// All rows in the order of the data, on the CPU.
    Rows(Tensor, Tensor),
}

/// A metric of the Learner.
///
/// ```
/// use brigade_learn::Result;
/// use brigade_learn::metrics::{Fold, Folded, Metric};
/// use tch::{Kind, Tensor};
///
/// /// The share of predictions that are off by more than one.
/// #[derive(Debug)]
/// struct FarOff;
///
/// impl Metric for FarOff {
///     fn name(&self) -> String {
///         "far_off".to_owned()
///     }
///
///     fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
///         let far = (predictions - targets).f_abs()?.f_gt(1.0)?.f_sum(Kind::Double)?;
///         let count = Tensor::from(targets.numel() as f64).f_to_device(far.device())?;
///         Ok(Fold::Sums(Tensor::f_stack(&[far, count], 0)?))
///     }
///
///     fn value(&self, folded: &Folded) -> Result<f64> {
///         Ok(match folded {
///             Folded::Sums(sums) => sums[0] / sums[1],
///             Folded::Rows(..) => f64::NAN,
///         })
///     }
/// }
/// ```
pub trait Metric: fmt::Debug + Send + Sync {
    /// Returns its name: a column of the epochs' table.
    fn name(&self) -> String;

    /// Takes what it keeps of a batch: the model's outputs, and the targets. The rows are real samples of this
    /// rank, without duplicates.
    ///
    /// # Errors
    /// When the shapes do not fit: an error that names expected and found shapes.
    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold>;

    /// Computes the value of what was kept of all batches of all ranks.
    ///
    /// # Errors
    /// When it is not defined for these data, with the reason.
    fn value(&self, folded: &Folded) -> Result<f64>;
}
