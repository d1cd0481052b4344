//! Shares of correct predictions.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::read::{self, Scored, Threshold};
use crate::{Fold, Folded, Metric};

/// Counts right decisions, all that count, and targets that name no class.
fn counted(scored: &Scored, right: &Tensor) -> Result<Fold> {
    let (right, all) = (right.f_sum(Kind::Double)?, scored.kept()?.f_sum(Kind::Double)?);
    Fold::sums(&[right, all, scored.outside()?])
}

fn decisions(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
    let scored = Scored::of(metric, predictions, targets)?;
    let right = scored.decided()?.f_eq_tensor(&scored.targets)?;
    counted(&scored, &right)
}

fn share(metric: &str, folded: &Folded) -> Result<f64> {
    let [right, all, outside] = read::numbers(metric, folded)?;
    read::refuse_outside(metric, outside)?;
    Ok(right / all)
}

/// Accuracy: the share of samples, pixels or tokens whose target class has the largest score, `right / all`.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`.
///
/// ```
/// use brigade_metrics::{Accuracy, Fold, Folded, Metric};
/// use tch::Tensor;
///
/// let scores = Tensor::from_slice2(&[[0.3, 2.0], [1.5, -1.0], [0.0, 0.1]]);
/// let Fold::Sums(sums) = Accuracy.fold(&scores, &Tensor::from_slice(&[1i64, 0, 0]))? else { panic!() };
/// assert_eq!(Accuracy.value(&Folded::Sums(Vec::try_from(sums)?))?, 2.0 / 3.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accuracy;

impl Metric for Accuracy {
    type Value = f64;

    fn name(&self) -> String {
        "accuracy".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        decisions("accuracy", predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        share("accuracy", folded)
    }
}

/// Error rate: the share of wrong predictions, `1 - accuracy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ErrorRate;

impl Metric for ErrorRate {
    type Value = f64;

    fn name(&self) -> String {
        "error_rate".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        decisions("error_rate", predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        Ok(1.0 - share("error_rate", folded)?)
    }
}

/// Hamming loss of single labels: the share of wrong predictions, under scikit-learn's name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HammingLoss;

impl Metric for HammingLoss {
    type Value = f64;

    fn name(&self) -> String {
        "hamming_loss".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        decisions("hamming_loss", predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        Ok(1.0 - share("hamming_loss", folded)?)
    }
}

/// Top-k accuracy: the share of targets among the classes with the `k` largest scores.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`. Among equal scores, the one of the smaller class number ranks
/// higher. With `k` classes or fewer the value is 1, as in scikit-learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK(pub i64);

/// Returns fastai's default `k`.
impl Default for TopK {
    fn default() -> Self {
        Self(5)
    }
}

impl Metric for TopK {
    type Value = f64;

    fn name(&self) -> String {
        "top_k_accuracy".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let name = self.name();
        if self.0 < 1 {
            return Err(read::failed(&name, format!("k is {}: it must be at least 1", self.0)));
        }
        let scored = Scored::of(&name, predictions, targets)?;
        let (scores, targets) = scored.rows()?;
        let inside = targets.f_ge(0)?.f_logical_and(&targets.f_lt(scored.classes)?)?;
        let target = targets.f_clamp(0, scored.classes - 1)?.f_unsqueeze(1)?;
        let own = scores.f_gather(1, &target, false)?;
        // Scores that are not below or equal are ahead: also a NaN, and all if the target's score is NaN.
        let above = scores.f_le_tensor(&own)?.f_logical_not()?;
        let places = Tensor::f_arange(scored.classes, (Kind::Int64, scores.device()))?;
        let tied = scores.f_eq_tensor(&own)?.f_logical_and(&places.f_lt_tensor(&target)?)?;
        let ahead =
            above.f_logical_or(&tied)?.f_sum_dim_intlist([1].as_slice(), false, Kind::Int64)?;
        // With k classes or fewer, all that name a class: at most classes - 1 are ahead, or all of NaN.
        let near = ahead.f_lt(if self.0 < scored.classes { self.0 } else { i64::MAX })?;
        counted(&scored, &near.f_logical_and(&inside)?)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        share(&self.name(), folded)
    }
}

/// Accuracy of labels: the share of labels that are predicted correctly, `mean((sigmoid(prediction) > threshold) ==
/// target)`.
///
/// Predictions and targets `[n, labels, …]`; or `[n, 1]` and `[n]` for one label.
///
/// ```
/// use brigade_metrics::{AccuracyMulti, Metric};
///
/// assert_eq!(AccuracyMulti::new().threshold(0.3).name(), "accuracy_multi");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AccuracyMulti(Threshold);

impl AccuracyMulti {
    /// Creates the metric for logits, with a threshold of 0.5.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the probability above which a label is predicted.
    #[must_use]
    pub fn threshold(mut self, at: f64) -> Self {
        self.0.at = at;
        self
    }

    /// Treats predictions as probabilities, without a sigmoid.
    #[must_use]
    pub fn probabilities(mut self) -> Self {
        self.0.sigmoid = false;
        self
    }
}

impl Metric for AccuracyMulti {
    type Value = f64;

    fn name(&self) -> String {
        "accuracy_multi".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let (scores, targets, outside) = read::labelled(&self.name(), predictions, targets)?;
        let there = self.0.probabilities(&scores)?.f_gt(self.0.at)?;
        agreement(&there, &targets, outside)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        label_share(&self.name(), folded)
    }
}

/// Hamming loss of labels: the share of labels that are predicted wrongly, `mean((sigmoid(prediction) >= threshold) !=
/// target)`.
///
/// Predictions and targets `[n, labels, …]`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HammingLossMulti(Threshold);

impl HammingLossMulti {
    /// Creates the metric for logits, with a threshold of 0.5.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the minimum probability of a predicted label.
    #[must_use]
    pub fn threshold(mut self, at: f64) -> Self {
        self.0.at = at;
        self
    }

    /// Treats predictions as probabilities, without a sigmoid.
    #[must_use]
    pub fn probabilities(mut self) -> Self {
        self.0.sigmoid = false;
        self
    }
}

impl Metric for HammingLossMulti {
    type Value = f64;

    fn name(&self) -> String {
        "hamming_loss".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let (scores, targets, outside) = read::labelled(&self.name(), predictions, targets)?;
        let there = self.0.probabilities(&scores)?.f_ge(self.0.at)?;
        agreement(&there, &targets, outside)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        Ok(1.0 - label_share(&self.name(), folded)?)
    }
}

fn agreement(there: &Tensor, targets: &Tensor, outside: Tensor) -> Result<Fold> {
    let right = there.f_eq_tensor(&targets.f_ne(0)?)?.f_sum(Kind::Double)?;
    let all = read::count(targets.numel(), right.device())?;
    Fold::sums(&[right, all, outside])
}

fn label_share(metric: &str, folded: &Folded) -> Result<f64> {
    let [right, all, outside] = read::numbers(metric, folded)?;
    read::refuse_unlabelled(metric, outside)?;
    Ok(right / all)
}
