//! Scores of classes and labels computed from three counts of each: correct predictions, predictions, and targets.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::read::{self, Scored, Threshold};
use crate::{Fold, Folded, Metric};

/// Method by which the scores of classes are averaged to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Average {
    /// Score of the positive class, for two classes.
    Binary,
    /// Mean over the classes that occur in targets or predictions; for labels, over all labels.
    Macro,
    /// Score computed from the summed counts of all classes.
    Micro,
    /// Mean over classes, weighted by the number of their targets.
    Weighted,
    /// Mean over samples of the score of each one's labels. For labels only.
    Samples,
}

/// A score as a quotient of counts: `right · (rightly predicted) / (there · there + predicted · predicted + …)`, with
/// the weights of this struct.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Formula {
    numerator: f64,
    there: f64,
    predicted: f64,
    right: f64,
}

const PRECISION: Formula = Formula { numerator: 1.0, there: 0.0, predicted: 1.0, right: 0.0 };
const RECALL: Formula = Formula { numerator: 1.0, there: 1.0, predicted: 0.0, right: 0.0 };
const JACCARD: Formula = Formula { numerator: 1.0, there: 1.0, predicted: 1.0, right: -1.0 };

/// Returns the formula `(1 + b²) right / (b² there + predicted)`.
fn f_beta(beta: f64) -> Formula {
    if beta.is_infinite() {
        return RECALL;
    }
    let square = beta * beta;
    Formula { numerator: 1.0 + square, there: square, predicted: 1.0, right: 0.0 }
}

impl Formula {
    /// Returns the score. It is 0 if the denominator is 0, as in scikit-learn, which warns.
    fn score(self, count: &Count) -> f64 {
        let whole =
            self.there * count.there + self.predicted * count.predicted + self.right * count.right;
        if whole == 0.0 { 0.0 } else { self.numerator * count.right / whole }
    }

    /// Returns the scores of rows of labels.
    fn of_rows(self, predicted: &Tensor, there: &Tensor) -> Result<Tensor> {
        let sum = |tensor: &Tensor| tensor.f_sum_dim_intlist([1].as_slice(), false, Kind::Double);
        let right = sum(&predicted.f_logical_and(there)?)?;
        let parts = [(self.there, sum(there)?), (self.predicted, sum(predicted)?)];
        let mut whole = right.f_mul_scalar(self.right)?;
        for (factor, part) in parts {
            whole = whole.f_add(&part.f_mul_scalar(factor)?)?;
        }
        let scores = right.f_mul_scalar(self.numerator)?.f_div(&whole)?;
        Ok(scores.f_masked_fill(&whole.f_eq(0.0)?, 0.0)?)
    }
}

/// Numbers of correct predictions, predictions and targets of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Count {
    pub(crate) right: f64,
    pub(crate) predicted: f64,
    pub(crate) there: f64,
}

impl Count {
    /// Returns `true` if the class occurs in these data.
    pub(crate) fn occurs(&self) -> bool {
        self.predicted > 0.0 || self.there > 0.0
    }

    fn add(self, other: &Self) -> Self {
        Self {
            right: self.right + other.right,
            predicted: self.predicted + other.predicted,
            there: self.there + other.there,
        }
    }
}

/// Folds a batch into the counts of each class, and how many targets name no class.
pub(crate) fn count_classes(scored: &Scored) -> Result<Fold> {
    let places = scored.places()?;
    let kept = scored.kept()?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
    let decided = scored.decided()?.f_reshape([-1])?;
    let right = decided.f_eq_tensor(&places)?.f_to_kind(Kind::Double)?;
    let zeros = Tensor::f_zeros([scored.classes + 1], (Kind::Double, places.device()))?;
    // Sums of ones: exact in any order, so on any device.
    let count = |places: &Tensor, of: &Tensor| zeros.f_scatter_add(0, places, of);
    let classes = |counts: &Tensor| counts.f_narrow(0, 0, scored.classes);
    let there = count(&places, &kept)?;
    Fold::sums(&[
        classes(&count(&places, &right)?)?,
        classes(&count(&decided, &kept)?)?,
        there, // with its last place: the targets that name no class
    ])
}

/// Reads the state of [`count_classes`]. Empty if there was no batch.
pub(crate) fn class_counts(metric: &str, folded: &Folded) -> Result<Option<Vec<Count>>> {
    let Some((sums, outside)) = read_counts(metric, folded)? else { return Ok(None) };
    read::refuse_outside(metric, outside)?;
    Ok(Some(sums).filter(|counts| counts.iter().any(|count| count.there > 0.0)))
}

fn read_counts(metric: &str, folded: &Folded) -> Result<Option<(Vec<Count>, f64)>> {
    let Some(sums) = read::sums(metric, folded)? else { return Ok(None) };
    let (Some((&outside, sums)), 1) = (sums.split_last(), sums.len() % 3) else {
        let reason =
            format!("it keeps three sums for a class and one, and was given {}", sums.len());
        return Err(read::failed(metric, reason));
    };
    let classes = sums.len() / 3;
    let count = |class: usize| Count {
        right: sums[class],
        predicted: sums[classes + class],
        there: sums[2 * classes + class],
    };
    Ok(Some(((0..classes).map(count).collect(), outside)))
}

/// A score of classes: what all of this file's metrics of single labels are.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ByClass {
    formula: Formula,
    average: Average,
    positive: usize,
}

impl ByClass {
    fn new(formula: Formula) -> Self {
        Self { formula, average: Average::Binary, positive: 1 }
    }

    fn fold(&self, metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let scored = Scored::of(metric, predictions, targets)?;
        let classes = scored.classes;
        match self.average {
            Average::Binary if classes != 2 => Err(read::failed(
                metric,
                format!(
                    "the binary average is for 2 classes, but there are {classes}; choose another average"
                ),
            )),
            Average::Binary if self.positive > 1 => Err(read::failed(
                metric,
                format!("the positive class is {}; of two classes it is 0 or 1", self.positive),
            )),
            Average::Samples => Err(read::failed(
                metric,
                "the average over samples is of labels, not of classes; choose another",
            )),
            _ => count_classes(&scored),
        }
    }

    fn value(&self, metric: &str, folded: &Folded) -> Result<f64> {
        let Some(mut counts) = class_counts(metric, folded)? else { return Ok(f64::NAN) };
        if self.average == Average::Binary {
            return Ok(counts.get(self.positive).map_or(f64::NAN, |it| self.formula.score(it)));
        }
        counts.retain(Count::occurs);
        Ok(averaged(self.formula, self.average, &counts))
    }
}

/// A score of labels.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ByLabel {
    formula: Formula,
    average: Average,
    threshold: Threshold,
}

impl ByLabel {
    fn new(formula: Formula) -> Self {
        Self { formula, average: Average::Macro, threshold: Threshold::default() }
    }

    fn fold(&self, metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let (scores, targets, outside) = read::labelled(metric, predictions, targets)?;
        let labels = scores.size()[1];
        if self.average == Average::Binary && labels != 1 {
            return Err(read::failed(
                metric,
                format!(
                    "the binary average is for 1 label, but there are {labels}; choose another average"
                ),
            ));
        }
        let predicted = self.threshold.probabilities(&scores)?.f_ge(self.threshold.at)?;
        let there = targets.f_ne(0)?;
        if self.average == Average::Samples {
            let scores = self.formula.of_rows(&predicted, &there)?.f_sum(Kind::Double)?;
            let rows = read::count(there.size()[0] as usize, there.device())?;
            return Fold::sums(&[scores, rows, outside]);
        }
        let sum = |tensor: &Tensor| tensor.f_sum_dim_intlist([0].as_slice(), false, Kind::Double);
        let right = sum(&predicted.f_logical_and(&there)?)?;
        Fold::sums(&[right, sum(&predicted)?, sum(&there)?, outside])
    }

    fn value(&self, metric: &str, folded: &Folded) -> Result<f64> {
        if self.average == Average::Samples {
            let [scores, rows, outside] = read::numbers(metric, folded)?;
            read::refuse_unlabelled(metric, outside)?;
            return Ok(scores / rows);
        }
        let Some((counts, outside)) = read_counts(metric, folded)? else { return Ok(f64::NAN) };
        read::refuse_unlabelled(metric, outside)?;
        Ok(averaged(self.formula, self.average, &counts))
    }
}

fn averaged(formula: Formula, average: Average, counts: &[Count]) -> f64 {
    let scores = counts.iter().map(|count| formula.score(count));
    match average {
        // With a single label, these averages are equal.
        Average::Binary | Average::Macro | Average::Samples => {
            scores.sum::<f64>() / counts.len() as f64
        }
        Average::Micro => {
            formula.score(&counts.iter().fold(Count::default(), |sum, count| sum.add(count)))
        }
        Average::Weighted => {
            let whole: f64 = counts.iter().map(|count| count.there).sum();
            let weighted: f64 = scores.zip(counts).map(|(score, count)| score * count.there).sum();
            // Nothing was there: then all scores are 0.
            if whole == 0.0 { 0.0 } else { weighted / whole }
        }
    }
}

/// Metric with a score for each class, created by [`FBeta::per_class`] and the methods of that name.
///
/// The value is the list of scores in the order of the classes, with 0 for a class that occurs in neither targets nor
/// predictions. It is empty without a batch.
///
/// ```
/// use brigade_metrics::{F1, MetricState};
/// use tch::Tensor;
///
/// let mut f1 = MetricState::new(F1::new().per_class());
/// let scores = Tensor::from_slice2(&[[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]);
/// f1.update(&scores, &Tensor::from_slice(&[1i64, 0, 0, 0]))?;
/// assert_eq!(f1.compute(None)?, [0.8, 2.0 / 3.0]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerClass {
    score: ByClass,
    name: &'static str,
}

impl Metric for PerClass {
    type Value = Vec<f64>;

    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        self.score.fold(self.name, predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<Vec<f64>> {
        let Some((counts, outside)) = read_counts(self.name, folded)? else {
            return Ok(Vec::new());
        };
        read::refuse_outside(self.name, outside)?;
        Ok(counts.iter().map(|count| self.score.formula.score(count)).collect())
    }
}

macro_rules! score {
    (
        $(#[$doc:meta])* $name:ident, $(#[$multi_doc:meta])* $multi:ident,
        $column:literal, $formula:expr $(, $argument:ident: $type:ty)?
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $name(ByClass);

        impl $name {
            /// Creates the metric for the second of two classes: [`Average::Binary`] is the default average.
            #[must_use]
            pub fn new($($argument: $type)?) -> Self {
                Self(ByClass::new($formula))
            }

            /// Sets the average over classes.
            #[must_use]
            pub fn average(mut self, average: Average) -> Self {
                self.0.average = average;
                self
            }

            /// Sets the positive class of [`Average::Binary`], 0 or 1.
            #[must_use]
            pub fn positive(mut self, class: usize) -> Self {
                self.0.positive = class;
                self
            }

            /// Returns the metric with a score for each class instead of an average.
            #[must_use]
            pub fn per_class(self) -> PerClass {
                PerClass { score: self.average(Average::Macro).0, name: $column }
            }
        }

        impl Metric for $name {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                self.0.fold($column, predictions, targets)
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                self.0.value($column, folded)
            }
        }

        $(#[$multi_doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $multi(ByLabel);

        impl $multi {
            /// Creates the metric for logits, with a threshold of 0.5 and [`Average::Macro`].
            #[must_use]
            pub fn new($($argument: $type)?) -> Self {
                Self(ByLabel::new($formula))
            }

            /// Sets the average over labels, or over samples.
            #[must_use]
            pub fn average(mut self, average: Average) -> Self {
                self.0.average = average;
                self
            }

            /// Sets the minimum probability of a predicted label.
            #[must_use]
            pub fn threshold(mut self, at: f64) -> Self {
                self.0.threshold.at = at;
                self
            }

            /// Treats predictions as probabilities, without a sigmoid.
            #[must_use]
            pub fn probabilities(mut self) -> Self {
                self.0.threshold.sigmoid = false;
                self
            }
        }

        impl Metric for $multi {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                self.0.fold($column, predictions, targets)
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                self.0.value($column, folded)
            }
        }
    };
}

macro_rules! defaults {
    ($($name:ident)+) => {
        $(impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        })+
    };
}

score! {
    /// F-beta score of classes: `(1 + b²) p r / (b² p + r)` of precision `p` and recall `r`, that is `(1 + b²) right /
    /// (b² there + predicted)`. A `beta` above 1 gives recall more weight.
    ///
    /// Predictions `[n, classes, …]`, targets `[n, …]`. 0 for a class that is there and never predicted, or the
    /// other way round; a class that is neither is left out of means.
    ///
    /// ```
    /// use brigade_metrics::{Average, FBeta};
    ///
    /// let metric = FBeta::new(2.0).average(Average::Macro);
    /// # let _ = metric;
    /// ```
    FBeta,
    /// F-beta score of labels. See [`FBeta`]. Predictions and targets `[n, labels, …]`.
    FBetaMulti, "fbeta_score", f_beta(beta), beta: f64
}

score! {
    /// F1 score of classes: [`FBeta`] with a `beta` of 1.
    F1,
    /// F1 score of labels: [`FBetaMulti`] with a `beta` of 1.
    F1Multi, "f1_score", f_beta(1.0)
}

score! {
    /// Precision of classes: the share of the predictions of a class that are correct. Predictions `[n, classes, …]`,
    /// targets `[n, …]`. 0 for a class that is never predicted.
    Precision,
    /// Precision of labels. See [`Precision`]. Predictions and targets `[n, labels, …]`.
    PrecisionMulti, "precision_score", PRECISION
}

score! {
    /// Recall of classes: the share of the targets of a class that are predicted. Predictions `[n, classes, …]`,
    /// targets `[n, …]`. 0 for a class without targets.
    Recall,
    /// Recall of labels. See [`Recall`]. Predictions and targets `[n, labels, …]`.
    RecallMulti, "recall_score", RECALL
}

score! {
    /// Jaccard index of classes: the intersection over the union of targets and predictions of a class. Predictions
    /// `[n, classes, …]`, targets `[n, …]`.
    Jaccard,
    /// Jaccard index of labels. See [`Jaccard`]. Predictions and targets `[n, labels, …]`.
    JaccardMulti, "jaccard_score", JACCARD
}

defaults!(F1 F1Multi Precision PrecisionMulti Recall RecallMulti Jaccard JaccardMulti);
