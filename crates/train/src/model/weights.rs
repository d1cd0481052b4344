//! Weights to and from files.

use std::path::Path;

use brigade_nn::weights;
use brigade_torch::Result;

use super::{PreparedModel, broadcast_all};
use crate::processes::Processes;
use crate::weights_file::{file_in, make_folder_of};

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
