//! Notices from the rendezvous's thread to the agent, and the agent's request to give up.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::PollFlags;

use super::RendezvousNotice;
use crate::wake::{Flag, Sender};

/// The thread's end of the channel of notices.
#[derive(Debug)]
pub(super) struct Notices {
    pub(super) sender: Sender<RendezvousNotice>,
    pub(super) given_up: Arc<Flag>,
}

impl Notices {
    /// Sends a notice. If the agent has given up, the notice is dropped, which closes a connection in it.
    pub(super) fn tell(&self, notice: RendezvousNotice) {
        let _ = self.sender.send(notice);
    }

    /// Waits so long at most, and for this descriptor if there is one. Returns `true` when the agent has given up.
    pub(super) fn wait(&self, other: Option<(BorrowedFd<'_>, PollFlags)>, limit: Duration) -> bool {
        self.given_up.wait_or(other, limit)
    }
}
