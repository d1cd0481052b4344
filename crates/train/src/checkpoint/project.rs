//! Where a project's checkpoints lie, and how they are written.

use std::path::PathBuf;

use brigade_torch::{Error, Result};

/// Where checkpoints with a number go, how many are kept, and how all checkpoints are written.
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
    /// In a folder, which is made when it is needed.
    pub fn new(project_dir: impl Into<PathBuf>) -> Self {
        Self { project_dir: Some(project_dir.into()), ..Self::default() }
    }

    /// How many numbered checkpoints are kept; all unless set. The oldest are removed when the new one is
    /// there, not before.
    pub fn total_limit(mut self, limit: usize) -> Self {
        self.total_limit = Some(limit.max(1));
        self
    }

    /// The least number of the next checkpoint; 0 unless set. One that is greater than all that are there
    /// is taken in any case.
    pub fn iteration(mut self, iteration: u64) -> Self {
        self.iteration = iteration;
        self
    }

    /// The largest safetensors file, 5 GB unless set: weights beyond it are written in several, with an
    /// index. With several ranks the files are smaller, one or more for each rank.
    pub fn max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes.max(1);
        self
    }

    /// Whether a thread writes while training goes on, from a copy in memory. On unless set. Without,
    /// there is no copy and `save_state` returns when all is written.
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Whether files are flushed to the disk before the checkpoint gets its name. On unless set: without,
    /// a checkpoint survives a killed program, but not a power failure.
    pub fn flush(mut self, flush: bool) -> Self {
        self.flush = flush;
        self
    }

    /// Whether the memory of a background save's copy is kept for the next save: as much as this rank
    /// writes, so at most all weights and states. On unless set. Without, every save takes new memory,
    /// which can take longer than the copy itself.
    /// [`Checkpoints::release_memory`](crate::Checkpoints::release_memory) frees it once.
    pub fn keep_copies(mut self, keep: bool) -> Self {
        self.keep_copies = keep;
        self
    }

    pub(super) fn keeps_copies(&self) -> bool {
        self.background && self.keep_copies
    }

    /// The folder of the numbered checkpoints, Accelerate's.
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

/// As Hugging Face's.
const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;
