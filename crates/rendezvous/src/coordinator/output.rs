//! Output of ranks on other hosts, to be shown to the user.

use std::sync::Arc;
use std::time::SystemTime;

use super::shared::{Command, Shared};
use crate::{AgentId, JobEvent, Stream};

/// Receiver of the output and the messages of other hosts.
///
/// The methods are called in the coordinator's thread and must not block: that thread also handles heartbeats. Pass the
/// pieces to a thread that writes. Dropping a piece marks it as shown, so that its agent may send as much again. Thus
/// at most [`OUTPUT_CREDIT`](crate::OUTPUT_CREDIT) bytes of each host wait in the sink.
pub trait OutputSink: Send {
    /// Receives whole lines of a host's ranks.
    fn output(&mut self, piece: Piece);
    /// Receives a line of an agent or of the coordinator, without its line end.
    fn say(&mut self, line: &str);
    /// Receives the encoded progress reports of a host's ranks. The list is empty once they have ended, or once the
    /// connection to the host has.
    fn progress(&mut self, _host: &Arc<str>, _ranks: Vec<(usize, String)>) {}
    /// Receives an event to be recorded, where [`Rules::recorded`](crate::Rules) is set.
    fn record(&mut self, _at: SystemTime, _event: JobEvent) {}
}

/// Lines that a host's ranks have printed. Must be dropped once they are shown.
#[derive(Debug)]
pub struct Piece {
    /// Name of the host.
    pub host: Arc<str>,
    /// Output stream of the lines.
    pub stream: Stream,
    /// Text of the lines, with prefix.
    pub bytes: Vec<u8>,
    pub(super) _credit: Credit,
}

/// Guard that returns flow-control credit to an agent when it is dropped.
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
