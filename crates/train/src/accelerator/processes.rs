//! What ranks do for and with each other: the methods of [`Processes`], which [`Accelerator`] has as well.

use brigade_data::Batch;
use brigade_rank_env::World;
use brigade_torch::{Device, ProcessGroup, ReduceOp, Split, Tensor, TensorTree};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Accelerator;
use crate::error::{Error, Result};
use crate::processes::Processes;
use crate::processes::metrics::{self, Metric};

impl Accelerator {
    /// Returns the ranks as a value of their own: for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// This process's number in the job, from 0.
    #[must_use]
    pub fn process_index(&self) -> usize {
        self.processes.process_index()
    }

    /// This process's number on its host, from 0.
    #[must_use]
    pub fn local_process_index(&self) -> usize {
        self.processes.local_process_index()
    }

    /// The number of processes in the job.
    #[must_use]
    pub fn num_processes(&self) -> usize {
        self.processes.num_processes()
    }

    /// Whether this is rank 0.
    #[must_use]
    pub fn is_main_process(&self) -> bool {
        self.processes.is_main_process()
    }

    /// Whether this is the first rank of its host.
    #[must_use]
    pub fn is_local_main_process(&self) -> bool {
        self.processes.is_local_main_process()
    }

    /// Whether this is the last rank.
    #[must_use]
    pub fn is_last_process(&self) -> bool {
        self.processes.is_last_process()
    }

    /// Whether there is more than one process.
    #[must_use]
    pub fn use_distributed(&self) -> bool {
        self.processes.use_distributed()
    }

    /// The device of this process: models and batches are put there.
    #[must_use]
    pub fn device(&self) -> Device {
        self.processes.device()
    }

    /// Returns rank, world size and hosts as the launcher has set them.
    #[must_use]
    pub fn world(&self) -> &World {
        self.processes.world()
    }

    /// The group of all ranks, for collectives beyond those here; `None` with one process. Another one
    /// after [`Accelerator::find_executable_batch_size`] has tried a size in vain.
    #[must_use]
    pub fn group(&self) -> Option<ProcessGroup> {
        self.processes.group()
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Processes::wait_for_everyone`].
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        self.processes.wait_for_everyone()
    }

    /// Runs the body on rank 0 first, then on the others: for a download or a cache that one rank makes
    /// and all read.
    ///
    /// # Errors
    /// As [`Processes::main_process_first`].
    #[track_caller]
    pub fn main_process_first<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R>
    where
        E: Into<Error>,
    {
        self.processes.main_process_first(body)
    }

    /// As [`Accelerator::main_process_first`], on each host for itself: for files that are not shared
    /// between hosts. Hosts do not wait for each other.
    ///
    /// # Errors
    /// As [`Processes::local_main_process_first`].
    #[track_caller]
    pub fn local_main_process_first<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R>
    where
        E: Into<Error>,
    {
        self.processes.local_main_process_first(body)
    }

    /// Runs the body on rank 0 alone; the others wait until it has ended.
    ///
    /// # Errors
    /// As [`Processes::on_main_process`].
    #[track_caller]
    pub fn on_main_process<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        self.processes.on_main_process(body)
    }

    /// Runs the body on the first rank of each host; the host's others wait.
    ///
    /// # Errors
    /// As [`Processes::on_local_main_process`].
    #[track_caller]
    pub fn on_local_main_process<R, E>(
        &self,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        self.processes.on_local_main_process(body)
    }

    /// Runs the body on the last rank alone; the others wait.
    ///
    /// # Errors
    /// As [`Processes::on_last_process`].
    #[track_caller]
    pub fn on_last_process<R, E>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        self.processes.on_last_process(body)
    }

    /// Runs the body on one rank; the others wait.
    ///
    /// # Errors
    /// As [`Processes::on_process`].
    #[track_caller]
    pub fn on_process<R, E>(
        &self,
        rank: usize,
        body: impl FnOnce() -> Result<R, E>,
    ) -> Result<Option<R>>
    where
        E: Into<Error>,
    {
        self.processes.on_process(rank, body)
    }

    /// The tensors of all ranks, one after another along the first dimension: `[n, …]` becomes
    /// `[num_processes * n, …]`, a scalar `[num_processes]`. All ranks' tensors have one shape; see
    /// [`Accelerator::pad_across_processes`].
    ///
    /// # Errors
    /// As [`Processes::gather`].
    #[track_caller]
    pub fn gather<T: TensorTree>(&self, values: &T) -> Result<T::Owned> {
        self.processes.gather(values)
    }

    /// As [`Accelerator::gather`], for what was computed from a batch, without the duplicates that
    /// complete uneven batches: over an epoch, every sample counts exactly once.
    ///
    /// # Errors
    /// As [`Processes::gather_for_metrics`].
    #[track_caller]
    pub fn gather_for_metrics<B, T: TensorTree>(
        &self,
        batch: &Batch<B>,
        values: &T,
    ) -> Result<T::Owned> {
        self.processes.gather_for_metrics(batch, values)
    }

    /// Objects of all ranks that were computed from a batch, one per sample, without those of duplicates.
    ///
    /// # Errors
    /// As [`Processes::gather_objects_for_metrics`].
    #[track_caller]
    pub fn gather_objects_for_metrics<B, T>(
        &self,
        batch: &Batch<B>,
        objects: Vec<T>,
    ) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        self.processes.gather_objects_for_metrics(batch, objects)
    }

    /// The reduction of each tensor over all ranks, on every rank. The arguments stay as they are.
    ///
    /// # Errors
    /// As [`Processes::reduce`].
    #[track_caller]
    pub fn reduce<T: TensorTree>(&self, values: &T, op: ReduceOp) -> Result<T::Owned> {
        self.processes.reduce(values, op)
    }

    /// The tensors of rank `from`, on every rank. Shapes and types are the same on all ranks.
    ///
    /// # Errors
    /// As [`Processes::broadcast`].
    #[track_caller]
    pub fn broadcast<T: TensorTree>(&self, values: &T, from: usize) -> Result<T::Owned> {
        self.processes.broadcast(values, from)
    }

    /// Makes the tensors of all ranks equally long in one dimension, so that they can be gathered:
    /// shorter ones are filled with `value` at the end, or at the front with `first`.
    ///
    /// # Errors
    /// As [`Processes::pad_across_processes`].
    #[track_caller]
    pub fn pad_across_processes<T: TensorTree>(
        &self,
        values: &T,
        dim: i64,
        value: f64,
        first: bool,
    ) -> Result<T::Owned> {
        self.processes.pad_across_processes(values, dim, value, first)
    }

    /// Rank `from`'s object, on every rank.
    ///
    /// # Errors
    /// As [`Processes::broadcast_object`].
    #[track_caller]
    pub fn broadcast_object<T>(&self, object: T, from: usize) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        self.processes.broadcast_object(object, from)
    }

    /// The objects of all ranks, by rank, on every rank.
    ///
    /// # Errors
    /// As [`Processes::gather_object`].
    #[track_caller]
    pub fn gather_object<T>(&self, object: T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        self.processes.gather_object(object)
    }

    /// This rank's part of the input: contiguous, in order, the first ranks one element longer when it
    /// does not divide evenly.
    ///
    /// # Errors
    /// As [`Processes::split_between_processes`].
    pub fn split_between_processes<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        self.processes.split_between_processes(input)
    }

    /// As [`Accelerator::split_between_processes`], with the last element of the whole input repeated so
    /// that all parts are equally long and can be gathered.
    ///
    /// # Errors
    /// As [`Processes::split_between_processes_padded`].
    pub fn split_between_processes_padded<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        self.processes.split_between_processes_padded(input)
    }

    /// Sets the trigger on this rank; [`Accelerator::check_trigger`] tells all ranks. For a decision
    /// that one rank comes to and all must follow, such as to stop early. See [`Processes::set_trigger`].
    pub fn set_trigger(&self) {
        self.processes.set_trigger();
    }

    /// Whether any rank has set the trigger since the last check; it is unset by this. Every rank calls
    /// it, at the same place of the loop.
    ///
    /// # Errors
    /// As [`Processes::check_trigger`].
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        self.processes.check_trigger()
    }

    /// Adds this rank's part of a batch to a metric, without the duplicates that complete uneven batches.
    /// Sends nothing.
    ///
    /// # Errors
    /// [`Error::Rows`] for a tensor without one row per sample of the batch; those of the metric.
    pub fn update_metric<B>(
        &self,
        metric: &mut impl Metric,
        batch: &Batch<B>,
        predictions: &Tensor,
        targets: &Tensor,
    ) -> Result<()> {
        metrics::update(metric, batch, predictions, targets)
    }

    /// Computes a metric's value over all ranks, the same on each. The metric itself stays this rank's, and
    /// can be updated further. Every rank calls it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], on every rank, when their states have different lengths; [`Error::Torch`] when a
    /// peer is gone.
    #[track_caller]
    pub fn compute_metric<M: Metric>(&self, metric: &M) -> Result<M::Value> {
        self.processes.compute_metric(metric)
    }
}
