//! What the meeting's thread tells the agent, and the agent's wish to give up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::MeetNotice;

#[derive(Debug)]
pub(crate) struct Notices {
    queue: Mutex<VecDeque<MeetNotice>>,
    /// Counts what is in the queue.
    there: EventFd,
    given_up: EventFd,
}

impl Notices {
    pub(crate) fn new() -> nix::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            queue: Mutex::default(),
            there: EventFd::from_flags(flags | EfdFlags::EFD_SEMAPHORE)?,
            given_up: EventFd::from_flags(flags)?,
        })
    }

    pub(crate) fn tell(&self, notice: MeetNotice) {
        let mut queue = self.lock();
        // Nobody would close what is in there.
        if !self.is_given_up() {
            queue.push_back(notice);
            // Far from full.
            let _ = self.there.write(1);
        }
    }

    pub(crate) fn take(&self) -> Option<MeetNotice> {
        let notice = self.lock().pop_front()?;
        let _ = self.there.read();
        Some(notice)
    }

    pub(crate) fn give_up(&self) {
        let mut queue = self.lock();
        let _ = self.given_up.write(1);
        queue.clear();
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.wait(None, Duration::ZERO)
    }

    /// Waits so long at most, and for this descriptor if there is one. True when the agent has
    /// given up.
    pub(crate) fn wait(&self, other: Option<(BorrowedFd<'_>, PollFlags)>, limit: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.given_up.as_fd(), PollFlags::POLLIN)];
        fds.extend(other.map(|(fd, flags)| PollFd::new(fd, flags)));
        let limit = limit + Duration::from_micros(999);
        // No signal comes here; were it interrupted, it would only be early.
        let _ = poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
        fds[0].any().unwrap_or(false)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<MeetNotice>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.there.as_fd()
    }
}
