//! The gate between starting a rank's process and starting its program.
//!
//! All ranks wait at their gates until every one of them exists and the watch knows them: a host
//! that cannot start rank 7 has not run ranks 0 to 6, and no program runs unwatched. The gate is a
//! socket pair whose far end is the rank's stdin; the store's socket is passed through it, so no
//! other child can inherit that by accident.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::unistd::close;

/// The agent's end. Dropping it without opening ends the rank.
#[derive(Debug)]
pub(crate) struct Gate(UnixStream);

impl Gate {
    /// A closed gate, and the end that becomes the rank's stdin.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (near, far) = UnixStream::pair()?;
        Ok((Self(near), far.into()))
    }

    /// Lets the rank start its program, which inherits `socket`.
    pub(crate) fn open(self, socket: Option<&OwnedFd>) -> io::Result<()> {
        let fds: Vec<RawFd> = socket.iter().map(|socket| socket.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        // A rank that was killed while it waited is found out by its exit, not here.
        match sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(b"go")],
            rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        ) {
            Ok(_) | Err(nix::Error::EPIPE | nix::Error::ECONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The rank's side.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Start the program; the number is a descriptor it inherits.
    Start(Option<RawFd>),
    /// The agent is gone or has given up.
    Never,
}

/// Lets the next process that this one starts inherit its end of a gate, and gives the number that it
/// has there. No other process may be started before that end is closed here.
pub(crate) fn inheritable(far: impl AsFd) -> io::Result<RawFd> {
    fcntl(far.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(far.as_fd().as_raw_fd())
}

/// Waits at a gate that was inherited under a number, and closes it.
pub(crate) fn wait_at(number: RawFd) -> io::Result<Opening> {
    let opening = wait_raw(number);
    close(number)?;
    opening
}

/// Waits at the gate.
pub(crate) fn wait(gate: impl AsFd) -> io::Result<Opening> {
    wait_raw(gate.as_fd().as_raw_fd())
}

fn wait_raw(gate: RawFd) -> io::Result<Opening> {
    let mut text = [0; 2];
    let mut iov = [IoSliceMut::new(&mut text)];
    let mut space = nix::cmsg_space!(RawFd);
    // Without MSG_CMSG_CLOEXEC on purpose: the program keeps what arrives.
    let message = recvmsg::<()>(gate, &mut iov, Some(&mut space), MsgFlags::empty())?;
    if message.bytes == 0 {
        return Ok(Opening::Never);
    }
    let mut inherited = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            inherited = fds.first().copied();
        }
    }
    Ok(Opening::Start(inherited))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn opens_with_and_without_a_socket() {
        let (gate, far) = Gate::new().unwrap();
        gate.open(None).unwrap();
        assert_eq!(wait(&far).unwrap(), Opening::Start(None));

        let (gate, far) = Gate::new().unwrap();
        let passed: OwnedFd = fs::File::open("/dev/zero").unwrap().into();
        gate.open(Some(&passed)).unwrap();
        let Opening::Start(Some(fd)) = wait(&far).unwrap() else { panic!("no descriptor") };
        let target = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
        assert_eq!(target.to_str(), Some("/dev/zero"));
    }

    #[test]
    fn an_agent_that_ends_opens_nothing() {
        let (gate, far) = Gate::new().unwrap();
        drop(gate);
        assert_eq!(wait(&far).unwrap(), Opening::Never);
    }

    #[test]
    fn a_rank_that_is_gone_is_not_an_error() {
        let (gate, far) = Gate::new().unwrap();
        drop(far);
        gate.open(None).unwrap();
    }
}
