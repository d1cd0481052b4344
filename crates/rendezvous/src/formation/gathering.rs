//! Gathering of hosts for an attempt: which ones are waited for, for how long, and in which order they get their ranks.

use std::net::IpAddr;
use std::time::Duration;

use brigade_rank_env::text::counted;

use super::admission::JOINED_LATELY;
use super::failures::{self, Failures, HostLoss};
use super::member::{Activity, Member};
use super::rules::REGROUP;
use super::{Action, AgentId, Formation, HostPart, JobEvent, Rules, State};
use crate::{Assignment, Cause, ToAgent};

/// State of waiting for enough hosts.
#[derive(Debug)]
pub(super) struct Gathering {
    since: Duration,
    /// `true` before the first attempt of this coordinator.
    first: bool,
    /// End of the wait for more hosts than needed.
    last_call: Option<Duration>,
    /// `true` once the waiting hosts have been informed how many are missing.
    notified: bool,
    /// `true` if the previous attempt was stopped without a failure, so that hosts which were not in it have to wait
    /// for their admission.
    membership_changed: bool,
    /// Time until which they have to wait, if the other hosts are too few without them.
    admission: Option<Duration>,
    /// Host that was lost last.
    pub(super) loss: Option<HostLoss>,
}

impl Gathering {
    pub(super) fn first(since: Duration) -> Self {
        Self {
            since,
            first: true,
            last_call: None,
            notified: true,
            membership_changed: false,
            admission: None,
            loss: None,
        }
    }

    pub(super) fn again(since: Duration, membership_changed: bool, loss: Option<HostLoss>) -> Self {
        Self {
            since,
            first: false,
            last_call: None,
            notified: false,
            membership_changed,
            admission: None,
            loss,
        }
    }

    pub(super) fn deadline(&self, rules: &Rules) -> Duration {
        self.last_call
            .or(self.admission)
            .unwrap_or_else(|| self.since.saturating_add(rules.join_timeout))
    }
}

impl Rules {
    pub(super) fn wanted(&self) -> String {
        if self.min_nodes == self.max_nodes {
            counted(self.min_nodes, "host")
        } else {
            format!("{} to {}", self.min_nodes, counted(self.max_nodes, "host"))
        }
    }
}

impl Formation {
    /// Starts the next attempt once enough hosts have joined.
    pub(super) fn gather(&mut self) {
        let have = self.present();
        let Rules { min_nodes: need, max_nodes: most, .. } = self.rules;
        let survivors = self.members.values().any(|member| member.join.last_attempt.is_some());
        let to_come = self.expected.len() + most.saturating_sub(self.announced);
        let more_may_come = self.rules.late_hosts || to_come > 0;
        let State::Gathering(gathering) = &mut self.state else { return };
        if have < need {
            (gathering.last_call, gathering.admission) = (None, None);
            let enough = have + self.duplicates + to_come >= need;
            self.wait_for_more(have, self.rules.late_hosts || enough);
            return;
        }
        if have < most && gathering.first && more_may_come {
            let call = self.rules.last_call;
            let call = if survivors { call.min(REGROUP) } else { call };
            let end = *gathering.last_call.get_or_insert_with(|| self.now.saturating_add(call));
            if self.now < end {
                return;
            }
        }
        if self.waits_for_absent() {
            return;
        }
        let known = self.count(|member| member.duplicate_of.is_none() && !member.is_new());
        let wait = self.admission_wait();
        let State::Gathering(gathering) = &mut self.state else { return };
        if gathering.membership_changed && known < need && !wait.is_zero() {
            if gathering.admission.is_none() {
                gathering.admission = Some(self.now.saturating_add(wait));
                let seconds = wait.as_secs_f64().ceil();
                self.say(format!("the next attempt starts in {seconds} s: {JOINED_LATELY}"));
            }
            return;
        }
        self.form();
    }

    /// Returns `true` if there are enough hosts, but some are disconnected. They come back or are lost soon, and an
    /// attempt that begins without them would wait for them.
    pub(super) fn waits_for_absent(&self) -> bool {
        matches!(self.state, State::Gathering(_))
            && self.members.values().any(|member| member.disconnection.is_some())
            && self.present() >= self.rules.min_nodes
    }

    fn wait_for_more(&mut self, have: usize, enough_may_come: bool) {
        let need = self.rules.min_nodes;
        let State::Gathering(gathering) = &mut self.state else { return };
        let waited = self.now.saturating_sub(gathering.since);
        if !enough_may_come && let Some(HostLoss { host, how }) = gathering.loss.take() {
            return self.end(failures::job_result(Cause::HostLost { host, how }));
        }
        let limit = self.rules.join_timeout;
        if !enough_may_come || waited >= limit {
            let seconds = waited.as_secs();
            return self.end(failures::job_result(Cause::TooFewHosts { have, need, seconds }));
        }
        if !gathering.notified {
            gathering.notified = true;
            let tell = ToAgent::Waiting { have, need };
            self.actions.extend(self.members.keys().map(|id| Action::Send(*id, tell.clone())));
            self.say(format!(
                "waiting up to {} s for {} more",
                limit.as_secs_f64(),
                counted(need - have, "host")
            ));
        }
    }

    fn form(&mut self) {
        let first = matches!(&self.state, State::Gathering(gathering) if gathering.first);
        let left = self.members.values().filter(|member| member.join.last_attempt.is_some());
        if let Some(counted) = left.map(|member| member.join.restarts).max() {
            self.restarts = self.restarts.max(counted);
            if first {
                // The end of the old coordinator costs a restart.
                if self.restarts >= self.rules.max_restarts {
                    let host = "the coordinator's host".into();
                    let how = format!("no restart is left of {}", self.rules.max_restarts);
                    return self.end(failures::job_result(Cause::HostLost { host, how }));
                }
                self.restarts += 1;
                self.restore_order();
            }
        }
        let membership_changed =
            matches!(&self.state, State::Gathering(gathering) if gathering.membership_changed);
        let order = self.choose(!membership_changed || self.admission_wait().is_zero());
        self.admitted(membership_changed && order.iter().any(|id| self.members[id].is_new()));
        for member in self.members.values_mut() {
            // This attempt is counted.
            member.join.last_attempt = None;
        }
        let attempt = self.next_attempt;
        self.attempt = Some(attempt);
        self.next_attempt += 1;
        let world_size = order.iter().map(|id| self.members[id].join.nproc).sum();
        let master = self.address(order[0]);
        let master_port = self.members[&order[0]].join.port;
        let (mut first_rank, mut parts) = (0, Vec::new());
        for member in self.members.values_mut() {
            member.previous_member = false;
        }
        for (node_rank, id) in order.iter().enumerate() {
            let Some(member) = self.members.get_mut(id) else { continue };
            member.activity = Activity::Running;
            member.previous_member = true;
            member.ranks.clear();
            let nproc = member.join.nproc;
            let host = member.join.host.clone();
            parts.push(HostPart { host, node_rank, first_rank, nproc });
            let assignment = Assignment {
                attempt,
                restarts: self.restarts,
                max_restarts: self.rules.max_restarts,
                node_rank,
                num_nodes: order.len(),
                first_rank,
                nproc,
                world_size,
                master_addr: master.clone(),
                master_port,
                recorded: self.rules.recorded,
            };
            first_rank += nproc;
            member.assignment = Some(assignment.clone());
            self.actions.push(Action::Send(*id, ToAgent::Start(assignment)));
        }
        let (restarts, max_restarts) = (self.restarts, self.rules.max_restarts);
        self.record(JobEvent::Attempt {
            attempt,
            restarts,
            max_restarts,
            world_size,
            hosts: parts,
        });
        self.failures = Failures::default();
        self.state = State::Running;
        if attempt > 0 {
            let restarts = (self.restarts, self.rules.max_restarts);
            self.say(format!(
                "attempt {attempt} starts: {}, {}, {} of {} used",
                counted(order.len(), "host"),
                counted(world_size, "rank"),
                restarts.0,
                counted(restarts.1, "restart"),
            ));
        }
    }

    /// Restores the order of hosts of the earlier coordinator. New hosts come last.
    fn restore_order(&mut self) {
        let mut members: Vec<&mut Member> = self.members.values_mut().collect();
        members.sort_by_key(|member| {
            let place = member.join.last_attempt.and(member.join.last_node_rank);
            (place.unwrap_or(usize::MAX), member.order)
        });
        for (order, member) in (0..).zip(members) {
            member.order = order;
        }
    }

    /// The hosts of the next attempt, in the order of their ranks. A host that has had a part keeps it;
    /// others take part if they are admitted.
    fn choose(&self, admits: bool) -> Vec<AgentId> {
        let may = |member: &Member| member.duplicate_of.is_none() && (admits || !member.is_new());
        let mut order: Vec<(&AgentId, &Member)> =
            self.members.iter().filter(|(_, member)| may(member)).collect();
        order.sort_by_key(|(_, member)| (!member.previous_member, member.order));
        order.truncate(self.rules.max_nodes);
        order.sort_by_key(|(_, member)| member.place());
        order.into_iter().map(|(id, _)| *id).collect()
    }

    /// Returns the address at which the other hosts reach this one.
    fn address(&self, agent: AgentId) -> String {
        let member = &self.members[&agent];
        let loopback = |seen: &str| seen.parse().is_ok_and(|it: IpAddr| it.is_loopback());
        let seen = member.seen.as_deref().filter(|seen| !loopback(seen));
        (member.join.address.as_deref())
            .or(seen)
            .or(self.rules.address.as_deref())
            .or(member.seen.as_deref())
            .unwrap_or("127.0.0.1")
            .to_owned()
    }
}
