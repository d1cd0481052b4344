//! Retries of the rendezvous: time limit, pauses, and notices for the user.

use std::io;
use std::time::{Duration, Instant};

use super::notices::Notices;
use super::{RendezvousError, RendezvousNotice, RendezvousPlan};

/// Retry policy of one attempt to meet.
#[derive(Debug)]
pub(super) struct RetryPolicy {
    endpoint: String,
    start: Instant,
    limit: Duration,
    pause: Duration,
    longest: Duration,
    /// Lines that were reported. Each is reported once, because two errors may alternate.
    printed: Vec<String>,
}

impl RetryPolicy {
    /// Creates a policy whose pauses grow up to `longest`.
    pub(super) fn new(plan: &RendezvousPlan, endpoint: String, longest: Duration) -> Self {
        let (start, limit) = (Instant::now(), plan.timeout);
        Self { endpoint, start, limit, pause: FIRST_PAUSE, longest, printed: Vec::new() }
    }

    /// Waits before the next attempt, or returns an error if there is none.
    pub(super) fn pause(&mut self, last: String, notices: &Notices) -> Result<(), RendezvousError> {
        let tried = self.start.elapsed();
        let seconds = self.limit.as_secs();
        if tried >= self.limit {
            return Err(RendezvousError::NoCoordinator {
                endpoint: self.endpoint.clone(),
                seconds,
                last,
            });
        }
        if tried >= QUIET && !self.printed.contains(&last) && self.printed.len() < MAX_LINES {
            let line = format!("{}: {last}; trying for up to {seconds} s", self.endpoint);
            notices.tell(RendezvousNotice::Say(line));
            self.printed.push(last);
        }
        // In any case another attempt is made after the first second, and at the end.
        let next =
            if tried < QUIET { QUIET.min(self.limit) } else { self.limit } - tried.min(self.limit);
        let pause = self.pause.min(next.max(SHORTEST_PAUSE));
        self.pause = (self.pause * 3 / 2).min(self.longest);
        if notices.wait(None, pause) {
            return Err(RendezvousError::System(io::ErrorKind::Interrupted.into()));
        }
        Ok(())
    }
}

const MAX_LINES: usize = 16;
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Time without notices. Agents are started at about the same time, so errors in the first second are normal.
const QUIET: Duration = Duration::from_secs(1);
