//! Operations of ranks beside the gradients: values gathered, code run in turn, work split, and a flag that all ranks
//! read.

mod agree;
pub(crate) mod gather;
pub(crate) mod scope;
pub(crate) mod split;
pub(crate) mod trigger;
mod values;

use std::fmt;
use std::io::Write as _;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use brigade_rank_env::World;
use brigade_torch::{ProcessGroup, Result};
use tch::Device;

use crate::job::Job;
use crate::job::connect::{self, ConnectOptions, debug_is_requested};

/// The ranks of a job after rendezvous: rank and world size, collectives over tensors and objects, and execution order
/// among the ranks. [`crate::Accelerator`] has the same methods; a program that trains in another way, or evaluates or
/// preprocesses on several ranks, uses this value alone, and may build an Accelerator on it later
/// ([`crate::AcceleratorBuilder::processes`]).
///
/// Clones are handles of the same ranks. With one rank every collective is the identity.
///
/// ```
/// use brigade_torch::{ReduceOp, Store};
/// use brigade_train::{ConnectOptions, Processes};
/// use tch::Tensor;
/// use brigade_rank_env::{StoreEndpoint, World, WorldSize};
///
/// fn count(processes: &Processes) -> brigade_torch::Result<i64> {
///     let files = processes.split_between_processes(&["a", "b", "c"][..])?;
///     let total = processes.reduce(&Tensor::from(files.len() as i64), ReduceOp::Sum)?;
///     Ok(total.int64_value(&[]))
/// }
///
/// // One rank, or those of a launcher.
/// assert_eq!(count(&Processes::join(ConnectOptions { cpu: true, ..Default::default() })?)?, 3);
///
/// // Two ranks as threads.
/// let store = Store::hash()?;
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let store = store.clone();
///         scope.spawn(move || {
///             let world = WorldSize::new(2).unwrap();
///             let world = World::on_one_host(rank, world, StoreEndpoint::alone()).unwrap();
///             let (world, store) = (Some(world), Some(store));
///             let options = ConnectOptions { cpu: true, world, store, ..Default::default() };
///             assert_eq!(count(&Processes::join(options).unwrap()).unwrap(), 3);
///         });
///     }
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Processes {
    pub(crate) job: Arc<Job>,
    pub(crate) trigger: Arc<AtomicBool>,
}

impl Processes {
    /// Joins the other ranks, and returns when all are connected.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Environment`] for contradicting variables of the environment;
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for contradicting options;
    /// [`brigade_torch::ErrorKind::Communication`] when the ranks do not find each other within the time limit.
    pub fn join(options: ConnectOptions) -> Result<Self> {
        Ok(Self::of(Arc::new(connect::join(options, debug_is_requested())?)))
    }

    pub(crate) fn of(job: Arc<Job>) -> Self {
        Self { job, trigger: Arc::default() }
    }

    /// Returns the rank of this process: its number in the job, from 0.
    #[must_use]
    pub fn process_index(&self) -> usize {
        self.job.rank()
    }

    /// Returns the local rank of this process: its number on its host, from 0.
    #[must_use]
    pub fn local_process_index(&self) -> usize {
        self.job.world.local_rank.as_usize()
    }

    /// Returns the world size: the number of processes in the job.
    #[must_use]
    pub fn num_processes(&self) -> usize {
        self.job.size()
    }

    /// Returns `true` on rank 0.
    #[must_use]
    pub fn is_main_process(&self) -> bool {
        self.process_index() == 0
    }

    /// Returns `true` on the first rank of each host.
    #[must_use]
    pub fn is_local_main_process(&self) -> bool {
        self.local_process_index() == 0
    }

    /// Returns `true` on the last rank.
    #[must_use]
    pub fn is_last_process(&self) -> bool {
        self.process_index() + 1 == self.num_processes()
    }

    /// Returns `true` if the job has more than one process.
    #[must_use]
    pub fn use_distributed(&self) -> bool {
        self.num_processes() > 1
    }

    /// Seeds the random generators as [`crate::Accelerator::set_seed`] does, with `seed + rank`. The random draws of a
    /// loader use rank 0's seed, from when it is prepared.
    pub fn set_seed_per_process(&self, seed: i64) {
        set_seed(seed.wrapping_add(self.process_index() as i64));
    }

    /// Returns the device of this process, on which models and batches are placed.
    #[must_use]
    pub fn device(&self) -> Device {
        self.job.device
    }

    /// Returns rank, world size and hosts as the launcher has set them.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.job.world
    }

    /// Returns the process group of all ranks, for collectives beyond those of this type. `None` with one process. The
    /// group is replaced when a batch size fails in [`crate::Accelerator::find_executable_batch_size`].
    #[must_use]
    pub fn group(&self) -> Option<ProcessGroup> {
        self.job.group()
    }

    /// Prints a warning on the first process of each host.
    pub(crate) fn warn(&self, what: &str) {
        if self.is_local_main_process() {
            // A closed stream must not end the training.
            let _ = std::io::stderr().lock().write_all(format!("brigade: {what}\n").as_bytes());
        }
    }

    /// Returns the group, whose operations record the caller's location in the user's program.
    #[track_caller]
    pub(crate) fn traced(&self) -> Option<ProcessGroup> {
        let here = Location::caller();
        self.group().map(|group| group.at(here))
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Processes")
            .field("world", &self.job.world)
            .field("device", &self.job.device)
            .finish_non_exhaustive()
    }
}

/// Seeds libtorch's generators, and the loaders that this thread makes afterwards.
pub(crate) fn set_seed(seed: i64) {
    tch::manual_seed(seed);
    brigade_data::set_thread_seed(seed as u64);
}
