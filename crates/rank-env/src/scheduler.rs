//! Places that a scheduler gave: Slurm, MPI launchers, Kubeflow.
//!
//! A program that `srun`, `mpirun` or a pod starts directly, without `brigade launch` or torchrun,
//! finds its place here; [`TABLE`] lists what is read. Who is asked, and in which order:
//!
//! 1. `RANK` and `WORLD_SIZE`, both set: torchrun's variables win over any scheduler. So
//!    `RANK=0 WORLD_SIZE=1` lets a task of a scheduler run alone.
//! 2. An MPI launcher. It comes before Slurm because `mpirun` inside a Slurm job starts its helpers
//!    with `srun`, and their children inherit the helpers' variables.
//! 3. A step of Slurm ([`Step`]).
//! 4. Kubeflow's `PET_` variables ([`Pods`]).
//!
//! Where only some of `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` are set, they must say
//! the same as the scheduler.
//!
//! # Where the ranks meet
//!
//! `MASTER_ADDR` and `MASTER_PORT` win, each by itself. Else the address is the loopback when all
//! ranks are on one host, and the host of rank 0 otherwise, and the port is computed from what all
//! ranks know of the job ([`Step::port`], [`Mpi::port`]), because they cannot ask each other before
//! they have met. Computed ports lie in [`PORTS`].

mod kubeflow;
mod mpi;
mod nodelist;
mod slurm;
mod table;

use std::ops::Range;

pub use kubeflow::Pods;
pub use mpi::{Mpi, MpiKind};
pub use nodelist::{MAX_HOSTS, MAX_NAME_LEN, expand_hosts, expand_tasks};
pub use slurm::Step;
pub use table::*;

use crate::store::is_loopback;
use crate::vars::Vars;
use crate::{StoreEndpoint, WorldError, env};

/// Range of the ports that are computed from a job's name or number. They are outside of the ranges that Linux gives to
/// outgoing connections (32768-60999) and Kubernetes to services (30000-32767), and below torchrun's own 29400 and
/// 29500.
pub const PORTS: Range<u16> = 20_000..29_000;

/// Names of a scheduler's variables that correspond to torchrun's `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and
/// `LOCAL_WORLD_SIZE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// Variable with the rank of this process.
    pub rank: &'static str,
    /// Variable with the number of processes.
    pub size: &'static str,
    /// Variable with the number of this process on its host.
    pub local_rank: &'static str,
    /// Variable with the number of processes on this host.
    pub local_size: &'static str,
}

/// A place as a scheduler gives it, not yet checked.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) names: Names,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) node: usize,
    pub(crate) nodes: usize,
    pub(crate) addr: String,
    pub(crate) port: u16,
    pub(crate) run_id: Option<String>,
}

/// The place that a scheduler gave to this process, if one did. `pid` is this process's number,
/// if it is known.
pub(crate) fn place(vars: Vars<'_>, pid: Option<u32>) -> Result<Option<Place>, WorldError> {
    if let Some(mpi) = Mpi::read(vars)? {
        return mpi.place(vars).map(Some);
    }
    match Step::read(vars, pid)? {
        Some(step) => step.place(vars).map(Some),
        None => kubeflow::place(vars),
    }
}

/// Returns the error for torchrun's variables that contradict a task of Slurm: a batch script that exports
/// `RANK=$SLURM_PROCID` passes its own number, 0, to every task.
///
/// Ranks of a launcher that runs as a task have a `LOCAL_RANK`, so they are not asked.
pub(crate) fn contradiction(
    vars: Vars<'_>,
    rank: usize,
    world_size: usize,
) -> Result<(), WorldError> {
    if vars.text(env::LOCAL_RANK).is_some() {
        return Ok(());
    }
    kubeflow::several_processes_per_pod(vars)?;
    match Step::read(vars, None) {
        Ok(Some(step)) if step.tasks() == world_size && step.task != rank => {
            Err(WorldError::Contradiction {
                name: env::RANK,
                value: rank,
                other: SLURM_PROCID,
                other_value: step.task,
                rule: "srun started one task for each rank; unset RANK and WORLD_SIZE, or set them \
                       in the task, not in the batch script",
            })
        }
        // A step that cannot be understood does not matter here: the variables are complete.
        _ => Ok(()),
    }
}

/// Returns `MASTER_ADDR`, if a user has set it.
///
/// # Errors
/// The address is a loopback address and the job has several hosts: each host would wait for itself.
pub fn chosen_address(
    vars: &dyn Fn(&str) -> Option<String>,
    several_hosts: bool,
) -> Result<Option<String>, WorldError> {
    let vars = Vars(vars);
    match vars.text(env::MASTER_ADDR).filter(|addr| !addr.is_empty()) {
        Some(addr) if several_hosts && is_loopback(&addr) => Err(vars.unusable(
            env::MASTER_ADDR,
            "means each host itself, but the ranks are on several hosts: unset it, or set it to \
             the host of rank 0",
        )),
        addr => Ok(addr),
    }
}

/// Returns `MASTER_PORT`, if a user has set it.
///
/// # Errors
/// The value is not a port number.
pub fn chosen_port(vars: &dyn Fn(&str) -> Option<String>) -> Result<Option<u16>, WorldError> {
    Vars(vars).port(env::MASTER_PORT)
}

/// The chosen address, else the loopback for one host, else what `elsewhere` finds.
fn address(
    vars: Vars<'_>,
    one_host: bool,
    elsewhere: impl FnOnce() -> Result<String, WorldError>,
) -> Result<String, WorldError> {
    match chosen_address(vars.0, !one_host)? {
        Some(addr) => Ok(addr),
        None if one_host => Ok(StoreEndpoint::alone().addr),
        None => elsewhere(),
    }
}

/// A number of any size, brought into [`PORTS`].
fn port_of(number: u64) -> u16 {
    let range = u64::from(PORTS.end - PORTS.start);
    PORTS.start + u16::try_from(number % range).unwrap_or_default()
}

/// Checks on rank 0 that the address that all ranks computed is its own. Names are compared up to the first dot: one
/// side may have the domain, the other not.
fn must_be_here(
    here: Option<String>,
    first: &str,
    list: &'static str,
    vars: Vars<'_>,
) -> Result<(), WorldError> {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    match here {
        Some(here) if short(&here) != short(first) => Err(vars.unusable(
            list,
            format!(
                "begins with {first}, but rank 0 is on {here}: set MASTER_ADDR={here} for all ranks"
            ),
        )),
        _ => Ok(()),
    }
}
