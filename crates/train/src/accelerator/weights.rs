//! Weights to and from files.

use std::path::Path;

use brigade_torch::Result;

use super::Accelerator;
use crate::checkpoint::Checkpoints;
use crate::model::PreparedModel;
use crate::weights_file::{WeightsTarget, file_in};

impl Accelerator {
    /// Writes a model's parameters and buffers under PyTorch's names, from rank 0, for which the other ranks wait. A
    /// path that does not end in `.safetensors` is a folder for `model.safetensors`, created if it is missing.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot write.
    pub fn save_model<M>(&self, model: &PreparedModel<M>, path: impl AsRef<Path>) -> Result<()> {
        self.checkpoints.weights_may_be_saved()?;
        model.save_weights(&self.processes, &WeightsTarget::File(file_in(path.as_ref())))
    }

    /// Reads a model's parameters and buffers on rank 0 and sends them to the others, so that only rank 0 needs the
    /// file: safetensors, or a file of `torch.save` with one state dictionary, alone or in a dictionary; also several
    /// files with their index, and a folder. Every name and shape must fit, if necessary without a prefix
    /// ([`Model::load_state_dict`](brigade_nn::Model::load_state_dict)), which a line on standard error reports.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot read the file or it does not fit; the model is unchanged then.
    pub fn load_model<M>(
        &self,
        model: &mut PreparedModel<M>,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        let remark = model.load_weights(&self.processes, path.as_ref(), None)?;
        remark.iter().for_each(|remark| self.warn(remark));
        Ok(())
    }
}

/// Reads and writes weights in other forms than a single file.
impl Checkpoints {
    /// Writes a model's parameters and buffers as [`Accelerator::save_model`] does, in files of at most `max_bytes`
    /// each with their index, as Hugging Face's libraries write them (`max_shard_size`):
    /// `model-00001-of-00002.safetensors`, and so on. If everything fits into one file, its name is
    /// `model.safetensors`. Tied weights are written once, under their first name. In addition to a sharded model's
    /// shards, a rank has at most one whole tensor in memory. Weights of an earlier save in the folder are removed.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_train::Accelerator;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let model = accelerator.prepare(Model::new(|path| Linear::new(path, 4, 2))?)?;
    /// accelerator.checkpoints().save_model_in_parts(&model, &folder, 32)?;
    /// assert!(folder.path().join("model-00002-of-00002.safetensors").exists());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot write.
    pub fn save_model_in_parts<M>(
        &self,
        model: &PreparedModel<M>,
        folder: impl AsRef<Path>,
        max_bytes: u64,
    ) -> Result<()> {
        self.weights_may_be_saved()?;
        let target = WeightsTarget::Parts(folder.as_ref().to_owned(), max_bytes);
        model.save_weights(self.processes(), &target)
    }

    /// Reads a model's parameters and buffers as [`Accelerator::load_model`] does, from the state dictionary at one key
    /// of a file of `torch.save` ([`brigade_nn::weights::load_entry`]).
    ///
    /// # Errors
    /// Returns the same errors as [`Accelerator::load_model`].
    pub fn load_model_entry<M>(
        &self,
        model: &mut PreparedModel<M>,
        path: impl AsRef<Path>,
        key: &str,
    ) -> Result<()> {
        let remark = model.load_weights(self.processes(), path.as_ref(), Some(key))?;
        remark.iter().for_each(|remark| self.warn(remark));
        Ok(())
    }
}
