//! Registration of parameters and buffers in a constructor, under PyTorch's names.

mod divided;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Div;

use brigade_sharding::{TensorPart, TensorStyle};
use brigade_torch::{ProcessGroup, TensorId, unallocated};
use tch::{Device, Kind, TchError, Tensor};

use crate::deferred::{Draw, FirstValues, filled, no_memory};
use crate::layer_context::{LayerContext, shown};
use crate::param_registry::{Entry, ParamRegistry, Role};
use crate::pipeline::Row;
use crate::quantized::Quantizable;
use crate::shared_statistics::SharedStatistics;
use crate::tensor_parallel::taken;
use crate::{
    ContextRegion, Init, LayerWeights, QuantizedSlot, Stages, TensorParallel, TensorRegion,
    Training, Unit,
};

/// A path in the tree of parameter names: `path / "module1" / 0` contains `module1.0.weight`.
///
/// A path exists only while [`crate::Model`] runs the constructor, so that nothing can be registered later. Its methods
/// do not fail: an invalid request is recorded and returns a substitute tensor, and `Model::new` reports all invalid
/// requests together.
///
/// ```
/// use brigade_nn::{Init, Model, ParamPath};
/// use tch::Tensor;
///
/// let model = Model::new(|p: &ParamPath| {
///     let p = p / "block" / 0;
///     let _ = p.buffer("steps", &Tensor::from(0i64));
///     p.parameter("weight", &[2, 3], Init::Zeros)
/// })?;
/// let names: Vec<_> = model.state_dict().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["block.0.steps", "block.0.weight"]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ParamPath<'a> {
    registry: &'a RefCell<ParamRegistry>,
    prefix: String,
    /// `true` if every rank of a tensor group has all parameters below whole.
    is_replicated: bool,
}

impl<'a> ParamPath<'a> {
    pub(crate) fn root(registry: &'a RefCell<ParamRegistry>) -> Self {
        Self { registry, prefix: String::new(), is_replicated: false }
    }

    fn draw_later(&self, tensor: &Tensor, part: Option<TensorPart>, first_values: FirstValues) {
        if let (true, Some(draws)) = (tensor.defined(), &mut self.registry.borrow_mut().draws) {
            draws.push(Draw::new(tensor, part, first_values));
        }
    }

    /// Returns the path below this one. The step is a name or an index.
    #[must_use]
    pub fn join(&self, step: impl Display) -> Self {
        let step = step.to_string();
        let path = Self { prefix: self.full_name(&step), ..self.clone() };
        path.check_name(&step);
        path
    }

    /// Returns this path with tensor parallelism turned off: below it every rank of a tensor group has each parameter
    /// whole, whatever the plan contains. For a layer that cannot be divided, such as the projection to fewer key heads
    /// than there are ranks.
    #[must_use]
    pub fn replicated(&self) -> Self {
        Self { is_replicated: true, ..self.clone() }
    }

    /// Returns the number of ranks of the tensor group, over which layers are divided. 1 without tensor parallelism.
    #[must_use]
    pub fn tensor_ranks(&self) -> usize {
        self.registry.borrow().tensor.as_ref().map_or(1, TensorParallel::ranks)
    }

    /// Returns the tensor region, through which values enter and leave layers that are divided over the ranks of a
    /// tensor group.
    #[must_use]
    pub fn tensor_region(&self) -> TensorRegion {
        let registry = self.registry.borrow();
        registry.tensor.as_ref().map_or_else(TensorRegion::default, TensorRegion::of)
    }

    /// Returns the context region: the ranks that divide each sequence, for a module whose forward selects its part of
    /// it.
    #[must_use]
    pub fn context(&self) -> ContextRegion {
        let mut registry = self.registry.borrow_mut();
        registry.divides_sequences = true;
        registry.context.as_ref().map_or_else(ContextRegion::default, ContextRegion::new)
    }

    /// Returns the ranks that divide the experts, or `None` for a single rank.
    pub(crate) fn expert_group(&self) -> Option<ProcessGroup> {
        let registry = self.registry.borrow();
        let group = registry.experts.as_ref()?.group.as_ref()?;
        (group.size() > 1).then(|| group.clone())
    }

    /// Returns the division of a parameter and the ranks of it, or `None` if every rank has it whole.
    pub(crate) fn tensor_style(&self, name: &str) -> Option<(TensorStyle, ProcessGroup)> {
        let registry = self.registry.borrow();
        let tensor = registry.tensor.as_ref()?;
        let group =
            tensor.group.as_ref().filter(|group| group.size() > 1 && !self.is_replicated)?;
        let style = tensor.plan.style(&self.full_name(name))?.clone();
        Some((style, group.clone()))
    }

    /// Returns the dotted name of this path, empty at the root.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.prefix
    }

    /// Registers that the layer at this path can compute with its weight `[out, in]` (or `[in, out]` if
    /// `is_transposed`) when it is quantised. The weight is a parameter of this path.
    #[must_use]
    pub fn quantizable(&self, weight: &str, is_transposed: bool) -> QuantizedSlot {
        let slot = QuantizedSlot::new(is_transposed);
        let (name, layer) = (self.full_name(weight), self.prefix.clone());
        let quantizable = Quantizable { name, layer, slot: slot.clone() };
        self.registry.borrow_mut().quantizable.push(quantizable);
        slot
    }

    /// Registers that the layer at this path can compute with the stack of weights `[matrices, out, in]`, a parameter of
    /// this path, when they are quantised. In the patterns of [`Weights`](crate::Weights) the stack has the parameter's
    /// name.
    #[must_use]
    pub fn quantizable_stack(&self, weights: &str) -> QuantizedSlot {
        let slot = QuantizedSlot::new(false);
        let name = self.full_name(weights);
        let quantizable = Quantizable { layer: name.clone(), name, slot: slot.clone() };
        self.registry.borrow_mut().quantizable.push(quantizable);
        slot
    }

    /// Registers a trainable parameter and returns its tensor, which the layer keeps.
    pub fn parameter(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        self.parameter_with(name, shape, move |values| init.fill(values))
    }

    /// Registers a trainable parameter whose initial values are set by a function. The function gets a float32 tensor
    /// of this shape on the CPU, sets all of its elements, and draws random numbers only from libtorch's CPU generator.
    /// It runs immediately; for a [deferred](crate::Model::deferred) model, when the parameter is allocated.
    ///
    /// ```
    /// use brigade_nn::{Model, ParamPath};
    ///
    /// let model = Model::new(|path: &ParamPath| {
    ///     path.parameter_with("weight", &[4, 3], |values| {
    ///         values.f_normal_(0.0, 0.02)?.f_get(0)?.f_zero_().map(drop)
    ///     })
    /// })?;
    /// assert_eq!(model.parameters()[0].tensor.double_value(&[0, 2]), 0.0);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn parameter_with(
        &self,
        name: &str,
        shape: &[i64],
        first_values: impl FnOnce(&mut Tensor) -> Result<(), TchError> + Send + 'static,
    ) -> Tensor {
        self.reject_style(name);
        self.drawn_parameter(name, shape, None, Box::new(first_values))
    }

    /// Records an error for a parameter that the tensor plan divides, but that the module needs whole.
    fn reject_style(&self, name: &str) {
        if let Some((style, _)) = self.tensor_style(name) {
            self.reject_at(
                name,
                format_args!(
                    "the tensor plan divides it ({style}), and the module reads it whole: leave it out of the plan, or \
                     make it a layer that can be divided, such as a linear layer or an embedding"
                ),
            );
        }
    }

    /// Registers a parameter of this whole shape, or this rank's part of it.
    pub(crate) fn drawn_parameter(
        &self,
        name: &str,
        shape: &[i64],
        part: Option<TensorPart>,
        first_values: FirstValues,
    ) -> Tensor {
        if shape.iter().any(|&size| size < 0) {
            self.reject_at(name, format_args!("the shape {shape:?} has a negative size"));
            return Tensor::new();
        }
        let (kind, is_drawn, is_deferred) = {
            let registry = self.registry.borrow();
            (registry.kind, registry.drawn, registry.draws.is_some())
        };
        let first_values: FirstValues =
            if is_drawn { first_values } else { Box::new(|values| Init::Zeros.fill(values)) };
        let own = part.as_ref().map_or_else(|| shape.to_vec(), |part| signed(&part.own_shape()));
        if !is_deferred {
            let drawn = || {
                // Zeros need not be allocated for the whole parameter.
                let values = match &part {
                    Some(part) if is_drawn => taken(&filled(shape, first_values)?, part)?,
                    _ => filled(&own, first_values)?,
                };
                values.f_to_kind(kind)?.f_detach()?.f_set_requires_grad(true)
            };
            return self.add(name, tch::no_grad(drawn), Role::Parameter, part);
        }
        let options = (kind, Device::Cpu);
        let tensor = match unallocated(&own, None, options, &no_memory(&self.full_name(name))) {
            Ok(tensor) => tensor.f_set_requires_grad(true),
            Err(error) => Err(TchError::Torch(error.to_string())),
        };
        let tensor = self.add(name, tensor, Role::Parameter, part.clone());
        self.draw_later(&tensor, part, first_values);
        tensor
    }

    /// Sets the initial values of a registered parameter or buffer again, for architectures that initialise their
    /// weights after all layers are created. The function is like that of [`ParamPath::parameter_with`]; it does not
    /// run with [`crate::ModelBuilder::without_first_values`].
    pub fn redraw(
        &self,
        tensor: &Tensor,
        first_values: impl FnOnce(&mut Tensor) -> Result<(), TchError> + Send + 'static,
    ) {
        let (is_drawn, is_deferred, known) = {
            let registry = self.registry.borrow();
            (registry.drawn, registry.draws.is_some(), registry.part_of(tensor))
        };
        if !tensor.defined() || !is_drawn {
            // The path has refused the tensor, which building the model reports; or weights are read next.
            return;
        }
        let Some(part) = known else {
            self.reject("draws the first values of a tensor that is not of this model");
            return;
        };
        if is_deferred {
            self.draw_later(tensor, part, Box::new(first_values));
            return;
        }
        let set = || {
            let first_values = Box::new(first_values);
            let values = match &part {
                Some(part) => taken(&filled(&signed(part.shape()), first_values)?, part)?,
                None => filled(&tensor.size(), first_values)?,
            };
            tensor.shallow_clone().f_copy_(&values)
        };
        if let Err(error) = tch::no_grad(set) {
            self.reject(format_args!("the first values of a weight: {error}"));
        }
    }

    /// Registers a trainable parameter that starts from a copy of these values, converted to the
    /// model's kind.
    pub fn parameter_from(&self, name: &str, values: &Tensor) -> Tensor {
        let kind = self.registry.borrow().kind;
        let taken = tch::no_grad(|| copy_as(values, kind)?.f_set_requires_grad(true));
        self.add(name, taken, Role::Parameter, None)
    }

    /// Registers a buffer: a tensor that is not trained, such as running statistics, and is saved with the model. Its
    /// initial values are a copy of `values`, converted to the model's kind if they are floating-point.
    pub fn buffer(&self, name: &str, values: &Tensor) -> Tensor {
        self.add_buffer(name, values, true)
    }

    /// Registers a buffer that is not in state dictionaries (PyTorch's `persistent=False`). See [`ParamPath::buffer`].
    pub fn non_persistent_buffer(&self, name: &str, values: &Tensor) -> Tensor {
        self.add_buffer(name, values, false)
    }

    /// Registers a parameter a second time under another name, for tied weights.
    ///
    /// Optimizer and reducer use it as one parameter, under its first name; a state dictionary contains both names, as
    /// in PyTorch.
    ///
    /// ```
    /// use brigade_nn::{Embedding, Model, ParamPath};
    /// use tch::Tensor;
    ///
    /// let model = Model::new(|p: &ParamPath| {
    ///     let embedding = Embedding::new(p / "embedding", 100, 16);
    ///     let head = (p / "head").tie("weight", embedding.weight());
    ///     (embedding, head)
    /// })?;
    /// assert_eq!(model.parameters().len(), 1);
    /// assert_eq!(model.state_dict().len(), 2);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn tie(&self, name: &str, tensor: &Tensor) -> Tensor {
        let first = self.registry.borrow().find(tensor);
        match first {
            Some(first) => {
                let (part, first_name) = {
                    let entry = &self.registry.borrow().entries[first];
                    (entry.part.clone(), entry.name.clone())
                };
                if let (Some((style, _)), None) = (self.tensor_style(name), &part) {
                    self.reject_at(
                        name,
                        format_args!(
                            "the tensor plan divides it ({style}), and it is tied to `{first_name}`, which is whole: name \
                             `{first_name}` in the plan"
                        ),
                    );
                }
                self.add(name, Ok(tensor.shallow_clone()), Role::SameAs(first), part)
            }
            None => {
                self.reject_at(name, "ties a tensor that is not a parameter of this model");
                tensor.shallow_clone()
            }
        }
    }

    /// Registers an existing tensor as a parameter, without a copy: the model trains this tensor. The name may contain
    /// dots. A frozen tensor (`requires_grad` off) stays frozen; a tensor that is a parameter already gets another
    /// name, as with [`ParamPath::tie`].
    ///
    /// ```
    /// use brigade_nn::{Model, ParamPath};
    /// use tch::{Kind, Tensor};
    /// let weight = Tensor::ones([3], tch::kind::FLOAT_CPU).set_requires_grad(true);
    /// let mut model = Model::new(|p: &ParamPath| p.adopt_parameter("body.weight", &weight))?;
    /// model.to_kind(Kind::Double)?;
    /// assert_eq!(weight.kind(), Kind::Double); // it is the model's own
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn adopt_parameter(&self, name: &str, tensor: &Tensor) {
        let role = match self.registry.borrow().find(tensor) {
            Some(first) => Role::SameAs(first),
            None => Role::Parameter,
        };
        self.adopt(name, tensor, role);
    }

    /// Registers an existing tensor as a buffer that is saved, without a copy. The name may contain dots.
    pub fn adopt_buffer(&self, name: &str, tensor: &Tensor) {
        self.adopt(name, tensor, Role::Buffer { persistent: true });
    }

    /// Registers all variables of a `tch::nn::VarStore` under their names below this path, without a copy: trainable
    /// ones, frozen or not, as parameters, the others (running statistics) as buffers. For modules that contain layers
    /// of `tch::nn` and implement [`crate::Module`] themselves. For `nn::ModuleT` use [`crate::Model::from_var_store`].
    ///
    /// ```
    /// use brigade_nn::{Model, Module, ParamPath};
    /// use tch::{Device, Tensor};
    /// use brigade_torch::Result;
    /// use tch::nn::{self, Module as _};
    ///
    /// struct Distance(nn::Linear);
    ///
    /// impl Module<(&Tensor, &Tensor)> for Distance {
    ///     type Output = Tensor;
    ///     fn forward(&self, (left, right): (&Tensor, &Tensor)) -> Result<Tensor> {
    ///         Ok((self.0.forward(left) - self.0.forward(right)).abs())
    ///     }
    /// }
    ///
    /// let variables = nn::VarStore::new(Device::Cpu);
    /// let tower = nn::linear(variables.root() / "tower", 8, 4, Default::default());
    /// let model = Model::new(|p: &ParamPath| {
    ///     p.adopt_variables(&variables);
    ///     Distance(tower)
    /// })?;
    /// assert_eq!(model.parameters()[0].name, "tower.bias"); // tch makes it first
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn adopt_variables(&self, variables: &tch::nn::VarStore) {
        for (name, tensor, trainable) in in_order(variables) {
            if trainable {
                self.adopt_parameter(&name, &tensor);
            } else {
                self.adopt_buffer(&name, &tensor);
            }
        }
    }

    /// Returns the training mode of the layer at this path, for layers that behave differently in training and
    /// evaluation.
    #[must_use]
    pub fn training(&self) -> Training {
        let mut registry = self.registry.borrow_mut();
        let training = registry.training.of_a_layer();
        registry.held.push((self.prefix.clone(), training.clone()));
        training
    }

    /// Creates a unit of all parameters that are registered below this path: a part of the model that is gathered as a
    /// whole if the model is sharded. The module at this path must run its forward in [`Unit::run`]. Units may be
    /// nested. The whole model is always a unit, so that a unit of the empty path has no effect.
    #[must_use]
    pub fn unit(&self) -> Unit {
        if self.prefix.is_empty() {
            return Unit::default();
        }
        let known = |(name, _): &(String, Unit)| *name == self.prefix;
        if self.registry.borrow().units.iter().any(known) {
            self.reject("this is a unit already");
        }
        let unit = Unit::default();
        self.registry.borrow_mut().units.push((self.prefix.clone(), unit.clone()));
        unit
    }

    /// Registers a sequence of blocks at which a pipeline can cut the model: `steps` are the names of the blocks below
    /// this path, in the order in which the forward runs them with [`Stages::run`]. Parameters that were registered
    /// before those of the first block belong to the first stage, and those after the last block to the last stage.
    #[must_use]
    pub fn stages(&self, steps: impl IntoIterator<Item = impl Display>) -> Stages {
        let blocks: Vec<String> =
            steps.into_iter().map(|step| self.full_name(&step.to_string())).collect();
        let row = Stages::new(blocks.len());
        self.registry.borrow_mut().rows.push(Row { blocks, row: row.clone() });
        row
    }

    /// Returns the ranks that share the statistics of batch normalisations.
    pub(crate) fn shared_statistics(&self) -> SharedStatistics {
        let mut registry = self.registry.borrow_mut();
        registry.batch_norms.push(self.prefix.clone());
        registry.statistics.clone()
    }

    /// Registers a layer, which then has forward hooks and is named in errors.
    pub(crate) fn layer(&self) -> LayerContext {
        let mut registry = self.registry.borrow_mut();
        if !registry.layers.contains(&self.prefix) {
            registry.layers.push(self.prefix.clone());
        }
        let hooks = registry.hooks.clone();
        drop(registry);
        LayerContext { name: self.prefix.clone(), hooks, weights: self.layer_weights() }
    }

    /// Returns a handle that loads the parameters at this path into memory for the forward of a layer, if a device map
    /// keeps them elsewhere and the layer is not in a [unit](ParamPath::unit). The layers of this crate call it
    /// themselves. Call it in user-defined layers whose weights are to be moved separately, such as a large head.
    #[must_use]
    pub fn layer_weights(&self) -> LayerWeights {
        let weights = LayerWeights::default();
        self.registry.borrow_mut().layer_weights.push((self.prefix.clone(), weights.clone()));
        weights
    }

    /// Registers a layer that is a normalisation.
    pub(crate) fn norm_layer(&self) -> LayerContext {
        self.registry.borrow_mut().norms.insert(self.prefix.clone());
        self.layer()
    }

    /// Records an invalid request of the caller. `Model::new` then fails and lists it.
    pub fn reject(&self, problem: impl Display) {
        let problem = format!("{}: {problem}", shown(&self.prefix));
        self.registry.borrow_mut().problems.push(problem);
    }

    fn add_buffer(&self, name: &str, values: &Tensor, persistent: bool) -> Tensor {
        let kind = self.registry.borrow().kind;
        let taken = tch::no_grad(|| {
            let own = values.f_kind()?;
            let kind = if is_floating_point(own) { kind } else { own };
            copy_as(values, kind)
        });
        self.add(name, taken, Role::Buffer { persistent }, None)
    }

    fn add(
        &self,
        name: &str,
        made: Result<Tensor, TchError>,
        role: Role,
        part: Option<TensorPart>,
    ) -> Tensor {
        self.check_name(name);
        let tensor = match made {
            Ok(tensor) => tensor,
            Err(error) => {
                self.reject_at(name, error);
                return Tensor::new();
            }
        };
        self.register(name, &tensor, role, part);
        tensor
    }

    fn adopt(&self, name: &str, tensor: &Tensor, role: Role) {
        if self.tensor_style(name).is_some() {
            // It is registered all the same: its pattern does match a parameter.
            self.reject_at(
                name,
                "the tensor plan divides it, and something else made it, which reads it whole: leave it out of the plan",
            );
        }
        let problem = match tensor.f_kind() {
            _ if name.split('.').any(str::is_empty) => Some("a name has no empty parts".to_owned()),
            Ok(kind) if role != (Role::Buffer { persistent: true }) && !is_floating_point(kind) => {
                Some(format!("parameters cannot be {kind:?}"))
            }
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        match problem {
            Some(problem) => self.reject_at(name, problem),
            None => {
                // A further name of a divided parameter has the same part.
                let part = match role {
                    Role::SameAs(first) => self.registry.borrow().entries[first].part.clone(),
                    _ => None,
                };
                self.register(name, tensor, role, part);
                self.registry.borrow_mut().adopted.insert(self.full_name(name));
            }
        }
    }

    fn register(&self, name: &str, tensor: &Tensor, role: Role, part: Option<TensorPart>) {
        let full_name = self.full_name(name);
        let taken = self.registry.borrow().has(&full_name);
        if taken {
            self.reject_at(name, "this name is registered twice");
        } else {
            let entry = Entry { name: full_name, tensor: tensor.shallow_clone(), role, part };
            self.registry.borrow_mut().add(entry);
        }
    }

    pub(crate) fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }

    fn check_name(&self, name: &str) {
        if name.is_empty() || name.contains('.') {
            self.reject(format_args!("`{name}` is not a name: it must not be empty or hold a dot"));
        }
    }

    fn reject_at(&self, name: &str, problem: impl Display) {
        let full_name = self.full_name(name);
        self.registry.borrow_mut().problems.push(format!("{full_name}: {problem}"));
    }
}

impl<'a, Step: Display> Div<Step> for ParamPath<'a> {
    type Output = Self;

    fn div(self, step: Step) -> Self {
        self.join(step)
    }
}

impl<'a, Step: Display> Div<Step> for &ParamPath<'a> {
    type Output = ParamPath<'a>;

    fn div(self, step: Step) -> ParamPath<'a> {
        self.join(step)
    }
}

/// Returns the variables of a store, with `true` for trainable ones: first the trainable ones in the order of their
/// creation, then the others by name. The order of a hash map would differ from rank to rank.
fn in_order(store: &tch::nn::VarStore) -> Vec<(String, Tensor, bool)> {
    let mut named: Vec<(String, Tensor)> = store.variables().into_iter().collect();
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    let trainable = store.trainable_variables();
    let places: HashMap<TensorId, usize> =
        trainable.iter().enumerate().map(|(place, tensor)| (TensorId::of(tensor), place)).collect();
    let place = |tensor: &Tensor| places.get(&TensorId::of(tensor)).copied();
    let mut placed: Vec<_> =
        named.into_iter().map(|(name, tensor)| (place(&tensor), name, tensor)).collect();
    // The sort is stable: variables without a place keep the order of names.
    placed.sort_by_key(|(place, ..)| place.unwrap_or(usize::MAX));
    placed.into_iter().map(|(place, name, tensor)| (name, tensor, place.is_some())).collect()
}

fn signed(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|size| size.cast_signed()).collect()
}

fn copy_as(values: &Tensor, kind: Kind) -> Result<Tensor, TchError> {
    let mut copy = Tensor::f_empty(values.size(), (kind, Device::Cpu))?;
    copy.f_copy_(values)?;
    Ok(copy)
}

/// Returns `true` for types that have gradients, and to which a model's type applies.
pub(crate) fn is_floating_point(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}
