//! The gate between starting a rank's process and starting its program.
//!
//! All ranks wait at their gates until every one of them exists and is watched by the reaper: a host that cannot start
//! rank 7 has not run ranks 0 to 6, and no program runs unwatched. The gate is a socket pair whose far end is the
//! rank's stdin; the store's socket is passed through it, so no other child can inherit that by accident.

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
    /// Creates a closed gate. Returns it with the end that becomes the rank's stdin.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (near, far) = UnixStream::pair()?;
        Ok((Self(near), far.into()))
    }

    /// Lets the rank start its program, which inherits these descriptors.
    pub(crate) fn open(
        self,
        socket: Option<&OwnedFd>,
        progress: Option<&OwnedFd>,
    ) -> io::Result<()> {
        let inherited = [socket, progress];
        let fds: Vec<RawFd> = inherited.into_iter().flatten().map(AsRawFd::as_raw_fd).collect();
        let which = inherited.map(|it| if it.is_some() { GIVEN } else { NOT_GIVEN });
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
        // A rank that was killed while it waited is detected by its exit, not here.
        match sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(&which)],
            rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        ) {
            Ok(_) | Err(nix::Error::EPIPE | nix::Error::ECONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Message that the rank receives at the gate.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Starts the program, which inherits descriptors with these numbers.
    Start {
        /// Descriptor of the store's socket.
        socket: Option<RawFd>,
        /// Descriptor of a pipe to which the rank may write progress reports.
        progress: Option<RawFd>,
    },
    /// The agent has ended or given up.
    Never,
}

/// Lets the next process that this one starts inherit its end of a gate, and returns the number that it has there. No
/// other process may be started before that end is closed here.
pub(crate) fn inheritable(far: impl AsFd) -> io::Result<RawFd> {
    fcntl(far.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(far.as_fd().as_raw_fd())
}

/// Waits at a gate that was inherited under a descriptor number, and closes it.
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
    let mut which = [0; 2];
    let mut iov = [IoSliceMut::new(&mut which)];
    let mut space = nix::cmsg_space!([RawFd; 2]);
    // Without MSG_CMSG_CLOEXEC: the program must inherit the received descriptors.
    let message = recvmsg::<()>(gate, &mut iov, Some(&mut space), MsgFlags::empty())?;
    if message.bytes == 0 {
        return Ok(Opening::Never);
    }
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(passed) = control {
            fds = passed;
        }
    }
    let mut fds = fds.into_iter();
    let [socket, progress] = which.map(|it| if it == GIVEN { fds.next() } else { None });
    Ok(Opening::Start { socket, progress })
}

const GIVEN: u8 = b'+';
const NOT_GIVEN: u8 = b'-';

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn opens_with_and_without_a_socket() {
        let (gate, far) = Gate::new().unwrap();
        gate.open(None, None).unwrap();
        assert_eq!(wait(&far).unwrap(), Opening::Start { socket: None, progress: None });

        let passed: OwnedFd = fs::File::open("/dev/zero").unwrap().into();
        let other: OwnedFd = fs::File::open("/dev/full").unwrap().into();
        for (socket, progress) in
            [(Some(&passed), None), (None, Some(&other)), (Some(&passed), Some(&other))]
        {
            let (gate, far) = Gate::new().unwrap();
            gate.open(socket, progress).unwrap();
            let Opening::Start { socket: a, progress: b } = wait(&far).unwrap() else {
                panic!("not opened")
            };
            for (fd, given, path) in [(a, socket, "/dev/zero"), (b, progress, "/dev/full")] {
                assert_eq!(fd.is_some(), given.is_some());
                let Some(fd) = fd else { continue };
                let target = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
                assert_eq!(target.to_str(), Some(path));
            }
        }
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
        gate.open(None, None).unwrap();
    }
}
