//! A channel whose receiver can be polled.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

/// Readable when somebody has rung.
#[derive(Debug)]
pub(crate) struct Bell<T> {
    rung: Receiver<T>,
    sender: Sender<T>,
    near: UnixStream,
    far: Arc<UnixStream>,
}

/// The other end, for a thread.
#[derive(Clone, Debug)]
pub(crate) struct Ringer<T> {
    sender: Sender<T>,
    far: Arc<UnixStream>,
}

impl<T> Bell<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (sender, rung) = mpsc::channel();
        Ok(Self { rung, sender, near, far: Arc::new(far) })
    }

    pub(crate) fn ringer(&self) -> Ringer<T> {
        Ringer { sender: self.sender.clone(), far: Arc::clone(&self.far) }
    }

    /// What somebody has rung with, if there is more of it.
    pub(crate) fn next(&self) -> Option<T> {
        // The wake-ups first: one that comes after this makes the socket readable again.
        while matches!((&self.near).read(&mut [0; 64]), Ok(n) if n > 0) {}
        self.rung.try_recv().ok()
    }
}

impl<T> AsFd for Bell<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl<T> Ringer<T> {
    pub(crate) fn ring(&self, what: T) {
        let _ = self.sender.send(what);
        // A full socket has woken the other side already.
        let _ = (&*self.far).write(b"!");
    }
}
