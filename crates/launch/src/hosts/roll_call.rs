//! All hosts answer, or none starts.

use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use super::bell::{Bell, Ringer};
use super::child::ProcessGroup;
use super::error::{HostFailure, HostsError};
use super::here::Here;
use super::hostfile::HostSpec;
use super::run::next_signal;
use super::session::{Errand, Session};

/// A host that has been told to go, and the streams of its session.
pub(crate) type Joined = (Session, OwnedFd, OwnedFd);

/// What came of the roll call.
pub(crate) enum Answer {
    /// All hosts are ready and wait. In the order of the list.
    All(Vec<Waiting>),
    /// Somebody stopped it first.
    Stopped(Signal),
}

/// A host that is ready. Dropped, it is let go without having started anything.
pub(crate) struct Waiting {
    /// The address of this machine as the host sees it.
    pub(crate) launchers_address: Option<IpAddr>,
    go: Sender<()>,
    thread: JoinHandle<Option<Joined>>,
}

impl Waiting {
    /// Tells the host that the coordinator speaks from now on. `None`: its streams are gone.
    pub(crate) fn go(self) -> Option<Joined> {
        self.go.send(()).ok()?;
        self.thread.join().ok().flatten()
    }
}

/// Connects to all hosts at the same time and waits for them.
///
/// # Errors
/// Those hosts that cannot take part, all of them, each with its reason.
pub(crate) fn call(
    errand: &Arc<Errand>,
    hosts: &[HostSpec],
    here: &Here,
    signals: &SignalFd,
) -> Result<Answer, HostsError> {
    let timeout = errand.timeout + OTHERS;
    let bell = Bell::new().map_err(HostsError::system("make a socket pair"))?;
    let mut sessions = Vec::new();
    let mut failures: Vec<(usize, HostFailure)> = Vec::new();
    for (number, host) in hosts.iter().enumerate() {
        // Here and not in the threads: all of them are known when a signal comes.
        match Session::start(errand, number, host.clone(), here.way_to(host)) {
            Ok(session) => sessions.push((number, session)),
            Err(failure) => failures.push((number, failure)),
        }
    }
    let mut calls = Vec::new();
    if failures.is_empty() {
        for (number, session) in sessions {
            let process = session.child.process_group();
            let caller = Caller { number, session, errand: Arc::clone(errand) };
            let (go, wait) = mpsc::channel();
            let ringer = bell.ringer();
            let thread = thread::Builder::new()
                .name(format!("call of host {number}"))
                .spawn(move || caller.run(&ringer, &wait))
                .map_err(HostsError::system("start a thread"))?;
            calls.push(Call { go, thread, process });
        }
    }

    let mut ready: Vec<Option<Option<IpAddr>>> = vec![None; hosts.len()];
    let mut open = calls.len();
    // Once one host cannot, the others are waited for only to name them all at once.
    let mut deadline = None;
    while open > 0 && deadline.is_none_or(|at| Instant::now() < at) {
        if let Some(signal) = wait(signals, &bell, deadline) {
            for call in calls {
                call.give_up();
            }
            return Ok(Answer::Stopped(signal));
        }
        while let Some((number, answer)) = bell.next() {
            open -= 1;
            match answer {
                Ok(seen) => ready[number] = Some(seen),
                Err(failure) => {
                    failures.push((number, failure));
                    deadline = deadline.or_else(|| Some(Instant::now() + timeout));
                }
            }
        }
    }
    if !failures.is_empty() {
        for call in calls {
            call.give_up();
        }
        failures.sort_by_key(|it| it.0);
        return Err(HostsError::Hosts(failures.into_iter().map(|it| it.1).collect()));
    }
    let seen = ready.into_iter().map(Option::flatten);
    let waiting = calls.into_iter().zip(seen).map(|(call, launchers_address)| Waiting {
        launchers_address,
        go: call.go,
        thread: call.thread,
    });
    Ok(Answer::All(waiting.collect()))
}

/// A thread that talks to one host.
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
    errand: Arc<Errand>,
}

type Said = (usize, Result<Option<IpAddr>, HostFailure>);

impl Caller {
    fn run(mut self, bell: &Ringer<Said>, go: &Receiver<()>) -> Option<Joined> {
        // One write each, so that the lines of several hosts do not mix.
        let say = |text: &str| {
            let _ = io::stderr().write_all(format!("brigade: {text}\n").as_bytes());
        };
        let answer = self.session.prepare(&self.errand, &say);
        let failed = answer.is_err();
        let answer = answer.map(|()| self.session.launchers_address());
        bell.ring((self.number, answer));
        if failed { None } else { self.session.wait_for_go(go) }
    }
}

/// Waits for an answer or for a signal that asks to stop, and gives that.
fn wait(signals: &SignalFd, bell: &Bell<Said>, deadline: Option<Instant>) -> Option<Signal> {
    let timeout = deadline.map_or(PollTimeout::NONE, |at| {
        let left = at.saturating_duration_since(Instant::now()).as_millis() + 1;
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    let mut fds = [
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        PollFd::new(bell.as_fd(), PollFlags::POLLIN),
    ];
    // EINTR: look round and wait again.
    let _ = poll(&mut fds, timeout);
    std::iter::from_fn(|| next_signal(signals)).find(|signal| {
        matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT)
    })
}

/// After the time that ssh has to connect.
const OTHERS: Duration = Duration::from_secs(2);
