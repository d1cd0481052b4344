//! Wakes a thread that waits in `poll` or `epoll`: a channel and a flag with a descriptor, and timeouts
//! that do not end too early.
//!
//! ```
//! use std::thread;
//! use std::time::{Duration, Instant};
//!
//! use nix::poll::{PollFd, PollFlags, poll};
//! use std::os::fd::AsFd;
//!
//! let (sender, receiver) = brigade_rendezvous::wake::channel()?;
//! thread::spawn(move || sender.send("done"));
//! let deadline = Instant::now() + Duration::from_secs(60);
//! let mut fds = [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)];
//! poll(&mut fds, brigade_rendezvous::wake::until(Some(deadline)))?;
//! assert_eq!(receiver.try_recv(), Some("done"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod channel;
mod flag;

use std::time::{Duration, Instant};

use nix::poll::PollTimeout;

pub use channel::{Receiver, Sender, channel};
pub use flag::Flag;

/// Converts a deadline to a timeout for `poll`; `None` waits without a limit.
///
/// ```
/// use nix::poll::PollTimeout;
/// use std::time::Instant;
///
/// assert_eq!(brigade_rendezvous::wake::until(None), PollTimeout::NONE);
/// assert_eq!(brigade_rendezvous::wake::until(Some(Instant::now())), PollTimeout::ZERO);
/// ```
#[must_use]
pub fn until(deadline: Option<Instant>) -> PollTimeout {
    deadline.map_or(PollTimeout::NONE, |at| within(at.saturating_duration_since(Instant::now())))
}

/// Converts a duration to a timeout for `poll`, rounded up to a whole millisecond: rounded down, a loop would spin
/// during the last one. A duration that `poll` cannot express becomes its longest timeout, 24 days.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(brigade_rendezvous::wake::within(Duration::from_micros(1_001)).as_millis(), Some(2));
/// assert_eq!(brigade_rendezvous::wake::within(Duration::MAX).as_millis(), Some(i32::MAX as u32));
/// ```
#[must_use]
pub fn within(limit: Duration) -> PollTimeout {
    let millis = limit.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
}
