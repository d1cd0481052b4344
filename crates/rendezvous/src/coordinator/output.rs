//! Output of ranks on other hosts, on its way to the user.

use std::sync::Arc;
use std::time::SystemTime;

use super::shared::{Command, Shared};
use crate::{AgentId, JobEvent, Stream};

/// Where output and lines of other hosts go.
///
/// It is called in the coordinator's thread and must not wait: a paused terminal must not stop the
/// job's heart. Hand the pieces to a thread that writes; dropping a piece says that it is shown,
/// and lets its agent send as much again. So at most [`OUTPUT_CREDIT`](crate::OUTPUT_CREDIT) bytes
/// of each host wait here.
pub trait OutputSink: Send {
    /// Whole lines of a host's ranks.
    fn output(&mut self, piece: Piece);
    /// A line of an agent or of the coordinator, without its end.
    fn say(&mut self, line: &str);
    /// How far a host's ranks are: their reports, as they have written them. None: they have ended,
    /// or the connection to the host has.
    fn progress(&mut self, _host: &Arc<str>, _ranks: Vec<(usize, String)>) {}
    /// Something to be written down, where [`Rules::recorded`](crate::Rules) asks for it.
    fn record(&mut self, _at: SystemTime, _event: JobEvent) {}
}

/// Lines that a host's ranks have printed. Drop it when they are shown.
#[derive(Debug)]
pub struct Piece {
    /// Host name.
    pub host: Arc<str>,
    /// Where they belong.
    pub stream: Stream,
    /// The lines, prefixed.
    pub bytes: Vec<u8>,
    pub(super) _credit: Credit,
}

/// Gives back to an agent what it may send.
#[derive(Debug)]
pub(super) struct Credit {
    pub(super) shared: Shared,
    pub(super) agent: AgentId,
    pub(super) bytes: u64,
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.shared.tell(Command::Shown(self.agent, self.bytes));
    }
}
