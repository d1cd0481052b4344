//! The thread that sends.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::batch::{self, Batch, Entity};
use super::client::{Client, passes};
use crate::{Result, TrackError};

/// What waits to be sent, and the thread that sends it.
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
    weight: usize,
    /// When the thread is to give up, once the run has ended.
    closed: Option<Instant>,
    lost: u64,
    reason: String,
}

/// What the thread took out.
enum Parcel {
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
        let mut queue = self.shared.lock();
        queue.weight += entity.weight();
        queue.waiting.push_back(entity);
        while queue.weight > ROOM {
            let Some(oldest) = queue.waiting.pop_front() else { break };
            queue.weight = queue.weight.saturating_sub(oldest.weight());
            queue.lost += 1;
            if queue.reason.is_empty() {
                queue.reason = "they came faster than the server took them".to_owned();
            }
        }
        drop(queue);
        self.shared.changed.notify_one();
    }

    /// The loss so far, if there is one.
    pub(super) fn failure(&self) -> Option<TrackError> {
        let queue = self.shared.lock();
        (queue.lost > 0).then(|| TrackError::Lost {
            url: self.url.clone(),
            lost: queue.lost,
            reason: queue.reason.clone(),
        })
    }

    /// Sends what waits, for no longer than this, and gives the loss.
    pub(super) fn close(&mut self, patience: Duration) -> Option<TrackError> {
        self.shared.lock().closed = Some(Instant::now() + patience);
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has a time limit of its own, and does not panic.
            let _ = thread.join();
        }
        self.failure()
    }
}

impl Shared {
    fn send_all(&self, client: &Client, run_id: &str) {
        while let Some(parcel) = self.take() {
            let mut pause = PAUSE;
            loop {
                let sent = match &parcel {
                    Parcel::Values(batch) => client.log_batch(run_id, batch),
                    Parcel::File { path, bytes } => client.put(path, bytes),
                };
                let Err(error) = sent else { break };
                if passes(&error) && self.wait(pause) {
                    tracing::debug!("trying again: {error}");
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
                let lost = match &parcel {
                    Parcel::Values(batch) => batch.len() as u64,
                    Parcel::File { .. } => 1,
                };
                tracing::warn!("{lost} values are lost: {error}");
                let mut queue = self.lock();
                queue.lost += lost;
                queue.reason = error.to_string();
                break;
            }
        }
    }

    /// The next parcel; `None` when the run has ended and all is sent, or the time is over.
    fn take(&self) -> Option<Parcel> {
        let mut queue = self.lock();
        loop {
            if let Some(until) = queue.closed
                && Instant::now() >= until
            {
                queue.lost += queue.waiting.len() as u64;
                queue.waiting.clear();
                return None;
            }
            if let Some(parcel) = queue.next() {
                return Some(parcel);
            }
            if queue.closed.is_some() {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits before another attempt; false when there is no time for one.
    fn wait(&self, pause: Duration) -> bool {
        let over = |queue: &Queue| queue.closed.is_some_and(|until| Instant::now() >= until);
        let until = Instant::now() + pause;
        let mut queue = self.lock();
        while !over(&queue) {
            let mut left = until.saturating_duration_since(Instant::now());
            if let Some(closed) = queue.closed {
                left = left.min(closed.saturating_duration_since(Instant::now()));
            }
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        !over(&queue)
    }

    /// A panic elsewhere does not make the queue wrong.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn next(&mut self) -> Option<Parcel> {
        let parcel = if let Some(Entity::Artifact { .. }) = self.waiting.front() {
            match self.waiting.pop_front() {
                Some(Entity::Artifact { path, bytes }) => Parcel::File { path, bytes },
                _ => return None,
            }
        } else {
            let batch = batch::next(&mut self.waiting);
            if batch.len() == 0 {
                return None;
            }
            Parcel::Values(batch)
        };
        self.weight = self.waiting.iter().map(Entity::weight).sum();
        Some(parcel)
    }
}

/// What may wait, in bytes.
const ROOM: usize = 64 << 20;
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
