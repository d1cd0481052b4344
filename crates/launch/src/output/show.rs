//! Destinations of lines for the console.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};

use brigade_rendezvous::Stream;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::live::{LiveLine, Reports};

/// Destination of whole lines, which are shown at once. Called from the output thread only, and may block it: the ranks
/// then wait at their pipes, as with a paused terminal.
pub(crate) trait Show: Send {
    /// Shows whole lines. `BrokenPipe` means that the reader of this stream has closed it. After any other error,
    /// output continues.
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()>;

    /// Shows changed progress reports; an empty list at the end of an attempt. Returns `false` if it was too early, and
    /// the call should be repeated.
    fn progress(&mut self, _reports: &Reports) -> bool {
        true
    }

    /// Called when all output of an attempt's ranks has been passed to [`Show::show`].
    fn drained(&mut self) {}
}

/// This process's own stdout and stderr.
#[derive(Debug)]
pub(crate) struct Terminal {
    streams: [File; 2],
    live: LiveLine,
}

impl Terminal {
    pub(crate) fn new(quiet: bool) -> io::Result<Self> {
        // Uses the descriptors directly: std's stdout has a buffer and a lock.
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        let streams = [own(io::stdout().as_fd())?, own(io::stderr().as_fd())?];
        Ok(Self { streams, live: LiveLine::new(quiet) })
    }
}

impl Show for Terminal {
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        let Self { streams, live } = self;
        live.around(|| write_all(&mut streams[stream.index()], lines))
    }

    fn progress(&mut self, reports: &Reports) -> bool {
        if let Some(line) = self.live.show(reports) {
            // Failed writes are reported together with lost lines of ranks.
            let _ = write_all(&mut self.streams[Stream::Stderr.index()], line.as_bytes());
        }
        true
    }
}

/// `write_all` for a descriptor that another process may have made non-blocking.
pub(crate) fn write_all(file: &mut File, mut lines: &[u8]) -> io::Result<()> {
    while !lines.is_empty() {
        match file.write(lines) {
            Ok(n) => lines = &lines[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
