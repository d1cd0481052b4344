//! A channel whose receiver can be polled.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

/// The receiver: readable, as poll says, when something was sent.
#[derive(Debug)]
pub(crate) struct Inbox<T> {
    receiver: Receiver<T>,
    sender: Sender<T>,
    near: UnixStream,
    far: Arc<UnixStream>,
}

/// The sender, for a thread.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    sender: Sender<T>,
    far: Arc<UnixStream>,
}

impl<T> Inbox<T> {
    /// An empty one.
    pub(crate) fn new() -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (sender, receiver) = mpsc::channel();
        Ok(Self { receiver, sender, near, far: Arc::new(far) })
    }

    /// Another end that sends here.
    pub(crate) fn outbox(&self) -> Outbox<T> {
        Outbox { sender: self.sender.clone(), far: Arc::clone(&self.far) }
    }

    /// What was sent, if there is more of it.
    pub(crate) fn next(&self) -> Option<T> {
        // The wake-ups first: one that comes after this makes the socket readable again.
        while matches!((&self.near).read(&mut [0; 64]), Ok(n) if n > 0) {}
        self.receiver.try_recv().ok()
    }
}

impl<T> AsFd for Inbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl<T> Outbox<T> {
    /// Sends, and wakes the other side up. What nobody receives any more is lost.
    pub(crate) fn send(&self, what: T) {
        let _ = self.sender.send(what);
        // A full socket has woken the other side already.
        let _ = (&*self.far).write(b"!");
    }
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), far: Arc::clone(&self.far) }
    }
}
