//! The agent's end of the connection to the coordinator, for a loop that polls.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::wire::Wire;
use crate::{FromAgent, Join, LinkError, Millis, ToAgent};

/// How an agent and the coordinator know of each other that they are alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How often a connection over which nothing else goes carries a beat.
    pub beat: Duration,
    /// After this long without a sign the other side counts as lost.
    pub silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { beat: Duration::from_secs(1), silence: Duration::from_secs(4) }
    }
}

/// How many bytes of [`FromAgent::Output`] an agent may have sent for which no
/// [`ToAgent::Taken`] has come.
pub const OUTPUT_CREDIT: u64 = 256 << 10;

/// The agent's end.
///
/// It never waits. In each turn of its loop the agent polls [`Link::read_fd`], and
/// [`Link::write_fd`] while [`Link::wants_write`], until [`Link::deadline`] at most; then it calls
/// [`Link::flush`], [`Link::receive`] until there is nothing more, and [`Link::keep_up`] last, so
/// that what has come in the meantime counts before silence does. After an error the link is of no
/// use. What the coordinator said before it closed is received before the error.
///
/// ```
/// use std::os::unix::net::UnixStream;
/// use std::time::Instant;
/// use brigade_rendezvous::{FromAgent, Join, Link};
///
/// let (near, _far) = UnixStream::pair()?;
/// let mut link = Link::over(near.into(), None)?;
/// let sent = link.millis(Instant::now());
/// link.send(&FromAgent::Join(Join { run_id: "night".into(), sent, ..Join::new("node1") }));
/// assert!(!link.wants_write(), "the socket has taken it");
/// assert_eq!(link.receive()?, None);
/// assert_eq!(link.deadline(), None, "in one process nobody beats");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Link {
    wire: Wire,
    timing: Option<Timing>,
    start: Instant,
}

impl Link {
    /// A link over a pair of pipes, or two ends of anything; both are set not to block.
    ///
    /// `timing` is `None` in one process, where nothing can fall silent.
    ///
    /// # Errors
    /// The system refuses to set the descriptors.
    pub fn new(reader: OwnedFd, writer: OwnedFd, timing: Option<Timing>) -> io::Result<Self> {
        Ok(Self::of(Wire::new(reader, Some(writer), MOST_UNSENT)?, timing))
    }

    /// A link over one socket.
    ///
    /// # Errors
    /// The system refuses to set the descriptor.
    pub fn over(socket: OwnedFd, timing: Option<Timing>) -> io::Result<Self> {
        Ok(Self::of(Wire::new(socket, None, MOST_UNSENT)?, timing))
    }

    /// A link over this process's stdin and stdout, which ssh has connected to the coordinator.
    /// Nothing else may read or write them afterwards.
    ///
    /// # Errors
    /// They are closed, or no descriptor is free.
    pub fn stdio(timing: Timing) -> io::Result<Self> {
        let reader = io::stdin().as_fd().try_clone_to_owned()?;
        let writer = io::stdout().as_fd().try_clone_to_owned()?;
        Self::new(reader, writer, Some(timing))
    }

    pub(crate) fn of(wire: Wire, timing: Option<Timing>) -> Self {
        Self { wire, timing, start: Instant::now() }
    }

    /// To be polled for reading.
    #[must_use]
    pub fn read_fd(&self) -> BorrowedFd<'_> {
        self.wire.read_fd()
    }

    /// To be polled for writing while [`Link::wants_write`].
    #[must_use]
    pub fn write_fd(&self) -> BorrowedFd<'_> {
        self.wire.write_fd()
    }

    /// Something waits to be sent.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        self.wire.wants_write()
    }

    /// Sends as much as the system takes now, and the rest on [`Link::flush`]. That the other side
    /// is gone is told by [`Link::receive`].
    pub fn send(&mut self, message: &FromAgent) {
        match message {
            // Over TCP the name of the job stays here: the coordinator may know it or not.
            FromAgent::Join(join) if let Some(tag) = self.wire.job_tag(&join.run_id) => {
                self.wire.send(&FromAgent::Join(Join { run_id: tag, ..join.clone() }));
            }
            message => self.wire.send(message),
        }
    }

    /// Sends more of what waits.
    pub fn flush(&mut self) {
        self.wire.flush();
    }

    /// The next message, if one has come. Beats are not told.
    ///
    /// # Errors
    /// The coordinator is gone, does not read, or is none.
    pub fn receive(&mut self) -> Result<Option<ToAgent>, LinkError> {
        loop {
            match self.wire.receive()? {
                Some(ToAgent::Beat) => {}
                message => return Ok(message.map(ToAgent::printable)),
            }
        }
    }

    /// When [`Link::keep_up`] has to be called, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let timing = self.timing?;
        let beat = self.wire.spoke().checked_add(timing.beat);
        let silence = self.wire.heard().checked_add(timing.silence);
        beat.into_iter().chain(silence).min()
    }

    /// Sends a beat when it is due.
    ///
    /// # Errors
    /// The coordinator has been silent for too long.
    pub fn keep_up(&mut self, now: Instant) -> Result<(), LinkError> {
        let Some(Timing { beat, silence }) = self.timing else { return Ok(()) };
        if now.saturating_duration_since(self.wire.heard()) >= silence {
            return Err(LinkError::Silent { seconds: silence.as_secs_f64() });
        }
        if now.saturating_duration_since(self.wire.spoke()) >= beat {
            self.send(&FromAgent::Beat { sent: self.millis(now) });
        }
        Ok(())
    }

    /// A moment on this link's clock, on which [`Join::sent`](crate::Join) and
    /// [`RankFailure::at`](crate::RankFailure) are given; moments before the link was made are 0.
    #[must_use]
    pub fn millis(&self, at: Instant) -> Millis {
        Millis::try_from(at.saturating_duration_since(self.start).as_millis())
            .unwrap_or(Millis::MAX)
    }
}

/// The output that may wait, and a longest message on top.
const MOST_UNSENT: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::{FrameError, Stream, encode};

    fn pair(timing: Option<Timing>) -> (Link, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Link::over(near.into(), timing).unwrap(), far)
    }

    #[test]
    fn what_was_said_before_the_end_is_received() {
        let (mut link, mut far) = pair(None);
        far.write_all(&encode(&ToAgent::Beat)).unwrap();
        far.write_all(&encode(&ToAgent::Kill)).unwrap();
        drop(far);
        link.send(&FromAgent::Finished { attempt: 0 });
        link.send(&FromAgent::Finished { attempt: 0 });
        assert_eq!(link.receive().unwrap(), Some(ToAgent::Kill));
        assert!(matches!(link.receive(), Err(LinkError::Closed)));
        assert!(matches!(link.receive(), Err(LinkError::Closed)), "and again");
    }

    #[test]
    fn an_end_amid_a_message_is_told() {
        let (mut link, mut far) = pair(None);
        far.write_all(&encode(&ToAgent::Kill)[..3]).unwrap();
        assert_eq!(link.receive().unwrap(), None);
        drop(far);
        assert!(matches!(link.receive(), Err(LinkError::CutOff)));
    }

    #[test]
    fn another_protocol_is_told() {
        let (mut link, mut far) = pair(None);
        far.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        let error = link.receive().unwrap_err();
        assert!(matches!(error, LinkError::Protocol(FrameError::TooLong { .. })), "{error}");
    }

    #[test]
    fn silence_is_told_and_beats_are_sent() {
        let timing = Timing::default();
        let (mut link, far) = pair(Some(timing));
        let start = link.deadline().unwrap() - timing.beat;
        link.keep_up(start + Duration::from_millis(900)).unwrap();
        assert_eq!(read_all(&far), [], "not due");
        link.keep_up(start + Duration::from_millis(1100)).unwrap();
        assert!(matches!(read_all(&far)[..], [FromAgent::Beat { .. }]));
        let error = link.keep_up(start + Duration::from_secs(9)).unwrap_err();
        assert_eq!(error.to_string(), "nothing was heard of the other side for 4 s");
    }

    #[test]
    fn a_reader_that_does_not_read_costs_no_time_and_bounded_memory() {
        let (mut link, _far) = pair(None);
        let output = FromAgent::Output { stream: Stream::Stdout, bytes: vec![0; 1 << 20] };
        let mut sent = 0;
        let error = loop {
            link.send(&output);
            sent += 1;
            assert!(sent < 20, "there is a limit");
            if let Err(error) = link.receive() {
                break error;
            }
        };
        assert!(matches!(error, LinkError::Stuck { .. }), "{error}");
    }

    #[test]
    fn what_did_not_fit_is_sent_later() {
        let (near_out, far_in) = UnixStream::pair().unwrap();
        let (near_in, _far_out) = UnixStream::pair().unwrap();
        let mut link = Link::new(near_in.into(), near_out.into(), None).unwrap();
        let output = FromAgent::Output { stream: Stream::Stdout, bytes: vec![7; 3 << 20] };
        link.send(&output);
        assert!(link.wants_write());
        far_in.set_nonblocking(true).unwrap();
        let mut far = Wire::new(far_in.into(), None, 0).unwrap();
        let received = loop {
            if let Some(message) = far.receive::<FromAgent>().unwrap() {
                break message;
            }
            let mut fds = [PollFd::new(link.write_fd(), PollFlags::POLLOUT)];
            poll(&mut fds, PollTimeout::NONE).unwrap();
            link.flush();
        };
        assert_eq!(received, output);
        assert!(!link.wants_write());
    }

    #[test]
    fn the_name_of_the_job_stays_here() {
        let (near, far) = UnixStream::pair().unwrap();
        let wires = [near, far].map(|it| Wire::new(it.into(), None, 1 << 20).unwrap());
        let [mut near, mut far] = wires;
        let (near_end, far_end) = crate::channel::tests::pair();
        for (wire, channel) in [(&mut near, near_end), (&mut far, far_end)] {
            wire.distrust(4096);
            wire.secure(Box::new(channel));
        }
        let mut link = Link::of(near, None);
        link.send(&FromAgent::Join(Join { run_id: "topsecret".into(), ..Join::new("node1") }));
        let Some(FromAgent::Join(join)) = far.receive().unwrap() else { panic!() };
        // Whoever serves there can compare, and sees nothing that it does not know.
        assert_eq!(join.host, "node1");
        assert!(!join.run_id.contains("topsecret"));
        assert_eq!(far.job_tag("topsecret").unwrap(), join.run_id);
        assert_ne!(far.job_tag("guess").unwrap(), join.run_id);
    }

    fn read_all(far: &UnixStream) -> Vec<FromAgent> {
        let mut wire = Wire::new(far.try_clone().unwrap().into(), None, 0).unwrap();
        let mut messages = Vec::new();
        while let Ok(Some(message)) = wire.receive() {
            messages.push(message);
        }
        messages
    }
}
