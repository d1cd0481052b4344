//! Lines for the user that come from a coordinator in this process.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};

use brigade_rendezvous::{OutputSink, Piece};

/// What the coordinator in this process wants the user to read.
#[derive(Debug)]
pub(super) struct Lines {
    inbox: Receiver<String>,
    outbox: Sender<String>,
    near: UnixStream,
    far: UnixStream,
}

impl Lines {
    pub(super) fn new() -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (outbox, inbox) = mpsc::channel();
        Ok(Self { inbox, outbox, near, far })
    }

    /// The coordinator's end.
    pub(super) fn sink(&self) -> io::Result<Box<dyn OutputSink>> {
        Ok(Box::new(LinesSink { outbox: self.outbox.clone(), far: self.far.try_clone()? }))
    }

    /// Readable when there is a line.
    pub(super) fn control(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }

    /// The next line.
    pub(super) fn next(&self) -> Option<String> {
        // The wake-ups first: one that comes after this makes the socket readable again.
        while matches!((&self.near).read(&mut [0; 64]), Ok(n) if n > 0) {}
        self.inbox.try_recv().ok()
    }
}

struct LinesSink {
    outbox: Sender<String>,
    far: UnixStream,
}

impl OutputSink for LinesSink {
    /// Every agent shows its own ranks' output.
    fn output(&mut self, _piece: Piece) {}

    fn say(&mut self, line: &str) {
        let _ = self.outbox.send(line.to_owned());
        // A full socket has woken the agent already.
        let _ = self.far.write(b"w");
    }
}
