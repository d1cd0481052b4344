//! Starts the ranks of a job on this host, watches them, and leaves nothing behind.
//!
//! Arguments become a plan, and an agent carries the plan out: [`LaunchOptions`] and [`HostFacts`]
//! give a [`LaunchPlan`] without touching the system, [`agent::run`] does the rest.
//!
//! ```no_run
//! use brigade_launch::{HostFacts, LaunchOptions, LaunchPlan, agent, role};
//!
//! // The agent starts its own executable in two small roles; they come first in `main`.
//! if let Some(code) = role::play_if_asked() {
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
//! - A small process (`watch`) waits for the agent's end and then kills whatever is left in those
//!   sessions, or carries the agent's name (`BRIGADE_AGENT`) in its environment.
//! - A rank that has ended is not reaped before the job is over: its process number cannot be
//!   given to a stranger who would then be killed in its place.

pub mod agent;
pub mod emit;
mod error;
mod gate;
pub mod hosts;
pub mod leash;
mod meeting;
mod options;
mod output;
mod placement;
mod plan;
mod program;
pub mod role;
mod scheduler;
mod store_port;
mod survivors;
mod value;
mod watch;

pub use agent::Outcome;
pub use brigade_rendezvous::{
    Assignment, Cause, Ending, RankFailure, Secret, SecretError, Verdict,
};
pub use error::LaunchError;
pub use meeting::{Endpoint, Meeting, NodeRange, Patience};
pub use options::{ForPython, LaunchOptions};
pub use output::{
    Color, ColorFacts, LineFilter, LocalRanks, LogFolder, OutputFacts, OutputOptions, OutputPlan,
    Prefix, PrefixFacts, Stream, StreamMode, StreamModes,
};
pub use placement::{
    BindError, BindMode, Cpu, CpuSet, Device, DeviceError, DeviceList, Devices, NprocSpec,
    PlacementFacts, PlacementOptions, RankSetup, Topology,
};
pub use plan::{HostFacts, LaunchPlan};
pub use program::{CargoKind, CargoTarget, Invocation, Program, ProgramError};
pub use scheduler::{Found, SchedulerError, Surroundings};
pub use store_port::{PortRange, Reach, StorePort};
pub use value::ValueError;
