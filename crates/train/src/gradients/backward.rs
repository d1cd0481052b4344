//! The backward pass of an Accelerator: divided by the window, scaled, checked, and reduced over the ranks.

use std::sync::Arc;

use brigade_torch::{BackwardOptions, Error, ProcessGroup, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

use crate::context_parallel::ContextRanks;
use crate::error::{TrainError, loss_is_not_finite};
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::gradients::models::{PreparedModels, scale_gradients};
use crate::loss_weight::{LossWeight, WeightedWindow};
use crate::model_parallel::ModelParallelRanks;
use crate::pipeline::PipelineRanks;
use crate::precision::scaler::GradScaler;
use crate::processes::Processes;
use crate::sharding::ShardedModels;

/// State of gradients between the loss and the optimizer's step. One Accelerator shares it with everything that it
/// prepares.
#[derive(Clone)]
pub(crate) struct Gradients {
    /// The ranks over which gradients are averaged.
    pub(crate) processes: Processes,
    pub(crate) accumulator: GradientAccumulator,
    /// Loss scaler. `None` without fp16.
    pub(crate) scaler: Option<GradScaler>,
    /// Check for losses that are not finite. `None` if it is off, and with a loss scaler.
    pub(crate) loss_check: Option<Arc<LossCheck>>,
    /// Sharded models, if models are sharded.
    pub(crate) sharded: Option<Arc<ShardedModels>>,
    /// Models of tensor groups, if ranks divide layers.
    pub(crate) tensor: Option<Arc<ModelParallelRanks>>,
    /// Ranks of context groups, if ranks have parts of each sequence.
    pub(crate) context: Option<Arc<ContextRanks>>,
    /// Ranks of pipelines, if ranks have stages of models.
    pub(crate) pipeline: Option<Arc<PipelineRanks>>,
}

impl Gradients {
    /// Runs the backward pass of a loss that is a mean, divided by the number of batches in the window.
    #[track_caller]
    pub(crate) fn backward(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        self.run(&self.accumulator.divide(loss)?, options)
    }

    /// Runs the backward pass of a loss that already contains its share of the window.
    #[track_caller]
    fn run(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        if let Some(pipeline) = &self.pipeline {
            return Err(pipeline.refuse("backward", "use `Accelerator::forward_backward`"));
        }
        // Reading the loss waits for the device and for the other ranks, so only debug mode does it here. With a loss
        // scale, an overflowing loss is expected.
        let finite = !self.processes.job.debug
            || self.scaler.is_some()
            || loss.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0;
        if let Some(group) = self.processes.traced() {
            group.check_backward(finite)?;
        }
        if self.processes.job.debug {
            if let Some(group) = self.tensor.as_ref().and_then(|it| it.layers()) {
                compare_losses(loss, group, "tensor")?;
            }
            if let Some(context) = &self.context {
                compare_losses(loss, context.group(), "context")?;
            }
        }
        if !finite {
            let rank = Some(self.processes.job.rank());
            return Err(
                TrainError::LossNotFinite { rank, step: None, weights_corrupted: false }.into()
            );
        }
        let Some(check) = &self.loss_check else {
            return self.unchecked_backward(loss, options);
        };
        let outcome = check.around(loss, || self.unchecked_backward(loss, options));
        if loss_is_not_finite(&outcome) {
            // A program that skips the batch does not advance the schedule.
            self.accumulator.set_skipped(true);
        }
        outcome
    }

    fn unchecked_backward(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        let backward = |loss: &Tensor| -> Result<()> {
            // Gradients of divided layers are sent to other ranks than those that read different samples.
            let everyone = self.tensor.as_ref().map_or(&self.processes, |it| it.everyone());
            match everyone.group() {
                Some(group) => Ok(group.backward_with(loss, options)?),
                None => Ok(brigade_torch::backward_with(loss, options)?),
            }
        };
        let outcome = match &self.scaler {
            None => backward(loss),
            Some(scaler) => backward(&scaler.scale_loss(loss)?),
        };
        self.processes.job.explain_memory("the backward pass", outcome)
    }

    /// Runs the backward pass of a loss that is a sum over `weight` tokens.
    pub(crate) fn backward_weighted(
        &self,
        models: &(impl PreparedModels + ?Sized),
        loss: &Tensor,
        weight: &LossWeight,
    ) -> Result<()> {
        let state = &self.accumulator;
        let weight = weight.checked()?;
        let before = state.weighted().take();
        let (total, divisor) = match &before {
            Some(window) => (window.weight.f_add(&weight)?, window.divisor.shallow_clone()),
            None => (weight.shallow_clone(), self.provisional_divisor(&weight)?),
        };
        let scaled = |factor: &Tensor| loss.f_mul(&factor.f_to_kind(loss.f_kind()?)?);
        if !state.sync_gradients() {
            let loss = loss.f_div(&divisor.f_to_kind(loss.f_kind()?)?)?;
            *state.weighted() = Some(WeightedWindow { weight: total, divisor });
            let outcome = self.run(&loss, BackwardOptions::default());
            if loss_is_not_finite(&outcome) {
                // The batch has added nothing to the gradients, so its tokens do not count either.
                *state.weighted() = before;
            }
            return outcome;
        }
        let total = self.sum_over_ranks(total)?;
        if total.device() == Device::Cpu && !total.f_double_value(&[])?.is_finite() {
            return Err(Error::invalid_argument(
                "backward_weighted: on one of the ranks a weight was negative, NaN, or a tensor of several elements; \
                 expected the number of tokens that the loss is the sum of",
            ));
        }
        // Gradients are averaged over the ranks, so the factor contains the number of ranks.
        let factor = Tensor::from(self.processes.num_processes() as f64).f_div(&total)?;
        let factor = factor.f_masked_fill(&total.f_eq(0.0)?, 0.0)?;
        if before.is_some() {
            scale_gradients(models, &divisor.f_mul(&factor)?)?;
        }
        self.run(&scaled(&factor)?, BackwardOptions::default())
    }

    /// Estimates the divisor, so that gradients have their usual magnitude before they are corrected, which fp16 needs.
    /// If every batch is reduced, all ranks must divide by the same number.
    fn provisional_divisor(&self, weight: &Tensor) -> Result<Tensor> {
        let settings = self.accumulator.settings();
        let steps = settings.steps as f64;
        let mut sharded = self.sharded.iter().flat_map(|sharded| sharded.models());
        if settings.sync_each_batch || sharded.any(|model| model.reduces_each_batch()) {
            return Ok(Tensor::from(steps));
        }
        Ok(weight.f_clamp_min(1.0)?.f_nan_to_num(1.0, None, None)?.f_mul_scalar(steps)?)
    }

    /// Sums a number over the ranks, on its device, so that the host waits only for numbers on the host.
    fn sum_over_ranks(&self, number: Tensor) -> Result<Tensor> {
        let Some(group) = self.processes.group() else {
            return Ok(number);
        };
        let place = number.device();
        let mut sum = number.f_to_device(self.processes.device())?.f_reshape([1])?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum.f_reshape([0i64; 0])?.f_to_device(place)?)
    }
}

/// Compares a loss with those of the ranks of a group, which read the same samples, in debug mode. All of them take
/// part.
fn compare_losses(loss: &Tensor, group: &ProcessGroup, axis: &str) -> Result<()> {
    let own = loss.f_sum(Kind::Double)?.f_double_value(&[])?;
    let all: Vec<f64> = group.all_gather_object(&own)?;
    let Some(rank) = all.iter().position(|other| other.to_bits() != own.to_bits()) else {
        return Ok(());
    };
    let what = if axis == "tensor" { "divide layers" } else { "have parts of a sequence" };
    Err(Error::invalid_argument(format!(
        "the loss is {own} on {axis} rank {} and {} on {axis} rank {rank}: ranks that {what} have to read the same samples \
         (prepare the loader, or give all of them one batch) and to draw the same random numbers",
        group.rank(),
        all[rank]
    )))
}
