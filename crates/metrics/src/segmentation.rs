//! Overlap of predicted and target masks.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::counts::{Count, class_counts, count_classes};
use crate::read::{self, Scored};
use crate::{Fold, Folded, Metric};

fn binary(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
    let scored = Scored::of(metric, predictions, targets)?;
    if scored.classes != 2 {
        return Err(read::failed(
            metric,
            format!("it is for 2 classes, but there are {}; use `{metric}_multi`", scored.classes),
        ));
    }
    count_classes(&scored)
}

fn dice(count: &Count) -> f64 {
    2.0 * count.right / (count.predicted + count.there)
}

fn jaccard(count: &Count) -> f64 {
    count.right / (count.predicted + count.there - count.right)
}

/// Returns the value of the second of two classes. It is NaN if the class occurs in neither targets nor predictions.
fn of_foreground(metric: &str, folded: &Folded, value: fn(&Count) -> f64) -> Result<f64> {
    let counts = class_counts(metric, folded)?;
    Ok(counts.as_deref().and_then(|it| it.get(1)).map_or(f64::NAN, value))
}

/// Returns the mean over the classes that occur in targets or predictions.
fn mean(metric: &str, folded: &Folded, value: fn(&Count) -> f64) -> Result<f64> {
    let mut counts = class_counts(metric, folded)?.unwrap_or_default();
    counts.retain(Count::occurs);
    Ok(counts.iter().map(value).sum::<f64>() / counts.len() as f64)
}

macro_rules! overlap {
    ($(#[$doc:meta])* $name:ident $column:literal $fold:path, $value:path, $of:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name;

        impl Metric for $name {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                $fold($column, predictions, targets)
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                $value($column, folded, $of)
            }
        }
    };
}

fn multi(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
    count_classes(&Scored::of(metric, predictions, targets)?)
}

overlap! {
    /// Dice coefficient of the second of two classes, over the pixels of all images: `2 |A ∩ B| / (|A| + |B|)`.
    ///
    /// Predictions `[n, 2, h, w]`, masks `[n, h, w]`; NaN where the class is neither there nor predicted.
    Dice "dice" binary, of_foreground, dice
}

overlap! {
    /// Mean Dice coefficient over the classes that occur in masks or predictions, including the background.
    ///
    /// Predictions `[n, classes, h, w]`, masks `[n, h, w]`.
    DiceMulti "dice_multi" multi, mean, dice
}

overlap! {
    /// Jaccard coefficient of the second of two classes, over the pixels of all images: `|A ∩ B| / |A ∪ B|`.
    ///
    /// Predictions `[n, 2, h, w]`, masks `[n, h, w]`; NaN where the class is neither there nor predicted.
    JaccardCoeff "jaccard_coeff" binary, of_foreground, jaccard
}

overlap! {
    /// Mean intersection over union (mIoU): the mean Jaccard coefficient over the classes that occur in masks or
    /// predictions.
    ///
    /// Predictions `[n, classes, h, w]`, masks `[n, h, w]`.
    JaccardCoeffMulti "jaccard_coeff_multi" multi, mean, jaccard
}

/// Accuracy over the pixels whose target is not the background.
///
/// Predictions `[n, classes, h, w]`, masks `[n, h, w]` or `[n, 1, h, w]`. It is NaN if all pixels are background. The
/// share is computed over all batches together; fastai averages the shares of the batches.
///
/// ```
/// use brigade_metrics::ForegroundAccuracy;
///
/// let metric = ForegroundAccuracy::new().background(30); // CamVid's "void"
/// # let _ = metric;
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ForegroundAccuracy {
    background: i64,
}

impl ForegroundAccuracy {
    /// Creates the metric with class 0 as background.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the class of the background.
    #[must_use]
    pub fn background(mut self, class: i64) -> Self {
        self.background = class;
        self
    }
}

impl Metric for ForegroundAccuracy {
    type Value = f64;

    fn name(&self) -> String {
        "foreground_acc".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let scored = Scored::of(&self.name(), predictions, targets)?;
        let ahead = scored.targets.f_ne(self.background)?.f_logical_and(&scored.kept()?)?;
        let right = scored.decided()?.f_eq_tensor(&scored.targets)?.f_logical_and(&ahead)?;
        let sums = [right.f_sum(Kind::Double)?, ahead.f_sum(Kind::Double)?, scored.outside()?];
        Fold::sums(&sums)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [right, ahead, outside] = read::numbers(&self.name(), folded)?;
        read::refuse_outside(&self.name(), outside)?;
        Ok(right / ahead)
    }
}
