//! Losses that are sums over unequal numbers of tokens.

use brigade_torch::{BackwardOptions, Device, Kind, ReduceOp, Tensor};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::accumulate::scale_gradients;
use crate::model::PreparedModels;

/// One rank's sums over a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeightedWindow {
    pub(crate) weight: f64,
    /// The divisor of its losses so far: the whole weight is known at the last batch only.
    pub(crate) divisor: f64,
}

impl Accelerator {
    /// Runs the backward of a loss that is a sum over `weight` tokens (or samples, or pixels). The gradient is that of
    /// the mean over all tokens of the window on all ranks, however unevenly they are spread.
    /// [`Accelerator::backward`] computes the mean of the batches' means, which differs from it then.
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
    /// let tokens = labels.not_equal(-100).sum(tch::Kind::Double).double_value(&[]);
    /// assert_eq!(tokens, 3.0);
    /// accelerator.backward_weighted(&model, &loss, tokens)?;
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// A window without a token has gradients of 0.
    ///
    /// # Errors
    /// As [`Accelerator::backward`]; [`Error::InvalidArgument`], on every rank at the end of the window, when a
    /// weight is negative or NaN.
    pub fn backward_weighted(
        &self,
        models: &(impl PreparedModels + ?Sized),
        loss: &Tensor,
        weight: f64,
    ) -> Result<()> {
        let state = &self.accumulator;
        // An invalid weight is sent as NaN, because the other ranks wait for this rank's weight.
        let weight = if weight >= 0.0 { weight } else { f64::NAN };
        let before = state.weighted().take();
        let mut window = before.unwrap_or_else(|| WeightedWindow {
            weight: 0.0,
            divisor: self.provisional_divisor(weight),
        });
        window.weight += weight;
        if !state.sync_gradients() {
            *state.weighted() = Some(window);
            let outcome =
                self.run_backward(&loss.f_div_scalar(window.divisor)?, BackwardOptions::default());
            if matches!(outcome, Err(Error::LossNotFinite { .. })) {
                // The batch has added nothing to the gradients, so its tokens do not count either.
                *state.weighted() = before;
            }
            return outcome;
        }
        let total = self.sum_over_ranks(window.weight)?;
        if !total.is_finite() {
            return Err(Error::InvalidArgument(
                "backward_weighted: on one of the ranks a weight was negative or NaN; expected \
                 the number of tokens that the loss is the sum of"
                    .into(),
            ));
        }
        // The ranks' gradients are averaged, so each brings its number as a factor.
        let factor = if total > 0.0 { self.num_processes() as f64 / total } else { 0.0 };
        if before.is_some() {
            scale_gradients(models, window.divisor * factor)?;
        }
        self.run_backward(&loss.f_mul_scalar(factor)?, BackwardOptions::default())
    }

    /// Estimates the divisor, so that gradients have their usual magnitude before they are corrected, which fp16
    /// needs. Where every batch is reduced, all ranks must divide by the same number.
    fn provisional_divisor(&self, weight: f64) -> f64 {
        let settings = self.accumulator.settings();
        let steps = settings.steps as f64;
        if weight >= 1.0 && !settings.sync_each_batch { weight * steps } else { steps }
    }

    fn sum_over_ranks(&self, number: f64) -> Result<f64> {
        let Some(group) = self.group() else {
            return Ok(number);
        };
        let device = self.device();
        let mut sum = Tensor::from_slice(&[number]).f_to_device(device)?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_double_value(&[0])?)
    }
}
