//! Options of a launch.

use std::ffi::OsString;
use std::time::Duration;

use brigade_rendezvous::{EtcdAccess, Secret};
use serde::{Deserialize, Serialize};

use crate::events::EventsTarget;
use crate::{
    ChosenPorts, NodeRange, NprocSpec, OutputOptions, PlacementOptions, Program, RendezvousMode,
    RendezvousTimeouts,
};

/// Options of a launch: the program, the number of ranks and restarts, the hosts, the output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchOptions {
    /// Number of ranks on this host: at least 1.
    pub nproc: NprocSpec,
    /// Program that the ranks run.
    pub program: Program,
    /// Arguments of the program, passed on unchanged, except for `${local_rank}`, which is replaced by each rank's
    /// local rank.
    pub args: Vec<OsString>,
    /// Number of threads per rank: its `OMP_NUM_THREADS`. Defaults to the environment's value, else to an even share of
    /// this host's cores.
    pub threads_per_rank: Option<usize>,
    /// Environment variables for every rank. They override this process's variables and give way to those that describe
    /// the rank's place.
    pub env: Vec<(String, String)>,
    /// Names of variables of this process that no rank gets, because they hold settings of the launcher.
    pub withheld: Vec<String>,
    /// Environment variables for ranks that are Python programs, and those for other programs.
    pub for_python: Option<ForPython>,
    /// Time that ranks may take to stop after SIGTERM before they are killed. Defaults to 30 s.
    pub shutdown_timeout: Duration,
    /// Time without received data after which a host is lost. For as long, ranks continue without the coordinator. From
    /// 1 s to a day. Defaults to 30 s.
    pub heartbeat_timeout: Duration,
    /// Maximum number of restarts after failures. Restarts because hosts join or leave do not count. Defaults to 0.
    pub max_restarts: u32,
    /// Number of hosts that take part. More than one, or a range, needs a [`RendezvousMode`].
    pub nodes: NodeRange,
    /// Rendezvous mode: how the agents of the hosts meet.
    pub rendezvous: RendezvousMode,
    /// Name of the job, the same on all of its hosts (torchrun's `--rdzv-id`). Defaults to a random name where the job
    /// has one host, and to `none` if it has several.
    pub run_id: Option<String>,
    /// Shared secret of the job: agents that do not prove that they have it are refused. Without one, every host that
    /// reaches the coordinator's port can join the job.
    // Never part of a message or a file by accident: each way that it takes is written out.
    #[serde(skip)]
    pub secret: Option<Secret>,
    /// Access to etcd, where the hosts meet through one.
    #[serde(skip)]
    pub etcd: EtcdAccess,
    /// Name or address under which other hosts reach this one. Defaults to the address that they see.
    pub local_addr: Option<String>,
    /// Ports from which the ranks' store takes its own. Defaults to any free port.
    pub store_port: Option<ChosenPorts>,
    /// Time limits of the agents' rendezvous.
    pub timeouts: RendezvousTimeouts,
    /// Role name of each rank: its `ROLE_NAME`. Defaults to `default`.
    pub role: String,
    /// Destination of the job's events. With `None`, they are not written.
    // The launcher that coordinates writes them, on its own host.
    #[serde(skip)]
    pub events: Option<EventsTarget>,
    /// Options of the ranks' output.
    pub output: OutputOptions,
    /// Options of placement: the processors and accelerators of the ranks.
    pub placement: PlacementOptions,
}

/// Environment variables that only Python programs use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForPython {
    /// Names and values of the variables. Those of [`LaunchOptions::env`] take precedence.
    pub variables: Vec<(String, String)>,
    /// Treatment of a program that is not a Python program.
    pub others: ForOthers,
}

/// Treatment of a program that is not a Python program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForOthers {
    /// The program gets these variables. Those of [`LaunchOptions::env`] take precedence.
    Variables(Vec<(String, String)>),
    /// The launch is refused.
    Refused {
        /// Requested feature and its source, such as `fp8 (flag --mixed-precision)`.
        what: String,
        /// Advice for the user: what to do instead.
        remedy: String,
    },
}

/// Returns the defaults: one rank on one host without a program, 30 s each for the shutdown and the heartbeat timeout,
/// no restarts.
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
