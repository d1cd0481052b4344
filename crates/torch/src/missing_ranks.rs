//! Detection of the ranks that had not arrived at a failed collective.
//!
//! A rank whose collective fails writes a record to the store: the collective's number and the time that it had waited.
//! A missing rank writes no record, or a later one. A store whose server was a rank ends with it: the lost connection
//! shows which rank that was.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Fault};
use crate::store::{Store, StoreServer};

/// Failure of one rank, and the store in which the others look for it.
#[derive(Debug, Clone)]
pub(crate) struct MissingRanks {
    pub(crate) store: Store,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Number of the collective that failed, equal on all ranks.
    pub(crate) sequence: u64,
    /// Time that this rank had spent in the operation. `None` if it was started by autograd.
    pub(crate) waited: Option<Duration>,
}

/// Time within which the other ranks write their notes. They fail almost at the same time, when the first one closes
/// its connections, but a rank may be busy between two collectives.
const GRACE: Duration = Duration::from_secs(2);

/// Pause between two reads of the store. A blocking read would occupy the connection, which other threads use, too.
const PAUSE: Duration = Duration::from_millis(20);

/// Maximum delay between the write of a note and its detection.
const SLACK: Duration = Duration::from_millis(250);

impl MissingRanks {
    /// Writes the note without waiting for the others'. For a rank that does not need the result.
    pub(crate) fn answer(self) {
        let _ = thread::Builder::new().name("missing-ranks".into()).spawn(move || self.note());
    }

    /// Writes the note and waits for the others'. Returns the ranks that had not arrived, or none if the store cannot
    /// be read.
    pub(crate) fn ask(self) -> Vec<usize> {
        within(2 * GRACE, move || self.absent()).unwrap_or_default()
    }

    fn absent(&self) -> Vec<usize> {
        let asked = Instant::now();
        if self.note().is_err() {
            return Vec::new();
        }
        let mut silent: Vec<usize> = (0..self.size).filter(|&rank| rank != self.rank).collect();
        let mut late = Vec::new();
        loop {
            let mut still_silent = Vec::new();
            for &rank in &silent {
                match self.read(rank) {
                    Ok(None) => still_silent.push(rank),
                    Ok(Some(note)) if self.arrived(note, asked.elapsed()) => {}
                    Ok(Some(_)) => late.push(rank),
                    // The store's host may exit as soon as it has its own result. If it exits earlier, the others'
                    // notes are lost.
                    Err(_) if asked.elapsed() >= GRACE / 2 => return sorted(late, silent),
                    Err(_) => return sorted(late, Vec::new()),
                }
            }
            silent = still_silent;
            if silent.is_empty() || asked.elapsed() >= GRACE {
                return sorted(late, silent);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Returns `true` if a rank whose note was found `since` after this rank's failure had been in time.
    fn arrived(&self, (sequence, waited): (u64, Duration), since: Duration) -> bool {
        sequence > self.sequence || (sequence == self.sequence && waited + SLACK >= since)
    }

    fn note(&self) -> Result<(), Error> {
        // An unknown time counts as in time.
        let waited = self.waited.unwrap_or(Duration::from_secs(u32::MAX.into()));
        let note = format!("{} {}", self.sequence, waited.as_millis());
        self.store.set(&key(self.rank), note)
    }

    fn read(&self, rank: usize) -> Result<Option<(u64, Duration)>, Error> {
        let key = key(rank);
        if !self.store.contains(&[&key])? {
            return Ok(None);
        }
        let note = self.store.get(&key)?;
        let parts = std::str::from_utf8(&note).ok().and_then(|note| note.split_once(' '));
        Ok(parts.and_then(|(sequence, waited)| {
            Some((sequence.parse().ok()?, Duration::from_millis(waited.parse().ok()?)))
        }))
    }
}

/// Returns the server of a store if its connection is closed. Returns `None` for a server that answers, or that does
/// not answer within a few seconds, which does not show that it has ended.
pub(crate) fn lost_server(store: &Store) -> Option<StoreServer> {
    let server = store.server()?.clone();
    let store = store.clone();
    // A server that is ending may still accept the request; its connection is closed before an answer then.
    let asked = within(GRACE, move || store.contains(&["failed"]))?;
    let fault = asked.err()?.fault()?;
    matches!(fault, Fault::Network | Fault::PeerLost).then_some(server)
}

/// Returns the result of a function of the store, or `None` if there is none within the time limit.
fn within<R: Send + 'static>(
    limit: Duration,
    ask: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    let (tell, answer) = mpsc::channel();
    // Needs its own thread: a store whose host has vanished does not answer, and its connection has no time limit.
    let asker = thread::Builder::new().name("missing-ranks".into()).spawn(move || {
        let _ = tell.send(ask());
    });
    asker.ok().and_then(|_| answer.recv_timeout(limit).ok())
}

fn key(rank: usize) -> String {
    format!("failed/{rank}")
}

fn sorted(mut late: Vec<usize>, silent: Vec<usize>) -> Vec<usize> {
    late.extend(silent);
    late.sort_unstable();
    late
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(store: &Store, rank: usize, sequence: u64, waited: Duration) -> MissingRanks {
        MissingRanks { store: store.clone(), rank, size: 4, sequence, waited: Some(waited) }
    }

    #[test]
    fn names_the_silent_and_the_late() {
        let store = Store::hash().unwrap();
        // The three ranks: waiting long in the same collective, already in the next one, and still in the one before.
        call(&store, 1, 7, GRACE * 3).note().unwrap();
        call(&store, 2, 8, Duration::ZERO).note().unwrap();
        call(&store, 3, 6, GRACE * 3).note().unwrap();
        assert_eq!(call(&store, 0, 7, GRACE).ask(), [3]);

        store.delete(&key(2)).unwrap();
        store.delete(&key(3)).unwrap();
        assert_eq!(call(&store, 0, 7, GRACE).ask(), [2, 3]);
    }

    #[test]
    fn one_that_came_after_the_failure_was_late() {
        let store = Store::hash().unwrap();
        let asker = call(&store, 0, 7, GRACE);
        assert!(asker.arrived((7, Duration::ZERO), Duration::ZERO));
        assert!(!asker.arrived((7, Duration::ZERO), SLACK + PAUSE));
        assert!(asker.arrived((7, Duration::from_secs(1)), Duration::from_secs(1)));
    }

    #[test]
    fn a_store_that_is_gone_names_the_rank_that_hosted_it_alone() {
        let server = crate::TcpStore::server("127.0.0.1", 0).open().unwrap();
        let port = server.port().unwrap();
        let client = crate::TcpStore::client("127.0.0.1", port).hosted_by(3).open().unwrap();
        // A group's store is a part of the job's.
        let client = client.prefix("0").unwrap();
        assert_eq!(lost_server(&client), None);
        drop(server);
        assert_eq!(call(&client, 0, 7, GRACE).ask(), [0usize; 0]);
        let lost = StoreServer { address: format!("127.0.0.1:{port}"), rank: Some(3) };
        assert_eq!(lost_server(&client), Some(lost));
        assert_eq!(lost_server(&Store::hash().unwrap()), None);
    }
}
