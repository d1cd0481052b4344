//! Models of which this rank has some pipeline stages.

use brigade_torch::NamedTensor;

use super::Model;
use super::parts::is_under;
use crate::param_registry::{Entry, Role};
use crate::pipeline::Row;
use crate::{PipelineParallel, PipelineStages};

/// Division of a model's entries between this rank and others.
#[derive(Default)]
pub(super) struct Cut {
    pub(super) entries: Vec<Entry>,
    pub(super) stages: Option<PipelineStages>,
    /// Entries of other ranks, whose tensors have no memory.
    pub(super) elsewhere: Vec<Entry>,
}

impl Cut {
    /// Keeps the entries of this rank's stages.
    pub(super) fn new(
        pipeline: PipelineParallel,
        rows: Vec<Row>,
        entries: Vec<Entry>,
    ) -> Result<Self, String> {
        let (mut stages, row) = PipelineStages::new(pipeline, rows)?;
        let of_names = stages_of(&stages, &row, &entries)?;
        // Stages of each tensor, at the index of its first name.
        let mut of_tensors: Vec<Vec<usize>> = vec![Vec::new(); entries.len()];
        for (index, (entry, stage)) in entries.iter().zip(of_names).enumerate() {
            let first = if let Role::SameAs(first) = entry.role { first } else { index };
            of_tensors[first].push(stage);
        }
        for stages in &mut of_tensors {
            stages.sort_unstable();
            stages.dedup();
        }
        let saved = entries.iter().filter(|it| it.role != Role::Buffer { persistent: false });
        stages.saved = saved.map(|entry| entry.name.clone()).collect();
        let mut places = vec![None; entries.len()];
        let mut cut = Self::default();
        for (index, mut entry) in entries.into_iter().enumerate() {
            let is_kept = match entry.role {
                Role::SameAs(first) => match places[first] {
                    Some(place) => {
                        entry.role = Role::SameAs(place);
                        true
                    }
                    None => false,
                },
                role => stages.add(&entry.name, role == Role::Parameter, &of_tensors[index]),
            };
            if is_kept {
                places[index] = Some(cut.entries.len());
                cut.entries.push(entry);
                continue;
            }
            cut.elsewhere.push(entry);
        }
        cut.stages = Some(stages);
        Ok(cut)
    }
}

/// Returns the stage of each name: the stage of its block, the first stage for names that were registered before the
/// blocks, and the last stage for names after them.
fn stages_of(stages: &PipelineStages, row: &Row, entries: &[Entry]) -> Result<Vec<usize>, String> {
    let block_of = |entry: &Entry| row.blocks.iter().position(|block| is_under(&entry.name, block));
    let blocks: Vec<Option<usize>> = entries.iter().map(block_of).collect();
    let first = blocks.iter().position(Option::is_some);
    let last = blocks.iter().rposition(Option::is_some);
    let (Some(first), Some(last)) = (first, last) else {
        return Err("the blocks of the row at which a pipeline cuts the model have no parameters"
            .to_owned());
    };
    let of_name = |(index, block): (usize, &Option<usize>)| match block {
        Some(block) => Ok(stages.stage_of(*block)),
        None if index < first => Ok(0),
        None if index > last => Ok(stages.stages() - 1),
        None => Err(format!(
            "`{}` was registered between the blocks of a row but not within one of them, so its stage is \
             unknown: register it before or after the blocks",
            entries[index].name
        )),
    };
    blocks.iter().enumerate().map(of_name).collect()
}

impl<M> Model<M> {
    /// Returns the division of the model into pipeline stages. `None` for a model that was built without
    /// [`ModelBuilder::pipeline`](crate::ModelBuilder::pipeline).
    #[must_use]
    pub fn pipeline(&self) -> Option<&PipelineStages> {
        self.stages.as_ref()
    }

    /// Returns the parameters of a stage that this rank has.
    #[must_use]
    pub fn stage_parameters(&self, stage: usize) -> Vec<NamedTensor> {
        let names = self.stages.as_ref().map_or(&[][..], |it| it.parameters_of(stage));
        let mut parameters = self.parameters();
        parameters.retain(|parameter| names.contains(&parameter.name));
        parameters
    }

    /// Returns the name of a batch normalisation whose statistics are not shared between ranks. `None` if there is no
    /// batch normalisation, and after [`Model::convert_sync_batch_norm`].
    #[must_use]
    pub fn unshared_batch_norm(&self) -> Option<&str> {
        let first = self.batch_norms.first().filter(|_| !self.statistics.is_shared());
        first.map(String::as_str)
    }
}
