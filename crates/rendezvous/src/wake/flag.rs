//! A flag that is set once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Flag that one thread sets and others wait for. Its descriptor is readable while the flag is set.
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
    /// Creates a flag that is not set.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    /// Sets the flag and wakes its waiters.
    pub fn set(&self) {
        // Fails only if the counter is at its maximum, and then the flag is set.
        let _ = self.0.write(1);
    }

    /// Clears the flag, so that it can be set for a next event.
    pub fn clear(&self) {
        // Fails if the flag was not set.
        let _ = self.0.read();
    }

    /// Waits until the flag is set, at most for `limit`. Returns `true` if it is set. A signal may end the wait early.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        self.wait_or(None, limit)
    }

    /// Waits until the flag is set, or until the descriptor is ready for one of these events. Returns `true` if the
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
