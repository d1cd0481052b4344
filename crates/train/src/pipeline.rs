//! Pipelines: models whose stages are on several ranks, and the executor of their schedules.
//!
//! `run.rs` carries out a rank's list of actions, which `brigade-sharding` has planned. Messages begin in the order
//! of the table and are waited for where their values are needed, so a rank does not wait for a send before its next
//! pass. At most two sends to a rank are in flight (`wire.rs`). The shape of an activation is sent once for each
//! shape of micro-batches.
//!
//! With schedules that compute gradients of weights apart, the layers behind the row of blocks have a graph of their
//! own (`run_split`), whose backward runs once. Losses that are sums are divided by an estimate until the weight of
//! all is known, and gradients are multiplied at the end (`shared.rs`, which also sums gradients of tied parameters).
//! `ranks.rs` is the part of it that an Accelerator holds.
//!
//! A model of a pipeline has no reducer: its gradients are averaged in one call after the step. With sharding, shards
//! are gathered around the whole step, and their gradients reduced at its end in one call
//! (`Sharder::reduce_unreduced`), before those of tied parameters are summed between stages.
//!
//! Checkpoints (`checkpoint/stages.rs`) have one state for each object, joined from those of all stages. The first
//! rank that has a tensor writes it, and a load takes this rank's part of the state.

mod evaluate;
mod loss;
mod ranks;
mod run;
mod shared;
mod wire;

use std::fmt;

use crate::error::TrainError;
use brigade_nn::{Model, PipelineParallel, PipelineStages, StageCut};
use brigade_sharding::pipeline::{Action, PipelineTable, Schedule};
use brigade_torch::{Error, ErrorKind, ProcessGroup, Result, TensorTree, TorchError};
use tch::Tensor;

pub use self::loss::{PipelineLoss, StepLoss};
pub(crate) use self::ranks::PipelineRanks;
pub(crate) use self::ranks::StageModel;
use self::run::Step;
pub(crate) use self::shared::{ShareOf, Shares, Stepped};
use self::wire::Forms;

/// Options of a pipeline: how it divides a batch and orders its passes.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineOptions {
    /// Number of micro-batches into which each batch is cut.
    pub micro_batches: usize,
    /// Order of the forward and backward passes. Defaults to [`Schedule::OneForwardOneBackward`].
    pub schedule: Schedule,
    /// Number of stages of each rank. Defaults to [`Schedule::least_chunks`].
    pub chunks: Option<usize>,
    /// Rule that cuts the model into stages. Defaults to [`StageCut::Even`].
    pub cut: StageCut,
}

impl PipelineOptions {
    /// Returns the options of a 1F1B schedule with this number of micro-batches.
    #[must_use]
    pub fn new(micro_batches: usize) -> Self {
        let (schedule, cut) = (Schedule::OneForwardOneBackward, StageCut::Even);
        Self { micro_batches, schedule, chunks: None, cut }
    }

    /// Sets the order of the forward and backward passes. Defaults to [`Schedule::OneForwardOneBackward`].
    #[must_use]
    pub fn schedule(self, schedule: Schedule) -> Self {
        Self { schedule, ..self }
    }

    /// Sets the number of stages of each rank. Defaults to [`Schedule::least_chunks`].
    #[must_use]
    pub fn chunks(self, chunks: usize) -> Self {
        Self { chunks: Some(chunks), ..self }
    }

    /// Sets the rule that cuts the model into stages. Defaults to [`StageCut::Even`].
    #[must_use]
    pub fn cut(self, cut: StageCut) -> Self {
        Self { cut, ..self }
    }
}

/// The ranks that hold the stages of one model, and the order in which they compute. Every rank reads the same batch.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential};
/// use brigade_train::{Pipeline, PipelineOptions};
/// use tch::{Kind, Tensor};
///
/// // The group of the ranks that have stages, here one.
/// let pipeline = Pipeline::new(group, PipelineOptions::new(4))?;
/// let model = Model::builder().pipeline(pipeline.parallel()).build(|path: &ParamPath| {
///     let layers = Sequential::new().add(Linear::new(path / 0, 4, 8)).add(Relu).add(Linear::new(path / 2, 8, 1));
///     layers.in_stages(path.stages(0..3))
/// })?;
/// let batch = Tensor::ones([8, 4], (Kind::Float, model.device()));
/// let loss = pipeline.forward_backward(&model, &batch, |micro| {
///     Ok(model.forward(micro)?.square().mean(Kind::Float))
/// })?;
/// assert!(loss.value() > 0.0 && model.parameters()[0].tensor.grad().defined());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pipeline {
    group: ProcessGroup,
    options: PipelineOptions,
    table: PipelineTable,
    /// Shapes and types of the activations between stages, as far as they were sent.
    forms: Forms,
}

impl Pipeline {
    /// Makes the pipeline of the ranks of a group. Nothing is sent.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a number of micro-batches or stages that the schedule does not
    /// support. The message contains the nearest supported number.
    pub fn new(group: ProcessGroup, options: PipelineOptions) -> Result<Self> {
        let chunks = options.chunks.unwrap_or_else(|| options.schedule.least_chunks());
        let (schedule, micro_batches) = (options.schedule, options.micro_batches);
        let table = PipelineTable::new(schedule, group.size(), micro_batches, chunks)
            .map_err(|error| Error::new(ErrorKind::InvalidArgument, error))?;
        Ok(Self { group, options, table, forms: Forms::default() })
    }

    /// Returns the stages of this rank, for [`brigade_nn::ModelBuilder::pipeline`].
    #[must_use]
    pub fn parallel(&self) -> PipelineParallel {
        PipelineParallel {
            stage_ranks: self.table.stage_ranks().to_vec(),
            rank: self.group.rank(),
            cut: self.options.cut.clone(),
        }
    }

    /// Returns the process group of the ranks of the pipeline.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the table of the actions of a step.
    #[must_use]
    pub fn table(&self) -> &PipelineTable {
        &self.table
    }

    /// Returns the options of the pipeline.
    #[must_use]
    pub fn options(&self) -> &PipelineOptions {
        &self.options
    }

    /// Computes the gradients of a batch's loss, and adds them to the existing gradients. The batch is cut into
    /// micro-batches whose numbers of rows differ by one at most. `loss` is called for each micro-batch and each stage
    /// of this rank. It must call the model's forward once and return the loss of the micro-batch ([`PipelineLoss`]).
    /// On all stages but the last, the forward returns an error, which the closure must pass on. Every rank of the
    /// pipeline must call this method with the same batch.
    ///
    /// Schedules that compute the gradients of weights separately ([`Schedule::ZeroBubble`], [`Schedule::ZeroBubbleV`])
    /// run the backward of a stage's blocks twice: first for the stage's input, then for its weights. The second
    /// backward computes the gradients between the layers again, so that a stage computes about half a backward more
    /// than with other schedules, except for the first stage.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a model that was not built for this pipeline, a batch
    /// normalisation whose statistics are not shared, and a batch with fewer rows than micro-batches; nothing was sent
    /// then. Later errors are a [`crate::TrainError::Pipeline`] with rank, action, stage and micro-batch, and have the
    /// kind of their cause: [`brigade_torch::ErrorKind::Communication`] when another rank is gone or has failed. If
    /// rank 0 hosts the store of the ranks and has ended, the error names it with its stages. The group is aborted, so
    /// that all ranks end, and cannot be used again.
    #[track_caller]
    pub fn forward_backward<M, B, L>(
        &self,
        model: &Model<M>,
        batch: &B,
        loss: impl FnMut(&B::Owned) -> Result<L>,
    ) -> Result<StepLoss>
    where
        B: TensorTree,
        L: PipelineLoss,
    {
        let stepped =
            Stepped { tensors: model.trainable_parameters(), sharder: None, common: None };
        let alone = |weight: f64| {
            let own = match weight {
                _ if !L::IS_SUM => 1.0,
                0.0 => 0.0,
                _ => 1.0 / weight,
            };
            Ok(Shares { own, earlier: 1.0 })
        };
        self.scaled_forward_backward(model, &stepped, batch, (1.0, &alone), loss)
    }

    /// Runs [`Pipeline::forward_backward`] with gradients multiplied by a factor; gradients of losses that are sums are
    /// also multiplied by a function of their weight. The parameters of a sharded model are whole during the step, and
    /// its gradients are reduced once.
    pub(crate) fn scaled_forward_backward<M, B, L>(
        &self,
        model: &Model<M>,
        stepped: &Stepped<'_>,
        batch: &B,
        (factor, share): (f64, ShareOf<'_>),
        loss: impl FnMut(&B::Owned) -> Result<L>,
    ) -> Result<StepLoss>
    where
        B: TensorTree,
        L: PipelineLoss,
    {
        let stages = self.stages_of(model)?;
        if let Some(name) = model.unshared_batch_norm() {
            return Err(Error::invalid_argument(format!(
                "the batch normalisation `{name}` would have the statistics of one micro-batch of one rank: share them over the \
                 ranks by `AcceleratorBuilder::sync_batch_norm` or `Model::convert_sync_batch_norm`, or use a layer or group normalisation"
            )));
        }
        let rows = batch.rows()?;
        let count = self.table.micro_batches();
        if rows < count {
            return Err(Error::invalid_argument(format!(
                "a batch of {rows} rows cannot be cut into {count} micro-batches: give at least {count} rows, as with \
                 `drop_last` for the last batch of the data, or use at most {rows} micro-batches"
            )));
        }
        let micros = cut_rows(batch, rows, count)?;
        let step =
            || Step::new(self, model, stages, micros, (rows, factor), stepped).run(share, loss);
        self.whole(|| {
            let Some(sharder) = stepped.sharder else { return step() };
            sharder.set_sync(false, false)?;
            let outcome = sharder.gathered(step);
            if outcome.is_err() {
                sharder.clear_unreduced()?;
            }
            outcome
        })
    }

    /// Computes a value of each micro-batch without gradients, such as its loss or its logits, and returns the values
    /// of all micro-batches, in order, on every rank of the pipeline. The batch may have fewer rows than micro-batches.
    /// Every rank of the pipeline must call this method with the same batch.
    ///
    /// # Errors
    /// Returns the same errors as [`Pipeline::forward_backward`], also for a batch without rows.
    #[track_caller]
    pub fn forward<M, B, T>(
        &self,
        model: &Model<M>,
        batch: &B,
        value: impl FnMut(&B::Owned) -> Result<T>,
    ) -> Result<Vec<T::Owned>>
    where
        B: TensorTree,
        T: TensorTree,
    {
        let stages = self.stages_of(model)?;
        let rows = batch.rows()?;
        if rows == 0 {
            return Err(Error::invalid_argument("a pipeline needs a batch with rows, found none"));
        }
        let micros = cut_rows(batch, rows, self.table.micro_batches().min(rows))?;
        self.whole(|| {
            let stepped = Stepped { tensors: Vec::new(), sharder: None, common: None };
            let step = Step::new(self, model, stages, micros, (rows, 1.0), &stepped);
            tch::no_grad(|| step.evaluate(value))
        })
    }

    fn stages_of<'m, M>(&self, model: &'m Model<M>) -> Result<&'m PipelineStages> {
        let stages = model.pipeline().filter(|stages| {
            stages.stage_ranks() == self.table.stage_ranks() && stages.rank() == self.group.rank()
        });
        stages.ok_or_else(|| {
            Error::invalid_argument(format!(
                "the model was not built for rank {} of this pipeline of {} stages on {} ranks: build it with \
                 `Model::builder().pipeline(pipeline.parallel())`",
                self.group.rank(),
                self.table.stages(),
                self.group.size()
            ))
        })
    }

    /// Adds the stages of a rank that has ended to the error of a step, if the store was lost with that rank. The
    /// message that failed may be a neighbour's, which has ended because of that rank.
    fn with_lost_stages(&self, error: Error) -> Error {
        let lost = match error.downcast_ref() {
            Some(TorchError::Collective(cause)) => cause.lost_store.as_ref(),
            _ => None,
        };
        let lost = lost.and_then(|server| {
            let rank = server.rank?;
            let position = self.group.global_ranks().iter().position(|&other| other == rank)?;
            let stages: Vec<String> =
                self.table.stages_of(position).map(|stage| stage.to_string()).collect();
            let noun = if stages.len() == 1 { "stage" } else { "stages" };
            Some(format!("rank {rank}, which has {noun} {}, has ended", stages.join(", ")))
        });
        match (lost, error.downcast()) {
            (Some(lost), Ok(TrainError::Pipeline { rank, action, source })) => {
                TrainError::Pipeline { rank, action: format!("{action} ({lost})"), source }.into()
            }
            (_, Ok(error)) => error.into(),
            (_, Err(error)) => error,
        }
    }

    /// Runs a step. If it fails or panics, aborts the messages in flight.
    fn whole<R>(&self, step: impl FnOnce() -> Result<R>) -> Result<R> {
        struct Ends<'a>(Option<&'a ProcessGroup>);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                if let Some(group) = self.0.filter(|group| group.size() > 1) {
                    // The error of the step is the one to return.
                    let _ = group.abort();
                }
            }
        }
        let mut ends = Ends(Some(&self.group));
        let result = step().map_err(|error| self.with_lost_stages(error))?;
        ends.0 = None;
        Ok(result)
    }
}

/// Cuts a batch into parts whose numbers of rows differ by one at most. The first parts have more.
fn cut_rows<B: TensorTree>(batch: &B, rows: usize, parts: usize) -> Result<Vec<B::Owned>> {
    let (each, more) = (rows / parts, rows % parts);
    let start = |part: usize| part * each + part.min(more);
    (0..parts).map(|part| batch.narrow_rows(start(part)..start(part + 1))).collect()
}

/// Returns an error with what this rank did, or the same error if it has that.
fn failure(rank: usize, action: String, source: Error) -> Error {
    if matches!(source.downcast_ref(), Some(TrainError::Pipeline { .. })) {
        return source;
    }
    TrainError::Pipeline { rank, action, source }.into()
}

/// Returns an error for a schedule in which an action comes before one that it depends on.
fn missing(action: Action) -> Error {
    TorchError::Internal(format!("{action}: what it needs is not there")).into()
}

/// Returns the shapes and types of a tree's tensors.
fn form_of(tree: &impl TensorTree) -> Vec<(Vec<i64>, tch::Kind)> {
    let mut form = Vec::new();
    tree.visit(&mut |tensor: &Tensor| form.push((tensor.size(), tensor.kind())));
    form
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline")
            .field("rank", &self.group.rank())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
