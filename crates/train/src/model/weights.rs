//! Weights to and from files.

use std::path::{Path, PathBuf};

use brigade_nn::weights;
use brigade_torch::Result;

use super::{PreparedModel, broadcast_all};
use crate::error::TrainError;
use crate::processes::Processes;

/// The file's name in a folder, as Hugging Face's.
const MODEL_FILE: &str = "model.safetensors";

impl<M> PreparedModel<M> {
    /// Writes the model's weights from rank 0; the others wait.
    pub(crate) fn save_weights(&self, processes: &Processes, path: &Path) -> Result<()> {
        let file = file_in(path);
        if let Some(sharded) = &self.sharded {
            return sharded.save_weights(&self.model.state_dict(), processes, &file);
        }
        processes
            .on_main_process(|| {
                make_folder_of(&file)?;
                weights::save(&self.model.state_dict(), &file)
            })
            .map(drop)
    }

    /// Reads the model's weights on rank 0, of the state dictionary at `key` where there is one, and sends them to
    /// the others. Returns a remark about names where one is due.
    pub(crate) fn load_weights(
        &mut self,
        processes: &Processes,
        path: &Path,
        key: Option<&str>,
    ) -> Result<Option<String>> {
        if let Some(sharded) = &self.sharded {
            let report = sharded.load_weights(&self.model, processes, path, key)?;
            let remark = report.and_then(|report| report.remark());
            return Ok(remark.map(|remark| format!("{}: {remark}", path.display())));
        }
        let report = processes.on_main_process(|| match key {
            Some(key) => self.model.load_entry(path, key),
            None => self.model.load_weights(path),
        })?;
        if let Some(group) = processes.group() {
            broadcast_all(&group, &self.model.parameters())?;
            broadcast_all(&group, &self.model.buffers())?;
        }
        let remark = report.and_then(|report| report.remark());
        Ok(remark.map(|remark| format!("{}: {remark}", path.display())))
    }
}

pub(crate) fn make_folder_of(file: &Path) -> Result<()> {
    let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    let failed =
        |source| TrainError::File { action: "cannot make folder", path: folder.to_owned(), source };
    Ok(std::fs::create_dir_all(folder).map_err(failed)?)
}

fn file_in(path: &Path) -> PathBuf {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        path.to_owned()
    } else {
        path.join(MODEL_FILE)
    }
}
