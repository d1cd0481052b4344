//! The state of a run, saved and loaded; all else about checkpoints is reached by [`Checkpoints`].

use std::path::{Path, PathBuf};

use brigade_torch::Result;

use super::Accelerator;
use crate::checkpoint::{Checkpoints, Loaded};

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
    /// accelerator.checkpoints().wait()?; // it is on the disk
    /// accelerator.load_state(folder.join("best"))?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        self.checkpoints.save(path)
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
        self.checkpoints.load(path)
    }
}
