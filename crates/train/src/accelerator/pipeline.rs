//! The training step where ranks have stages of models.

use std::cell::Cell;

use brigade_torch::{ReduceOp, Result, TensorTree};
use tch::{Kind, Tensor};

use super::Accelerator;
use crate::error::TrainError;
use crate::loss_weight::WeightedWindow;
use crate::model::PreparedModel;
use crate::pipeline::{PipelineLoss, StepLoss};

impl Accelerator {
    /// Computes the gradients of a batch's loss: the forward, the loss and [`Accelerator::backward`] of the ordinary
    /// loop in one call. If the mesh has an axis `pp` ([`crate::AcceleratorBuilder::mesh`]), the batch passes through
    /// the pipeline in micro-batches. The closure runs the model on its argument and returns the loss: a mean, or a sum
    /// with its weight ([`PipelineLoss`]). Returns the loss of this rank's batch, on all ranks of the pipeline.
    ///
    /// On all stages but the last, the model's forward returns an error, which the closure must pass on: only the last
    /// stage runs the layers after the model's blocks and computes the loss. Without a pipeline the closure gets the
    /// whole batch.
    ///
    /// At the end of an accumulation window, gradients are averaged over the ranks that read other samples, in
    /// proportion to their numbers of rows in the window, or to the weights of their sums. With fp16 the loss is
    /// scaled, and if a gradient of any stage overflows, all ranks skip the step.
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_models::{LlamaForCausalLm, LlamaOptions};
    /// use brigade_optim::AdamW;
    /// use brigade_train::Accelerator;
    /// # use tch::{Device, Kind, Tensor};
    ///
    /// // With 4 ranks add `.mesh(Mesh::builder().pipeline(4).build(4)?)`; nothing else changes.
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let options = LlamaOptions {
    ///     vocab_size: 50, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4,
    ///     num_attention_heads: 4, ..Default::default()
    /// };
    /// let model = accelerator.parallel().model(|path| LlamaForCausalLm::new(path, &options))?;
    /// let optimizer = AdamW::default().build(&model)?;
    /// # let ids = Tensor::arange(48, (Kind::Int64, Device::Cpu)).view([8, 6]);
    /// let train = DataLoader::new(TensorDataset::new(ids)?).batch_size(4).drop_last(true);
    /// let (model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// for batch in &train {
    ///     let ids = batch?.into_data();
    ///     let loss = accelerator.forward_backward(&model, &ids, |model, micro| {
    ///         let loss = model.inner().module().loss(micro, micro, 0.0)?;
    ///         Ok((loss.sum, loss.count))
    ///     })?;
    ///     accelerator.clip_grad_norm(&model, 1.0)?;
    ///     optimizer.step()?;
    ///     optimizer.zero_grad()?;
    ///     assert!(loss.value() > 0.0);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`crate::Pipeline::forward_backward`] and [`Accelerator::backward`], and
    /// [`TrainError::LossNotFinite`] on every rank when the loss of one is infinite or NaN.
    #[track_caller]
    pub fn forward_backward<M, B, L>(
        &self,
        model: &PreparedModel<M>,
        batch: &B,
        mut loss: impl FnMut(&PreparedModel<M>, &B::Owned) -> Result<L>,
    ) -> Result<StepLoss>
    where
        B: TensorTree,
        L: PipelineLoss,
    {
        let gradients = &self.gradients;
        let Some(pipeline) = &gradients.pipeline else {
            let rows = batch.rows()?;
            let (loss, weight) = loss(model, &batch.narrow_rows(0..rows)?)?.parts();
            let value = loss.f_detach()?.f_to_kind(Kind::Double)?;
            let Some(weight) = weight else {
                self.backward(&loss)?;
                return Ok(StepLoss::of(value.f_double_value(&[])?, rows as f64));
            };
            let number = weight.checked()?.f_double_value(&[])?;
            self.backward_weighted(model, &loss, weight)?;
            let weight = number;
            let mean = if weight == 0.0 { 0.0 } else { value.f_double_value(&[])? / weight };
            return Ok(StepLoss::of(mean, weight));
        };
        let state = &gradients.accumulator;
        // Losses that are sums are weighted by their shares of the window's weight, not equally.
        let mut factor = if L::IS_SUM { 1.0 } else { state.share() };
        if let Some(scaler) = &gradients.scaler {
            let one = Tensor::f_ones([0i64; 0], (Kind::Float, model.inner().device()))?;
            factor *= scaler.scale_loss(&one)?.f_double_value(&[])?;
        }
        let averaged = &gradients.processes;
        let stepped = model.stepped();
        let of_model = (model.inner(), &stepped);
        let before = state.weighted().as_ref().map(|it| it.weight.f_double_value(&[]));
        let window = Cell::new(before.transpose()?.unwrap_or_default());
        let found =
            pipeline.forward_backward(of_model, batch, (factor, &window), averaged, |micro| {
                loss(model, micro)
            })?;
        self.check_step_loss(found.value())?;
        let weight = Tensor::from(window.get());
        let window = WeightedWindow { weight, divisor: Tensor::from(1.0) };
        *state.weighted() = Some(window).filter(|_| L::IS_SUM && !state.sync_gradients());
        if state.sync_gradients() && stepped.sharder.is_none() {
            let copies = gradients.tensor.as_ref().and_then(|it| it.copies());
            pipeline.average(model.inner(), averaged, copies)?;
        }
        Ok(found)
    }

    /// Fails on all ranks if the loss of one is infinite or NaN.
    fn check_step_loss(&self, value: f64) -> Result<()> {
        if !self.checks_step_losses {
            return Ok(());
        }
        let mut finite = value.is_finite();
        let averaged = &self.gradients.processes;
        if let Some(group) = averaged.group() {
            let mut flag =
                Tensor::from_slice(&[i32::from(finite)]).f_to_device(averaged.device())?;
            group.all_reduce(&mut flag, ReduceOp::Min)?;
            finite = flag.f_int64_value(&[0])? == 1;
        }
        if finite {
            return Ok(());
        }
        self.gradients.accumulator.set_skipped(true);
        let rank = (!value.is_finite()).then(|| self.processes.process_index());
        Err(TrainError::LossNotFinite { rank, step: None, weights_corrupted: false }.into())
    }
}
