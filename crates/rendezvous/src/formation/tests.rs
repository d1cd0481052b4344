//! Tests of the formation rule by rule: events in, actions out.

use super::*;
use crate::{Cause, ExitStatus, Join, RankFailure, Stream, TimeLimits};

mod admitting;
mod any_order;
mod joining;
mod leaving;
mod losing;
mod recording;
mod resuming;

/// A formation and its clock, with events and actions as text.
struct Job {
    formation: Formation,
    now: Duration,
    /// Number of the user's requests to stop.
    requests: u32,
}

const TERM: i32 = 15;
const INT: i32 = 2;

fn rules(min_nodes: usize, max_nodes: usize, max_restarts: u32) -> Rules {
    // A short timeout, so that few seconds have to pass.
    let limits = TimeLimits::new(Duration::from_secs(4), Duration::from_secs(30));
    Rules { run_id: "j".into(), min_nodes, max_nodes, max_restarts, limits, ..Rules::default() }
}

fn join(id: u64) -> Join {
    let (host, port) = (format!("h{id}"), 1000 + id as u16);
    let agent = format!("agent-{id}");
    Join { run_id: "j".into(), nproc: 2, pid: 7, agent, port, ..Join::new(&host) }
}

impl Job {
    fn new(rules: Rules) -> Self {
        Self { formation: Formation::new(rules), now: Duration::ZERO, requests: 0 }
    }

    /// Returns a job of two hosts in their first attempt.
    fn of_two(max_restarts: u32) -> Self {
        let mut job = Self::new(rules(2, 2, max_restarts));
        job.join(1, join(1));
        job.join(2, join(2));
        job
    }

    fn event(&mut self, event: Event) -> Vec<String> {
        let now = self.now;
        self.formation.handle(now, event).iter().filter_map(shown).collect()
    }

    fn lines(&mut self, event: Event) -> Vec<String> {
        let now = self.now;
        let said = |action| match action {
            Action::Say(line) => Some(line),
            _ => None,
        };
        self.formation.handle(now, event).into_iter().filter_map(said).collect()
    }

    fn join(&mut self, id: u64, join: Join) -> Vec<String> {
        let seen = Some(format!("10.0.0.{id}"));
        self.event(Event::Joined { agent: AgentId(id), join, seen, remote: true })
    }

    fn say(&mut self, id: u64, message: FromAgent) -> Vec<String> {
        self.event(Event::Message { agent: AgentId(id), message })
    }

    fn stopped(&mut self, id: u64, attempt: u32) -> Vec<String> {
        let port = 2000 + id as u16;
        self.say(id, FromAgent::Stopped { attempt, port, killed: false, stuck: None })
    }

    fn finished(&mut self, id: u64, attempt: u32) -> Vec<String> {
        self.say(id, FromAgent::Finished { attempt })
    }

    fn failed(&mut self, id: u64, at: u64, code: i32) -> Vec<String> {
        let attempt = self.formation.attempt.unwrap();
        self.say(id, FromAgent::Failed(failure(id, attempt, at, ExitStatus::Code(code))))
    }

    fn close(&mut self, id: u64) -> Vec<String> {
        let how = "the connection broke".into();
        self.event(Event::Closed { agent: AgentId(id), how })
    }

    fn interrupt(&mut self, id: u64, signal: i32) -> Vec<String> {
        self.requests += 1;
        let count = self.requests;
        self.say(id, FromAgent::Interrupted { signal, count })
    }

    /// Lets time pass. The given agents send a heartbeat every second.
    fn pass(&mut self, seconds: u64, alive: &[u64]) -> Vec<String> {
        let end = self.now + Duration::from_secs(seconds);
        let mut shown = Vec::new();
        while self.now < end {
            self.now += Duration::from_millis(500);
            for id in alive {
                shown.extend(self.event(Event::Alive { agent: AgentId(*id) }));
            }
            shown.extend(self.event(Event::Tick));
        }
        shown
    }

    fn job_result(&self) -> &JobResult {
        self.formation.job_result().expect("the job is over")
    }
}

fn failure(id: u64, attempt: u32, at: u64, exit_status: ExitStatus) -> RankFailure {
    RankFailure {
        attempt,
        rank: id as usize,
        local_rank: 0,
        host: format!("h{id}"),
        pid: 77,
        exit_status,
        at,
        last_lines: Vec::new(),
        stream: Stream::Stderr,
        error: None,
        hint: None,
        device_faults: Vec::new(),
    }
}

fn shown(action: &Action) -> Option<String> {
    Some(match action {
        Action::Say(_) | Action::Record(_) => return None,
        Action::Close(id) => format!("{}: close", id.0),
        Action::Adopt { agent, connection } => format!("{}: adopts {}", agent.0, connection.0),
        Action::Finish(job_result) => format!("finish {}", job_result.code),
        Action::Send(id, message) => {
            let text = match message {
                ToAgent::Start(part) => format!(
                    "start {} (restart {}): host {}/{} ranks {}+{}/{} at {}:{}",
                    part.attempt,
                    part.restarts,
                    part.node_rank,
                    part.num_nodes,
                    part.first_rank,
                    part.nproc,
                    part.world_size,
                    part.master_addr,
                    part.master_port,
                ),
                ToAgent::Stop { attempt, signal, reason } => {
                    format!("stop {attempt} with {signal}: {reason}")
                }
                ToAgent::Waiting { have, need } => format!("waiting {have}/{need}"),
                ToAgent::Refused { reason } => format!("refused: {reason}"),
                ToAgent::End(job_result) => format!("end {}", job_result.code),
                ToAgent::Kill => "kill".into(),
                ToAgent::Resumed => "resumed".into(),
                ToAgent::Taken { .. } | ToAgent::Signal { .. } | ToAgent::Beat => {
                    format!("{message:?}")
                }
            };
            format!("{}: {text}", id.0)
        }
    })
}
