//! Signals, and what else asks this host to stop.

use std::time::{Duration, Instant};

use brigade_rendezvous::FromAgent;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::getpid;

use super::{Agent, Outcome, ignored, report};
use crate::Meeting;

/// The signals that an agent waits for. Under `nohup` the end of a terminal is none of them: waiting for
/// a signal takes it although it is ignored.
pub(super) fn watched() -> SigSet {
    let mut watched: SigSet = [
        Signal::SIGCHLD,
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTSTP,
    ]
    .into_iter()
    .collect();
    if ignored::by_us(Signal::SIGHUP) {
        watched.remove(Signal::SIGHUP);
    }
    watched
}

impl Agent<'_> {
    /// The next signal, and the process that sent it.
    pub(super) fn next_signal(&self) -> Option<(Signal, i32)> {
        let info = self.signals.read_signal().ok().flatten()?;
        let signal = Signal::try_from(info.ssi_signo.cast_signed()).ok()?;
        Some((signal, info.ssi_pid.cast_signed()))
    }

    pub(super) fn take_signals(&mut self) {
        while let Some((signal, sender)) = self.next_signal() {
            match signal {
                // Of several children that end at a time the system names the first.
                Signal::SIGCHLD => self.look_for_ended(Some(sender)),
                Signal::SIGUSR1 | Signal::SIGUSR2 => self.hand_on(signal as i32),
                Signal::SIGTSTP => self.suspend(),
                _ => self.interrupt(signal),
            }
        }
    }

    /// Sends the ranks what means nothing here. Any other signal would be a mistake of whoever asks.
    pub(super) fn hand_on(&self, signal: i32) {
        if let Ok(signal @ (Signal::SIGUSR1 | Signal::SIGUSR2)) = Signal::try_from(signal) {
            self.group.iter().for_each(|group| group.send(signal));
        }
    }

    /// Stops the ranks of this host at once, and asks the coordinator to stop the others.
    fn interrupt(&mut self, signal: Signal) {
        let stopping = self.is_stopping();
        self.impatient |= stopping;
        self.interrupted = Some(signal);
        if let Some(group) = &mut self.group {
            if stopping && signal == Signal::SIGINT {
                group.kill();
            } else {
                group.stop(signal, self.plan.shutdown_timeout);
            }
        }
        if self.impatient && self.give_up.is_none() {
            self.give_up = Some(Instant::now() + WORD_TAKES);
        }
        self.ask_to_stop(signal);
        if !stopping && let Some(group) = &self.group {
            let ranks = report::count(group.running(), "rank");
            self.say(&format!(
                "{signal}: {}waiting up to {} s for {ranks} to stop; SIGINT (Ctrl-C) kills now",
                if self.leaves_alone() { "this host leaves the job; " } else { "" },
                self.plan.shutdown_timeout.as_secs_f64(),
            ));
        }
    }

    fn ask_to_stop(&mut self, signal: Signal) {
        let signal = signal as i32;
        if self.leaves_alone() {
            self.peers.send(&FromAgent::Leaving);
            self.outcome.get_or_insert(Outcome::Left { signal });
        } else if self.peers.are_met() {
            self.peers.send(&FromAgent::Interrupted { signal });
        } else {
            self.outcome.get_or_insert(Outcome::Stopped { signal });
        }
    }

    /// The job can go on without this host.
    fn leaves_alone(&self) -> bool {
        self.plan.nodes.min < self.plan.nodes.max
            && self.peers.are_met()
            && !self.peers.are_served_here()
            && matches!(self.plan.meeting, Meeting::Elastic { .. } | Meeting::Etcd { .. })
    }

    fn is_stopping(&self) -> bool {
        let group_is = self.group.as_ref().is_some_and(|group| group.is_stopping());
        group_is || self.interrupted.is_some() || self.output_closed
    }

    /// Nobody reads our output any more.
    pub(super) fn output_is_closed(&mut self) {
        if self.output_closed || self.interrupted.is_some() {
            return;
        }
        self.output_closed = true;
        if let Some(group) = &mut self.group {
            group.stop(Signal::SIGTERM, self.plan.shutdown_timeout);
        }
        self.ask_to_stop(Signal::SIGPIPE);
    }

    fn suspend(&mut self) {
        if self.plan.meeting != Meeting::OneHost || self.streamed.is_some() {
            self.say(
                "SIGTSTP: a job on several hosts cannot be suspended, the others would take \
                      this one for lost",
            );
            return;
        }
        self.group.iter().for_each(|group| group.send(Signal::SIGSTOP));
        // Returns when somebody continues this process.
        let _ = kill(getpid(), Signal::SIGSTOP);
        self.group.iter().for_each(|group| group.send(Signal::SIGCONT));
    }

    /// Leaves without the coordinator's word when that does not come.
    pub(super) fn leave_when_due(&mut self) {
        if self.group.is_none()
            && self.outcome.is_none()
            && let Some(signal) = self.interrupted
            && self.give_up.is_some_and(|at| at <= Instant::now())
        {
            self.outcome = Some(Outcome::Stopped { signal: signal as i32 });
        }
    }
}

/// How long the coordinator's word may take once the user has lost patience.
const WORD_TAKES: Duration = Duration::from_secs(2);
