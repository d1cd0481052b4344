//! The coordinator: a thread that holds the connections to all agents and performs the actions of the state machine.

mod actions;
mod event_loop;
mod inbound;
mod output;
mod peer;
mod shared;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::{fmt, io, panic};

use crate::wake::{self, Flag};
use crate::{AgentId, JobResult, Link, Listener, Rules, masked_thread};

use event_loop::EventLoop;
pub use output::{OutputSink, Piece};
use shared::{Command, Shared};

/// A running coordinator, which forms the job from the agents of its hosts.
///
/// Dropping the coordinator without [`Coordinator::wait`] closes all connections, and agents detect the loss of their
/// coordinator.
///
/// ```
/// use brigade_rendezvous::{Coordinator, FromAgent, Join, Rules, ToAgent};
/// use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
///
/// let rules = Rules { run_id: "night".into(), ..Rules::default() };
/// let coordinator = Coordinator::start(rules, None, None)?;
/// let mut link = coordinator.link()?;
/// link.send(&FromAgent::Join(Join { run_id: "night".into(), ..Join::new("node1") }));
/// loop {
///     poll(&mut [PollFd::new(link.read_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
///     match link.receive()? {
///         Some(ToAgent::Start(part)) => {
///             assert_eq!((part.attempt, part.world_size), (0, 1));
///             link.send(&FromAgent::Finished { attempt: 0 });
///         }
///         Some(ToAgent::End(job_result)) => break assert_eq!(job_result.code, 0),
///         _ => {}
///     }
/// }
/// assert_eq!(coordinator.wait().code, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Coordinator {
    shared: Shared,
    thread: Option<JoinHandle<Option<JobResult>>>,
    over: Arc<Flag>,
}

impl Coordinator {
    /// Starts the coordinator's thread. Agents of other hosts connect through the listener, if there is one. Their
    /// output and all lines for the user go to the sink, if there is one.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub fn start(
        rules: Rules,
        listener: Option<Listener>,
        sink: Option<Box<dyn OutputSink>>,
    ) -> io::Result<Self> {
        let (sender, commands) = wake::channel()?;
        let shared = Shared::new(sender);
        let over = Arc::new(Flag::new()?);
        let turn = EventLoop::new(rules, listener, sink, shared.clone(), commands)?;
        let told = SetOnDrop(Arc::clone(&over));
        let thread = masked_thread::spawn("coordinator", move || {
            let _told = told;
            turn.run()
        })?;
        Ok(Self { shared, thread: Some(thread), over })
    }

    /// Creates a link for an agent in this process.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn link(&self) -> io::Result<Link> {
        let (near, far) = UnixStream::pair()?;
        let link = Link::over(near.into(), None)?;
        self.shared.tell(Command::Local(self.shared.new_agent(), far.into()));
        Ok(link)
    }

    /// Adds an agent at the other end of an ssh session or of another byte stream: its output is read from `reader`,
    /// its input is written to `writer`. Until it joins, it is shown as `host`, and the job waits for it.
    #[must_use]
    pub fn add(&self, reader: OwnedFd, writer: OwnedFd, host: &str) -> SessionId {
        let agent = self.shared.new_agent();
        self.shared.tell(Command::Session { agent, reader, writer, host: host.into() });
        SessionId(agent)
    }

    /// Sets the reason why a session has ended, in place of "the connection was closed". The reason may follow up to
    /// half a second after the end of the session's output. If it is set first, the session is closed half a second
    /// later.
    pub fn explain(&self, session: SessionId, how: &str) {
        self.shared.tell(Command::Explain(session.0, how.into()));
    }

    /// Stops the job after a signal to this process, if no agent in it handles the signal.
    pub fn interrupt(&self, signal: i32) {
        self.shared.tell(Command::Interrupt(signal));
    }

    /// Forwards a signal that does not end the job, SIGUSR1 or SIGUSR2, to the ranks of all hosts.
    pub fn forward(&self, signal: i32) {
        self.shared.tell(Command::Forward(signal));
    }

    /// Returns a descriptor that becomes readable, in the sense of `poll`, once the job is over and all agents have
    /// been informed.
    #[must_use]
    pub fn over_fd(&self) -> BorrowedFd<'_> {
        self.over.as_fd()
    }

    /// Waits until the job is over and all agents have been informed, at most two seconds longer than the job takes. An
    /// agent in this process must have dropped its link.
    #[must_use]
    pub fn wait(mut self) -> JobResult {
        let job_result = self.thread.take().map(JoinHandle::join);
        match job_result {
            Some(Ok(Some(job_result))) => job_result,
            Some(Err(panic)) => panic::resume_unwind(panic),
            // No result: only dropping the coordinator makes its thread end early.
            Some(Ok(None)) | None => JobResult { code: 1, cause: None },
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.tell(Command::Abandon);
            // The thread ends at once, and has reported a panic itself.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordinator").finish_non_exhaustive()
    }
}

/// Identifier of an ssh session that was [added](Coordinator::add).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId(AgentId);

/// Guard that sets a flag when the thread ends, for any reason.
struct SetOnDrop(Arc<Flag>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

#[cfg(test)]
mod tests;
