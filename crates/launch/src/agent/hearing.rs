//! What comes from the coordinator, and what the agent makes of it.

use std::time::Instant;

use brigade_rendezvous::{FromAgent, Join, ToAgent};
use nix::sys::signal::Signal;

use super::peers::{LOOPBACK, News};
use super::{Agent, Outcome, report};
use crate::{LaunchError, Meeting};

impl Agent<'_> {
    pub(super) fn hear(&mut self, news: News) {
        match news {
            News::Say(line) => self.pass_line(&line),
            News::Met => {
                if let Err(error) = self.join() {
                    // The coordinator has no seat for this host yet, and nothing to say to it.
                    self.peers.part();
                    self.fail(error);
                }
            }
            News::Message(message) => self.obey(message),
            News::Lost { how } => self.lost(how),
            News::Failed(error) => self.fail(error),
        }
    }

    fn join(&mut self) -> Result<(), LaunchError> {
        let port = self.port.take().map_or_else(|| self.reserve(), Ok)?;
        let one_host = self.plan.meeting == Meeting::OneHost && self.streamed.is_none();
        let loopback = one_host.then(|| LOOPBACK.to_owned());
        let join = Join {
            run_id: self.plan.run_id.clone(),
            nproc: self.plan.local_world_size.as_usize(),
            node_rank: match self.plan.meeting {
                Meeting::Launcher { node_rank } | Meeting::Static { node_rank, .. } => {
                    Some(node_rank)
                }
                _ => None,
            },
            address: self.plan.local_addr.clone().or(loopback),
            port: port.number(),
            last_attempt: self.ended.as_ref().map(|ended| ended.attempt),
            last_node_rank: self.ended.as_ref().map(|ended| ended.node_rank),
            restarts: self.restarts.0,
            sent: self.peers.millis(Instant::now()),
            ..Join::new(&self.plan.host)
        };
        self.port = Some(port);
        self.peers.send(&FromAgent::Join(join));
        Ok(())
    }

    fn obey(&mut self, message: ToAgent) {
        match message {
            ToAgent::Refused { reason } => {
                self.peers.part();
                self.fail(LaunchError::Refused { reason });
            }
            ToAgent::Waiting { have, need } => {
                let text = if have < need {
                    format!("waiting for other hosts: {have} of {need} are there")
                } else {
                    "waiting to take part".to_owned()
                };
                self.pass_line(&text);
            }
            ToAgent::Start(part) => self.part = Some(part),
            ToAgent::Stop { attempt, signal, reason } => self.stop(attempt, signal, reason),
            ToAgent::Kill => {
                if let Some(group) = &mut self.group {
                    group.kill();
                }
            }
            ToAgent::Signal { signal } => self.hand_on(signal),
            ToAgent::Taken { bytes } => {
                if let Some(streamed) = &mut self.streamed {
                    streamed.taken(bytes);
                }
            }
            ToAgent::End(verdict) => {
                self.part = None;
                self.peers.part();
                let outcome =
                    if self.output_closed { Outcome::OutputClosed } else { Outcome::Over(verdict) };
                self.end_with(outcome);
            }
            ToAgent::Beat => {}
        }
    }

    fn stop(&mut self, attempt: u32, signal: i32, reason: String) {
        if let Some(group) = self.group.as_mut().filter(|group| group.part.attempt == attempt) {
            // Nobody reads the output on some host: that is no reason for the ranks of this one.
            let signal = Signal::try_from(signal).ok().filter(|s| *s != Signal::SIGPIPE);
            let signal = signal.unwrap_or(Signal::SIGTERM);
            // What the user has sent here has been forwarded already.
            let patience = self.plan.shutdown_timeout;
            if !group.is_stopping() && signal == Signal::SIGTERM {
                group.stop_others(signal, patience);
            } else if !group.was_asked(signal) {
                group.stop(signal, patience);
            }
            let running = group.running();
            self.explain(reason, running);
        } else if let Some(part) = self.part.take_if(|part| part.attempt == attempt) {
            self.skip(&part);
            self.explain(reason, 0);
        } else if self.ended.as_ref().is_some_and(|ended| ended.attempt == attempt) {
            self.explain(reason, 0);
        } else {
            return;
        }
        self.stop_asked = Some(attempt);
    }

    /// Tells the user why the ranks are stopped, where the report at the end does not do so at once.
    fn explain(&mut self, reason: String, running: usize) {
        // A launcher of several hosts says it once for all.
        let said_there = matches!(self.plan.meeting, Meeting::Launcher { .. });
        if said_there || self.interrupted.is_some() || self.output_closed {
            return;
        }
        let goes_on = self.restarts.0 < self.restarts.1 || self.hosts > 1;
        let said = self.reason.as_ref() == Some(&reason);
        let stopping = match running {
            0 => String::new(),
            _ => format!("stopping {}", report::count(running, "rank")),
        };
        match (said, running) {
            (true, 0) => {}
            (true, _) => self.say(&stopping),
            (false, 0) if goes_on => self.say(&reason),
            (false, 0) => {}
            (false, _) => self.say(&format!("{reason}; {stopping}")),
        }
        self.reason = Some(reason);
    }

    /// The connection is gone: the ranks of this host cannot go on alone.
    fn lost(&mut self, how: String) {
        (self.part, self.stop_asked) = (None, None);
        if let Some(streamed) = &mut self.streamed {
            streamed.abandon();
        }
        self.ended.iter_mut().for_each(|ended| ended.told = true);
        // A new coordinator counts the loss of the old one.
        let may_go_on =
            self.ended.is_none() && self.group.is_none() || self.restarts.0 < self.restarts.1;
        let again = may_go_on && matches!(self.plan.meeting, Meeting::Etcd { .. });
        if self.outcome.is_some() || self.error.is_some() {
            return self.stop_ranks();
        }
        if let Some(signal) = self.interrupted {
            return self.end_with(Outcome::Stopped { signal: signal as i32 });
        }
        if self.output_closed {
            return self.end_with(Outcome::OutputClosed);
        }
        if again {
            self.say(&format!(
                "the connection to the coordinator is lost: {how}; looking for the others"
            ));
            self.look_again = true;
            self.stop_ranks();
        } else {
            let coordinator = self.peers.coordinator();
            let replaceable = matches!(self.plan.meeting, Meeting::Etcd { .. });
            self.end_with(Outcome::Lost { coordinator, how, replaceable });
        }
    }

    /// The job is over as soon as nothing of it runs here.
    fn end_with(&mut self, outcome: Outcome) {
        self.outcome.get_or_insert(outcome);
        self.stop_ranks();
    }

    fn stop_ranks(&mut self) {
        if let Some(group) = self.group.as_mut().filter(|group| !group.is_stopping()) {
            group.stop(Signal::SIGTERM, self.plan.shutdown_timeout);
        }
    }

    /// Shows a line from elsewhere, once.
    pub(super) fn pass_line(&mut self, line: &str) {
        if self.reason.as_deref() != Some(line) {
            self.reason = Some(line.to_owned());
            self.say(line);
        }
    }
}
