//! Execution of a job on several hosts, up to its report.

use std::ffi::OsString;
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use brigade_rendezvous::{Coordinator, Rules, Secret, SessionId, wake};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use super::HostsError;
use super::bundle::{self, Bundle};
use super::connect_all::{self, Answer};
use super::output::Output;
use super::plan::HostsPlan;
use super::session::{LaunchRequest, Session};
use crate::agent::{next_signal, with_signals};
use crate::events::{EventLog, EventSender};
use crate::open_files::OpenFiles;
use crate::output::Report;
use crate::plan::new_name;
use crate::{
    Color, LaunchError, LaunchOptions, NodeRange, NprocSpec, Outcome, OutputFacts, Prefix, Program,
};

/// Runs the job to its end on all hosts, with the output on this process's stdout and stderr.
///
/// `options` are those that the plan was made from. They apply to every host; a number of ranks in the list of hosts
/// takes precedence. SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to all ranks, and a second one kills them at
/// once, as on one host. SIGUSR1 and SIGUSR2 are only forwarded. SIGTSTP (Ctrl-Z) does nothing: a launcher that is
/// suspended would be taken for lost.
///
/// # Errors
/// A host cannot take part, or a file that is to be copied does not exist. The program has not run on any host then.
pub fn run(options: &LaunchOptions, plan: &HostsPlan) -> Result<Outcome, LaunchError> {
    let mut options = for_all_hosts(options, plan);
    let library_folders = build(&mut options.program)?;
    let request = request(options, plan.clone(), library_folders)?;
    with_signals(|signals| {
        // Before any process is started, which would inherit the descriptor.
        let run_id = request.options.run_id.clone().unwrap_or_default();
        let events = request.options.events.as_ref();
        let events = events.map(|target| EventLog::start(target, &run_id)).transpose()?;
        match connect_all::call(&request, &signals)? {
            Answer::Stopped(signal) => Ok(Outcome::Left { signal: signal as i32 }),
            Answer::All(waiting) => Job::start(&request, waiting, signals, events)?.watch(),
        }
    })
}

/// Returns the options with the decisions that are made once on this host, and not by each host for itself.
fn for_all_hosts(options: &LaunchOptions, plan: &HostsPlan) -> LaunchOptions {
    let mut options = options.clone();
    options.nodes = NodeRange::default();
    options.run_id.get_or_insert_with(new_name);
    // The terminal belongs to this process, and the ranks are elsewhere.
    options.output.raw = Some(false);
    // A new secret for this job: one in the environment is for other jobs, too.
    options.secret = Secret::generate().ok();
    let facts = OutputFacts::gather();
    // The lines are shown on this process's terminal.
    let colored = options.output.color.resolve(facts.color) == [true; 2];
    options.output.color = if colored { Color::Always } else { Color::Never };
    let from_environment = facts.prefix.and_then(|template| template.parse().ok());
    options.output.prefix = options.output.prefix.or(from_environment).or_else(|| {
        let longest = plan.hosts.iter().map(|it| it.spec.destination().chars().count()).max();
        let slots = plan.hosts.iter().map(|host| match host.nproc {
            NprocSpec::Count(count) => count,
            // Two digits are assumed where each host's own devices decide.
            _ => 16,
        });
        let last = slots.sum::<usize>().saturating_sub(1).to_string();
        Some(Prefix::with_host(longest.unwrap_or(0) + last.len() + "[:] ".len()))
    });
    options
}

/// Builds what must be built, once and here, and returns the folders of its libraries.
fn build(program: &mut Program) -> Result<Vec<PathBuf>, LaunchError> {
    let Program::Cargo(target) = program else { return Ok(Vec::new()) };
    let built = target.build()?;
    *program = Program::Executable(built.executable.into());
    Ok(built.libraries)
}

/// Returns the request that is sent to every host.
fn request(
    options: LaunchOptions,
    plan: HostsPlan,
    library_folders: Vec<PathBuf>,
) -> Result<Arc<LaunchRequest>, HostsError> {
    let (brigade_mark, bundle) = if plan.sync {
        let own = bundle::mark("/proc/self/exe".as_ref(), "brigade".as_ref())?;
        (Some(own), to_copy(&options, &plan, &library_folders)?)
    } else {
        (None, None)
    };
    let open_files = OpenFiles::raise();
    let request =
        LaunchRequest { options, plan, brigade_mark, bundle, library_folders, open_files };
    Ok(Arc::new(request))
}

/// Returns the files to copy: those given by a path were built or written here. Programs that are looked up in `PATH`,
/// and Python's installed packages, are each host's own.
fn to_copy(
    options: &LaunchOptions,
    plan: &HostsPlan,
    library_folders: &[PathBuf],
) -> Result<Option<Bundle>, HostsError> {
    match &options.program {
        Program::Auto(name) if options.program.is_script() => {
            Bundle::of_script(Path::new(name)).map(Some)
        }
        Program::Auto(name) | Program::Executable(name)
            if name.as_encoded_bytes().contains(&b'/') =>
        {
            Bundle::of_program(Path::new(name), library_folders).map(Some)
        }
        Program::Auto(name) if Path::new(name).extension() == Some("py".as_ref()) => {
            note(&format!("--sync copies no {0}: there is no {0} in this folder", name.display()));
            Ok(None)
        }
        Program::Auto(name) | Program::Executable(name) => {
            let is_file = |word: &&OsString| Path::new(word).is_file();
            // The first argument of an interpreter that is not an option is its script.
            let script = options.args.iter().find(|it| !it.as_encoded_bytes().starts_with(b"-"));
            if let Some(script) = script.filter(is_file) {
                let (name, script) = (name.display(), script.display());
                note(&format!(
                    "--sync copies neither {name}, which each host finds in its own PATH, nor \
                     {script}, which it is given; to have a script copied, name it as the program"
                ));
            }
            Ok(None)
        }
        Program::Module(name) => {
            let bundle = Bundle::of_module(name, &plan.workdir)?;
            if bundle.is_none() {
                note(&format!(
                    "--sync copies nothing of the module {}: it is not below {}, so each host runs \
                     the one that is installed there",
                    name.display(),
                    plan.workdir.display()
                ));
            }
            Ok(bundle)
        }
        // A Cargo target has been replaced by its executable before; a `ModuleIn` is created by copying only.
        Program::Cargo(_) | Program::ModuleIn { .. } => Ok(None),
    }
}

fn note(text: &str) {
    let _ = std::io::stderr().write_all(format!("brigade: note: {text}\n").as_bytes());
}

/// Job whose hosts are all connected.
struct Job {
    coordinator: Coordinator,
    sessions: Vec<(SessionId, Session)>,
    signals: SignalFd,
    output: Output,
    /// Event log (`--events`).
    events: Option<EventLog>,
    /// Lines of the sessions' stderr, with `None` at the end of each.
    stderr: wake::Receiver<(SessionId, Option<String>)>,
    /// Lines of sessions that may be an ssh client's last messages, which are shown again with the loss of the host.
    held: Vec<(Instant, SessionId, String)>,
    shutdown_timeout: Duration,
    stopping: bool,
    impatient: bool,
}

impl Job {
    fn start(
        request: &LaunchRequest,
        waiting: Vec<connect_all::Waiting>,
        signals: SignalFd,
        events: Option<(EventLog, EventSender)>,
    ) -> Result<Self, LaunchError> {
        let LaunchRequest { options, plan, .. } = request;
        let hosts = waiting.len();
        let seen: Vec<IpAddr> = waiting.iter().filter_map(|it| it.launchers_address).collect();
        let output =
            Output::start(options.output.quiet).map_err(LaunchError::system("start a thread"))?;
        let run_id = options.run_id.clone().unwrap_or_default();
        let (events, event_sender) = events.unzip();
        let rules = Rules {
            run_id,
            recorded: events.is_some(),
            min_nodes: plan.min_hosts,
            max_nodes: hosts,
            max_restarts: options.max_restarts,
            limits: plan.limits,
            late_hosts: false,
            // Address of this machine for the other hosts, for the case that it is the first host.
            address: Some(match &options.local_addr {
                Some(address) => address.clone(),
                None if hosts > 1 => plan.access.local.name_for_others(&seen),
                None => LOOPBACK.to_owned(),
            }),
            ..Rules::default()
        };
        let start = LaunchError::system("start the coordinator");
        let coordinator =
            Coordinator::start(rules, None, Some(output.sink(event_sender))).map_err(start)?;
        let stderr = wake::Receiver::new().map_err(LaunchError::system("make an eventfd"))?;
        let mut sessions = Vec::new();
        for waiting in waiting {
            let Some((session, from, to)) = waiting.go() else { continue };
            let name = session.host.destination();
            let id = coordinator.add(from, to, &name);
            let lines = stderr.sender();
            session
                .child
                .listen(Box::new(move |line| drop(lines.send((id, line.map(str::to_owned))))));
            sessions.push((id, session));
        }
        Ok(Self {
            coordinator,
            sessions,
            signals,
            output,
            events,
            stderr,
            held: Vec::new(),
            shutdown_timeout: options.shutdown_timeout,
            stopping: false,
            impatient: false,
        })
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
            while let Some((id, line)) = self.stderr.try_recv() {
                match line {
                    Some(line) => self.held.push((Instant::now(), id, line)),
                    None => self.explain(id),
                }
            }
            while let Some(line) = self.events.as_ref().and_then(EventLog::trouble) {
                self.output.say(&line);
            }
            self.show_held(Instant::now());
        }
        let job_result = self.coordinator.wait();
        let outcome = if closed { Outcome::OutputClosed } else { Outcome::Over(job_result) };
        // The agents have been informed and exit. A host that is cut off cannot.
        let deadline = Instant::now() + GO_HOME;
        for (_, session) in self.sessions {
            session.child.finish(deadline);
        }
        if let Some(line) = self.events.and_then(EventLog::finish) {
            self.output.say(&line);
        }
        if let Some(report) = Report::of(&outcome) {
            self.output.report(report);
        }
        self.output.finish(&self.signals, self.impatient);
        Ok(outcome)
    }

    /// Waits for anything to do. Returns `true` when the job is over.
    fn wait(&self) -> bool {
        let mut fds = vec![
            PollFd::new(self.coordinator.over_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.output.notices(), PollFlags::POLLIN),
            PollFd::new(self.stderr.as_fd(), PollFlags::POLLIN),
        ];
        fds.extend(self.events.iter().map(|log| PollFd::new(log.as_fd(), PollFlags::POLLIN)));
        // EINTR: check all sources and wait again.
        let timeout = if self.held.is_empty() { PollTimeout::NONE } else { HELD.into() };
        poll(&mut fds, timeout).is_ok() && fds[0].any().unwrap_or(false)
    }

    fn handle(&mut self, signal: Signal) {
        match signal {
            Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT => {
                let again = std::mem::replace(&mut self.stopping, true);
                self.impatient |= again;
                if !again {
                    self.output.say(&format!(
                        "{signal}: waiting up to {} s for the ranks to stop; SIGINT (Ctrl-C) kills \
                         now",
                        self.shutdown_timeout.as_secs_f64(),
                    ));
                }
                self.coordinator.interrupt(signal as i32);
            }
            Signal::SIGUSR1 | Signal::SIGUSR2 => self.coordinator.forward(signal as i32),
            Signal::SIGTSTP => self.output.say(
                "a job on several hosts cannot be suspended: its hosts would treat the missing messages \
                 as the end of the launcher",
            ),
            _ => {}
        }
    }

    /// Sets the reason why a session has ended, while the coordinator may still need it.
    fn explain(&mut self, id: SessionId) {
        self.held.retain(|it| it.1 != id);
        if let Some((_, session)) = self.sessions.iter_mut().find(|it| it.0 == id) {
            self.coordinator.explain(id, &session.why_it_ended());
        }
    }

    /// Shows held lines after which their session did not end.
    fn show_held(&mut self, now: Instant) {
        let due =
            |at: Instant| now.saturating_duration_since(at) >= Duration::from_millis(HELD.into());
        for (_, id, line) in self.held.extract_if(.., |it| due(it.0)) {
            if let Some((_, session)) = self.sessions.iter().find(|it| it.0 == id) {
                self.output.say(&format!("{}: {line}", session.host));
            }
        }
    }
}

const LOOPBACK: &str = "127.0.0.1";
/// Maximum time in milliseconds from a line of a session to the end of that session.
const HELD: u16 = 300;
/// Time limit from the end of the job to that of the sessions.
const GO_HOME: Duration = Duration::from_secs(2);
