//! Metrics of functions, of other metrics, and of the Accelerator's.

use std::fmt;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::read;
use super::{Fold, Folded, Metric};
use crate::error::Result;

/// Makes a metric of a function that gives a value for each sample, label or pixel: its mean over all.
///
/// Values are a tensor of any shape with numbers or booleans; the mean is of all its elements in all batches.
///
/// ```
/// use brigade_learn::metrics::{IntoMetrics, mean_of};
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

/// What [`mean_of`] makes.
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
    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let values = (self.values)(&predictions.f_detach()?, &targets.f_detach()?)?;
        let count = read::count(values.numel(), values.device())?;
        Ok(Fold::Sums(read::joined(&[values.f_sum(Kind::Double)?, count])?))
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [sum, count] = read::numbers(&self.name, folded)?;
        Ok(sum / count)
    }
}

/// Makes a metric of two functions: one gives sums of a batch, `[k]`, the other computes the value of the sums of all
/// batches. Without a batch the value is NaN.
///
/// ```
/// use brigade_learn::metrics::{Metric, fold};
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

/// What [`fold`] makes.
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
    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let sums = (self.sums)(&predictions.f_detach()?, &targets.f_detach()?)?;
        Ok(Fold::Sums(read::joined(&[sums])?))
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        Ok(read::sums(&self.name, folded)?.map_or(f64::NAN, |sums| (self.value)(sums)))
    }
}

/// Makes a metric of a function of all predictions and targets at once, in the order of the data, on the CPU.
///
/// ```
/// use brigade_learn::metrics::{Metric, of_rows};
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

/// What [`of_rows`] makes.
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
    ($($pointer:ident)+) => {
        $(impl<M: Metric + ?Sized> Metric for $pointer<M> {
            fn name(&self) -> String {
                (**self).name()
            }

            fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
                (**self).fold(predictions, targets)
            }

            fn value(&self, folded: &Folded) -> Result<f64> {
                (**self).value(folded)
            }
        })+
    };
}

pointers!(Arc Box);

/// A metric under another name; see [`Metric::named`].
#[derive(Debug, Clone, PartialEq)]
pub struct Renamed<M> {
    name: String,
    metric: M,
}

impl<M> Renamed<M> {
    pub(super) fn new(name: impl Into<String>, metric: M) -> Self {
        Self { name: name.into(), metric }
    }
}

impl<M: Metric> Metric for Renamed<M> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        self.metric.fold(predictions, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        self.metric.value(folded)
    }
}

/// A metric or a loss for outputs that have the classes in the last dimension, `[n, …, classes]`, as language models
/// have, with targets `[n, …]`.
///
/// ```
/// use brigade_learn::metrics::{Accuracy, ClassesLast, Metric};
/// use tch::{Kind, Tensor};
///
/// let scores = Tensor::zeros([2, 6, 100], (Kind::Float, tch::Device::Cpu)); // 6 tokens, 100 words
/// let tokens = Tensor::zeros([2, 6], (Kind::Int64, tch::Device::Cpu));
/// ClassesLast(Accuracy).fold(&scores, &tokens)?;
/// # Ok::<(), brigade_learn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClassesLast<T>(pub T);

impl<T> ClassesLast<T> {
    /// Moves the classes to dimension 1.
    pub(crate) fn first(predictions: &Tensor) -> Result<Tensor> {
        if predictions.dim() < 2 {
            return Ok(predictions.shallow_clone());
        }
        Ok(predictions.f_movedim_int(-1, 1)?)
    }
}

impl<M: Metric> Metric for ClassesLast<M> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        self.0.fold(&Self::first(predictions)?, targets)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        self.0.value(folded)
    }
}

/// A metric of the Accelerator ([`brigade_train::Metric`]) as one of the Learner. Its name is the type's in lower case,
/// `TopK` as `top_k`; [`Metric::named`] gives another.
///
/// Each batch updates a copy, whose sums wait for the device.
///
/// ```
/// use brigade_learn::metrics::{Metric, Summed};
///
/// assert_eq!(Summed(brigade_train::TopK::new(3)).name(), "top_k");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summed<M>(pub M);

impl<M> Metric for Summed<M>
where
    M: brigade_train::Metric<Value = f64> + fmt::Debug + Send + Sync,
{
    fn name(&self) -> String {
        let full = std::any::type_name::<M>();
        let full = full.split('<').next().unwrap_or(full);
        let name = full.rsplit("::").next().unwrap_or(full);
        let mut snake = String::with_capacity(name.len() + 4);
        for (at, letter) in name.char_indices() {
            if at > 0 && letter.is_uppercase() {
                snake.push('_');
            }
            snake.extend(letter.to_lowercase());
        }
        snake
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let mut metric = self.0.clone();
        metric.reset();
        metric.update(&predictions.f_detach()?, &targets.f_detach()?)?;
        let sums = Tensor::from_slice(&metric.state());
        Ok(Fold::Sums(sums.f_to_device(predictions.device())?))
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let mut metric = self.0.clone();
        metric.reset();
        if let Some(sums) = read::sums(&self.name(), folded)? {
            metric.load_state(sums);
        }
        Ok(metric.compute())
    }
}
