//! Weights to and from files.

use std::path::Path;

use brigade_nn::weights;
use brigade_torch::Result;
use tch::Tensor;

use super::PreparedModel;
use crate::processes::Processes;
use crate::weights_file::WeightsTarget;

impl<M> PreparedModel<M> {
    /// Writes the model's weights from rank 0; the other ranks wait for it. Files with an index contain tied weights
    /// once.
    pub(crate) fn save_weights(&self, processes: &Processes, to: &WeightsTarget) -> Result<()> {
        let mut state: Vec<(String, Tensor)> = self.model.state_dict().into_iter().collect();
        if matches!(to, WeightsTarget::Parts(..)) {
            state.retain(|(name, _)| self.model.parameter_name(name).is_none_or(|it| it == name));
        }
        if let Some(pipeline) = &self.context.pipeline {
            return self.save_stages(pipeline, &state, to);
        }
        if let Some(spread) = self.spread() {
            return spread.save_weights(&state, to);
        }
        let write = || {
            let info = |(name, tensor): &(String, Tensor)| {
                Ok((name.clone(), weights::info_of(name, tensor, to.path())?))
            };
            let infos = state.iter().map(info).collect::<Result<Vec<_>>>()?;
            let infos: Vec<_> =
                infos.iter().map(|(name, info)| (name.as_str(), info.clone())).collect();
            let mut writer = to.create(&infos)?;
            to.order(&infos)?.into_iter().try_for_each(|place| writer.write(&state[place].1))?;
            writer.finish()
        };
        processes.on_main_process(write).map(drop)
    }

    /// Reads the model's weights on rank 0, from the state dictionary at `key` if there is one, and sends them to the
    /// others. Returns the remark of the report on names, if it has one.
    pub(crate) fn load_weights(
        &mut self,
        processes: &Processes,
        path: &Path,
        key: Option<&str>,
    ) -> Result<Option<String>> {
        if let Some(pipeline) = self.context.pipeline.clone() {
            let report = self.load_stages(&pipeline, path, key)?;
            let remark = report.remark().filter(|_| processes.is_main_process());
            return Ok(remark.map(|remark| format!("{}: {remark}", path.display())));
        }
        if let Some(spread) = self.spread() {
            let report = spread.load_weights(path, key)?;
            let remark = report.and_then(|report| report.remark());
            return Ok(remark.map(|remark| format!("{}: {remark}", path.display())));
        }
        let report = processes.on_main_process(|| match key {
            Some(key) => self.model.load_entry(path, key),
            None => self.model.load_weights(path),
        })?;
        self.broadcast_values()?;
        let remark = report.and_then(|report| report.remark());
        Ok(remark.map(|remark| format!("{}: {remark}", path.display())))
    }
}
