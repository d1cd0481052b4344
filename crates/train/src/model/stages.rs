//! Whole weights of models of which ranks have stages, to and from files.

use std::collections::HashSet;
use std::path::Path;

use brigade_checkpoint::{TensorInfo, WeightsReader};
use brigade_nn::{LoadReport, weights};
use brigade_torch::{Error, Result, kind_of};
use tch::Tensor;

use super::PreparedModel;
use crate::pipeline::PipelineRanks;
use crate::weights_file::{TargetWriter, WeightsTarget};

/// Tensors on their way to the rank that writes.
const TAG: u16 = 4;

impl<M> PreparedModel<M> {
    /// Writes the weights of all stages from rank 0, which has one tensor of another stage in memory beside its own. All ranks
    /// take part.
    pub(super) fn save_stages(
        &self,
        pipeline: &PipelineRanks,
        state: &[(String, Tensor)],
        to: &WeightsTarget,
    ) -> Result<()> {
        self.refuse_parts(pipeline, "save_model")?;
        let (everyone, group) = (pipeline.everyone(), pipeline.group());
        let own = state
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), weights::info_of(name, tensor, to.path())?)));
        let all = everyone.agree("save_model", own.collect::<Result<Vec<_>>>())?;
        // What each rank of this pipeline has, once: a tied parameter is of the first.
        let mut names = HashSet::new();
        let mut tensors: Vec<(usize, &str, TensorInfo)> = Vec::new();
        for (owner, &rank) in group.global_ranks().iter().enumerate() {
            for (name, info) in all.get(rank).into_iter().flatten() {
                if names.insert(name) {
                    tensors.push((owner, name, info.clone()));
                }
            }
        }
        let infos: Vec<_> = tensors.iter().map(|(_, name, info)| (*name, info.clone())).collect();
        let mut writer = everyone.on_main_process(|| to.create(&infos))?;
        let mut outcome = Ok(());
        // The other pipelines have the same weights.
        if group.global_ranks().contains(&0) {
            for place in to.order(&infos)? {
                let (owner, name, info) = &tensors[place];
                let found = self.pass_on(group, *owner, name, info, state)?;
                // After an error the other ranks still send what follows.
                if let (Some(writer), Some(tensor), Ok(())) = (&mut writer, found, &outcome) {
                    outcome = writer.write(&tensor);
                }
            }
        }
        let finished = everyone.on_main_process(|| {
            outcome?;
            writer.map_or(Ok(()), TargetWriter::finish)
        });
        finished.map(drop)
    }

    /// Sends a tensor from its owner to the pipeline's first rank, which returns it.
    fn pass_on(
        &self,
        group: &brigade_torch::ProcessGroup,
        owner: usize,
        name: &str,
        info: &TensorInfo,
        state: &[(String, Tensor)],
    ) -> Result<Option<Tensor>> {
        let own = || state.iter().find(|(known, _)| known == name).map(|(_, it)| it.f_detach());
        if group.rank() == owner {
            let own = own().transpose()?;
            if owner == 0 {
                return Ok(own);
            }
            if let Some(own) = own {
                group.send(&own.f_to_device(group.device())?.f_contiguous()?, 0, TAG)?;
            }
            return Ok(None);
        }
        if group.rank() != 0 {
            return Ok(None);
        }
        let shape: Vec<i64> = info.shape.iter().map(|size| size.cast_signed()).collect();
        let kind = kind_of(info.dtype)
            .ok_or_else(|| Error::invalid_argument(format!("`{name}` is {}", info.dtype)))?;
        let mut tensor = Tensor::f_empty(shape, (kind, group.device()))?;
        group.recv(&mut tensor, owner, TAG)?;
        Ok(Some(tensor))
    }

    /// Reads what each rank has of a model's weights, on every rank by itself. Nothing is changed where one of them has an
    /// error before.
    pub(super) fn load_stages(
        &mut self,
        pipeline: &PipelineRanks,
        path: &Path,
        key: Option<&str>,
    ) -> Result<LoadReport> {
        self.refuse_parts(pipeline, "load_model")?;
        let fits = WeightsReader::open_entry(path, key).map_err(Error::from).and_then(|reader| {
            self.model.matched(&reader)?;
            Ok(reader.verify()?)
        });
        pipeline.everyone().agree("load_model", fits)?;
        let loaded = match key {
            Some(key) => self.model.load_entry(path, key),
            None => self.model.load_weights(path),
        };
        let (report, outcome) = match loaded {
            Ok(report) => (report, Ok(())),
            Err(error) => (LoadReport::default(), Err(error)),
        };
        pipeline.everyone().agree("load_model", outcome)?;
        Ok(report)
    }

    fn refuse_parts(&self, pipeline: &PipelineRanks, what: &str) -> Result<()> {
        match self.context.tensor {
            None => Ok(()),
            Some(_) => Err(pipeline.refuse(
                &format!("{what} of divided layers"),
                "use a mesh without tensor ranks or without a pipeline",
            )),
        }
    }
}
