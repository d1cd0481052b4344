//! The state of a run, saved and loaded; all else about checkpoints is reached by [`Checkpoints`].

use std::path::{Path, PathBuf};

use brigade_torch::Result;

use super::Accelerator;
use crate::checkpoint::{Checkpoints, Loaded};

impl Accelerator {
    /// Returns the checkpoints, for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Saves everything that was prepared into the folder `path`, so that [`Accelerator::load_state`] continues from
    /// this point: models, optimizers, schedules, scalers, the random states of all ranks, the position in the data and
    /// in the accumulation window, and registered objects. Every rank calls it.
    ///
    /// A prepared object that the program has dropped is not saved any more, and a load does not expect it.
    ///
    /// The folder appears whole or not at all, and training waits only for a copy: see [`Checkpoints::save`].
    ///
    /// ```
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// # let folder = std::env::temp_dir().join(format!("brigade-save-{}", std::process::id()));
    /// accelerator.save_state(folder.join("best"))?;
    /// accelerator.checkpoints().wait()?; // it is on the disk
    /// accelerator.load_state(folder.join("best"))?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Checkpoints::save`].
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.checkpoints.save(path)
    }

    /// Loads a checkpoint into the prepared objects. Every rank calls it, after `prepare` and before the loop. A line
    /// on standard error reports where the run cannot continue bit for bit ([`Loaded::rounding_differs`]).
    ///
    /// Everything is validated before anything is changed; see [`Checkpoints::load`].
    ///
    /// # Errors
    /// Returns the same errors as [`Checkpoints::load`].
    pub fn load_state(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        self.checkpoints.load(path)
    }
}
