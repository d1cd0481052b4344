//! A flag that is set once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A flag that one thread sets and others wait for. Its descriptor is readable from then on.
///
/// ```
/// use std::time::Duration;
///
/// let stop = brigade_rendezvous::wake::Flag::new()?;
/// assert!(!stop.wait(Duration::ZERO));
/// stop.set();
/// assert!(stop.wait(Duration::from_secs(60)));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Flag(EventFd);

impl Flag {
    /// Makes one that is not set.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    /// Sets it.
    pub fn set(&self) {
        // Fails only when the counter is full, and then it is set.
        let _ = self.0.write(1);
    }

    /// Unsets it, for a flag that says that there is something to look at.
    pub fn clear(&self) {
        // Fails when it was not set.
        let _ = self.0.read();
    }

    /// Waits until it is set, for at most so long, and says whether it is. A signal may end the wait
    /// early.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        self.wait_or(None, limit)
    }

    /// Waits until it is set, or until the descriptor is ready for one of these events. Says whether the
    /// flag is set.
    #[must_use]
    pub fn wait_or(&self, other: Option<(BorrowedFd<'_>, PollFlags)>, limit: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        fds.extend(other.map(|(fd, flags)| PollFd::new(fd, flags)));
        let _ = poll(&mut fds, super::within(limit));
        fds[0].any().unwrap_or(false)
    }
}

impl AsFd for Flag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
