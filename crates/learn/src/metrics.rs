//! Metrics: a fold over the batches of all ranks, and the number that is computed of it.
//!
//! A metric never averages over batches or ranks. Of each batch it takes numbers that add up, which are added in
//! the order of the data, or rows, which are put in the order of the data; so its value is the same to the last
//! digit on any number of ranks. Duplicates that complete uneven batches are left out before it sees a batch.
//!
//! Predictions are the model's outputs as they are: scores (logits) of classes in dimension 1, `[n, classes, …]`,
//! with targets `[n, …]` of class numbers; scores of labels, with targets of 0 and 1 in the same shape; or
//! numbers with targets in the same shape. [`ClassesLast`] reads outputs with the classes in the last dimension,
//! as language models have. Target [`IGNORED`] is left out, as the cross-entropy leaves it out.
//!
//! ```
//! use brigade_learn::metrics::{Accuracy, Average, FBeta, IntoMetrics, Metric, TopK};
//!
//! let metrics = (Accuracy, TopK(5), FBeta::new(2.0).average(Average::Macro)).into_metrics();
//! let names: Vec<String> = metrics.iter().map(|it| it.name()).collect();
//! assert_eq!(names, ["accuracy", "top_k_accuracy", "fbeta_score"]);
//! ```
//!
//! Names and definitions are fastai's and scikit-learn's. A value that the data leave undefined (an empty
//! validation set, one class alone where two are compared) is what scikit-learn gives with its warning, mostly 0
//! or NaN. What no data can make right is an error with the reason: shapes that do not fit, targets that name no
//! class, the binary average of five classes. NaN predictions make means, curves and correlations NaN; where a
//! class is chosen, NaN is the largest score, as in PyTorch, and where a threshold is passed, it is below.

mod accuracy;
mod adapt;
mod agreement;
mod bleu;
mod counts;
mod into;
mod probability;
mod ranking;
mod read;
mod regression;
mod segmentation;

use std::fmt;

use tch::Tensor;

use crate::error::Result;

pub use accuracy::{Accuracy, AccuracyMulti, ErrorRate, HammingLoss, HammingLossMulti, TopK};
pub use adapt::{ClassesLast, FoldFn, MeanOf, Renamed, RowsFn, Summed, fold, mean_of, of_rows};
pub use agreement::{BalancedAccuracy, CohenKappa, KappaWeights, Matthews};
pub use bleu::CorpusBleu;
pub use counts::{
    Average, F1, F1Multi, FBeta, FBetaMulti, Jaccard, JaccardMulti, Precision, PrecisionMulti,
    Recall, RecallMulti,
};
pub use into::IntoMetrics;
pub use probability::{Brier, Perplexity};
pub use ranking::{
    AveragePrecision, AveragePrecisionMulti, MultiClass, RocAuc, RocAucBinary, RocAucMulti,
};
pub use read::IGNORED;
pub use regression::{ExpRmspe, ExplainedVariance, Mae, Mse, Msle, Pearson, R2, Rmse, Spearman};
pub use segmentation::{Dice, DiceMulti, ForegroundAccuracy, JaccardCoeff, JaccardCoeffMulti};

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
    /// The sums of all batches; empty where no rank had a batch, whatever the metric keeps.
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

    /// Gives it another name, where two of one kind would have the same.
    ///
    /// ```
    /// use brigade_learn::metrics::{Metric, TopK};
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
