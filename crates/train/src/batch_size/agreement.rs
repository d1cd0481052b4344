//! Agreement on one attempt of a batch size on several ranks: all continue with a result, or none does.
//!
//! A rank that fails sets a key in the store and closes its connections, so that the others' collectives
//! end. A thread of every rank polls for such keys: it aborts collectives that do not notice a lost
//! connection, as NCCL's. Then every rank writes the result of its attempt and reads the others'. Messages
//! that were cut off leave ranks at different places, so they reconnect.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use brigade_torch::{Error, ProcessGroup, Result, Store};

use super::outcome::{End, Outcome, SCOPE};
use crate::error::TrainError;
use crate::job::Job;

/// An attempt in progress.
pub(super) struct Attempt {
    job: Arc<Job>,
    group: ProcessGroup,
    store: Store,
    /// The attempt's number, the same on all ranks.
    number: u64,
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Attempt {
    /// `None` when there is one rank.
    pub(super) fn begin(job: &Arc<Job>) -> Option<Self> {
        let (group, store) = (job.group()?, job.store()?.clone());
        let number = job.tries.fetch_add(1, Ordering::Relaxed);
        let watcher = watch(group.clone(), store.clone(), given_up(number));
        Some(Self { job: Arc::clone(job), group, store, number, watcher })
    }

    /// Returns this rank's result if all ranks have one, or `None` if memory ran out on any rank.
    pub(super) fn decide<R>(mut self, outcome: Outcome<R>) -> Result<Option<R>> {
        self.stop_watching();
        let mine = match End::of(&outcome) {
            End::Fits => match self.group.all_gather_object(&()) {
                Ok(_) => return outcome.unwrap_or_else(|panic| resume_unwind(panic)).map(Some),
                Err(_) if self.is_given_up()? => End::Cut,
                Err(error) => return Err(error),
            },
            // A failure after another rank has given up follows from that, or will occur again.
            End::Failed(_) if self.is_given_up().unwrap_or(false) => End::Cut,
            own => own,
        };
        let ends = self.give_up(&mine);
        match (mine, outcome) {
            (End::Failed(_), Ok(result)) => return result.map(Some),
            (End::Failed(_), Err(panic)) => resume_unwind(panic),
            _ => {}
        }
        for (rank, end) in ends?.into_iter().enumerate() {
            if let End::Failed(reason) = end {
                return Err(TrainError::Leader { scope: SCOPE, rank, reason }.into());
            }
        }
        Ok(None)
    }

    /// Aborts this rank's collectives, collects all ranks' results, and reconnects.
    fn give_up(&self, mine: &End) -> Result<Vec<End>> {
        let text = serde_json::to_vec(mine)
            .map_err(|error| Error::invalid_argument(format!("{SCOPE}: {error}")))?;
        self.store.set(&self.key(self.group.rank()), text)?;
        self.store.set(&given_up(self.number), b"1")?;
        self.group.abort()?;
        let deadline = Instant::now() + self.job.timeout;
        let ends = (0..self.group.size()).map(|rank| self.end_of(rank, deadline));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        self.job.reconnect(self.number)?;
        Ok(ends)
    }

    /// Polls instead of waiting in the store, whose connection serves one call at a time.
    fn end_of(&self, rank: usize, deadline: Instant) -> Result<End> {
        let key = self.key(rank);
        while !self.store.contains(&[&key])? {
            if Instant::now() > deadline {
                return Err(Error::invalid_argument(format!(
                    "{SCOPE}: a rank has aborted an attempt, and rank {rank} has not ended its attempt \
                     within the time limit: it hangs, or its process is gone"
                )));
            }
            thread::sleep(PAUSE);
        }
        serde_json::from_slice(&self.store.get(&key)?).map_err(|error| {
            Error::invalid_argument(format!(
                "{SCOPE}: rank {rank} sent an invalid result for this attempt: {error}"
            ))
        })
    }

    fn is_given_up(&self) -> Result<bool> {
        self.store.contains(&[&given_up(self.number)])
    }

    fn key(&self, rank: usize) -> String {
        format!("brigade/try/{}/{rank}", self.number)
    }

    fn stop_watching(&mut self) {
        if let Some((stop, watcher)) = self.watcher.take() {
            drop(stop);
            // Must not panic: the result of the aborted operation is not needed.
            let _ = watcher.join();
        }
    }
}

/// Ends this rank's waits when another rank has given up. If no thread can be started, the lost connection ends them
/// once it is detected.
fn watch(group: ProcessGroup, store: Store, key: String) -> Option<(Sender<()>, JoinHandle<()>)> {
    let (stop, stopped) = mpsc::channel();
    let look = move || {
        while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            match store.contains(&[&key]) {
                Ok(false) => {}
                Ok(true) => {
                    // Operations that cannot be aborted end at their time limit.
                    let _ = group.abort();
                    return;
                }
                Err(_) => return,
            }
        }
    };
    let watcher = thread::Builder::new().name("batch-size".into()).spawn(look).ok()?;
    Some((stop, watcher))
}

fn given_up(number: u64) -> String {
    format!("brigade/try/{number}/given_up")
}

/// Interval of polls while an attempt runs: short compared with a training step.
const LOOK: Duration = Duration::from_millis(500);
/// Interval of polls while this rank waits for nothing else.
const PAUSE: Duration = Duration::from_millis(20);
