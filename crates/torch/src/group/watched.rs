//! Time limit of device work that c10d's watchdog does not monitor: [`ProcessGroup::watch`].
//!
//! The watchdog does not monitor the operations of a recorded step. A thread of this module queries the event after
//! each replay, numbers the replay as a collective, and aborts the group at the time limit. The error is stored before
//! the abort, because NCCL frees a communicator only after the graphs that use it are dropped.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Inner, ProcessGroup, Started};
use crate::error::{Error, Fault};

/// Pause between two checks whether work is done.
const PAUSE: Duration = Duration::from_millis(50);

type Question = Box<dyn FnMut() -> Result<bool, Error> + Send>;

struct Watch {
    started: Started,
    begun: Instant,
    limit: Duration,
    is_done: Question,
}

/// Watched work of a group, shared with the watching thread.
#[derive(Default)]
pub(crate) struct Watched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Watch>,
    /// `true` if the thread runs.
    runs: bool,
    closed: bool,
    failure: Option<Error>,
}

impl ProcessGroup {
    /// Applies the group's time limit to device work that contains collectives and is not monitored by c10d, such as a
    /// replayed graph. Does not wait.
    ///
    /// A thread calls `is_done` (such as [`StreamEvent::is_done`](crate::StreamEvent::is_done)) every 50 ms. Work that
    /// is not done within the limit, counted from this call or from the end of the work before it, fails: the thread
    /// aborts the group, which ends NCCL's kernels, and the next `watch` or [`ProcessGroup::watched`] returns the
    /// error. The work is numbered like a collective, so that the error contains missing ranks; all ranks must call it
    /// in the same order.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store, StreamEvent};
    /// # use tch::Device;
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// # let device = Device::Cpu;
    /// // After a graph was replayed on the device:
    /// if let Some(event) = StreamEvent::record(device)? {
    ///     group.watch("replay", move || event.is_done())?;
    /// }
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::watched`].
    pub fn watch(
        &self,
        operation: &'static str,
        is_done: impl FnMut() -> Result<bool, Error> + Send + 'static,
    ) -> Result<(), Error> {
        self.watched()?;
        let started = self.exclusively(|_| self.next_collective(operation));
        let watched = &self.inner().watched;
        let mut state = watched.state.lock();
        let (begun, limit) = (Instant::now(), self.timeout());
        state.waiting.push_back(Watch { started, begun, limit, is_done: Box::new(is_done) });
        if !state.runs {
            let (group, shared) = (self.downgrade(), Arc::clone(watched));
            let watcher = thread::Builder::new().name("group-watch".into());
            // If the thread cannot be started, the limit does not apply, as before this call.
            state.runs = watcher.spawn(move || shared.run(&group)).is_ok();
        }
        drop(state);
        watched.changed.notify_all();
        Ok(())
    }

    /// Checks that all work that was passed to [`ProcessGroup::watch`] was done within the time limit so far. An error
    /// is returned once.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] with [`Fault::Timeout`] for work that was not done within the limit, after
    /// that with [`Fault::Aborted`]; the error of `is_done` if the device has failed.
    pub fn watched(&self) -> Result<(), Error> {
        let failure = self.inner().watched.state.lock().failure.take();
        match failure {
            Some(error) => Err(error),
            None if self.is_aborted() => {
                let detail = "the group was aborted".to_owned();
                Err(self.failure_of(Started::unnumbered("watch"), Fault::Aborted, detail).into())
            }
            None => Ok(()),
        }
    }
}

impl Watched {
    /// Stops the watching thread.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.waiting.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the next work to watch. `None` once it is closed.
    fn next(&self) -> Option<Watch> {
        let mut state = self.state.lock();
        while !state.closed {
            if let Some(watch) = state.waiting.pop_front() {
                return Some(watch);
            }
            self.changed.wait(&mut state);
        }
        None
    }

    /// Waits for a short time. Returns `false` once it is closed.
    fn pause(&self) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| !state.closed, PAUSE);
        !state.closed
    }

    fn run(&self, group: &Weak<Inner>) {
        let mut last_end = Instant::now();
        while let Some(mut watch) = self.next() {
            let begun = watch.begun.max(last_end);
            loop {
                match (watch.is_done)() {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(error) => {
                        self.state.lock().failure = Some(error);
                        break;
                    }
                }
                if begun.elapsed() > watch.limit {
                    let Some(group) = ProcessGroup::upgrade(group) else { return };
                    let detail = format!("the device has not done it within {:?}", watch.limit);
                    let error = group.failure_of(watch.started, Fault::Timeout, detail);
                    // Stored before the abort, which can last until the graphs that use the communicator are dropped.
                    self.state.lock().failure = Some(error.into());
                    let _ = group.abort();
                    return;
                }
                if !self.pause() {
                    return;
                }
            }
            last_end = Instant::now();
        }
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}
