//! Errors of a model: losses of single samples, the confusion of classes, and a report of each class.

use std::fmt::Write as _;
use std::sync::Arc;

use brigade_rank_env::text::escaped;
use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

use crate::learner::{Learner, Part, Predictions};
use crate::loss::Outputs;

/// Predictions with the loss of each sample, in the order of the data (fastai's `Interpretation`), equal on every rank.
#[derive(Debug)]
pub struct Interpretation {
    predictions: Predictions,
    losses: Vec<f64>,
    classes: Option<Arc<[String]>>,
    part: Part,
}

/// Predictions of classes, with their confusion matrix and a report (fastai's `ClassificationInterpretation`).
#[derive(Debug)]
pub struct ClassInterpretation {
    base: Interpretation,
    targets: Vec<usize>,
    decoded: Vec<usize>,
    names: Vec<String>,
}

/// A pair of classes that were confused, with the number of samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    /// Actual class of the samples.
    pub actual: String,
    /// Predicted class of the samples.
    pub predicted: String,
    /// Number of confused samples.
    pub count: u64,
}

/// Precision, recall and F1 of a class.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassReport {
    /// Name of the class or of an average.
    pub name: String,
    /// Precision: share of the samples predicted as the class that belong to it.
    pub precision: f64,
    /// Recall: share of the samples of the class that were predicted as it.
    pub recall: f64,
    /// F1 score: the harmonic mean of precision and recall.
    pub f1: f64,
    /// Number of samples of the class.
    pub support: u64,
}

impl Interpretation {
    /// Predicts the validation data and computes each sample's loss. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::predictions`], and [`brigade_torch::ErrorKind::InvalidArgument`] for data
    /// without targets.
    pub fn from_learner(learner: &mut Learner) -> Result<Self> {
        Self::on(learner, Part::Valid)
    }

    /// Predicts a part of the data and computes each sample's loss. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`Interpretation::from_learner`].
    pub fn on(learner: &mut Learner, part: Part) -> Result<Self> {
        let predictions = learner.predictions_on(part)?;
        let Some(losses) = &predictions.losses else {
            return Err(Error::invalid_argument(
                "an interpretation needs targets, and these data have none",
            ));
        };
        let losses = Vec::<f64>::try_from(&losses.f_to_kind(Kind::Double)?)?;
        Ok(Self { predictions, losses, classes: learner.classes.clone(), part })
    }

    /// Returns the predictions of all samples.
    #[must_use]
    pub fn predictions(&self) -> &Predictions {
        &self.predictions
    }

    /// Returns the loss of each sample.
    #[must_use]
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Returns the part of the data that was predicted.
    #[must_use]
    pub fn part(&self) -> Part {
        self.part
    }

    /// Returns the `k` samples with the largest losses, the largest first, with their index in the data. A NaN counts
    /// as larger than all.
    #[must_use]
    pub fn top_losses(&self, k: usize) -> Vec<(usize, f64)> {
        let mut sorted: Vec<(usize, f64)> = self.losses.iter().copied().enumerate().collect();
        sorted.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        sorted.truncate(k);
        sorted
    }

    /// Returns the `k` samples with the smallest losses, the smallest first.
    #[must_use]
    pub fn least_losses(&self, k: usize) -> Vec<(usize, f64)> {
        let mut sorted: Vec<(usize, f64)> = self.losses.iter().copied().enumerate().collect();
        sorted.sort_by(|a, b| a.1.total_cmp(&b.1));
        sorted.truncate(k);
        sorted
    }
}

impl ClassInterpretation {
    /// Predicts the validation data. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`Interpretation::from_learner`], and [`brigade_torch::ErrorKind::InvalidArgument`]
    /// for targets that are not classes.
    pub fn from_learner(learner: &mut Learner) -> Result<Self> {
        Self::on(learner, Part::Valid)
    }

    /// Predicts a part of the data. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`ClassInterpretation::from_learner`].
    pub fn on(learner: &mut Learner, part: Part) -> Result<Self> {
        if learner.loss.outputs() != Outputs::Classes {
            return Err(Error::invalid_argument(format!(
                "the confusion of classes needs a loss of classes, not `{}`",
                learner.loss.name()
            )));
        }
        let base = Interpretation::on(learner, part)?;
        let numbers = |tensor: &Tensor| -> Result<Vec<usize>> {
            let numbers = Vec::<i64>::try_from(&tensor.f_flatten(0, -1)?.f_to_kind(Kind::Int64)?)?;
            numbers
                .into_iter()
                .map(|number| {
                    usize::try_from(number).map_err(|_| {
                        Error::invalid_argument(format!("{number} is not the number of a class"))
                    })
                })
                .collect()
        };
        let targets = match &base.predictions.targets {
            Some(targets) => numbers(targets)?,
            None => Vec::new(),
        };
        let decoded = numbers(&base.predictions.decoded)?;
        let scores = base.predictions.predictions.size().get(1).copied().unwrap_or(0);
        let count = targets.iter().chain(&decoded).max().map_or(0, |largest| largest + 1);
        let count = count.max(usize::try_from(scores).unwrap_or(0));
        let names = (0..count)
            .map(|class| match base.classes.as_ref().and_then(|names| names.get(class)) {
                Some(name) => name.clone(),
                None => class.to_string(),
            })
            .collect();
        Ok(Self { base, targets, decoded, names })
    }

    /// Returns the predictions and losses of all samples.
    #[must_use]
    pub fn interpretation(&self) -> &Interpretation {
        &self.base
    }

    /// Returns the names of the classes.
    #[must_use]
    pub fn class_names(&self) -> &[String] {
        &self.names
    }

    /// Returns the class of each sample, and the predicted class.
    pub(crate) fn pairs(&self) -> (&[usize], &[usize]) {
        (&self.targets, &self.decoded)
    }

    /// Counts samples by class: rows are the actual classes, columns the predicted ones.
    #[must_use]
    pub fn confusion_matrix(&self) -> Vec<Vec<u64>> {
        let mut counts = vec![vec![0; self.names.len()]; self.names.len()];
        for (target, decoded) in self.targets.iter().zip(&self.decoded) {
            counts[*target][*decoded] += 1;
        }
        counts
    }

    /// Returns the pairs of classes that were confused at least `least` times, the most frequent first.
    #[must_use]
    pub fn most_confused(&self, least: u64) -> Vec<Confusion> {
        let mut pairs = Vec::new();
        for (actual, row) in self.confusion_matrix().into_iter().enumerate() {
            for (predicted, count) in row.into_iter().enumerate() {
                if actual != predicted && count >= least.max(1) {
                    let [actual, predicted] = [actual, predicted].map(|it| self.names[it].clone());
                    pairs.push(Confusion { actual, predicted, count });
                }
            }
        }
        // Classes with equal counts stay in their order.
        pairs.sort_by_key(|pair| std::cmp::Reverse(pair.count));
        pairs
    }

    /// Computes precision, recall and F1 of each class that occurs in the targets or in the predictions. An undefined
    /// value is 0.
    #[must_use]
    pub fn class_reports(&self) -> Vec<ClassReport> {
        let counts = self.confusion_matrix();
        let share =
            |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let report = |class: usize| {
            let right = counts[class][class];
            let support: u64 = counts[class].iter().sum();
            let predicted: u64 = counts.iter().map(|row| row[class]).sum();
            let (precision, recall) = (share(right, predicted), share(right, support));
            let f1 = share(2 * right, predicted + support);
            (predicted + support > 0).then(|| ClassReport {
                name: self.names[class].clone(),
                precision,
                recall,
                f1,
                support,
            })
        };
        (0..self.names.len()).filter_map(report).collect()
    }

    /// Writes the classes' precision, recall and F1 with their averages as a table, as scikit-learn's
    /// `classification_report` does. Control characters in the names of classes are escaped.
    #[must_use]
    pub fn classification_report(&self) -> String {
        let mut reports = self.class_reports();
        for report in &mut reports {
            report.name = escaped(&report.name).to_string();
        }
        let samples = self.targets.len() as u64;
        let mean = |of: fn(&ClassReport) -> f64, weighted: bool| {
            let weight = |report: &ClassReport| if weighted { report.support as f64 } else { 1.0 };
            let whole: f64 = reports.iter().map(weight).sum();
            reports.iter().map(|report| of(report) * weight(report)).sum::<f64>() / whole
        };
        let average = |name: &str, weighted: bool| ClassReport {
            name: name.to_owned(),
            precision: mean(|it| it.precision, weighted),
            recall: mean(|it| it.recall, weighted),
            f1: mean(|it| it.f1, weighted),
            support: samples,
        };
        let averages = [average("macro avg", false), average("weighted avg", true)];
        let right = self.targets.iter().zip(&self.decoded).filter(|(a, b)| a == b).count();
        let accuracy = right as f64 / samples.max(1) as f64;
        let width =
            reports.iter().chain(&averages).map(|it| it.name.chars().count()).max().unwrap_or(0);
        let mut text = format!("{:>width$} ", "");
        for column in ["precision", "recall", "f1-score", "support"] {
            let _ = write!(text, " {column:>9}");
        }
        text += "\n\n";
        let mut line = |report: &ClassReport| {
            let ClassReport { name, precision, recall, f1, support } = report;
            let _ = writeln!(
                text,
                "{name:>width$}  {precision:>9.2} {recall:>9.2} {f1:>9.2} {support:>9}"
            );
        };
        reports.iter().for_each(&mut line);
        let _ = writeln!(
            text,
            "\n{:>width$}  {:>9} {:>9} {accuracy:>9.2} {samples:>9}",
            "accuracy", "", ""
        );
        for average in &averages {
            let ClassReport { name, precision, recall, f1, support } = average;
            let _ = writeln!(
                text,
                "{name:>width$}  {precision:>9.2} {recall:>9.2} {f1:>9.2} {support:>9}"
            );
        }
        text
    }
}
