//! Settings of a project's checkpoints: their folder, and how they are written.

use std::path::PathBuf;

use brigade_torch::{Error, Result};

/// Settings of checkpoints: the folder of numbered ones, how many of them are kept, and how all checkpoints are
/// written.
///
/// ```
/// use brigade_train::{Accelerator, ProjectConfiguration};
///
/// # let folder = std::env::temp_dir().join(format!("brigade-project-{}", std::process::id()));
/// let project = ProjectConfiguration::new(&folder).total_limit(3);
/// let accelerator = Accelerator::builder().project(project).build()?;
/// let path = accelerator.checkpoints().save_numbered()?;
/// assert_eq!(path, folder.join("checkpoints/checkpoint_0"));
/// # accelerator.checkpoints().wait()?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ProjectConfiguration {
    project_dir: Option<PathBuf>,
    pub(super) total_limit: Option<usize>,
    pub(super) iteration: u64,
    pub(super) max_shard_bytes: u64,
    pub(super) background: bool,
    pub(super) flush: bool,
    keep_copies: bool,
}

impl Default for ProjectConfiguration {
    fn default() -> Self {
        Self {
            project_dir: None,
            total_limit: None,
            iteration: 0,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            background: true,
            flush: true,
            keep_copies: true,
        }
    }
}

impl ProjectConfiguration {
    /// Makes the configuration of a project folder, which is created when it is needed.
    pub fn new(project_dir: impl Into<PathBuf>) -> Self {
        Self { project_dir: Some(project_dir.into()), ..Self::default() }
    }

    /// Sets the maximum number of numbered checkpoints. By default all are kept. The oldest are removed once the new
    /// one is complete.
    pub fn total_limit(mut self, limit: usize) -> Self {
        self.total_limit = Some(limit.max(1));
        self
    }

    /// Sets the minimum number of the next checkpoint. Defaults to 0. If the folder has a checkpoint with a greater
    /// number, the next checkpoint has that number plus 1.
    pub fn iteration(mut self, iteration: u64) -> Self {
        self.iteration = iteration;
        self
    }

    /// Sets the maximum size of a safetensors file in bytes: larger weights are written in several files, with an
    /// index. Defaults to 5 GB. With several ranks the files are smaller, one or more for each rank.
    pub fn max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes.max(1);
        self
    }

    /// Sets whether a thread writes checkpoints while training continues, from a copy in memory. Defaults to `true`.
    /// Otherwise nothing is copied, and `save_state` returns when everything is written.
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Sets whether files are flushed to the disk before the checkpoint gets its name. Defaults to `true`. Otherwise a
    /// checkpoint survives a killed program, but not a power failure.
    pub fn flush(mut self, flush: bool) -> Self {
        self.flush = flush;
        self
    }

    /// Sets whether the memory of a background save's copy is kept for the next save: as much as this rank writes, so
    /// at most all weights and states. Defaults to `true`. Otherwise every save allocates new memory, which can take
    /// longer than the copy itself. [`Checkpoints::release_memory`](crate::Checkpoints::release_memory) frees it once.
    pub fn keep_copies(mut self, keep: bool) -> Self {
        self.keep_copies = keep;
        self
    }

    pub(super) fn keeps_copies(&self) -> bool {
        self.background && self.keep_copies
    }

    /// Returns the folder of the numbered checkpoints, the same as Accelerate's.
    pub(super) fn checkpoints(&self) -> Result<PathBuf> {
        let folder = self.project_dir.as_ref().map(|folder| folder.join("checkpoints"));
        folder.ok_or_else(|| {
            Error::invalid_argument(
                "checkpoints with a number need a folder: give \
                 Accelerator::builder().project(ProjectConfiguration::new(\"…\"))",
            )
        })
    }
}

/// Default maximum size of a weights file, the same as Hugging Face's.
const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;
