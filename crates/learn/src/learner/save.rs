//! Saving and loading of weights and optimizer.

use std::path::{Path, PathBuf};

use brigade_checkpoint::Value;
use brigade_nn::StateDict;
use brigade_optim::OptimizerState;
use brigade_torch::{Error, Result};

use tch::Tensor;

use super::Learner;
use crate::error::LearnError;
use crate::main_process::on_main;
use crate::saved;
use crate::state::LearnerState;

impl LearnerState {
    /// Writes the model to a file, with the optimizer if `with_optimizer` is set, from rank 0, for which the other
    /// ranks wait. The file is a dictionary `{"model", "opt"}` that PyTorch reads, and appears whole or not at all. If
    /// ranks have parts of the model, rank 0 holds all written tensors in the host's memory meanwhile.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot write.
    pub fn save(&self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        let path = path.as_ref();
        let model = self.full_state_dict()?;
        let optimizer = match (with_optimizer, self.is_in_parts()) {
            (true, true) => self.grouped.full_state_dict()?,
            (true, false) => self.optimizer()?.map(|it| it.state_dict()).transpose()?,
            (false, _) => None,
        };
        on_main(&self.accelerator, || {
            let model = model.unwrap_or_default();
            let model = model.iter().map(|(name, it)| (name, Value::Tensor(it.shallow_clone())));
            let mut entries = vec![("model", Value::dict(model))];
            entries.extend(optimizer.map(|state| ("opt", state.to_value())));
            saved::write(path, Value::dict(entries))
        })
    }

    /// Reads a file of [`LearnerState::save`] on rank 0, and sends its contents to the others: only rank 0 needs the
    /// file.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot read the file, it does not fit, or it lacks the requested optimizer:
    /// nothing was changed then.
    pub fn load(&mut self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        let path = path.as_ref();
        let processes = self.accelerator.processes().clone();
        let value = processes.on_main_process(|| saved::read(path))?;
        if self.is_in_parts() {
            return self.load_parts(path, value, with_optimizer);
        }
        let value = processes.broadcast_state(value)?;
        let refused = |reason: String| LearnError::Format { path: path.to_owned(), reason };
        let model = state_dict(path, value.get("model").unwrap_or(&value))?;
        if with_optimizer {
            let state = value.get("opt").ok_or_else(|| refused(WITHOUT_OPTIMIZER.to_owned()))?;
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

    /// Loads the state that rank 0 has read, and sends each rank its part.
    fn load_parts(
        &mut self,
        path: &Path,
        value: Option<Value<Tensor>>,
        with_optimizer: bool,
    ) -> Result<()> {
        let processes = self.accelerator.processes().clone();
        let refused = |reason: String| LearnError::Format { path: path.to_owned(), reason };
        let read = processes.on_main_process(|| {
            let value = value.unwrap_or(Value::None);
            let model = state_dict(path, value.get("model").unwrap_or(&value))?;
            if !with_optimizer {
                return Ok::<_, Error>((model, None));
            }
            let state = value.get("opt").ok_or_else(|| refused(WITHOUT_OPTIMIZER.to_owned()))?;
            let state =
                OptimizerState::from_value(state, Tensor::shallow_clone).map_err(refused)?;
            Ok((model, Some(state)))
        })?;
        let (model, optimizer) = read.unzip();
        let own = if with_optimizer {
            self.grouped.scatter_state_dict(optimizer.flatten())?
        } else {
            None
        };
        if let Some((own, optimizer)) = own.as_ref().zip(self.optimizer()?) {
            // The result is the same on all ranks, since the parts of a parameter differ only in their rows.
            let fits = optimizer.check_state(own, |tensor| tensor.size());
            let fits = fits.map_err(|mismatch| mismatch.to_string());
            let all = processes.gather_object(fits)?;
            all.into_iter().collect::<std::result::Result<Vec<()>, _>>().map_err(refused)?;
        }
        self.model.load_full_state_dict(model.as_ref())?;
        if let Some((own, mut optimizer)) = own.zip(self.optimizer()?) {
            optimizer.adopt_state(own)?;
            self.grouped.read_back()?;
        }
        Ok(())
    }
}

const WITHOUT_OPTIMIZER: &str = "it has no optimizer: it was saved without one";

/// Reads the names and tensors of a saved model.
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
    /// Writes the model to a file, with the optimizer if `with_optimizer` is set; see [`LearnerState::save`]. Every
    /// rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`LearnerState::save`].
    pub fn save(&self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<PathBuf> {
        self.state.save(&path, with_optimizer)?;
        Ok(path.as_ref().to_owned())
    }

    /// Reads a model from a file of [`Learner::save`], or from a weights file of PyTorch or safetensors, and the
    /// optimizer if `with_optimizer` is set. Every rank calls it, and only rank 0 needs the file.
    ///
    /// # Errors
    /// Returns the same errors as [`LearnerState::load`].
    pub fn load(&mut self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        self.place_model()?;
        if with_optimizer {
            let rates = self.default_rates().of_groups(self.state.grouped.len())?;
            self.make_optimizer(false, &rates)?;
            self.state.prepare_optimizer()?;
        }
        self.state.load(path, with_optimizer)
    }
}
