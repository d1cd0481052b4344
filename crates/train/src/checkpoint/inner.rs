//! State that all handles of the checkpoints share.

use std::iter;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use brigade_checkpoint::layout::{MeshAxis, Placement};
use brigade_sharding::{Axis, Mesh};
use brigade_torch::{Error, Result, TorchError};
use parking_lot::Mutex;

use super::buffer_pool::BufferPool;
use super::project::ProjectConfiguration;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::model_parallel::ModelParallelRanks;
use crate::pipeline::PipelineRanks;
use crate::processes::Processes;
use crate::registry::Registry;
use crate::sharding::ShardedModels;

/// State that all handles of the checkpoints share.
pub(super) struct Inner {
    pub(super) processes: Processes,
    /// Number of data-parallel ranks.
    pub(super) data_ranks: usize,
    pub(super) project: ProjectConfiguration,
    pub(super) registry: Arc<Registry>,
    pub(super) accumulator: GradientAccumulator,
    /// Loss check of an Accelerator: weights that a non-finite loss has corrupted are not saved.
    pub(super) loss_check: Option<Arc<LossCheck>>,
    /// Sharded models, if models are sharded.
    pub(super) sharded: Option<Arc<ShardedModels>>,
    /// Models of tensor groups, if ranks divide layers.
    pub(super) tensor: Option<Arc<ModelParallelRanks>>,
    /// Ranks of pipelines, if ranks have stages of models.
    pub(super) pipeline: Option<Arc<PipelineRanks>>,
    /// `true` if warnings are left out.
    pub(super) quiet: bool,
    /// A save that is still being written.
    pub(super) pending: Mutex<Option<Pending>>,
    pub(super) copies: Arc<BufferPool>,
    pub(super) save_hooks: Arc<Hooks>,
    pub(super) load_hooks: Arc<Hooks>,
}

/// Ranks that have the same objects as this one: all ranks, or those at the same place in their pipelines.
pub(super) struct Holders {
    /// Index of this rank among them.
    pub(super) place: usize,
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Stage of this rank in the pipeline, and the number of stages.
    pub(super) stage: Option<(usize, usize)>,
}

/// A save that a thread completes in the background.
pub(super) struct Pending(pub(super) JoinHandle<Result<()>>);

pub(super) type Hook = Arc<dyn Fn(&Path) -> Result<()> + Send + Sync>;

#[derive(Default)]
pub(super) struct Hooks {
    next: AtomicU64,
    hooks: Mutex<Vec<(u64, Hook)>>,
}

impl Inner {
    pub(super) fn wait(&self) -> Result<()> {
        let pending = self.pending.lock().take();
        pending.map_or(Ok(()), Pending::join)
    }

    pub(super) fn weights_may_be_saved(&self) -> Result<()> {
        self.accumulator.settle()?;
        self.loss_check.as_ref().map_or(Ok(()), |check| check.before_save())
    }

    /// Fails within an accumulation window whose gradients are not reduced yet: they are whole on each rank, while a
    /// checkpoint stores the parts that ranks hold.
    pub(super) fn gradients_may_be_saved(&self) -> Result<()> {
        // Pipelines reduce gradients at the end of a step.
        let in_window = self.accumulator.position() > 0 && self.pipeline.is_none();
        let Some(sharded) = self.sharded.as_ref().filter(|_| in_window) else {
            return Ok(());
        };
        if sharded.models().iter().all(|model| model.has_reduced_gradients()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "save_state after {} batches of a window of accumulation: {} sums gradients over all ranks at the window's end \
             alone, and they would be lost; save after the optimizer's step",
            self.accumulator.position(),
            sharded.sharding().strategy
        )))
    }

    /// Returns the axes of the ranks' mesh if models are sharded, layers are divided, or ranks have stages.
    pub(super) fn mesh(&self) -> Option<Vec<MeshAxis>> {
        let sharded = self.sharded.as_ref().map(|sharded| sharded.mesh());
        let of_stage = match &self.tensor {
            Some(tensor) => Some(tensor.axes(sharded)),
            None => sharded.map(Mesh::axes),
        };
        let Some(pipeline) = &self.pipeline else { return of_stage };
        let axis = |axis: Axis, size| MeshAxis { name: axis.name().to_owned(), size };
        let stages = pipeline.group().size();
        let replicas = self.processes.num_processes() / stages;
        let replicas = (replicas > 1).then(|| axis(Axis::Replicate, replicas));
        let of_stage = of_stage.unwrap_or_else(|| replicas.into_iter().collect());
        Some(iter::once(axis(Axis::Pipeline, stages)).chain(of_stage).collect())
    }

    /// Returns the placements of a tensor that all ranks of its stage have whole.
    pub(super) fn replicated(&self) -> Vec<Placement> {
        vec![Placement::Replicate; self.mesh().map_or(1, |axes| axes.len())]
    }

    /// Extends placements on a stage's axes by the pipeline's axis, along which tensors are not divided.
    pub(super) fn with_stages(&self, mut placements: Vec<Placement>) -> Vec<Placement> {
        if self.pipeline.is_some() {
            placements.insert(0, Placement::Replicate);
        }
        placements
    }

    /// Returns the ranks that have the same objects, and the index of this one.
    pub(super) fn holders(&self) -> Holders {
        let (rank, ranks) = (self.processes.process_index(), self.processes.num_processes());
        match &self.pipeline {
            None => Holders { place: rank, ranks, stage: None },
            Some(pipeline) => {
                let (stage, stages) = (pipeline.group().rank(), pipeline.group().size());
                // The ranks of a pipeline are along the outermost axis.
                let ranks = ranks / stages;
                Holders { place: rank % ranks, ranks, stage: Some((stage, stages)) }
            }
        }
    }

    pub(super) fn reset_window(&self) {
        self.accumulator.reset();
        if let Some(check) = &self.loss_check {
            check.reset();
        }
    }
}

/// Returns the number of ranks of a mesh that read different samples: ranks that divide layers, or have stages of one
/// model, read the same ones.
pub(super) fn data_ranks(ranks: usize, mesh: &[MeshAxis]) -> usize {
    let size = |wanted: Axis| {
        let axis = mesh.iter().find(|axis| axis.name == wanted.name());
        axis.map_or(1, |axis| axis.size).max(1)
    };
    ranks / size(Axis::Tensor) / size(Axis::Pipeline)
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("the last checkpoint was not saved: {error}");
        }
    }
}

impl Pending {
    pub(super) fn is_running(&self) -> bool {
        !self.0.is_finished()
    }

    pub(super) fn join(self) -> Result<()> {
        let panicked = |_| {
            Err(TorchError::Internal("the thread that wrote a checkpoint panicked".into()).into())
        };
        self.0.join().unwrap_or_else(panicked)
    }
}

impl Hooks {
    pub(super) fn add(&self, hook: Hook) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.hooks.lock().push((number, hook));
        number
    }

    pub(super) fn remove(&self, number: u64) {
        let mut hooks = self.hooks.lock();
        hooks.retain(|(known, _)| *known != number);
    }

    /// A hook may register or remove hooks: they are called on a copy of the list.
    pub(super) fn call(&self, folder: &Path) -> Result<()> {
        let hooks = self.hooks.lock().clone();
        hooks.iter().try_for_each(|(_, hook)| hook(folder))
    }
}
