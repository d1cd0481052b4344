//! The agent: starts the ranks of a plan, watches them, stops them all when one fails.
//!
//! It is one loop over signals, the ranks' output, and the commands of the coordinator, which decides for all hosts. On
//! a single host the coordinator is a thread of this process.
//!
//! The agent's decisions are in `state`, as pure functions; the other files carry them out, and this one carries events
//! to it and actions away from it.

mod cleanup;
mod coordinator_client;
mod device_faults;
mod error_files;
mod files;
mod job_control;
mod next_attempt;
mod oom;
mod output_forwarder;
mod rank_process;
pub(crate) mod rank_role;
mod ranks;
mod signal_disposition;
mod signals;
mod state;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use brigade_rendezvous::{Assignment, ExitStatus, FromAgent, Link, ToAgent, wake};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Pid, getpid};

pub(crate) use signals::{next_signal, with_signals};

use crate::open_files::OpenFiles;
use crate::output::{Notice, Output, Report, RunFolder, Terminal};
use crate::store_port::Interfaces;
use crate::{LaunchError, LaunchPlan, Outcome, RendezvousMode};
use cleanup::Cleanup;
use coordinator_client::CoordinatorClient;
use files::{Answer, Files};
use job_control::JobControl;
use next_attempt::NextAttempt;
use output_forwarder::OutputForwarder;
use ranks::{Ranks, Starting};
use state::{Action, AgentState, Event, Kind};

/// Runs this host's part of the job to its end, with the output on this process's stdout and
/// stderr.
///
/// Blocks until no process of the job is left on this host. Call it from the main thread, before
/// the process has others: the kernel kills the ranks when the thread that started them ends, and
/// signals that the agent waits for must be blocked in all threads.
///
/// When a rank fails, the others get SIGTERM and, after the plan's time limit, SIGKILL; then the job starts again, as
/// often as the plan allows. SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded with the same limit; SIGINT while the
/// job is stopping kills at once. SIGUSR1 and SIGUSR2 are only forwarded; Ctrl-Z also suspends the ranks of a job on
/// one host.
///
/// After a job these signals stay blocked in this thread: a late one (schedulers send SIGTERM more than once) must not
/// end the process before it has reported how the job ended.
///
/// # Errors
/// The hosts have not met, or the system could not start all ranks of this host. No rank has run the program then.
pub fn run(plan: &LaunchPlan) -> Result<Outcome, LaunchError> {
    with_signals(|signals| {
        let terminal =
            Terminal::new(plan.output.quiet).map_err(LaunchError::system("write to stdout"))?;
        let output = Output::start(&plan.output, Box::new(terminal));
        let output = output.map_err(LaunchError::system("start a thread"))?;
        Agent::new(plan, signals, output, None)?.run()
    })
}

/// Runs this host's part of the job like [`run`], over an existing connection to the coordinator. The output is sent
/// over that connection, too, and the result of the job is shown at its other end only.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn run_over(plan: &LaunchPlan, link: Link) -> Result<Outcome, LaunchError> {
    with_signals(|signals| {
        let (forwarder, show) =
            OutputForwarder::new().map_err(LaunchError::system("make a socket pair"))?;
        let output =
            Output::start(&plan.output, show).map_err(LaunchError::system("start a thread"))?;
        Agent::new(plan, signals, output, Some((forwarder, link)))?.run()
    })
}

struct Agent<'p> {
    plan: &'p LaunchPlan,
    state: AgentState,
    /// Events that have not been handled yet.
    events: VecDeque<Event>,
    /// Start of the agent's clock.
    start: Instant,
    client: CoordinatorClient<'p>,
    /// A connection to use in place of a search.
    given: Option<Link>,
    signals: SignalFd,
    output: Output,
    /// Forwarder of output to the coordinator.
    forwarder: Option<OutputForwarder>,
    files: Files,
    cleanup: Cleanup,
    open_files: OpenFiles,
    next_attempt: NextAttempt<'p>,
    ranks: Option<Ranks>,
    /// Terminal that is passed to a rank. `None` if none is passed.
    job_control: Option<JobControl>,
    result: Option<Result<Outcome, LaunchError>>,
    /// Set once the agent is to exit: `true` after all output has been written.
    exit: Option<bool>,
}

impl<'p> Agent<'p> {
    fn new(
        plan: &'p LaunchPlan,
        signals: SignalFd,
        output: Output,
        over: Option<(OutputForwarder, Link)>,
    ) -> Result<Self, LaunchError> {
        let start = Instant::now();
        let (forwarder, given) = over.unzip();
        // Before any process is started: an error here leaves nothing to wait for.
        let client = CoordinatorClient::new(plan, start)?;
        let facts = CoordinatorClient::facts(plan, forwarder.is_some());
        let interfaces =
            if facts.kind == Kind::OneHost { Interfaces::Loopback } else { Interfaces::All };
        // Before joining: a host without such a port cannot take part in the job.
        let next_attempt = NextAttempt::new(plan, interfaces)?;
        let passing = RunFolder::passing(&plan.output, &plan.agent_id);
        let cleanup = Cleanup::start(plan, passing.as_deref())?;
        let (state, actions) = AgentState::new(facts);
        let mut this = Self {
            plan,
            state,
            events: VecDeque::new(),
            start,
            client,
            given,
            signals,
            output,
            forwarder,
            files: Files::start(plan).map_err(LaunchError::system("start a thread"))?,
            cleanup,
            open_files: OpenFiles::raise(),
            next_attempt,
            ranks: None,
            job_control: if plan.output.raw { JobControl::open() } else { None },
            result: None,
            exit: None,
        };
        actions.into_iter().for_each(|action| this.perform(action));
        Ok(this)
    }

    fn run(mut self) -> Result<Outcome, LaunchError> {
        loop {
            self.handle_events();
            if let Some(written) = self.exit {
                return self.finish(written);
            }
            self.wait();
            self.take_signals();
            self.take_notices();
            self.take_answers();
            self.sweep();
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Passes the events to the state machine and performs its actions, until no event is left.
    fn handle_events(&mut self) {
        loop {
            self.forward_output();
            let Some(event) = self.events.pop_front().or_else(|| self.client.next()) else {
                let now = self.now();
                if self.state.deadline().is_some_and(|due| due <= now) && self.exit.is_none() {
                    self.events.push_back(Event::Tick);
                    continue;
                }
                return;
            };
            if let (Event::Received(ToAgent::Taken { bytes }), Some(forwarder)) =
                (&event, &mut self.forwarder)
            {
                forwarder.taken(*bytes);
                continue;
            }
            let now = self.now();
            for action in self.state.handle(now, event) {
                self.perform(action);
            }
        }
    }

    /// Performs an action of the state machine. An immediate result becomes an event.
    fn perform(&mut self, action: Action) {
        match action {
            Action::MakeFolder => self.files.make(),
            Action::Connect => match self.given.take() {
                Some(link) => self.client.use_link(link),
                None => self.client.connect(),
            },
            Action::Reconnect { patient } => self.client.reconnect(patient),
            Action::StopReconnecting => self.client.stop_reconnecting(),
            Action::Join(request) => match self.port_to_join_with(request.resume) {
                Ok(port) => {
                    let nproc = self.plan.local_world_size.as_usize();
                    self.client.join(&request, nproc, port);
                }
                Err(error) => self.events.push_back(Event::Failed(error)),
            },
            Action::Send(message) => self.client.send(&message),
            Action::SendStopped { attempt, killed, stuck } => match self.next_attempt.port_number()
            {
                Ok(port) => {
                    self.client.send(&FromAgent::Stopped { attempt, port, killed, stuck });
                }
                Err(error) => {
                    let (how, may_resume, closed) = (error.to_string(), false, false);
                    self.events.push_back(Event::ConnectionLost { how, may_resume, closed });
                }
            },
            Action::Disconnect => self.client.disconnect(),
            Action::Prepare { attempt } => {
                self.next_attempt.files = None;
                self.files.prepare(attempt);
            }
            Action::Start(part) => {
                let started = self.start_ranks(part);
                self.events.push_back(started);
            }
            Action::FindErrors => {
                let ranks = self.ranks.iter();
                let files =
                    ranks.flat_map(|it| (0..it.part.nproc).map(|n| it.folder.error_file(n)));
                let first_rank = self.ranks.as_ref().map_or(0, |it| it.part.first_rank);
                self.files.find_errors(first_rank, files.collect());
            }
            Action::Ask { local_ranks, signal } => {
                self.ranks.iter().for_each(|ranks| ranks.ask(&local_ranks, signal));
            }
            Action::Forward(signal) => self.ranks.iter().for_each(|ranks| ranks.send(signal)),
            Action::Suspend => {
                self.ranks.iter().for_each(|ranks| ranks.send(Signal::SIGSTOP));
                self.take_terminal(false);
                // Returns when this process is continued.
                let _ = kill(getpid(), Signal::SIGSTOP);
                self.give_terminal();
                self.ranks.iter().for_each(|ranks| ranks.send(Signal::SIGCONT));
            }
            Action::CollectFailure { local_rank, killed } => {
                self.output.ask_tail(local_rank);
                let file =
                    self.ranks.as_ref().and_then(|ranks| ranks.folder.error_file(local_rank));
                let killer = self.ranks.as_ref().filter(|_| killed);
                let killer = killer.map(|ranks| ranks.oom_killer.clone());
                let first_rank = self.ranks.as_ref().map_or(0, |it| it.part.first_rank);
                self.files.read_error(first_rank, local_rank, file, killer);
            }
            Action::Inspect(local_ranks) => {
                let states = self.ranks.as_ref().map(|ranks| ranks.states(&local_ranks));
                self.events.push_back(Event::Inspected(states.unwrap_or_default()));
            }
            Action::Sweep => self.cleanup.begin_sweep(),
            Action::Release => {
                self.cleanup.end_sweep();
                if let Some(ranks) = &mut self.ranks {
                    ranks.release(&mut self.cleanup.reaper);
                }
            }
            Action::LeaveToReaper => self.cleanup.leaves_ranks = true,
            Action::Drain => self.output.drain(),
            Action::DropOutput => {
                self.forwarder.iter_mut().for_each(OutputForwarder::abandon);
            }
            Action::Say(text) => self.say(text),
            Action::Report(result) => self.report(result),
            Action::Exit { written } => self.exit = Some(written),
        }
    }

    /// Returns the port for a join request. A resumed agent sends the port that its ranks use: that one cannot be
    /// reserved again, and with `--store-port` there may be no other.
    fn port_to_join_with(&mut self, resume: bool) -> Result<u16, LaunchError> {
        match &self.ranks {
            Some(ranks) if resume && !self.next_attempt.has_port() => Ok(ranks.port.number()),
            _ => self.next_attempt.port_number(),
        }
    }

    fn start_ranks(&mut self, part: Assignment) -> Event {
        let attempt = part.attempt;
        let files = self.next_attempt.files.take().unwrap_or_default();
        self.job_control.iter_mut().for_each(JobControl::expect_taking);
        let started = self.next_attempt.take_port().and_then(|port| {
            let with = Starting {
                plan: self.plan,
                output: &mut self.output,
                reaper: &mut self.cleanup.reaper,
                open_files: &self.open_files,
            };
            Ranks::start(with, part, port, files)
        });
        match started {
            Ok(ranks) => {
                let pids = ranks.pids();
                self.ranks = Some(ranks);
                Event::Started(pids)
            }
            Err(error) => Event::StartFailed { attempt, error },
        }
    }

    fn say(&mut self, text: String) {
        if self.forwarder.is_some() {
            self.client.send(&FromAgent::Say { text });
        } else {
            self.output.say(&text);
        }
    }

    /// Sends as much of the output as may be sent.
    fn forward_output(&mut self) {
        let Some(forwarder) = &mut self.forwarder else { return };
        while let Some(message) = forwarder.next() {
            self.client.send(&message);
        }
        while forwarder.is_drained() {
            self.events.push_back(Event::Drained);
        }
    }

    /// Waits for any event, without using processor time.
    fn wait(&self) {
        let state = self.state.deadline().and_then(|due| self.start.checked_add(due));
        let next =
            [state, self.cleanup.deadline(), self.client.deadline()].into_iter().flatten().min();
        let timeout = wake::until(next);
        let mut fds = self.client.fds();
        fds.push(PollFd::new(self.signals.as_fd(), PollFlags::POLLIN));
        fds.push(PollFd::new(self.output.control(), PollFlags::POLLIN));
        fds.push(PollFd::new(self.files.control(), PollFlags::POLLIN));
        let forwarder = self.forwarder.as_ref().map(OutputForwarder::control);
        fds.extend(forwarder.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        // EINTR: check all sources and wait again.
        let _ = poll(&mut fds, timeout);
    }

    fn take_signals(&mut self) {
        while let Some(info) = self.signals.read_signal().ok().flatten() {
            match Signal::try_from(info.ssi_signo.cast_signed()) {
                // Of several children that end at a time the system names the first.
                Ok(Signal::SIGCHLD) => self.look_for_ended(info.ssi_pid.cast_signed()),
                // The user has brought the job to the foreground.
                Ok(Signal::SIGCONT) => self.give_terminal(),
                Ok(signal) => self.events.push_back(Event::Signal(signal)),
                Err(_) => {}
            }
        }
    }

    fn look_for_ended(&mut self, first: i32) {
        let Some(ranks) = &mut self.ranks else { return };
        let ended = ranks.look(Some(first));
        let pids = ranks.pids();
        if self.plan.output.raw {
            self.look_at_raw_rank(&ended);
        }
        let exited = |(local_rank, exit_status)| Event::Exited { local_rank, exit_status };
        self.events.extend(ended.into_iter().map(exited));
        self.cleanup.forget(first, &pids);
    }

    /// Handles terminal signals of the rank that has the terminal: this process does not receive them.
    fn look_at_raw_rank(&mut self, ended: &[(usize, ExitStatus)]) {
        for (local_rank, exit_status) in ended {
            self.take_terminal(matches!(exit_status, ExitStatus::Signal(_)));
            // Ctrl-C is not a failure: it must not restart the job.
            let typed = [Signal::SIGINT, Signal::SIGQUIT].into_iter().find(|signal| {
                exit_status.exit_code() == ExitStatus::Signal(*signal as i32).exit_code()
            });
            if let Some(signal) = typed.filter(|_| self.job_control.is_some()) {
                self.events.push_back(Event::Typed { local_rank: *local_rank, signal });
            }
        }
        if self.ranks.as_ref().is_some_and(Ranks::is_stopped) {
            self.events.push_back(Event::Signal(Signal::SIGTSTP));
            if self.plan.options.rendezvous != RendezvousMode::OneHost {
                self.ranks.iter().for_each(|ranks| ranks.send(Signal::SIGCONT));
            }
        }
    }

    fn take_terminal(&mut self, was_killed: bool) {
        self.job_control.iter_mut().for_each(|it| it.take_back(was_killed));
    }

    fn give_terminal(&mut self) {
        let rank = self.ranks.as_ref().and_then(|ranks| ranks.pids().first().copied());
        if let (Some(job_control), Some(rank)) = (&mut self.job_control, rank) {
            job_control.give(Pid::from_raw(rank));
        }
    }

    fn take_notices(&mut self) {
        while let Some(notice) = self.output.notice() {
            match notice {
                Notice::Closed => self.events.push_back(Event::OutputClosed),
                Notice::Tail { local_rank, tail } => {
                    self.events.push_back(Event::Tail { local_rank, tail });
                }
                Notice::Drained(_) => match &mut self.forwarder {
                    // The agent is notified once all of it is in transit.
                    Some(forwarder) => forwarder.written(),
                    None => self.events.push_back(Event::Drained),
                },
                Notice::Gone => {
                    // As often as the agent may wait for it.
                    self.events.extend((0..MAX_DRAINS).map(|_| Event::Drained));
                    return;
                }
            }
        }
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.files.answer() {
            self.events.push_back(match answer {
                Answer::Made(Ok(())) => Event::FolderMade,
                Answer::Made(Err(error)) => Event::Failed(error),
                Answer::Prepared { attempt, files: Ok(files) } => {
                    self.next_attempt.files = Some(files);
                    Event::Prepared { attempt }
                }
                Answer::Prepared { attempt, files: Err(error) } => {
                    Event::StartFailed { attempt, error }
                }
                Answer::Errors(ranks) => Event::Exiting(ranks),
                Answer::DeviceFaults(faults) => Event::DeviceFaults(faults),
                Answer::FailureDetails { local_rank, error, hint, device_faults } => {
                    Event::FailureDetails { local_rank, error, hint, device_faults }
                }
            });
        }
    }

    /// Kills what the ranks have left, if that is due.
    fn sweep(&mut self) {
        let pids = self.ranks.as_ref().map(Ranks::pids).unwrap_or_default();
        if self.cleanup.sweep(&pids) {
            self.events.push_back(Event::Swept);
        }
    }

    fn report(&mut self, result: Result<Outcome, LaunchError>) {
        if let Ok(outcome) = &result {
            // Otherwise the other end of the connection reports it.
            if self.forwarder.is_none()
                && let Some(report) = Report::of(outcome)
            {
                self.output.report(report);
            }
            if let Some(failure) = outcome.failure() {
                let ranks = self.ranks.as_ref().filter(|ranks| {
                    let first = ranks.part.first_rank;
                    let is_here = (first..first + ranks.part.nproc).contains(&failure.rank);
                    ranks.part.attempt == failure.attempt && is_here
                });
                let file = ranks.and_then(|ranks| ranks.folder.error_file(failure.local_rank));
                self.files.pass_on(failure.clone(), file);
            }
        }
        self.result = Some(result);
        if !self.client.serves() {
            self.events.push_back(Event::OthersNotified);
        }
    }

    /// Ends everything that this agent has started, except what is left to the reaper.
    fn finish(self, written: bool) -> Result<Outcome, LaunchError> {
        let Self { files, cleanup, output, result, client, .. } = self;
        if let Some(line) = client.finish() {
            output.say(&line);
        }
        // The reaper goes last: until then it clears up after an agent that is killed.
        let removed = files.end();
        if removed && !cleanup.leaves_ranks {
            cleanup.reaper.dismiss();
        }
        // A thread that still writes is left alone; it ends with this process.
        if written {
            output.end();
        }
        // The state machine reports before it exits.
        result.unwrap_or_else(|| {
            Err(LaunchError::Refused { reason: "the agent left without a result".to_owned() })
        })
    }
}

/// Maximum number of waits for output: the agent waits for the output of one attempt, and for that at the end.
const MAX_DRAINS: usize = 2;
