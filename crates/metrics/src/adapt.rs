//! Metrics that are made from functions or from other metrics.

use std::fmt;
use std::sync::Arc;

use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::read;
use crate::{Fold, Folded, Metric};

/// Creates a metric from a function that returns a value for each sample, label or pixel: the mean of all values.
///
/// Values are a tensor of any shape with numbers or booleans; the mean is of all its elements in all batches.
///
/// ```
/// use brigade_metrics::{IntoMetrics, mean_of};
///
/// let far_off = mean_of("far_off", |predictions, targets| {
///     Ok((predictions - targets).f_abs()?.f_gt(1.0)?)
/// });
/// assert_eq!(far_off.into_metrics()[0].name(), "far_off");
/// ```
pub fn mean_of<F>(name: impl Into<String>, values: F) -> MeanOf<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync,
{
    MeanOf { name: name.into(), values }
}

/// A metric made from a function of a batch by [`mean_of`].
pub struct MeanOf<F> {
    name: String,
    values: F,
}

impl<F> fmt::Debug for MeanOf<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MeanOf").field(&self.name).finish()
    }
}

impl<F> Metric for MeanOf<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync,
{
    type Value = f64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let values = (self.values)(&predictions.f_detach()?, &targets.f_detach()?)?;
        let count = read::count(values.numel(), values.device())?;
        Fold::sums(&[values.f_sum(Kind::Double)?, count])
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [sum, count] = read::numbers(&self.name, folded)?;
        Ok(sum / count)
    }
}

/// Creates a metric from two functions: `sums` returns sums of a batch, `[k]`, and `value` computes the metric from the
/// sums of all batches. Without a batch the value is NaN.
///
/// ```
/// use brigade_metrics::{Metric, fold};
/// use tch::{Kind, Tensor};
///
/// let bias = fold(
///     "bias",
///     |predictions, targets| {
///         let sums = [predictions.f_sum(Kind::Double)?, targets.f_sum(Kind::Double)?];
///         Ok(Tensor::f_stack(&sums, 0)?)
///     },
///     |sums| sums[0] / sums[1] - 1.0,
/// );
/// assert_eq!(bias.name(), "bias");
/// ```
pub fn fold<F, V>(name: impl Into<String>, sums: F, value: V) -> FoldFn<F, V>
where
    F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync,
    V: Fn(&[f64]) -> f64 + Send + Sync,
{
    FoldFn { name: name.into(), sums, value }
}

/// A metric made from two functions by [`fold`].
pub struct FoldFn<F, V> {
    name: String,
    sums: F,
    value: V,
}

impl<F, V> fmt::Debug for FoldFn<F, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FoldFn").field(&self.name).finish()
    }
}

impl<F, V> Metric for FoldFn<F, V>
where
    F: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync,
    V: Fn(&[f64]) -> f64 + Send + Sync,
{
    type Value = f64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let sums = (self.sums)(&predictions.f_detach()?, &targets.f_detach()?)?;
        Fold::sums(&[sums])
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        Ok(read::sums(&self.name, folded)?.map_or(f64::NAN, |sums| (self.value)(sums)))
    }
}

/// Creates a metric from a function of all predictions and targets at once, in the order of the data, on the CPU.
///
/// ```
/// use brigade_metrics::{Metric, of_rows};
///
/// let median = of_rows("median_error", |predictions, targets| {
///     Ok((predictions - targets).f_abs()?.f_median()?.f_double_value(&[])?)
/// });
/// assert_eq!(median.name(), "median_error");
/// ```
pub fn of_rows<F>(name: impl Into<String>, value: F) -> RowsFn<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<f64> + Send + Sync,
{
    RowsFn { name: name.into(), value }
}

/// A metric made from a function of all rows by [`of_rows`].
pub struct RowsFn<F> {
    name: String,
    value: F,
}

impl<F> fmt::Debug for RowsFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RowsFn").field(&self.name).finish()
    }
}

impl<F> Metric for RowsFn<F>
where
    F: Fn(&Tensor, &Tensor) -> Result<f64> + Send + Sync,
{
    type Value = f64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        Ok(Fold::Rows(predictions.f_detach()?, targets.f_detach()?))
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        match read::rows(&self.name, folded)? {
            Some((predictions, targets)) => (self.value)(predictions, targets),
            None => Ok(f64::NAN),
        }
    }
}

macro_rules! pointers {
    ($($pointer:ty),+) => {
        $(impl<M: Metric + ?Sized> Metric for $pointer {
            type Value = M::Value;

            fn name(&self) -> String {
                (**self).name()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                (**self).fold(predictions, targets)
            }

            fn value(&self, folded: &Folded) -> Result<Self::Value> {
                (**self).value(folded)
            }
        })+
    };
}

pointers!(&M, Arc<M>, Box<M>);

/// A metric under another name. See [`Metric::named`].
#[derive(Debug, Clone, PartialEq)]
pub struct Renamed<M> {
    name: String,
    metric: M,
}

impl<M> Renamed<M> {
    pub(crate) fn new(name: impl Into<String>, metric: M) -> Self {
        Self { name: name.into(), metric }
    }
}

impl<M: Metric> Metric for Renamed<M> {
    type Value = M::Value;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        self.metric.fold(predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<Self::Value> {
        self.metric.value(folded)
    }
}

/// Adapts a metric, or a loss of `brigade-learn`, to outputs with the classes in the last dimension, `[n, …, classes]`,
/// such as those of language models, with targets `[n, …]`.
///
/// ```
/// use brigade_metrics::{Accuracy, ClassesLast, Metric};
/// use tch::{Kind, Tensor};
///
/// let scores = Tensor::zeros([2, 6, 100], (Kind::Float, tch::Device::Cpu)); // 6 tokens, 100 words
/// let tokens = Tensor::zeros([2, 6], (Kind::Int64, tch::Device::Cpu));
/// ClassesLast(Accuracy).fold(&scores, &tokens)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClassesLast<T>(pub T);

impl<T> ClassesLast<T> {
    /// Moves the classes of outputs to dimension 1, where metrics and losses expect them.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    pub fn first(predictions: &Tensor) -> Result<Tensor> {
        if predictions.dim() < 2 {
            return Ok(predictions.shallow_clone());
        }
        Ok(predictions.f_movedim_int(-1, 1)?)
    }
}

impl<M: Metric> Metric for ClassesLast<M> {
    type Value = M::Value;

    fn name(&self) -> String {
        self.0.name()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        self.0.fold(&Self::first(predictions)?, targets)
    }

    fn value(&self, folded: &Folded) -> Result<Self::Value> {
        self.0.value(folded)
    }
}

/// Adapts a metric of classes to predictions that are class numbers, `[n, …]`, such as results of `argmax`, with
/// targets `[n, …]`.
///
/// Checks each batch for numbers that are not below the number of classes, for which it waits for the device.
///
/// ```
/// use brigade_metrics::{F1, MetricState, PredictedClasses};
/// use tch::Tensor;
///
/// let mut f1 = MetricState::new(PredictedClasses::new(F1::new(), 2));
/// f1.update(&Tensor::from_slice(&[1i64, 1, 0, 0]), &Tensor::from_slice(&[1i64, 0, 0, 0]))?;
/// assert_eq!(f1.compute(None)?, 2.0 / 3.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedClasses<M> {
    metric: M,
    classes: i64,
}

impl<M> PredictedClasses<M> {
    /// Creates the metric for class numbers below `classes`.
    #[must_use]
    pub fn new(metric: M, classes: i64) -> Self {
        Self { metric, classes }
    }
}

impl<M: Metric> Metric for PredictedClasses<M> {
    type Value = M::Value;

    fn name(&self) -> String {
        self.metric.name()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let outside = predictions.f_lt(0)?.f_logical_or(&predictions.f_ge(self.classes)?)?;
        let outside = outside.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        if predictions.f_is_floating_point()? || outside > 0 {
            let reason = format!(
                "predictions of {:?} with {outside} that are not classes below {}; expected class numbers",
                predictions.kind(),
                self.classes
            );
            return Err(read::failed(&self.name(), reason));
        }
        let classes = Tensor::f_arange(self.classes, (Kind::Int64, predictions.device()))?;
        let scores = predictions.f_unsqueeze(-1)?.f_eq_tensor(&classes)?.f_to_kind(Kind::Float)?;
        ClassesLast(&self.metric).fold(&scores, targets)
    }

    fn value(&self, folded: &Folded) -> Result<Self::Value> {
        self.metric.value(folded)
    }
}
