//! A job on several hosts, from the list of them to the last line.

use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use brigade_rendezvous::{Coordinator, Rules, SessionId};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use super::bell::Bell;
use super::environment;
use super::here::Here;
use super::output::Output;
use super::parcel::{self, Parcel};
use super::roll_call::{self, Answer};
use super::session::{Errand, Session, Way};
use super::ssh::{SSH_VARIABLE, SshClient};
use super::{HostsError, HostsOptions};
use crate::agent::{report, with_signals};
use crate::{LaunchError, LaunchOptions, Outcome};

/// Runs the job to its end on all hosts, with the output on this process's stdout and stderr.
///
/// `options` holds for every host, but for the number of ranks where the list of hosts has one.
/// SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to all ranks, and a second one kills them at
/// once, as on one host. SIGTSTP (Ctrl-Z) does nothing: a launcher that is suspended would be taken
/// for lost.
///
/// # Errors
/// Nothing of the program has run on any host: the list of hosts is wrong, or one of them cannot
/// take part.
pub fn run(options: &LaunchOptions, hosts: &HostsOptions) -> Result<Outcome, LaunchError> {
    let mut options = options.clone();
    // The same for all hosts. Keyed from the system's random source: two jobs must not share it.
    options.run_id.get_or_insert_with(|| {
        format!("brigade-{:016x}", RandomState::new().hash_one(std::process::id()))
    });
    with_signals(|signals| {
        let here = Here::look();
        let errand = errand(&options, hosts)?;
        match roll_call::call(errand, &hosts.hosts, &here, &signals)? {
            Answer::Stopped(signal) => Ok(Outcome::Left { signal: signal as i32 }),
            Answer::All(waiting) => {
                Job::start(&options, hosts.min_hosts, waiting, &here, signals)?.watch()
            }
        }
    })
}

/// What every host is told.
fn errand(options: &LaunchOptions, hosts: &HostsOptions) -> Result<Errand, HostsError> {
    let variable = std::env::var_os(SSH_VARIABLE);
    let client = SshClient::new(hosts.ssh_command.as_deref(), variable.as_deref())?;
    let workdir = match &hosts.workdir {
        Some(folder) => folder.clone(),
        None => working_folder().map_err(HostsError::system("find the working folder"))?,
    };
    // On another host it would be relative to the home folder there.
    if !workdir.is_absolute() {
        return Err(HostsError::Workdir { path: workdir });
    }
    let here: Vec<_> = std::env::vars_os().collect();
    let files: Vec<_> = environment::deepspeed_files()
        .into_iter()
        .filter_map(|path| Some((path.clone(), fs::read_to_string(&path).ok()?)))
        .collect();
    let variables = environment::choose(&hosts.env, &here, &files)?;
    let brigade = std::env::current_exe().map_err(HostsError::system("find this executable"))?;
    let (brigade_mark, parcel) = if hosts.sync {
        let own = parcel::mark("/proc/self/exe".as_ref(), &"brigade".into())?;
        (Some(own), program_to_copy(options)?)
    } else {
        (None, None)
    };
    Ok(Errand {
        options: options.clone(),
        client,
        timeout: hosts.connect_timeout,
        brigade,
        brigade_mark,
        parcel,
        workdir,
        variables,
    })
}

/// As a shell says it, links included: on another host the link may be the only name.
fn working_folder() -> std::io::Result<PathBuf> {
    let real = std::env::current_dir()?;
    let said = std::env::var_os("PWD").map(PathBuf::from).filter(|it| it.is_absolute());
    let same = |it: &PathBuf| it.canonicalize().is_ok_and(|it| it == real);
    Ok(said.filter(same).unwrap_or(real))
}

/// A program that is given by its path was built or written here. One that is looked up in `PATH`,
/// as an interpreter is, every host has for itself.
fn program_to_copy(options: &LaunchOptions) -> Result<Option<Parcel>, HostsError> {
    match options.program.to_str() {
        Some(name) if !name.contains('/') => Ok(None),
        _ => Parcel::of_program(options.program.as_ref()).map(Some),
    }
}

/// A job whose hosts are all connected.
struct Job {
    coordinator: Coordinator,
    sessions: HashMap<SessionId, Session>,
    signals: SignalFd,
    output: Output,
    /// Rung by a session that has ended.
    bell: Bell<SessionId>,
    stopping: bool,
    impatient: bool,
    hosts: usize,
}

impl Job {
    fn start(
        options: &LaunchOptions,
        min_hosts: Option<usize>,
        waiting: Vec<roll_call::Waiting>,
        here: &Here,
        signals: SignalFd,
    ) -> Result<Self, LaunchError> {
        let hosts = waiting.len();
        let seen: Vec<IpAddr> = waiting.iter().filter_map(|it| it.launchers_address).collect();
        let output = Output::start().map_err(LaunchError::system("start a thread"))?;
        let rules = Rules {
            run_id: options.run_id.clone().unwrap_or_default(),
            min_nodes: min_hosts.unwrap_or(hosts).clamp(1, hosts),
            max_nodes: hosts,
            max_restarts: options.max_restarts,
            shutdown_timeout: options.shutdown_timeout,
            late_hosts: false,
            // What the others call this machine, should it be the first host.
            address: Some(if hosts > 1 { here.name_for_others(&seen) } else { LOOPBACK.to_owned() }),
            ..Rules::default()
        };
        let start = LaunchError::system("start the coordinator");
        let coordinator = Coordinator::start(rules, None, Some(output.sink())).map_err(start)?;
        let bell = Bell::new().map_err(LaunchError::system("make a socket pair"))?;
        let mut sessions = HashMap::new();
        for waiting in waiting {
            let Some((session, from, to)) = waiting.go() else { continue };
            let name = session.host.name.clone();
            let added = coordinator.add(from, to, &name);
            let id = added.map_err(LaunchError::system("add a host"))?;
            let (speak, ring) = (output.speaker(), bell.ringer());
            session.child.listen(Box::new(move |line| match line {
                Some(line) => speak(&format!("{name}: {line}")),
                None => ring.ring(id),
            }));
            sessions.insert(id, session);
        }
        Ok(Self { coordinator, sessions, signals, output, bell, stopping: false, impatient: false, hosts })
    }

    fn watch(mut self) -> Result<Outcome, LaunchError> {
        let mut closed = false;
        while !self.wait() {
            while let Some(signal) = next_signal(&self.signals) {
                self.handle(signal);
            }
            if self.output.is_closed() && !closed {
                closed = true;
                self.coordinator.interrupt(Signal::SIGPIPE as i32);
            }
            while let Some(id) = self.bell.next() {
                self.explain(id);
            }
        }
        let verdict = self.coordinator.wait();
        let outcome = if closed { Outcome::OutputClosed } else { Outcome::Over(verdict) };
        // The agents have been told and go home. A host that is cut off cannot.
        let deadline = Instant::now() + GO_HOME;
        for session in self.sessions.into_values() {
            session.child.finish(deadline);
        }
        if let Some(text) = report::text(&outcome, self.hosts) {
            self.output.say(&text);
        }
        self.output.finish(&self.signals, self.impatient);
        Ok(outcome)
    }

    /// Waits for anything to do. True when the job is over.
    fn wait(&self) -> bool {
        let mut fds = [
            PollFd::new(self.coordinator.over_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.output.notices(), PollFlags::POLLIN),
            PollFd::new(self.bell.as_fd(), PollFlags::POLLIN),
        ];
        // EINTR: look round and wait again.
        poll(&mut fds, PollTimeout::NONE).is_ok() && fds[0].any().unwrap_or(false)
    }

    fn handle(&mut self, signal: Signal) {
        match signal {
            Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT => {
                self.impatient |= std::mem::replace(&mut self.stopping, true);
                self.coordinator.interrupt(signal as i32);
            }
            Signal::SIGTSTP => self.output.say(
                "a job on several hosts cannot be suspended: its hosts would take the silence for \
                 the launcher's end",
            ),
            _ => {}
        }
    }

    /// Says why a session has ended, while the coordinator may still want to know.
    fn explain(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        self.coordinator.explain(id, session.why_it_ended());
    }
}

/// The next signal that has come.
pub(crate) fn next_signal(signals: &SignalFd) -> Option<Signal> {
    let info = signals.read_signal().ok().flatten()?;
    Signal::try_from(info.ssi_signo.cast_signed()).ok()
}

const LOOPBACK: &str = "127.0.0.1";
/// From the end of the job to that of the sessions.
const GO_HOME: Duration = Duration::from_secs(2);
