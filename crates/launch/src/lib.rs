//! Starts the ranks of a job on this host, watches them, and leaves nothing behind.
//!
//! Arguments become a plan, and an agent carries the plan out: [`LaunchOptions`] and [`HostFacts`]
//! give a [`LaunchPlan`] without touching the system, [`agent::run`] does the rest.
//!
//! ```no_run
//! use brigade_launch::{HostFacts, LaunchOptions, LaunchPlan, agent, role};
//!
//! // The agent starts its own executable in two small roles; they come first in `main`.
//! if let Some(code) = role::run_helper_if_requested() {
//!     std::process::exit(code.into());
//! }
//! let options = LaunchOptions { nproc: 2.into(), program: "env".into(), ..Default::default() };
//! let plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options))?;
//! let outcome = agent::run(&plan)?;
//! std::process::exit(outcome.exit_code().into());
//! # Ok::<(), brigade_launch::LaunchError>(())
//! ```
//!
//! # How nothing is left behind
//!
//! - Every rank leads a session of its own, so one signal reaches it and its children.
//! - Every rank asks the kernel to be killed when the agent dies, before its program starts.
//! - The agent is a subreaper: a process whose parent has ended becomes its child, so that at the
//!   end of an attempt it finds, and kills, all that its ranks have started and left behind. What
//!   a service has started for a rank (`sbatch`, a window of a running `tmux`, a unit of
//!   `systemd-run`) does not descend from the agent and lives on.
//! - A small process (`reaper`) waits for the agent's end. After one that was killed itself it kills
//!   what is left in those sessions, and those orphans of the agent that carry its name
//!   (`BRIGADE_AGENT`) in their environment.
//! - A rank that has ended is not reaped before the job is over: its process number cannot be
//!   given to another process, which would then be killed in its place.

pub mod agent;
pub mod children;
mod error;
pub mod events;
mod guard;
pub mod hosts;
mod leftovers;
mod open_files;
mod options;
mod outcome;
mod output;
mod placement;
mod plan;
mod program;
mod reaper;
mod rendezvous;
pub mod role;
mod scheduler;
mod start_gate;
mod store_port;
mod value;

pub use brigade_rendezvous::{
    Assignment, Cause, EtcdAccess, EtcdError, ExitStatus, JobResult, RankFailure, Secret,
    SecretError, Stream, TimeLimits, private_text,
};
pub use brigade_ssh::die_with_parent;
pub use error::LaunchError;
pub use guard::{Guard, GuardSources};
pub use options::{ForOthers, ForPython, LaunchOptions};
pub use outcome::Outcome;
pub use output::{
    Color, ColorFacts, LineFilter, LocalRanks, LogFolder, OutputFacts, OutputOptions, OutputPlan,
    Prefix, PrefixFacts, StreamMode, StreamModes,
};
pub use placement::{
    BindError, BindMode, Cpu, CpuSet, Device, DeviceError, DeviceList, Devices, Mask, NprocSpec,
    PlacementFacts, PlacementOptions, RankSetup, Topology,
};
pub use plan::{HostFacts, LaunchPlan};
pub use program::{CargoKind, CargoTarget, Invocation, Program, ProgramError, find_python};
pub use rendezvous::{Endpoint, NodeRange, RendezvousMode, RendezvousTimeouts};
pub use scheduler::{SchedulerError, SchedulerValue, Surroundings};
pub use store_port::{ChosenPorts, Interfaces, PortRange, StorePort};
pub use value::ValueError;
