//! Where lines for the console go.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::streams::Stream;

/// Shows whole lines, all at once. Called from the output thread only, and may block it: the ranks
/// then wait at their pipes, as with a paused terminal.
pub(crate) trait Show: Send {
    /// `BrokenPipe` means that nobody reads this stream any more. After any other error, output
    /// goes on.
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()>;

    /// All that the ranks of an attempt have printed has been given to [`Show::show`].
    fn drained(&mut self) {}
}

/// This process's own stdout and stderr.
#[derive(Debug)]
pub(crate) struct Terminal([File; 2]);

impl Terminal {
    pub(crate) fn new() -> io::Result<Self> {
        // The descriptors themselves: std's own stdout buffers and locks.
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        Ok(Self([own(io::stdout().as_fd())?, own(io::stderr().as_fd())?]))
    }
}

impl Show for Terminal {
    fn show(&mut self, stream: Stream, mut lines: &[u8]) -> io::Result<()> {
        let file = &mut self.0[stream.index()];
        while !lines.is_empty() {
            match file.write(lines) {
                Ok(n) => lines = &lines[n..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Somebody who shares the descriptor may have made it non-blocking.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut writable = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
                    poll(&mut writable, PollTimeout::NONE)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
