//! Parameters of which each rank of a tensor group has a part.

use std::collections::HashMap;

use brigade_sharding::TensorPart;
use brigade_torch::{Error, Result};
use tch::Tensor;

use super::Model;
use crate::{StateDict, TensorParallel, TensorRegion};

/// A parameter of which each rank of a tensor group has a part.
#[derive(Debug)]
pub struct DividedParameter {
    /// The first of its names.
    pub name: String,
    /// This rank's part: the model's own tensor.
    pub tensor: Tensor,
    /// Where it lies in the whole parameter.
    pub part: TensorPart,
}

impl<M> Model<M> {
    /// Returns the ranks that divide the model's layers between them, and the plan; `None` for a model that was built without
    /// [`ModelBuilder::tensor_parallel`](crate::ModelBuilder::tensor_parallel).
    #[must_use]
    pub fn tensor_parallel(&self) -> Option<&TensorParallel> {
        self.tensor.as_ref()
    }

    /// Returns the parameters of which each rank of the tensor group has a part, in the order of registration.
    #[must_use]
    pub fn divided_parameters(&self) -> Vec<DividedParameter> {
        let divided = self.distinct().filter_map(|entry| {
            Some(DividedParameter {
                name: entry.name.clone(),
                tensor: entry.tensor.shallow_clone(),
                part: entry.part.clone()?,
            })
        });
        divided.collect()
    }

    /// Returns the shape of the parameter or buffer of a name, of one that ranks of a tensor group divide that of the whole;
    /// `None` for a name that the model does not have.
    #[must_use]
    pub fn whole_size(&self, name: &str) -> Option<Vec<i64>> {
        Some(self.entries().iter().find(|entry| entry.name == name)?.whole_size())
    }

    /// Fails where each rank of a tensor group has a part of parameters, for an action that needs all of them.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] with the action and what to use in its place.
    pub fn check_undivided(&self, action: &str) -> Result<()> {
        let Some(divided) = self.distinct().find(|entry| entry.part.is_some()) else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "{action}: each rank of the tensor group has a part of `{}`: use `Accelerator::save_model` of the prepared \
             model, or save `whole_state_dict`, which every rank calls",
            divided.name
        )))
    }

    /// Returns parameters and saved buffers as [`Model::state_dict`], those that ranks of a tensor group divide whole, on every
    /// rank. Every rank of the group calls it.
    ///
    /// # Errors
    /// Those of [`TensorRegion::whole`].
    pub fn whole_state_dict(&self) -> Result<StateDict> {
        let state = self.state_dict();
        let group = self.tensor.as_ref().and_then(|tensor| tensor.group.clone());
        let Some(group) = group else { return Ok(state) };
        let region = TensorRegion::new(group);
        let parts: HashMap<&str, &TensorPart> = self
            .entries()
            .iter()
            .filter_map(|entry| Some((entry.name.as_str(), entry.part.as_ref()?)))
            .collect();
        let mut whole = StateDict::new();
        for (name, own) in state {
            let value = match parts.get(name.as_str()) {
                Some(part) => region.whole(&own, part)?,
                None => own,
            };
            whole.insert(name, value)?;
        }
        Ok(whole)
    }
}
