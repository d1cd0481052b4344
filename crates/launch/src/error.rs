//! Why a job was not started.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use brigade_rank_env::WorldError;
use brigade_rendezvous::RendezvousError;

use crate::{BindError, DeviceError, ProgramError, SchedulerError};

/// Nothing of the user's program has run when one of these is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of ranks, or of threads per rank, is not possible.
    #[error("--{option} {value} is not possible: {reason}")]
    OptionOutOfRange {
        /// The option's name.
        option: &'static str,
        /// What was asked for.
        value: usize,
        /// What it should be.
        reason: &'static str,
    },
    /// An option names only local ranks that this host lacks.
    #[error("--{option} names local rank {rank}, but this host has only local ranks 0 to {}", nproc - 1)]
    NoSuchLocalRank {
        /// The option's name.
        option: &'static str,
        /// The lowest that it names.
        rank: usize,
        /// How many ranks this host has.
        nproc: usize,
    },
    /// The terminal cannot be passed through to a rank.
    #[error("--raw passes the terminal through to the rank, unseen: {reason}")]
    Raw {
        /// Which option, why, and what to give instead.
        reason: String,
    },
    /// Log files cannot be made.
    #[error("cannot keep logs in {}: {cause}; choose another folder with --log-dir", path.display())]
    LogFolder {
        /// The folder or file.
        path: PathBuf,
        /// Why. The message has it; as its `source`, a printed chain would say it twice.
        cause: io::Error,
    },
    /// The ports that the user has chosen for the ranks' store cannot be had.
    #[error(
        "cannot use port {ports} for the ranks' store ({source_of}): {cause}; end the program that listens \
         there, or choose another port{}",
        if *needs_one { "" } else { "; without a choice each attempt has a free one" }
    )]
    StorePort {
        /// The port, or the first and the last one.
        ports: String,
        /// Where they were chosen.
        source_of: String,
        /// Why. The message has it; as its `source`, a printed chain would say it twice.
        cause: io::Error,
        /// Other hosts have to reach it.
        needs_one: bool,
    },
    /// What only Python programs understand was asked for another program.
    #[error(
        "{what} needs a Python program that uses Accelerate, and {} is not a Python program; {remedy}",
        program.display()
    )]
    ForPython {
        /// What was asked for, and where.
        what: String,
        /// The program.
        program: OsString,
        /// What to do instead.
        remedy: String,
    },
    /// The devices are not as asked for.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The ranks cannot be bound as asked.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The hosts of the job cannot meet as the options say.
    #[error("{reason}")]
    Rendezvous {
        /// Which options, why, and what to give instead.
        reason: String,
    },
    /// The coordinator does not let this host take part.
    #[error("this host cannot take part: {reason}")]
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// The other hosts were not found.
    #[error(transparent)]
    Discovery(#[from] RendezvousError),
    /// A scheduler started this launcher in a way that cannot be one job.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The plan describes a world that cannot be; a plan from `resolve` does not.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The hosts cannot start it.
    #[error(transparent)]
    Hosts(#[from] crate::hosts::HostsError),
    /// The system refused something the launcher needs.
    #[error("cannot {action}: {cause}")]
    System {
        /// What was refused.
        action: String,
        /// Why. The message has it; as its `source`, a printed chain would say it twice.
        cause: io::Error,
    },
}

impl LaunchError {
    /// For `map_err`: the action that the system refused.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |cause| Self::System { action, cause: cause.into() }
    }
}
