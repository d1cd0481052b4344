//! Errors of a job that was not started.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use brigade_rank_env::WorldError;
use brigade_rendezvous::RendezvousError;

use crate::{BindError, DeviceError, ProgramError, SchedulerError};

/// Error of a launch that ended before any of the user's program ran.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of ranks, or of threads per rank, is out of range.
    #[error("--{option} {value} is not possible: {reason}")]
    OptionOutOfRange {
        /// Name of the option.
        option: &'static str,
        /// Value of the option.
        value: usize,
        /// Reason why the value is not possible.
        reason: &'static str,
    },
    /// An option selects local ranks none of which exist on this host.
    #[error("--{option} names local rank {rank}, but this host has only local ranks 0 to {}", nproc - 1)]
    NoSuchLocalRank {
        /// Name of the option.
        option: &'static str,
        /// Lowest local rank that the option selects.
        rank: usize,
        /// Number of ranks on this host.
        nproc: usize,
    },
    /// The terminal cannot be passed through to a rank.
    #[error(
        "--raw connects the rank to the terminal, so the launcher does not read its output: {reason}"
    )]
    Raw {
        /// Explanation: the option, the reason, and what to give instead.
        reason: String,
    },
    /// The log files cannot be created.
    #[error("cannot keep logs in {}: {cause}; choose another folder with --log-dir", path.display())]
    LogFolder {
        /// Path of the folder or file.
        path: PathBuf,
        /// Error of the operating system. It is part of the message and therefore not its `source`: a printed chain
        /// would repeat it.
        cause: io::Error,
    },
    /// The ports that the user has chosen for the ranks' store are not available.
    #[error(
        "cannot use port {ports} for the ranks' store ({source_of}): {cause}; end the program that listens \
         there, or choose another port{}",
        if *needs_one { "" } else { "; without one, each attempt uses a free port" }
    )]
    StorePort {
        /// Port number, or the first and the last one of a range.
        ports: String,
        /// Option or variable that chose the ports.
        source_of: String,
        /// Error of the operating system. It is part of the message and therefore not its `source`: a printed chain
        /// would repeat it.
        cause: io::Error,
        /// `true` if other hosts have to reach the port, so that one must be chosen.
        needs_one: bool,
    },
    /// A feature that only Python programs support was requested for another program.
    #[error(
        "{what} needs a Python program that uses Accelerate, and {} is not a Python program; {remedy}",
        program.display()
    )]
    ForPython {
        /// Requested feature, and the option that requests it.
        what: String,
        /// Name of the program.
        program: OsString,
        /// Advice for the user: what to do instead.
        remedy: String,
    },
    /// The requested devices are not available.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The ranks cannot be bound to processors as requested.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The hosts of the job cannot meet with these options.
    #[error("{reason}")]
    Rendezvous {
        /// Explanation: the options, the reason, and what to give instead.
        reason: String,
    },
    /// The coordinator refuses this host.
    #[error("this host cannot take part: {reason}")]
    Refused {
        /// Reason for the refusal, and what to do.
        reason: String,
    },
    /// The other hosts were not found.
    #[error(transparent)]
    Discovery(#[from] RendezvousError),
    /// A scheduler started the launchers in a way that cannot form one job.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The plan describes an impossible world. A plan from `resolve` does not.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The hosts cannot start the job.
    #[error(transparent)]
    Hosts(#[from] crate::hosts::HostsError),
    /// The operating system refused an operation that the launcher needs.
    #[error("cannot {action}: {cause}")]
    System {
        /// Operation that was refused.
        action: String,
        /// Error of the operating system. It is part of the message and therefore not its `source`: a printed chain
        /// would repeat it.
        cause: io::Error,
    },
}

impl LaunchError {
    /// Returns a closure for `map_err` that adds the action that the system refused.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |cause| Self::System { action, cause: cause.into() }
    }
}
