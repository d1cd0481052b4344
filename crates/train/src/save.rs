//! Weights to and from files.

use std::path::{Path, PathBuf};

use brigade_nn::{StateDict, weights};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::model::{PreparedModel, broadcast_all};

/// The file's name in a folder, as Hugging Face's.
const MODEL_FILE: &str = "model.safetensors";

impl Accelerator {
    /// Writes tensors to a safetensors file, from rank 0; the others wait. The file appears whole or not
    /// at all.
    ///
    /// # Errors
    /// On every rank when rank 0 cannot write.
    pub fn save(&self, state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
        self.on_main_process(|| weights::save(state, path)).map(drop)
    }

    /// Writes a model's parameters and buffers under PyTorch's names, from rank 0; the others wait.
    /// A path that does not end in `.safetensors` is a folder, made if it is missing, for
    /// `model.safetensors`.
    ///
    /// # Errors
    /// On every rank when rank 0 cannot write.
    pub fn save_model<M>(&self, model: &PreparedModel<M>, path: impl AsRef<Path>) -> Result<()> {
        self.checkpoints.weights_may_be_saved()?;
        let path = path.as_ref();
        self.on_main_process(|| -> Result<()> {
            let file = file_in(path);
            if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                std::fs::create_dir_all(folder).map_err(|source| Error::File {
                    action: "cannot make folder",
                    path: folder.to_owned(),
                    source,
                })?;
            }
            Ok(weights::save(&model.inner().state_dict(), &file)?)
        })
        .map(drop)
    }

    /// Reads a model's parameters and buffers on rank 0 and sends them to the others, so that only rank
    /// 0 needs the file: safetensors, or a file of `torch.save` with one state dictionary, alone or in a
    /// dictionary. Every name and shape must fit, where need be without a prefix
    /// ([`Model::load_state_dict`](brigade_nn::Model::load_state_dict)); a line on standard error says so.
    ///
    /// # Errors
    /// On every rank when rank 0 cannot read the file or it does not fit; the model is unchanged then.
    pub fn load_model<M>(
        &self,
        model: &mut PreparedModel<M>,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        self.load_weights(model, path.as_ref(), None)
    }

    /// As [`Accelerator::load_model`], of the state dictionary at one key of a file of `torch.save`
    /// ([`weights::load_entry`]).
    ///
    /// # Errors
    /// As there.
    pub fn load_model_entry<M>(
        &self,
        model: &mut PreparedModel<M>,
        path: impl AsRef<Path>,
        key: &str,
    ) -> Result<()> {
        self.load_weights(model, path.as_ref(), Some(key))
    }

    fn load_weights<M>(
        &self,
        model: &mut PreparedModel<M>,
        path: &Path,
        key: Option<&str>,
    ) -> Result<()> {
        let report = self.on_main_process(|| {
            let file = if path.is_dir() { path.join(MODEL_FILE) } else { path.to_owned() };
            match key {
                Some(key) => model.inner_mut().load_entry(file, key),
                None => model.inner_mut().load_weights(file),
            }
        })?;
        if let Some(remark) = report.and_then(|report| report.remark()) {
            self.warn(&format!("{}: {remark}", path.display()));
        }
        let Some(group) = self.group() else { return Ok(()) };
        broadcast_all(&group, &model.inner().parameters())?;
        broadcast_all(&group, &model.inner().buffers())
    }
}

fn file_in(path: &Path) -> PathBuf {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        path.to_owned()
    } else {
        path.join(MODEL_FILE)
    }
}
