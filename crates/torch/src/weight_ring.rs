//! Weight rings: weights that are in a device's memory only while their layers compute.
//!
//! A `WeightRing` consists of tensors, the sources of their values, and slots; it does not depend on models. A slot is
//! a tensor of bytes, of which the tensors of a part become views by `set_data`. Outside of their uses the tensors have
//! no memory, and reading one is an error with the part's name. One thread fills slots in the order in which parts will
//! be used (`order.rs`, a pure function of the uses so far: a tied weight has two successors). On a GPU it copies on a
//! stream of its own, after an event of the last computation with the slot; computations wait for an event of the
//! copies.
//!
//! A failure to load a part is an error of its next use; the use after that reads it again. If more parts are in use at
//! once than there are slots, such as the model's own parameters together with those of a unit, the ring gets one more
//! slot.

mod order;

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};

use crate::bridge::{borrow, ffi};
use crate::device::{begin_copy, pinned_like};
use crate::error::{Error, ErrorKind};
use crate::streams::{SideStream, StreamEvent};
use crate::unallocated::unallocated;

use order::Order;

/// Weights that are used together, such as those of a transformer's block.
#[derive(Debug)]
pub struct RingPart {
    /// Name of the part in errors.
    pub name: String,
    /// Tensors of the part with the sources of their values.
    pub tensors: Vec<(Tensor, WeightSource)>,
}

/// Function that sets all values of a CPU tensor.
type ReadWeight = dyn Fn(&Tensor) -> Result<(), Error> + Send + Sync;

/// Source of a tensor's values while it has no memory on its device.
pub enum WeightSource {
    /// A tensor of the same shape and type in the host's memory. Copies from pinned memory run beside computations on a
    /// GPU.
    Host(Tensor),
    /// A function that sets all values of a CPU tensor, such as by reading a file. It runs in the ring's threads, for
    /// several tensors at once.
    Read(Arc<ReadWeight>),
}

/// Holds the weights of a model's parts in a device's memory while they are used, in a fixed number of slots used in
/// turn: after a part was used, its slot is free for a later one, whose values a thread loads while other parts
/// compute.
///
/// The order in which parts are used is recorded from their uses; initially it is the order in which they were given.
/// Tensors have no memory outside of their uses: a read fails with an error that names the part. Memory is needed only
/// for the slots, each of which has the size of the largest part, and on a GPU the same size of pinned memory of the
/// host if values are read.
///
/// ```
/// use std::sync::Arc;
///
/// use brigade_torch::{RingPart, WeightRing, WeightSource, has_memory};
/// use tch::{Device, Kind, Tensor};
///
/// let part = |name: &str, value: f64| {
///     let weight = Tensor::zeros([2], (Kind::Float, Device::Cpu));
///     let read = move |into: &Tensor| Ok(into.shallow_clone().f_fill_(value).map(drop)?);
///     (weight.shallow_clone(), RingPart { name: name.to_owned(), tensors: vec![(weight, WeightSource::Read(Arc::new(read)))] })
/// };
/// let ((first, one), (second, two)) = (part("first", 1.0), part("second", 2.0));
/// let ring = WeightRing::new(Device::Cpu, 2, vec![one, two])?;
/// {
///     let _held = ring.hold(&[0])?;
///     assert_eq!(first, Tensor::from_slice(&[1f32, 1.0]));
///     assert!(second.f_sum(Kind::Float).unwrap_err().to_string().contains("weights of `second` are not in memory"));
/// }
/// assert!(!has_memory(&first));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct WeightRing {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

/// Memory and counters of a [`WeightRing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightRingMeter {
    /// Number of bytes of all slots together.
    pub bytes: u64,
    /// Number of times that a part was loaded into a slot.
    pub fetches: u64,
    /// Number of bytes that were loaded.
    pub fetched_bytes: u64,
    /// Number of times that a use had to wait for a part's values.
    pub waits: u64,
}

struct Shared {
    device: Device,
    state: Mutex<State>,
    /// Signalled when a part is loaded or has failed, when a slot becomes free, or when the ring ends.
    changed: Condvar,
}

struct State {
    parts: Vec<Part>,
    slots: Vec<Slot>,
    /// Size of a slot in bytes.
    slot_bytes: i64,
    /// Slots that are to be filled, in this order.
    queue: VecDeque<usize>,
    order: Order,
    meter: WeightRingMeter,
    ends: bool,
}

struct Part {
    name: String,
    tensors: Vec<RingTensor>,
    bytes: i64,
    /// Number of uses that have begun and not ended.
    users: usize,
    at: At,
}

struct RingTensor {
    tensor: Tensor,
    /// Tensor without memory, which replaces the tensor outside of its uses.
    guard: Tensor,
    source: WeightSource,
    /// Offset of the tensor's first byte in a slot.
    offset: i64,
    bytes: i64,
}

enum At {
    Away,
    /// The part is being loaded into a slot.
    Coming,
    /// The part is in this slot.
    Here(usize),
    Failed(Error),
}

/// Slot of the ring.
struct Slot {
    /// Bytes on the device.
    buffer: Tensor,
    /// Pinned memory of the same size, for values that are read on their way to a GPU.
    staging: Option<Tensor>,
    part: Option<usize>,
    /// Event after the copies into the slot, on a GPU.
    filled: Option<StreamEvent>,
    /// Event after the last computation with the slot, on a GPU.
    used: Option<StreamEvent>,
}

/// Maximum number of threads that read the tensors of a part.
const READERS: usize = 4;

/// Minimum number of bytes per thread: starting a thread costs about as much as reading a tenth of them.
const SMALLEST_SHARE: usize = 1 << 20;

/// Alignment of tensors in bytes: the width of the widest vectors.
const ALIGNMENT: i64 = 64;

impl WeightRing {
    /// Creates a ring of `places` slots, at least one, for parts whose tensors are used on a device. The memory of the
    /// tensors is freed. Each tensor must belong to exactly one part.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if there is not enough memory for the slots; [`ErrorKind::InvalidArgument`] if there
    /// are no parts; [`crate::TorchError::Tensor`] for tensors that overlap themselves.
    pub fn new(device: Device, places: usize, parts: Vec<RingPart>) -> Result<Self, Error> {
        if parts.is_empty() {
            return Err(Error::invalid_argument("a ring of weights needs at least one part"));
        }
        let parts = parts.into_iter().map(|part| Part::new(device, part));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let slot_bytes = parts.iter().map(|part| part.bytes).max().unwrap_or(0);
        let needs_staging = device != Device::Cpu
            && parts
                .iter()
                .flat_map(|part| &part.tensors)
                .any(|weight| matches!(weight.source, WeightSource::Read(_)));
        let mut state = State {
            order: Order::new(parts.len()),
            parts,
            slots: Vec::new(),
            slot_bytes,
            queue: VecDeque::new(),
            meter: WeightRingMeter::default(),
            ends: false,
        };
        for _ in 0..places.max(1) {
            state.add_slot(device, needs_staging)?;
        }
        let shared = Arc::new(Shared { device, state: Mutex::new(state), changed: Condvar::new() });
        let reader = {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name("brigade-weights".to_owned());
            thread.spawn(move || shared.bring()).map_err(|error| {
                Error::new(
                    ErrorKind::Internal,
                    format!("cannot start the thread that loads weights: {error}"),
                )
            })?
        };
        Ok(Self { shared, reader: Some(reader) })
    }

    /// Keeps the tensors of some parts in memory until the returned value is dropped. On a GPU, this thread's following
    /// work waits for the copies. Parts that are already in use are not loaded again.
    ///
    /// # Errors
    /// Returns the errors of a part's sources, with its name. The next use tries again.
    pub fn hold(&self, parts: &[usize]) -> Result<HeldWeights<'_>, Error> {
        let mut held = HeldWeights { shared: &self.shared, parts: Vec::with_capacity(parts.len()) };
        for &part in parts {
            self.shared.enter(part)?;
            held.parts.push(part);
        }
        Ok(held)
    }

    /// Returns the memory and the counters of the ring.
    #[must_use]
    pub fn meter(&self) -> WeightRingMeter {
        self.shared.state.lock().meter
    }
}

impl Drop for WeightRing {
    fn drop(&mut self) {
        self.shared.state.lock().ends = true;
        self.shared.changed.notify_all();
        if let Some(reader) = self.reader.take() {
            // Panics of sources are caught, so the thread has ended normally.
            let _ = reader.join();
        }
    }
}

/// Parts whose weights are kept in memory. See [`WeightRing::hold`].
#[must_use = "the weights leave memory where this is dropped"]
pub struct HeldWeights<'r> {
    shared: &'r Shared,
    parts: Vec<usize>,
}

impl Drop for HeldWeights<'_> {
    fn drop(&mut self) {
        for &part in self.parts.iter().rev() {
            self.shared.leave(part);
        }
    }
}

impl Shared {
    fn enter(&self, part: usize) -> Result<(), Error> {
        let mut state = self.state.lock();
        if part >= state.parts.len() {
            let count = state.parts.len();
            return Err(Error::invalid_argument(format!(
                "the ring has {count} parts, and no part {part}"
            )));
        }
        state.order.note(part);
        let mut waited = false;
        let slot = loop {
            match &state.parts[part].at {
                At::Here(slot) => break *slot,
                At::Coming => {
                    waited = true;
                    self.changed.wait(&mut state);
                }
                At::Failed(_) => {
                    if let At::Failed(error) =
                        std::mem::replace(&mut state.parts[part].at, At::Away)
                    {
                        return Err(error);
                    }
                }
                At::Away => match state.slot_for(&[]) {
                    Some(slot) => self.fetch(&mut state, part, slot),
                    // An unused part is being loaded into the slot.
                    None if state.parts.iter().any(|part| matches!(part.at, At::Coming)) => {
                        self.changed.wait(&mut state);
                    }
                    // More parts are used at once than there are slots.
                    None => {
                        let has_staging = state.slots.iter().any(|slot| slot.staging.is_some());
                        state.add_slot(self.device, has_staging)?;
                    }
                },
            }
        };
        state.meter.waits += u64::from(waited);
        if state.parts[part].users == 0 {
            state.attach(part, slot)?;
        }
        if let Some(filled) = &state.slots[slot].filled {
            filled.follow()?;
        }
        state.parts[part].users += 1;
        self.fetch_ahead(&mut state);
        Ok(())
    }

    fn leave(&self, part: usize) {
        let mut state = self.state.lock();
        let it = &mut state.parts[part];
        it.users -= 1;
        if it.users > 0 {
            return;
        }
        it.detach();
        if let At::Here(slot) = it.at {
            // A failure of the device is an error of the next operation on it.
            state.slots[slot].used = StreamEvent::record(self.device).ok().flatten();
        }
        self.fetch_ahead(&mut state);
        self.changed.notify_all();
    }

    /// Requests that the parts used next are loaded into unused slots.
    fn fetch_ahead(&self, state: &mut MutexGuard<'_, State>) {
        let in_use =
            |state: &State, slot: &Slot| slot.part.is_some_and(|part| state.parts[part].users > 0);
        let free = state.slots.iter().filter(|slot| !in_use(state, slot)).count();
        let next = state.order.next(free);
        for &part in &next {
            if matches!(state.parts[part].at, At::Away) {
                let Some(slot) = state.slot_for(&next) else { return };
                self.fetch(state, part, slot);
            }
        }
    }

    /// Requests that a part is loaded into a slot.
    fn fetch(&self, state: &mut MutexGuard<'_, State>, part: usize, slot: usize) {
        if let Some(old) = state.slots[slot].part.replace(part) {
            state.parts[old].at = At::Away;
        }
        state.parts[part].at = At::Coming;
        state.queue.push_back(slot);
        self.changed.notify_all();
    }

    /// Loads parts into slots until the ring ends; runs in a thread of its own.
    fn bring(&self) {
        let stream = SideStream::enter(self.device, None);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(READERS);
        loop {
            let mut state = self.state.lock();
            let slot = loop {
                if state.ends {
                    return;
                }
                match state.queue.pop_front() {
                    Some(slot) => break slot,
                    None => self.changed.wait(&mut state),
                }
            };
            let Some(part) = state.slots[slot].part else { continue };
            let job = state.job(part, slot);
            drop(state);
            let run = || {
                if let Err(error) = &stream {
                    return Err(Error::custom(error.to_string()));
                }
                job?.run(self.device, threads)
            };
            let done = catch_unwind(AssertUnwindSafe(run))
                .unwrap_or_else(|_| Err(Error::custom("the read of a weight panicked")));
            let mut state = self.state.lock();
            let bytes = state.parts[part].bytes;
            match done {
                Ok(filled) => {
                    state.meter.fetches += 1;
                    state.meter.fetched_bytes += bytes.unsigned_abs();
                    state.slots[slot].filled = filled;
                    state.parts[part].at = At::Here(slot);
                }
                Err(error) => {
                    state.slots[slot].part = None;
                    let name = &state.parts[part].name;
                    let text = format!(
                        "the weights of `{name}` could not be brought into memory: {error}"
                    );
                    state.parts[part].at = At::Failed(Error::new(error.kind(), text));
                }
            }
            self.changed.notify_all();
        }
    }
}

/// Loading of a part into a slot.
struct Job {
    /// Event on a GPU after the last computation with the slot, and after the last copies out of its pinned memory.
    used: Option<StreamEvent>,
    filled: Option<StreamEvent>,
    /// For each tensor: the source of its values, its memory in the slot, and that in pinned memory.
    tensors: Vec<(WeightSource, Tensor, Option<Tensor>)>,
}

impl Job {
    /// Returns the event behind the copies, on a GPU.
    fn run(self, device: Device, threads: usize) -> Result<Option<StreamEvent>, Error> {
        if let Some(used) = &self.used {
            used.follow()?;
        }
        if let Some(filled) = &self.filled {
            filled.wait()?;
        }
        let (mut reads, mut copies) = (Vec::new(), Vec::new());
        for (source, into, staging) in self.tensors {
            match (source, staging) {
                (WeightSource::Host(values), _) => copies.push((values, into)),
                (WeightSource::Read(read), None) => reads.push((read, into)),
                (WeightSource::Read(read), Some(staging)) => {
                    reads.push((read, staging.shallow_clone()));
                    copies.push((staging, into));
                }
            }
        }
        read_all(reads, threads)?;
        tch::no_grad(|| {
            copies.iter().try_for_each(|(from, into)| begin_copy(from, into))?;
            StreamEvent::record(device)
        })
    }
}

/// Reads tensors in at most `threads` threads, including this one: a single thread copies out of the page cache at a
/// fraction of the memory's bandwidth, and a fast disk completes several reads sooner at the same time.
fn read_all(reads: Vec<(Arc<ReadWeight>, Tensor)>, threads: usize) -> Result<(), Error> {
    let mut shares = shares(reads, threads, |(_, tensor)| bytes_of(tensor)).into_iter();
    let Some(own) = shares.next() else { return Ok(()) };
    let read = |share: Vec<(Arc<ReadWeight>, Tensor)>| {
        tch::no_grad(|| share.iter().try_for_each(|(read, into)| read(into)))
    };
    thread::scope(|scope| {
        let others: Vec<_> = shares.map(|share| scope.spawn(move || read(share))).collect();
        let own = read(own);
        others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .fold(own, Result::and)
    })
}

/// Divides items into at most `count` shares of about equal bytes. Small items stay in one share.
fn shares<T>(mut items: Vec<T>, count: usize, bytes: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let total: usize = items.iter().map(&bytes).sum();
    let count = count.min(total / SMALLEST_SHARE).max(1);
    let mut shares: Vec<(usize, Vec<T>)> = (0..count).map(|_| (0, Vec::new())).collect();
    // Longest first, each to the share with the fewest bytes so far.
    items.sort_by_key(|item| Reverse(bytes(item)));
    for item in items {
        if let Some(least) = shares.iter_mut().min_by_key(|share| share.0) {
            least.0 += bytes(&item);
            least.1.push(item);
        }
    }
    shares.into_iter().map(|share| share.1).filter(|share| !share.is_empty()).collect()
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

impl State {
    fn add_slot(&mut self, device: Device, has_staging: bool) -> Result<(), Error> {
        let buffer = Tensor::f_empty([self.slot_bytes], (Kind::Uint8, device))?;
        let staging = has_staging.then(|| pinned_like(&buffer)).transpose()?;
        self.meter.bytes += self.slot_bytes.unsigned_abs();
        self.slots.push(Slot { buffer, staging, part: None, filled: None, used: None });
        Ok(())
    }

    /// Returns a slot that is empty, or else one whose part is in memory, unused, and not one of `kept`.
    fn slot_for(&self, kept: &[usize]) -> Option<usize> {
        let is_idle = |slot: &Slot| {
            slot.part.is_some_and(|part| {
                let it = &self.parts[part];
                it.users == 0 && matches!(it.at, At::Here(_)) && !kept.contains(&part)
            })
        };
        let empty = self.slots.iter().position(|slot| slot.part.is_none());
        empty.or_else(|| self.slots.iter().position(is_idle))
    }

    fn job(&mut self, part: usize, slot: usize) -> Result<Job, Error> {
        let (used, filled) = (self.slots[slot].used.take(), self.slots[slot].filled.take());
        let slot = &self.slots[slot];
        let tensors = self.parts[part].tensors.iter().map(|it| {
            let source = match &it.source {
                WeightSource::Host(values) => WeightSource::Host(values.shallow_clone()),
                WeightSource::Read(read) => WeightSource::Read(Arc::clone(read)),
            };
            let staging = slot.staging.as_ref().map(|staging| it.within(staging)).transpose()?;
            Ok((source, it.within(&slot.buffer)?, staging))
        });
        let tensors = tensors.collect::<Result<Vec<_>, Error>>()?;
        Ok(Job { used, filled, tensors })
    }

    /// Sets the memory of a part's tensors to a slot.
    fn attach(&mut self, part: usize, slot: usize) -> Result<(), Error> {
        let (parts, buffer) = (&mut self.parts, &self.slots[slot].buffer);
        tch::no_grad(|| {
            parts[part].tensors.iter_mut().try_for_each(|it| {
                let memory = it.within(buffer)?;
                Ok(it.tensor.f_set_data(&memory)?)
            })
        })
    }
}

impl Part {
    fn new(device: Device, part: RingPart) -> Result<Self, Error> {
        let RingPart { name, tensors } = part;
        let text = format!(
            "the weights of `{name}` are not in memory: the model's device map has them elsewhere, and they are in memory \
             while their layers compute"
        );
        let mut bytes = 0;
        let tensors = tensors.into_iter().map(|(tensor, source)| {
            let (size, strides) = (tensor.size(), tensor.stride());
            let guard = unallocated(&size, Some(&strides), (tensor.f_kind()?, device), &text)?;
            // A copy of the weight in 16 bits would stay on the device.
            ffi::refuse_copies(borrow(&tensor));
            let own = tensor.numel() * tensor.f_kind()?.elt_size_in_bytes();
            let own = i64::try_from(own).map_err(Error::custom)?;
            let offset = bytes;
            bytes = (bytes + own + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            Ok(RingTensor { tensor, guard, source, offset, bytes: own })
        });
        let tensors = tensors.collect::<Result<Vec<_>, Error>>()?;
        let mut part = Self { name, tensors, bytes, users: 0, at: At::Away };
        part.detach();
        Ok(part)
    }

    /// Removes the memory of the tensors.
    fn detach(&mut self) {
        tch::no_grad(|| {
            for it in &mut self.tensors {
                // Cannot fail: the tensors have the same shape, type and device.
                let _ = it.tensor.f_set_data(&it.guard);
            }
        });
    }
}

impl RingTensor {
    /// Returns the tensor's memory in a slot.
    fn within(&self, place: &Tensor) -> Result<Tensor, Error> {
        let bytes = place.f_narrow(0, self.offset, self.bytes)?;
        let values = bytes.f_view_dtype(self.guard.f_kind()?)?;
        let (size, strides) = (self.guard.size(), self.guard.stride());
        Ok(values.f_as_strided(size, strides, values.storage_offset())?)
    }
}

impl fmt::Debug for WeightSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(_) => f.write_str("Host"),
            Self::Read(_) => f.write_str("Read"),
        }
    }
}

impl fmt::Debug for WeightRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightRing")
            .field("device", &self.shared.device)
            .field("meter", &self.meter())
            .finish()
    }
}

impl fmt::Debug for HeldWeights<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldWeights").field("parts", &self.parts).finish()
    }
}
