//! Failures of an attempt, and which of them was first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use brigade_hardware::DeviceFault;
use nix::sys::signal::Signal;

use super::AgentId;
use super::member::{Clock, signed};
use crate::message::MAX_FAULTS;
use crate::{Cause, ExitStatus, JobResult, RankFailure};

/// Failures of an attempt: of ranks and of hosts, and interruptions.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// First failure of each agent's ranks. Kept when the agent is lost.
    of_ranks: BTreeMap<AgentId, (RankFailure, Clock)>,
    /// First loss of a host, with the earliest time at which the host may have failed.
    loss: Option<(i64, HostLoss)>,
    pub(super) interrupted: Option<i32>,
    /// Time since which the ranks are being stopped because hosts join or leave, without a failure. Ranks that fail
    /// later fail because the others stop.
    pub(super) membership_changed_at: Option<Duration>,
    /// Agents that were interrupted, for the last signal.
    interrupters: BTreeSet<Option<AgentId>>,
    last_signal: Option<i32>,
    /// `true` if the ranks were killed at a second request to stop.
    pub(super) killed: bool,
    /// `true` if ranks were stopped before they had ended by themselves.
    pub(super) cut_short: bool,
}

/// Loss of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostLoss {
    pub(super) host: String,
    pub(super) how: String,
}

/// Time at which a lost host was last known to be alive.
#[derive(Clone, Copy, Debug)]
pub(super) enum LastSeen {
    /// The connection broke at this time.
    Disconnected(Duration),
    /// The host has been silent since this time.
    Silent(Duration),
    /// The host was alive at this time, but did not do what was requested.
    Unresponsive(Duration),
}

/// Kind of an interruption, in relation to the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interruption {
    /// The first signal, or a different one.
    New,
    /// The same signal on another host, because a scheduler sends it to all hosts.
    Echo,
    /// A further signal of the same user.
    Again,
}

impl Failures {
    pub(super) fn interrupt(&mut self, signal: i32, by: Option<AgentId>) -> Interruption {
        let known = !self.interrupters.insert(by);
        let same = self.last_signal.replace(signal) == Some(signal);
        match (known, same) {
            (true, _) => Interruption::Again,
            (false, true) => Interruption::Echo,
            (false, false) => Interruption::New,
        }
    }

    pub(super) fn fail(&mut self, agent: AgentId, mut failure: RankFailure, clock: Clock) {
        match self.of_ranks.get_mut(&agent) {
            Some((known, _)) if known.at <= failure.at => {
                add_faults(known, &failure.device_faults);
            }
            known => {
                if let Some((known, _)) = known {
                    add_faults(&mut failure, &known.device_faults);
                }
                self.of_ranks.insert(agent, (failure, clock));
            }
        }
    }

    /// Replaces the estimate of an agent's clock by a more exact one.
    pub(super) fn set_clock(&mut self, agent: AgentId, clock: Clock) {
        if let Some((_, known)) = self.of_ranks.get_mut(&agent) {
            *known = clock;
        }
    }

    pub(super) fn lose(&mut self, agent: AgentId, loss: HostLoss, last_seen: LastSeen) {
        let mut since = match last_seen {
            // The ranks of other hosts detect the loss of a host at the same time, and may be reported earlier.
            LastSeen::Disconnected(now) => signed(now.as_millis()).saturating_sub(NEWS_TIMEOUT),
            LastSeen::Silent(heard) => signed(heard.as_millis()),
            LastSeen::Unresponsive(now) => signed(now.as_millis()),
        };
        if let Some((failure, clock)) = self.of_ranks.get(&agent) {
            // The host was still connected and could report what had failed before.
            since = since.max(clock.ours(failure.at).saturating_add(1));
        }
        if self.loss.as_ref().is_none_or(|(known, _)| since < *known) {
            self.loss = Some((since, loss));
        }
    }

    /// Returns the first cause: the failure of a rank or the loss of a host.
    pub(super) fn first(&self) -> Option<Cause> {
        let change = self.membership_changed_at.map(|since| signed(since.as_millis()));
        let failure = self.first_failure(|_| true);
        let failure = failure.filter(|(at, _)| change.is_none_or(|change| *at < change));
        match (&self.loss, failure) {
            (Some((since, _)), Some((at, failure))) if at < *since => Some(Cause::Failed(failure)),
            (Some((_, HostLoss { host, how })), _) => {
                Some(Cause::HostLost { host: host.clone(), how: how.clone() })
            }
            (None, Some((_, failure))) => Some(Cause::Failed(failure)),
            (None, None) => None,
        }
    }

    /// Returns the result of a job that this signal has stopped.
    pub(super) fn interrupted_by(&self, signal: i32) -> JobResult {
        let unexplained = |exit_status| {
            exit_status != ExitStatus::Signal(signal)
                && exit_status != ExitStatus::Code(128 | (signal & 0x7f))
        };
        let failure = self.first_failure(unexplained).map(|(_, failure)| failure);
        let code = match &failure {
            // The reader of some host's output has ended, so the further output of its ranks is unknown.
            _ if signal == Signal::SIGPIPE as i32 => ExitStatus::Signal(signal).exit_code(),
            Some(failure) => code_of(failure),
            None if self.loss.is_none() && !self.cut_short && self.of_ranks.is_empty() => 0,
            None => ExitStatus::Signal(signal).exit_code(),
        };
        JobResult { code, cause: Some(Cause::Interrupted { signal, failure }) }
    }

    fn first_failure(&self, counts: impl Fn(ExitStatus) -> bool) -> Option<(i64, RankFailure)> {
        let (failure, clock) = self
            .of_ranks
            .values()
            .filter(|(failure, _)| counts(failure.exit_status))
            .min_by_key(|(failure, clock)| clock.ours(failure.at))?;
        let mut first = failure.clone();
        // The failure of a rank with a broken device may be reported later than those of ranks that wait for it.
        for (other, _) in self.of_ranks.values() {
            add_faults(&mut first, &other.device_faults);
        }
        Some((clock.ours(failure.at), first))
    }
}

/// Adds faults of devices that it does not have yet; a later report of one has the larger count.
fn add_faults(failure: &mut RankFailure, faults: &[DeviceFault]) {
    let all = &mut failure.device_faults;
    for fault in faults {
        let same = |known: &&mut DeviceFault| {
            (&known.host, &known.device, &known.fault) == (&fault.host, &fault.device, &fault.fault)
        };
        if let Some(known) = all.iter_mut().find(same) {
            known.count = known.count.max(fault.count);
        } else if all.len() < MAX_FAULTS {
            all.push(fault.clone());
        }
    }
}

/// Returns the result of a job that ends because of this.
pub(super) fn job_result(cause: Cause) -> JobResult {
    let code = match &cause {
        Cause::Failed(failure) => code_of(failure),
        Cause::Interrupted { signal, .. } => ExitStatus::Signal(*signal).exit_code(),
        Cause::HostLost { .. } | Cause::TooFewHosts { .. } => 1,
    };
    JobResult { code, cause: Some(cause) }
}

/// Returns the exit code of a failure, which is never 0, whatever the agent has reported.
fn code_of(failure: &RankFailure) -> u8 {
    failure.exit_status.exit_code().max(1)
}

/// Returns the signal, or a valid one in place of a number that is not a signal.
pub(super) fn checked(signal: i32) -> i32 {
    if (1..=64).contains(&signal) { signal } else { Signal::SIGTERM as i32 }
}

/// Returns the signal's name, or its number.
pub(super) fn name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |known| known.to_string())
}

/// Maximum delay, in milliseconds, of the report that a connection broke behind the reports of its consequences.
const NEWS_TIMEOUT: i64 = 1_000;
