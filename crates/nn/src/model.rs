//! A module together with its parameters and buffers.

mod conversion;
mod dispatch;
mod divided;
mod load;
mod materialize;
mod parts;
mod quantize;
mod recording;
mod shard;
mod stages;

use conversion::{Conversion, exchange_memory};
use dispatch::Dispatched;
pub use divided::DividedParameter;
pub(crate) use load::Shapes;
pub use parts::NamedGroup;
pub(crate) use parts::is_under;
use stages::Cut;

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use brigade_torch::{
    DeviceExt, NamedTensor, ProcessGroup, Result, TensorId, Trainable, make_products_reproducible,
};
use tch::{Device, Kind, TchError, Tensor};

use crate::deferred::DeferredValues;
use crate::error::ModelError;
use crate::hooks::Hooks;
use crate::param_path::is_floating_point;
use crate::param_registry::{Entry, ParamRegistry, Role};
use crate::quantized::Quantizable;
use crate::shared_statistics::SharedStatistics;
use crate::{
    ContextParallel, ExpertParallel, LayerWeights, Module, ParamPath, PipelineParallel,
    PipelineStages, TensorParallel, Training, Unit,
};

/// A model: a module `M` with its registered parameters and buffers, which are optimized, averaged over the ranks, and
/// saved.
///
/// ```
/// use brigade_nn::{Linear, Model};
/// use tch::{Kind, Tensor};
///
/// let mut model = Model::new(|p| Linear::new(p / "head", 784, 10))?;
/// let images = Tensor::zeros([8, 784], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [8, 10]);
/// model.eval();
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// model.save_weights("model.safetensors")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Model<M> {
    module: M,
    entries: Vec<Entry>,
    training: Training,
    held: Vec<(String, Training)>,
    statistics: SharedStatistics,
    pub(crate) hooks: Hooks,
    pub(crate) layers: Vec<String>,
    units: Vec<(String, Unit)>,
    layer_weights: Vec<(String, LayerWeights)>,
    pub(crate) norms: HashSet<String>,
    pub(crate) adopted: HashSet<String>,
    pub(crate) tensor: Option<TensorParallel>,
    context: Option<ContextParallel>,
    experts: Option<ExpertParallel>,
    /// Names of parameters of which each rank has only some experts.
    expert_parameters: HashSet<String>,
    /// `true` if a module takes its part of sequences.
    divides_sequences: bool,
    batch_norms: Vec<String>,
    /// Division of the model into the stages of a pipeline.
    stages: Option<PipelineStages>,
    /// Entries of other stages. Their tensors have no memory; layers read their types.
    elsewhere: Vec<Entry>,
    device: Device,
    kind: Kind,
    quantizable: Vec<Quantizable>,
    /// `true` if the parameters are spread over ranks.
    is_sharded: bool,
    /// Placement of the weights by a device map.
    dispatched: Option<Dispatched>,
    /// Values of the parameters that have no memory yet.
    deferred: Option<DeferredValues>,
}

/// Builder of a [`Model`], from [`Model::builder`].
#[derive(Debug, Clone)]
#[must_use = "call build with a constructor"]
pub struct ModelBuilder {
    device: Device,
    kind: Kind,
    drawn: bool,
    is_deferred: bool,
    tensor: Option<TensorParallel>,
    context: Option<ContextParallel>,
    pipeline: Option<PipelineParallel>,
    experts: Option<ExpertParallel>,
}

impl Model<()> {
    /// Returns a builder with options of the model, such as its device and kind.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use tch::Kind;
    /// let model = Model::builder().kind(Kind::Double).build(|p| Linear::new(p, 4, 2))?;
    /// assert_eq!(model.parameters()[0].tensor.kind(), Kind::Double);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn builder() -> ModelBuilder {
        ModelBuilder {
            device: Device::Cpu,
            kind: Kind::Float,
            drawn: true,
            is_deferred: false,
            tensor: None,
            context: None,
            pipeline: None,
            experts: None,
        }
    }
}

impl ModelBuilder {
    /// Sets the device of the parameters. Defaults to the CPU. The initial values are the same on every device.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Sets the kind of the parameters and of floating-point buffers: `Float` (the default), `Double`, `Half` or
    /// `BFloat16`.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Sets parameters to 0 instead of drawing initial values, which takes seconds for a large model and is unnecessary
    /// if weights are loaded next.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// let mut model = Model::builder().without_first_values().build(|p| Linear::new(p, 4, 2))?;
    /// assert!(model.parameters()[0].tensor.eq(0.0).all().int64_value(&[]) == 1);
    /// # let folder = tempfile::tempdir()?;
    /// # std::env::set_current_dir(&folder)?;
    /// # model.save_weights("linear.safetensors")?;
    /// model.load_weights("linear.safetensors")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn without_first_values(mut self) -> Self {
        self.drawn = false;
        self
    }

    /// Creates parameters that have shapes but no memory; see [`Model::deferred`].
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use tch::Kind;
    ///
    /// let mut model = Model::builder().kind(Kind::Half).deferred().build(|p| Linear::new(p, 4, 2))?;
    /// assert!(model.is_deferred());
    /// model.materialize()?;
    /// assert_eq!(model.parameters()[0].tensor.kind(), Kind::Half);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn deferred(mut self) -> Self {
        self.is_deferred = true;
        self
    }

    /// Divides the layers that the plan contains over the ranks of a group (tensor parallelism): each rank has a part
    /// of their weights, and computes with it. Constructors, names, initial values and files are those of the undivided
    /// model.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential, TensorParallel};
    /// use brigade_sharding::TensorPlan;
    ///
    /// let plan = TensorPlan::new().column("0.weight").row("2.weight");
    /// let ranks = group.size() as i64;
    /// let model = Model::builder().tensor_parallel(TensorParallel { group: Some(group), plan }).build(|path: &ParamPath| {
    ///     Sequential::new().add(Linear::new(path / 0, 4, 8)).add(Relu).add(Linear::new(path / 2, 8, 4))
    /// })?;
    /// assert_eq!(model.tensor("0.weight").unwrap().size(), [8 / ranks, 4]);
    /// assert_eq!(model.tensor("2.weight").unwrap().size(), [4, 8 / ranks]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn tensor_parallel(mut self, tensor: TensorParallel) -> Self {
        self.tensor = Some(tensor);
        self
    }

    /// Divides every sequence over the ranks of a group (context parallelism): each rank computes a part, and modules
    /// get the group by [`ParamPath::context`].
    ///
    /// ```
    /// use brigade_nn::{ContextParallel, Model};
    /// use brigade_sharding::ContextMethod;
    ///
    /// // With several ranks `Some(group)`.
    /// let context = ContextParallel { group: None, method: ContextMethod::Ring };
    /// let model = Model::builder().context_parallel(context).build(|path| path.context())?;
    /// assert_eq!(model.module().method(), ContextMethod::Ring);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn context_parallel(mut self, context: ContextParallel) -> Self {
        self.context = Some(context);
        self
    }

    /// Restricts the model to the parameters of this rank's pipeline stages: those of their blocks
    /// ([`ParamPath::stages`]); for the first stage also the layers before the blocks, for the last stage also the
    /// layers after them. Names, initial values and files are those of the whole model. A parameter that is tied
    /// between two stages is on both.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath, PipelineParallel, Relu, Sequential, StageCut};
    ///
    /// let constructor = |path: &ParamPath| {
    ///     let layers = Sequential::new().add(Linear::new(path / 0, 4, 8)).add(Relu).add(Linear::new(path / 2, 8, 2));
    ///     layers.in_stages(path.stages(0..3))
    /// };
    /// let pipeline = PipelineParallel { stage_ranks: vec![0, 1], rank: 1, cut: StageCut::Even };
    /// let model = Model::builder().pipeline(pipeline).build(constructor)?;
    /// assert_eq!(model.parameters()[0].name, "2.weight");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn pipeline(mut self, pipeline: PipelineParallel) -> Self {
        self.pipeline = Some(pipeline);
        self
    }

    /// Divides the experts of each [`Experts`](crate::Experts) over the ranks of a group, in ranges of equal size
    /// (expert parallelism): tokens are sent to the ranks that have their experts. Constructors, names, initial values
    /// and files are those of the model with all experts.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_nn::{ExpertParallel, Experts, ExpertsOptions, Model};
    ///
    /// let ranks = group.size() as i64;
    /// let experts = ExpertParallel { group: Some(group) };
    /// let model = Model::builder().expert_parallel(experts).build(|path| {
    ///     Experts::new(path, 8, 16, ExpertsOptions { experts: 4, ..Default::default() })
    /// })?;
    /// assert_eq!(model.tensor("experts.down_proj").unwrap().size(), [4 / ranks, 8, 16]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn expert_parallel(mut self, experts: ExpertParallel) -> Self {
        self.experts = Some(experts);
        self
    }

    /// Returns `true` if [`ModelBuilder::deferred`] was called.
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.is_deferred
    }

    /// Builds the model: runs the constructor and creates its parameters.
    ///
    /// # Errors
    /// [`crate::ModelError::Build`] with all invalid requests of the constructor: names that are used twice, impossible
    /// shapes, a lack of memory. [`crate::ModelError::NotFloatingPoint`] for a kind without gradients,
    /// [`crate::ModelError::Torch`] if the device fails.
    pub fn build<M>(self, constructor: impl FnOnce(&ParamPath<'_>) -> M) -> Result<Model<M>> {
        if !is_floating_point(self.kind) {
            return Err(ModelError::NotFloatingPoint { kind: self.kind }.into());
        }
        // Initial values use MKL's vector functions, and it takes the setting only before its first use.
        let _ = make_products_reproducible();
        // Parameters of other stages are not allocated.
        let is_deferred = self.is_deferred || self.pipeline.is_some();
        let registry =
            RefCell::new(ParamRegistry::new(self.kind, self.drawn, is_deferred, self.tensor));
        registry.borrow_mut().context = self.context;
        registry.borrow_mut().divide_experts(self.experts);
        let module = constructor(&ParamPath::root(&registry));
        registry.borrow_mut().check_plan();
        let ParamRegistry {
            entries,
            mut problems,
            training,
            held,
            statistics,
            hooks,
            layers,
            units,
            layer_weights,
            norms,
            adopted,
            tensor,
            context,
            experts,
            expert_parameters,
            divides_sequences,
            draws,
            rows,
            batch_norms,
            quantizable,
            ..
        } = registry.into_inner();
        let cut = match self.pipeline {
            Some(pipeline) => match Cut::new(pipeline, rows, entries) {
                Ok(cut) => cut,
                Err(problem) => {
                    problems.push(problem);
                    Cut::default()
                }
            },
            None => Cut { entries, ..Cut::default() },
        };
        if !problems.is_empty() {
            return Err(ModelError::Build { problems }.into());
        }
        let mut model = Model {
            module,
            entries: cut.entries,
            training,
            held,
            statistics,
            hooks,
            layers,
            units,
            layer_weights,
            norms,
            adopted,
            tensor,
            context,
            experts,
            expert_parameters,
            divides_sequences,
            batch_norms,
            stages: cut.stages,
            elsewhere: cut.elsewhere,
            quantizable,
            device: self.device,
            kind: self.kind,
            is_sharded: false,
            dispatched: None,
            deferred: draws.map(DeferredValues::new).transpose()?,
        };
        if let Some(values) = &mut model.deferred {
            model.elsewhere.iter().for_each(|it| values.keep(TensorId::of(&it.tensor)));
        }
        let elsewhere = |entry: &Entry| entry.tensor.device() != self.device;
        if model.entries.iter().any(elsewhere) {
            model.to_device(self.device)?;
        }
        if !self.is_deferred {
            model.materialize()?;
        }
        Ok(model)
    }
}

impl<M> Model<M> {
    /// Builds a model in 32-bit floats on the CPU: runs the constructor and creates its parameters. [`Model::builder`]
    /// has options.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// let model = Model::new(|p| Linear::new(p, 784, 10))?;
    /// assert_eq!(model.num_parameters(), 7850);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`ModelBuilder::build`].
    pub fn new(constructor: impl FnOnce(&ParamPath<'_>) -> M) -> Result<Self> {
        Model::builder().build(constructor)
    }

    /// Builds a model whose parameters have names, shapes and types but no memory; optimizers can be built for them.
    /// [`brigade_train`'s `prepare`] allocates the parameters, on each rank its part of them, so that a model can be
    /// larger than the memory of a device (PyTorch's `torch.device("meta")` and `to_empty`). Buffers have memory.
    ///
    /// At that time initial values are drawn, one parameter at a time. They are those that [`Model::new`] draws for the
    /// same seed, whatever was drawn in between. Alternatively values are read from the file that
    /// [`Model::load_weights`] was called with. Numbers that the constructor draws by itself, outside of
    /// [`ParamPath::parameter_with`] and [`ParamPath::redraw`], are drawn before all others. For options use
    /// [`ModelBuilder::deferred`].
    ///
    /// [`brigade_train`'s `prepare`]: https://docs.rs/brigade-train
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    ///
    /// tch::manual_seed(1);
    /// let mut model = Model::deferred(|p| Linear::new(p, 4, 2))?;
    /// let error = model.parameters()[0].tensor.f_norm().unwrap_err().to_string();
    /// assert!(error.contains("parameter `weight` has no memory yet"));
    /// model.materialize()?;
    ///
    /// tch::manual_seed(1);
    /// let other = Model::new(|p| Linear::new(p, 4, 2))?;
    /// assert_eq!(model.parameters()[0].tensor, other.parameters()[0].tensor);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`ModelBuilder::build`].
    pub fn deferred(constructor: impl FnOnce(&ParamPath<'_>) -> M) -> Result<Self> {
        Model::builder().deferred().build(constructor)
    }

    /// Returns the module's output for this input.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use tch::{Kind, Tensor};
    /// let model = Model::new(|p| Linear::new(p / "head", 784, 10))?;
    /// let images = Tensor::zeros([8, 28], (Kind::Float, model.device()));
    /// let error = model.forward(&images).unwrap_err().to_string();
    /// assert!(error.starts_with("head cannot take an input of [8, 28]: mat1 and mat2 shapes"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of the module: [`crate::ModelError::Layer`] and [`crate::ModelError::Input`] for an invalid
    /// input, [`brigade_torch::ErrorKind::Tensor`] for an operation outside of layers,
    /// [`brigade_torch::ErrorKind::Communication`] if a normalisation could not share its statistics.
    /// [`crate::ModelError::Panicked`] with the message of a panic.
    pub fn forward<Input>(&self, input: Input) -> Result<M::Output>
    where
        M: Module<Input>,
    {
        self.check_values("forward")?;
        let _held = self.hold_root()?;
        match catch_unwind(AssertUnwindSafe(|| self.module.forward(input))) {
            Ok(output) => output,
            Err(panic) => match text_of(panic.as_ref()) {
                Some(message) => Err(ModelError::Panicked { message }.into()),
                // A payload without a text is meant for another `catch_unwind`.
                None => resume_unwind(panic),
            },
        }
    }

    /// Makes every [`crate::BatchNorm1d`] and [`crate::BatchNorm2d`] of the model use the statistics of all ranks of
    /// the group together in training, as if one process had the whole batch
    /// ([torch.nn.SyncBatchNorm](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html)). Batches
    /// may be unequal. Evaluation, parameters, buffers and names do not change; with a group of one rank nothing
    /// changes. Returns the number of such layers.
    ///
    /// Forward and backward become collectives: every rank runs the same layers.
    pub fn convert_sync_batch_norm(&mut self, group: &ProcessGroup) -> usize {
        self.statistics.share(group)
    }

    /// Returns the wrapped module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the kind of the parameters.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Switches to training mode: dropout is active, batch norms use the statistics of the batch. New models are in
    /// this mode.
    pub fn train(&mut self) {
        self.training.set(true);
    }

    /// Switches to evaluation mode: dropout is inactive, batch norms use their running statistics.
    pub fn eval(&mut self) {
        self.training.set(false);
    }

    /// Keeps (`true`) the layer of this name and all layers below it in evaluation mode, even while the model is in
    /// training mode, or lets them follow the model again (`false`): like PyTorch's `model.layer1.eval()` after every
    /// `model.train()`. The normalisations of a frozen body then use their running statistics without changing them,
    /// and its dropouts are inactive. Returns the number of affected layers, counting only normalisations and dropouts.
    ///
    /// Freezing alone ([`Model::requires_grad_under`]) does not stop the update of running statistics, as in PyTorch.
    ///
    /// ```
    /// use brigade_nn::{BatchNorm2d, Linear, Model, ParamPath};
    /// use tch::Kind;
    /// let mut model = Model::new(|p: &ParamPath| {
    ///     (BatchNorm2d::new(p / "body" / 0, 4), Linear::new(p / "head", 4, 2))
    /// })?;
    /// model.requires_grad_under("body", false)?;
    /// assert_eq!(model.hold_in_eval("body", true)?, 1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchParameter`] if no layer has this name.
    pub fn hold_in_eval(&mut self, prefix: &str, on: bool) -> Result<usize> {
        let chosen = self.held.iter().filter(|(name, _)| is_below(prefix, name));
        let count = chosen.inspect(|(_, training)| training.hold(on)).count();
        if count == 0 {
            let known = tops(self.held.iter().map(|(name, _)| name.as_str()));
            return Err(ModelError::NoSuchParameter { name: prefix.to_owned(), known }.into());
        }
        Ok(count)
    }

    /// Returns `true` if the model is in training mode: between [`Model::train`] and [`Model::eval`].
    pub fn is_training(&self) -> bool {
        self.training.is_on()
    }

    /// Returns every parameter once, in order of registration, including frozen ones.
    pub fn parameters(&self) -> Vec<NamedTensor> {
        self.named(|role| role == Role::Parameter)
    }

    /// Returns every parameter that is not frozen, once, in order of registration.
    pub fn trainable_parameters(&self) -> Vec<NamedTensor> {
        let mut parameters = self.parameters();
        parameters.retain(|parameter| parameter.tensor.requires_grad());
        parameters
    }

    /// Returns the name under which [`Model::parameters`] returns the parameter that is saved under `saved`: for a tied
    /// parameter, the first of its names. `None` for a buffer, and for an unknown name.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    ///
    /// let model = Model::new(|path| {
    ///     let first = Linear::new(path / "first", 4, 4);
    ///     (path / "second").tie("weight", first.weight());
    ///     first
    /// })?;
    /// assert_eq!(model.parameter_name("second.weight"), Some("first.weight"));
    /// assert_eq!(model.parameter_name("first.bias"), Some("first.bias"));
    /// assert_eq!(model.parameter_name("third"), None);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn parameter_name(&self, saved: &str) -> Option<&str> {
        let entry = self.entries.iter().find(|entry| entry.name == saved)?;
        match entry.role {
            Role::Parameter => Some(&entry.name),
            Role::SameAs(first) => Some(&self.entries.get(first)?.name),
            Role::Buffer { .. } => None,
        }
    }

    /// Returns the parameter or buffer of this name, as a handle of the model's own tensor. A tied parameter is found
    /// under each of its names. `None` for an unknown name.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    ///
    /// let model = Model::new(|path| Linear::new(path / "head", 4, 2))?;
    /// assert_eq!(model.tensor("head.weight").map(|weight| weight.size()), Some(vec![2, 4]));
    /// assert!(model.tensor("head").is_none());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        Some(entry.tensor.shallow_clone())
    }

    /// Returns every buffer, saved or not, in order of registration.
    pub fn buffers(&self) -> Vec<NamedTensor> {
        self.named(|role| matches!(role, Role::Buffer { .. }))
    }

    /// Sets whether a buffer is part of state dictionaries and weights files (PyTorch's `persistent`). For models from
    /// TorchScript files, which do not record it; PyTorch's `load_state_dict` is strict about names.
    ///
    /// ```
    /// use brigade_nn::{Model, ParamPath};
    /// use tch::Tensor;
    /// let mut model = Model::new(|p: &ParamPath| p.buffer("position_ids", &Tensor::from(0i64)))?;
    /// model.set_persistent("position_ids", false)?;
    /// assert!(model.state_dict().is_empty());
    /// assert_eq!(model.buffers().len(), 1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchBuffer`] if there is no such buffer.
    pub fn set_persistent(&mut self, buffer: &str, persistent: bool) -> Result<()> {
        let is_buffer = |entry: &Entry| matches!(entry.role, Role::Buffer { .. });
        match self.entries.iter_mut().find(|entry| is_buffer(entry) && entry.name == buffer) {
            Some(entry) => {
                entry.role = Role::Buffer { persistent };
                Ok(())
            }
            None => Err(ModelError::NoSuchBuffer {
                name: buffer.to_owned(),
                known: self.buffers().into_iter().map(|buffer| buffer.name).collect(),
            }
            .into()),
        }
    }

    /// Returns the number of values in all parameters. Shared parameters count once.
    pub fn num_parameters(&self) -> usize {
        self.distinct().filter(|e| e.role == Role::Parameter).map(|e| e.tensor.numel()).sum()
    }

    /// Freezes (`false`) or unfreezes (`true`) all parameters.
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] if libtorch fails.
    pub fn requires_grad(&mut self, on: bool) -> Result<()> {
        self.check_thaws(on)?;
        let parameters = self.entries.iter().filter(|entry| entry.role == Role::Parameter);
        for entry in parameters {
            set_requires_grad(entry, on)?;
        }
        Ok(())
    }

    /// Freezes (`false`) or unfreezes (`true`) the parameter of this name, or all parameters below it: `module1`
    /// matches `module1.0.weight` but not `module10.weight`. Returns their number.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath};
    /// let mut model = Model::new(|p: &ParamPath| {
    ///     (Linear::new(p / "body" / 0, 4, 4), Linear::new(p / "head", 4, 2))
    /// })?;
    /// assert_eq!(model.requires_grad_under("body", false)?, 2);
    /// assert_eq!(model.trainable_parameters().len(), 2);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::NoSuchParameter`] if there is no such parameter, because a misspelled name would otherwise
    /// have no effect.
    pub fn requires_grad_under(&mut self, prefix: &str, on: bool) -> Result<usize> {
        let count = self.requires_grad_where(|name| is_below(prefix, name), on)?;
        if count == 0 {
            let parameters = self.entries.iter().filter(|e| !matches!(e.role, Role::Buffer { .. }));
            let known = tops(parameters.map(|entry| entry.name.as_str()));
            return Err(ModelError::NoSuchParameter { name: prefix.to_owned(), known }.into());
        }
        Ok(count)
    }

    /// Freezes (`false`) or unfreezes (`true`) the parameters for whose names the function returns `true`. Returns
    /// their number.
    ///
    /// ```
    /// use brigade_nn::{BatchNorm2d, Conv2d, Model, ParamPath};
    /// let mut model = Model::new(|p: &ParamPath| {
    ///     (Conv2d::new(p / "conv1", 3, 8, [3, 3], Default::default()), BatchNorm2d::new(p / "bn1", 8))
    /// })?;
    /// assert_eq!(model.requires_grad_where(|name| name.contains("bn"), false)?, 2);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] if libtorch fails.
    pub fn requires_grad_where(
        &mut self,
        mut chosen: impl FnMut(&str) -> bool,
        on: bool,
    ) -> Result<usize> {
        self.check_thaws(on)?;
        let mut count = 0;
        for entry in &self.entries {
            let target = match entry.role {
                Role::Parameter => entry,
                Role::SameAs(first) => &self.entries[first],
                Role::Buffer { .. } => continue,
            };
            if chosen(&entry.name) {
                set_requires_grad(target, on)?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// Sets every gradient that exists to 0.
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] if libtorch fails.
    pub fn zero_grad(&mut self) -> Result<()> {
        for entry in self.distinct() {
            let mut gradient = entry.tensor.grad();
            if gradient.defined() {
                // Gradients that are views of a reducer's buckets cannot be detached in place, and have no history to
                // lose.
                let zero = || {
                    if gradient.requires_grad() {
                        gradient.f_detach_()?.f_zero_()
                    } else {
                        gradient.f_zero_()
                    }
                };
                tch::no_grad(zero)
                    .map(drop)
                    .map_err(ModelError::torch(format!("zero the gradient of {}", entry.name)))?;
            }
        }
        Ok(())
    }

    /// Moves parameters, their gradients and buffers to a device. The tensors are moved in place, so that layers,
    /// optimizers and other owners of handles use the moved ones, as with PyTorch's `module.to(device)`.
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] if the device does not exist or is out of memory. Tensors before the one in the
    /// message have already been moved then.
    pub fn to_device(&mut self, device: Device) -> Result<()> {
        device.load()?;
        self.convert(Conversion::Device(device))?;
        self.device = device;
        Ok(())
    }

    /// Converts parameters, their gradients and floating-point buffers to a kind. Integer buffers keep their kind.
    ///
    /// # Errors
    /// [`crate::ModelError::NotFloatingPoint`] for a kind without gradients. Also returns the errors of
    /// [`Model::to_device`].
    pub fn to_kind(&mut self, kind: Kind) -> Result<()> {
        if !is_floating_point(kind) {
            return Err(ModelError::NotFloatingPoint { kind }.into());
        }
        self.convert(Conversion::Kind(kind))?;
        self.kind = kind;
        Ok(())
    }

    /// Converts parameters of four dimensions (the weights of convolutions), and their gradients, to the channels-last
    /// memory format (`torch.channels_last`). Values, shapes and files stay the same; the outputs of convolutions have
    /// that format, too.
    ///
    /// # Errors
    /// Returns the same errors as [`Model::to_device`].
    pub fn to_channels_last(&mut self) -> Result<()> {
        self.convert(Conversion::ChannelsLast)
    }

    /// Fails if parameters of a model that is only for inference are to be trained.
    fn check_thaws(&self, on: bool) -> Result<()> {
        if on { self.check_not_dispatched("train the model") } else { Ok(()) }
    }

    fn named(&self, wanted: impl Fn(Role) -> bool) -> Vec<NamedTensor> {
        let wanted = self.distinct().filter(|entry| wanted(entry.role));
        wanted
            .map(|e| NamedTensor { name: e.name.clone(), tensor: e.tensor.shallow_clone() })
            .collect()
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns every tensor once.
    pub(crate) fn distinct(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !matches!(entry.role, Role::SameAs(_)))
    }

    fn saved(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.role != (Role::Buffer { persistent: false }))
    }

    /// Returns the names that other stages of a pipeline save.
    fn elsewhere_names(&self) -> impl Iterator<Item = &String> {
        let saved = |entry: &&Entry| entry.role != (Role::Buffer { persistent: false });
        self.elsewhere.iter().filter(saved).map(|entry| &entry.name)
    }

    /// Exchanges the memory of every tensor, which keeps its identity (`set_data`), so that all handles see the change.
    /// Tensors are converted one by one: a second copy of the whole model may not fit into memory.
    fn convert(&mut self, to: Conversion) -> Result<()> {
        self.check_not_dispatched(format_args!("move the model {to}"))?;
        if self.is_sharded {
            return Err(brigade_torch::Error::invalid_argument(format!(
                "cannot move the model {to}: its parameters are spread over ranks, whose shards would stay as they are; \
                 convert it before `prepare`"
            )));
        }
        let exchange = |entry: &Entry| -> std::result::Result<(), TchError> {
            let mut tensor = entry.tensor.shallow_clone();
            if let Some(slot) = self.quantized_slot(&entry.name) {
                return slot.convert(to, &mut tensor, &entry.name);
            }
            // Read before: libtorch compares a gradient with its tensor when it is requested.
            let gradient = tensor.grad();
            exchange_memory(&tensor, &to.of(&tensor.f_detach()?, &entry.name)?)?;
            if gradient.defined() {
                exchange_memory(&gradient, &to.of(&gradient.f_detach()?, &entry.name)?)?;
            }
            Ok(())
        };
        for entry in self.distinct().chain(&self.elsewhere) {
            tch::no_grad(|| exchange(entry)).map_err(|error| {
                let Entry { name, tensor, .. } = entry;
                let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
                let what = format!("{:?} {:?}, {bytes} bytes", tensor.kind(), tensor.size());
                ModelError::torch(format!("move {name} ({what}) {to}"))(error)
            })?;
        }
        Ok(())
    }
}

impl<M, Input> Module<Input> for Model<M>
where
    M: Module<Input>,
{
    type Output = M::Output;

    fn forward(&self, input: Input) -> Result<M::Output> {
        Self::forward(self, input)
    }
}

impl<M> Trainable for Model<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        Self::trainable_parameters(self)
    }

    fn check_trainable(&self) -> Result<()> {
        self.check_not_dispatched("train the model")?;
        self.check_not_quantized("an optimizer of the model")
    }
}

impl<M> fmt::Debug for Model<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("module", &std::any::type_name::<M>())
            .field("num_parameters", &self.num_parameters())
            .field("device", &self.device)
            .field("kind", &self.kind)
            .field("training", &self.is_training())
            .finish()
    }
}

/// Returns `true` if `name` is `prefix` or lies below it.
fn is_below(prefix: &str, name: &str) -> bool {
    prefix.is_empty()
        || name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the first components of names, each once.
fn tops<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut tops: Vec<String> = Vec::new();
    for top in names.filter_map(|name| name.split('.').next()) {
        if !tops.iter().any(|seen| seen == top) {
            tops.push(top.to_owned());
        }
    }
    tops
}

fn set_requires_grad(entry: &Entry, on: bool) -> Result<()> {
    Ok(entry
        .tensor
        .f_set_requires_grad(on)
        .map(drop)
        .map_err(ModelError::torch(format!("freeze or thaw {}", entry.name)))?)
}

/// Returns a panic's text. tch's operators panic with `Result::unwrap` of libtorch's error, of which only libtorch's
/// first line is returned; any other text is returned completely.
fn text_of(panic: &(dyn Any + Send)) -> Option<String> {
    const UNWRAPPED: &str = "called `Result::unwrap()` on an `Err` value: Torch(\"";
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied())?;
    let Some(reason) = text.strip_prefix(UNWRAPPED) else { return Some(text.to_owned()) };
    let first = reason.trim_end_matches("\")").split("\\n").next().unwrap_or_default();
    Some(first.replace("\\\"", "\"").replace("\\'", "'"))
}
