//! What a user can ask of a launch.

use std::ffi::OsString;
use std::time::Duration;

/// What to start and how often.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LaunchOptions {
    /// Number of ranks, all on this host: at least 1.
    pub nproc: usize,
    pub local_addr: Option<String>,
    /// The program: a path where it has a slash, else a name that is looked up in `PATH`.
    pub program: OsString,
    /// Its arguments, passed on as they are.
    pub args: Vec<OsString>,
    /// `OMP_NUM_THREADS` of each rank. Default: what the environment says, else the cores of this
    /// host shared out evenly.
    pub threads_per_rank: Option<usize>,
    /// How long ranks may take to stop after SIGTERM before they are killed.
    pub shutdown_timeout: Duration,
}

/// One rank of no program; 30 s to stop, as torchrun.
impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            nproc: 1,
            local_addr: None,
            program: OsString::new(),
            args: Vec::new(),
            threads_per_rank: None,
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}
