//! Steps in parts: parameters that are stepped together, and what follows each of them.

use std::collections::HashMap;
use std::fmt;

use brigade_torch::{Result, TensorId};
use tch::Tensor;

use crate::rule::GroupStep;

/// Parts of a step, in their order.
pub(crate) struct StepParts {
    /// Index of each parameter's part. An identity is unique as long as there is a handle of the tensor.
    part_of: HashMap<TensorId, (Tensor, usize)>,
    count: usize,
    after: Box<dyn FnMut(usize) -> Result<()> + Send>,
}

impl StepParts {
    pub(crate) fn new(
        parts: &[Vec<Tensor>],
        after: impl FnMut(usize) -> Result<()> + Send + 'static,
    ) -> Self {
        let members = parts.iter().enumerate().flat_map(|(part, tensors)| {
            tensors.iter().map(move |it| (TensorId::of(it), (it.shallow_clone(), part)))
        });
        Self { part_of: members.collect(), count: parts.len(), after: Box::new(after) }
    }

    /// Steps the groups' parameters part by part, those of no part at the end.
    pub(crate) fn step(
        &mut self,
        groups: &[GroupStep<'_>],
        mut step: impl FnMut(&GroupStep<'_>) -> Result<()>,
    ) -> Result<()> {
        for part in 0..=self.count {
            let is_in = |parameter: &Tensor| {
                let own = self.part_of.get(&TensorId::of(parameter));
                own.map_or(self.count, |(_, own)| *own) == part
            };
            for group in groups {
                let group = group.only(is_in);
                if !group.chosen.is_empty() {
                    step(&group)?;
                }
            }
            if part < self.count {
                (self.after)(part)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for StepParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepParts").field("count", &self.count).finish_non_exhaustive()
    }
}
