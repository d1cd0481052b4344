//! Starts the ranks of a job on this host, watches them, and stops them with all that they have started.
//!
//! [`LaunchPlan::resolve`] makes a [`LaunchPlan`] from [`LaunchOptions`] and [`HostFacts`], as a pure function;
//! [`agent::run`] carries the plan out.
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
//! # The agent
//!
//! Every host of a job has one agent ([`agent`]). Its decisions are a pure state machine (`AgentState::handle`, in
//! `agent/state.rs`): events and the time go in, actions come out. Property tests give it events in any order and check
//! that it ends, that it reports an attempt as finished only after the last byte of output, and that two attempts never
//! run at once. `agent.rs` carries the actions out.
//!
//! A separate thread sends heartbeats, so that a file system or a driver that blocks the agent's loop does not end the
//! job; another one reads and creates files and folders. A third one searches for devices, so that a driver that hangs
//! does not delay the job.
//!
//! Faults that drivers report are read from the kernel's log when a rank fails or is stopped, from the place where the
//! log ended when the agent began (`agent/device_faults.rs`). The coordinator adds the faults of all hosts to the first
//! failure.
//!
//! A rank that does not end within 10 s of SIGKILL (because of a driver or a file system that does not respond) is
//! reported with its state and left to the reaper, and the launcher exits with 137.
//!
//! `crates/cli/tests/needs/faults.rs` tests all of this together: jobs on four hosts that train and save checkpoints,
//! under random faults (kill, stop, cut, slow disk, power), end with the bits of a training without faults or with the
//! failure that the faults must cause, and leave no process behind (`cargo test -p brigade-cli --test needs -- --part
//! faults::full`: 1,000 faults).
//!
//! # Output, events and progress
//!
//! - Lines: one thread (`output/pump.rs`) reads the pipes of all ranks and writes whole lines, here or, over ssh,
//!   through the agent's connection up to a credit.
//! - Events (`--events`, `docs/events.md`): `Formation` of `brigade-rendezvous` decides which events are written, so
//!   their order is decided there, and covered by its tests. `events.rs` writes them on a thread. Agents report the
//!   start and end of each rank only if the coordinator asks for it (`Assignment::recorded`), and again after a lost
//!   connection; the coordinator writes each report once.
//! - Progress: each rank has a pipe (`BRIGADE_PROGRESS_FD`) into which it writes reports without waiting. Progress bars
//!   of tqdm on stderr are read as such reports. `output/live.rs` combines the reports of all ranks into one line.
//!   Agents over ssh forward reports twice a second, and drop them while output waits.
//! - A single rank on a terminal has none of these: it uses the terminal directly, as the foreground process group,
//!   like a job of a shell (`agent/job_control.rs`). The gate at which it waits before its start is then an inherited
//!   descriptor, because its stdin is the user's.
//!
//! # Secrets
//!
//! When one command is started on each host, `guard.rs` finds the job's secret; `--hosts` and `brigade emit` generate
//! one. `BRIGADE_RDZV_SECRET` and `BRIGADE_ETCD_PASSWORD` are removed from the environment of every process that the
//! launcher starts.
//!
//! # Cleaning up processes
//!
//! - Every rank leads a session of its own, so one signal reaches it and its children.
//! - Every rank asks the kernel to be killed when the agent dies, before its program starts.
//! - The agent is a subreaper: a process whose parent has ended becomes its child, so that at the end of an attempt it
//!   finds, and kills, all processes that its ranks have started and left behind. A process that a service has started
//!   for a rank (`sbatch`, a window of a running `tmux`, a unit of `systemd-run`) does not descend from the agent and
//!   continues to run.
//! - A small process (`reaper`) waits for the agent's end. If the agent was killed, the reaper kills the processes that
//!   are left in those sessions, and the agent's orphans: processes of the same control group and parent with the
//!   agent's name (`BRIGADE_AGENT`) in their environment. It searches until the agent has ended, because the kernel
//!   closes an agent's descriptors before its children get another parent.
//! - The first process of a container becomes the parent of all orphans there, those of `kubectl exec` too. An agent
//!   that is this process kills only processes in its ranks' sessions and processes with its name in their environment.
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
