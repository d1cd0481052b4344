//! What all handles of the checkpoints share.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use brigade_checkpoint::layout::{MeshAxis, Placement};
use brigade_sharding::Mesh;
use brigade_torch::{Error, Result, TorchError};
use parking_lot::Mutex;

use super::buffer_pool::BufferPool;
use super::project::ProjectConfiguration;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::pipeline::PipelineRanks;
use crate::processes::Processes;
use crate::registry::Registry;
use crate::sharding::ShardedModels;
use crate::tensor_parallel::TensorModels;

/// What all handles of the checkpoints share.
pub(super) struct Inner {
    pub(super) processes: Processes,
    pub(super) project: ProjectConfiguration,
    pub(super) registry: Arc<Registry>,
    pub(super) accumulator: GradientAccumulator,
    /// Of an Accelerator: weights that a non-finite loss has corrupted are not saved.
    pub(super) loss_check: Option<Arc<LossCheck>>,
    /// How models are sharded, where they are.
    pub(super) sharded: Option<Arc<ShardedModels>>,
    /// Where ranks divide layers between them.
    pub(super) tensor: Option<Arc<TensorModels>>,
    /// Where ranks have stages of models.
    pub(super) pipeline: Option<Arc<PipelineRanks>>,
    /// Whether warnings are left out.
    pub(super) quiet: bool,
    /// A save that is still being written.
    pub(super) pending: Mutex<Option<Pending>>,
    pub(super) copies: Arc<BufferPool>,
    pub(super) save_hooks: Arc<Hooks>,
    pub(super) load_hooks: Arc<Hooks>,
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

    /// Fails where ranks have stages of models: a checkpoint has the same objects on all ranks.
    pub(super) fn refuse_stages(&self, what: &str) -> Result<()> {
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        Err(pipeline.refuse(
            what,
            "save weights by `Accelerator::save_model`, and begin from them; optimizers' states are not saved yet",
        ))
    }

    /// Fails within a window of accumulation whose gradients are not reduced yet: they are whole on each rank, and a
    /// checkpoint has what ranks have of them.
    pub(super) fn gradients_may_be_saved(&self) -> Result<()> {
        let Some(sharded) = self.sharded.as_ref().filter(|_| self.accumulator.position() > 0)
        else {
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

    /// Returns the axes of the ranks' mesh, where models are sharded or layers divided.
    pub(super) fn mesh(&self) -> Option<Vec<MeshAxis>> {
        let sharded = self.sharded.as_ref().map(|sharded| sharded.mesh());
        match &self.tensor {
            Some(tensor) => tensor.axes(sharded).ok(),
            None => sharded.map(Mesh::axes),
        }
    }

    /// Returns the placements of a tensor that all ranks have whole.
    pub(super) fn replicated(&self) -> Vec<Placement> {
        vec![Placement::Replicate; self.mesh().map_or(1, |axes| axes.len())]
    }

    pub(super) fn reset_window(&self) {
        self.accumulator.reset();
        if let Some(check) = &self.loss_check {
            check.reset();
        }
    }
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
