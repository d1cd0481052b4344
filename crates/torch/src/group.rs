//! Process groups: the ranks that take part in a collective.

mod watched;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cxx::UniquePtr;
use parking_lot::Mutex;
use tch::{Device, Tensor};

use crate::autograd::BackwardOptions;
use crate::backend::{Backend, GlooDevice, RankInfo};
use crate::bridge::{NO_LIMIT_OF_ITS_OWN, borrow, ffi};
use crate::device::{DeviceKind, Tpu, cuda_devices};
use crate::error::{CollectiveError, Error, Fault, Thrown, TorchError};
use crate::missing_ranks::{MissingRanks, lost_server};
use crate::store::{Store, milliseconds};
use crate::work_handle::WorkHandle;
use watched::Watched;

/// Default time limit of collectives, 30 minutes, as c10d's for CPU.
pub const DEFAULT_GROUP_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// A set of ranks that run collectives together. A clone is a handle to the same group.
///
/// All ranks must call the same operations in the same order, from one thread at a time, because operations of two
/// threads could have a different order on each rank. Operations are methods. Each blocking operation has an
/// asynchronous variant named `start_…`, whose [`crate::Work`] owns the tensors until it is waited for.
///
/// ```
/// use brigade_torch::{Backend, GroupOptions, ProcessGroup, ReduceOp, Store};
/// use tch::Tensor;
///
/// let store = Store::hash()?;
/// let group = ProcessGroup::new(&store, 0, 1, Backend::Gloo(Default::default()), GroupOptions::default())?;
/// let mut t = Tensor::from_slice(&[1.0, 2.0]);
/// group.all_reduce(&mut t, ReduceOp::Sum)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
    /// Time limit of this handle's operations. `None` takes the group's.
    limit: Option<Duration>,
    /// `true` if this handle's operations are compared between ranks before they begin.
    pub(crate) checks: bool,
    /// Place in the user's program that starts this handle's operations, if it is not their caller.
    pub(crate) site: Option<&'static Location<'static>>,
}

/// Options of a process group besides its ranks.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// Name of the group in errors. Must be the same on every rank. Defaults to `world`.
    pub name: String,
    /// Key prefix of the group in the store. Defaults to its name. PyTorch numbers its groups: the prefix of the first
    /// one is `0`, under `default_pg`.
    pub store_key: Option<String>,
    /// Time limit of its operations, and of its construction. Defaults to [`DEFAULT_GROUP_TIMEOUT`].
    pub timeout: Duration,
    /// Device of the group's own messages: lengths, objects, flags, barriers. Defaults to the CPU, also with NCCL,
    /// where Gloo sends them.
    pub device: Option<Device>,
    /// Network interface or address of the Gloo backend that is used in addition to NCCL. For a group of Gloo alone, it
    /// is part of [`Backend::Gloo`].
    pub gloo: GlooDevice,
    /// `true` if operation, shape, type and position in the program are compared between ranks before each collective;
    /// the error contains the ranks that differ ([`crate::TorchError::Desync`]). Must be the same on every rank. Slow.
    /// Defaults to `false`.
    pub debug: bool,
    /// `true` if reductions and gathers use shared memory where they can ([`ProcessGroup::shares_memory`]). Defaults to
    /// `true`. If it is `false` on one rank, no rank uses shared memory.
    pub share_memory: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            name: "world".into(),
            store_key: None,
            timeout: DEFAULT_GROUP_TIMEOUT,
            device: None,
            gloo: GlooDevice::Default,
            debug: false,
            share_memory: true,
        }
    }
}

/// Messages and bytes that operations of one name sent from one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Traffic {
    /// Number of operations. A list of tensors that is sent as one operation counts once.
    pub messages: u64,
    /// Bytes sent by a rank. All-reduce, all-gather and reduce-scatter count as in a ring, on average over the ranks:
    /// `(size - 1) / size` of the bytes of all ranks' parts, twice that for an all-reduce.
    pub bytes: u64,
}

pub(crate) struct Inner {
    group: Handle,
    /// c10d numbers a group's operations without a lock: two threads must not start one at once.
    starting: Mutex<()>,
    name: String,
    rank: usize,
    size: usize,
    /// Ranks in the group that this one was split from (its own numbers for the first group).
    ranks: Vec<usize>,
    backend: Backend,
    store: Store,
    timeout: Mutex<Duration>,
    /// `true` if shared memory was requested, whether or not it is used.
    share_memory: bool,
    device: Device,
    gloo: GlooDevice,
    subgroups: AtomicUsize,
    /// Number of collectives started so far; equal on all ranks, so it shows which ranks had not arrived.
    sequence: AtomicU64,
    /// Sends and receives that nobody waits for.
    messages: Mutex<Vec<WorkHandle>>,
    /// Work on a device that a thread watches for all ranks, with that thread.
    watched: Arc<Watched>,
    failed: AtomicBool,
    aborted: AtomicBool,
    /// Error of a communication hook in the current backward or shadow, kept here because an error that passes through
    /// C++ keeps only its text.
    hook_error: Mutex<Option<Error>>,
    /// Comparisons of the debug mode so far.
    pub(crate) compared: AtomicU64,
    pub(crate) comparing: Mutex<()>,
    /// `true` if the next backward reduces gradients, as far as the debug mode can determine.
    pub(crate) reduces: AtomicBool,
}

struct Handle(UniquePtr<ffi::Group>);

// SAFETY: a counted pointer (atomic count) to a c10d::ProcessGroup, which is used from several threads in
// PyTorch as well; starts are serialised by `Inner::starting`, waiting and aborting are thread-safe, and
// the list of messages has a mutex of its own.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl ProcessGroup {
    /// Creates a group of `size` ranks with a store. Returns when all ranks are connected.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] when `rank` is not below `size`; [`crate::TorchError::Collective`] of
    /// operation `new_group` if a rank does not connect within the time limit or an interface is unknown.
    pub fn new(
        store: &Store,
        rank: usize,
        size: usize,
        backend: Backend,
        options: GroupOptions,
    ) -> Result<Self, Error> {
        let ranks = (0..size).collect();
        Self::connect(store, rank, ranks, backend, options)
    }

    fn connect(
        store: &Store,
        rank: usize,
        ranks: Vec<usize>,
        backend: Backend,
        options: GroupOptions,
    ) -> Result<Self, Error> {
        let GroupOptions { name, store_key, timeout, device, gloo, debug, share_memory } = options;
        let size = ranks.len();
        if rank >= size {
            return Err(Error::invalid_argument(format!(
                "group {name:?}: rank {rank} does not exist among {size} ranks (0 to {})",
                size.saturating_sub(1)
            )));
        }
        let narrow = |n: usize| {
            i32::try_from(n)
                .map_err(|_| Error::invalid_argument(format!("group {name:?} of {size} ranks")))
        };
        let (rank32, size32) = (narrow(rank)?, narrow(size)?);
        check_backend(&backend, &name)?;
        // The key layout of PyTorch, so that its ranks can connect to Brigade's: the group's part, then the device's.
        let own = store.prefix(&format!("{}/", store_key.as_ref().unwrap_or(&name)))?;
        let (keys, device_keys) = (own.prefix("cpu/")?, own.prefix("cuda/")?);
        let rank_info = RankInfo {
            store: &keys,
            device_store: &device_keys,
            gloo: &gloo,
            rank: rank32,
            size: size32,
            name: &name,
            timeout,
            share_memory,
        };
        own.set(&joined(rank), b"1")?;
        // The ranks connect within the group's own time limit.
        keys.set_timeout(timeout)?;
        device_keys.set_timeout(timeout)?;
        let begun = Instant::now();
        let group = backend.connect(&rank_info).map_err(|error| {
            let thrown = Thrown::read(&error);
            let (fault, detail) = (thrown.fault_after(begun.elapsed(), timeout), thrown.detail);
            let came = |rank: usize| own.contains(&[&joined(rank)]).unwrap_or(true);
            let missing = match fault {
                Fault::Invalid | Fault::Unsupported => Vec::new(),
                _ => (0..size).filter(|&rank| !came(rank)).collect(),
            };
            CollectiveError {
                operation: "new_group",
                group: name.clone(),
                rank,
                size,
                fault,
                detail,
                missing,
                lost_store: None,
            }
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                group: Handle(group),
                starting: Mutex::new(()),
                name,
                rank,
                size,
                ranks,
                device: device.unwrap_or(Device::Cpu),
                gloo,
                backend,
                store: own,
                timeout: Mutex::new(timeout),
                share_memory,
                subgroups: AtomicUsize::new(0),
                sequence: AtomicU64::new(0),
                messages: Mutex::new(Vec::new()),
                watched: Arc::default(),
                failed: AtomicBool::new(false),
                aborted: AtomicBool::new(false),
                hook_error: Mutex::new(None),
                compared: AtomicU64::new(0),
                comparing: Mutex::new(()),
                reduces: AtomicBool::new(false),
            }),
            limit: None,
            checks: debug,
            site: None,
        })
    }

    /// Creates a group of some of this group's ranks, numbered in the given order. Every rank of this group calls it,
    /// with the same list; ranks that are not in the list get `None`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for an empty list, a rank that does not exist or that occurs twice. Also
    /// returns the errors of [`ProcessGroup::new`].
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<Self>, Error> {
        let inner = &self.inner;
        let number = inner.subgroups.fetch_add(1, Ordering::Relaxed);
        let mut seen = vec![false; inner.size];
        for &rank in ranks {
            match seen.get_mut(rank) {
                None => {
                    return Err(Error::invalid_argument(format!(
                        "subgroup of {:?}: rank {rank} does not exist among {} ranks",
                        inner.name, inner.size
                    )));
                }
                Some(true) => {
                    return Err(Error::invalid_argument(format!(
                        "subgroup of {:?}: rank {rank} is named twice in {ranks:?}",
                        inner.name
                    )));
                }
                Some(seen) => *seen = true,
            }
        }
        if ranks.is_empty() {
            return Err(Error::invalid_argument(format!(
                "subgroup of {:?}: no ranks given",
                inner.name
            )));
        }
        let Some(rank) = ranks.iter().position(|&rank| rank == inner.rank) else {
            return Ok(None);
        };
        let options = GroupOptions {
            name: format!("{}.{number}", inner.name),
            store_key: Some(format!("subgroup.{number}")),
            timeout: self.timeout(),
            device: Some(inner.device),
            gloo: inner.gloo.clone(),
            debug: self.checks,
            share_memory: inner.share_memory,
        };
        let global = ranks.iter().map(|&rank| inner.ranks[rank]).collect();
        let backend = match &inner.backend {
            // TorchTPU would wait for a collective of all ranks of the slice.
            Backend::Tpu if ranks.len() < inner.size => Backend::Gloo(inner.gloo.clone()),
            backend => backend.clone(),
        };
        Self::connect(&inner.store, rank, global, backend, options).map(Some)
    }

    /// Returns the rank of this process in the group, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Returns the number of ranks in the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Returns the name of the group.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the ranks' numbers in the first group (their global ranks), in this group's order.
    #[must_use]
    pub fn global_ranks(&self) -> &[usize] {
        &self.inner.ranks
    }

    /// Returns the backend of the group.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.inner.backend
    }

    /// Returns the group's part of the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Returns the device of the tensors in the group's own messages: lengths, objects, flags.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Returns `true` if all-reduces, reduce-scatters and all-gathers of CPU tensors use shared memory: with Gloo, if
    /// all ranks are on this host and are Brigade programs. The results are bitwise equal to those over TCP.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        ffi::group_shares_memory(self.raw())
    }

    /// Returns the traffic that this rank of a [`Backend::Fake`] group would have sent since the group was made or
    /// [`ProcessGroup::reset_traffic`] was called, by operation (`all_reduce`, `all_gather`, `reduce_scatter`, …).
    /// Empty for other backends, which do not count.
    ///
    /// ```
    /// # use brigade_torch::{Backend, GroupOptions, ProcessGroup, Store};
    /// use tch::{Device, Kind, Tensor};
    /// let options = GroupOptions::default();
    /// let group = ProcessGroup::new(&Store::hash()?, 0, 8, Backend::Fake, options)?;
    /// group.all_gather_flat(&Tensor::zeros([100], (Kind::Float, Device::Cpu)))?;
    /// let gathers = group.traffic()["all_gather"];
    /// assert_eq!((gathers.messages, gathers.bytes), (1, 7 * 400));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn traffic(&self) -> BTreeMap<String, Traffic> {
        ffi::group_traffic(self.raw())
            .into_iter()
            .map(|counted| {
                (counted.operation, Traffic { messages: counted.messages, bytes: counted.bytes })
            })
            .collect()
    }

    /// Sets the counters of [`ProcessGroup::traffic`] to zero.
    pub fn reset_traffic(&self) {
        ffi::group_reset_traffic(self.raw());
    }

    /// Returns the time limit of this handle's operations.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.limit.unwrap_or_else(|| *self.inner.timeout.lock())
    }

    /// Sets the group's time limit, for all handles without one of their own.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the backend cannot change it.
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), Error> {
        ffi::group_set_timeout(self.raw(), milliseconds(timeout))
            .map_err(|error| Error::libtorch("set_timeout", &error))?;
        *self.inner.timeout.lock() = timeout;
        Ok(())
    }

    /// Returns a handle whose operations have a time limit of their own.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// group.within(std::time::Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self.clone() }
    }

    /// Aborts all running operations, on this rank with [`Fault::Aborted`] and on the peers with [`Fault::PeerLost`].
    /// The group cannot be used afterwards.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when the backend cannot abort.
    pub fn abort(&self) -> Result<(), Error> {
        self.inner.abort()
    }

    /// Closes the connections after a failure, so that operations in flight end.
    pub(crate) fn close(&self) {
        // A failure of the abort cannot be handled; the original failure is being reported.
        let _ = ffi::group_abort(self.raw());
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    pub(crate) fn upgrade(inner: &Weak<Inner>) -> Option<Self> {
        Some(Self { inner: inner.upgrade()?, limit: None, checks: false, site: None })
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.inner.aborted.load(Ordering::Relaxed)
    }

    pub(crate) fn raw(&self) -> &ffi::Group {
        &self.inner.group.0
    }

    /// Returns the time limit in the form that c10d needs for one operation.
    pub(crate) fn limit_ms(&self) -> i64 {
        self.limit.map_or(NO_LIMIT_OF_ITS_OWN, milliseconds)
    }

    /// Runs the start of an operation exclusively, so that all ranks number operations in the same way.
    pub(crate) fn exclusively<R>(&self, start: impl FnOnce(&ffi::Group) -> R) -> R {
        let _alone = self.inner.starting.lock();
        start(self.raw())
    }

    /// Assigns a number to the next collective. Called inside of [`ProcessGroup::exclusively`], so that numbers are in
    /// the order of the starts.
    pub(crate) fn next_collective(&self, operation: &'static str) -> Started {
        let sequence = self.inner.sequence.fetch_add(1, Ordering::Relaxed);
        Started { operation, sequence: Some(sequence), begun: Some(Instant::now()) }
    }

    /// Keeps a send or receive that nobody waits for as long as the group.
    pub(crate) fn keep_message(&self, message: WorkHandle) {
        self.inner.messages.lock().push(message);
    }

    /// Returns the error of an operation that was waited for since its start. For a collective, determines which ranks
    /// had not arrived.
    pub(crate) fn failure(
        &self,
        started: Started,
        since: Instant,
        error: &cxx::Exception,
    ) -> CollectiveError {
        let thrown = Thrown::read(error);
        let fault = thrown.fault_after(since.elapsed(), self.timeout());
        self.failure_of(started, fault, thrown.detail)
    }

    /// Computes gradients as [`crate::backward`] does, for a loss whose gradients a [`crate::Reducer`] of this group
    /// reduces. If the reduction fails, the group is marked as failed, so that later operations do not wait for lost
    /// peers.
    ///
    /// No collective of this group may be started on another thread meanwhile, because the order of its and the
    /// reducer's collectives would differ between ranks.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if a peer was lost or did not arrive within the time limit; the error of a
    /// [`crate::GradientHook`]; and the errors of [`crate::backward`].
    pub fn backward(&self, loss: &Tensor) -> Result<(), Error> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// Computes gradients as [`ProcessGroup::backward`] does, with options. A second backward through a graph that was
    /// kept is reduced over the ranks like the first. It is an error with `find_unused_parameters`, with
    /// `static_graph`, and in a join of ranks with unequal inputs.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::backward`].
    pub fn backward_with(&self, loss: &Tensor, options: BackwardOptions) -> Result<(), Error> {
        let begun = Instant::now();
        self.take_hook_error();
        let BackwardOptions { create_graph, .. } = options;
        let retains = options.retains();
        ffi::group_backward(self.raw(), borrow(loss), retains, create_graph).map_err(|error| {
            if let Some(error) = self.take_hook_error() {
                return error;
            }
            let thrown = Thrown::read(&error);
            if !thrown.is_of_a_group() {
                return Error::libtorch("backward", &error);
            }
            let fault = thrown.fault_after(begun.elapsed(), self.timeout());
            // The reducer's messages are not counted: all ranks in this pass have the same number.
            let sequence = Some(self.inner.sequence.load(Ordering::Relaxed));
            let started = Started { operation: "backward", sequence, begun: None };
            self.failure_of(started, fault, thrown.detail).into()
        })
    }

    /// Stores the error of a communication hook for the backward that it ends.
    pub(crate) fn keep_hook_error(&self, error: Error) {
        self.inner.hook_error.lock().get_or_insert(error);
    }

    pub(crate) fn take_hook_error(&self) -> Option<Error> {
        self.inner.hook_error.lock().take()
    }

    pub(crate) fn failure_of(
        &self,
        started: Started,
        mut fault: Fault,
        detail: String,
    ) -> CollectiveError {
        let inner = &self.inner;
        let Started { operation, sequence, begun } = started;
        let store = &inner.store;
        let notes = sequence.map(|sequence| MissingRanks {
            store: store.clone(),
            rank: inner.rank,
            size: inner.size,
            sequence,
            waited: begun.map(|begun| begun.elapsed()),
        });
        let (mut missing, mut lost_store) = (Vec::new(), None);
        if self.is_aborted() {
            fault = Fault::Aborted;
            if let Some(notes) = notes {
                notes.answer();
            }
        } else if !matches!(fault, Fault::Invalid | Fault::Unsupported) {
            // The first failure ends the group; failures that follow from it do not show missing ranks.
            let first = !inner.failed.swap(true, Ordering::Relaxed);
            if first {
                missing = notes.map(MissingRanks::ask).unwrap_or_default();
                lost_store = lost_server(store);
            }
        }
        CollectiveError {
            operation,
            group: inner.name.clone(),
            rank: inner.rank,
            size: inner.size,
            fault,
            detail,
            missing,
            lost_store,
        }
    }
}

/// Checks the backend before any communication.
fn check_backend(backend: &Backend, name: &str) -> Result<(), Error> {
    match backend {
        Backend::Gloo(GlooDevice::Interfaces(names)) if names.is_empty() => {
            Err(Error::invalid_argument(format!(
                "group {name:?}: no network interface given; use GlooDevice::Default"
            )))
        }
        Backend::Nccl => match cuda_devices() {
            Ok(_) => Ok(()),
            Err(reason) => Err(TorchError::Libtorch {
                operation: "new_group",
                fault: Fault::Unsupported,
                detail: format!("group {name:?}: NCCL needs a GPU, and {reason}"),
            }
            .into()),
        },
        Backend::Tpu => match Tpu.load() {
            Ok(()) => Ok(()),
            Err(reason) => Err(TorchError::Libtorch {
                operation: "new_group",
                fault: Fault::Unsupported,
                detail: format!(
                    "group {name:?}: TorchTPU's process group needs a TPU, and {reason}"
                ),
            }
            .into()),
        },
        _ => Ok(()),
    }
}

/// Started operation, as its error describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    pub(crate) operation: &'static str,
    /// Number of the operation among the group's collectives. `None` for sends, receives and similar operations.
    pub(crate) sequence: Option<u64>,
    /// Time of the start, if it is known.
    pub(crate) begun: Option<Instant>,
}

impl Started {
    /// Describes an operation in which not all ranks take part.
    pub(crate) fn unnumbered(operation: &'static str) -> Self {
        Self { operation, sequence: None, begun: None }
    }
}

impl Inner {
    fn abort(&self) -> Result<(), Error> {
        self.aborted.store(true, Ordering::Relaxed);
        ffi::group_abort(&self.group.0).map_err(|error| Error::libtorch("abort", &error))
    }
}

impl Drop for Inner {
    /// Closes the connections: at once after a failure, otherwise after a few seconds for operations in flight. See
    /// `cpp/gloo.cpp` and `cpp/nccl.cpp`.
    fn drop(&mut self) {
        self.watched.close();
        if self.aborted.load(Ordering::Relaxed) {
            return;
        }
        // A failure of the abort cannot be handled, and a drop must not panic.
        if self.failed.load(Ordering::Relaxed) {
            let _ = self.abort();
        } else {
            let _ = ffi::group_finish(&self.group.0);
        }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.inner.name)
            .field("rank", &self.inner.rank)
            .field("size", &self.inner.size)
            .field("backend", &self.inner.backend)
            .finish()
    }
}

/// Returns the key that a rank sets before it connects.
fn joined(rank: usize) -> String {
    format!("joined/{rank}")
}
