//! Which hosts take part in a job, with which ranks, and when an attempt starts, stops and counts: the
//! decision alone, without clock and network.

mod admission;
mod event;
mod failures;
mod gathering;
mod member;
mod record;
mod rules;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use brigade_rank_env::text::counted;
use nix::sys::signal::Signal;

use crate::{Cause, ExitStatus, FromAgent, JobResult, Join, PROTOCOL, RankFailure, ToAgent};

pub use event::{Action, AgentId, Event};
pub use record::{CauseKind, HostPart, JobCause, JobEvent, Record};
pub use rules::Rules;

use admission::{Admission, JOINED_LATELY};
use failures::{Failures, HostLoss, Interruption, LastSeen};
use gathering::Gathering;
use member::{Away, Clock, Member, Part};
use rules::MAX_RANKS_PER_HOST;

/// The coordinator's decision.
///
/// Tell it what happens and when, do what it says, and call it again with [`Event::Tick`] when
/// [`Formation::deadline`] has come. Time is whatever clock the caller has, from any start.
///
/// ```
/// use std::time::Duration;
/// use brigade_rendezvous::{Action, AgentId, Event, Formation, Join, Rules, ToAgent};
///
/// let mut formation = Formation::new(Rules { run_id: "night".into(), ..Rules::default() });
/// let join = Join {
///     run_id: "night".into(), nproc: 4, port: 29_500, ..Join::new("node1")
/// };
/// let joined = Event::Joined { agent: AgentId(1), join, seen: None, remote: false };
/// let actions = formation.handle(Duration::ZERO, joined);
/// let Some(Action::Send(AgentId(1), ToAgent::Start(part))) = actions.last() else { panic!() };
/// assert_eq!((part.world_size, part.num_nodes), (4, 1));
/// ```
#[derive(Debug)]
pub struct Formation {
    rules: Rules,
    now: Duration,
    members: BTreeMap<AgentId, Member>,
    /// Connections that are being made.
    expected: BTreeMap<AgentId, String>,
    /// How many agents have been expected or have come, in all.
    announced: usize,
    /// How many have come.
    joins: u64,
    /// How many members wait for a node rank that another one has.
    duplicates: usize,
    state: State,
    /// The last attempt that has been started.
    attempt: Option<u32>,
    next_attempt: u32,
    restarts: u32,
    failures: Failures,
    admission: Admission,
    /// The last order to stop the present attempt, for agents that may not have received it.
    last_stop: Option<(i32, String)>,
    /// Some host has ranks that SIGKILL does not end.
    stuck: bool,
    /// No member can have been silent for too long before this.
    next_look: Duration,
    actions: Vec<Action>,
}

#[derive(Debug)]
enum State {
    Gathering(Gathering),
    Running,
    /// Until the agents have stopped, or this moment.
    Stopping(Duration),
    Over(JobResult),
}

impl Formation {
    /// A job without members.
    #[must_use]
    pub fn new(mut rules: Rules) -> Self {
        rules.min_nodes = rules.min_nodes.max(1);
        rules.max_nodes = rules.max_nodes.max(rules.min_nodes);
        Self {
            rules,
            now: Duration::ZERO,
            members: BTreeMap::new(),
            expected: BTreeMap::new(),
            announced: 0,
            joins: 0,
            duplicates: 0,
            state: State::Gathering(Gathering::first(Duration::ZERO)),
            attempt: None,
            next_attempt: 0,
            restarts: 0,
            failures: Failures::default(),
            admission: Admission::default(),
            last_stop: None,
            stuck: false,
            next_look: Duration::MAX,
            actions: Vec::new(),
        }
    }

    /// Takes in what happened at `now`, and says what is to be done, in order.
    #[must_use]
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if let Event::Heard { agent } | Event::Said { agent, .. } = &event {
            self.heard(*agent);
        }
        let idle = matches!(
            event,
            Event::Heard { .. } | Event::Said { message: FromAgent::Beat { .. }, .. }
        );
        match event {
            Event::Expected { agent, .. } if self.job_result().is_some() => {
                self.actions.push(Action::Close(agent));
            }
            Event::Expected { agent, host } => {
                self.announced += 1;
                self.expected.insert(agent, host);
            }
            Event::Joined { agent, join, seen, remote } => self.joined(agent, join, seen, remote),
            Event::Said { agent, message } => self.said(agent, message),
            Event::Closed { agent, how } => self.closed(agent, how),
            Event::Disconnected { agent, how, reset } => self.disconnected(agent, how, reset),
            Event::Interrupt { signal } => self.interrupt(failures::checked(signal), None),
            Event::Heard { .. } | Event::Tick => {}
        }
        self.look_for_silent();
        let due = self.deadline().is_some_and(|deadline| deadline <= self.now);
        // A thousand agents beat a thousand times a second: what follows is not done for a beat.
        if !idle || due || !self.actions.is_empty() {
            self.look_for_stuck();
            self.advance();
            self.plan_admission();
        }
        mem::take(&mut self.actions)
    }

    /// When to call again with [`Event::Tick`], if nothing else happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let own = match &self.state {
            State::Gathering(gathering) => {
                let deadline = gathering.deadline(&self.rules);
                Some(deadline).filter(|_| !self.waits_for_absent())
            }
            State::Running => self.admission.due,
            State::Over(_) => None,
            State::Stopping(until) => {
                Some(*until).filter(|_| self.members.values().any(|it| self.may_be_stuck(it)))
            }
        };
        let look = (self.next_look < Duration::MAX).then_some(self.next_look);
        own.into_iter().chain(look).min()
    }

    /// How the job ended, once it has.
    #[must_use]
    pub fn job_result(&self) -> Option<&JobResult> {
        match &self.state {
            State::Over(job_result) => Some(job_result),
            _ => None,
        }
    }

    /// The job is over, and some agents have no connection over which they could be told. They are
    /// waited for as long as they would wait for the coordinator.
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.job_result().is_some() && self.members.values().any(|member| member.away.is_some())
    }

    fn joined(&mut self, agent: AgentId, join: Join, seen: Option<String>, remote: bool) {
        let seat = self.seat_of(&join).filter(|_| join.last_attempt.is_none());
        match (join.resume, seat) {
            // Its first request was lost on its way: it has had no part, and is new here.
            (1.., None) if join.last_attempt.is_none() => {}
            (1.., _) => return self.resumes(agent, &join),
            // That first request, which was only slow.
            (0, Some(seat)) if self.members[&seat].resumes > 0 => {
                return self.actions.push(Action::Close(agent));
            }
            (0, _) => {}
        }
        if self.expected.remove(&agent).is_none() {
            self.announced += 1;
        }
        if self.members.contains_key(&agent) {
            return self.lose(agent, "it joined twice".into(), LastSeen::Unresponsive(self.now));
        }
        if let Some(reason) = self.refusal(&join) {
            return self.refuse(agent, &join.host, reason);
        }
        let duplicate_of = join.node_rank.and_then(|wanted| {
            let holds = |member: &Member| member.join.node_rank == Some(wanted);
            self.members.iter().find(|(_, member)| holds(member)).map(|(id, _)| *id)
        });
        if let Some(duplicate_of) = duplicate_of
            && !self.members[&duplicate_of].remote
        {
            let reason = self.taken(&join, duplicate_of);
            return self.refuse(agent, &join.host, reason);
        }
        let mut clock = Clock::default();
        clock.compare(self.now, join.sent);
        if let Some(last) = join.last_attempt {
            self.next_attempt = self.next_attempt.max(last + 1);
        }
        self.joins += 1;
        if join.resume > 0 {
            self.send(agent, ToAgent::Resumed);
        }
        let member = Member {
            resumes: join.resume,
            seen,
            remote,
            order: self.joins,
            joined: self.now,
            previous_member: false,
            duplicate_of,
            part: Part::Idle,
            assignment: None,
            ranks: Vec::new(),
            requests: 0,
            stuck: None,
            away: None,
            quiet: false,
            heard: self.now,
            clock,
            join,
        };
        if remote {
            let quiet = self.now.saturating_add(self.rules.limits.quiet());
            self.next_look = self.next_look.min(quiet);
        }
        self.members.insert(agent, member);
        if duplicate_of.is_none() {
            self.arrived(agent);
        } else {
            self.duplicates += 1;
        }
    }

    /// An agent that has lost its connection, or has found it silent, comes over a new one.
    ///
    /// What was on its way to it may be lost, so that it is told again; it does the same. Both sides
    /// take no notice of what they know.
    fn resumes(&mut self, connection: AgentId, join: &Join) {
        if let Some(reason) = self.foreign(join) {
            return self.refuse(connection, &join.host, reason);
        }
        let attempt = self.attempt;
        let seat = self.seat_of(join).filter(|_| join.last_attempt <= attempt);
        let Some((id, member)) = seat.and_then(|id| Some((id, self.members.get_mut(&id)?))) else {
            let reason =
                format!("{} (pid {}) has no seat here: it was taken for lost", join.host, join.pid);
            return self.refuse(connection, &join.host, reason);
        };
        if join.resume <= member.resumes {
            // It was late, and another connection came before it.
            self.actions.push(Action::Close(connection));
            return;
        }
        member.resumes = join.resume;
        let was_told = member.away.take().is_some() | mem::take(&mut member.quiet);
        member.heard = self.now;
        member.clock.compare(self.now, join.sent);
        let (part, port) = (member.part, join.port);
        let quiet = self.now.saturating_add(self.rules.limits.quiet());
        self.next_look = self.next_look.min(quiet);
        if part == Part::Idle {
            member.join.port = port;
        }
        let start = member.assignment.clone().filter(|_| join.last_attempt != attempt);
        self.actions.push(Action::Adopt { agent: id, connection });
        if was_told && !matches!(self.state, State::Over(_)) {
            self.say(format!("{} is connected again", join.host));
        }
        self.send(id, ToAgent::Resumed);
        match (&self.state, part) {
            (State::Over(job_result), _) => {
                let job_result = job_result.clone();
                self.members.remove(&id);
                self.send(id, ToAgent::End(job_result));
                self.actions.push(Action::Close(id));
            }
            (State::Running, Part::Running) => {
                if let Some(start) = start {
                    self.send(id, ToAgent::Start(start));
                }
            }
            // It has not even heard of the attempt that is being stopped.
            (State::Stopping(_), Part::Stopping { .. }) if start.is_some() => {
                self.stopped(id, port, false, None);
            }
            (State::Stopping(_), Part::Stopping { .. }) => self.stop_again(id),
            _ => {}
        }
    }

    /// The member that this agent is already.
    fn seat_of(&self, join: &Join) -> Option<AgentId> {
        let is_it = |member: &Member| {
            member.remote && !join.agent.is_empty() && member.join.agent == join.agent
        };
        self.members.iter().find(|(_, member)| is_it(member)).map(|(id, _)| *id)
    }

    /// Why this agent does not belong here.
    fn foreign(&self, join: &Join) -> Option<String> {
        let host = &join.host;
        if join.protocol != PROTOCOL {
            return Some(format!(
                "{host} has brigade {} (protocol {}), the coordinator has {} (protocol \
                 {PROTOCOL}): install the same version on all hosts",
                join.version,
                join.protocol,
                env!("CARGO_PKG_VERSION"),
            ));
        }
        if join.run_id != self.rules.run_id {
            return Some(format!(
                "{host} takes part in another job: give the same --rdzv-id on all hosts, or another \
                 endpoint to one of the jobs"
            ));
        }
        None
    }

    /// Why this agent cannot take part, whatever the others do.
    fn refusal(&self, join: &Join) -> Option<String> {
        let foreign = self.foreign(join);
        if foreign.is_some() {
            return foreign;
        }
        let host = &join.host;
        if let State::Over(job_result) = &self.state {
            return Some(format!("the job is over (exit code {})", job_result.code));
        }
        if self.is_ending() {
            return Some("the job is ending".into());
        }
        if let Some(wanted) = join.node_rank
            && wanted >= self.rules.max_nodes
        {
            return Some(format!(
                "{host} has node rank {wanted}, but with {} the highest is {}",
                counted(self.rules.max_nodes, "host"),
                self.rules.max_nodes - 1,
            ));
        }
        if join.nproc == 0 || join.nproc > MAX_RANKS_PER_HOST {
            return Some(format!(
                "{host} would start {} ranks; a host starts 1 to {MAX_RANKS_PER_HOST}",
                join.nproc,
            ));
        }
        // Numbers go up from there, and none is used twice.
        (join.last_attempt.is_some_and(|last| last > u32::MAX / 2)).then(|| {
            format!("{host} cannot have seen attempt {}", join.last_attempt.unwrap_or_default())
        })
    }

    fn taken(&self, join: &Join, duplicate_of: AgentId) -> String {
        let other = &self.members[&duplicate_of].join;
        format!(
            "{} (pid {}) has node rank {} already; {} (pid {}) needs another --node-rank",
            other.host,
            other.pid,
            other.node_rank.unwrap_or_default(),
            join.host,
            join.pid,
        )
    }

    fn refuse(&mut self, agent: AgentId, host: &str, reason: String) {
        if self.members.remove(&agent).is_some_and(|member| member.duplicate_of.is_some()) {
            self.duplicates -= 1;
        }
        if let State::Gathering(gathering) = &mut self.state {
            let how = format!("it was refused: {reason}");
            gathering.loss = Some(HostLoss { host: host.into(), how });
        }
        self.say(format!("refused {host}: {reason}"));
        self.send(agent, ToAgent::Refused { reason });
        self.actions.push(Action::Close(agent));
    }

    /// A host is there on which the job can count.
    fn arrived(&mut self, agent: AgentId) {
        let Join { host, nproc, .. } = self.members[&agent].join.clone();
        self.record(JobEvent::Join { host: host.clone(), nproc });
        match self.state {
            State::Gathering(_) => {
                // Where all come at once, the order of arrival is not reported.
                if self.rules.late_hosts {
                    let (present, wanted) = (self.present(), self.rules.wanted());
                    self.say(format!("{host} joined: {present} of {wanted}"));
                }
                self.advance();
            }
            State::Running => {
                let wait = self.admission_wait();
                let is_new = self.members[&agent].is_new();
                if self.has_room() && !is_new {
                    self.calm_stop(format!("{host} joins"));
                } else if self.has_room() && wait.is_zero() {
                    self.admit(format!("{host} joins"));
                } else if self.has_room() {
                    self.say(format!(
                        "{host} waits {} s before it joins: {JOINED_LATELY}",
                        wait.as_secs_f64().ceil()
                    ));
                } else {
                    self.say(format!("{host} waits: it may take the place of a host that is lost"));
                }
            }
            State::Stopping(_) | State::Over(_) => {}
        }
        let waits = self.members.get(&agent).is_some_and(|member| !member.takes_part())
            && !matches!(self.state, State::Over(_));
        if waits && self.rules.late_hosts {
            let (have, need) = (self.present(), self.rules.min_nodes);
            self.send(agent, ToAgent::Waiting { have, need });
        }
    }

    /// The node rank of a lost host goes to the first one that waits for it.
    fn hand_over_seat(&mut self, lost: AgentId) {
        let waits = |(_, member): &(&AgentId, &Member)| member.duplicate_of == Some(lost);
        let successor = self.members.iter().filter(waits).min_by_key(|(_, member)| member.order);
        let Some(successor) = successor.map(|(id, _)| *id) else { return };
        for (id, member) in &mut self.members {
            if member.duplicate_of == Some(lost) {
                member.duplicate_of = (*id != successor).then_some(successor);
            }
        }
        self.duplicates -= 1;
        self.arrived(successor);
    }

    /// It is alive.
    fn heard(&mut self, agent: AgentId) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.heard = self.now;
        if mem::take(&mut member.quiet) {
            let line = format!("{} is heard again", member.join.host);
            self.say(line);
        }
        if self.duplicates == 0 || matches!(self.state, State::Over(_)) {
            return;
        }
        // So a host that asked for its node rank in the meantime is refused.
        let vain = |(_, member): &(&AgentId, &Member)| {
            member.duplicate_of == Some(agent) && member.joined < self.now
        };
        let duplicates: Vec<_> = self.members.iter().filter(vain).map(|(id, _)| *id).collect();
        for duplicate_of in duplicates {
            let join = self.members[&duplicate_of].join.clone();
            let reason = self.taken(&join, agent);
            self.refuse(duplicate_of, &join.host, reason);
        }
    }

    fn said(&mut self, agent: AgentId, message: FromAgent) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        let Some(member) = self.members.get_mut(&agent) else { return };
        let attempt = self.attempt;
        match message {
            FromAgent::Beat { sent } => {
                member.clock.compare(self.now, sent);
                self.failures.set_clock(agent, member.clock);
            }
            FromAgent::Failed(failure)
                if Some(failure.attempt) == attempt && member.takes_part() =>
            {
                self.failed(agent, failure);
            }
            FromAgent::Finished { attempt: of } if Some(of) == attempt => match &mut member.part {
                part @ Part::Running => *part = Part::Finished,
                Part::Stopping { finished } => *finished = true,
                Part::Idle | Part::Finished => {}
            },
            FromAgent::Stopped { attempt: of, port, killed, stuck } if Some(of) == attempt => {
                self.stopped(agent, port, killed, stuck);
            }
            FromAgent::Interrupted { signal, count } => {
                // Else it is one of before, sent again after a break.
                if count > member.requests {
                    member.requests = count;
                    self.interrupt(failures::checked(signal), Some(agent));
                }
            }
            FromAgent::Leaving => self.leaves(agent),
            FromAgent::Unable { reason } => {
                self.lose(agent, reason, LastSeen::Unresponsive(self.now));
            }
            FromAgent::Join(_) => {
                self.lose(agent, "it joined twice".into(), LastSeen::Unresponsive(self.now));
            }
            FromAgent::Started { attempt: of, pids, at } if Some(of) == attempt => {
                self.ranks_started(agent, pids, at);
            }
            FromAgent::Exited { attempt: of, local_rank, exit_status, at }
                if Some(of) == attempt =>
            {
                self.rank_exited(agent, local_rank, exit_status, at);
            }
            // Of an earlier attempt; or nothing to decide.
            FromAgent::Failed(_)
            | FromAgent::Started { .. }
            | FromAgent::Exited { .. }
            | FromAgent::Finished { .. }
            | FromAgent::Stopped { .. }
            | FromAgent::Output { .. }
            | FromAgent::Progress { .. }
            | FromAgent::Say { .. } => {}
        }
    }

    fn closed(&mut self, agent: AgentId, how: String) {
        if matches!(self.state, State::Over(_)) {
            // It has been told, or will not come back to hear of it.
            self.members.remove(&agent);
        } else if let Some(host) = self.expected.remove(&agent) {
            self.gone(HostLoss { host, how });
        } else if self.members.contains_key(&agent) {
            self.lose(agent, how, LastSeen::Disconnected(self.now));
        }
    }

    /// The connection to an agent broke. Its seat is kept: a cut is mended, or a gateway has
    /// forgotten the connection, and the agent comes back.
    fn disconnected(&mut self, agent: AgentId, how: String, reset: bool) {
        let (now, limits) = (self.now, self.rules.limits);
        let Some(member) = self.members.get_mut(&agent).filter(|member| member.remote) else {
            return self.closed(agent, how);
        };
        let lost_at = member.heard.saturating_add(limits.heartbeat_timeout());
        let until = if reset { lost_at.min(now + limits.reset()) } else { lost_at };
        let over = matches!(self.state, State::Over(_));
        if member.away.is_some() || until <= now || over {
            return self.closed(agent, how);
        }
        let host = member.join.host.clone();
        if !reset {
            let seconds = (until - now).as_secs();
            self.say(format!(
                "the connection to {host} broke: {how}; its place is kept for {seconds} s"
            ));
        }
        if let Some(member) = self.members.get_mut(&agent) {
            member.away = Some(Away { until, how });
        }
        self.next_look = self.next_look.min(until);
    }

    /// Tells the user of members that are silent, and takes out those that are for too long.
    fn look_for_silent(&mut self) {
        if self.now < self.next_look {
            return;
        }
        let (now, limits) = (self.now, self.rules.limits);
        let timeout = limits.heartbeat_timeout();
        let remote = self.members.iter_mut().filter(|(_, member)| member.remote);
        let (mut silent, mut lines) = (Vec::new(), Vec::new());
        let over = matches!(self.state, State::Over(_));
        for (id, member) in remote {
            if member.lost_at(timeout) <= now {
                silent.push(*id);
            } else if !member.quiet
                && member.away.is_none()
                && member.heard.saturating_add(limits.quiet()) <= now
            {
                member.quiet = true;
                lines.push(format!(
                    "nothing was heard of {} for {} s; it is lost after {} s",
                    member.join.host,
                    limits.quiet().as_secs_f64(),
                    timeout.as_secs_f64(),
                ));
            }
        }
        if over {
            // Those that are connected have been told.
            self.members.retain(|id, _| !silent.contains(id));
        } else {
            lines.into_iter().for_each(|line| self.say(line));
            for id in silent {
                let Some(member) = self.members.get(&id) else { continue };
                let heard = member.heard;
                let how = match &member.away {
                    Some(away) => format!("{}, and it did not come back", away.how),
                    None => format!("nothing was heard of it for {} s", timeout.as_secs_f64()),
                };
                self.lose(id, how, LastSeen::Silent(heard));
            }
        }
        let watched = |member: &&Member| member.remote && (!over || member.away.is_some());
        let next = self.members.values().filter(watched).map(|member| {
            let quiet = member.heard.saturating_add(limits.quiet());
            let is_told = member.quiet || member.away.is_some();
            if is_told { member.lost_at(timeout) } else { quiet.min(member.lost_at(timeout)) }
        });
        self.next_look = next.min().unwrap_or(Duration::MAX);
    }

    /// It is to stop, and is given up where it does not in time. One that is away is waited for as
    /// long as its seat is kept, but not by a user who waits.
    fn may_be_stuck(&self, member: &Member) -> bool {
        let is_waited_for = member.away.is_some() && !self.failures.killed;
        matches!(member.part, Part::Stopping { .. }) && !is_waited_for
    }

    fn look_for_stuck(&mut self) {
        let State::Stopping(until) = self.state else { return };
        if self.now < until {
            return;
        }
        let stuck = self.members.iter().filter(|(_, member)| self.may_be_stuck(member));
        let ids = stuck.map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            self.lose(id, "it did not stop its ranks".into(), LastSeen::Unresponsive(self.now));
        }
    }

    fn failed(&mut self, agent: AgentId, failure: RankFailure) {
        let Some(member) = self.members.get_mut(&agent) else { return };
        member.clock.compare(self.now, failure.at);
        let clock = member.clock;
        self.failures.set_clock(agent, clock);
        let reason = self.with_restart(failure.summary());
        self.failures.fail(agent, failure, clock);
        if matches!(self.state, State::Running) {
            self.stop(Signal::SIGTERM as i32, reason);
        }
    }

    fn stopped(&mut self, agent: AgentId, port: u16, killed: bool, stuck: Option<String>) {
        self.stuck |= stuck.is_some();
        let Some(member) = self.members.get_mut(&agent) else { return };
        match member.part {
            Part::Stopping { finished } => {
                member.part = Part::Idle;
                member.join.port = port;
                member.stuck = stuck;
                self.failures.cut_short |= killed || !finished;
            }
            Part::Running | Part::Finished => {
                let how = "it stopped its ranks without being told to".into();
                self.lose(agent, how, LastSeen::Unresponsive(self.now));
            }
            Part::Idle => {}
        }
    }

    /// Takes a member out: it is no longer there, or no longer to be trusted.
    fn lose(&mut self, agent: AgentId, how: String, last_seen: LastSeen) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        if !matches!(last_seen, LastSeen::Disconnected(_)) {
            self.actions.push(Action::Close(agent));
        }
        let loss = HostLoss { host: member.join.host, how };
        if member.part != Part::Idle {
            let (host, reason) = (loss.host.clone(), loss.how.clone());
            self.record(JobEvent::Leave { host, reason });
        }
        match member.part {
            Part::Idle => self.gone(loss),
            Part::Running => {
                let reason = self.with_restart(format!("{} is lost: {}", loss.host, loss.how));
                self.failures.lose(agent, loss, last_seen);
                self.stop(Signal::SIGTERM as i32, reason);
            }
            Part::Stopping { finished: false } => {
                self.say(format!("{} is lost: {}", loss.host, loss.how));
                self.failures.lose(agent, loss, last_seen);
            }
            // Its work is done.
            Part::Finished | Part::Stopping { finished: true } => {}
        }
        self.hand_over_seat(agent);
    }

    /// A host goes as it should: what its ranks leave undone does not count as a failure.
    fn leaves(&mut self, agent: AgentId) {
        let Some(member) = self.members.remove(&agent) else { return };
        if member.duplicate_of.is_some() {
            self.duplicates -= 1;
        }
        self.actions.push(Action::Close(agent));
        let host = member.join.host.clone();
        self.record(JobEvent::Leave { host, reason: "its launcher was stopped".into() });
        let line = format!("{} leaves", member.join.host);
        if member.part == Part::Running {
            self.calm_stop(line);
        } else {
            self.say(line);
        }
        self.hand_over_seat(agent);
    }

    /// Stops the attempt for another with other hosts; nothing has failed.
    fn calm_stop(&mut self, reason: String) {
        if matches!(self.state, State::Running) {
            self.failures.calm_since = Some(self.now);
            self.stop(Signal::SIGTERM as i32, reason);
        } else {
            self.say(reason);
        }
    }

    /// What the user is told about a failure: whether the job starts again.
    fn with_restart(&self, reason: String) -> String {
        let (used, allowed) = (self.restarts, self.rules.max_restarts);
        if matches!(self.state, State::Running) && used < allowed {
            format!("{reason}; restart {} of {allowed}", used + 1)
        } else {
            reason
        }
    }

    /// A host that had no part is gone.
    fn gone(&mut self, loss: HostLoss) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        let (host, reason) = (loss.host.clone(), loss.how.clone());
        self.record(JobEvent::Leave { host, reason });
        self.say(format!("{} is gone: {}", loss.host, loss.how));
        if let State::Gathering(gathering) = &mut self.state {
            gathering.loss = Some(loss);
        }
    }

    /// Stops the attempt everywhere, and says why.
    fn stop(&mut self, signal: i32, reason: String) {
        self.tell_to_stop(signal, &reason);
        self.say(reason);
    }

    fn tell_to_stop(&mut self, signal: i32, reason: &str) {
        self.state = State::Stopping(self.now + self.rules.limits.stop());
        self.last_stop = Some((signal, reason.to_owned()));
        let attempt = self.attempt.unwrap_or_default();
        for (id, member) in &mut self.members {
            let finished = match member.part {
                Part::Idle => continue,
                Part::Running => false,
                Part::Finished => true,
                Part::Stopping { finished } => finished,
            };
            member.part = Part::Stopping { finished };
            let stop = ToAgent::Stop { attempt, signal, reason: reason.to_owned() };
            self.actions.push(Action::Send(*id, stop));
        }
    }

    /// The job was asked to stop: by the user of this agent, or of the coordinator, who has then
    /// been told so there.
    fn interrupt(&mut self, signal: i32, by: Option<AgentId>) {
        let member = by.and_then(|id| self.members.get(&id));
        let named = match member {
            Some(member) => format!("{} on {}", failures::name(signal), member.join.host),
            None => failures::name(signal),
        };
        let waits = member.is_some_and(|member| !member.takes_part());
        match (&self.state, by) {
            (State::Over(_), _) => {}
            (State::Gathering(_), _) => {
                self.end(failures::job_result(Cause::Interrupted { signal, failure: None }));
            }
            (_, Some(standby)) if waits && !self.has_stopped(standby) => {
                // The job goes on without it.
                let job_result = failures::job_result(Cause::Interrupted { signal, failure: None });
                self.send(standby, ToAgent::End(job_result));
                self.lose(standby, named, LastSeen::Unresponsive(self.now));
            }
            (State::Running, _) => {
                self.failures.interrupt(signal, by);
                self.failures.interrupted = Some(signal);
                self.stop_for(signal, named, by);
            }
            (State::Stopping(_), _) => {
                let is_ending = self.is_ending();
                let news = self.failures.interrupt(signal, by);
                let impatient = match self.failures.interrupted {
                    Some(_) => news == Interruption::Again,
                    None => is_ending,
                };
                if !is_ending {
                    self.failures.interrupted = Some(signal);
                }
                if impatient && signal == Signal::SIGINT as i32 {
                    self.kill();
                } else if news != Interruption::Echo && !self.failures.killed {
                    self.stop_for(signal, named, by);
                }
            }
        }
    }

    fn stop_for(&mut self, signal: i32, reason: String, by: Option<AgentId>) {
        match by {
            Some(_) => self.stop(signal, reason),
            None => self.tell_to_stop(signal, &reason),
        }
    }

    /// It took part in the attempt that is being stopped, and is done.
    fn has_stopped(&self, agent: AgentId) -> bool {
        matches!(self.state, State::Stopping(_))
            && self.members.get(&agent).is_some_and(|member| member.previous_member)
    }

    fn kill(&mut self) {
        if mem::replace(&mut self.failures.killed, true) {
            return;
        }
        self.state = State::Stopping(self.now + self.rules.limits.kill());
        for (id, member) in &self.members {
            if matches!(member.part, Part::Stopping { .. }) {
                self.actions.push(Action::Send(*id, ToAgent::Kill));
            }
        }
    }

    /// Tells an agent that has come back what it may not have heard.
    fn stop_again(&mut self, agent: AgentId) {
        let Some((signal, reason)) = self.last_stop.clone() else { return };
        let attempt = self.attempt.unwrap_or_default();
        self.send(agent, ToAgent::Stop { attempt, signal, reason });
        let limits = self.rules.limits;
        let wait = if self.failures.killed { limits.kill() } else { limits.stop() };
        if self.failures.killed {
            self.send(agent, ToAgent::Kill);
        }
        if let State::Stopping(until) = &mut self.state {
            *until = (*until).max(self.now + wait);
        }
    }

    /// Hosts whose ranks cannot be killed take part in nothing more.
    fn let_stuck_go(&mut self) -> Option<HostLoss> {
        let stuck = |(id, member): (&AgentId, &Member)| Some((*id, member.stuck.clone()?));
        let mut loss = None;
        for (id, how) in self.members.iter().filter_map(stuck).collect::<Vec<_>>() {
            let Some(member) = self.members.remove(&id) else { continue };
            let host = member.join.host;
            self.record(JobEvent::Leave { host: host.clone(), reason: how.clone() });
            self.say(format!("{host} is lost: {how}"));
            self.send(id, ToAgent::Refused { reason: how.clone() });
            self.actions.push(Action::Close(id));
            self.hand_over_seat(id);
            loss = Some(HostLoss { host, how });
        }
        loss
    }

    /// All agents have stopped the attempt.
    fn settle(&mut self) {
        let failures = mem::take(&mut self.failures);
        let first = failures.first();
        if let Some(signal) = failures.interrupted {
            return self.end(failures.interrupted_by(signal));
        }
        let calm = first.is_none();
        let mut loss = None;
        if calm {
            self.record_change();
        }
        if let Some(cause) = first {
            if self.restarts >= self.rules.max_restarts {
                return self.end(failures::job_result(cause));
            }
            self.restarts += 1;
            self.record_cause(&cause);
            if let Cause::HostLost { host, how } = cause {
                loss = Some(HostLoss { host, how });
            }
        }
        let (restarts, max_restarts) = (self.restarts, self.rules.max_restarts);
        let attempt = self.attempt.unwrap_or_default();
        self.record(JobEvent::Restart { attempt, restarts, max_restarts });
        let loss = self.let_stuck_go().or(loss);
        self.state = State::Gathering(Gathering::again(self.now, calm, loss));
    }

    /// The attempt is being stopped, and there will be no other.
    fn is_ending(&self) -> bool {
        matches!(self.state, State::Stopping(_))
            && (self.failures.interrupted.is_some()
                || self.failures.first().is_some() && self.restarts >= self.rules.max_restarts)
    }

    fn end(&mut self, mut job_result: JobResult) {
        if self.stuck && job_result.code != 0 {
            // Something is left that a scheduler, or a user, has to know of.
            job_result.code = ExitStatus::Signal(Signal::SIGKILL as i32).exit_code();
        }
        if let Some(cause) = &job_result.cause {
            self.record_cause(cause);
        }
        self.record(JobEvent::End { code: job_result.code });
        for (id, _) in self.members.iter().filter(|(_, member)| member.away.is_none()) {
            self.actions.push(Action::Send(*id, ToAgent::End(job_result.clone())));
            self.actions.push(Action::Close(*id));
        }
        self.actions.extend(self.expected.keys().map(|id| Action::Close(*id)));
        self.expected.clear();
        // The others may come back over a new connection.
        self.members.retain(|_, member| member.remote);
        let away = |member: &&Member| member.away.is_some();
        let absent: Vec<&str> =
            self.members.values().filter(away).map(|member| &*member.join.host).collect();
        if !absent.is_empty() {
            let line =
                format!("the job is over; {} may come back to hear of it", absent.join(", "));
            self.say(line);
        }
        self.actions.push(Action::Finish(job_result.clone()));
        self.state = State::Over(job_result);
        let until = |member: &Member| Some(member.away.as_ref()?.until);
        self.next_look = self.members.values().filter_map(until).min().unwrap_or(Duration::MAX);
    }

    /// Hosts on which the next attempt can count.
    fn present(&self) -> usize {
        self.count(|member| member.duplicate_of.is_none())
    }

    /// Goes on as far as nothing has to be waited for.
    fn advance(&mut self) {
        loop {
            let before = mem::discriminant(&self.state);
            match self.state {
                State::Gathering(_) => self.gather(),
                State::Running if self.count(|member| member.part == Part::Running) == 0 => {
                    self.end(JobResult { code: 0, cause: None });
                }
                State::Stopping(_)
                    if self.count(|member| matches!(member.part, Part::Stopping { .. })) == 0 =>
                {
                    self.settle();
                }
                State::Running => self.admit_waiting(),
                State::Stopping(_) | State::Over(_) => {}
            }
            if mem::discriminant(&self.state) == before {
                return;
            }
        }
    }

    fn count(&self, counts: impl Fn(&Member) -> bool) -> usize {
        self.members.values().filter(|member| counts(member)).count()
    }

    fn send(&mut self, agent: AgentId, message: ToAgent) {
        self.actions.push(Action::Send(agent, message));
    }

    fn say(&mut self, line: String) {
        self.actions.push(Action::Say(line));
    }
}

#[cfg(test)]
mod tests;
