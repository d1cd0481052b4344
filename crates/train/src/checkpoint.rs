//! Checkpoints: the state of everything that is registered, saved and loaded.
//!
//! A save copies the state of the registered objects; a thread of the lowest priority writes each rank's share into a
//! folder under another name; rank 0 writes the manifest, flushes and renames. Files of 16 MB or more bypass the page
//! cache and are written into space that was allocated first. The memory of the copy is kept for the next save. A
//! checkpoint that another one has replaced is removed while the program goes on; the next save, `Checkpoints::wait`
//! and the end of the Accelerator wait for that. The next save also removes what a killed run has left.
//!
//! A load checks everything first, on every rank (manifest, checksums, names, shapes, types, then the sizes of the
//! files once more), and only then reads straight into the tensors.
//!
//! State that differs between ranks, such as the errors of PowerSGD, is in the rank's own file (`StatefulHook`). The
//! position in the data is a number of samples in the order of the epoch, so another number of ranks can continue at
//! the same sample. `brigade checkpoint convert --like` imports a run of another program: a checkpoint that this
//! program has saved shows which state goes where.
//!
//! The manifest is described in `brigade_checkpoint::layout`.

mod buffer_pool;
mod capture;
mod inner;
mod load;
mod message_pack;
mod project;
mod ranks;
mod save;
mod stages;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use brigade_checkpoint::layout;
use brigade_torch::{Error, Result};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use load::{LoadOptions, Loaded};
pub use project::ProjectConfiguration;
pub(crate) use stages::{joined_optimizers, restrict_optimizer};

use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::loss_check::LossCheck;
use crate::model_parallel::ModelParallelRanks;
use crate::pipeline::PipelineRanks;
use crate::processes::Processes;
use crate::registry::{CheckpointObject, Registry};
use crate::sharding::ShardedModels;
use inner::{Inner, Pending};
use message_pack::MessagePack;

/// Saves and loads the state of all registered objects, into folders that appear whole or not at all. All ranks take
/// part. [`crate::Accelerator`] registers the objects that it prepares, and has the same methods under Accelerate's
/// names. A program without an Accelerator uses this type directly.
///
/// A checkpoint holds the registered models, optimizers, schedulers, scalers, loaders and user-defined objects, the
/// random states of all ranks, and the position in the accumulation window.
///
/// Clones are handles of the same checkpoints.
///
/// ```
/// use brigade_nn::{Linear, Model};
/// use brigade_optim::Adam;
/// use brigade_train::{Checkpoints, ConnectOptions, Processes, ProjectConfiguration};
///
/// let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
/// let model = Model::new(|p| Linear::new(p, 4, 1))?;
/// let optimizer = Adam::default().lr(1e-3).build(&model)?;
/// # let folder = std::env::temp_dir().join(format!("brigade-checkpoints-{}", std::process::id()));
/// let checkpoints = Checkpoints::new(&processes, ProjectConfiguration::new(&folder));
/// checkpoints.register(&model);
/// checkpoints.register(&optimizer);
/// let path = checkpoints.save_numbered()?; // checkpoints/checkpoint_0 in the folder
/// checkpoints.wait()?; // it is on the disk
/// let loaded = checkpoints.load(&path)?;
/// assert_eq!(loaded.step, 0);
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone)]
pub struct Checkpoints {
    inner: Arc<Inner>,
}

/// A handle of a registered hook. [`HookHandle::remove`] removes it; dropping the handle does not.
#[derive(Debug)]
pub struct HookHandle {
    checkpoints: Checkpoints,
    saving: bool,
    number: u64,
}

/// State that the ranks save in addition to the registered objects.
#[derive(Default)]
pub(crate) struct Together {
    pub(crate) loss_check: Option<Arc<LossCheck>>,
    pub(crate) sharded: Option<Arc<ShardedModels>>,
    pub(crate) tensor: Option<Arc<ModelParallelRanks>>,
    pub(crate) pipeline: Option<Arc<PipelineRanks>>,
    /// Number of data-parallel ranks. Defaults to all ranks.
    pub(crate) data_ranks: Option<usize>,
}

impl Checkpoints {
    /// Makes checkpoints for these ranks, without registered objects.
    #[must_use]
    pub fn new(processes: &Processes, project: ProjectConfiguration) -> Self {
        Self::with_accumulator(processes, project, &GradientAccumulator::default())
    }

    /// Makes checkpoints as [`Checkpoints::new`] does, which also hold the position in the accumulation window and the
    /// gradients that it has added up.
    #[must_use]
    pub fn with_accumulator(
        processes: &Processes,
        project: ProjectConfiguration,
        accumulator: &GradientAccumulator,
    ) -> Self {
        Self::checked(processes, project, accumulator, Together::default(), false)
    }

    pub(crate) fn checked(
        processes: &Processes,
        project: ProjectConfiguration,
        accumulator: &GradientAccumulator,
        together: Together,
        quiet: bool,
    ) -> Self {
        let Together { loss_check, sharded, tensor, pipeline, data_ranks } = together;
        let inner = Inner {
            processes: processes.clone(),
            data_ranks: data_ranks.unwrap_or_else(|| processes.num_processes()),
            project,
            registry: Arc::default(),
            accumulator: accumulator.clone(),
            loss_check,
            sharded,
            tensor,
            pipeline,
            quiet,
            pending: Mutex::default(),
            copies: Arc::default(),
            save_hooks: Arc::default(),
            load_hooks: Arc::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Returns checkpoints of the same objects, with the same project and hooks, for models with another sharding.
    pub(crate) fn with_sharding(
        &self,
        loss_check: Option<Arc<LossCheck>>,
        sharded: Option<Arc<ShardedModels>>,
    ) -> Self {
        let inner = &self.inner;
        let inner = Inner {
            processes: inner.processes.clone(),
            data_ranks: inner.data_ranks,
            project: inner.project.clone(),
            registry: Arc::clone(&inner.registry),
            accumulator: inner.accumulator.clone(),
            loss_check,
            sharded,
            tensor: inner.tensor.clone(),
            pipeline: inner.pipeline.clone(),
            quiet: inner.quiet,
            pending: Mutex::default(),
            copies: Arc::clone(&inner.copies),
            save_hooks: Arc::clone(&inner.save_hooks),
            load_hooks: Arc::clone(&inner.load_hooks),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Adds an object's state to all following checkpoints. Every rank must register the same objects in the same
    /// order. A registered object is kept alive, and saved even after the program has dropped its own handle. An object
    /// that an Accelerator has prepared is saved only until the program drops it.
    ///
    /// For a model, checkpoints hold the names and tensors that it has at this call: a later call that replaces them,
    /// such as [`brigade_nn::Model::to_device`], has no effect on the checkpoints: register the model after it.
    pub fn register(&self, object: impl Into<CheckpointObject>) {
        self.inner.registry.keep(object.into().0);
    }

    /// Registers a value that serde can serialise and deserialise, as [`Checkpoints::register`] does for objects.
    pub fn register_value<T>(&self, value: &Arc<std::sync::Mutex<T>>)
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        self.register(&Arc::new(MessagePack(Arc::clone(value))));
    }

    /// Saves all registered objects into the folder `path`. Every rank calls it.
    ///
    /// The folder appears whole or not at all, even if the machine stops during the save: it is written under another
    /// name, flushed and renamed. An existing checkpoint at `path` is replaced; any other file or folder there is an
    /// error.
    ///
    /// Training waits only for a copy, whose memory is kept for the next save ([`ProjectConfiguration::keep_copies`]);
    /// a thread of each rank writes its share. A failure is returned by [`Checkpoints::wait`] or by the next save; if
    /// neither is called, it is logged when the last handle is dropped. [`ProjectConfiguration::background`] turns this
    /// off.
    ///
    /// # Errors
    /// Fails on every rank if one rank cannot save, with that rank and its reason. Also returns the error of the
    /// previous save, if it failed.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        save::begin(&self.inner, &save::Target::Path(path.as_ref().to_owned()))
    }

    /// Saves as [`Checkpoints::save`] does, into the next `checkpoint_N` of the project's folder. When the new
    /// checkpoint is complete, the oldest beyond [`ProjectConfiguration::total_limit`] are removed.
    ///
    /// # Errors
    /// Returns the same errors as [`Checkpoints::save`], and [`brigade_torch::ErrorKind::InvalidArgument`] if no
    /// project folder is set.
    pub fn save_numbered(&self) -> Result<PathBuf> {
        save::begin(&self.inner, &save::Target::Numbered)
    }

    /// Waits until the last save is on the disk, and the checkpoint that it replaced is removed. Every rank calls it.
    ///
    /// # Errors
    /// Returns the error of the save, on every rank, and only once.
    pub fn wait(&self) -> Result<()> {
        self.inner.wait()
    }

    /// Returns `true` if this rank still writes its share of the last save.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        let pending = self.inner.pending.lock();
        pending.as_ref().is_some_and(Pending::is_running)
    }

    /// Frees the memory that background saves keep for their next copy. The memory of a save that is still running is
    /// freed by the next call.
    pub fn release_memory(&self) {
        let bytes = self.inner.copies.release();
        tracing::debug!("freed {bytes} bytes of the last save's copy");
    }

    /// Loads a checkpoint into the registered objects. Every rank calls it. A line on standard error reports where the
    /// run cannot continue bit for bit ([`Loaded::rounding_differs`]), unless the Accelerator is quiet.
    ///
    /// Everything is validated before anything is changed: names, shapes and types, sizes and checksums. Values are
    /// read directly into the tensors, so no further memory is needed.
    ///
    /// On another number of ranks the loaders continue at the same sample of the same order; each rank's
    /// random numbers are then its own, not those of the other run.
    ///
    /// # Errors
    /// Fails on every rank, with nothing changed: [`brigade_torch::ErrorKind::Checkpoint`] when the checkpoint is
    /// damaged, foreign or of another version, [`crate::TrainError::CheckpointMismatch`] when it does not fit the
    /// program. Objects may be partly loaded only after [`crate::TrainError::LoadInterrupted`], when the disk fails
    /// after the validation.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        self.load_with(path, LoadOptions::default())
    }

    /// Loads a checkpoint as [`Checkpoints::load`] does, with options.
    ///
    /// # Errors
    /// Returns the same errors as [`Checkpoints::load`].
    pub fn load_with(&self, path: impl AsRef<Path>, options: LoadOptions) -> Result<Loaded> {
        self.load_from(Some(path.as_ref()), options)
    }

    /// Loads the newest `checkpoint_N` of the project's folder, as [`Checkpoints::load`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`Checkpoints::load`], and [`brigade_torch::ErrorKind::Checkpoint`] when there is
    /// none.
    pub fn load_latest(&self) -> Result<Loaded> {
        self.load_from(None, LoadOptions::default())
    }

    fn load_from(&self, path: Option<&Path>, options: LoadOptions) -> Result<Loaded> {
        let loaded = load::load(&self.inner, path, options)?;
        if let Some(difference) = loaded.rounding_differs.as_ref().filter(|_| !self.inner.quiet) {
            self.inner.processes.warn(difference);
        }
        Ok(loaded)
    }

    /// Returns the newest `checkpoint_N` of the project's folder, or `None` if the folder has no checkpoint. All ranks
    /// return rank 0's result.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if no project folder is set;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        let folder = self.inner.project.checkpoints()?;
        let processes = &self.inner.processes;
        let found = processes.on_main_process(|| match layout::latest(&folder) {
            Ok(path) => Ok(Some(path)),
            Err(brigade_checkpoint::Error::NotACheckpoint { .. }) => Ok(None),
            Err(error) => Err(Error::from(error)),
        })?;
        processes.broadcast_object(found.flatten(), 0)
    }

    /// Calls `hook` on every rank in each save, with the folder that is being written: files that the hook writes into
    /// it become part of the checkpoint, with their checksums. Ranks must use different file names. If a hook fails,
    /// the save fails with its error.
    pub fn register_save_hook(
        &self,
        hook: impl Fn(&Path) -> Result<()> + Send + Sync + 'static,
    ) -> HookHandle {
        let number = self.inner.save_hooks.add(Arc::new(hook));
        HookHandle { checkpoints: self.clone(), saving: true, number }
    }

    /// Calls `hook` on every rank in each load, with the checkpoint's folder, after everything was validated and before
    /// any object is changed. If a hook fails, the load fails with its error.
    pub fn register_load_hook(
        &self,
        hook: impl Fn(&Path) -> Result<()> + Send + Sync + 'static,
    ) -> HookHandle {
        let number = self.inner.load_hooks.add(Arc::new(hook));
        HookHandle { checkpoints: self.clone(), saving: false, number }
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.inner.registry
    }

    /// Fails if weights were corrupted on a GPU and no later step has reported it: such weights are not saved.
    pub(crate) fn weights_may_be_saved(&self) -> Result<()> {
        self.inner.weights_may_be_saved()
    }

    /// Returns the ranks that save together.
    pub(crate) fn processes(&self) -> &Processes {
        &self.inner.processes
    }

    /// Prints a warning on the first process of each host, unless the Accelerator is quiet.
    pub(crate) fn warn(&self, message: &str) {
        if !self.inner.quiet {
            self.inner.processes.warn(message);
        }
    }

    /// Discards an interrupted window of accumulation and the check of its losses.
    pub(crate) fn reset_window(&self) {
        self.inner.reset_window();
    }
}

impl HookHandle {
    /// Removes the hook, so that later saves and loads do not call it.
    pub fn remove(self) {
        let Inner { save_hooks, load_hooks, .. } = &*self.checkpoints.inner;
        if self.saving { save_hooks.remove(self.number) } else { load_hooks.remove(self.number) }
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoints")
            .field("project", &self.inner.project)
            .field("registered", &self.inner.registry)
            .finish_non_exhaustive()
    }
}
