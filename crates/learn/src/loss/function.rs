//! A loss made from a function.

use std::fmt;
use std::sync::Arc;

use brigade_metrics::Mse;
use brigade_torch::{Error, Result};
use tch::{Reduction, Tensor};

use super::{Loss, Outputs, apply_reduction};

type Compute = dyn Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync;

/// Makes a loss from a function of predictions and targets, which returns the mean over the batch with its autograd
/// graph.
///
/// Predictions are decoded as numbers, unless [`LossFn::read_as`] sets another loss to decode them.
///
/// ```
/// use brigade_learn::loss::{BceWithLogits, Loss, loss_from};
/// use tch::{Kind, Tensor};
///
/// let hinge = loss_from("hinge", |predictions, targets| {
///     let margin = (predictions * (targets * 2.0 - 1.0)).f_neg()?.f_add_scalar(1.0)?;
///     Ok(margin.f_relu()?.f_mean(None::<Kind>)?)
/// })
/// .read_as(BceWithLogits::default());
/// let loss = hinge.forward(&Tensor::from_slice(&[0.5f32, -2.0]), &Tensor::from_slice(&[1f32, 0.0]))?;
/// assert_eq!(loss.double_value(&[]), 0.25);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn loss_from(
    name: impl Into<String>,
    forward: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> LossFn {
    LossFn { name: name.into(), forward: Arc::new(forward), each: None, reading: Arc::new(Mse) }
}

/// A loss made from a function by [`loss_from`].
#[derive(Clone)]
pub struct LossFn {
    name: String,
    forward: Arc<Compute>,
    each: Option<Arc<Compute>>,
    reading: Arc<dyn Loss>,
}

impl LossFn {
    /// Sets a function that computes the loss of each element, as a tensor of one dimension. Without it [`Loss::each`],
    /// and everything that needs the losses of samples, is an error.
    #[must_use]
    pub fn with_each(
        mut self,
        each: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.each = Some(Arc::new(each));
        self
    }

    /// Uses the activation, the decoding and the kind of targets (class numbers or not) of another loss.
    #[must_use]
    pub fn read_as(mut self, loss: impl Loss + 'static) -> Self {
        self.reading = Arc::new(loss);
        self
    }
}

impl fmt::Debug for LossFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossFn")
            .field("name", &self.name)
            .field("reading", &self.reading)
            .finish_non_exhaustive()
    }
}

impl Loss for LossFn {
    fn name(&self) -> &str {
        &self.name
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        if reduce == Reduction::Mean {
            return (self.forward)(predictions, targets);
        }
        match &self.each {
            Some(each) => apply_reduction(&each(predictions, targets)?, reduce),
            None => Err(Error::invalid_argument(format!(
                "the loss `{}` has no value for each element; add one with `LossFn::with_each`",
                self.name
            ))),
        }
    }

    fn outputs(&self) -> Outputs {
        self.reading.outputs()
    }

    fn activation(&self, predictions: &Tensor) -> Result<Tensor> {
        self.reading.activation(predictions)
    }

    fn decode(&self, predictions: &Tensor) -> Result<Tensor> {
        self.reading.decode(predictions)
    }
}
