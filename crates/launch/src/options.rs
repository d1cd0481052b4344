//! What a user can ask of a launch.

use std::ffi::OsString;
use std::time::Duration;

use crate::{NprocSpec, OutputOptions, PlacementOptions, Program};

/// What to start and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchOptions {
    /// Number of ranks, all on this host: at least 1.
    pub nproc: NprocSpec,
    /// What to start.
    pub program: Program,
    /// Its arguments, passed on as they are, but for `${local_rank}`, which every rank has its
    /// number for.
    pub args: Vec<OsString>,
    /// `OMP_NUM_THREADS` of each rank. Default: what the environment says, else the cores of this
    /// host shared out evenly.
    pub threads_per_rank: Option<usize>,
    /// Variables for every rank, besides this process's own and before those that say its place.
    pub env: Vec<(String, String)>,
    /// How long ranks may take to stop after SIGTERM before they are killed.
    pub shutdown_timeout: Duration,
    /// Where the ranks' output goes.
    pub output: OutputOptions,
    /// Which processors and accelerators the ranks get.
    pub placement: PlacementOptions,
}

/// One rank of no program; 30 s to stop, as torchrun.
impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            nproc: NprocSpec::Count(1),
            program: Program::default(),
            args: Vec::new(),
            threads_per_rank: None,
            env: Vec::new(),
            shutdown_timeout: Duration::from_secs(30),
            output: OutputOptions::default(),
            placement: PlacementOptions::default(),
        }
    }
}
