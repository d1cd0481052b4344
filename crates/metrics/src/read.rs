//! Reading of a batch and of combined contributions: shapes are checked here, once.

use brigade_torch::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::Folded;
use crate::error::MetricError;

/// Target that metrics of classes and the cross-entropy ignore: PyTorch's `ignore_index`.
pub const IGNORED: i64 = -100;

/// Names the metric that cannot be computed, and why.
pub(crate) fn failed(metric: &str, reason: impl Into<String>) -> Error {
    MetricError { metric: metric.to_owned(), reason: reason.into() }.into()
}

/// Returns the sums of all batches. Empty if there was no batch.
pub(crate) fn sums<'a>(metric: &str, folded: &'a Folded) -> Result<Option<&'a [f64]>> {
    match folded {
        Folded::Sums(sums) => Ok(Some(sums.as_slice()).filter(|it| !it.is_empty())),
        Folded::Rows(..) => Err(failed(metric, "it keeps sums of each batch, and was given rows")),
    }
}

/// Returns `N` sums. They are NaN if there was no batch, so that all means of them are NaN.
pub(crate) fn numbers<const N: usize>(metric: &str, folded: &Folded) -> Result<[f64; N]> {
    folded.sums().map_err(|error| failed(metric, error.to_string()))
}

/// Returns the rows of all batches. Empty if there was no row.
pub(crate) fn rows<'a>(
    metric: &str,
    folded: &'a Folded,
) -> Result<Option<(&'a Tensor, &'a Tensor)>> {
    match folded {
        Folded::Rows(predictions, targets) => {
            Ok(Some((predictions, targets)).filter(|it| it.0.numel() > 0))
        }
        Folded::Sums(sums) if sums.is_empty() => Ok(None),
        Folded::Sums(_) => Err(failed(metric, "it keeps rows of each batch, and was given sums")),
    }
}

/// Returns a count as a tensor beside the others.
pub(crate) fn count(number: usize, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_full([1], number as f64, (Kind::Double, device))?)
}

/// Returns numbers of a tensor in its order, as `f64` on the CPU.
pub(crate) fn to_vec(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
    Ok(Vec::try_from(&tensor.f_reshape([-1])?)?)
}

/// Refuses targets that named no class.
pub(crate) fn refuse_outside(metric: &str, outside: f64) -> Result<()> {
    if outside > 0.0 {
        return Err(failed(
            metric,
            format!(
                "{outside} targets name no class: class numbers begin at 0 and lie below the number of scores, \
                 and {IGNORED} is left out"
            ),
        ));
    }
    Ok(())
}

/// Scores of classes with class numbers as targets.
#[derive(Debug)]
pub(crate) struct Scored {
    /// `[n, classes, …]`, without a graph.
    pub(crate) scores: Tensor,
    /// `[n, …]` in `i64`.
    pub(crate) targets: Tensor,
    pub(crate) classes: i64,
}

impl Scored {
    /// Reads a batch. A mask with a channel, `[n, 1, …]`, is one without.
    pub(crate) fn of(metric: &str, predictions: &Tensor, targets: &Tensor) -> Result<Self> {
        let (shape, found) = (predictions.size(), targets.size());
        let unfit = |reason: &str| {
            failed(
                metric,
                format!(
                    "predictions have shape {shape:?} and targets {found:?}; expected [n, classes, …] and \
                     [n, …]{reason}"
                ),
            )
        };
        let [n, classes, rest @ ..] = &shape[..] else { return Err(unfit("")) };
        if *classes < 2 {
            return Err(unfit(
                " with two classes or more; for one score of a label take the metric for labels (`…Multi`)",
            ));
        }
        let expected = [&[*n], rest].concat();
        let targets = match &found[..] {
            _ if found == expected => targets.shallow_clone(),
            [first, 1, others @ ..] if first == n && others == rest => targets.f_squeeze_dim(1)?,
            _ if shape[..shape.len() - 1] == found[..] => {
                return Err(unfit("; `ClassesLast` reads classes in the last dimension"));
            }
            _ => return Err(unfit("")),
        };
        if targets.f_is_floating_point()? || targets.f_is_complex()? {
            let kind = targets.kind();
            return Err(failed(metric, format!("targets are {kind:?}; expected class numbers")));
        }
        Ok(Self {
            scores: predictions.f_detach()?,
            targets: targets.f_to_kind(Kind::Int64)?,
            classes: *classes,
        })
    }

    /// Returns the class with the largest score: `[n, …]`.
    pub(crate) fn decided(&self) -> Result<Tensor> {
        Ok(self.scores.f_argmax(1, false)?)
    }

    /// Returns scores `[rows, classes]` and targets `[rows]`.
    pub(crate) fn rows(&self) -> Result<(Tensor, Tensor)> {
        let scores = self.scores.f_movedim_int(1, -1)?.f_reshape([-1, self.classes])?;
        Ok((scores, self.targets.f_reshape([-1])?))
    }

    /// Returns which targets count.
    pub(crate) fn kept(&self) -> Result<Tensor> {
        Ok(self.targets.f_ne(IGNORED)?)
    }

    /// Returns which targets name a class.
    pub(crate) fn inside(&self) -> Result<Tensor> {
        Ok(self.targets.f_ge(0)?.f_logical_and(&self.targets.f_lt(self.classes)?)?)
    }

    /// Returns how many targets count and name no class.
    pub(crate) fn outside(&self) -> Result<Tensor> {
        Ok(self.kept()?.f_logical_and(&self.inside()?.f_logical_not()?)?.f_sum(Kind::Double)?)
    }

    /// Returns the targets as places, flat: of what names no class, the place behind the classes.
    pub(crate) fn places(&self) -> Result<Tensor> {
        let behind = Tensor::f_full([], self.classes, (Kind::Int64, self.targets.device()))?;
        Ok(self.targets.f_where_self(&self.inside()?, &behind)?.f_reshape([-1])?)
    }
}

/// Returns scores and targets of labels as `[rows, labels]`, and how many targets are neither 0 nor 1.
pub(crate) fn labelled(
    metric: &str,
    predictions: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (shape, found) = (predictions.size(), targets.size());
    let single = shape.len() == 2 && shape[1] == 1 && found == shape[..1];
    if shape.is_empty() || (shape != found && !single) {
        return Err(failed(
            metric,
            format!(
                "predictions have shape {shape:?} and targets {found:?}; expected one shape, [n, labels, …]"
            ),
        ));
    }
    let flat = |tensor: &Tensor| match shape.get(1) {
        Some(&labels) if !single => tensor.f_movedim_int(1, -1)?.f_reshape([-1, labels]),
        _ => tensor.f_reshape([-1, 1]),
    };
    let (scores, targets) = (flat(&predictions.f_detach()?)?, flat(&targets.f_detach()?)?);
    let outside = targets.f_ne(0)?.f_logical_and(&targets.f_ne(1)?)?.f_sum(Kind::Double)?;
    Ok((scores, targets, outside))
}

/// Refuses targets of labels that were neither 0 nor 1.
pub(crate) fn refuse_unlabelled(metric: &str, outside: f64) -> Result<()> {
    if outside > 0.0 {
        return Err(failed(metric, format!("{outside} targets of labels are neither 0 nor 1")));
    }
    Ok(())
}

/// Threshold by which a score becomes the prediction of a label.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Threshold {
    pub(crate) at: f64,
    pub(crate) sigmoid: bool,
}

impl Default for Threshold {
    fn default() -> Self {
        Self { at: 0.5, sigmoid: true }
    }
}

impl Threshold {
    /// Returns the probabilities of scores.
    pub(crate) fn probabilities(self, scores: &Tensor) -> Result<Tensor> {
        Ok(if self.sigmoid { scores.f_sigmoid()? } else { scores.shallow_clone() })
    }
}

/// Returns predictions and targets of numbers in `f64`, both in the targets' shape.
pub(crate) fn numeric(
    metric: &str,
    predictions: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (shape, found) = (predictions.size(), targets.size());
    if predictions.numel() != targets.numel() || shape.first() != found.first() {
        return Err(failed(
            metric,
            format!("predictions have shape {shape:?} and targets {found:?}; expected one shape"),
        ));
    }
    let predictions = predictions.f_detach()?.f_to_kind(Kind::Double)?.f_reshape(found)?;
    Ok((predictions, targets.f_detach()?.f_to_kind(Kind::Double)?))
}
