//! Parameters that are divided over the ranks of a tensor group.

use std::collections::HashMap;

use brigade_sharding::TensorPart;
use brigade_torch::{Error, ProcessGroup, Result};
use tch::Tensor;

use super::Model;
use crate::{ContextParallel, ExpertParallel, StateDict, TensorParallel, TensorRegion};

/// A parameter that is divided over the ranks of a tensor group, or of the group over which experts are divided.
#[derive(Debug)]
pub struct DividedParameter {
    /// First of the parameter's names.
    pub name: String,
    /// This rank's part: the model's own tensor.
    pub tensor: Tensor,
    /// Position of this rank's part in the whole parameter.
    pub part: TensorPart,
    /// `true` if the parameter is divided by [`Model::expert_parallel`], where each rank has some experts, and not by a
    /// tensor group. Such ranks have different tokens, and the gradient is the mean over the losses of the group's
    /// ranks.
    pub is_expert: bool,
}

impl<M> Model<M> {
    /// Returns the options of tensor parallelism. `None` for a model that was built without
    /// [`ModelBuilder::tensor_parallel`](crate::ModelBuilder::tensor_parallel).
    #[must_use]
    pub fn tensor_parallel(&self) -> Option<&TensorParallel> {
        self.tensor.as_ref()
    }

    /// Returns the options of context parallelism. `None` for a model that was built without
    /// [`ModelBuilder::context_parallel`](crate::ModelBuilder::context_parallel).
    #[must_use]
    pub fn context_parallel(&self) -> Option<&ContextParallel> {
        self.context.as_ref()
    }

    /// Returns the options of expert parallelism. `None` for a model that was built without
    /// [`ModelBuilder::expert_parallel`](crate::ModelBuilder::expert_parallel).
    #[must_use]
    pub fn expert_parallel(&self) -> Option<&ExpertParallel> {
        self.experts.as_ref()
    }

    /// Returns `true` if a module supports context parallelism, which means that its constructor has called
    /// [`ParamPath::context`](crate::ParamPath::context).
    #[must_use]
    pub fn divides_sequences(&self) -> bool {
        self.divides_sequences
    }

    /// Returns the parameters that are divided over the ranks of the tensor group, or of the experts' group, in the
    /// order of registration.
    #[must_use]
    pub fn divided_parameters(&self) -> Vec<DividedParameter> {
        let divided = self.distinct().filter_map(|entry| {
            Some(DividedParameter {
                name: entry.name.clone(),
                tensor: entry.tensor.shallow_clone(),
                part: entry.part.clone()?,
                is_expert: self.expert_parameters.contains(&entry.name),
            })
        });
        divided.collect()
    }

    /// Returns the shape of a parameter or buffer by its name; for a divided parameter, the shape of the whole. `None`
    /// for an unknown name.
    #[must_use]
    pub fn whole_size(&self, name: &str) -> Option<Vec<i64>> {
        Some(self.entries().iter().find(|entry| entry.name == name)?.whole_size())
    }

    /// Returns an error if this rank has only a part of the parameters, as with tensor parallelism or a pipeline, for
    /// an action that needs all of them.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`], whose message contains the action and its replacement.
    pub fn check_undivided(&self, action: &str) -> Result<()> {
        if let Some(name) = self.elsewhere_names().next() {
            return Err(Error::invalid_argument(format!(
                "{action}: `{name}` is of another stage of the pipeline: use `Accelerator::save_model` of the prepared model"
            )));
        }
        let Some(divided) = self.distinct().find(|entry| entry.part.is_some()) else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "{action}: each rank of a group has a part of `{}`: use `Accelerator::save_model` of the prepared \
             model, or save `whole_state_dict`, which every rank calls",
            divided.name
        )))
    }

    /// Returns parameters and persistent buffers like [`Model::state_dict`], but with the parameters that are divided
    /// over ranks gathered to their full shape, on every rank. Every rank of the group must call it.
    ///
    /// # Errors
    /// Returns the errors of [`TensorRegion::whole`].
    pub fn whole_state_dict(&self) -> Result<StateDict> {
        let state = self.state_dict();
        let region = |group: Option<&ProcessGroup>| {
            group.map_or_else(TensorRegion::default, |group| TensorRegion::new(group.clone()))
        };
        let tensor = region(self.tensor.as_ref().and_then(|tensor| tensor.group.as_ref()));
        let experts = region(self.experts.as_ref().and_then(|experts| experts.group.as_ref()));
        let parts: HashMap<&str, &TensorPart> = self
            .entries()
            .iter()
            .filter_map(|entry| Some((entry.name.as_str(), entry.part.as_ref()?)))
            .collect();
        let mut whole = StateDict::new();
        for (name, own) in state {
            let value = match parts.get(name.as_str()) {
                Some(part) if self.expert_parameters.contains(&name) => {
                    experts.whole(&own, part)?
                }
                Some(part) => tensor.whole(&own, part)?,
                None => own,
            };
            whole.insert(name, value)?;
        }
        Ok(whole)
    }
}
