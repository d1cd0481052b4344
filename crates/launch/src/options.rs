//! What a user can ask of a launch.

use std::ffi::OsString;
use std::time::Duration;

use brigade_rendezvous::{EtcdAccess, Secret};
use serde::{Deserialize, Serialize};

use crate::events::EventsTarget;
use crate::{
    ChosenPorts, NodeRange, NprocSpec, OutputOptions, PlacementOptions, Program, RendezvousMode,
    RendezvousTimeouts,
};

/// What to start, how often, and with which other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchOptions {
    /// Number of ranks on this host: at least 1.
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
    /// Variables of this process that no rank gets: those by which a user has told the launcher
    /// something.
    pub withheld: Vec<String>,
    /// Variables for ranks that are Python programs, and what other programs get instead.
    pub for_python: Option<ForPython>,
    /// How long ranks may take to stop after SIGTERM before they are killed.
    pub shutdown_timeout: Duration,
    /// How long a host, or the way to it, may be silent before it is lost: for as long, ranks run on
    /// without the coordinator. From 1 s to a day.
    pub heartbeat_timeout: Duration,
    /// How often the job is started again after a failure. Hosts that come or leave do not count.
    pub max_restarts: u32,
    /// How many hosts take part. More than one, or a range, needs a [`RendezvousMode`].
    pub nodes: NodeRange,
    /// Where the agents of the hosts meet.
    pub rendezvous: RendezvousMode,
    /// Name of the job, the same on all of its hosts (torchrun's `--rdzv-id`). Default: a random
    /// one where the job has one host, `none` where it has several.
    pub run_id: Option<String>,
    /// Agents that do not prove that they know it are turned away. Without one, every host that
    /// reaches the coordinator's port can join the job.
    // Never part of a message or a file by accident: each way that it takes is written out.
    #[serde(skip)]
    pub secret: Option<Secret>,
    /// How etcd is spoken to, where the hosts meet by one.
    #[serde(skip)]
    pub etcd: EtcdAccess,
    /// Name or address under which other hosts reach this one. Default: as they see it.
    pub local_addr: Option<String>,
    /// Among which ports the ranks' store has its own. Default: any that is free.
    pub store_port: Option<ChosenPorts>,
    /// How long agents wait for each other.
    pub timeouts: RendezvousTimeouts,
    /// `ROLE_NAME` of each rank.
    pub role: String,
    /// Where the events of the job are written; `None`: nowhere.
    // The launcher that coordinates writes them, on its own host.
    #[serde(skip)]
    pub events: Option<EventsTarget>,
    /// Where the ranks' output goes.
    pub output: OutputOptions,
    /// Which processors and accelerators the ranks get.
    pub placement: PlacementOptions,
}

/// Variables that only Python programs understand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForPython {
    /// The variables. Those of [`LaunchOptions::env`] go before them.
    pub variables: Vec<(String, String)>,
    /// What a program gets that is not a Python program.
    pub others: ForOthers,
}

/// What becomes of a program that is not a Python program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForOthers {
    /// It gets these variables. Those of [`LaunchOptions::env`] go before them.
    Variables(Vec<(String, String)>),
    /// It is refused.
    Refused {
        /// What the user has asked for, and where: `fp8 (flag --mixed-precision)`.
        what: String,
        /// What to do instead.
        remedy: String,
    },
}

/// One rank of no program on one host; 30 s to stop, as torchrun, and to be silent; no restart.
impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            nproc: NprocSpec::Count(1),
            program: Program::default(),
            args: Vec::new(),
            threads_per_rank: None,
            env: Vec::new(),
            withheld: Vec::new(),
            for_python: None,
            shutdown_timeout: Duration::from_secs(30),
            heartbeat_timeout: Duration::from_secs(30),
            max_restarts: 0,
            nodes: NodeRange::default(),
            rendezvous: RendezvousMode::OneHost,
            run_id: None,
            secret: None,
            etcd: EtcdAccess::default(),
            local_addr: None,
            store_port: None,
            timeouts: RendezvousTimeouts::default(),
            role: "default".to_owned(),
            events: None,
            output: OutputOptions::default(),
            placement: PlacementOptions::default(),
        }
    }
}
