//! Values out of a model and into it, by name.

use std::collections::HashSet;

use tch::Tensor;

use crate::model::Model;
use crate::registry::{Entry, Role};
use crate::state_dict::ShapeMismatch;
use crate::{Error, LoadReport, StateDict};

impl<M> Model<M> {
    /// Parameters and saved buffers by name, in order of registration. The tensors are detached but
    /// share the model's memory; [`StateDict::deep_clone`] makes a snapshot.
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new();
        for entry in self.saved() {
            // Names are distinct since `build`, so this inserts every one.
            let inserted = state.insert(&entry.name, entry.tensor.detach());
            debug_assert!(inserted.is_ok());
        }
        state
    }

    /// Copies values in, when the dictionary fits the model in every name and shape.
    ///
    /// Kinds are converted and devices crossed. The prefixes that PyTorch's wrappers leave
    /// (`module.` of DistributedDataParallel, `_orig_mod.` of `torch.compile`) are taken off where
    /// all names have them and none of the model's does. Of the names of a shared parameter one is
    /// enough.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the report: nothing was changed. [`Error::Torch`] when libtorch
    /// cannot copy.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<LoadReport, Error> {
        let plan = self.match_names(state);
        if !plan.report.is_complete() {
            return Err(Error::Mismatch(plan.report));
        }
        plan.copy()
    }

    /// Copies in what fits and leaves the rest as it is; the report says what did not fit. For a
    /// pre-trained body under a new head.
    ///
    /// # Errors
    /// [`Error::Torch`] when libtorch cannot copy.
    pub fn load_matching(&mut self, state: &StateDict) -> Result<LoadReport, Error> {
        self.match_names(state).copy()
    }

    fn match_names<'a>(&'a self, state: &'a StateDict) -> LoadPlan<'a> {
        let prefix = self.wrapper_prefix(state);
        let mut report = LoadReport::default();
        let mut copies = Vec::new();
        let found = |entry: &Entry| state.get(&format!("{prefix}{}", entry.name));
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.role == (Role::Buffer { saved: false }) {
                continue;
            }
            let Some(values) = found(entry) else {
                // Another name of the same parameter may have brought its values.
                let first = if let Role::SameAs(first) = entry.role { first } else { index };
                let same = |(i, _): &(usize, &Entry)| *i == first;
                let also = |(_, e): &(usize, &Entry)| e.role == Role::SameAs(first);
                let names = self.entries.iter().enumerate();
                if !names.filter(|e| same(e) || also(e)).any(|(_, e)| found(e).is_some()) {
                    report.missing.push(entry.name.clone());
                }
                continue;
            };
            let (in_model, in_weights) = (entry.tensor.size(), values.size());
            if in_model == in_weights {
                report.loaded += 1;
                copies.push((entry, values));
            } else {
                let name = entry.name.clone();
                report.mismatched.push(ShapeMismatch { name, in_model, in_weights });
            }
        }
        let known: HashSet<_> = self.saved().map(|e| e.name.as_str()).collect();
        let unexpected = state.names().filter(|name| !known.contains(&name[prefix.len()..]));
        report.unexpected = unexpected.map(str::to_owned).collect();
        LoadPlan { copies, report }
    }

    /// The wrappers' prefix that all names of `state` have, empty where the model's names have it too.
    fn wrapper_prefix(&self, state: &StateDict) -> String {
        let mut prefix = String::new();
        while let Some(more) = WRAPPER_PREFIXES.iter().find(|more| {
            state.all_have_prefix(&format!("{prefix}{more}"))
                && !self.entries.iter().any(|entry| entry.name.starts_with(**more))
        }) {
            prefix.push_str(more);
        }
        prefix
    }
}

/// A state dictionary compared with a model, nothing copied yet.
struct LoadPlan<'a> {
    copies: Vec<(&'a Entry, &'a Tensor)>,
    report: LoadReport,
}

impl LoadPlan<'_> {
    fn copy(self) -> Result<LoadReport, Error> {
        for (entry, values) in self.copies {
            tch::no_grad(|| entry.tensor.shallow_clone().f_copy_(values))
                .map_err(Error::torch(format!("copy values into {}", entry.name)))?;
        }
        Ok(self.report)
    }
}

/// What DistributedDataParallel and torch.compile put before the names of the model they wrap.
const WRAPPER_PREFIXES: [&str; 2] = ["module.", "_orig_mod."];
