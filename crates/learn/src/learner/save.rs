//! Weights and optimizer in a file, and back.

use std::path::{Path, PathBuf};

use brigade_checkpoint::Value;
use brigade_nn::StateDict;
use brigade_optim::OptimizerState;
use brigade_torch::Result;

use tch::Tensor;

use super::Learner;
use crate::error::LearnError;
use crate::main_process::on_main;
use crate::saved;
use crate::state::LearnerState;

impl LearnerState {
    /// Writes the model to a file, with the optimizer where it is asked for, from rank 0; the others wait. The file is
    /// a dictionary `{"model", "opt"}` that PyTorch reads, and appears whole or not at all.
    ///
    /// # Errors
    /// On every rank when rank 0 cannot write.
    pub fn save(&self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        let path = path.as_ref();
        on_main(&self.accelerator, || saved::write(path, self.to_value(with_optimizer)?))
    }

    /// Reads such a file on rank 0, and sends it to the others: only rank 0 needs the file.
    ///
    /// # Errors
    /// On every rank when rank 0 cannot read the file, it does not fit, or it lacks an optimizer that is asked for:
    /// nothing was changed then.
    pub fn load(&mut self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        let path = path.as_ref();
        let mut value = None;
        on_main(&self.accelerator, || {
            value = Some(saved::read(path)?);
            Ok(())
        })?;
        let value = saved::broadcast(&self.accelerator, value)?;
        let refused = |reason: String| LearnError::Format { path: path.to_owned(), reason };
        let model = state_dict(path, value.get("model").unwrap_or(&value))?;
        if with_optimizer {
            let state = value.get("opt").ok_or_else(|| {
                refused("it has no optimizer: it was saved without one".to_owned())
            })?;
            let state =
                OptimizerState::from_value(state, Tensor::shallow_clone).map_err(refused)?;
            if let Some(mut optimizer) = self.optimizer()? {
                optimizer
                    .check_state(&state, |tensor| tensor.size())
                    .map_err(|mismatch| refused(mismatch.to_string()))?;
                self.model.load_state_dict(&model)?;
                optimizer.load_state_dict(&state)?;
                self.grouped.read_back()?;
                return Ok(());
            }
        }
        self.model.load_state_dict(&model)
    }

    fn to_value(&self, with_optimizer: bool) -> Result<Value<Tensor>> {
        let model = self.state_dict();
        let model = model.iter().map(|(name, it)| (name, Value::Tensor(it.shallow_clone())));
        let mut entries = vec![("model", Value::dict(model))];
        if let (true, Some(optimizer)) = (with_optimizer, self.optimizer()?) {
            let state = optimizer.state_dict()?;
            entries.push(("opt", state.to_value()));
        }
        Ok(Value::dict(entries))
    }
}

/// Reads names and tensors.
pub(crate) fn state_dict(path: &Path, value: &Value<Tensor>) -> Result<StateDict> {
    let refused = |reason: String| LearnError::Format { path: path.to_owned(), reason };
    let entries = value.as_dict().ok_or_else(|| {
        refused(format!("expected names with tensors, found {}", value.describe()))
    })?;
    let mut state = StateDict::new();
    for (name, tensor) in entries {
        let (Some(name), Some(tensor)) = (name.as_str(), tensor.as_tensor()) else {
            return Err(refused("expected names with tensors".to_owned()).into());
        };
        state.insert(name, tensor.shallow_clone())?;
    }
    Ok(state)
}

impl Learner {
    /// Writes the model to a file, with the optimizer where it is asked for: see [`LearnerState::save`]. Every rank
    /// calls it.
    ///
    /// # Errors
    /// As there.
    pub fn save(&self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<PathBuf> {
        self.state.save(&path, with_optimizer)?;
        Ok(path.as_ref().to_owned())
    }

    /// Reads a model from such a file, or from a weights file of PyTorch or safetensors, and the optimizer where it is
    /// asked for. Every rank calls it, and rank 0 alone needs the file.
    ///
    /// # Errors
    /// As [`LearnerState::load`].
    pub fn load(&mut self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        if with_optimizer {
            let rates = self.default_rates().of_groups(self.state.grouped.len())?;
            self.make_optimizer(false, &rates)?;
        }
        self.state.load(path, with_optimizer)
    }
}
