//! End of an agent: signals, closed output, and the exit.

use std::time::Duration;

use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;

use super::event::{Action, Event};
use super::{AgentState, Kind};
use crate::{LaunchError, Outcome};

/// Stage of the end of this host's part in the job.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an agent has one of these")]
pub(super) enum Ending {
    /// The host takes part in the job, or still may.
    No,
    /// Nothing more will start here, and the agent exits as soon as no process of the job runs here. At least one of
    /// the two fields is set.
    Decided {
        /// Outcome of the job.
        outcome: Option<Outcome>,
        /// Reason why this host cannot take part.
        error: Option<LaunchError>,
    },
    /// The result of the job has been shown.
    Leaving(Leaving),
    Over,
}

/// State of the agent's exit: output may still have to be written, and a coordinator in this process may have to inform
/// other hosts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    /// `true` once the others have been informed.
    notified: bool,
    /// Time limit for informing the other hosts. `None` if there is no limit.
    end_notice: Option<Duration>,
    /// Time limit for writing output. `None` if there is no limit.
    limit: Option<Duration>,
}

impl Ending {
    /// Returns `true` if the agent has reported the job's result.
    pub(super) fn has_reported(&self) -> bool {
        matches!(self, Self::Leaving(_) | Self::Over)
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        match self {
            Self::Leaving(Leaving { notified, end_notice, limit }) => {
                end_notice.filter(|_| !notified).into_iter().chain(*limit).min()
            }
            Self::No | Self::Decided { .. } | Self::Over => None,
        }
    }

    pub(super) fn outcome(&self) -> Option<&Outcome> {
        match self {
            Self::Decided { outcome, .. } => outcome.as_ref(),
            Self::No | Self::Leaving(_) | Self::Over => None,
        }
    }

    pub(super) fn error(&self) -> Option<&LaunchError> {
        match self {
            Self::Decided { error, .. } => error.as_ref(),
            Self::No | Self::Leaving(_) | Self::Over => None,
        }
    }

    /// Sets the outcome of the job. The first call counts.
    pub(super) fn decide(&mut self, decided: Outcome) {
        match self {
            Self::No => *self = Self::Decided { outcome: Some(decided), error: None },
            Self::Decided { outcome, .. } => {
                outcome.get_or_insert(decided);
            }
            Self::Leaving(_) | Self::Over => {}
        }
    }

    /// Sets the reason why this host cannot take part. The first call counts.
    pub(super) fn fail(&mut self, reason: LaunchError) {
        match self {
            Self::No => *self = Self::Decided { outcome: None, error: Some(reason) },
            Self::Decided { error, .. } => {
                error.get_or_insert(reason);
            }
            Self::Leaving(_) | Self::Over => {}
        }
    }
}

/// Request of the user that this host stops.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interruption {
    /// Last received signal.
    pub(super) signal: Signal,
    /// `true` if a signal came while the ranks were stopping.
    pub(super) is_impatient: bool,
    /// Time at which to leave without an answer of the coordinator.
    pub(super) leave_at: Option<Duration>,
}

impl Interruption {
    fn new(signal: Signal) -> Self {
        Self { signal, is_impatient: false, leave_at: None }
    }
}

/// Request to the coordinator to stop the job.
#[derive(Clone, Copy, Debug)]
pub(super) struct StopRequest {
    pub(super) signal: Signal,
    /// Number of the request, so that a repeated request is not counted twice.
    pub(super) count: u32,
}

impl AgentState {
    pub(super) fn signal(&mut self, signal: Signal) {
        match signal {
            Signal::SIGUSR1 | Signal::SIGUSR2 => self.forward(signal as i32),
            Signal::SIGTSTP => self.suspend(),
            _ => self.interrupt(signal),
        }
    }

    /// Stops the ranks of this host at once, and asks the coordinator to stop the others.
    fn interrupt(&mut self, signal: Signal) {
        let stopping = self.is_stopping();
        let asks_again = self.interruption.is_some();
        self.interruption.get_or_insert_with(|| Interruption::new(signal)).signal = signal;
        self.cancel();
        if stopping && signal == Signal::SIGINT {
            self.kill();
        } else {
            self.ask_all(signal);
        }
        let leaves = self.leaves_alone();
        // After a second request, or without an answer of the coordinator, the agent leaves without waiting for it. A
        // coordinator that only has to be informed is looked for as long as it keeps the seat.
        let hurries = if leaves { asks_again } else { stopping || self.connection.is_resuming() };
        if let Some(interruption) = &mut self.interruption {
            if hurries {
                interruption.leave_at.get_or_insert(self.now + WORD_TIMEOUT);
            }
            interruption.is_impatient |= stopping;
        }
        self.ask_to_stop(signal);
        let running = self.group.as_ref().map(super::Group::running);
        if !stopping && let Some(running) = running {
            let ranks = counted(running, "rank");
            self.say(format!(
                "{signal}: {}waiting up to {} s for {ranks} to stop; SIGINT (Ctrl-C) kills now",
                if leaves { "this host leaves the job; " } else { "" },
                self.facts.limits.shutdown_timeout().as_secs_f64(),
            ));
        }
    }

    /// Handles Ctrl-C in the terminal of a rank that has the terminal for itself: the job is to end.
    pub(super) fn typed(&mut self, local_rank: usize, signal: Signal) {
        self.explain_ending(local_rank, signal);
        if self.interruption.is_none() {
            self.interruption = Some(Interruption::new(signal));
            self.ask_to_stop(signal);
        }
    }

    fn is_stopping(&self) -> bool {
        let group_is = self.group.as_ref().is_some_and(super::Group::is_stopping);
        group_is || self.interruption.is_some() || self.output_closed
    }

    /// Handles the end of the reader of this process's output.
    pub(super) fn output_closed(&mut self) {
        if self.output_closed || self.interruption.is_some() {
            return;
        }
        self.output_closed = true;
        self.cancel();
        self.ask_all(Signal::SIGTERM);
        self.ask_to_stop(Signal::SIGPIPE);
    }

    fn suspend(&mut self) {
        if self.facts.kind == Kind::OneHost {
            self.act(Action::Suspend);
        } else {
            self.say(
                "SIGTSTP: a job on several hosts cannot be suspended, the others would consider this one \
                 lost",
            );
        }
    }

    /// Restarts the time limit for the coordinator's answer: ranks may take long to stop, and the coordinator decides
    /// what their exit statuses mean.
    pub(super) fn wait_for_answer_from_now(&mut self) {
        if let Some(leave_at) = self.interruption.as_mut().and_then(|it| it.leave_at.as_mut()) {
            *leave_at = self.now + WORD_TIMEOUT;
        }
    }

    /// Returns when to leave without an answer of the coordinator.
    pub(super) fn leave_at(&self) -> Option<Duration> {
        let waits = self.ending.outcome().is_none() || self.leaves_without_notice();
        if waits && self.group.is_none() { self.interruption?.leave_at } else { None }
    }

    /// Leaves without the coordinator's answer when the time limit has passed.
    pub(super) fn leave_when_due(&mut self) {
        if self.leave_at().is_none_or(|at| at > self.now) {
            return;
        }
        if self.leaves_without_notice() {
            self.disconnect();
        } else if let Some(Interruption { signal, .. }) = self.interruption {
            self.ending.decide(Outcome::Stopped { signal: signal as i32 });
        }
    }

    pub(super) fn begin_to_leave(&mut self, result: Result<Outcome, LaunchError>) {
        let is_impatient = self.interruption.is_some_and(|it| it.is_impatient);
        self.ending = Ending::Leaving(Leaving {
            notified: self.others_notified,
            // After an error, the other hosts still have to stop their ranks.
            end_notice: result.is_ok().then(|| self.now + self.facts.limits.end_notice()),
            limit: is_impatient.then(|| self.now + LAST_LINES),
        });
        self.draining += 1;
        self.act(Action::Report(result));
        if self.facts.forwards_output {
            self.act(Action::DropOutput);
        }
        self.act(Action::Drain);
    }

    /// Handles an event during the exit: output was written, other agents were informed, or the user sent another
    /// signal.
    pub(super) fn leaving(&mut self, event: &Event) {
        let Ending::Leaving(Leaving { mut notified, end_notice, mut limit }) = self.ending else {
            return;
        };
        match event {
            Event::Line(line) => {
                self.pass_line(line.clone());
                self.draining += 1;
                self.act(Action::Drain);
            }
            Event::Drained => self.draining = self.draining.saturating_sub(1),
            Event::OthersNotified => notified = true,
            Event::Signal(Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) => {
                limit = limit.or(Some(self.now + LAST_LINES));
            }
            _ => {}
        }
        let due = |at: Option<Duration>| at.is_some_and(|at| at <= self.now);
        notified |= due(end_notice);
        let written = self.draining == 0;
        if written && notified || due(limit) {
            self.ending = Ending::Over;
            self.act(Action::Exit { written });
        } else {
            self.ending = Ending::Leaving(Leaving { notified, end_notice, limit });
        }
    }
}

/// Time limit for the coordinator's answer after the user has interrupted the wait.
const WORD_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for writing the last lines of stopped ranks after the user has interrupted the wait.
const LAST_LINES: Duration = Duration::from_millis(500);
