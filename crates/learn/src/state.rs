//! State that callbacks read and change: the position in the fit, its batch, model and optimizer.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_data::Batch;
use brigade_metrics::Metric;
use brigade_nn::StateDict;
use brigade_optim::Optimizer;
use brigade_torch::{NamedTensor, Result};
use brigade_train::{Accelerator, WeightAverage};
use tch::{Device, Tensor};

use crate::fit_progress::FitProgress;
use crate::groups::Grouped;
use crate::hyper::{GroupHypers, Hyper};
use crate::loaders::{ItemCodec, Parts};
use crate::loss::{Loss, Outputs};
use crate::model::AnyModel;
use crate::recorder::Recorder;

/// The state of a Learner, which a [`Callback`](crate::Callback) gets at every event.
///
/// A Learner dereferences to its state.
pub struct LearnerState {
    pub(crate) accelerator: Accelerator,
    pub(crate) model: Box<dyn AnyModel>,
    pub(crate) loss: Arc<dyn Loss>,
    pub(crate) grouped: Grouped,
    pub(crate) metrics: Vec<Arc<dyn Metric<Value = f64>>>,
    pub(crate) classes: Option<Arc<[String]>>,
    pub(crate) codec: Option<Arc<dyn ItemCodec>>,
    pub(crate) recorder: Recorder,
    pub(crate) seed: u64,
    /// `true` if a non-finite loss ends the fit instead of being an error.
    pub(crate) ends_on_nan: bool,
    /// `true` if a non-finite loss has ended this fit.
    pub(crate) ended_on_nan: bool,
    pub(crate) quiet: bool,
    /// `true` if metrics of training batches are computed, too.
    pub(crate) train_metrics: bool,
    /// `true` if an accumulation window is open: gradients of earlier batches are waiting for their step.
    pub(crate) window_open: bool,
    /// Checkpoint to resume from: its folder, `true` if it belongs to this fit, and its contents.
    pub(crate) resume: Option<(PathBuf, bool, FitProgress)>,
    /// Folder to save into after the callbacks of the event, and the index of the fit.
    pub(crate) save: Option<(PathBuf, usize)>,
    pub(crate) position: Position,
    pub(crate) batch: CurrentBatch,
}

/// Position in a fit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Position {
    pub(crate) epochs: usize,
    pub(crate) epoch: usize,
    /// Index of the batch in the epoch's training or validation.
    pub(crate) iter: usize,
    /// Number of batches of this rank in it.
    pub(crate) batches: usize,
    pub(crate) train_iter: usize,
    pub(crate) progress: f64,
    pub(crate) training: bool,
    /// `true` in a pass outside of a fit.
    pub(crate) evaluating: bool,
    /// `true` if the epochs of this fit have a validation.
    pub(crate) validates: bool,
    pub(crate) train_cancelled: bool,
    pub(crate) validation_cancelled: bool,
}

/// Second set of targets, and the weight of the first one for each sample.
#[derive(Debug)]
pub(crate) struct MixedTarget {
    pub(crate) second: Tensor,
    pub(crate) share: Tensor,
}

/// The current batch, and the values computed from it.
#[derive(Debug, Default)]
pub(crate) struct CurrentBatch {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) target: Option<Tensor>,
    pub(crate) mixed: Option<MixedTarget>,
    pub(crate) predictions: Option<Tensor>,
    /// Loss without a graph, for logging.
    pub(crate) loss: Option<Tensor>,
    /// Loss with its graph, for backward.
    pub(crate) loss_grad: Option<Tensor>,
    pub(crate) rows: usize,
    pub(crate) valid: usize,
    /// Index of the batch among the batches of all ranks.
    pub(crate) place: usize,
    /// Number of rows of all ranks in this round, and how many of them are samples.
    pub(crate) round_rows: usize,
    pub(crate) round_samples: usize,
}

impl CurrentBatch {
    pub(crate) fn of(batch: Batch<Parts>, rank: usize, world: usize) -> Self {
        let (rows, valid) = (batch.rows(), batch.valid());
        let place = batch.index() * world + rank;
        let round_rows = batch.round().rows.iter().sum();
        let round_samples = batch.round().total_valid();
        let Parts { inputs, target } = batch.into_data();
        Self { inputs, target, rows, valid, place, round_rows, round_samples, ..Self::default() }
    }

    /// Removes the rows that complete the batch.
    pub(crate) fn leave_out_duplicates(&mut self) -> Result<()> {
        if self.rows == self.valid {
            return Ok(());
        }
        let valid = self.valid as i64;
        for tensor in self.inputs.iter_mut().chain(&mut self.target) {
            *tensor = tensor.f_narrow(0, 0, valid)?;
        }
        self.rows = self.valid;
        Ok(())
    }
}

impl LearnerState {
    /// Returns the Accelerator of the Learner.
    #[must_use]
    pub fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Returns the device of the model and of the batches.
    #[must_use]
    pub fn device(&self) -> Device {
        self.accelerator.device()
    }

    /// Returns the number of the epoch, from 0.
    #[must_use]
    pub fn epoch(&self) -> usize {
        self.position.epoch
    }

    /// Returns the number of epochs of the fit.
    #[must_use]
    pub fn epochs(&self) -> usize {
        self.position.epochs
    }

    /// Returns the number of the batch in the epoch's training or validation, from 0.
    #[must_use]
    pub fn iter(&self) -> usize {
        self.position.iter
    }

    /// Returns the number of batches of this rank in the epoch's training or validation.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.position.batches
    }

    /// Returns the number of batches trained since the fit began.
    #[must_use]
    pub fn train_iter(&self) -> usize {
        self.position.train_iter
    }

    /// Returns the completed share of the fit's training, 0 to 1: the argument of schedules (fastai's `pct_train`).
    #[must_use]
    pub fn progress(&self) -> f64 {
        self.position.progress
    }

    /// Returns `true` if the current batch is a training batch.
    #[must_use]
    pub fn is_training(&self) -> bool {
        self.position.training
    }

    /// Returns `true` in a pass outside of a fit: `validate`, `predictions`, or the learning-rate finder.
    #[must_use]
    pub fn is_evaluation(&self) -> bool {
        self.position.evaluating
    }

    /// Returns `true` if the epochs of this fit have a validation.
    #[must_use]
    pub fn has_validation(&self) -> bool {
        self.position.validates
    }

    /// Returns `true` if the epoch's training was cancelled.
    #[must_use]
    pub fn train_was_cancelled(&self) -> bool {
        self.position.train_cancelled
    }

    /// Returns `true` if the epoch's validation was cancelled.
    #[must_use]
    pub fn validation_was_cancelled(&self) -> bool {
        self.position.validation_cancelled
    }

    /// Returns the model's inputs of the batch.
    pub fn inputs(&self) -> &[Tensor] {
        &self.batch.inputs
    }

    /// Replaces the model's inputs by the same number of tensors.
    pub fn set_inputs(&mut self, inputs: Vec<Tensor>) {
        self.batch.inputs = inputs;
    }

    /// Returns the targets of the batch. `None` if it has none.
    #[must_use]
    pub fn target(&self) -> Option<&Tensor> {
        self.batch.target.as_ref()
    }

    /// Replaces the targets of the batch.
    pub fn set_target(&mut self, target: Tensor) {
        self.batch.target = Some(target);
    }

    /// Mixes each sample's target with another one's, for this batch: `share` `[n]` is the weight of the sample's own
    /// target. Class targets are kept, and the losses of both are mixed; other targets are mixed directly.
    ///
    /// # Errors
    /// Fails when the shapes do not fit.
    pub fn mix_target(&mut self, second: Tensor, share: &Tensor) -> Result<()> {
        let Some(target) = &self.batch.target else { return Ok(()) };
        if self.loss.outputs() == Outputs::Classes {
            let share = share.shallow_clone();
            self.batch.mixed = Some(MixedTarget { second, share });
            return Ok(());
        }
        let share = broadcastable(share, target.dim())?.f_to_kind(target.kind())?;
        self.batch.target = Some(second.f_lerp_tensor(target, &share)?);
        Ok(())
    }

    /// Returns the model's output for the batch. `None` until the end of the forward pass.
    #[must_use]
    pub fn predictions(&self) -> Option<&Tensor> {
        self.batch.predictions.as_ref()
    }

    /// Replaces the model's output from which the loss and the metrics are computed.
    pub fn set_predictions(&mut self, predictions: Tensor) {
        self.batch.predictions = Some(predictions);
    }

    /// Returns the batch's loss as it is logged, a tensor of one value on the device. `None` until it has been
    /// computed. Reading its value waits for the device.
    #[must_use]
    pub fn batch_loss(&self) -> Option<&Tensor> {
        self.batch.loss.as_ref()
    }

    /// Returns the loss from which backward computes gradients. `None` until it has been computed.
    #[must_use]
    pub fn loss_for_backward(&self) -> Option<&Tensor> {
        self.batch.loss_grad.as_ref()
    }

    /// Replaces the loss from which backward computes gradients, to scale it or to add a penalty. The logged loss is
    /// not changed.
    pub fn set_loss_for_backward(&mut self, loss: Tensor) {
        self.batch.loss_grad = Some(loss);
    }

    /// Returns the number of rows of this rank's batch.
    #[must_use]
    pub fn batch_rows(&self) -> usize {
        self.batch.rows
    }

    /// Returns the number of rows that are samples and not duplicates. They are the first rows.
    #[must_use]
    pub fn batch_samples(&self) -> usize {
        self.batch.valid
    }

    /// Returns the number of samples of all ranks in this round of batches.
    #[must_use]
    pub fn global_batch_samples(&self) -> usize {
        self.batch.round_samples
    }

    /// Returns the number of rows of all ranks in this round of batches, duplicates included.
    #[must_use]
    pub fn global_batch_rows(&self) -> usize {
        self.batch.round_rows
    }

    /// Clears the gradients of all parameters.
    ///
    /// # Errors
    /// Fails if libtorch returns an error.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.grouped.zero_grad()
    }

    /// Prints a line on the first process of each host, unless the Learner is quiet.
    pub fn println(&self, line: impl fmt::Display) {
        if !self.quiet {
            self.accelerator.println(line);
        }
    }

    /// Returns the loss function.
    #[must_use]
    pub fn loss_function(&self) -> &Arc<dyn Loss> {
        &self.loss
    }

    /// Replaces the loss function.
    pub fn set_loss_function(&mut self, loss: Arc<dyn Loss>) {
        self.loss = loss;
    }

    /// Returns the metrics of the Learner.
    #[must_use]
    pub fn metric_list(&self) -> &[Arc<dyn Metric<Value = f64>>] {
        &self.metrics
    }

    /// Returns `true` if metrics are computed for the training batches as well.
    #[must_use]
    pub fn has_train_metrics(&self) -> bool {
        self.train_metrics
    }

    /// Returns the recorder: rates, losses, and the epochs' metrics.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Returns the names of the classes. `None` if targets are not classes.
    #[must_use]
    pub fn class_names(&self) -> Option<&[String]> {
        self.classes.as_deref()
    }

    /// Returns the codec that reads and shows single items. `None` if the data have none.
    #[must_use]
    pub fn item_codec(&self) -> Option<&Arc<dyn ItemCodec>> {
        self.codec.as_ref()
    }

    /// Returns the model's module, if it is of this type.
    #[must_use]
    pub fn module<M: Any>(&self) -> Option<&M> {
        self.model.module()?.downcast_ref()
    }

    /// Returns the model's parameters under their names. Those of a sharded model have no memory outside of
    /// [`LearnerState::gathered`].
    #[must_use]
    pub fn parameters(&self) -> Vec<NamedTensor> {
        self.model.parameters()
    }

    /// Returns the model's buffers, such as BatchNorm's statistics.
    #[must_use]
    pub fn buffers(&self) -> Vec<NamedTensor> {
        self.model.buffers()
    }

    /// Returns the tensors that the optimizer steps, frozen ones included, under their names: this rank's shards of a
    /// sharded model, otherwise the parameters themselves. A callback that writes into them calls
    /// [`LearnerState::local_parameters_changed`] afterwards.
    #[must_use]
    pub fn local_parameters(&self) -> Vec<NamedTensor> {
        self.model.local_parameters()
    }

    /// Updates a sharded model after its shards were written into, on every rank.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn local_parameters_changed(&self) -> Result<()> {
        self.model.sharder().map_or(Ok(()), |sharder| sharder.shards_changed())
    }

    /// Returns `true` if the model's parameters are sharded over the ranks: with an Accelerator that shards models,
    /// from the first fit on.
    #[must_use]
    pub fn is_sharded(&self) -> bool {
        self.model.sharder().is_some()
    }

    /// Returns an average of the model's current weights, which a callback updates and swaps with them. Each rank
    /// averages the part that it holds.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::OutOfMemory`] if there is no memory for the averages.
    pub fn weight_average(&self) -> Result<WeightAverage> {
        self.model.weight_average()
    }

    /// Returns `true` if this rank has only a part of the parameters: of a sharded model, or as one of the ranks that
    /// divide its layers.
    pub(crate) fn is_in_parts(&self) -> bool {
        self.model.is_in_parts()
    }

    /// Runs `read` with the whole parameters of a sharded model, for which each rank needs enough memory. Every rank
    /// must call it. A model that is not sharded is passed unchanged.
    ///
    /// # Errors
    /// Returns the errors of `read`; [`brigade_torch::ErrorKind::Communication`] when a peer is gone; an error if it is
    /// called inside of another `gathered`.
    pub fn gathered<R>(&self, read: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        match self.model.sharder() {
            Some(sharder) => sharder.gathered(|| read(self)),
            None => read(self),
        }
    }

    /// Runs `write` with the whole parameters of a sharded model, and copies each rank's part of the result into its
    /// shards. Every rank calls it, and writes the same values.
    ///
    /// # Errors
    /// Returns the same errors as [`LearnerState::gathered`]; after an error of `write` the parameters are as before.
    pub fn gathered_mut<R>(&mut self, write: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        match self.model.sharder() {
            Some(sharder) => sharder.gathered_mut(|| write(self)),
            None => write(self),
        }
    }

    /// Returns the model's whole parameters and saved buffers on rank 0, and `None` on the others. Every rank calls it.
    /// If ranks have parts of the model, the tensors are copies in the host's memory.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone; [`brigade_torch::ErrorKind::Tensor`] when
    /// memory runs out.
    pub fn full_state_dict(&self) -> Result<Option<StateDict>> {
        self.model.full_state_dict(self.accelerator.is_main_process())
    }

    /// Loads rank 0's parameters and buffers into the model; the other ranks pass `None`. Every rank calls it.
    ///
    /// # Errors
    /// Fails on every rank, with nothing changed, when a name or a shape does not fit.
    pub fn load_full_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        if self.is_in_parts() {
            return self.model.load_full_state_dict(state);
        }
        let values = state.map(|state| {
            let tensors = state.iter();
            Value::dict(tensors.map(|(name, it)| (name, Value::Tensor(it.shallow_clone()))))
        });
        let values = self.accelerator.processes().broadcast_state(values)?;
        let mut state = StateDict::new();
        for (name, value) in values.as_dict().unwrap_or_default() {
            if let (Some(name), Some(tensor)) = (name.as_str(), value.as_tensor()) {
                state.insert(name, tensor.shallow_clone())?;
            }
        }
        self.model.load_state_dict(&state)
    }

    /// Returns the model's parameters and saved buffers under their names. Those of a sharded model have no memory
    /// outside of [`LearnerState::gathered`], and with tensor parallelism they are this rank's parts; see
    /// [`LearnerState::full_state_dict`].
    #[must_use]
    pub fn state_dict(&self) -> StateDict {
        self.model.state_dict()
    }

    /// Loads these parameters and buffers into the model. If ranks have parts of the model, every rank calls it, and
    /// rank 0's values are loaded.
    ///
    /// # Errors
    /// Fails when a name or a shape does not fit: nothing was changed.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        if self.is_in_parts() {
            return self.model.load_full_state_dict(Some(state));
        }
        self.model.load_state_dict(state)
    }

    /// Returns copies of this rank's parameters and buffers.
    pub(crate) fn copied_values(&self) -> Result<Vec<Tensor>> {
        let copied = |tensor: Tensor| -> Result<Tensor> {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(&tensor)?;
            Ok(copy)
        };
        self.local_values().map(copied).collect()
    }

    /// Restores the copies that [`LearnerState::copied_values`] has made.
    pub(crate) fn put_back(&mut self, copies: &[Tensor]) -> Result<()> {
        for (mut value, copy) in self.local_values().zip(copies) {
            value.f_copy_(copy)?;
        }
        self.local_parameters_changed()
    }

    fn local_values(&self) -> impl Iterator<Item = Tensor> {
        let values = self.local_parameters().into_iter().chain(self.buffers());
        values.map(|value| value.tensor.detach())
    }

    /// Sets whether layers whose names begin with `prefix` stay in evaluation mode, also in training. Returns the
    /// number of such layers.
    ///
    /// # Errors
    /// Fails when no layer has this name.
    pub fn hold_in_eval(&mut self, prefix: &str, on: bool) -> Result<usize> {
        self.model.hold_in_eval(prefix, on)
    }

    /// Returns a handle of the optimizer, or `None` before the first fit. If the device has to report whether the last
    /// step was made, this waits for it.
    ///
    /// # Errors
    /// Returns the same errors as [`brigade_train::PreparedOptimizer::settled`].
    pub fn optimizer(&self) -> Result<Option<Optimizer>> {
        self.grouped.optimizer()
    }

    /// Returns the names of each parameter group's parameters.
    #[must_use]
    pub fn parameter_groups(&self) -> &[Vec<String>] {
        self.grouped.names()
    }

    /// Returns the number of frozen parameter groups, counted from the first.
    #[must_use]
    pub fn frozen_groups(&self) -> usize {
        self.grouped.frozen()
    }

    /// Returns the hyperparameters of each parameter group. Empty before the first fit.
    #[must_use]
    pub fn hypers(&self) -> &[GroupHypers] {
        self.grouped.hypers()
    }

    /// Sets a hyperparameter of each parameter group for the following steps.
    ///
    /// # Errors
    /// Fails if the number of values differs from the number of parameter groups, or if a value is negative or not
    /// finite.
    pub fn set_hyper(&mut self, hyper: Hyper, values: &[f64]) -> Result<()> {
        self.grouped.set(hyper, values)
    }

    /// Returns the seed of the random draws of callbacks.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Computes the loss of the batch, and keeps it for logging and for backward.
    pub(crate) fn compute_loss(&mut self) -> Result<()> {
        let batch = &mut self.batch;
        let (Some(predictions), Some(target)) = (&batch.predictions, &batch.target) else {
            return Ok(());
        };
        let loss = match &batch.mixed {
            None => self.loss.forward(predictions, target)?,
            Some(MixedTarget { second, share }) => {
                let own = self.loss.each(predictions, target)?;
                let other = self.loss.each(predictions, second)?;
                // One loss per pixel or token: repeat each row's share for each of them.
                let times = own.size().first().copied().unwrap_or(1)
                    / share.size().first().copied().unwrap_or(1).max(1);
                let share = share.f_repeat_interleave_self_int(times, None, None)?;
                let share = share.f_to_kind(own.kind())?;
                other.f_lerp_tensor(&own, &share)?.f_mean(None)?
            }
        };
        batch.loss = Some(loss.f_detach()?);
        batch.loss_grad = Some(loss);
        Ok(())
    }
}

/// Returns a column of one number per sample, with this number of dimensions.
pub(crate) fn broadcastable(share: &Tensor, dimensions: usize) -> Result<Tensor> {
    let mut shape = vec![1; dimensions.max(1)];
    shape[0] = -1;
    Ok(share.f_view(shape.as_slice())?)
}

impl fmt::Debug for LearnerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LearnerState")
            .field("position", &self.position)
            .field("loss", &self.loss)
            .field("metrics", &self.metrics)
            .field("grouped", &self.grouped)
            .finish_non_exhaustive()
    }
}
