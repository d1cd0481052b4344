//! Signals, readers that go, and how an agent leaves.

use std::time::Duration;

use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;

use super::event::{Action, Event};
use super::{AgentState, Kind};
use crate::LaunchError;
use crate::agent::Outcome;

/// How far an agent has come with leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shutdown {
    No,
    /// It has said how the job ended; output may still have to be written, and other hosts may have
    /// to be told by a coordinator in this process.
    Begun {
        /// They have been told.
        told: bool,
        /// Until when that is waited for; `None`: as long as it takes.
        end_notice: Option<Duration>,
        /// Until when output is waited for; `None`: as long as it takes.
        limit: Option<Duration>,
    },
    Over,
}

impl Shutdown {
    pub(super) fn is_begun(self) -> bool {
        self != Self::No
    }

    pub(super) fn deadline(self) -> Option<Duration> {
        match self {
            Self::Begun { told, end_notice, limit } => {
                end_notice.filter(|_| !told).into_iter().chain(limit).min()
            }
            Self::No | Self::Over => None,
        }
    }
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
        let asks_again = self.interrupted.replace(signal).is_some();
        self.cancel();
        if stopping && signal == Signal::SIGINT {
            self.kill();
        } else {
            self.ask_all(signal);
        }
        let leaves = self.leaves_alone();
        // A second request, or a coordinator that does not answer, is reason enough to leave
        // without its word. One that has only to be told is looked for as long as it keeps the seat.
        let hurries = if leaves { asks_again } else { stopping || self.connection.is_resuming() };
        if hurries {
            self.give_up.get_or_insert(self.now + WORD_TIMEOUT);
        }
        self.impatient |= stopping;
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

    /// A rank that has the terminal for itself was interrupted there: the user wants the job to end.
    pub(super) fn typed(&mut self, local_rank: usize, signal: Signal) {
        self.explain_ending(local_rank, signal);
        if self.interrupted.is_none() {
            self.interrupted = Some(signal);
            self.ask_to_stop(signal);
        }
    }

    fn is_stopping(&self) -> bool {
        let group_is = self.group.as_ref().is_some_and(super::Group::is_stopping);
        group_is || self.interrupted.is_some() || self.output_closed
    }

    /// The reader of our output has gone.
    pub(super) fn output_closed(&mut self) {
        if self.output_closed || self.interrupted.is_some() {
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
                "SIGTSTP: a job on several hosts cannot be suspended, the others would take this \
                 one for lost",
            );
        }
    }

    /// Ranks may take long to stop, and what they have done is the coordinator's to judge.
    pub(super) fn wait_for_word_from_now(&mut self) {
        self.give_up = self.give_up.map(|_| self.now + WORD_TIMEOUT);
    }

    pub(super) fn give_up_at(&self) -> Option<Duration> {
        let waits = self.outcome.is_none() || self.leaves_untold();
        self.give_up.filter(|_| self.group.is_none() && waits)
    }

    /// Leaves without the coordinator's word when that does not come.
    pub(super) fn leave_when_due(&mut self) {
        if self.give_up_at().is_none_or(|at| at > self.now) {
            return;
        }
        if self.leaves_untold() {
            self.disconnect();
        } else if let Some(signal) = self.interrupted {
            self.outcome = Some(Outcome::Stopped { signal: signal as i32 });
        }
    }

    pub(super) fn begin_to_leave(&mut self, result: Result<Outcome, LaunchError>) {
        self.shutdown = Shutdown::Begun {
            told: self.others_told,
            // After an error the others have still to stop their ranks.
            end_notice: result.is_ok().then(|| self.now + self.facts.limits.end_notice()),
            limit: self.impatient.then(|| self.now + LAST_LINES),
        };
        self.draining += 1;
        self.act(Action::Report(result));
        if self.facts.forwards_output {
            self.act(Action::DropOutput);
        }
        self.act(Action::Drain);
    }

    /// What happens while it leaves: output is written, others are told, a user loses patience.
    pub(super) fn leaving(&mut self, event: &Event) {
        let Shutdown::Begun { mut told, end_notice, mut limit } = self.shutdown else { return };
        match event {
            Event::Drained => self.draining = self.draining.saturating_sub(1),
            Event::OthersTold => told = true,
            Event::Signal(Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) => {
                limit = limit.or(Some(self.now + LAST_LINES));
            }
            _ => {}
        }
        let due = |at: Option<Duration>| at.is_some_and(|at| at <= self.now);
        told |= due(end_notice);
        self.shutdown = Shutdown::Begun { told, end_notice, limit };
        let written = self.draining == 0;
        if written && told || due(limit) {
            self.shutdown = Shutdown::Over;
            self.act(Action::Exit { written });
        }
    }
}

/// How long the coordinator's word may take once the user has lost patience.
const WORD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the last lines of stopped ranks may take to be written once the user has lost patience.
const LAST_LINES: Duration = Duration::from_millis(500);
