//! State dictionaries of models: saving and loading.

use std::collections::HashSet;

use brigade_checkpoint::{prefix_candidates, wrapper_prefix};
use brigade_sharding::TensorPart;
use brigade_torch::Error;
use indexmap::IndexMap;
use tch::{TchError, Tensor};

use super::Model;
use crate::error::ModelError;
use crate::param_registry::{Entry, Role};
use crate::state_dict::ShapeMismatch;
use crate::tensor_parallel::taken;
use crate::{LoadReport, StateDict};

/// Shapes of weights by name, in memory or in a file.
pub(crate) type Shapes = IndexMap<String, Vec<i64>>;

/// Tensors of a state, each with the model's tensor that receives it.
type MatchedValues<'s> = Vec<(&'s Tensor, Tensor)>;

impl<M> Model<M> {
    /// Returns parameters and persistent buffers by name, in order of registration. The tensors are detached but share
    /// the model's memory; [`StateDict::deep_clone`] makes a snapshot. For parameters that are divided over a tensor
    /// group, the tensors are this rank's parts; use [`Model::whole_state_dict`] for whole ones.
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new();
        for entry in self.saved() {
            // Names are unique after `build`, so every insertion succeeds.
            let inserted = state.insert(&entry.name, entry.tensor.detach());
            debug_assert!(inserted.is_ok());
        }
        state
    }

    /// Copies the dictionary's values into the model, if the two match in every name and shape.
    ///
    /// Values are converted to the model's kinds and devices. The prefixes of PyTorch's wrappers (`module.` of
    /// DistributedDataParallel, `_orig_mod.` of `torch.compile`) are removed if all names of the dictionary have them
    /// and no name of the model does. If only some names have such a prefix, or that of an enclosing module (`model.`,
    /// `backbone.`), it is removed if these names then match the whole model; names without the prefix, such as those
    /// of a loss, are ignored. The report contains these changes. For a shared parameter one of its names is enough.
    ///
    /// # Errors
    /// [`crate::ModelError::Mismatch`] with the report, with nothing changed. [`crate::ModelError::Torch`] if libtorch
    /// cannot copy.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<LoadReport, Error> {
        self.check_not_quantized("load_state_dict")?;
        self.check_values("load_state_dict")?;
        let mut plan = self.plan(&shapes(state)).complete()?;
        plan.report.key = state.key().to_owned();
        plan.copy(state)
    }

    /// Loads the tensors that match in name and shape, and leaves the others unchanged, for a pretrained body with a
    /// new head. The report lists the tensors that did not match.
    ///
    /// # Errors
    /// [`crate::ModelError::Torch`] when libtorch cannot copy.
    pub fn load_matching(&mut self, state: &StateDict) -> Result<LoadReport, Error> {
        self.check_not_quantized("load_matching")?;
        self.check_values("load_matching")?;
        let mut plan = self.plan(&shapes(state));
        plan.report.key = state.key().to_owned();
        plan.copy(state)
    }

    /// Compares a state dictionary with the model like [`Model::load_state_dict`], without copying. Returns each of its
    /// tensors with the corresponding tensor of the model, and the report. For models whose tensors cannot be copied
    /// into directly, such as sharded ones. For a parameter that is divided over a tensor group, the dictionary
    /// contains the whole.
    ///
    /// # Errors
    /// Returns the errors of [`Model::load_state_dict`].
    pub fn matched_state<'s>(
        &self,
        state: &'s StateDict,
    ) -> Result<(MatchedValues<'s>, LoadReport), Error> {
        let mut plan = self.plan(&shapes(state)).complete()?;
        state.key().clone_into(&mut plan.report.key);
        let values = plan.values.into_iter();
        let values = values.filter_map(|found| Some((state.get(&found.name)?, found.into)));
        Ok((values.collect(), plan.report))
    }

    /// Compares names and shapes with the model's.
    pub(crate) fn plan(&self, weights: &Shapes) -> LoadPlan {
        let theirs: Vec<&String> = weights.keys().collect();
        let own = self.entries.iter().map(|entry| &entry.name).chain(self.elsewhere_names());
        let own: Vec<&String> = own.collect();
        let plan = self.plan_without(&wrapper_prefix(&theirs, &own), weights);
        if plan.report.is_complete() {
            return plan;
        }
        let others = prefix_candidates(&theirs).into_iter().map(|prefix| {
            let mut plan = self.plan_without(&prefix, weights);
            let unexpected = std::mem::take(&mut plan.report.unexpected).into_iter();
            (plan.report.unexpected, plan.report.outside) =
                unexpected.partition(|name| name.starts_with(&prefix));
            plan
        });
        others.into_iter().find(|other| other.report.is_complete()).unwrap_or(plan)
    }

    /// Compares the names that begin with `prefix`, after removing it.
    fn plan_without(&self, prefix: &str, weights: &Shapes) -> LoadPlan {
        let mut report = LoadReport { prefix: prefix.to_owned(), ..LoadReport::default() };
        let mut values = Vec::new();
        let name_of = |entry: &Entry| format!("{prefix}{}", entry.name);
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.role == (Role::Buffer { persistent: false }) {
                continue;
            }
            let Some((_, found, in_weights)) = weights.get_full(&name_of(entry)) else {
                // Another name of the same parameter may have provided its values.
                let first = if let Role::SameAs(first) = entry.role { first } else { index };
                let same = |(i, _): &(usize, &Entry)| *i == first;
                let also = |(_, e): &(usize, &Entry)| e.role == Role::SameAs(first);
                let names = self.entries.iter().enumerate();
                let mut names = names.filter(|e| same(e) || also(e));
                if !names.any(|(_, e)| weights.contains_key(&name_of(e))) {
                    report.missing.push(entry.name.clone());
                }
                continue;
            };
            let in_model = entry.whole_size();
            if in_model == *in_weights {
                report.loaded += 1;
                values.push(Match {
                    name: found.clone(),
                    into: entry.tensor.shallow_clone(),
                    part: entry.part.clone(),
                });
            } else {
                let (name, in_weights) = (entry.name.clone(), in_weights.clone());
                report.mismatched.push(ShapeMismatch { name, in_model, in_weights });
            }
        }
        let known = self.saved().map(|entry| &entry.name).chain(self.elsewhere_names());
        let known: HashSet<_> = known.map(String::as_str).collect();
        let unexpected = weights
            .keys()
            .filter(|name| name.strip_prefix(prefix).is_none_or(|rest| !known.contains(rest)));
        report.unexpected = unexpected.cloned().collect();
        LoadPlan { values, report }
    }
}

/// Tensor of weights with the model's tensor that receives it.
pub(crate) struct Match {
    /// Name of the tensor in the weights.
    pub(crate) name: String,
    pub(crate) into: Tensor,
    /// Part of the weights' tensor that the model's tensor receives.
    pub(crate) part: Option<TensorPart>,
}

impl Match {
    /// Returns the values for the model's tensor.
    fn own(&self, values: &Tensor) -> Result<Tensor, TchError> {
        match &self.part {
            Some(part) => tch::no_grad(|| taken(values, part)),
            None => Ok(values.shallow_clone()),
        }
    }
}

/// Result of comparing weights with a model, before anything is copied.
pub(crate) struct LoadPlan {
    pub(crate) values: Vec<Match>,
    pub(crate) report: LoadReport,
}

impl LoadPlan {
    /// Returns the plan if names and shapes agree completely.
    pub(crate) fn complete(self) -> Result<Self, Error> {
        if self.report.is_complete() {
            Ok(self)
        } else {
            Err(ModelError::Mismatch(Box::new(self.report)).into())
        }
    }

    fn copy(self, state: &StateDict) -> Result<LoadReport, Error> {
        for found in self.values {
            let Some(values) = state.get(&found.name) else { continue };
            let copied = found
                .own(values)
                .and_then(|values| tch::no_grad(|| found.into.shallow_clone().f_copy_(&values)));
            copied.map_err(ModelError::torch(format!("copy the values of {}", found.name)))?;
        }
        Ok(self.report)
    }
}

fn shapes(state: &StateDict) -> Shapes {
    state.iter().map(|(name, tensor)| (name.to_owned(), tensor.size())).collect()
}
