//! Losses that are sums over unequal numbers of tokens.

use brigade_torch::{BackwardOptions, Device, Kind, ReduceOp, Tensor};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::accumulate::scale_gradients;
use crate::model::PreparedModels;

/// What a loss weighs among others, mostly the number of its tokens, for [`Accelerator::backward_weighted`]: a number,
/// or a tensor of one element, which the host does not read where it is on a GPU.
#[derive(Debug)]
pub struct LossWeight(Tensor);

impl From<f64> for LossWeight {
    fn from(weight: f64) -> Self {
        Self(Tensor::from(weight))
    }
}

impl From<&Tensor> for LossWeight {
    fn from(weight: &Tensor) -> Self {
        Self(weight.shallow_clone())
    }
}

impl LossWeight {
    /// As a scalar in double precision. An invalid one is NaN, because the other ranks wait for this rank's weight.
    fn checked(&self) -> Result<Tensor> {
        if self.0.numel() != 1 {
            return Ok(Tensor::from(f64::NAN));
        }
        let weight = self.0.f_detach()?.f_reshape([0i64; 0])?.f_to_kind(Kind::Double)?;
        Ok(weight.f_where_scalarother(&weight.f_ge(0.0)?, f64::NAN)?)
    }
}

/// One rank's sums over a window, each a scalar in double precision on the host or on the device.
#[derive(Debug)]
pub(crate) struct WeightedWindow {
    pub(crate) weight: Tensor,
    /// The divisor of its losses so far: the whole weight is known at the last batch only.
    pub(crate) divisor: Tensor,
}

impl Accelerator {
    /// Runs the backward of a loss that is a sum over `weight` tokens (or samples, or pixels). The gradient is that of
    /// the mean over all tokens of the window on all ranks, however unevenly they are spread.
    /// [`Accelerator::backward`] computes the mean of the batches' means, which differs from it then.
    ///
    /// The weight is a number, or a tensor of one element; on a GPU the host does not wait for one, and the step can be
    /// recorded ([`Accelerator::capture`]).
    ///
    /// Call it once for each batch, with all of the models that the loss comes from. It sends one number for each
    /// window, so all ranks must have the same number of windows.
    ///
    /// ```
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_train::{Accelerator, Tensor};
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = accelerator.prepare(Model::new(|p| Linear::new(p, 16, 10))?)?;
    /// # let inputs = Tensor::ones([4, 16], (tch::Kind::Float, tch::Device::Cpu));
    /// let labels = Tensor::from_slice(&[7_i64, 1, 4, -100]);
    /// // -100 marks padding: cross entropy leaves it out of its sum.
    /// let logits = model.forward(&inputs)?;
    /// let loss = logits.cross_entropy_loss::<Tensor>(&labels, None, tch::Reduction::Sum, -100, 0.0);
    /// let tokens = labels.not_equal(-100).sum(tch::Kind::Int64);
    /// assert_eq!(tokens, Tensor::from(3i64));
    /// accelerator.backward_weighted(&model, &loss, &tokens)?;
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// A window without a token has gradients of 0.
    ///
    /// # Errors
    /// As [`Accelerator::backward`]; [`Error::InvalidArgument`], on every rank at the end of the window, when a
    /// weight is negative, NaN, or a tensor of several elements. One that is a tensor on a GPU makes the loss NaN then.
    pub fn backward_weighted(
        &self,
        models: &(impl PreparedModels + ?Sized),
        loss: &Tensor,
        weight: impl Into<LossWeight>,
    ) -> Result<()> {
        let state = &self.accumulator;
        let weight = weight.into().checked()?;
        let before = state.weighted().take();
        let (total, divisor) = match &before {
            Some(window) => (window.weight.f_add(&weight)?, window.divisor.shallow_clone()),
            None => (weight.shallow_clone(), self.provisional_divisor(&weight)?),
        };
        let scaled = |factor: &Tensor| loss.f_mul(&factor.f_to_kind(loss.f_kind()?)?);
        if !state.sync_gradients() {
            let loss = loss.f_div(&divisor.f_to_kind(loss.f_kind()?)?)?;
            *state.weighted() = Some(WeightedWindow { weight: total, divisor });
            let outcome = self.run_backward(&loss, BackwardOptions::default());
            if matches!(outcome, Err(Error::LossNotFinite { .. })) {
                // The batch has added nothing to the gradients, so its tokens do not count either.
                *state.weighted() = before;
            }
            return outcome;
        }
        let total = self.sum_over_ranks(total)?;
        if total.device() == Device::Cpu && !total.f_double_value(&[])?.is_finite() {
            return Err(Error::InvalidArgument(
                "backward_weighted: on one of the ranks a weight was negative, NaN, or a tensor of several elements; \
                 expected the number of tokens that the loss is the sum of"
                    .into(),
            ));
        }
        // The ranks' gradients are averaged, so each brings its number as a factor.
        let factor = Tensor::from(self.num_processes() as f64).f_div(&total)?;
        let factor = factor.f_masked_fill(&total.f_eq(0.0)?, 0.0)?;
        if before.is_some() {
            scale_gradients(models, &divisor.f_mul(&factor)?)?;
        }
        self.run_backward(&scaled(&factor)?, BackwardOptions::default())
    }

    /// Estimates the divisor, so that gradients have their usual magnitude before they are corrected, which fp16
    /// needs. Where every batch is reduced, all ranks must divide by the same number.
    fn provisional_divisor(&self, weight: &Tensor) -> Result<Tensor> {
        let settings = self.accumulator.settings();
        let steps = settings.steps as f64;
        if settings.sync_each_batch {
            return Ok(Tensor::from(steps));
        }
        Ok(weight.f_clamp_min(1.0)?.f_nan_to_num(1.0, None, None)?.f_mul_scalar(steps)?)
    }

    /// Where the number is: the host waits for the sum of numbers of the host.
    fn sum_over_ranks(&self, number: Tensor) -> Result<Tensor> {
        let Some(group) = self.group() else {
            return Ok(number);
        };
        let place = number.device();
        let mut sum = number.f_to_device(self.device())?.f_reshape([1])?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum.f_reshape([0i64; 0])?.f_to_device(place)?)
    }
}
