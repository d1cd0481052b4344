//! Metrics of predictions and targets, exact on any number of ranks: a fold of each batch, and a value that is computed
//! from all folds.
//!
//! A metric never averages over batches or ranks. From each batch it keeps either sums, which are added in the order of
//! the data, or rows, which are concatenated in the order of the data. So its value is the same to the last digit on
//! any number of ranks. A loop keeps a [`MetricState`] for each metric, which `Accelerator::update_metric` and
//! `compute_metric` of `brigade-train` update without the duplicates that complete uneven batches; the Learner of
//! `brigade-learn` takes a list of metrics ([`IntoMetrics`]).
//!
//! Predictions are the model's outputs as they are: scores (logits) of classes in dimension 1, `[n, classes, …]`, with
//! targets `[n, …]` of class numbers; scores of labels, with targets of 0 and 1 in the same shape; or numbers with
//! targets in the same shape. [`ClassesLast`] adapts a metric to outputs with the classes in the last dimension, such
//! as those of language models, and [`PredictedClasses`] to class numbers. Samples with the target [`IGNORED`] are left
//! out, as in the cross-entropy.
//!
//! ```
//! use brigade_metrics::{Accuracy, Average, F1, MetricState};
//! use tch::Tensor;
//!
//! let mut accuracy = MetricState::new(Accuracy);
//! let mut f1 = MetricState::new(F1::new().average(Average::Macro));
//! for _batch in 0..2 {
//!     let scores = Tensor::from_slice2(&[[2.0, 0.5, 0.1], [0.2, 0.1, 1.5]]);
//!     let labels = Tensor::from_slice(&[0i64, 1]);
//!     accuracy.update(&scores, &labels)?;
//!     f1.update(&scores, &labels)?;
//! }
//! assert_eq!(accuracy.compute(None)?, 0.5);
//! assert_eq!(f1.compute(None)?, 1.0 / 3.0);
//! # Ok::<(), brigade_torch::Error>(())
//! ```
//!
//! Names and definitions are fastai's and scikit-learn's. A value that is undefined for the data (an empty validation
//! set, a single class where two are compared) is the one that scikit-learn returns with a warning, mostly 0 or NaN.
//! Mistakes of the program are errors with the reason: shapes that do not match, targets that are not class numbers,
//! the binary average of five classes. NaN predictions make means, curves and correlations NaN. As a score of a class,
//! NaN is the largest, as in PyTorch; compared with a threshold, it is below.

mod accuracy;
mod adapt;
mod agreement;
mod bleu;
mod counts;
mod data_order;
mod error;
mod into;
mod mean;
mod probability;
mod ranking;
mod read;
mod regression;
mod segmentation;
mod state;

use std::fmt;

use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

pub use accuracy::{Accuracy, AccuracyMulti, ErrorRate, HammingLoss, HammingLossMulti, TopK};
pub use adapt::{
    ClassesLast, FoldFn, MeanOf, PredictedClasses, Renamed, RowsFn, fold, mean_of, of_rows,
};
pub use agreement::{BalancedAccuracy, CohenKappa, KappaWeights, Matthews};
pub use bleu::CorpusBleu;
pub use counts::{
    Average, F1, F1Multi, FBeta, FBetaMulti, Jaccard, JaccardMulti, PerClass, Precision,
    PrecisionMulti, Recall, RecallMulti,
};
pub use data_order::gather_in_data_order;
pub use error::MetricError;
pub use into::IntoMetrics;
pub use mean::Mean;
pub use probability::{Brier, Perplexity};
pub use ranking::{
    AveragePrecision, AveragePrecisionMulti, MultiClass, RocAuc, RocAucBinary, RocAucMulti,
};
pub use read::IGNORED;
pub use regression::{ExpRmspe, ExplainedVariance, Mae, Mse, Msle, Pearson, R2, Rmse, Spearman};
pub use segmentation::{Dice, DiceMulti, ForegroundAccuracy, JaccardCoeff, JaccardCoeffMulti};
pub use state::MetricState;

/// The contribution of a batch to a metric.
#[derive(Debug)]
pub enum Fold {
    /// Numbers that are summed over batches and ranks: `[k]` in `f64`, on the device of the predictions. Nothing waits
    /// for the device until the value is computed.
    Sums(Tensor),
    /// Rows that are needed as a whole, such as scores for a curve: predictions and targets, each with one row for a
    /// sample (or for a token or pixel, the same number in both).
    Rows(Tensor, Tensor),
}

impl Fold {
    /// Creates [`Fold::Sums`] from tensors of one or more numbers each, on the device of the first.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    pub fn sums(parts: &[Tensor]) -> Result<Self> {
        let flat = |part: &Tensor| -> Result<Tensor> {
            Ok(part.f_to_device(parts[0].device())?.f_to_kind(Kind::Double)?.f_reshape([-1])?)
        };
        Ok(Self::Sums(Tensor::f_cat(&parts.iter().map(flat).collect::<Result<Vec<_>>>()?, 0)?))
    }
}

/// The combined contributions of all batches of all ranks.
#[derive(Debug)]
pub enum Folded {
    /// Sums over all batches. Empty if no rank had a batch, whatever the metric's contributions are.
    Sums(Vec<f64>),
    /// Rows of all batches in the order of the data, on the CPU.
    Rows(Tensor, Tensor),
}

impl Folded {
    /// Returns `N` sums. They are NaN if there was no batch, so that all means of them are NaN.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for rows, and for another number of sums.
    pub fn sums<const N: usize>(&self) -> Result<[f64; N]> {
        match self {
            Self::Sums(sums) if sums.is_empty() => Ok([f64::NAN; N]),
            Self::Sums(sums) => sums[..].try_into().map_err(|_| {
                let found = sums.len();
                Error::invalid_argument(format!("it keeps {N} sums, and was given {found}"))
            }),
            Self::Rows(..) => {
                Err(Error::invalid_argument("it keeps sums of each batch, and was given rows"))
            }
        }
    }
}

/// A metric: its contribution from each batch, and its value from the contributions of all batches.
///
/// ```
/// use brigade_metrics::{Fold, Folded, Metric, MetricState};
/// use brigade_torch::Result;
/// use tch::{Kind, Tensor};
///
/// /// The share of predictions that are off by more than one.
/// #[derive(Debug)]
/// struct FarOff;
///
/// impl Metric for FarOff {
///     type Value = f64;
///
///     fn name(&self) -> String {
///         "far_off".to_owned()
///     }
///
///     fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
///         let far = (predictions - targets).f_abs()?.f_gt(1.0)?;
///         Fold::sums(&[far.f_sum(Kind::Double)?, far.f_ones_like()?.f_sum(Kind::Double)?])
///     }
///
///     fn value(&self, folded: &Folded) -> Result<f64> {
///         let [far, all] = folded.sums()?;
///         Ok(far / all)
///     }
/// }
///
/// let mut far_off = MetricState::new(FarOff);
/// far_off.update(&Tensor::from_slice(&[1.0, 5.0]), &Tensor::from_slice(&[1.5, 2.0]))?;
/// assert_eq!(far_off.compute(None)?, 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait Metric: fmt::Debug + Send + Sync {
    /// Type of the value: `f64` for the Learner; several numbers for [`PerClass`].
    type Value;

    /// Returns the name of the metric: a column of the Learner's table.
    fn name(&self) -> String;

    /// Computes the contribution of a batch, from the model's outputs and the targets. The rows are real samples of
    /// this rank, without duplicates.
    ///
    /// # Errors
    /// Fails if the shapes do not match. The message contains expected and found shapes.
    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold>;

    /// Computes the value from the contributions of all batches of all ranks.
    ///
    /// # Errors
    /// Fails if the value is not defined for these data.
    fn value(&self, folded: &Folded) -> Result<Self::Value>;

    /// Returns the metric under another name, for two metrics that would have the same name.
    ///
    /// ```
    /// use brigade_metrics::{Metric, TopK};
    ///
    /// assert_eq!(TopK(3).named("top_3").name(), "top_3");
    /// ```
    fn named(self, name: impl Into<String>) -> Renamed<Self>
    where
        Self: Sized,
    {
        Renamed::new(name, self)
    }
}
