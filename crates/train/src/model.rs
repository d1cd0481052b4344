//! A model whose gradients are averaged over the ranks.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_models::{Model, Module, NamedTensor};
use brigade_torch::{Reducer, Tensor, Tensors, grad_enabled};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradients::hook::PowerSgdHook;
use crate::gradients::join::Joining;
use crate::gradients::loss_check::CheckedModel;
use crate::precision::Numerics;
use crate::precision::memory_format;
use crate::prepare::Prepare;
use crate::registry::{Kind, ModelTensor, Restoring, Stateful};

/// A [`Model`] after [`Accelerator::prepare`]: on the process's device, with rank 0's weights, and with
/// gradients that `backward` averages over the ranks.
///
/// With one rank, or without a parameter that is trained, it is the model itself.
pub struct PreparedModel<M> {
    model: Model<M>,
    reducer: Option<Reducer>,
    numerics: Arc<Numerics>,
    /// Of a communication hook that has a state.
    hook: Option<Arc<PowerSgdHook>>,
    sync: Arc<AtomicBool>,
    /// Whether this rank's buffers may be others than rank 0's: after a forward in training.
    buffers_differ: Cell<bool>,
    /// What a checkpoint holds of it, for as long as it is there.
    _saved: Arc<SavedTensors>,
    checked: Option<Arc<CheckedModel>>,
    /// The parameters that the reducer does not know: they were frozen when it was made.
    frozen: Vec<NamedTensor>,
}

impl<M> Prepare for Model<M> {
    type Prepared = PreparedModel<M>;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<PreparedModel<M>> {
        if self.device() != accelerator.device() {
            self.to_device(accelerator.device())?;
        }
        let channels_last = memory_format::channels_last(&self, &accelerator.numerics);
        if channels_last {
            self.to_channels_last()?;
        }
        accelerator.say_start(channels_last);
        if let (Some(group), true) = (accelerator.group(), accelerator.options.sync_batch_norm) {
            self.convert_sync_batch_norm(&group);
        }
        let trained = named(self.trainable_parameters());
        let mut frozen = Vec::new();
        let group = accelerator.group();
        let reducer = match &group {
            Some(group) if !trained.is_empty() => {
                let trained_names: Vec<&String> = trained.iter().map(|(name, _)| name).collect();
                // Frozen parameters are broadcast like buffers at the start, but never again.
                frozen = self.parameters();
                frozen.retain(|parameter| !trained_names.contains(&&parameter.name));
                broadcast_all(accelerator, &frozen)?;
                let buffers = named(self.buffers());
                Some(Reducer::new(group, &trained, &buffers, accelerator.options.reducer.clone())?)
            }
            Some(_) => {
                frozen = self.parameters();
                broadcast_all(accelerator, &frozen)?;
                broadcast_all(accelerator, &self.buffers())?;
                None
            }
            None => None,
        };
        let hook = match &reducer {
            Some(reducer) => accelerator.options.comm_hook.install(reducer, &trained)?,
            None => None,
        };
        let checked = match &reducer {
            Some(_) => accelerator.check_losses_of(&trained, hook.clone())?,
            None => None,
        };
        let saved = Arc::new(SavedTensors::of(&self, hook.clone()));
        accelerator.registry.register(&saved);
        Ok(PreparedModel {
            _saved: saved,
            checked,
            frozen,
            model: self,
            reducer,
            numerics: Arc::clone(&accelerator.numerics),
            hook,
            sync: Arc::new(AtomicBool::new(true)),
            buffers_differ: Cell::new(true),
        })
    }
}

impl<M> PreparedModel<M> {
    /// The model's output, computed with the Accelerator's mixed precision; what has 16 bits is given
    /// back in 32 unless the builder says otherwise. In training, buffers (BatchNorm's statistics) are
    /// rank 0's before each forward.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] when a peer is gone, or when the last backward did not reach every
    /// parameter (see `find_unused_parameters` in [`brigade_torch::ReducerOptions`]).
    ///
    /// [`crate::Error::Model`] when the input does not fit, with the layer's name. The other ranks learn
    /// of it when this one leaves.
    ///
    /// [`crate::Error::Misuse`] when gradients are on and a parameter is trained that was frozen at
    /// `prepare`: the ranks would train it apart.
    #[track_caller]
    pub fn forward<Input>(&self, input: Input) -> Result<M::Output>
    where
        M: Module<Input>,
        M::Output: Tensors<Owned = M::Output>,
    {
        if grad_enabled() {
            self.check_frozen()?;
        }
        let Some(reducer) = &self.reducer else {
            return self.computed(input);
        };
        let sync = self.sync.load(Ordering::Relaxed);
        // In evaluation the buffers stay as they are: one message after the last training step, and
        // none when ranks have unequal numbers of batches to evaluate.
        if grad_enabled() || self.buffers_differ.get() {
            reducer.before_forward(sync)?;
            self.buffers_differ.set(false);
        }
        let output = self.computed(input)?;
        if self.model.is_training() {
            self.buffers_differ.set(true);
        }
        if grad_enabled()
            && let Some(checked) = &self.checked
        {
            checked.set_reduces(sync);
        }
        Ok(reducer.after_forward(output, sync)?)
    }

    /// Compares the frozen parameters with what `prepare` saw. A model without frozen parameters, as most
    /// are, pays nothing.
    fn check_frozen(&self) -> Result<()> {
        match self.frozen.iter().find(|parameter| parameter.tensor.requires_grad()) {
            None => Ok(()),
            Some(parameter) => Err(Error::Misuse(format!(
                "parameter {:?} was frozen when the model was prepared and is trained now: its gradient \
                 would not be averaged over the ranks. Freeze and thaw before `prepare`, or take the \
                 model with `into_inner`, thaw it and prepare it again",
                parameter.name
            ))),
        }
    }

    /// The model alone, with the Accelerator's precision.
    fn computed<Input>(&self, input: Input) -> Result<M::Output>
    where
        M: Module<Input>,
        M::Output: Tensors<Owned = M::Output>,
    {
        let scope = self.numerics.scope(self.model.device())?;
        let output = self.model.try_forward(input);
        drop(scope);
        self.numerics.outputs(output?)
    }

    /// Dropout drops, BatchNorm uses the statistics of the batch.
    pub fn train(&mut self) {
        self.model.train();
    }

    /// Dropout passes, BatchNorm uses its running statistics.
    pub fn eval(&mut self) {
        self.model.eval();
    }

    /// The model itself, under its own names: what `accelerator.unwrap_model` gives.
    #[must_use]
    pub fn inner(&self) -> &Model<M> {
        &self.model
    }

    /// The model itself, to change. The reducer keeps the parameters that it was made with: a replaced
    /// tensor is trained by this rank alone, and a thawed one is an error of the next forward.
    pub fn inner_mut(&mut self) -> &mut Model<M> {
        &mut self.model
    }

    /// The model, no longer prepared.
    #[must_use]
    pub fn into_inner(self) -> Model<M> {
        self.model
    }

    /// The reducer, when there is one: several ranks and a parameter that is trained.
    #[must_use]
    pub fn reducer(&self) -> Option<&Reducer> {
        self.reducer.as_ref()
    }

    pub(crate) fn hook_state(&self) -> Option<&PowerSgdHook> {
        self.hook.as_deref()
    }
}

/// One prepared model or several: what [`Accelerator::accumulate`] and [`Accelerator::no_sync`] take.
pub trait PreparedModels {
    /// Calls `f` with the switch of each model.
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool));
    /// Calls `f` with each trained parameter.
    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor));
    /// Calls `f` for each model whose gradients are reduced.
    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>));
}

impl<M> PreparedModels for PreparedModel<M> {
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
        f(&self.sync);
    }

    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
        for parameter in self.model.trainable_parameters() {
            f(&parameter.tensor);
        }
    }

    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
        if let Some(reducer) = &self.reducer {
            f(Joining { reducer, checked: self.checked.as_deref() });
        }
    }
}

impl<P: PreparedModels + ?Sized> PreparedModels for &P {
    fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
        (**self).each_switch(f);
    }

    fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
        (**self).each_parameter(f);
    }

    fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
        (**self).each_joining(f);
    }
}

macro_rules! several {
    ($($name:ident $index:tt),+) => {
        impl<$($name: PreparedModels),+> PreparedModels for ($($name,)+) {
            fn each_switch(&self, f: &mut dyn FnMut(&AtomicBool)) {
                $(self.$index.each_switch(f);)+
            }

            fn each_parameter(&self, f: &mut dyn FnMut(&Tensor)) {
                $(self.$index.each_parameter(f);)+
            }

            fn each_joining<'a>(&'a self, f: &mut dyn FnMut(Joining<'a>)) {
                $(self.$index.each_joining(f);)+
            }
        }
    };
}

several!(A 0, B 1);
several!(A 0, B 1, C 2);
several!(A 0, B 1, C 2, D 3);

/// Models whose reduction is off; on again when dropped, also after a panic of the body.
pub(crate) struct Switched<'a, P: PreparedModels + ?Sized> {
    models: &'a P,
    before: Vec<bool>,
}

impl<'a, P: PreparedModels + ?Sized> Switched<'a, P> {
    pub(crate) fn off(models: &'a P) -> Self {
        let mut before = Vec::new();
        models.each_switch(&mut |switch| before.push(switch.swap(false, Ordering::Relaxed)));
        Self { models, before }
    }
}

impl<P: PreparedModels + ?Sized> Drop for Switched<'_, P> {
    fn drop(&mut self) {
        let mut before = self.before.iter();
        self.models.each_switch(&mut |switch| {
            switch.store(before.next().copied().unwrap_or(true), Ordering::Relaxed);
        });
    }
}

impl Accelerator {
    /// The model under the preparation.
    #[must_use]
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a Model<M> {
        model.inner()
    }
}

impl<M> fmt::Debug for PreparedModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedModel")
            .field("parameters", &self.model.num_parameters())
            .field("reducer", &self.reducer)
            .finish_non_exhaustive()
    }
}

/// Handles of a model's parameters and saved buffers, under their names in order.
struct SavedTensors {
    tensors: Mutex<Vec<ModelTensor>>,
    hook: Option<Arc<PowerSgdHook>>,
}

impl SavedTensors {
    fn of<M>(model: &Model<M>, hook: Option<Arc<PowerSgdHook>>) -> Self {
        let names = |tensors: Vec<NamedTensor>| -> HashSet<String> {
            tensors.into_iter().map(|tensor| tensor.name).collect()
        };
        let (trained, buffers) = (model.trainable_parameters(), names(model.buffers()));
        let tensors = model.state_dict().into_iter().map(|(name, detached)| {
            // The parameter itself where it is trained: it has the gradient.
            let parameter = trained.iter().find(|parameter| parameter.name == name);
            let tensor = parameter.map_or(detached, |p| p.tensor.shallow_clone());
            let (trained, buffer) = (parameter.is_some(), buffers.contains(&name));
            ModelTensor { name, tensor, trained, buffer }
        });
        Self { tensors: Mutex::new(tensors.collect()), hook }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ModelTensor>> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stateful for SavedTensors {
    fn kind(&self) -> Kind {
        Kind::Model
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let tensors = self.lock();
        let detached = tensors.iter().map(|saved| Ok((&*saved.name, saved.tensor.f_detach()?)));
        let detached: Vec<_> = detached.collect::<Result<_>>()?;
        Ok(Value::dict(detached.into_iter().map(|(name, tensor)| (name, Value::Tensor(tensor)))))
    }

    /// Names and shapes are compared where the tensors are read: with the places in the files.
    fn check(&self, _: &Value<TensorInfo>) -> Result<(), String> {
        Ok(())
    }

    fn restore(&self, _: Value<Tensor>, _: &Restoring) -> Result<()> {
        Ok(())
    }

    fn tensors(&self) -> Option<Vec<ModelTensor>> {
        let handle = |saved: &ModelTensor| ModelTensor {
            name: saved.name.clone(),
            tensor: saved.tensor.shallow_clone(),
            ..*saved
        };
        Some(self.lock().iter().map(handle).collect())
    }

    fn own(&self) -> Result<Option<Value<Tensor>>> {
        self.hook.as_ref().map(|hook| hook.saved()).transpose()
    }

    fn check_own(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook.check_saved(state))
    }

    fn restore_own(&self, states: &[&Value<Tensor>]) -> Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook.restore_saved(states))
    }
}

fn named(tensors: Vec<NamedTensor>) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|named| (named.name, named.tensor)).collect()
}

/// Replaces tensors by rank 0's.
pub(crate) fn broadcast_all(accelerator: &Accelerator, tensors: &[NamedTensor]) -> Result<()> {
    const MESSAGE_BYTES: usize = 250 << 20;
    let Some(group) = accelerator.group() else {
        return Ok(());
    };
    let detached = tensors
        .iter()
        .map(|named| named.tensor.f_detach())
        .collect::<std::result::Result<Vec<_>, _>>()?;
    if !detached.is_empty() {
        let borrowed: Vec<&Tensor> = detached.iter().collect();
        group.broadcast_coalesced(&borrowed, MESSAGE_BYTES, 0)?;
    }
    Ok(())
}
