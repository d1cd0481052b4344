//! Whole weights of models of which ranks have stages, to and from files, one tensor at a time.

use std::collections::HashSet;
use std::path::Path;

use brigade_checkpoint::{TensorInfo, Value, WeightsReader};
use brigade_nn::{LoadReport, StateDict};
use brigade_torch::{Error, Result};
use tch::Tensor;

use super::PreparedModel;
use super::spread::Spread;
use crate::pipeline::PipelineRanks;
use crate::stateful::no_state;
use crate::weights_file::{TargetWriter, WeightsTarget};

/// A tensor of a whole model, and the first rank of the pipeline that has it.
struct Owned {
    owner: usize,
    name: String,
    info: TensorInfo,
}

impl<M> PreparedModel<M> {
    /// Writes the weights of all stages from rank 0, which has at most one tensor of another stage in memory at a time.
    /// All ranks take part.
    pub(super) fn save_stages(
        &self,
        pipeline: &PipelineRanks,
        state: &[(String, Tensor)],
        to: &WeightsTarget,
    ) -> Result<()> {
        let everyone = pipeline.everyone();
        let spread = self.spread_or_whole();
        let tensors = owned(&spread, pipeline, state, "save_model")?;
        let infos: Vec<_> = tensors.iter().map(|it| (it.name.as_str(), it.info.clone())).collect();
        let mut writer = everyone.on_main_process(|| to.create(&infos))?;
        let mut outcome = Ok(());
        for place in to.order(&infos)? {
            let found = on_first_rank(&spread, pipeline, state, &tensors[place])?;
            // After an error the other ranks still send the remaining tensors.
            if let (Some(writer), Some(tensor), Ok(())) = (&mut writer, found, &outcome) {
                outcome = writer.write(&tensor);
            }
        }
        let finished = everyone.on_main_process(|| {
            outcome?;
            writer.map_or(Ok(()), TargetWriter::finish)
        });
        finished.map(drop)
    }

    /// Calls `take` on rank 0 with each tensor of the whole model. All ranks take part.
    pub(crate) fn each_of_stages(
        &self,
        pipeline: &PipelineRanks,
        mut take: impl FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let state: Vec<(String, Tensor)> = self.model.state_dict().into_iter().collect();
        let spread = self.spread_or_whole();
        let mut outcome = Ok(());
        for tensor in owned(&spread, pipeline, &state, "full_state_dict")? {
            let found = on_first_rank(&spread, pipeline, &state, &tensor)?;
            if let (Some(found), Ok(())) = (found, &outcome) {
                outcome = take(&tensor.name, &found);
            }
        }
        outcome
    }

    /// Replaces this rank's tensors by its parts of rank 0's `state`. All ranks take part.
    pub(crate) fn take_state_of_stages(
        &self,
        pipeline: &PipelineRanks,
        state: Option<&StateDict>,
    ) -> Result<()> {
        let everyone = pipeline.everyone();
        let value = everyone.on_main_process(|| {
            let state = state.ok_or_else(no_state)?;
            let (_, report) = self.model.matched_state(state)?;
            let entry = |(name, values): (&str, &Tensor)| {
                let name = name.strip_prefix(report.prefix.as_str())?;
                Some((name.to_owned(), Value::Tensor(values.shallow_clone())))
            };
            Ok::<_, Error>(Value::dict(state.iter().filter_map(entry)))
        })?;
        let (spread, own) = (self.spread_or_whole(), self.model.state_dict());
        let mut outcome = Ok(());
        everyone.broadcast_values(value, &mut |name, whole| {
            // After an error, the other ranks still wait for this one in the calls that follow.
            if let (Some(tensor), Ok(())) = (own.get(name), &outcome) {
                outcome = spread.put(name, tensor, &whole);
            }
            Ok(Tensor::new())
        })?;
        everyone.agree("load_full_state_dict", outcome)?;
        spread.changed()
    }

    /// Reads the weights of this rank's stages, on every rank by itself. Nothing is changed if one of the ranks has an
    /// error before.
    pub(super) fn load_stages(
        &mut self,
        pipeline: &PipelineRanks,
        path: &Path,
        key: Option<&str>,
    ) -> Result<LoadReport> {
        let spread = self.spread_or_whole();
        let fits = WeightsReader::open_entry(path, key).map_err(Error::from).and_then(|reader| {
            self.model.matched(&reader)?;
            reader.verify()?;
            Ok(reader)
        });
        let (reader, fits) = match fits {
            Ok(reader) => (Some(reader), Ok(())),
            Err(error) => (None, Err(error)),
        };
        pipeline.everyone().agree("load_model", fits)?;
        let loaded = match &reader {
            Some(reader) => spread.read_own(reader),
            None => Ok(LoadReport::default()),
        };
        let (report, outcome) = match loaded {
            Ok(report) => (report, Ok(())),
            Err(error) => (LoadReport::default(), Err(error)),
        };
        pipeline.everyone().agree("load_model", outcome)?;
        Ok(report)
    }
}

/// Returns the tensors of all ranks of this pipeline, each once: a tied parameter belongs to the first rank that has
/// it. All ranks take part.
fn owned<M>(
    spread: &Spread<'_, M>,
    pipeline: &PipelineRanks,
    state: &[(String, Tensor)],
    scope: &'static str,
) -> Result<Vec<Owned>> {
    let own = state.iter().map(|(name, tensor)| Ok((name.clone(), spread.info(name, tensor)?)));
    let all = pipeline.everyone().agree(scope, own.collect::<Result<Vec<_>>>())?;
    let mut names = HashSet::new();
    let mut tensors = Vec::new();
    for (owner, &rank) in pipeline.group().global_ranks().iter().enumerate() {
        for (name, info) in all.get(rank).into_iter().flatten() {
            if names.insert(name) {
                tensors.push(Owned { owner, name: name.clone(), info: info.clone() });
            }
        }
    }
    // The order of the whole model, also if a rank has several stages.
    let order = pipeline.tensor_order();
    tensors.sort_by_key(|it: &Owned| order.get(&it.name).copied());
    Ok(tensors)
}

/// Returns a whole tensor on rank 0, and `None` on the other ranks. All ranks take part.
fn on_first_rank<M>(
    spread: &Spread<'_, M>,
    pipeline: &PipelineRanks,
    state: &[(String, Tensor)],
    Owned { owner, name, info }: &Owned,
) -> Result<Option<Tensor>> {
    let mut whole = None;
    if pipeline.group().rank() == *owner {
        // All ranks of the stage gather, since each has a part.
        let own = state.iter().find(|(known, _)| known == name);
        whole = own.map(|(name, tensor)| spread.whole_value(name, tensor)).transpose()?;
    }
    // The other pipelines have the same weights.
    if !pipeline.group().global_ranks().contains(&0) {
        return Ok(None);
    }
    let found = pipeline.to_first(*owner, whole, name, info)?;
    Ok(found.filter(|_| pipeline.everyone().is_main_process()))
}
