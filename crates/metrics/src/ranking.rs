//! Areas under the ROC curve and the precision-recall curve.
//!
//! Only the order of scores matters, so logits are compared directly, in `f64`: a sigmoid or softmax in `f32` would
//! round different scores to the same value.

use std::cmp::Ordering;

use brigade_torch::Result;
use tch::{Device, Kind, Tensor};

use crate::read::{self, Scored};
use crate::{Average, Fold, Folded, IGNORED, Metric};

/// Scores in falling order, with the weight of positives and negatives that have each.
///
/// Calls `each` with the positives and negatives of every distinct score.
fn descend(scores: &[f64], positive: &[bool], mut each: impl FnMut(f64, f64)) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_unstable_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap_or(Ordering::Equal));
    for tied in order.chunk_by(|&a, &b| scores[a] == scores[b]) {
        let positives = tied.iter().filter(|&&it| positive[it]).count();
        each(positives as f64, (tied.len() - positives) as f64);
    }
}

/// Returns the area under the ROC curve: NaN with one class alone, or a score that is NaN.
fn roc_auc(scores: &[f64], positive: &[bool]) -> f64 {
    if scores.iter().any(|it| it.is_nan()) {
        return f64::NAN;
    }
    // Twice the area in units of one positive by one negative: whole numbers, so exact.
    let (mut area, mut positives, mut negatives) = (0.0, 0.0, 0.0);
    descend(scores, positive, |of_positives, of_negatives| {
        area += of_negatives * (2.0 * positives + of_positives);
        positives += of_positives;
        negatives += of_negatives;
    });
    area / (2.0 * positives * negatives)
}

/// Returns the average precision: 0 without a positive, NaN with a score that is NaN.
fn average_precision(scores: &[f64], positive: &[bool]) -> f64 {
    if scores.iter().any(|it| it.is_nan()) {
        return f64::NAN;
    }
    let (mut area, mut positives, mut predicted) = (0.0, 0.0, 0.0);
    descend(scores, positive, |of_positives, of_negatives| {
        positives += of_positives;
        predicted += of_positives + of_negatives;
        area += of_positives * positives / predicted;
    });
    if positives == 0.0 { 0.0 } else { area / positives }
}

type Area = fn(&[f64], &[bool]) -> f64;

/// A matrix of scores with class numbers or labels, on the CPU.
#[derive(Debug)]
struct Matrix {
    columns: usize,
    /// Scores of the matrix, row by row.
    scores: Vec<f64>,
}

impl Matrix {
    fn row(&self, row: usize) -> &[f64] {
        &self.scores[row * self.columns..][..self.columns]
    }

    fn column(&self, column: usize) -> Vec<f64> {
        self.scores.iter().skip(column).step_by(self.columns).copied().collect()
    }
}

/// The area of labels, averaged as scikit-learn does.
fn of_labels(area: Area, average: Average, scores: &Matrix, there: &[bool]) -> f64 {
    let column = |column: usize| -> Vec<bool> {
        there.iter().skip(column).step_by(scores.columns).copied().collect()
    };
    let areas = || (0..scores.columns).map(|it| area(&scores.column(it), &column(it)));
    match average {
        Average::Micro => area(&scores.scores, there),
        Average::Binary | Average::Macro => areas().sum::<f64>() / scores.columns as f64,
        Average::Weighted => {
            let weight = |of: usize| column(of).iter().filter(|&&it| it).count() as f64;
            let whole = there.iter().filter(|&&it| it).count() as f64;
            // A label that is never there has no area, and no weight either.
            let weighted = areas().enumerate().filter(|it| weight(it.0) > 0.0);
            let sum: f64 = weighted.map(|(of, area)| area * weight(of)).sum();
            if whole == 0.0 { 0.0 } else { sum / whole }
        }
        Average::Samples => {
            let rows = there.len() / scores.columns;
            let of_row = |row: usize| {
                area(scores.row(row), &there[row * scores.columns..][..scores.columns])
            };
            (0..rows).map(of_row).sum::<f64>() / rows as f64
        }
    }
}

/// Reads rows of class scores: logarithms of probabilities, without ignored rows.
fn class_rows(metric: &str, folded: &Folded) -> Result<Option<(Matrix, Vec<usize>)>> {
    let Some((scores, targets)) = read::rows(metric, folded)? else { return Ok(None) };
    let kept = targets.f_ne(IGNORED)?.f_nonzero()?.f_reshape([-1])?;
    let (scores, targets) = (scores.f_index_select(0, &kept)?, targets.f_index_select(0, &kept)?);
    let classes = scores.size().get(1).copied().unwrap_or(0) as usize;
    let targets: Vec<i64> = Vec::try_from(&targets.f_to_device(Device::Cpu)?)?;
    let named =
        targets.iter().filter_map(|&it| usize::try_from(it).ok()).filter(|&it| it < classes);
    let named: Vec<usize> = named.collect();
    read::refuse_outside(metric, (targets.len() - named.len()) as f64)?;
    if named.is_empty() {
        return Ok(None);
    }
    // The logarithm keeps apart what a softmax rounds to 1.
    let scores = scores.f_to_kind(Kind::Double)?.f_log_softmax(1, Kind::Double)?;
    Ok(Some((Matrix { columns: classes, scores: read::to_vec(&scores)? }, named)))
}

fn class_fold(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
    let (scores, targets) = Scored::of(metric, predictions, targets)?.rows()?;
    Ok(Fold::Rows(scores, targets))
}

/// Reads rows of two classes: by how much the second's score is above the first's, and where it is the target.
fn binary_rows(metric: &str, folded: &Folded) -> Result<Option<(Vec<f64>, Vec<bool>)>> {
    let Some((scores, targets)) = class_rows(metric, folded)? else { return Ok(None) };
    let above = scores.scores.chunks_exact(2).map(|it| it[1] - it[0]).collect();
    Ok(Some((above, targets.iter().map(|&it| it == 1).collect())))
}

fn binary_fold(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
    match predictions.size().get(1) {
        Some(&classes) if classes > 2 => Err(read::failed(
            metric,
            format!(
                "it is for 2 classes, but there are {classes}; use the metric for several classes"
            ),
        )),
        _ => class_fold(metric, predictions, targets),
    }
}

/// Method by which the area under the ROC curve of several classes is computed from those of two classes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MultiClass {
    /// Compares each class with all others.
    #[default]
    OneVsRest,
    /// Compares each pair of classes, among the samples of the two (Hand and Till).
    OneVsOne,
}

/// Area under the ROC curve (ROC AUC) of several classes.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`; each class must occur. [`Average::Weighted`] weights a class by its
/// number of targets, a pair of classes by the targets of both. Keeps all rows.
///
/// ```
/// use brigade_metrics::{MultiClass, RocAuc};
///
/// let metric = RocAuc::new().multi_class(MultiClass::OneVsOne);
/// # let _ = metric;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RocAuc {
    average: Average,
    multi_class: MultiClass,
}

impl Default for RocAuc {
    fn default() -> Self {
        Self { average: Average::Macro, multi_class: MultiClass::OneVsRest }
    }
}

impl RocAuc {
    /// Creates the metric for one class against the rest, with [`Average::Macro`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the average: macro or weighted, or micro for one class against the rest.
    #[must_use]
    pub fn average(mut self, average: Average) -> Self {
        self.average = average;
        self
    }

    /// Sets how classes are compared.
    #[must_use]
    pub fn multi_class(mut self, multi_class: MultiClass) -> Self {
        self.multi_class = multi_class;
        self
    }

    fn one_vs_one(self, scores: &Matrix, targets: &[usize]) -> f64 {
        let (mut sum, mut whole) = (0.0, 0.0);
        for a in 0..scores.columns {
            for b in a + 1..scores.columns {
                let rows: Vec<usize> = (0..targets.len())
                    .filter(|&row| targets[row] == a || targets[row] == b)
                    .collect();
                let of = |class: usize| {
                    let scores: Vec<f64> = rows.iter().map(|&it| scores.row(it)[class]).collect();
                    let positive: Vec<bool> = rows.iter().map(|&it| targets[it] == class).collect();
                    roc_auc(&scores, &positive)
                };
                let weight =
                    if self.average == Average::Weighted { rows.len() as f64 } else { 1.0 };
                sum += weight * f64::midpoint(of(a), of(b));
                whole += weight;
            }
        }
        sum / whole
    }
}

impl Metric for RocAuc {
    type Value = f64;

    fn name(&self) -> String {
        "roc_auc_score".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let fits = match self.average {
            Average::Macro | Average::Weighted => true,
            Average::Micro => self.multi_class == MultiClass::OneVsRest,
            Average::Binary | Average::Samples => false,
        };
        if !fits {
            return Err(read::failed(
                &self.name(),
                format!(
                    "no {:?} average of {:?} is defined; choose Average::Macro or Average::Weighted",
                    self.average, self.multi_class
                ),
            ));
        }
        class_fold(&self.name(), predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let name = self.name();
        let Some((scores, targets)) = class_rows(&name, folded)? else { return Ok(f64::NAN) };
        if let Some(missing) = (0..scores.columns).find(|class| !targets.contains(class)) {
            return Err(read::failed(
                &name,
                format!(
                    "class {missing} is never a target, so its curve is not defined; validate on data with all \
                     {} classes",
                    scores.columns
                ),
            ));
        }
        if self.multi_class == MultiClass::OneVsOne {
            return Ok(self.one_vs_one(&scores, &targets));
        }
        let there: Vec<bool> = targets
            .iter()
            .flat_map(|&label| (0..scores.columns).map(move |class| class == label))
            .collect();
        Ok(of_labels(roc_auc, self.average, &scores, &there))
    }
}

/// Area under the ROC curve (ROC AUC) of two classes: the share of pairs of a positive and a negative sample in which
/// the positive has the larger score. Ties count half.
///
/// Predictions `[n, 2, …]`, targets `[n, …]`. It is NaN if only one class occurs. Keeps all rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RocAucBinary;

impl Metric for RocAucBinary {
    type Value = f64;

    fn name(&self) -> String {
        "roc_auc_score".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        binary_fold(&self.name(), predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let rows = binary_rows(&self.name(), folded)?;
        Ok(rows.map_or(f64::NAN, |(scores, positive)| roc_auc(&scores, &positive)))
    }
}

/// Average precision of two classes: `Σ (Rₖ - Rₖ₋₁) Pₖ` over the thresholds, without interpolation.
///
/// Predictions `[n, 2, …]`, targets `[n, …]`. It is 0 if no target is positive. Keeps all rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AveragePrecision;

impl Metric for AveragePrecision {
    type Value = f64;

    fn name(&self) -> String {
        "average_precision_score".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        binary_fold(&self.name(), predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let rows = binary_rows(&self.name(), folded)?;
        Ok(rows.map_or(f64::NAN, |(scores, positive)| average_precision(&scores, &positive)))
    }
}

macro_rules! of_labels {
    ($(#[$doc:meta])* $name:ident $column:literal $area:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name {
            average: Average,
        }

        impl Default for $name {
            fn default() -> Self {
                Self { average: Average::Macro }
            }
        }

        impl $name {
            /// Creates the metric with [`Average::Macro`].
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            /// Sets the average over labels, or over samples.
            #[must_use]
            pub fn average(mut self, average: Average) -> Self {
                self.average = average;
                self
            }
        }

        impl Metric for $name {
            type Value = f64;

            fn name(&self) -> String {
                $column.to_owned()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                let (scores, targets, _) = read::labelled($column, predictions, targets)?;
                let labels = scores.size()[1];
                if self.average == Average::Binary && labels != 1 {
                    return Err(read::failed(
                        $column,
                        format!("the binary average is for 1 label, but there are {labels}; choose another average"),
                    ));
                }
                Ok(Fold::Rows(scores, targets))
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                let Some((scores, targets)) = read::rows($column, folded)? else { return Ok(f64::NAN) };
                let columns = scores.size().get(1).copied().unwrap_or(1) as usize;
                let targets = read::to_vec(targets)?;
                let outside = targets.iter().filter(|&&it| it != 0.0 && it != 1.0).count();
                read::refuse_unlabelled($column, outside as f64)?;
                let there: Vec<bool> = targets.iter().map(|&it| it != 0.0).collect();
                let scores = Matrix { columns, scores: read::to_vec(scores)? };
                Ok(of_labels($area, self.average, &scores, &there))
            }
        }
    };
}

of_labels! {
    /// Area under the ROC curve of labels. See [`RocAucBinary`].
    ///
    /// Predictions and targets `[n, labels, …]`; predictions are scores or probabilities, for only their order
    /// matters. NaN where a label is always or never there, unless its weight in the average is 0. Keeps all rows.
    RocAucMulti "roc_auc_score" roc_auc
}

of_labels! {
    /// Average precision of labels. See [`AveragePrecision`].
    ///
    /// Predictions and targets `[n, labels, …]`; predictions are scores or probabilities. Keeps all rows.
    AveragePrecisionMulti "average_precision_score" average_precision
}
