//! Thread that sends values to the server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::batch::{self, Batch, Entity};
use super::client::{Client, passes};
use crate::{Result, TrackError};

/// Queue of unsent values, and the thread that sends them.
#[derive(Debug)]
pub(super) struct Sender {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    url: String,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Entity>,
    /// Sum of the weights of `waiting`.
    weight: usize,
    /// Number of values in the current request.
    under_way: u64,
    /// Time at which the thread gives up, set when the run has ended.
    closed: Option<Instant>,
    /// `true` if the thread has ended.
    done: bool,
    lost: u64,
    reason: String,
}

/// Request that the thread has taken from the queue.
enum Request {
    Values(Batch),
    File { path: String, bytes: Vec<u8> },
}

impl Sender {
    pub(super) fn spawn(client: Client, run_id: String) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let url = client.url().to_owned();
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("mlflow".to_owned())
            .spawn(move || theirs.send_all(&client, &run_id))
            .map_err(|error| TrackError::Own(Box::new(error)))?;
        Ok(Self { shared, thread: Some(thread), url })
    }

    pub(super) fn push(&self, entity: Entity) {
        let mut queue = self.shared.queue.lock();
        queue.weight += entity.weight();
        queue.waiting.push_back(entity);
        while queue.weight > ROOM {
            let Some(oldest) = queue.waiting.pop_front() else { break };
            queue.weight = queue.weight.saturating_sub(oldest.weight());
            queue.lost += 1;
            if queue.reason.is_empty() {
                queue.reason = "values arrived faster than the server accepted them".to_owned();
            }
        }
        drop(queue);
        self.shared.changed.notify_one();
    }

    /// Returns the loss so far, if any.
    pub(super) fn failure(&self) -> Option<TrackError> {
        let queue = self.shared.queue.lock();
        (queue.lost > 0).then(|| TrackError::Lost {
            url: self.url.clone(),
            lost: queue.lost,
            reason: queue.reason.clone(),
        })
    }

    /// Sends the remaining values until `until` at the latest, and returns the loss. A request without an answer by
    /// then is left to its own time limit, in a thread that is not joined.
    pub(super) fn close(&mut self, until: Instant) -> Option<TrackError> {
        let mut queue = self.shared.queue.lock();
        queue.closed = Some(until);
        self.shared.changed.notify_all();
        while !queue.done {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Set to zero, so that the thread does not count these values again.
                queue.lost += std::mem::take(&mut queue.under_way) + queue.waiting.len() as u64;
                queue.waiting.clear();
                if queue.lost > 0 && queue.reason.is_empty() {
                    queue.reason = "the server did not answer before the time limit".to_owned();
                }
                self.thread = None;
                break;
            }
            self.shared.changed.wait_for(&mut queue, left);
        }
        drop(queue);
        if let Some(thread) = self.thread.take() {
            // Does not block: the thread has set `done`, so it has no request left.
            let _ = thread.join();
        }
        self.failure()
    }
}

impl Shared {
    fn send_all(&self, client: &Client, run_id: &str) {
        while let Some((request, closed)) = self.take() {
            let (mut pause, mut until) = (PAUSE, closed);
            let error = loop {
                let sent = match &request {
                    Request::Values(batch) => client.log_batch(run_id, batch, until),
                    Request::File { path, bytes } => client.put(path, bytes, until),
                };
                let Err(error) = sent else { break None };
                self.explain(&error, until);
                if !passes(&error) {
                    break Some(error);
                }
                match self.wait(pause) {
                    Some(closed) => until = closed,
                    None => break Some(error),
                }
                tracing::debug!("trying again: {error}");
                pause = (pause * 2).min(MAX_PAUSE);
            };
            let mut queue = self.queue.lock();
            let count = std::mem::take(&mut queue.under_way);
            if let Some(error) = error
                && count > 0
            {
                tracing::warn!("{count} values are lost: {error}");
                queue.lost += count;
            }
        }
        self.queue.lock().done = true;
        self.changed.notify_all();
    }

    /// Keeps the reason why values could not be sent. An earlier answer of the server is more useful than the error of
    /// a request that was cut off at the end of the run.
    fn explain(&self, error: &TrackError, until: Option<Instant>) {
        let mut queue = self.queue.lock();
        let cut_off = until.is_some_and(|until| Instant::now() >= until);
        if !cut_off || queue.reason.is_empty() {
            queue.reason = error.to_string();
        }
    }

    /// Takes the next request, and the time limit once the run has ended. Returns `None` when the run has ended and the
    /// queue is empty, or the time limit has passed.
    fn take(&self) -> Option<(Request, Option<Instant>)> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(until) = queue.closed
                && Instant::now() >= until
            {
                queue.lost += queue.waiting.len() as u64;
                queue.waiting.clear();
                return None;
            }
            if let Some(request) = queue.next() {
                return Some((request, queue.closed));
            }
            if queue.closed.is_some() {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    /// Waits before another attempt and returns its time limit; `None` when the time limit has passed.
    fn wait(&self, pause: Duration) -> Option<Option<Instant>> {
        let over = |queue: &Queue| queue.closed.is_some_and(|until| Instant::now() >= until);
        let until = Instant::now() + pause;
        let mut queue = self.queue.lock();
        while !over(&queue) {
            let mut left = until.saturating_duration_since(Instant::now());
            if let Some(closed) = queue.closed {
                left = left.min(closed.saturating_duration_since(Instant::now()));
            }
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut queue, left);
        }
        if over(&queue) { None } else { Some(queue.closed) }
    }
}

impl Queue {
    fn next(&mut self) -> Option<Request> {
        if let Some(Entity::Artifact { .. }) = self.waiting.front() {
            let artifact = self.waiting.pop_front()?;
            self.weight = self.weight.saturating_sub(artifact.weight());
            self.under_way = 1;
            return match artifact {
                Entity::Artifact { path, bytes } => Some(Request::File { path, bytes }),
                _ => None,
            };
        }
        let (batch, weight) = batch::next(&mut self.waiting);
        if batch.len() == 0 {
            return None;
        }
        self.weight = self.weight.saturating_sub(weight);
        self.under_way = batch.len() as u64;
        Some(Request::Values(batch))
    }
}

/// Maximum size of the queue in bytes.
const ROOM: usize = 64 << 20;
const PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Stamp, Value};

    proptest! {
        /// The amount that is subtracted equals the amount that was added, whichever batches are sent.
        #[test]
        fn the_weight_is_that_of_what_waits(kinds in proptest::collection::vec(0..4u8, 0..300)) {
            let mut queue = Queue::default();
            for (number, kind) in kinds.iter().enumerate() {
                let name = "n".repeat(number % 7);
                let entity = match kind {
                    0 => Entity::metric(&name, number as f64, Stamp::step(1)),
                    1 => Entity::tag(&name, "a tag"),
                    2 => Entity::parameter(&name, &Value::from("p".repeat(number * 40))),
                    _ => Entity::Artifact { path: name, bytes: vec![0; number] },
                };
                queue.weight += entity.weight();
                queue.waiting.push_back(entity);
            }
            let mut sent = 0;
            while queue.next().is_some() {
                sent += queue.under_way as usize;
                let expected: usize = queue.waiting.iter().map(Entity::weight).sum();
                prop_assert_eq!(queue.weight, expected);
            }
            prop_assert_eq!((sent, queue.weight), (kinds.len(), 0));
        }
    }
}
