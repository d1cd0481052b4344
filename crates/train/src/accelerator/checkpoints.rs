//! Checkpoints of what was prepared: the methods of [`Checkpoints`], under Accelerate's names.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Accelerator;
use crate::checkpoint::{Checkpoints, HookHandle, LoadOptions, Loaded};
use crate::error::Result;
use crate::stateful::{HookError, Stateful};

impl Accelerator {
    /// Returns the checkpoints as a value of their own: for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Saves everything that was prepared into the folder `path`, so that [`Accelerator::load_state`]
    /// goes on from here: models, optimizers, schedules, scalers, the random states of all ranks, the
    /// position in the data and in the accumulation window, and what was registered. Every rank calls it.
    ///
    /// A prepared object that the program has dropped is not saved any more, and a load does not expect it.
    ///
    /// The folder appears whole or not at all, and training waits only for a copy: see [`Checkpoints::save`].
    ///
    /// ```
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// # let folder = std::env::temp_dir().join(format!("brigade-save-{}", std::process::id()));
    /// accelerator.save_state(folder.join("best"))?;
    /// accelerator.wait_for_save()?; // it is on the disk
    /// accelerator.load_state(folder.join("best"))?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.checkpoints.save(path)
    }

    /// As [`Accelerator::save_state`], into the next `checkpoint_N` of the project's folder. When it is
    /// there, the oldest beyond [`crate::ProjectConfiguration::total_limit`] are removed.
    ///
    /// # Errors
    /// As [`Checkpoints::save_numbered`].
    pub fn save_state_numbered(&self) -> Result<PathBuf> {
        self.checkpoints.save_numbered()
    }

    /// Waits until the last save is on the disk, and what it replaced is removed. Every rank calls it.
    ///
    /// # Errors
    /// The save's, on every rank; it is reported once.
    pub fn wait_for_save(&self) -> Result<()> {
        self.checkpoints.wait()
    }

    /// Returns whether this rank still writes its share of the last save.
    #[must_use]
    pub fn is_saving(&self) -> bool {
        self.checkpoints.is_saving()
    }

    /// Frees the memory that background saves keep for their next copy. What a running save uses is freed
    /// by the next call.
    pub fn release_save_memory(&self) {
        self.checkpoints.release_memory();
    }

    /// Continues from a checkpoint: puts all that it holds into what was prepared. Every rank calls it,
    /// after `prepare` and before the loop. A line on standard error says where the run cannot go on bit for
    /// bit ([`Loaded::rounding_differs`]).
    ///
    /// Everything is validated before anything is changed; see [`Checkpoints::load`].
    ///
    /// # Errors
    /// As [`Checkpoints::load`].
    pub fn load_state(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        self.load_state_with(path, LoadOptions::default())
    }

    /// As [`Accelerator::load_state`], with choices.
    ///
    /// # Errors
    /// As there.
    pub fn load_state_with(&self, path: impl AsRef<Path>, options: LoadOptions) -> Result<Loaded> {
        self.checkpoints.load_with(path, options).inspect(|loaded| self.warn_of_rounding(loaded))
    }

    /// As [`Accelerator::load_state`], from the newest `checkpoint_N` of the project's folder.
    ///
    /// # Errors
    /// As [`Checkpoints::load_latest`].
    pub fn load_latest_state(&self) -> Result<Loaded> {
        self.checkpoints.load_latest().inspect(|loaded| self.warn_of_rounding(loaded))
    }

    fn warn_of_rounding(&self, loaded: &Loaded) {
        if let Some(difference) = &loaded.rounding_differs {
            self.warn(difference);
        }
    }

    /// Returns the newest `checkpoint_N` of the project's folder, where there is one: whether to begin or to
    /// go on. All ranks get rank 0's answer.
    ///
    /// # Errors
    /// As [`Checkpoints::latest`].
    pub fn latest_checkpoint(&self) -> Result<Option<PathBuf>> {
        self.checkpoints.latest()
    }

    /// Makes an object's state part of all checkpoints; see [`Stateful`]. Rank 0's is saved, all ranks
    /// load it. Every rank registers the same objects in the same order. The Accelerator keeps the object.
    ///
    /// For plain data, [`Accelerator::register_value_for_checkpointing`] needs no implementation.
    pub fn register_for_checkpointing<T>(&self, object: &Arc<T>)
    where
        T: Stateful + Send + Sync + 'static,
    {
        self.checkpoints.register(object);
    }

    /// As [`Accelerator::register_for_checkpointing`], for data that serde can write and read.
    ///
    /// ```
    /// # use std::sync::{Arc, Mutex};
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// let best = Arc::new(Mutex::new(0.0f64));
    /// accelerator.register_value_for_checkpointing(&best);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn register_value_for_checkpointing<T>(&self, value: &Arc<Mutex<T>>)
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        self.checkpoints.register_value(value);
    }

    /// Calls `hook` on every rank in each save; see [`Checkpoints::register_save_hook`].
    pub fn register_save_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), HookError> + Send + Sync + 'static,
    ) -> HookHandle {
        self.checkpoints.register_save_hook(hook)
    }

    /// Calls `hook` on every rank in each load; see [`Checkpoints::register_load_hook`].
    pub fn register_load_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), HookError> + Send + Sync + 'static,
    ) -> HookHandle {
        self.checkpoints.register_load_hook(hook)
    }
}
