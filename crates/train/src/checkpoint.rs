//! Checkpoints: the state of everything that was prepared, saved and loaded.

mod buffer_pool;
mod capture;
mod custom;
mod gather;
mod load;
mod project;
mod ranks;
mod save;
mod stateful;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use brigade_checkpoint::layout::{self, Checkpoint};

pub use load::{LoadOptions, Loaded};
pub use project::ProjectConfiguration;
pub use stateful::Stateful;
pub(crate) use stateful::{infos, same_shape, unboxed};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use buffer_pool::BufferPool;
use save::Pending;

/// What an Accelerator keeps for its checkpoints.
#[derive(Default)]
pub(crate) struct Checkpoints {
    pub(crate) project: ProjectConfiguration,
    /// A save that is still being written.
    pending: Mutex<Option<Pending>>,
    copies: Arc<BufferPool>,
    save_hooks: Hooks,
    load_hooks: Hooks,
}

type Hook = Arc<dyn Fn(&Path) -> Result<(), HookError> + Send + Sync>;
/// The error of a hook, or of a [`Stateful`] object.
pub type HookError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Default)]
struct Hooks {
    next: AtomicU64,
    hooks: Mutex<Vec<(u64, Hook)>>,
}

/// A hook that is registered. [`HookHandle::remove`] removes it; dropping the handle does not.
#[derive(Debug)]
pub struct HookHandle {
    checkpoints: Arc<Checkpoints>,
    saving: bool,
    number: u64,
}

impl Accelerator {
    /// Saves everything that was prepared into the folder `path`, so that [`Accelerator::load_state`]
    /// goes on from here: models, optimizers, schedules, scalers, the random states of all ranks, the
    /// position in the data and in the accumulation window, and what was registered. Every rank calls it.
    ///
    /// The folder appears whole or not at all, also when the machine stops: it is written under another
    /// name, flushed and renamed. A checkpoint that has the name is replaced, anything else is refused.
    ///
    /// Training waits only for a copy, whose memory is kept for the next save
    /// ([`ProjectConfiguration::keep_copies`]); a thread of each rank writes its share. A failure is reported by
    /// [`Accelerator::wait_for_save`], by the next save, or, at the latest and then only in the log, when
    /// the Accelerator is dropped. [`ProjectConfiguration::background`] turns this off.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, Result};
    /// # fn f(accelerator: &Accelerator) -> Result<()> {
    /// accelerator.save_state("checkpoints/best")?;
    /// accelerator.wait_for_save()?; // it is on the disk
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// On every rank when one cannot save, with the rank and its reason; the error of the save before.
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        save::begin(self, &save::Target::Path(path.as_ref().to_owned()))
    }

    /// As [`Accelerator::save_state`], into the next `checkpoint_N` of the project's folder. When it is
    /// there, the oldest beyond [`ProjectConfiguration::total_limit`] are removed.
    ///
    /// # Errors
    /// As there; [`Error::InvalidArgument`] without a project folder.
    pub fn save_state_numbered(&self) -> Result<PathBuf> {
        save::begin(self, &save::Target::Numbered)
    }

    /// Waits until the last save is on the disk, and what it replaced is removed. Every rank calls it.
    ///
    /// # Errors
    /// The save's, on every rank; it is reported once.
    pub fn wait_for_save(&self) -> Result<()> {
        self.checkpoints.wait()
    }

    /// Whether this rank still writes its share of the last save.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        self.checkpoints.is_saving()
    }

    /// Frees the memory that background saves keep for their next copy. What a running save uses is freed
    /// by the next call.
    pub fn release_save_memory(&self) {
        let bytes = self.checkpoints.copies.release();
        tracing::debug!("freed {bytes} bytes of the last save's copy");
    }

    /// Continues from a checkpoint: puts all that it holds into what was prepared. Every rank calls it,
    /// after `prepare` and before the loop.
    ///
    /// Everything is validated before anything is changed: names, shapes and types, sizes and checksums.
    /// Tensors are read straight into their places, so it takes no memory beside them.
    ///
    /// On another number of ranks the loaders go on at the same sample of the same order; each rank's
    /// random numbers are then its own, not those of the other run.
    ///
    /// # Errors
    /// On every rank, and nothing was changed: [`Error::Checkpoint`] when it is damaged, foreign or of
    /// another version, [`Error::CheckpointMismatch`] when it does not fit the program. Only
    /// [`Error::LoadInterrupted`] leaves a part changed: a disk that fails after all was verified.
    pub fn load_state(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        load::load(self, Some(path.as_ref()), LoadOptions::default())
    }

    /// As [`Accelerator::load_state`], with choices.
    ///
    /// # Errors
    /// As there.
    pub fn load_state_with(&self, path: impl AsRef<Path>, options: LoadOptions) -> Result<Loaded> {
        load::load(self, Some(path.as_ref()), options)
    }

    /// As [`Accelerator::load_state`], from the newest `checkpoint_N` of the project's folder.
    ///
    /// # Errors
    /// As there; [`Error::Checkpoint`] when there is none.
    pub fn load_latest_state(&self) -> Result<Loaded> {
        load::load(self, None, LoadOptions::default())
    }

    /// The newest `checkpoint_N` of the project's folder, where there is one: whether to begin or to go
    /// on. All ranks get rank 0's answer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without a project folder; [`Error::Torch`] when a peer is gone.
    pub fn latest_checkpoint(&self) -> Result<Option<PathBuf>> {
        let folder = self.checkpoints.project.checkpoints()?;
        let found = self.on_main_process(|| match layout::latest(&folder) {
            Ok(path) => Ok(Some(path)),
            Err(brigade_checkpoint::Error::NotACheckpoint { .. }) => Ok(None),
            Err(error) => Err(Error::from(error)),
        })?;
        self.broadcast_object(found.flatten(), 0)
    }

    /// Leaves out the first batches of a loader's next epoch, as after a restart that no checkpoint
    /// tells of. A loader that `load_state` has restored does so by itself.
    pub fn skip_first_batches<L: crate::loader::Loader>(
        &self,
        loader: &crate::loader::PreparedLoader<L>,
        batches: usize,
    ) {
        let inner = loader.inner();
        inner.resume(inner.order_seed(), inner.next_epoch(), 0, batches);
    }

    /// Calls `hook` on every rank in each save, with the folder that is being written: files that it
    /// writes there become part of the checkpoint, with their checksums. Ranks must choose different
    /// names.
    pub fn register_save_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), HookError> + Send + Sync + 'static,
    ) -> HookHandle {
        let number = self.checkpoints.save_hooks.add(Arc::new(hook));
        HookHandle { checkpoints: Arc::clone(&self.checkpoints), saving: true, number }
    }

    /// Calls `hook` on every rank in each load, with the checkpoint's folder, after all was validated and
    /// before anything is changed.
    pub fn register_load_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), HookError> + Send + Sync + 'static,
    ) -> HookHandle {
        let number = self.checkpoints.load_hooks.add(Arc::new(hook));
        HookHandle { checkpoints: Arc::clone(&self.checkpoints), saving: false, number }
    }
}

impl Checkpoints {
    pub(crate) fn new(project: ProjectConfiguration) -> Self {
        let mut checkpoints = Self::default();
        checkpoints.project = project;
        checkpoints
    }

    fn is_saving(&self) -> bool {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.as_ref().is_some_and(Pending::is_running)
    }

    fn wait(&self) -> Result<()> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        pending.map_or(Ok(()), Pending::join)
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("the last checkpoint was not saved: {error}");
        }
    }
}

impl Hooks {
    fn add(&self, hook: Hook) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner).push((number, hook));
        number
    }

    fn remove(&self, number: u64) {
        let mut hooks = self.hooks.lock().unwrap_or_else(PoisonError::into_inner);
        hooks.retain(|(known, _)| *known != number);
    }

    /// A hook may register or remove hooks: they are called on a copy of the list.
    fn call(&self, folder: &Path) -> Result<()> {
        let hooks = self.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        hooks.iter().try_for_each(|(_, hook)| hook(folder).map_err(Error::User))
    }
}

impl HookHandle {
    /// Removes the hook.
    pub fn remove(self) {
        let Checkpoints { save_hooks, load_hooks, .. } = &*self.checkpoints;
        if self.saving { save_hooks.remove(self.number) } else { load_hooks.remove(self.number) }
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoints").field("project", &self.project).finish_non_exhaustive()
    }
}

/// What an error of the files means for the loop.
impl From<brigade_checkpoint::Error> for Error {
    fn from(error: brigade_checkpoint::Error) -> Self {
        Self::Checkpoint(error)
    }
}

/// How many objects of each kind a checkpoint has, for messages.
fn count_kinds(checkpoint: &Checkpoint, kind: &str) -> usize {
    checkpoint.manifest().of_kind(kind).count()
}
