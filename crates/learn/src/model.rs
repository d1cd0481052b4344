//! A model of any type for the Learner: prepared for the ranks during a fit, a plain one otherwise.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashSet;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use brigade_nn::{ForwardHook, Model, Module, StateDict};
use brigade_torch::{Error, NamedTensor, Result, Sharder};
use brigade_train::{
    Accelerator, AutocastOptions, Precision, PreparedModel, PreparedModels, WeightAverage,
};
use tch::Tensor;

use crate::loaders::ModelInput;
use crate::parallel::{Replicas, other_inputs};

/// Operations of the Learner on a model of any type.
pub(crate) trait AnyModel {
    /// Computes the output. The input type determines the number of tensors.
    fn forward(&self, inputs: &[Tensor]) -> Result<Tensor>;
    /// Prepares the model. All ranks take part.
    fn prepare(&mut self, accelerator: &Accelerator) -> Result<()>;
    /// Converts the model back to a plain one. A sharded model is not changed.
    fn detach(&mut self);
    /// Returns the engine of a sharded model.
    fn sharder(&self) -> Option<Arc<Sharder>>;
    /// Returns `true` if this rank has a part of the parameters: shards, or the part of a tensor rank.
    fn is_in_parts(&self) -> bool;
    fn is_prepared(&self) -> bool;
    /// Returns `true` if the parameters have no memory yet.
    fn is_deferred(&self) -> bool;
    fn set_training(&mut self, on: bool);
    fn parameters(&self) -> Vec<NamedTensor>;
    /// Returns the tensors of all parameters that an optimizer steps: this rank's shards, if the model is sharded.
    fn local_parameters(&self) -> Vec<NamedTensor>;
    /// Returns an average of the current weights, of which this rank has the part that it holds.
    fn weight_average(&self) -> Result<WeightAverage>;
    fn norm_parameters(&self) -> Vec<String>;
    fn buffers(&self) -> Vec<NamedTensor>;
    fn state_dict(&self) -> StateDict;
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;
    /// Returns the state on rank 0. All ranks take part.
    fn full_state_dict(&self, is_main: bool) -> Result<Option<StateDict>>;
    /// Loads rank 0's state into a model that is divided among ranks. All ranks take part.
    fn load_full_state_dict(&mut self, state: Option<&StateDict>) -> Result<()>;
    /// Trains only these parameters, of a plain or a sharded model.
    fn train_only(&mut self, names: &HashSet<String>) -> Result<()>;
    /// Sets whether the next backward averages gradients over the ranks.
    fn set_sync(&self, on: bool);
    /// Sends rank 0's buffers to all ranks, if training has changed them.
    fn broadcast_buffers(&self) -> Result<()>;
    fn hold_in_eval(&mut self, prefix: &str, on: bool) -> Result<usize>;
    fn forward_hook(&mut self, layer: &str, hook: Hook) -> Result<ForwardHook>;
    /// Sets replicas, to which batches are scattered as well.
    fn set_replicas(&mut self, replicas: Option<Box<dyn Replicas>>);
    /// Adds the replicas' gradients to the model's, after a backward pass.
    fn reduce_replicas(&self) -> Result<()>;
    fn module(&self) -> Option<&dyn Any>;
}

/// A function that is called with a layer's output, and may replace it.
pub(crate) type Hook = Box<dyn Fn(&str, &Tensor) -> Option<Tensor> + Send>;

/// A model whose module and input types are known.
pub(crate) struct Slot<M, X> {
    held: Held<M>,
    replicas: RefCell<Option<Box<dyn Replicas>>>,
    /// Precision of the replicas' forward passes.
    autocast: AutocastOptions,
    input: PhantomData<fn(X)>,
}

enum Held<M> {
    Plain(Box<Model<M>>),
    Prepared(Box<PreparedModel<M>>),
    /// Preparing has failed, and the model was lost.
    Lost,
}

impl<M, X> Slot<M, X> {
    pub(crate) fn new(model: Model<M>) -> Self {
        Self {
            held: Held::Plain(Box::new(model)),
            replicas: RefCell::new(None),
            autocast: AutocastOptions { precision: Precision::No, cache: true },
            input: PhantomData,
        }
    }

    fn model(&self) -> Result<&Model<M>> {
        match &self.held {
            Held::Plain(model) => Ok(model),
            Held::Prepared(model) => Ok(model.inner()),
            Held::Lost => Err(lost()),
        }
    }

    fn own_forward(&self, inputs: &[Tensor]) -> Result<Tensor>
    where
        M: for<'a> Module<X::Ref<'a>, Output = Tensor>,
        X: ModelInput,
    {
        let input = X::borrowed(inputs).ok_or_else(other_inputs)?;
        match &self.held {
            Held::Plain(model) => Ok(model.forward(input)?),
            Held::Prepared(model) => Ok(model.forward(input)?),
            Held::Lost => Err(lost()),
        }
    }

    fn model_mut(&mut self) -> Result<&mut Model<M>> {
        match &mut self.held {
            Held::Plain(model) => Ok(model),
            Held::Prepared(model) => Ok(model.inner_mut()),
            Held::Lost => Err(lost()),
        }
    }
}

impl<M, X> AnyModel for Slot<M, X>
where
    M: for<'a> Module<X::Ref<'a>, Output = Tensor> + 'static,
    X: ModelInput,
{
    fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let mut replicas = self.replicas.borrow_mut();
        let Some(replicas) = &mut *replicas else { return self.own_forward(inputs) };
        let model = self.model()?;
        // The number of parts is limited by the number of rows.
        let mut parts: Vec<Vec<Tensor>> = Vec::new();
        for input in inputs {
            let chunks = input.f_chunk(1 + replicas.len() as i64, 0)?;
            parts.resize_with(chunks.len().max(parts.len()), Vec::new);
            parts.iter_mut().zip(chunks).for_each(|(part, chunk)| part.push(chunk));
        }
        let mut parts = parts.into_iter();
        let first = parts.next().unwrap_or_default();
        let values: Vec<NamedTensor> =
            model.parameters().into_iter().chain(model.buffers()).collect();
        let outputs = replicas.forward(
            &values,
            model.is_training(),
            self.autocast,
            parts.collect(),
            &mut || self.own_forward(&first),
        )?;
        let device = model.device();
        let outputs: Vec<Tensor> = outputs
            .iter()
            .map(|output| output.f_to_device(device)?.f_to_kind(outputs[0].kind()))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Tensor::f_cat(&outputs, 0)?)
    }

    fn prepare(&mut self, accelerator: &Accelerator) -> Result<()> {
        self.autocast = AutocastOptions { precision: accelerator.mixed_precision(), cache: true };
        match std::mem::replace(&mut self.held, Held::Lost) {
            // For inference only, which needs no reducer and moves nothing.
            Held::Plain(model) if model.device_map().is_some() => self.held = Held::Plain(model),
            Held::Plain(model) => {
                self.held = Held::Prepared(Box::new(accelerator.prepare(*model)?));
            }
            other => self.held = other,
        }
        Ok(())
    }

    fn detach(&mut self) {
        match std::mem::replace(&mut self.held, Held::Lost) {
            Held::Prepared(model) if model.sharder().is_none() => {
                self.held = Held::Plain(Box::new(model.into_inner()));
            }
            other => self.held = other,
        }
    }

    fn sharder(&self) -> Option<Arc<Sharder>> {
        match &self.held {
            Held::Prepared(model) => model.sharder().cloned(),
            _ => None,
        }
    }

    fn is_in_parts(&self) -> bool {
        let has_parts = |model: &Model<M>| !model.divided_parameters().is_empty();
        self.sharder().is_some() || self.model().is_ok_and(has_parts)
    }

    fn is_prepared(&self) -> bool {
        match &self.held {
            Held::Plain(model) => model.device_map().is_some(),
            Held::Prepared(_) => true,
            Held::Lost => false,
        }
    }

    fn is_deferred(&self) -> bool {
        self.model().is_ok_and(Model::is_deferred)
    }

    fn set_training(&mut self, on: bool) {
        match (&mut self.held, on) {
            (Held::Plain(model), true) => model.train(),
            (Held::Plain(model), false) => model.eval(),
            (Held::Prepared(model), true) => model.train(),
            (Held::Prepared(model), false) => model.eval(),
            (Held::Lost, _) => {}
        }
    }

    fn parameters(&self) -> Vec<NamedTensor> {
        self.model().map(Model::parameters).unwrap_or_default()
    }

    fn local_parameters(&self) -> Vec<NamedTensor> {
        match &self.held {
            Held::Prepared(model) => model.local_parameters(),
            _ => self.parameters(),
        }
    }

    fn weight_average(&self) -> Result<WeightAverage> {
        match &self.held {
            Held::Prepared(model) => WeightAverage::new(model),
            _ => WeightAverage::of_model(self.model()?),
        }
    }

    fn norm_parameters(&self) -> Vec<String> {
        self.model().map(Model::norm_parameters).unwrap_or_default()
    }

    fn buffers(&self) -> Vec<NamedTensor> {
        self.model().map(Model::buffers).unwrap_or_default()
    }

    fn state_dict(&self) -> StateDict {
        self.model().map(Model::state_dict).unwrap_or_default()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.model_mut()?.load_state_dict(state)?;
        Ok(())
    }

    fn full_state_dict(&self, is_main: bool) -> Result<Option<StateDict>> {
        match &self.held {
            Held::Prepared(model) if self.is_in_parts() => model.full_state_dict(),
            Held::Plain(_) if self.is_in_parts() => Err(not_prepared()),
            _ => Ok(is_main.then(|| self.state_dict())),
        }
    }

    fn load_full_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        match &mut self.held {
            Held::Prepared(model) => model.load_full_state_dict(state),
            Held::Plain(_) => Err(not_prepared()),
            Held::Lost => Err(lost()),
        }
    }

    fn train_only(&mut self, names: &HashSet<String>) -> Result<()> {
        if let Held::Prepared(model) = &mut self.held
            && model.sharder().is_some()
        {
            return model.train_only(names);
        }
        let model = self.model_mut()?;
        model.requires_grad(false)?;
        if !names.is_empty() {
            model.requires_grad_where(|name| names.contains(name), true)?;
        }
        Ok(())
    }

    fn set_sync(&self, on: bool) {
        if let Held::Prepared(model) = &self.held {
            model.each_switch(&mut |switch| switch.store(on, Ordering::Relaxed));
        }
    }

    fn broadcast_buffers(&self) -> Result<()> {
        match &self.held {
            Held::Prepared(model) => Ok(model.broadcast_buffers()?),
            _ => Ok(()),
        }
    }

    fn hold_in_eval(&mut self, prefix: &str, on: bool) -> Result<usize> {
        self.model_mut()?.hold_in_eval(prefix, on)
    }

    fn forward_hook(&mut self, layer: &str, hook: Hook) -> Result<ForwardHook> {
        self.model_mut()?.forward_hook(layer, hook)
    }

    fn set_replicas(&mut self, replicas: Option<Box<dyn Replicas>>) {
        *self.replicas.get_mut() = replicas;
    }

    fn reduce_replicas(&self) -> Result<()> {
        match &mut *self.replicas.borrow_mut() {
            Some(replicas) => replicas.reduce(&self.parameters()),
            None => Ok(()),
        }
    }

    fn module(&self) -> Option<&dyn Any> {
        self.model().ok().map(|model| model.module() as &dyn Any)
    }
}

fn not_prepared() -> Error {
    Error::invalid_argument(
        "each rank has a part of the model, which is not prepared yet: call this within `Learner::distributed`, or after \
         the first fit",
    )
}

fn lost() -> Error {
    Error::invalid_argument(
        "the model is missing, because preparing it for the ranks has failed before; create the Learner again",
    )
}
