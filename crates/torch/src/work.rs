//! Operations in flight.

use std::fmt;
use std::time::{Duration, Instant};

use cxx::UniquePtr;
use tch::Tensor;

use crate::backend::Backend;
use crate::bridge::{NO_LIMIT_OF_ITS_OWN, ffi};
use crate::error::{Error, Fault};
use crate::group::{ProcessGroup, Started};
use crate::store::milliseconds;
use crate::work_handle::WorkHandle;

/// A started operation. It keeps its tensors until it is waited for, in memory that nothing else can access: a tensor
/// that was passed by reference, or whose memory other tensors share, is copied first. So pass tensors by value where
/// possible, and continue with the result, not with another handle of the tensor.
///
/// Dropping it without waiting is safe: the operation continues as long as the group exists, and libtorch
/// keeps the memory until it has ended. Its result and its error are lost.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::ReduceOp;
/// use tch::Tensor;
/// let first = group.start_all_reduce(Tensor::from(1.0), ReduceOp::Sum)?;
/// let second = group.start_all_reduce(Tensor::from(2.0), ReduceOp::Sum)?;
/// let (second, first) = (second.wait()?, first.wait()?);
/// assert_eq!(second.double_value(&[]), 2.0 * first.double_value(&[]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use = "the result is there only after wait()"]
pub struct Work<T> {
    pending: PendingWork,
    value: T,
    /// Tensors that the operation reads. They must live as long as the operation.
    inputs: Vec<Tensor>,
    finish: Option<Finish<T>>,
}

/// Function that converts the raw result to the caller's, such as a division for a mean or a copy back.
type Finish<T> = Box<dyn FnOnce(&mut T) -> Result<(), Error> + Send>;

impl<T> Work<T> {
    /// Waits until the operation has ended and returns its result.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with the operation, the group and the rank.
    pub fn wait(self) -> Result<T, Error> {
        self.wait_source().map(|(value, _)| value)
    }

    /// Waits as [`Work::wait`] does, and also returns the rank that sent the data, for a receive from any rank.
    ///
    /// # Errors
    /// Returns the same errors as [`Work::wait`].
    pub fn wait_source(self) -> Result<(T, Option<usize>), Error> {
        let Self { pending, mut value, inputs, finish } = self;
        let source = pending.finish()?;
        drop(inputs);
        if let Some(finish) = finish {
            finish(&mut value)?;
        }
        Ok((value, source))
    }

    /// Returns `true` if the operation has ended, successfully or not. Does not block. Gloo's sends and receives only
    /// report their end in [`Work::wait`].
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when libtorch fails.
    pub fn is_completed(&self) -> Result<bool, Error> {
        match &self.pending.handle {
            Some(handle) => ffi::work_is_completed(&handle.0)
                .map_err(|error| Error::libtorch("is_completed", &error)),
            None => Ok(true),
        }
    }

    /// Returns the time limit of the operation.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.pending.group.timeout()
    }

    pub(crate) fn reading(mut self, inputs: impl IntoIterator<Item = Tensor>) -> Self {
        self.inputs.extend(inputs);
        self
    }

    /// Adds a step that changes the result after the earlier steps.
    pub(crate) fn then(
        mut self,
        next: impl FnOnce(&mut T) -> Result<(), Error> + Send + 'static,
    ) -> Self
    where
        T: 'static,
    {
        self.finish = Some(match self.finish.take() {
            None => Box::new(next),
            Some(first) => Box::new(move |value: &mut T| {
                first(value)?;
                next(value)
            }),
        });
        self
    }

    /// Returns the same operation with another result, which is filled from this one.
    pub(crate) fn into_filling<U>(
        self,
        value: U,
        fill: impl FnOnce(T, &mut U) -> Result<(), Error> + Send + 'static,
    ) -> Work<U>
    where
        T: Send + 'static,
    {
        let Self { pending, value: mut raw, inputs, finish } = self;
        let finish: Finish<U> = Box::new(move |value: &mut U| {
            if let Some(finish) = finish {
                finish(&mut raw)?;
            }
            fill(raw, value)
        });
        Work { pending, value, inputs, finish: Some(finish) }
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({} on {:?})", self.pending.started.operation, self.pending.group.name())
    }
}

/// The C++ operation with its context.
pub(crate) struct PendingWork {
    handle: Option<WorkHandle>,
    group: ProcessGroup,
    started: Started,
}

impl PendingWork {
    pub(crate) fn new(handle: UniquePtr<ffi::Work>, group: ProcessGroup, started: Started) -> Self {
        Self { handle: Some(WorkHandle(handle)), group, started }
    }

    /// Makes a work whose result is `value`.
    pub(crate) fn giving<T>(self, value: T) -> Work<T> {
        Work { pending: self, value, inputs: Vec::new(), finish: None }
    }

    /// Waits for the end, and returns the sender if there is one.
    fn finish(mut self) -> Result<Option<usize>, Error> {
        let Some(handle) = self.handle.take() else { return Ok(None) };
        // Gloo measures the limit of a collective from its start, and that of a message from this call.
        let since = self.started.begun.unwrap_or_else(Instant::now);
        match ffi::work_wait(&handle.0, self.wait_limit(&handle)) {
            Ok(true) => {}
            Ok(false) => {
                let detail = "the operation was aborted".to_owned();
                return Err(self.group.failure_of(self.started, Fault::Aborted, detail).into());
            }
            Err(error) => {
                let completed = ffi::work_is_completed(&handle.0).unwrap_or(false);
                if self.started.sequence.is_some() && !completed {
                    // Only the wait has ended. The operation must be ended, too.
                    self.group.close();
                }
                return Err(self.group.failure(self.started, since, &error).into());
            }
        }
        Ok(ffi::work_source(&handle.0).ok().and_then(|rank| usize::try_from(rank).ok()))
    }

    /// Returns the time limit of c10d's wait in milliseconds. 0 means no limit.
    fn wait_limit(&self, handle: &WorkHandle) -> i64 {
        let limit = self.group.timeout();
        let on_stream = ffi::work_is_on_stream(&handle.0);
        match (self.started.begun, self.group.backend()) {
            // Sends and receives get their limit here.
            (None, _) => milliseconds(limit),
            // Collectives have a limit of their own, but Gloo measures it from the start of its thread, and again for
            // each message of the collective. Gloo's error has more details, so this limit is a little longer.
            (Some(begun), Backend::Gloo(_) | Backend::Nccl | Backend::Tpu) if !on_stream => {
                milliseconds(limit.saturating_add(SLACK).saturating_sub(begun.elapsed()))
            }
            // With a limit here, NCCL blocks this thread instead of its stream, so it is set only if the handle has its
            // own limit. c10d's watchdog enforces the group's limit.
            (Some(_), Backend::Nccl) if self.group.limit_ms() != NO_LIMIT_OF_ITS_OWN => {
                milliseconds(limit)
            }
            (Some(_), _) => 0,
        }
    }
}

const SLACK: Duration = Duration::from_millis(500);

impl Drop for PendingWork {
    fn drop(&mut self) {
        // c10d keeps a collective until it has ended, but cancels a send or a receive when its last handle is dropped,
        // and the peer would wait until its time limit.
        if let (None, Some(handle)) = (self.started.sequence, self.handle.take()) {
            self.group.keep_message(handle);
        }
    }
}
