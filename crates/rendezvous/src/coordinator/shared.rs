//! What other threads tell the coordinator's.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::AgentId;

/// A message to the coordinator's thread.
#[derive(Debug)]
pub(super) enum Command {
    /// An agent in this process.
    Local(AgentId, OwnedFd),
    /// An ssh session.
    Session {
        agent: AgentId,
        reader: OwnedFd,
        writer: OwnedFd,
        host: String,
    },
    /// Why that session has ended.
    Explain(AgentId, String),
    Interrupt(i32),
    /// For all ranks, and nothing else.
    Forward(i32),
    /// Nobody waits for the end.
    Abandon,
}

/// An inbox, and a descriptor that wakes the thread up.
#[derive(Debug)]
pub(super) struct Shared {
    inbox: Mutex<Inbox>,
    wake: EventFd,
    agents: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) commands: Vec<Command>,
    /// Output that has been shown.
    pub(super) shown: BTreeMap<AgentId, u64>,
    /// The thread has ended: what would be put in here would never be seen.
    closed: bool,
}

impl Shared {
    pub(super) fn new() -> nix::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            inbox: Mutex::default(),
            wake: EventFd::from_flags(flags)?,
            agents: AtomicU64::new(0),
        })
    }

    pub(super) fn new_agent(&self) -> AgentId {
        AgentId(self.agents.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn tell(&self, command: Command) {
        let mut inbox = self.lock();
        if !inbox.closed {
            inbox.commands.push(command);
            self.wake();
        }
    }

    pub(super) fn give_back(&self, agent: AgentId, bytes: u64) {
        let mut inbox = self.lock();
        if !inbox.closed {
            *inbox.shown.entry(agent).or_default() += bytes;
            self.wake();
        }
    }

    /// Everything that has been told since the last call.
    pub(super) fn take(&self) -> Inbox {
        // Nothing to read: somebody has read it already.
        let _ = self.wake.read();
        let mut inbox = self.lock();
        let closed = inbox.closed;
        mem::replace(&mut *inbox, Inbox { closed, ..Inbox::default() })
    }

    /// From now on nothing is listened to; connections in the inbox are closed.
    pub(super) fn close(&self) {
        *self.lock() = Inbox { closed: true, ..Inbox::default() };
    }

    fn wake(&self) {
        // Full only after 2^64 - 2 wakes that nobody has read; then it is awake anyway.
        let _ = self.wake.write(1);
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // What is in there is whole even if a thread has panicked with the lock.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
