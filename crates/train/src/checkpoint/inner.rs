//! What all handles of the checkpoints share.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use brigade_torch::{Result, TorchError};

use super::buffer_pool::BufferPool;
use super::project::ProjectConfiguration;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::processes::Processes;
use crate::registry::Registry;

/// What all handles of the checkpoints share.
pub(super) struct Inner {
    pub(super) processes: Processes,
    pub(super) project: ProjectConfiguration,
    pub(super) registry: Arc<Registry>,
    pub(super) accumulator: GradientAccumulator,
    /// Of an Accelerator: weights that a non-finite loss has corrupted are not saved.
    pub(super) loss_check: Option<Arc<LossCheck>>,
    /// Whether warnings are left out.
    pub(super) quiet: bool,
    /// A save that is still being written.
    pub(super) pending: Mutex<Option<Pending>>,
    pub(super) copies: Arc<BufferPool>,
    pub(super) save_hooks: Hooks,
    pub(super) load_hooks: Hooks,
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
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        pending.map_or(Ok(()), Pending::join)
    }

    pub(super) fn weights_may_be_saved(&self) -> Result<()> {
        self.accumulator.settle()?;
        self.loss_check.as_ref().map_or(Ok(()), |check| check.before_save())
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
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner).push((number, hook));
        number
    }

    pub(super) fn remove(&self, number: u64) {
        let mut hooks = self.hooks.lock().unwrap_or_else(PoisonError::into_inner);
        hooks.retain(|(known, _)| *known != number);
    }

    /// A hook may register or remove hooks: they are called on a copy of the list.
    pub(super) fn call(&self, folder: &Path) -> Result<()> {
        let hooks = self.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        hooks.iter().try_for_each(|(_, hook)| hook(folder))
    }
}
