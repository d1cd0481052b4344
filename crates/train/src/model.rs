//! A model whose gradients are averaged over the ranks.

mod comm_hook;
mod set_trainable;
mod sharded;
mod spread;
mod stages;
mod weights;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_nn::{Model, Module};
use brigade_torch::{
    BROADCAST_BYTES, Error, NamedTensor, ProcessGroup, Reducer, ReducerOptions, Result, Sharder,
    TensorTree, Trainable, grad_enabled,
};
use parking_lot::Mutex;
use tch::Tensor;

use crate::context_parallel::ContextRanks;
use crate::error::MOVE_OF_MODEL;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::hook::{CommHook, StatefulHook};
use crate::gradients::loss_check::{CheckedModel, LossCheck};
use crate::gradients::models::{Joining, PreparedModels};
use crate::job::Job;
use crate::model_parallel::{DividedModel, ModelParallelRanks, expert_parts};
use crate::pipeline::{PipelineRanks, StageModel, Stepped};
use crate::precision::{Numerics, memory_format};
use crate::processes::Processes;
use crate::registry::{CheckpointObject, Checkpointed, Kind, ModelTensor, Registry};
use crate::sharding::{Part, ShardedModel, ShardedModels};
use crate::stateful::{Stateful, infos, mismatch, same_shape, stateful_handle};

/// A [`Model`] prepared by [`crate::Accelerator::prepare`]: on the process's device, with rank 0's initial weights, and
/// with gradients that `backward` averages over the ranks.
///
/// With one rank, or without a trained parameter, it behaves like the model itself.
pub struct PreparedModel<M> {
    /// Model of this handle. It is not shared, since layers need not be `Sync`.
    model: Model<M>,
    reduction: Reduction,
    /// Sharded parameters, in place of a reducer.
    sharded: Option<Arc<ShardedModel>>,
    inner: Arc<ModelInner>,
    /// Settings with which the reduction is made again.
    context: ModelContext,
    /// Stage of a pipeline, kept registered as long as the model exists.
    _stage: Option<Arc<StageModel>>,
}

/// State of a model without its layers, through which checkpoints access it.
pub(crate) struct ModelInner {
    state: Mutex<ModelState>,
    /// `true` if the next backward averages gradients over the ranks.
    sync: AtomicBool,
    /// `true` if this rank's buffers may differ from rank 0's: after a forward in training.
    buffers_differ: AtomicBool,
}

/// State of a model in checkpoints.
struct ModelState {
    /// Handles of the parameters and saved buffers, under their names in order.
    tensors: Vec<ModelTensor>,
    hook: Option<Arc<dyn StatefulHook>>,
    /// Sharded model whose shards are among the tensors.
    sharded: Option<Arc<ShardedModel>>,
    /// Model whose parts of divided layers are among the tensors.
    tensor: Option<Arc<DividedModel>>,
}

/// Options of the gradient reduction of prepared models.
#[derive(Debug)]
pub(crate) struct ModelOptions {
    pub(crate) reducer: ReducerOptions,
    pub(crate) comm_hook: CommHook,
    pub(crate) sync_batch_norm: bool,
}

/// State of the Accelerator that a prepared model needs, also when parameters are frozen or unfrozen later.
pub(crate) struct ModelContext {
    pub(crate) job: Arc<Job>,
    pub(crate) options: Arc<ModelOptions>,
    pub(crate) numerics: Arc<Numerics>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) loss_check: Option<Arc<LossCheck>>,
    pub(crate) accumulator: GradientAccumulator,
    pub(crate) sharded: Option<Arc<ShardedModels>>,
    pub(crate) tensor: Option<Arc<ModelParallelRanks>>,
    pub(crate) context: Option<Arc<ContextRanks>>,
    pub(crate) pipeline: Option<Arc<PipelineRanks>>,
}

/// Reduction of the gradients of the parameters that were trained when it was made.
#[derive(Default)]
struct Reduction {
    reducer: Option<Reducer>,
    /// Reducer of experts of which other ranks have copies, with expert parallelism.
    experts: Option<Reducer>,
    /// Communication hook with a state.
    hook: Option<Arc<dyn StatefulHook>>,
    checked: Option<Arc<CheckedModel>>,
    /// Parameters that the reducer does not reduce: they were frozen when it was made.
    frozen: Vec<NamedTensor>,
}

impl ModelContext {
    /// Moves a model to the process's device and converts its memory format. Returns `true` if it is channels last.
    pub(crate) fn place<M>(&self, model: &mut Model<M>) -> Result<bool> {
        model.check_trainable()?;
        if model.device() != self.job.device {
            let moved = model.to_device(self.job.device);
            self.job.explain_memory(MOVE_OF_MODEL, moved)?;
        }
        // Rows of shards must be contiguous.
        let channels_last =
            self.sharded.is_none() && memory_format::channels_last(model, &self.numerics);
        if channels_last {
            model.to_channels_last()?;
        }
        Ok(channels_last)
    }

    /// Returns all ranks of the job, including those with other samples, parts of layers or stages.
    pub(crate) fn everyone(&self) -> Processes {
        match (&self.pipeline, &self.tensor) {
            (Some(pipeline), _) => pipeline.everyone().clone(),
            (None, Some(tensor)) => tensor.everyone().clone(),
            (None, None) => Processes::of(Arc::clone(&self.job)),
        }
    }

    /// Makes the reducer of the parameters that are trained now, with its hook and loss check. All ranks take part.
    fn reduce<M>(&self, model: &Model<M>) -> Result<Reduction> {
        let Some(group) = self.job.group().filter(|_| self.sharded.is_none()) else {
            return Ok(Reduction::default());
        };
        let mut frozen = model.parameters();
        frozen.retain(|parameter| !parameter.tensor.requires_grad());
        if self.pipeline.is_some() {
            return Ok(Reduction { frozen, ..Reduction::default() });
        }
        let divided = expert_parts(model);
        let (experts, trained): (Vec<_>, Vec<_>) =
            model.trainable_parameters().into_iter().partition(|it| divided.contains(&it.name));
        let options = &self.options.reducer;
        let copies = self.tensor.as_ref().and_then(|tensor| tensor.copies());
        let experts = match copies.filter(|_| !experts.is_empty()) {
            Some(copies) => Some(Reducer::new(copies, &named(experts), &[], options.clone())?),
            None => None,
        };
        if trained.is_empty() {
            return Ok(Reduction { experts, frozen, ..Reduction::default() });
        }
        let buffers = named(model.buffers());
        let reducer = Reducer::new(&group, &named(handles(&trained)), &buffers, options.clone())?;
        let hook = self.options.comm_hook.install(&reducer, &trained)?;
        let checked = match &self.loss_check {
            Some(check) => Some(check.watch_model(&trained, hook.clone())?),
            None => None,
        };
        Ok(Reduction { reducer: Some(reducer), experts, hook, checked, frozen })
    }

    /// Replaces parameters by those of the first rank that has the same ones.
    fn broadcast_values<M>(
        &self,
        model: &Model<M>,
        parameters: &[NamedTensor],
        group: &ProcessGroup,
    ) -> Result<()> {
        let divided = expert_parts(model);
        let (experts, others): (Vec<_>, Vec<_>) =
            handles(parameters).into_iter().partition(|it| divided.contains(&it.name));
        if let Some(copies) = self.tensor.as_ref().and_then(|tensor| tensor.copies()) {
            broadcast_all(copies, &experts)?;
        }
        broadcast_all(group, &others)
    }
}

impl<M> PreparedModel<M> {
    /// Prepares a model that is on its device. All ranks take part.
    pub(crate) fn new(mut model: Model<M>, context: ModelContext) -> Result<Self> {
        let group = context.job.group();
        match &context.tensor {
            Some(tensor) => tensor.check(&model)?,
            None => check_whole(&model)?,
        }
        if let Some(context) = &context.context {
            context.check(&model)?;
        }
        match &context.pipeline {
            Some(pipeline) => pipeline.check(&model)?,
            None => check_all_stages(&model)?,
        }
        if context.options.sync_batch_norm {
            match (&group, &context.pipeline) {
                (Some(group), _) => drop(model.convert_sync_batch_norm(group)),
                // Statistics of the only rank that has this stage.
                (None, Some(pipeline)) if model.unshared_batch_norm().is_some() => {
                    model.convert_sync_batch_norm(&pipeline.alone()?);
                }
                _ => {}
            }
        }
        let sharded = match &context.sharded {
            Some(models) if !model.parameters().is_empty() => {
                let sharded = context.shard(&mut model, models);
                Some(context.job.explain_memory(MOVE_OF_MODEL, sharded)?)
            }
            _ => {
                let values = model.materialize();
                context.job.explain_memory(MOVE_OF_MODEL, values)?;
                None
            }
        };
        let reduction = context.reduce(&model)?;
        if let (Some(group), None) = (&group, &sharded) {
            // Frozen parameters are broadcast like buffers at the start, but not again.
            context.broadcast_values(&model, &reduction.frozen, group)?;
            if context.pipeline.is_some() {
                context.broadcast_values(&model, &model.trainable_parameters(), group)?;
            }
            if reduction.reducer.is_none() {
                broadcast_all(group, &model.buffers())?;
            }
        }
        let tensor = match &context.tensor {
            Some(tensor) => {
                let stepped = match &sharded {
                    Some(sharded) => sharded.shards(),
                    None => model.parameters(),
                };
                let divided = tensor.add(&model, &stepped, sharded.is_some())?;
                // Ranks with other experts have other rows of everything else, whose values are already equal.
                if let Some(layers) = tensor.layers() {
                    let mut whole = stepped;
                    whole.retain(|it| !divided.is_part(&it.tensor));
                    whole.extend(model.buffers());
                    broadcast_all(layers, &whole)?;
                    sharded.iter().try_for_each(|it| it.sharder().shards_changed())?;
                }
                context
                    .registry
                    .optimizers()
                    .iter()
                    .try_for_each(|optimizer| tensor.check_optimizer(optimizer))?;
                Some(divided)
            }
            None => None,
        };
        let stage = match &context.pipeline {
            Some(pipeline) => {
                let stepped = sharded.as_ref().map_or_else(|| model.parameters(), |it| it.shards());
                let stage = pipeline.add(&model, &stepped)?;
                sharded.iter().try_for_each(|it| it.sharder().shards_changed())?;
                Some(stage)
            }
            None => None,
        };
        let inner = ModelInner::new(&model, reduction.hook.clone(), sharded.clone(), tensor);
        let inner = Arc::new(inner);
        context.registry.register(&inner);
        Ok(Self { model, reduction, sharded, inner, context, _stage: stage })
    }

    /// Computes the model's output with the Accelerator's mixed precision; outputs of 16 bits are converted to float32
    /// unless the builder disables that. In training, rank 0's buffers (BatchNorm's statistics) are sent to all ranks
    /// before each forward.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone, or when the last backward did not reach every
    /// parameter (see `find_unused_parameters` in [`brigade_torch::ReducerOptions`]).
    ///
    /// [`brigade_torch::ErrorKind::Model`] when the input does not fit, with the layer's name. The other ranks fail
    /// when this one exits.
    ///
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when gradients are enabled and a parameter that was frozen at
    /// `prepare` has been unfrozen since: its gradients would not be averaged over the ranks.
    #[track_caller]
    pub fn forward<Input>(&self, input: Input) -> Result<M::Output>
    where
        M: Module<Input>,
        M::Output: TensorTree<Owned = M::Output>,
    {
        if grad_enabled() {
            self.check_frozen()?;
        }
        // In a pipeline's step the parameters are already whole, so units need not gather them.
        if let Some(sharded) = self.sharded.as_ref().filter(|_| self.context.pipeline.is_none()) {
            return self.sharded_forward(sharded, input);
        }
        let Reduction { reducer, experts, .. } = &self.reduction;
        let reducers = || reducer.iter().chain(experts);
        if reducers().next().is_none() {
            return self.computed(input);
        }
        let sync = self.inner.sync.load(Ordering::Relaxed);
        // In evaluation the buffers are not changed: they are sent once after the last training step, and not at all in
        // evaluations with unequal numbers of batches.
        if grad_enabled() || self.inner.buffers_differ.load(Ordering::Relaxed) {
            reducers().try_for_each(|reducer| reducer.before_forward(sync))?;
            self.inner.buffers_differ.store(false, Ordering::Relaxed);
        }
        let output = self.computed(input)?;
        if self.model.is_training() {
            self.inner.buffers_differ.store(true, Ordering::Relaxed);
        }
        if grad_enabled()
            && let Some(checked) = &self.reduction.checked
        {
            checked.set_reduces(sync);
        }
        reducers().try_fold(output, |output, reducer| reducer.after_forward(output, sync))
    }

    /// Sends rank 0's buffers (BatchNorm's statistics) to all ranks, if a forward in training has changed them since
    /// they were last sent. The first forward of an evaluation does this as well. Call this method before an evaluation
    /// in which some ranks may have no batch. Every rank must call it.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn broadcast_buffers(&self) -> Result<()> {
        if self.sharded.is_some() {
            return self.send_buffers();
        }
        if let (Some(reducer), true) =
            (&self.reduction.reducer, self.inner.buffers_differ.load(Ordering::Relaxed))
        {
            tch::no_grad(|| reducer.before_forward(true))?;
            self.inner.buffers_differ.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Compares the frozen parameters with those at the time of `prepare`. Costs nothing for a model without frozen
    /// parameters.
    fn check_frozen(&self) -> Result<()> {
        let mut frozen = self.reduction.frozen.iter();
        let thawed = match &self.sharded {
            Some(sharded) => sharded.thawed(),
            None => frozen.find(|it| it.tensor.requires_grad()).map(|it| it.name.clone()),
        };
        match thawed {
            None => Ok(()),
            Some(name) => Err(Error::invalid_argument(format!(
                "parameter {name:?} was frozen when the model was prepared and is trained now: its gradient \
                 would not be averaged over the ranks. Freeze it again, and call `set_trainable` of the \
                 prepared model instead"
            ))),
        }
    }

    /// Runs the model itself, with the Accelerator's precision.
    fn computed<Input>(&self, input: Input) -> Result<M::Output>
    where
        M: Module<Input>,
        M::Output: TensorTree<Owned = M::Output>,
    {
        self.computed_by(|| self.model.forward(input))
    }

    /// Runs a forward with the Accelerator's precision.
    fn computed_by<T>(&self, forward: impl FnOnce() -> Result<T>) -> Result<T>
    where
        T: TensorTree<Owned = T>,
    {
        // Weights of units are gathered in 16 bits. A cast of one that is not would outlive its unit.
        let keeps_casts = self
            .sharder()
            .is_none_or(|sharder| sharder.plan().sharding().strategy.keeps_parameters_whole());
        let scope = self.context.numerics.scope(self.model.device(), keeps_casts)?;
        let output = forward();
        drop(scope);
        let outputs = output.and_then(|output| self.context.numerics.outputs(output));
        self.context.job.explain_memory("the forward pass", outputs)
    }

    /// Switches to training mode: dropout is active, batch norms use the statistics of the batch.
    pub fn train(&mut self) {
        self.model.train();
    }

    /// Switches to evaluation mode: dropout is inactive, batch norms use their running statistics.
    pub fn eval(&mut self) {
        self.model.eval();
    }

    /// Returns the model that was prepared, with its own parameter names (Accelerate's `unwrap_model`).
    #[must_use]
    pub fn inner(&self) -> &Model<M> {
        &self.model
    }

    /// Returns the model for changes. The parameters of a sharded model have no memory outside of
    /// [`PreparedModel::gathered_mut`]. The reducer keeps the parameters that it was made with: a replaced tensor is
    /// trained by this rank alone, and unfreezing a parameter makes the next forward fail; see
    /// [`PreparedModel::set_trainable`].
    pub fn inner_mut(&mut self) -> &mut Model<M> {
        &mut self.model
    }

    /// Returns the model itself, no longer prepared. The parameters of a sharded model have no memory: save its weights
    /// before.
    #[must_use]
    pub fn into_inner(self) -> Model<M> {
        self.model
    }

    /// Returns the reducer of the gradients. `None` with one rank, or if no parameter is trained.
    #[must_use]
    pub fn reducer(&self) -> Option<&Reducer> {
        self.reduction.reducer.as_ref()
    }

    /// Returns the sharder of a model whose parameters are sharded over ranks, which has the plan, the process groups
    /// and the gathered parameters. `None` for a model that is not sharded.
    #[must_use]
    pub fn sharder(&self) -> Option<&Arc<Sharder>> {
        self.sharded.as_ref().map(|sharded| sharded.sharder())
    }

    /// Returns the tensors that an optimizer steps, frozen ones included, under their names in order: this rank's
    /// shards of a sharded model, otherwise the parameters themselves. A program that writes into shards calls
    /// [`Sharder::shards_changed`] afterwards.
    #[must_use]
    pub fn local_parameters(&self) -> Vec<NamedTensor> {
        match &self.sharded {
            Some(sharded) => sharded.shards(),
            None => self.model.parameters(),
        }
    }

    /// Returns all ranks of the job, including those that have other parts or stages of the model.
    pub(crate) fn everyone(&self) -> Processes {
        self.context.everyone()
    }

    /// Returns the tensors to which a pipeline's step adds gradients.
    pub(crate) fn stepped(&self) -> Stepped<'_> {
        Stepped {
            tensors: self.trainable_parameters(),
            sharder: self.sharded.as_ref().map(|it| &**it.sharder()),
            common: self
                .context
                .tensor
                .as_ref()
                .filter(|divided| divided.divides_experts())
                .and_then(|_| self.context.job.group()),
        }
    }

    /// Returns the ranks with stages of models, if there are some.
    pub(crate) fn pipeline(&self) -> Option<&PipelineRanks> {
        self.context.pipeline.as_deref()
    }

    /// Replaces parameters and buffers that all ranks have whole by rank 0's.
    pub(crate) fn broadcast_values(&self) -> Result<()> {
        let Some(group) = self.context.job.group() else { return Ok(()) };
        broadcast_all(&group, &self.model.parameters())?;
        broadcast_all(&group, &self.model.buffers())
    }

    fn hook_state(&self) -> Option<&dyn StatefulHook> {
        self.reduction.hook.as_deref()
    }
}

impl<M> PreparedModels for PreparedModel<M> {
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
        f(&self.inner.sync);
    }

    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
        for parameter in self.trainable_parameters() {
            f(&parameter.tensor);
        }
    }

    fn each_sharder(&self, f: &mut dyn FnMut(&Sharder)) {
        if let Some(sharded) = &self.sharded {
            f(sharded.sharder());
        }
    }

    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
        if let Some(reducer) = &self.reduction.reducer {
            f(Joining { reducer, checked: self.reduction.checked.as_deref() });
        }
    }
}

impl<M> fmt::Debug for PreparedModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedModel")
            .field("parameters", &self.model.num_parameters())
            .field("reducer", &self.reduction.reducer)
            .finish_non_exhaustive()
    }
}

impl ModelInner {
    fn new<M>(
        model: &Model<M>,
        hook: Option<Arc<dyn StatefulHook>>,
        sharded: Option<Arc<ShardedModel>>,
        tensor: Option<Arc<DividedModel>>,
    ) -> Self {
        Self {
            state: Mutex::new(ModelState::new(model, hook, sharded, tensor)),
            sync: AtomicBool::new(true),
            buffers_differ: AtomicBool::new(true),
        }
    }

    /// Rebuilds the state after a change of the trained parameters or of the hook.
    fn replace_state<M>(&self, model: &Model<M>, hook: Option<Arc<dyn StatefulHook>>) {
        let mut state = self.state.lock();
        let (sharded, tensor) = (state.sharded.take(), state.tensor.take());
        *state = ModelState::new(model, hook, sharded, tensor);
    }
}

impl ModelState {
    fn new<M>(
        model: &Model<M>,
        hook: Option<Arc<dyn StatefulHook>>,
        sharded: Option<Arc<ShardedModel>>,
        tensor: Option<Arc<DividedModel>>,
    ) -> Self {
        let names = |tensors: Vec<NamedTensor>| -> HashSet<String> {
            tensors.into_iter().map(|tensor| tensor.name).collect()
        };
        let (trained, buffers) = (model.trainable_parameters(), names(model.buffers()));
        let tensors = model.state_dict().into_iter().map(|(name, detached)| {
            if let Some(tensor) = sharded.as_ref().and_then(|it| it.shard(&name)) {
                // The gradient of a tied parameter is listed once.
                let is_first = model.parameter_name(&name).is_none_or(|first| first == name);
                let trained = tensor.requires_grad() && is_first;
                return ModelTensor { name, tensor, trained, buffer: false };
            }
            // The parameter itself if it is trained, because it has the gradient.
            let parameter = trained.iter().find(|parameter| parameter.name == name);
            let tensor = parameter.map_or(detached, |p| p.tensor.shallow_clone());
            let (trained, buffer) = (parameter.is_some(), buffers.contains(&name));
            ModelTensor { name, tensor, trained, buffer }
        });
        Self { tensors: tensors.collect(), hook, sharded, tensor }
    }
}

impl Stateful for ModelInner {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let state = self.state.lock();
        let detached =
            state.tensors.iter().map(|saved| Ok((&*saved.name, saved.tensor.f_detach()?)));
        let detached: Vec<_> = detached.collect::<Result<_>>()?;
        Ok(Value::dict(detached.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor)))))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let here = self.state.lock();
        for saved in &here.tensors {
            let found = state.get(&saved.name).and_then(Value::as_tensor);
            let found = found.ok_or_else(|| format!("it lacks `{}`", saved.name))?;
            same_shape(&saved.name, &saved.tensor, found)?;
        }
        let known = |name: &str| here.tensors.iter().any(|saved| saved.name == name);
        let mut names = state.as_dict().unwrap_or_default().iter().filter_map(|it| it.0.as_str());
        let unknown = names.find(|name| !known(name));
        unknown.map_or(Ok(()), |name| Err(format!("it has `{name}`, which the model lacks")))
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.check_state_dict(&infos(state)?).map_err(mismatch)?;
        for saved in &self.state.lock().tensors {
            if let Some(found) = state.get(&saved.name).and_then(Value::as_tensor) {
                saved.tensor.f_detach()?.f_copy_(found)?;
            }
        }
        Ok(())
    }
}

impl Checkpointed for ModelInner {
    fn kind(&self) -> Kind {
        Kind::Model
    }

    fn tensors(&self) -> Option<Vec<ModelTensor>> {
        let handle = |saved: &ModelTensor| ModelTensor {
            name: saved.name.clone(),
            tensor: saved.tensor.shallow_clone(),
            ..*saved
        };
        Some(self.state.lock().tensors.iter().map(handle).collect())
    }

    fn hook(&self) -> Option<Arc<dyn StatefulHook>> {
        self.state.lock().hook.clone()
    }

    fn parts(&self) -> HashMap<String, Part> {
        let state = self.state.lock();
        let rows = state.sharded.iter().flat_map(|sharded| sharded.parts());
        let parts = state.tensor.iter().flat_map(|tensor| tensor.parts().clone());
        rows.chain(parts).collect()
    }

    fn loaded(&self) -> Result<()> {
        let sharded = self.state.lock().sharded.clone();
        sharded.map_or(Ok(()), |sharded| sharded.sharder().shards_changed())
    }
}

impl<M> Trainable for PreparedModel<M> {
    /// Returns the tensors that an optimizer steps: for a sharded model, its shards.
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        match &self.sharded {
            Some(sharded) => {
                let mut shards = sharded.shards();
                shards.retain(|shard| shard.tensor.requires_grad());
                shards
            }
            None => self.model.trainable_parameters(),
        }
    }
}

stateful_handle!(
    /// Saves the parameters and saved buffers under their names. A load copies into them in place.
    [<M>] PreparedModel<M>, inner
);

impl<M> From<&Model<M>> for CheckpointObject {
    fn from(model: &Model<M>) -> Self {
        Self(Arc::new(ModelInner::new(model, None, None, None)))
    }
}

fn named(tensors: Vec<NamedTensor>) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|named| (named.name, named.tensor)).collect()
}

fn handles(tensors: &[NamedTensor]) -> Vec<NamedTensor> {
    let handle = |named: &NamedTensor| NamedTensor {
        name: named.name.clone(),
        tensor: named.tensor.shallow_clone(),
    };
    tensors.iter().map(handle).collect()
}

/// Fails for a model of which ranks have parts, if the Accelerator has no tensor group.
fn check_whole<M>(model: &Model<M>) -> Result<()> {
    match model.divided_parameters().first() {
        None => Ok(()),
        Some(divided) => Err(Error::invalid_argument(format!(
            "this rank has a part of `{}` and the Accelerator's ranks do not divide layers: give the Accelerator a \
             mesh with tensor ranks, and build the model by its `parallel().model`",
            divided.name
        ))),
    }
}

/// Fails for a model of which this rank has some stages, if the Accelerator has no pipeline.
fn check_all_stages<M>(model: &Model<M>) -> Result<()> {
    match model.pipeline().filter(|it| it.stage_ranks().iter().any(|rank| *rank != it.rank())) {
        None => Ok(()),
        Some(stages) => Err(Error::invalid_argument(format!(
            "this rank has some of {} stages of the model and the Accelerator's ranks have no stages: give the Accelerator a \
             mesh with pipeline ranks, and build the model by its `parallel().model`",
            stages.stages()
        ))),
    }
}

/// Replaces tensors by rank 0's.
fn broadcast_all(group: &ProcessGroup, tensors: &[NamedTensor]) -> Result<()> {
    let detached = tensors
        .iter()
        .map(|named| named.tensor.f_detach())
        .collect::<std::result::Result<Vec<_>, _>>()?;
    if !detached.is_empty() {
        let borrowed: Vec<&Tensor> = detached.iter().collect();
        group.broadcast_coalesced(&borrowed, BROADCAST_BYTES, 0)?;
    }
    Ok(())
}
