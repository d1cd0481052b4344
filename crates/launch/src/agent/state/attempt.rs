//! The ranks of this host in one attempt: prepared, started, stopped, reported.

use std::time::Duration;

use brigade_hardware::DeviceFault;
use brigade_rank_env::is_loopback;
use brigade_rank_env::text::counted;
use brigade_rendezvous::{
    Assignment, ExitStatus, FromAgent, Millis, RankFailure, Stream, TimeLimits,
};
use nix::sys::signal::Signal;

use super::event::Action;
use super::{AgentState, Restarts};
use crate::LaunchError;
use crate::output::Tail;

/// Ranks that are started and stopped together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) part: Assignment,
    phase: Phase,
    ranks: Vec<Rank>,
    /// Failed ranks that have not been reported to the coordinator yet.
    failures: Vec<Failure>,
    /// `true` if faults of devices have been reported to the coordinator or the user.
    told_faults: bool,
    /// Signals that all ranks have been sent to stop them.
    asked: Vec<Signal>,
    /// Ranks that are not sent the signal yet.
    spared: Option<Spared>,
    stopping: Stopping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Folder and files are being created; no process exists.
    Preparing,
    Running,
    /// The ranks have ended; remaining processes that they started are killed, until this time at most.
    Sweeping(Duration),
    /// The states of ranks that SIGKILL did not end are being read.
    Stuck,
}

#[derive(Clone, Debug, Default)]
struct Rank {
    pid: i32,
    exit_status: Option<ExitStatus>,
    /// Signals that the rank has been sent to stop it.
    asked: Vec<Signal>,
}

/// Stage of stopping the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopping {
    /// The ranks have not been asked to stop.
    No,
    Until(Duration),
    /// The ranks were killed at this time.
    Killed(Duration),
}

/// Ranks that are not signalled yet when the others are asked to stop.
#[derive(Clone, Debug)]
enum Spared {
    /// All ranks, until this time at most: those that have written an error are being looked for.
    All(Duration),
    /// Ranks that have written an error and are about to end, with the time limit for that.
    Exiting(Vec<usize>, Duration),
}

/// Details of a failed rank besides its output.
#[derive(Debug, Default)]
pub(super) struct FailureDetails {
    /// The error that the rank wrote, and how long before its end.
    pub(super) error: Option<(String, Duration)>,
    /// Hint of the system about the reason.
    pub(super) hint: Option<String>,
    /// Faults of this host's devices.
    pub(super) device_faults: Vec<DeviceFault>,
}

/// A failed rank, with the details that are still being collected.
#[derive(Debug)]
struct Failure {
    local_rank: usize,
    exit_status: ExitStatus,
    seen: Duration,
    tail: Option<Tail>,
    details: Option<FailureDetails>,
}

/// Attempt of which no process is left on this host.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) attempt: u32,
    /// Node rank of this host in the attempt.
    pub(super) node_rank: usize,
    /// `true` if ranks had to be killed.
    killed: bool,
    /// `true` if all ranks ended with exit code 0.
    pub(super) finished: bool,
    /// Time until which the report to the coordinator is delayed for remaining output.
    pub(super) until: Duration,
    /// `true` if the end may have been reported to the coordinator.
    pub(super) reported: bool,
}

impl Group {
    fn new(part: Assignment) -> Self {
        Self {
            part,
            phase: Phase::Preparing,
            ranks: Vec::new(),
            failures: Vec::new(),
            told_faults: false,
            asked: Vec::new(),
            spared: None,
            stopping: Stopping::No,
        }
    }

    pub(super) fn is_preparing(&self) -> bool {
        self.phase == Phase::Preparing
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping != Stopping::No
    }

    /// Returns the number of ranks that have not ended.
    pub(super) fn running(&self) -> usize {
        self.running_ranks().count()
    }

    fn running_ranks(&self) -> impl Iterator<Item = (usize, &Rank)> {
        self.ranks.iter().enumerate().filter(|(_, rank)| rank.exit_status.is_none())
    }

    /// Returns the time at which the next step is due, if nothing else happens before.
    pub(super) fn deadline(&self, limits: &TimeLimits) -> Option<Duration> {
        let failure = self.failures.iter().map(Failure::ready_at).min();
        let spared = self.spared.as_ref().map(|spared| match spared {
            Spared::All(until) | Spared::Exiting(_, until) => *until,
        });
        let phase = match (self.phase, self.stopping) {
            (Phase::Sweeping(until), _) => Some(until),
            (Phase::Running, Stopping::Until(at)) if self.running() > 0 => Some(at),
            (Phase::Running, Stopping::Killed(at)) if self.running() > 0 => {
                Some(at + limits.stuck())
            }
            _ => None,
        };
        [failure, spared, phase].into_iter().flatten().min()
    }
}

impl Rank {
    /// Returns the exit status, unless it is success or the requested end.
    fn failure(&self) -> Option<ExitStatus> {
        let explains = |signal: &Signal, exit_status: ExitStatus| {
            let code = |signal: Signal| ExitStatus::Signal(signal as i32).exit_code();
            // A rank that ignores SIGINT is sent SIGTERM instead.
            let instead =
                *signal == Signal::SIGINT && exit_status.exit_code() == code(Signal::SIGTERM);
            exit_status.exit_code() == code(*signal) || instead
        };
        self.exit_status.filter(|exit_status| {
            *exit_status != ExitStatus::Code(0)
                && !self.asked.iter().any(|signal| explains(signal, *exit_status))
        })
    }
}

impl Failure {
    /// Returns the time at which the failure is reported to the coordinator, even if details are missing.
    fn ready_at(&self) -> Duration {
        let missing = |is_there: bool, limit| if is_there { Duration::ZERO } else { limit };
        self.seen
            + missing(self.tail.is_some(), TAIL_TIMEOUT)
                .max(missing(self.details.is_some(), ERROR_TIMEOUT))
    }
}

impl AgentState {
    pub(super) fn assigned(&mut self, part: Assignment) {
        let known = [&self.next, &self.group.as_ref().map(|group| group.part.clone())]
            .into_iter()
            .flatten()
            .any(|known| known.attempt == part.attempt);
        let ended = self.ended.as_ref().is_some_and(|ended| ended.attempt >= part.attempt);
        // Sent again after a lost connection.
        if known || ended {
            return;
        }
        if self.group.is_some() || self.next.is_some() || part.nproc != self.facts.nproc {
            return self
                .lost("it assigned this host ranks that do not match its --nproc".to_owned());
        }
        self.next = Some(part);
    }

    /// Begins the next attempt, once the output of the ranks before it is written: with a paused reader, this agent
    /// would otherwise accumulate the pipes of attempt after attempt.
    pub(super) fn start_next(&mut self) {
        let free = self.draining == 0 && self.group.is_none() && self.ending.outcome().is_none();
        let Some(part) = self.next.take_if(|_| free) else { return };
        if part.node_rank != 0 && is_loopback(&part.master_addr) && !self.facts.near {
            let reason = format!(
                "rank 0 is at {}, which other hosts cannot reach: give its host --local-addr with a \
                 name or address that they can",
                part.master_addr
            );
            return self.cannot_start(LaunchError::Refused { reason });
        }
        (self.attempt_to_stop, self.ended, self.failure) = (None, None, None);
        self.recorded.clear();
        self.hosts = part.num_nodes;
        self.restarts = Restarts { used: part.restarts, allowed: part.max_restarts };
        self.act(Action::Prepare { attempt: part.attempt });
        self.group = Some(Group::new(part));
    }

    fn cannot_start(&mut self, error: LaunchError) {
        let reason = error.to_string();
        self.send(FromAgent::Unable { reason });
        self.fail(error);
    }

    pub(super) fn prepared(&mut self, attempt: u32) {
        let waits = |group: &&mut Group| group.is_preparing() && group.part.attempt == attempt;
        let Some(group) = self.group.as_mut().filter(waits) else { return };
        group.phase = Phase::Running;
        group.ranks = vec![Rank::default(); group.part.nproc];
        let part = group.part.clone();
        self.act(Action::Start(part));
    }

    pub(super) fn started(&mut self, pids: &[i32]) {
        let ranks = self.group.iter_mut().flat_map(|group| &mut group.ranks);
        ranks.zip(pids).for_each(|(rank, pid)| rank.pid = *pid);
        if let Some(part) = self.group.as_ref().map(|group| &group.part) {
            let (attempt, at) = (part.attempt, millis(self.now));
            self.record(FromAgent::Started { attempt, pids: pids.to_vec(), at });
        }
    }

    /// Handles a failed start of ranks; those that were started end at their gates.
    pub(super) fn start_failed(&mut self, attempt: u32, error: LaunchError) {
        let is_it = |group: &&mut Group| group.part.attempt == attempt;
        let Some(group) = self.group.as_mut().filter(is_it) else { return };
        group.ranks.clear();
        self.cannot_start(error);
    }

    pub(super) fn exited(&mut self, local_rank: usize, exit_status: ExitStatus) {
        let now = self.now;
        let Some(group) = &mut self.group else { return };
        let Some(rank) = group.ranks.get_mut(local_rank) else { return };
        if rank.exit_status.is_some() {
            return;
        }
        rank.exit_status = Some(exit_status);
        let (failed, attempt) = (rank.failure(), group.part.attempt);
        if let Some(exit_status) = failed {
            let (tail, details) = (None, None);
            group.failures.push(Failure { local_rank, exit_status, seen: now, tail, details });
            let sigkill = ExitStatus::Signal(Signal::SIGKILL as i32);
            let killed = exit_status.exit_code() == sigkill.exit_code();
            self.act(Action::CollectFailure { local_rank, killed });
        }
        self.record(FromAgent::Exited { attempt, local_rank, exit_status, at: millis(now) });
    }

    /// Sends the coordinator a message that it only records, if it records the job.
    fn record(&mut self, message: FromAgent) {
        if self.group.as_ref().is_some_and(|group| group.part.recorded) {
            self.recorded.push(message.clone());
            self.send(message);
        }
    }

    pub(super) fn tail(&mut self, local_rank: usize, tail: Tail) {
        if let Some(failure) = self.failure_of(local_rank) {
            failure.tail = Some(tail);
        }
    }

    pub(super) fn failure_details(&mut self, local_rank: usize, details: FailureDetails) {
        if let Some(failure) = self.failure_of(local_rank) {
            failure.details = Some(details);
        }
    }

    /// Reports faults of this host's devices while its ranks are being stopped: they may be the reason for a job that
    /// hangs or fails on another host. A failed rank of this host carries them in its own report.
    pub(super) fn device_faults(&mut self, faults: Vec<DeviceFault>) {
        let Some(group) = &mut self.group else { return };
        if faults.is_empty() || group.told_faults || !group.failures.is_empty() {
            return;
        }
        group.told_faults = true;
        for fault in faults {
            self.say(fault.to_string());
        }
    }

    fn failure_of(&mut self, local_rank: usize) -> Option<&mut Failure> {
        let mut failures = self.group.iter_mut().flat_map(|group| &mut group.failures);
        failures.find(|failure| failure.local_rank == local_rank)
    }

    fn tell_failure(&mut self, failure: Failure) {
        let Some(group) = &mut self.group else { return };
        let Failure { local_rank, exit_status, seen, tail, details } = failure;
        let FailureDetails { error, hint, device_faults } = details.unwrap_or_default();
        // The error was written before the process ended, and its peers noticed the end before this agent.
        let age = error.as_ref().map_or(Duration::ZERO, |(_, age)| *age);
        let unseen = if is_sudden(exit_status) { NEWS_TIMEOUT } else { Duration::ZERO };
        let at = millis(seen.saturating_sub(age.max(unseen)));
        let is_later = self.failure.as_ref().is_some_and(|first| first.at <= at);
        // The coordinator adds faults of devices to the failure that it reports.
        let has_news = !device_faults.is_empty() && !group.told_faults;
        if is_later && !has_news {
            return;
        }
        group.told_faults |= has_news;
        let (stream, last_lines) = match tail {
            // The reader of this process's output has paused.
            None => (Stream::Stderr, vec![UNKNOWN_TAIL.to_owned()]),
            Some(tail) if tail.stderr.is_empty() => (Stream::Stdout, tail.stdout),
            Some(tail) => (Stream::Stderr, tail.stderr),
        };
        let failure = RankFailure {
            attempt: group.part.attempt,
            rank: group.part.first_rank + local_rank,
            local_rank,
            host: self.facts.host.clone(),
            pid: group.ranks.get(local_rank).map_or(0, |rank| rank.pid),
            exit_status,
            at,
            last_lines,
            stream,
            error: error.map(|(text, _)| text),
            hint,
            device_faults,
        };
        if !is_later {
            self.failure = Some(failure.clone());
        }
        self.send(FromAgent::Failed(failure));
    }

    /// Stops an attempt, as the coordinator requests.
    pub(super) fn stop(&mut self, attempt: u32, signal: i32, reason: String) {
        let is = |part: &Assignment| part.attempt == attempt;
        if self.group.as_ref().is_some_and(|group| is(&group.part)) {
            // SIGPIPE: the reader of another host's output has closed it, which does not concern the ranks of this
            // host.
            let signal = Signal::try_from(signal).ok().filter(|it| *it != Signal::SIGPIPE);
            let running = self.stop_group(signal.unwrap_or(Signal::SIGTERM));
            self.explain(reason, running);
        } else if let Some(part) = self.next.take_if(|part| is(part)) {
            self.skip(&part);
            self.explain(reason, 0);
        } else if self.ended.as_ref().is_some_and(|ended| ended.attempt == attempt) {
            self.explain(reason, 0);
        } else {
            return;
        }
        self.attempt_to_stop = Some(attempt);
    }

    /// Returns how many ranks have to stop.
    fn stop_group(&mut self, signal: Signal) -> usize {
        let Some(group) = &mut self.group else { return 0 };
        if group.is_preparing() {
            self.cancel();
            return 0;
        }
        let running = group.running();
        // A signal from the user of this host has been forwarded already.
        if !group.is_stopping() && signal == Signal::SIGTERM {
            // The cause may be an error of a rank that is about to end: killed before that, it could not end with its
            // own exit code.
            let finding = FINDING_TIMEOUT.min(self.facts.limits.shutdown_timeout() / 2);
            group.spared = Some(Spared::All(self.now + finding));
            self.act(Action::FindErrors);
            self.begin_to_stop(signal);
        } else if !group.asked.contains(&signal) {
            self.ask_all(signal);
        }
        running
    }

    /// Cancels an attempt of which no process was started yet.
    pub(super) fn cancel(&mut self) {
        if let Some(group) = self.group.take_if(|group| group.is_preparing()) {
            self.skip(&group.part);
        }
    }

    /// Skips an attempt that was over before it began here.
    fn skip(&mut self, part: &Assignment) {
        self.ended = Some(Ended {
            attempt: part.attempt,
            node_rank: part.node_rank,
            killed: false,
            finished: false,
            until: self.now,
            reported: false,
        });
    }

    /// Sends all ranks a signal that requests their end. Those that have not ended after the shutdown timeout, counted
    /// from the first request, are killed.
    pub(super) fn ask_all(&mut self, signal: Signal) {
        let Some(group) = self.group.as_mut().filter(|group| !group.is_preparing()) else { return };
        group.spared = None;
        let all = (0..group.ranks.len()).collect();
        self.begin_to_stop(signal);
        self.ask(all, signal);
    }

    /// Requests the end of a group that is not waited for any more.
    pub(super) fn stop_quietly(&mut self) {
        self.cancel();
        if self.group.as_ref().is_some_and(|group| !group.is_stopping()) {
            self.ask_all(Signal::SIGTERM);
        }
    }

    /// Notes that the rank was sent this signal by another process, so that ending by it is not a failure.
    pub(super) fn explain_ending(&mut self, local_rank: usize, signal: Signal) {
        let ranks = self.group.iter_mut().flat_map(|group| &mut group.ranks);
        ranks.skip(local_rank).take(1).for_each(|rank| rank.asked.push(signal));
    }

    fn begin_to_stop(&mut self, signal: Signal) {
        let Some(group) = &mut self.group else { return };
        if group.stopping == Stopping::No {
            let limit = self.facts.limits.shutdown_timeout();
            group.stopping = Stopping::Until(self.now.saturating_add(limit));
        }
        group.asked.push(signal);
    }

    fn ask(&mut self, local_ranks: Vec<usize>, signal: Signal) {
        let Some(group) = &mut self.group else { return };
        for local_rank in &local_ranks {
            if let Some(rank) = group.ranks.get_mut(*local_rank) {
                rank.asked.push(signal);
            }
        }
        if !local_ranks.is_empty() {
            self.act(Action::Ask { local_ranks, signal });
        }
    }

    /// Gives ranks that have written an error time to end by themselves, and sends the signal to the others now.
    pub(super) fn exiting(&mut self, exiting: &[usize]) {
        let Some(group) = &mut self.group else { return };
        if !matches!(group.spared, Some(Spared::All(_))) {
            return;
        }
        let is_exiting = |rank: &usize| {
            exiting.contains(rank)
                && group.ranks.get(*rank).is_some_and(|it| it.exit_status.is_none())
        };
        let (spared, others): (Vec<usize>, Vec<usize>) =
            (0..group.ranks.len()).partition(is_exiting);
        let until = self.now + self.facts.limits.exiting();
        group.spared = (!spared.is_empty()).then_some(Spared::Exiting(spared, until));
        let signal = group.asked.last().copied().unwrap_or(Signal::SIGTERM);
        self.ask(others, signal);
    }

    /// Kills at once all ranks that still run.
    pub(super) fn kill(&mut self) {
        let now = self.now;
        let Some(group) = self.group.as_mut().filter(|group| !group.is_preparing()) else { return };
        group.spared = None;
        if !matches!(group.stopping, Stopping::Killed(_)) {
            group.stopping = Stopping::Killed(now);
        }
        let all = (0..group.ranks.len()).collect();
        self.ask(all, Signal::SIGKILL);
    }

    /// Performs the steps that are due for the running ranks.
    pub(super) fn advance_group(&mut self) {
        let now = self.now;
        let Some(group) = &mut self.group else { return };
        let ready: Vec<Failure> =
            group.failures.extract_if(.., |failure| failure.ready_at() <= now).collect();
        for failure in ready {
            self.tell_failure(failure);
        }
        self.ask_spared();
        let Some(group) = &self.group else { return };
        let running = group.running();
        match (group.phase, group.stopping) {
            (Phase::Running, _) if running == 0 && group.failures.is_empty() => self.sweep(),
            (Phase::Running, Stopping::Until(at)) if running > 0 && at <= now => {
                self.kill();
                let ranks = counted(running, "rank");
                let limit = self.facts.limits.shutdown_timeout().as_secs_f64();
                self.say(format!("{ranks} did not stop within {limit} s: killed"));
            }
            (Phase::Running, Stopping::Killed(at))
                if running > 0 && at + self.facts.limits.stuck() <= now =>
            {
                let stuck = group.running_ranks().map(|(local_rank, _)| local_rank).collect();
                self.set_phase(Phase::Stuck);
                self.act(Action::Inspect(stuck));
            }
            (Phase::Sweeping(until), _) if until <= now => self.swept(),
            _ => {}
        }
    }

    /// Signals the spared ranks whose time is over.
    fn ask_spared(&mut self) {
        let now = self.now;
        let Some(group) = &mut self.group else { return };
        let all = (0..group.ranks.len()).collect();
        let due = match &group.spared {
            Some(Spared::All(until)) if *until <= now => all,
            Some(Spared::Exiting(ranks, until)) if *until <= now => ranks.clone(),
            _ => return,
        };
        group.spared = None;
        let signal = group.asked.last().copied().unwrap_or(Signal::SIGTERM);
        self.ask(due, signal);
    }

    fn set_phase(&mut self, phase: Phase) {
        if let Some(group) = &mut self.group {
            group.phase = phase;
        }
    }

    fn sweep(&mut self) {
        let until = self.now + self.facts.limits.leftovers();
        self.set_phase(Phase::Sweeping(until));
        self.act(Action::Sweep);
    }

    pub(super) fn swept(&mut self) {
        if self.group.as_ref().is_some_and(|group| matches!(group.phase, Phase::Sweeping(_))) {
            self.act(Action::Release);
            self.end_attempt();
        }
    }

    /// Handles the states of ranks that SIGKILL did not end: each is given with the kernel's letter for its state.
    pub(super) fn inspected(&mut self, states: &[(usize, char)]) {
        let Some(group) = self.group.as_ref().filter(|group| group.phase == Phase::Stuck) else {
            return;
        };
        let name = |(local_rank, state): &(usize, char)| {
            let pid = group.ranks.get(*local_rank).map_or(0, |rank| rank.pid);
            format!("rank {} (pid {pid}, state {state})", group.part.first_rank + local_rank)
        };
        let names: Vec<String> = states.iter().map(name).collect();
        let verb = if states.len() == 1 { "is" } else { "are" };
        let seconds = self.facts.limits.stuck().as_secs();
        let text = format!(
            "{} {verb} stuck in the kernel: still there {seconds} s after SIGKILL",
            names.join(", "),
        );
        self.say(format!(
            "{text}; a process of brigade (`__reaper`) waits for that and clears up then"
        ));
        self.stuck = Some(text);
        self.act(Action::LeaveToReaper);
        self.end_attempt();
    }

    fn end_attempt(&mut self) {
        let Some(group) = self.group.take() else { return };
        let all_done = group.ranks.iter().all(|rank| rank.exit_status == Some(ExitStatus::Code(0)));
        self.ended = Some(Ended {
            attempt: group.part.attempt,
            node_rank: group.part.node_rank,
            killed: matches!(group.stopping, Stopping::Killed(_)),
            // Without ranks the attempt has not begun.
            finished: all_done && !group.ranks.is_empty(),
            until: self.now + self.facts.limits.output(),
            reported: !self.connection.is_up(),
        });
        self.wait_for_answer_from_now();
        self.act(Action::Drain);
        self.draining += 1;
    }

    /// Reports to the coordinator that the attempt has ended on this host, once its output has been passed on.
    pub(super) fn report_ended(&mut self) {
        let shown = self.draining == 0 || !self.facts.forwards_output;
        let stuck = self.stuck.clone();
        let Some(ended) = &mut self.ended else { return };
        let (attempt, killed, finished) = (ended.attempt, ended.killed, ended.finished);
        let asked = self.attempt_to_stop == Some(attempt);
        if !ended.reported && (shown || asked && ended.until <= self.now) {
            ended.reported = true;
            // Never before the last byte: an attempt whose output is lost did not succeed.
            if finished && shown {
                self.send(FromAgent::Finished { attempt });
            }
        }
        if asked && self.ended.as_ref().is_some_and(|ended| ended.reported) {
            self.attempt_to_stop = None;
            self.act(Action::SendStopped { attempt, killed, stuck });
        }
    }

    /// Forwards a signal to the ranks if it has no effect on the agent. Any other signal is a mistake of the caller.
    pub(super) fn forward(&mut self, signal: i32) {
        let runs = self.group.as_ref().is_some_and(|group| group.phase == Phase::Running);
        if let Ok(signal @ (Signal::SIGUSR1 | Signal::SIGUSR2)) = Signal::try_from(signal)
            && runs
        {
            self.act(Action::Forward(signal));
        }
    }
}

/// Returns `true` if the rank was killed by the system or by a user: the loss of a peer does not cause that.
fn is_sudden(exit_status: ExitStatus) -> bool {
    let signals =
        [Signal::SIGKILL, Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGILL, Signal::SIGFPE];
    let is =
        |signal: Signal| exit_status.exit_code() == ExitStatus::Signal(signal as i32).exit_code();
    signals.into_iter().any(is)
}

/// Converts a time of the agent's clock to the form that messages use.
fn millis(at: Duration) -> Millis {
    Millis::try_from(at.as_millis()).unwrap_or(Millis::MAX)
}

const UNKNOWN_TAIL: &str = "(unknown: the launcher's output was not being read)";
/// Maximum delay with which the agent is notified of a killed rank, compared with the rank's peers: the kernel closes a
/// process's connections before it notifies the parent, and ranks on other hosts fail because of that at once. The same
/// as the coordinator's allowance for a lost host.
const NEWS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for the last lines of a failed rank. It is used up only where nothing answers: a reader of the output has
/// paused, or the host is very busy.
const TAIL_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for reading a rank's error file, which may be on another host.
const ERROR_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for finding the ranks that have written an error, as long as that leaves half of the shutdown timeout to
/// SIGTERM.
const FINDING_TIMEOUT: Duration = Duration::from_secs(1);
