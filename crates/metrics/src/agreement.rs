//! Agreement of predictions with targets beyond chance.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::counts::{Count, class_counts, count_classes};
use crate::read::{self, Scored};
use crate::{Fold, Folded, Metric};

/// Balanced accuracy: the mean of the recalls of the classes that occur in the targets.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BalancedAccuracy {
    adjusted: bool,
}

impl BalancedAccuracy {
    /// Creates the metric without adjustment for chance.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adjusts the value for chance, so that random predictions score 0 and perfect ones 1: `(value - 1/k) / (1 - 1/k)`
    /// for `k` classes that occur in the targets.
    #[must_use]
    pub fn adjusted(mut self) -> Self {
        self.adjusted = true;
        self
    }
}

impl Metric for BalancedAccuracy {
    type Value = f64;

    fn name(&self) -> String {
        "balanced_accuracy_score".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        count_classes(&Scored::of(&self.name(), predictions, targets)?)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let counts = class_counts(&self.name(), folded)?.unwrap_or_default();
        let recalls: Vec<f64> =
            counts.iter().filter(|it| it.there > 0.0).map(|it| it.right / it.there).collect();
        let mean = recalls.iter().sum::<f64>() / recalls.len() as f64;
        let chance = 1.0 / recalls.len() as f64;
        Ok(if self.adjusted { (mean - chance) / (1.0 - chance) } else { mean })
    }
}

/// Matthews correlation coefficient of predictions and targets, from -1 to 1. It is 0 if either has only one class.
///
/// With `n` predictions of which `c` are correct, and `pₖ` predictions and `tₖ` targets of each class: `(c n - Σ pₖ tₖ)
/// / √((n² - Σ pₖ²)(n² - Σ tₖ²))`. Predictions `[n, classes, …]`, targets `[n, …]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Matthews;

impl Metric for Matthews {
    type Value = f64;

    fn name(&self) -> String {
        "matthews_corrcoef".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        count_classes(&Scored::of(&self.name(), predictions, targets)?)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let Some(counts) = class_counts(&self.name(), folded)? else { return Ok(f64::NAN) };
        let sum = |of: fn(&Count) -> f64| counts.iter().map(of).sum::<f64>();
        let (right, all) = (sum(|it| it.right), sum(|it| it.there));
        let both = right * all - sum(|it| it.predicted * it.there);
        let predicted = all * all - sum(|it| it.predicted * it.predicted);
        let there = all * all - sum(|it| it.there * it.there);
        let whole = predicted * there;
        Ok(if whole == 0.0 { 0.0 } else { both / whole.sqrt() })
    }
}

/// Weights of the confusions of two classes in [`CohenKappa`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KappaWeights {
    /// Equal weights of all confusions.
    #[default]
    Equal,
    /// Weights by the distance of the classes in their order.
    Linear,
    /// Weights by the squared distance of the classes in their order.
    Quadratic,
}

/// Cohen's kappa: `1 - observed / expected` disagreement of predictions and targets. It is NaN if both have only one
/// class.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`. As in scikit-learn, a class that occurs in neither targets nor
/// predictions is left out of the order of classes, so that its neighbours become adjacent. With weights the metric
/// keeps `classes²` numbers per batch, otherwise three per class.
///
/// ```
/// use brigade_metrics::{CohenKappa, KappaWeights};
///
/// let of_grades = CohenKappa::new().weights(KappaWeights::Quadratic);
/// # let _ = of_grades;
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CohenKappa {
    weights: KappaWeights,
}

impl CohenKappa {
    /// Creates the metric with equal weights.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the weights of confusions.
    #[must_use]
    pub fn weights(mut self, weights: KappaWeights) -> Self {
        self.weights = weights;
        self
    }

    fn of_counts(&self, folded: &Folded) -> Result<f64> {
        let Some(counts) = class_counts(&self.name(), folded)? else { return Ok(f64::NAN) };
        let sum = |of: fn(&Count) -> f64| counts.iter().map(of).sum::<f64>();
        let (right, all) = (sum(|it| it.right), sum(|it| it.there));
        let expected = all - sum(|it| it.predicted * it.there) / all;
        Ok(if expected == 0.0 { f64::NAN } else { 1.0 - (all - right) / expected })
    }

    /// `[target · classes + decision]`, and how many targets name no class.
    fn confusion(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let scored = Scored::of(&self.name(), predictions, targets)?;
        let classes = scored.classes;
        let decided = scored.decided()?.f_reshape([-1])?;
        let places = scored.places()?.f_mul_scalar(classes)?.f_add(&decided)?;
        let places = places.f_clamp_max(classes * classes)?;
        let kept = scored.kept()?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
        let zeros = Tensor::f_zeros([classes * classes + 1], (Kind::Double, places.device()))?;
        Ok(Fold::Sums(zeros.f_scatter_add(0, &places, &kept)?))
    }

    fn of_confusion(&self, folded: &Folded) -> Result<f64> {
        let name = self.name();
        let Some(sums) = read::sums(&name, folded)? else { return Ok(f64::NAN) };
        let classes = sums.len().isqrt();
        let (Some((&outside, cells)), true) =
            (sums.split_last(), sums.len() == classes * classes + 1)
        else {
            let reason = format!(
                "it keeps the square of the classes and one sum, and was given {}",
                sums.len()
            );
            return Err(read::failed(&name, reason));
        };
        read::refuse_outside(&name, outside)?;
        let cell = |target: usize, decided: usize| cells[target * classes + decided];
        let there = |class: usize| (0..classes).map(|it| cell(class, it)).sum::<f64>();
        let predicted = |class: usize| (0..classes).map(|it| cell(it, class)).sum::<f64>();
        let occurring: Vec<(usize, f64, f64)> = (0..classes)
            .map(|class| (class, there(class), predicted(class)))
            .filter(|counts| counts.1 + counts.2 > 0.0)
            .collect();
        let all: f64 = cells.iter().sum();
        let (mut observed, mut expected) = (0.0, 0.0);
        for (row, &(target, there, _)) in occurring.iter().enumerate() {
            for (column, &(decided, _, predicted)) in occurring.iter().enumerate() {
                let distance = row.abs_diff(column) as f64;
                let weight = match self.weights {
                    KappaWeights::Equal => f64::from(row != column),
                    KappaWeights::Linear => distance,
                    KappaWeights::Quadratic => distance * distance,
                };
                observed += weight * cell(target, decided);
                expected += weight * there * predicted / all;
            }
        }
        Ok(if expected == 0.0 { f64::NAN } else { 1.0 - observed / expected })
    }
}

impl Metric for CohenKappa {
    type Value = f64;

    fn name(&self) -> String {
        "cohen_kappa_score".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        if self.weights == KappaWeights::Equal {
            return count_classes(&Scored::of(&self.name(), predictions, targets)?);
        }
        self.confusion(predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        if self.weights == KappaWeights::Equal {
            return self.of_counts(folded);
        }
        self.of_confusion(folded)
    }
}
