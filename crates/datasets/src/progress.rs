//! Log events that report progress.

use std::time::{Duration, Instant};

/// Counts bytes, and logs the count every few seconds.
#[derive(Debug)]
pub(crate) struct Progress {
    what: String,
    bytes: u64,
    total: Option<u64>,
    next: Instant,
}

impl Progress {
    /// Starts at `bytes` of `total`.
    pub(crate) fn new(what: impl Into<String>, bytes: u64, total: Option<u64>) -> Self {
        Self { what: what.into(), bytes, total, next: Instant::now() + EVERY }
    }

    pub(crate) fn advance(&mut self, bytes: u64) {
        self.bytes += bytes;
        if Instant::now() >= self.next {
            self.next = Instant::now() + EVERY;
            tracing::info!(bytes = self.bytes, total = self.total, "{}", self.what);
        }
    }
}

const EVERY: Duration = Duration::from_secs(5);
