//! Connects to all hosts: all are ready, or none starts the job.

use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use brigade_rendezvous::wake;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use brigade_ssh::ProcessGroup;

use super::error::{HostFailure, HostsError};
use super::session::{LaunchRequest, Session};
use crate::agent::next_signal;

/// A host that was sent the start message, and the streams of its session.
pub(crate) type Joined = (Session, OwnedFd, OwnedFd);

/// Result of connecting all hosts.
pub(crate) enum Answer {
    /// All hosts are ready and wait; in the order of the list.
    All(Vec<Waiting>),
    /// A signal stopped the connecting.
    Stopped(Signal),
}

/// A host that is ready. When dropped, it exits without having started anything.
pub(crate) struct Waiting {
    /// Address of this machine as the host sees it.
    pub(crate) launchers_address: Option<IpAddr>,
    go: Sender<()>,
    thread: JoinHandle<Option<Joined>>,
}

impl Waiting {
    /// Hands the session over to the coordinator. Returns `None` if its streams are closed.
    pub(crate) fn go(self) -> Option<Joined> {
        self.go.send(()).ok()?;
        self.thread.join().ok().flatten()
    }
}

/// Connects to all hosts at the same time and waits for their answers.
///
/// # Errors
/// Returns all hosts that cannot take part, each with its reason.
pub(crate) fn call(request: &Arc<LaunchRequest>, signals: &SignalFd) -> Result<Answer, HostsError> {
    let hosts = request.plan.hosts.len();
    let mut joining = Joining {
        request,
        answers: wake::Receiver::new().map_err(HostsError::system("make an eventfd"))?,
        calls: (0..hosts).map(|_| None).collect(),
        ready: vec![None; hosts],
        tries: vec![0; hosts],
        later: Vec::new(),
        failures: Vec::new(),
        deadline: None,
    };
    (0..hosts).try_for_each(|number| joining.begin(number))?;
    while !joining.is_over() {
        if let Some(signal) = joining.wait(signals) {
            joining.give_up();
            return Ok(Answer::Stopped(signal));
        }
        joining.listen()?;
    }
    joining.finish()
}

struct Joining<'e> {
    request: &'e Arc<LaunchRequest>,
    answers: wake::Receiver<CallResult>,
    /// Running calls, by host.
    calls: Vec<Option<Call>>,
    /// Hosts that are ready, each with the address of this machine as the host sees it.
    ready: Vec<Option<Option<IpAddr>>>,
    tries: Vec<u32>,
    /// Hosts to be tried again, with the time of the next try.
    later: Vec<(Instant, usize)>,
    failures: Vec<(usize, HostFailure)>,
    /// Time limit for the other hosts after the first one has failed, so that all failures are reported together.
    deadline: Option<Instant>,
}

impl Joining<'_> {
    /// Starts a session from this thread, which outlives all others: an ssh client ends with the thread that has
    /// started it.
    fn begin(&mut self, number: usize) -> Result<(), HostsError> {
        self.tries[number] += 1;
        let session = match Session::start(self.request, number, &self.request.plan.hosts[number]) {
            Ok(session) => session,
            Err(failure) => {
                self.fail(number, failure);
                return Ok(());
            }
        };
        let process = session.child.process_group();
        let caller = Caller { number, session, request: Arc::clone(self.request) };
        let (go, wait) = mpsc::channel();
        let answers = self.answers.sender();
        let thread = thread::Builder::new()
            .name(format!("call of host {number}"))
            .spawn(move || caller.run(&answers, &wait))
            .map_err(HostsError::system("start a thread"))?;
        self.calls[number] = Some(Call { go, thread, process });
        Ok(())
    }

    fn fail(&mut self, number: usize, failure: HostFailure) {
        self.failures.push((number, failure));
        let limit = self.request.plan.connect_timeout.saturating_add(OTHERS);
        // A limit beyond the range of the clock means no limit.
        self.deadline = self.deadline.or_else(|| Instant::now().checked_add(limit));
    }

    fn is_over(&self) -> bool {
        let answered = self.ready.iter().flatten().count() + self.failures.len();
        answered == self.ready.len() || self.deadline.is_some_and(|at| at <= Instant::now())
    }

    /// Waits for an answer, for a host that is to be tried again, or for a signal that asks to stop, and returns that.
    fn wait(&self, signals: &SignalFd) -> Option<Signal> {
        let next = self.later.iter().map(|it| it.0).chain(self.deadline).min();
        let timeout = wake::until(next);
        let mut fds = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.answers.as_fd(), PollFlags::POLLIN),
        ];
        // EINTR: check all sources and wait again.
        let _ = poll(&mut fds, timeout);
        std::iter::from_fn(|| next_signal(signals)).find(|signal| {
            matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT)
        })
    }

    fn listen(&mut self) -> Result<(), HostsError> {
        while let Some((number, answer)) = self.answers.try_recv() {
            match answer {
                Ok(seen) => self.ready[number] = Some(seen),
                Err((_, true)) if self.tries[number] < TRIES => {
                    // The retries are spread over time.
                    let spread = u32::try_from(number % 16).unwrap_or_default() * SPREAD;
                    let pause = PAUSE * self.tries[number] + spread;
                    self.later.push((Instant::now() + pause, number));
                }
                Err((failure, _)) => self.fail(number, failure),
            }
        }
        let now = Instant::now();
        let due: Vec<_> = self.later.extract_if(.., |it| it.0 <= now).collect();
        due.into_iter().try_for_each(|(_, number)| self.begin(number))
    }

    fn give_up(self) {
        for call in self.calls.into_iter().flatten() {
            call.give_up();
        }
    }

    fn finish(mut self) -> Result<Answer, HostsError> {
        if !self.failures.is_empty() {
            let mut failures = std::mem::take(&mut self.failures);
            self.give_up();
            failures.sort_by_key(|it| it.0);
            return Err(HostsError::Hosts(failures.into_iter().map(|it| it.1).collect()));
        }
        let seen = self.ready.into_iter().map(Option::flatten);
        let waiting = self.calls.into_iter().flatten().zip(seen);
        let waiting = waiting.map(|(call, launchers_address)| Waiting {
            launchers_address,
            go: call.go,
            thread: call.thread,
        });
        Ok(Answer::All(waiting.collect()))
    }
}

/// Thread that communicates with one host.
struct Call {
    go: Sender<()>,
    thread: JoinHandle<Option<Joined>>,
    process: ProcessGroup,
}

impl Call {
    fn give_up(self) {
        drop(self.go);
        self.process.kill();
        let _ = self.thread.join();
    }
}

struct Caller {
    number: usize,
    session: Session,
    request: Arc<LaunchRequest>,
}

/// Failure of a host, and `true` if another attempt may succeed.
type CallResult = (usize, Result<Option<IpAddr>, (HostFailure, bool)>);

impl Caller {
    fn run(mut self, answers: &wake::Sender<CallResult>, go: &Receiver<()>) -> Option<Joined> {
        // A single write per line, so that the lines of several hosts do not mix.
        let say = |text: &str| {
            let _ = io::stderr().write_all(format!("brigade: {text}\n").as_bytes());
        };
        let answer = self.session.prepare(&self.request, &say);
        let failed = answer.is_err();
        let answer = match answer {
            Ok(()) => Ok(self.session.launchers_address()),
            Err(failure) => Err((failure, self.session.was_closed_early())),
        };
        let _ = answers.send((self.number, answer));
        if failed { None } else { self.session.wait_for_go(&self.request, go) }
    }
}

/// Additional time for the other hosts after ssh's time limit for connecting.
const OTHERS: Duration = Duration::from_secs(2);
/// Maximum number of tries: a gateway to many hosts rejects some connections when all come at once.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(400);
const SPREAD: Duration = Duration::from_millis(40);
