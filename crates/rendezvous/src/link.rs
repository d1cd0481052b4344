//! The agent's end of the connection to the coordinator, for a loop that polls.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::connection::Connection;
use crate::wake::Flag;
use crate::{FromAgent, Join, LinkError, Millis, TimeLimits, ToAgent, masked_thread};

/// Flow control window in bytes: the maximum amount of [`FromAgent::Output`] that an agent may have sent without a
/// matching [`ToAgent::Taken`].
pub const OUTPUT_CREDIT: u64 = 256 << 10;

/// The agent's end of its connection to the coordinator.
///
/// It never waits. In each turn of its loop the agent polls [`Link::read_fd`], and [`Link::write_fd`] while
/// [`Link::needs_write`], until [`Link::deadline`] at most; then it calls [`Link::flush`], [`Link::receive`] until
/// there is no message left, and [`Link::keep_up`] last, so that data received in the meantime counts before silence
/// does. After an error the link cannot be used. Messages that the coordinator sent before it closed are received
/// before the error.
///
/// Heartbeats are sent by a separate thread, so that an agent whose loop is blocked, for example by a file system that
/// does not respond, is not considered lost. They begin with the first message that the agent sends, because the
/// coordinator refuses a connection that does not begin with [`FromAgent::Join`].
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
/// assert!(!link.needs_write(), "the socket has taken it");
/// assert_eq!(link.receive()?, None);
/// assert_eq!(link.deadline(), None, "in one process there are no beats");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Link {
    shared: Arc<Mutex<Shared>>,
    ends: [Arc<OwnedFd>; 2],
    limits: Option<TimeLimits>,
    peer: Option<SocketAddr>,
    _heart: Option<Heart>,
}

/// State that the agent shares with the thread that sends heartbeats.
#[derive(Debug)]
struct Shared {
    wire: Connection,
    start: Instant,
    /// `true` once the agent has sent a message.
    begun: bool,
}

impl Link {
    /// Creates a link over a pair of pipes, or two ends of any byte stream. Both are set to non-blocking mode.
    ///
    /// `limits` is `None` in one process, if no connection can become silent.
    ///
    /// # Errors
    /// The system refuses to set the descriptors, or has no thread or descriptor left.
    pub fn new(reader: OwnedFd, writer: OwnedFd, limits: Option<TimeLimits>) -> io::Result<Self> {
        Self::of(Connection::new(reader, Some(writer), MAX_UNSENT)?, limits)
    }

    /// Creates a link over one socket.
    ///
    /// # Errors
    /// Returns the same errors as [`Link::new`].
    pub fn over(socket: OwnedFd, limits: Option<TimeLimits>) -> io::Result<Self> {
        Self::of(Connection::new(socket, None, MAX_UNSENT)?, limits)
    }

    pub(crate) fn of(wire: Connection, limits: Option<TimeLimits>) -> io::Result<Self> {
        let ends = wire.ends();
        let shared = Arc::new(Mutex::new(Shared { wire, start: Instant::now(), begun: false }));
        let heart = match limits {
            Some(limits) => Some(Heart::start(&shared, limits.heartbeat_interval())?),
            None => None,
        };
        Ok(Self { shared, ends, limits, peer: None, _heart: heart })
    }

    /// Sets the address of the other side.
    pub(crate) fn to(self, peer: SocketAddr) -> Self {
        Self { peer: Some(peer), ..self }
    }

    /// Returns the coordinator's address, if this is a TCP connection to it.
    #[must_use]
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Sets the time from which [`Link::millis`] counts. The clock of an agent must be the same over all of its
    /// connections.
    pub fn set_start(&mut self, start: Instant) {
        self.shared.lock().start = start;
    }

    /// Returns the descriptor to be polled for reading.
    #[must_use]
    pub fn read_fd(&self) -> BorrowedFd<'_> {
        self.ends[0].as_fd()
    }

    /// Returns the descriptor to be polled for writing while [`Link::needs_write`].
    #[must_use]
    pub fn write_fd(&self) -> BorrowedFd<'_> {
        self.ends[1].as_fd()
    }

    /// Returns `true` if data waits to be sent.
    #[must_use]
    pub fn needs_write(&self) -> bool {
        self.shared.lock().wire.needs_write()
    }

    /// Sends as much of a message as the system accepts now, and the rest on [`Link::flush`]. A lost connection is
    /// reported by [`Link::receive`].
    pub fn send(&mut self, message: &FromAgent) {
        self.shared.lock().send(message);
    }

    /// Sends more of the waiting data.
    pub fn flush(&mut self) {
        self.shared.lock().wire.flush();
    }

    /// Returns the next message, if one was received. Heartbeats are left out.
    ///
    /// # Errors
    /// The connection is lost, the coordinator does not read, or the peer is not a coordinator.
    pub fn receive(&mut self) -> Result<Option<ToAgent>, LinkError> {
        let mut shared = self.shared.lock();
        loop {
            match shared.wire.receive()? {
                Some(ToAgent::Beat) => {}
                message => return Ok(message.map(ToAgent::printable)),
            }
        }
    }

    /// Returns the time since data was last received.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.shared.lock().wire.last_received())
    }

    /// Returns `true` if nothing was received for so long that the agent should attempt a second connection.
    #[must_use]
    pub fn is_quiet(&self, now: Instant) -> bool {
        self.limits.is_some_and(|limits| self.silence(now) >= limits.quiet())
    }

    /// Returns the time at which the link becomes quiet or [`Link::keep_up`] fails, if nothing is received before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let limits = self.limits?;
        let received = self.shared.lock().wire.last_received();
        let quiet = received + limits.quiet();
        Some(if Instant::now() < quiet { quiet } else { received + limits.heartbeat_timeout() })
    }

    /// Checks that the coordinator has not been silent for too long.
    ///
    /// # Errors
    /// The coordinator has been silent for longer than the heartbeat timeout.
    pub fn keep_up(&mut self, now: Instant) -> Result<(), LinkError> {
        let Some(limits) = self.limits else { return Ok(()) };
        if self.silence(now) >= limits.heartbeat_timeout() {
            return Err(LinkError::Silent { seconds: limits.heartbeat_timeout().as_secs_f64() });
        }
        Ok(())
    }

    /// Returns a time on this link's clock, which [`Join::sent`](crate::Join) and
    /// [`RankFailure::at`](crate::RankFailure) use. Times before its start are 0.
    #[must_use]
    pub fn millis(&self, at: Instant) -> Millis {
        self.shared.lock().millis(at)
    }
}

impl Shared {
    fn send(&mut self, message: &FromAgent) {
        self.begun = true;
        match message {
            // Over TCP the name of the job is not sent: the peer may be a coordinator of another job.
            FromAgent::Join(join) if let Some(tag) = self.wire.job_tag(&join.run_id) => {
                self.wire.send(&FromAgent::Join(Join { run_id: tag, ..join.clone() }));
            }
            message => self.wire.send(message),
        }
    }

    fn millis(&self, at: Instant) -> Millis {
        Millis::try_from(at.saturating_duration_since(self.start).as_millis())
            .unwrap_or(Millis::MAX)
    }
}

/// Thread that sends heartbeats. It ends with the link.
#[derive(Debug)]
struct Heart {
    stop: Arc<Flag>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    fn start(shared: &Arc<Mutex<Shared>>, interval: Duration) -> io::Result<Self> {
        let stop = Arc::new(Flag::new()?);
        let (shared, stopped) = (Arc::clone(shared), Arc::clone(&stop));
        let thread = masked_thread::spawn("heartbeat", move || beat(&shared, &stopped, interval))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            // The thread waits only for the descriptor and the lock.
            let _ = thread.join();
        }
    }
}

/// Sends a heartbeat whenever nothing else was sent for this interval.
fn beat(shared: &Mutex<Shared>, stop: &Flag, interval: Duration) {
    let mut due = Instant::now() + interval;
    while !stop.wait(due.saturating_duration_since(Instant::now())) {
        let mut shared = shared.lock();
        let now = Instant::now();
        if !shared.begun {
            due = now + interval;
            continue;
        }
        if now.saturating_duration_since(shared.wire.last_sent()) >= interval {
            let sent = shared.millis(now);
            shared.wire.send(&FromAgent::Beat { sent });
        }
        due = shared.wire.last_sent() + interval;
    }
}

/// Maximum amount of unsent data: the output that may wait, and a message of maximum length.
const MAX_UNSENT: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::{FrameError, Stream, encode};

    fn pair(limits: Option<TimeLimits>) -> (Link, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Link::over(near.into(), limits).unwrap(), far)
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
    fn silence_is_told() {
        let limits = TimeLimits::default();
        let (mut link, _far) = pair(Some(limits));
        let start = link.deadline().unwrap() - limits.quiet();
        let after = |seconds| start + Duration::from_secs(seconds);
        link.keep_up(after(5)).unwrap();
        assert!(!link.is_quiet(after(5)) && link.is_quiet(after(6)));
        link.keep_up(after(29)).unwrap();
        let error = link.keep_up(after(30)).unwrap_err();
        assert_eq!(error.to_string(), "no message from the other side for 30 s");
    }

    #[test]
    fn beats_are_sent_without_being_asked_for() {
        let limits = TimeLimits::new(Duration::from_secs(1), Duration::ZERO);
        let (mut link, far) = pair(Some(limits));
        let mut wire = Connection::new(far.into(), None, 0).unwrap();
        link.send(&FromAgent::Finished { attempt: 0 });
        let mut received = Vec::new();
        while received.len() < 4 {
            received.extend(wait(&mut wire));
        }
        assert_eq!(received[0], FromAgent::Finished { attempt: 0 });
        for message in &received[1..] {
            assert!(matches!(message, FromAgent::Beat { .. }), "{message:?}");
        }
    }

    /// On a busy machine an agent may take longer than that before it asks to join.
    #[test]
    fn no_beat_is_sent_before_the_first_message() {
        let limits = TimeLimits::new(Duration::from_secs(1), Duration::ZERO);
        let (mut link, far) = pair(Some(limits));
        let mut wire = Connection::new(far.into(), None, 0).unwrap();
        std::thread::sleep(limits.heartbeat_interval() * 3);
        link.send(&FromAgent::Join(Join::new("node1")));
        assert!(matches!(wait(&mut wire)[0], FromAgent::Join(_)));
    }

    fn wait(wire: &mut Connection) -> Vec<FromAgent> {
        let mut fds = [PollFd::new(wire.read_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).unwrap();
        std::iter::from_fn(|| wire.receive().unwrap()).collect()
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
        assert!(link.needs_write());
        far_in.set_nonblocking(true).unwrap();
        let mut far = Connection::new(far_in.into(), None, 0).unwrap();
        let received = loop {
            if let Some(message) = far.receive::<FromAgent>().unwrap() {
                break message;
            }
            let mut fds = [PollFd::new(link.write_fd(), PollFlags::POLLOUT)];
            poll(&mut fds, PollTimeout::NONE).unwrap();
            link.flush();
        };
        assert_eq!(received, output);
        assert!(!link.needs_write());
    }

    #[test]
    fn the_name_of_the_job_stays_here() {
        let (near, far) = UnixStream::pair().unwrap();
        let wires = [near, far].map(|it| Connection::new(it.into(), None, 1 << 20).unwrap());
        let [mut near, mut far] = wires;
        let (near_end, far_end) = crate::channel::tests::pair();
        for (wire, channel) in [(&mut near, near_end), (&mut far, far_end)] {
            wire.limit_frames(4096);
            wire.secure(Box::new(channel));
        }
        let mut link = Link::of(near, None).unwrap();
        link.send(&FromAgent::Join(Join { run_id: "topsecret".into(), ..Join::new("node1") }));
        let Some(FromAgent::Join(join)) = far.receive().unwrap() else { panic!() };
        // The server can compare it with its own name, and cannot derive another name from it.
        assert_eq!(join.host, "node1");
        assert!(!join.run_id.contains("topsecret"));
        assert_eq!(far.job_tag("topsecret").unwrap(), join.run_id);
        assert_ne!(far.job_tag("guess").unwrap(), join.run_id);
    }
}
