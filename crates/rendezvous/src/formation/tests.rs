//! Rule by rule: what happens, and what the decision makes of it.

use super::*;
use crate::{Cause, Ending, Join, RankFailure, Stream};

mod any_order;

/// A formation and its clock, told what happens in words.
struct Job {
    formation: Formation,
    now: Duration,
}

const TERM: i32 = 15;
const INT: i32 = 2;

fn rules(min_nodes: usize, max_nodes: usize, max_restarts: u32) -> Rules {
    Rules { run_id: "j".into(), min_nodes, max_nodes, max_restarts, ..Rules::default() }
}

fn join(id: u64) -> Join {
    let (host, port) = (format!("h{id}"), 1000 + id as u16);
    Join { run_id: "j".into(), nproc: 2, pid: 7, port, ..Join::new(&host) }
}

impl Job {
    fn new(rules: Rules) -> Self {
        Self { formation: Formation::new(rules), now: Duration::ZERO }
    }

    /// Two hosts in their first attempt.
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
        self.event(Event::Said { agent: AgentId(id), message })
    }

    fn stopped(&mut self, id: u64, attempt: u32) -> Vec<String> {
        let port = 2000 + id as u16;
        self.say(id, FromAgent::Stopped { attempt, port, killed: false })
    }

    fn finished(&mut self, id: u64, attempt: u32) -> Vec<String> {
        self.say(id, FromAgent::Finished { attempt })
    }

    fn failed(&mut self, id: u64, at: u64, code: i32) -> Vec<String> {
        let attempt = self.formation.attempt.unwrap();
        self.say(id, FromAgent::Failed(failure(id, attempt, at, Ending::Code(code))))
    }

    fn close(&mut self, id: u64) -> Vec<String> {
        let how = "the connection broke".into();
        self.event(Event::Closed { agent: AgentId(id), how })
    }

    fn interrupt(&mut self, id: u64, signal: i32) -> Vec<String> {
        self.say(id, FromAgent::Interrupted { signal })
    }

    /// Time passes; who is named beats every second.
    fn pass(&mut self, seconds: u64, alive: &[u64]) -> Vec<String> {
        let end = self.now + Duration::from_secs(seconds);
        let mut shown = Vec::new();
        while self.now < end {
            self.now += Duration::from_millis(500);
            for id in alive {
                shown.extend(self.event(Event::Heard { agent: AgentId(*id) }));
            }
            shown.extend(self.event(Event::Tick));
        }
        shown
    }

    fn verdict(&self) -> &Verdict {
        self.formation.verdict().expect("the job is over")
    }
}

fn failure(id: u64, attempt: u32, at: u64, ending: Ending) -> RankFailure {
    RankFailure {
        attempt,
        rank: id as usize,
        local_rank: 0,
        host: format!("h{id}"),
        pid: 77,
        ending,
        at,
        last_lines: Vec::new(),
        stream: Stream::Stderr,
        error: None,
        hint: None,
    }
}

fn shown(action: &Action) -> Option<String> {
    Some(match action {
        Action::Say(_) => return None,
        Action::Close(id) => format!("{}: close", id.0),
        Action::Finish(verdict) => format!("finish {}", verdict.code),
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
                ToAgent::End(verdict) => format!("end {}", verdict.code),
                ToAgent::Kill => "kill".into(),
                ToAgent::Taken { .. } | ToAgent::Beat => format!("{message:?}"),
            };
            format!("{}: {text}", id.0)
        }
    })
}

#[test]
fn hosts_come_run_and_finish() {
    let mut job = Job::new(rules(2, 2, 0));
    assert_eq!(job.join(1, join(1)), ["1: waiting 1/2"]);
    assert_eq!(
        job.join(2, Join { nproc: 3, ..join(2) }),
        [
            "1: start 0 (restart 0): host 0/2 ranks 0+2/5 at 10.0.0.1:1001",
            "2: start 0 (restart 0): host 1/2 ranks 2+3/5 at 10.0.0.1:1001",
        ]
    );
    assert!(job.finished(2, 0).is_empty());
    assert_eq!(job.finished(1, 0), ["1: end 0", "1: close", "2: end 0", "2: close", "finish 0"]);
    assert_eq!(*job.verdict(), Verdict { code: 0, cause: None });
    assert_eq!(job.join(3, join(3)), ["3: refused: the job is over (exit code 0)", "3: close"]);
    assert_eq!(job.formation.deadline(), None);
}

#[test]
fn asked_places_come_first() {
    let mut job = Job::new(rules(3, 3, 0));
    job.join(1, join(1));
    job.join(2, Join { node_rank: Some(1), ..join(2) });
    assert_eq!(
        job.join(3, Join { node_rank: Some(0), ..join(3) }),
        [
            "3: start 0 (restart 0): host 0/3 ranks 0+2/6 at 10.0.0.3:1003",
            "2: start 0 (restart 0): host 1/3 ranks 2+2/6 at 10.0.0.3:1003",
            "1: start 0 (restart 0): host 2/3 ranks 4+2/6 at 10.0.0.3:1003",
        ]
    );
}

#[test]
fn who_does_not_fit_is_told_why() {
    let cases = [
        (
            Join { protocol: 9, version: "9.1".into(), ..join(1) },
            "h1 has brigade 9.1 (protocol 9), the coordinator has 0.1.0 (protocol 1): install the \
             same version on all hosts",
        ),
        (
            Join { run_id: "other".into(), ..join(1) },
            "h1 wants to take part in the job `other`, but here is the job `j`: give the same \
             --rdzv-id on all hosts, or another endpoint to one of the jobs",
        ),
        (
            Join { node_rank: Some(2), ..join(1) },
            "h1 has node rank 2, but with 2 hosts the highest is 1",
        ),
        (Join { nproc: 0, ..join(1) }, "h1 would start 0 ranks; a host starts 1 to 65536"),
        (
            Join { nproc: usize::MAX, ..join(1) },
            "h1 would start 18446744073709551615 ranks; a host starts 1 to 65536",
        ),
        (
            Join { last_attempt: Some(u32::MAX), ..join(1) },
            "h1 cannot have seen attempt 4294967295",
        ),
    ];
    for (join, reason) in cases {
        let mut job = Job::new(rules(2, 2, 0));
        let expected = [format!("1: refused: {reason}"), "1: close".into()];
        assert_eq!(job.join(1, join), expected);
    }
}

#[test]
fn a_node_rank_has_one_owner() {
    let mut job = Job::new(rules(2, 2, 0));
    let first = |id| Join { node_rank: Some(0), ..join(id) };
    job.join(1, first(1));
    // The owner's host may have died without a word, and this may be the same host again.
    assert!(job.join(2, first(2)).is_empty());
    job.now += Duration::from_millis(500);
    assert_eq!(
        job.event(Event::Heard { agent: AgentId(1) }),
        [
            "2: refused: h1 (pid 7) has node rank 0 already; h2 (pid 7) needs another --node-rank",
            "2: close"
        ]
    );
    assert!(job.join(3, first(3)).is_empty());
    assert!(job.join(4, first(4)).is_empty());
    assert_eq!(
        job.pass(5, &[3, 4]),
        [
            "1: close",
            "3: waiting 1/2",
            "4: refused: h3 (pid 7) has node rank 0 already; h4 (pid 7) needs another --node-rank",
            "4: close"
        ]
    );
}

#[test]
fn a_local_owner_is_alive() {
    let mut job = Job::new(rules(2, 2, 0));
    let first = |id| Join { node_rank: Some(0), ..join(id) };
    let agent = AgentId(1);
    job.event(Event::Joined { agent, join: first(1), seen: None, remote: false });
    assert!(job.join(2, first(2))[0].starts_with("2: refused: h1 (pid 7) has node rank 0"));
}

#[test]
fn last_call_is_for_the_first_attempt_only() {
    let mut job = Job::new(rules(1, 3, 1));
    assert_eq!(job.join(1, join(1)), ["1: waiting 1/1"]);
    assert_eq!(job.pass(4, &[1]), [""; 0]);
    job.join(2, join(2));
    assert_eq!(
        job.pass(1, &[1, 2]),
        [
            "1: start 0 (restart 0): host 0/2 ranks 0+2/4 at 10.0.0.1:1001",
            "2: start 0 (restart 0): host 1/2 ranks 2+2/4 at 10.0.0.1:1001",
        ]
    );
    job.close(1);
    assert_eq!(
        job.stopped(2, 0),
        ["2: start 1 (restart 1): host 0/1 ranks 0+2/2 at 10.0.0.2:2002"]
    );
}

#[test]
fn nobody_is_waited_for_when_nobody_can_come() {
    let mut job = Job::new(Rules { late_hosts: false, ..rules(1, 2, 0) });
    for id in 1..=2 {
        job.event(Event::Expected { agent: AgentId(id), host: format!("h{id}") });
    }
    job.join(1, join(1));
    assert_eq!(job.close(2), ["1: start 0 (restart 0): host 0/1 ranks 0+2/2 at 10.0.0.1:1001"]);

    let mut job = Job::new(Rules { late_hosts: false, ..rules(2, 2, 0) });
    for id in 1..=2 {
        job.event(Event::Expected { agent: AgentId(id), host: format!("h{id}") });
    }
    job.join(1, join(1));
    assert_eq!(job.close(2), ["1: end 1", "1: close", "finish 1"]);
    let cause = Cause::HostLost { host: "h2".into(), how: "the connection broke".into() };
    assert_eq!(job.verdict().cause, Some(cause));
}

#[test]
fn too_few_hosts_end_the_wait() {
    let mut job = Job::new(rules(2, 2, 0));
    job.join(1, join(1));
    let shown = job.pass(600, &[1]);
    assert_eq!(shown, ["1: end 1", "1: close", "finish 1"]);
    let cause = Cause::TooFewHosts { have: 1, need: 2, seconds: 600 };
    assert_eq!(job.verdict().cause, Some(cause));
    // And when nobody comes at all.
    let mut job = Job::new(rules(2, 2, 0));
    assert_eq!(job.formation.deadline(), Some(Duration::from_secs(600)));
    assert_eq!(job.pass(600, &[]), ["finish 1"]);
}

#[test]
fn a_failed_rank_stops_all_and_ends_the_job() {
    let mut job = Job::of_two(0);
    assert_eq!(
        job.failed(2, 5, 3),
        [
            "1: stop 0 with 15: rank 2 on h2 (local rank 0, pid 77) failed: exit code 3",
            "2: stop 0 with 15: rank 2 on h2 (local rank 0, pid 77) failed: exit code 3",
        ]
    );
    assert_eq!(job.join(3, join(3)), ["3: refused: the job is ending", "3: close"]);
    assert!(job.stopped(2, 0).is_empty());
    assert_eq!(job.stopped(1, 0), ["1: end 3", "1: close", "2: end 3", "2: close", "finish 3"]);
    assert!(matches!(&job.verdict().cause, Some(Cause::Failed(failure)) if failure.rank == 2));
}

#[test]
fn a_failed_rank_costs_a_restart() {
    let mut job = Job::of_two(1);
    job.failed(2, 5, 3);
    job.stopped(2, 0);
    assert_eq!(
        job.stopped(1, 0),
        [
            "1: start 1 (restart 1): host 0/2 ranks 0+2/4 at 10.0.0.1:2001",
            "2: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.1:2001",
        ]
    );
    // What comes late of the old attempt means nothing.
    assert!(job.stopped(1, 0).is_empty());
    assert!(job.finished(1, 0).is_empty());
    let late = failure(2, 0, 6, Ending::Code(4));
    assert!(job.say(2, FromAgent::Failed(late)).is_empty());
    job.failed(1, 9, 4);
    job.stopped(1, 1);
    assert_eq!(job.stopped(2, 1).last().unwrap(), "finish 4");
}

#[test]
fn the_first_failure_is_found_by_time() {
    let mut job = Job::new(rules(3, 3, 0));
    job.now = Duration::from_secs(100);
    // The clocks: h1 as ours, h2 90 s behind, h3 900 s ahead.
    for (id, sent) in [(1, 100_000), (2, 10_000), (3, 1_000_000)] {
        job.join(id, Join { sent, ..join(id) });
    }
    job.now = Duration::from_secs(103);
    job.failed(1, 102_900, 11);
    job.failed(3, 1_002_880, 33);
    // 102.860 on our clock: the first, and heard of last.
    job.failed(2, 12_860, 22);
    for id in 1..=3 {
        job.stopped(id, 0);
    }
    assert_eq!(job.verdict().code, 22);
}

#[test]
fn a_better_idea_of_a_clock_counts() {
    let mut job = Job::new(rules(2, 2, 0));
    job.now = Duration::from_millis(2_000);
    job.join(1, Join { sent: 2_000, ..join(1) });
    // Its clock seems to be 2 s behind: but the message was only slow.
    job.join(2, join(2));
    job.now = Duration::from_millis(3_000);
    job.failed(1, 2_100, 11);
    job.failed(2, 1_900, 22);
    job.say(2, FromAgent::Beat { sent: 3_000 });
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.verdict().code, 22);
}

#[test]
fn a_lost_host_costs_a_restart() {
    let mut job = Job::new(rules(2, 3, 1));
    for id in 1..=3 {
        job.join(id, join(id));
    }
    assert_eq!(
        job.close(1),
        [
            "2: stop 0 with 15: h1 is lost: the connection broke; restart 1 of 1",
            "3: stop 0 with 15: h1 is lost: the connection broke; restart 1 of 1",
        ]
    );
    // Its ranks' peers saw it go.
    job.failed(3, 1, 9);
    job.stopped(3, 0);
    assert_eq!(
        job.stopped(2, 0),
        [
            "2: start 1 (restart 1): host 0/2 ranks 0+2/4 at 10.0.0.2:2002",
            "3: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.2:2002",
        ]
    );
    // No restart is left for the next.
    assert_eq!(job.close(3), ["2: stop 1 with 15: h3 is lost: the connection broke"]);
    assert_eq!(job.stopped(2, 1), ["2: end 1", "2: close", "finish 1"]);
    let cause = Cause::HostLost { host: "h3".into(), how: "the connection broke".into() };
    assert_eq!(job.verdict().cause, Some(cause));
}

#[test]
fn a_silent_host_is_lost_within_five_seconds() {
    let mut job = Job::of_two(0);
    assert!(job.pass(10, &[1, 2]).is_empty());
    assert_eq!(
        job.pass(4, &[2]),
        ["1: close", "2: stop 0 with 15: h1 is lost: nothing was heard of it for 4 s"]
    );
    // In one process nobody beats and nobody is silent.
    let mut job = Job::new(rules(1, 1, 0));
    job.event(Event::Joined { agent: AgentId(1), join: join(1), seen: None, remote: false });
    assert_eq!(job.formation.deadline(), None);
    assert!(job.pass(100, &[]).is_empty());
}

#[test]
fn a_loss_explains_the_failures_it_causes() {
    // The connection breaks just after the ranks of the other host saw it.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.say(2, FromAgent::Beat { sent: 3_000 });
    job.failed(2, 2_990, 5);
    job.close(1);
    job.stopped(2, 0);
    assert!(matches!(job.verdict().cause, Some(Cause::HostLost { .. })));
    // A host that tells of a failure and goes has not caused it by going.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.failed(1, 2_990, 5);
    job.close(1);
    job.stopped(2, 0);
    assert_eq!(job.verdict().code, 5);
    // Nor has one that goes much later.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.failed(2, 3_000, 5);
    job.pass(3, &[1, 2]);
    job.close(1);
    job.stopped(2, 0);
    assert_eq!(job.verdict().code, 5);
}

#[test]
fn too_few_survivors_wait() {
    let mut job = Job::of_two(2);
    job.close(2);
    assert_eq!(job.stopped(1, 0), ["1: waiting 1/2"]);
    assert!(job.pass(60, &[1]).is_empty());
    assert_eq!(
        job.join(3, join(3)),
        [
            "1: start 1 (restart 1): host 0/2 ranks 0+2/4 at 10.0.0.1:2001",
            "3: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.1:2001",
        ]
    );
    job.close(1);
    let said = job.lines(Event::Said {
        agent: AgentId(3),
        message: FromAgent::Stopped { attempt: 1, port: 1, killed: false },
    });
    assert_eq!(said, ["waiting up to 600 s for 1 host more"]);
    assert_eq!(job.pass(600, &[3]), ["3: end 1", "3: close", "finish 1"]);
}

#[test]
fn too_few_survivors_end_when_nobody_can_come() {
    let mut job = Job::new(Rules { late_hosts: false, ..rules(2, 2, 5) });
    job.join(1, join(1));
    job.join(2, join(2));
    job.close(2);
    assert_eq!(job.stopped(1, 0), ["1: end 1", "1: close", "finish 1"]);
}

#[test]
fn a_host_lost_after_its_work_does_not_matter() {
    let mut job = Job::of_two(0);
    job.finished(1, 0);
    assert!(job.close(1).is_empty());
    assert_eq!(job.finished(2, 0), ["2: end 0", "2: close", "finish 0"]);
    // All of them.
    let mut job = Job::of_two(0);
    job.finished(1, 0);
    job.close(1);
    job.finished(2, 0);
    assert_eq!(job.verdict().code, 0);
}

#[test]
fn all_hosts_lost_at_once() {
    let mut job = Job::of_two(0);
    job.close(1);
    assert_eq!(job.close(2), ["finish 1"]);
    let mut job = Job::of_two(1);
    job.close(1);
    assert!(job.close(2).is_empty());
    job.join(3, join(3));
    assert_eq!(job.join(4, join(4)).len(), 2);
}

#[test]
fn a_newcomer_costs_no_restart() {
    let mut job = Job::new(rules(1, 2, 0));
    job.join(1, join(1));
    job.pass(5, &[1]);
    assert_eq!(job.join(2, join(2)), ["1: stop 0 with 15: h2 joins", "2: waiting 2/1"]);
    assert_eq!(
        job.stopped(1, 0),
        [
            "1: start 1 (restart 0): host 0/2 ranks 0+2/4 at 10.0.0.1:2001",
            "2: start 1 (restart 0): host 1/2 ranks 2+2/4 at 10.0.0.1:2001",
        ]
    );
}

#[test]
fn a_newcomer_that_goes_again_costs_nothing() {
    let mut job = Job::new(rules(1, 2, 0));
    job.join(1, join(1));
    job.pass(5, &[1]);
    job.join(2, join(2));
    assert!(job.close(2).is_empty());
    assert_eq!(
        job.stopped(1, 0),
        ["1: start 1 (restart 0): host 0/1 ranks 0+2/2 at 10.0.0.1:2001"]
    );
}

#[test]
fn a_spare_takes_the_place_of_a_lost_host() {
    let mut job = Job::of_two(1);
    // Even one that asks for the first place does not push anybody out.
    assert_eq!(job.join(3, Join { node_rank: Some(0), ..join(3) }), ["3: waiting 3/2"]);
    job.failed(1, 1, 1);
    job.stopped(1, 0);
    assert_eq!(job.stopped(2, 0).len(), 2, "the same two");
    let mut job = Job::of_two(1);
    job.join(3, join(3));
    job.close(1);
    assert_eq!(
        job.stopped(2, 0),
        [
            "2: start 1 (restart 1): host 0/2 ranks 0+2/4 at 10.0.0.2:2002",
            "3: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.2:2002",
        ]
    );
}

#[test]
fn newcomers_do_not_disturb_a_job_that_finishes() {
    let mut job = Job::new(rules(2, 3, 0));
    job.join(1, join(1));
    job.join(2, join(2));
    job.pass(5, &[1, 2]);
    job.finished(1, 0);
    assert_eq!(job.join(3, join(3)), ["3: waiting 3/2"]);
    let end = job.finished(2, 0);
    assert!(end.contains(&"3: end 0".to_owned()), "{end:?}");
}

#[test]
fn an_agent_that_does_not_stop_is_lost() {
    let mut job = Job::of_two(1);
    job.failed(1, 1, 1);
    job.stopped(1, 0);
    assert_eq!(job.pass(35, &[1, 2]), ["2: close", "1: waiting 1/2"]);
    let mut job = Job::of_two(0);
    job.failed(1, 1, 6);
    job.stopped(1, 0);
    job.pass(35, &[1, 2]);
    assert_eq!(job.verdict().code, 6, "the failure was first");
}

#[test]
fn agents_that_break_the_rules_are_lost() {
    let mut job = Job::of_two(0);
    let again = job.say(1, FromAgent::Join(join(1)));
    assert_eq!(again, ["1: close", "2: stop 0 with 15: h1 is lost: it joined twice"]);
    let mut job = Job::of_two(0);
    assert_eq!(job.stopped(1, 0)[0], "1: close");
    let mut job = Job::of_two(0);
    let wrong = FromAgent::Failed(failure(1, 0, 0, Ending::Code(256)));
    job.say(1, wrong);
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.verdict().code, 1, "a failure is never a success");
}

#[test]
fn an_interruption_stops_all() {
    // (what agents say after the stop, exit code)
    let killed = |attempt| FromAgent::Stopped { attempt, port: 1, killed: true };
    let stopped = |attempt| FromAgent::Stopped { attempt, port: 1, killed: false };
    let finished = |attempt| FromAgent::Finished { attempt };
    let failed = |code| FromAgent::Failed(failure(2, 0, 0, Ending::Code(code)));
    let cases = [
        (vec![stopped(0)], 143),
        (vec![killed(0)], 143),
        (vec![finished(0), stopped(0)], 0),
        (vec![failed(5), stopped(0)], 5),
        (vec![failed(143), stopped(0)], 143),
    ];
    for (second, code) in cases {
        let mut job = Job::of_two(3);
        assert_eq!(
            job.interrupt(1, TERM),
            ["1: stop 0 with 15: SIGTERM on h1", "2: stop 0 with 15: SIGTERM on h1"]
        );
        job.finished(1, 0);
        job.stopped(1, 0);
        for message in second.clone() {
            job.say(2, message);
        }
        assert_eq!(job.verdict().code, code, "{second:?}");
        let cause = job.verdict().cause.clone();
        assert!(matches!(cause, Some(Cause::Interrupted { signal: TERM, .. })), "{cause:?}");
    }
}

#[test]
fn a_second_interruption_kills() {
    let mut job = Job::of_two(0);
    job.interrupt(1, INT);
    // A scheduler sends it to all hosts.
    assert!(job.interrupt(2, INT).is_empty());
    assert_eq!(job.interrupt(2, INT), ["1: kill", "2: kill"]);
    assert!(job.interrupt(1, INT).is_empty());
    assert_eq!(job.pass(5, &[1, 2]).last().unwrap(), "finish 130");
}

#[test]
fn an_interruption_prevents_a_restart() {
    let mut job = Job::of_two(3);
    job.close(2);
    // Nobody has lost patience yet: the stop was not the user's.
    assert_eq!(job.interrupt(1, INT), ["1: stop 0 with 2: SIGINT on h1"]);
    assert_eq!(job.stopped(1, 0), ["1: end 130", "1: close", "finish 130"]);
}

#[test]
fn an_interruption_of_a_failed_job_keeps_its_code() {
    let mut job = Job::of_two(0);
    job.failed(1, 1, 9);
    assert_eq!(job.interrupt(1, INT), ["1: kill", "2: kill"]);
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.verdict().code, 9);
}

#[test]
fn an_interruption_of_the_wait_ends_it() {
    let mut job = Job::new(rules(2, 2, 0));
    job.join(1, join(1));
    assert_eq!(job.interrupt(1, INT), ["1: end 130", "1: close", "finish 130"]);
    let mut job = Job::new(rules(2, 2, 0));
    job.join(1, join(1));
    assert_eq!(job.event(Event::Interrupt { signal: -4 }).last().unwrap(), "finish 143");
}

#[test]
fn a_spare_that_is_interrupted_goes_alone() {
    let mut job = Job::of_two(0);
    job.join(3, join(3));
    assert_eq!(job.interrupt(3, INT), ["3: end 130", "3: close"]);
    job.finished(1, 0);
    job.finished(2, 0);
    assert_eq!(job.verdict().code, 0);
}

#[test]
fn a_new_coordinator_goes_on_counting() {
    let left = |id, last, restarts| Join { last_attempt: Some(last), restarts, ..join(id) };
    let mut job = Job::new(rules(1, 3, 4));
    job.join(1, left(1, 6, 2));
    job.join(2, left(2, 7, 2));
    assert_eq!(
        job.pass(1, &[1, 2]),
        [
            "1: start 8 (restart 3): host 0/2 ranks 0+2/4 at 10.0.0.1:1001",
            "2: start 8 (restart 3): host 1/2 ranks 2+2/4 at 10.0.0.1:1001",
        ],
        "one second for the others, not a whole last call"
    );
    // One that comes back later is a newcomer.
    job.join(3, left(3, 7, 2));
    job.stopped(1, 8);
    assert!(job.stopped(2, 8)[0].starts_with("1: start 9 (restart 3)"));

    let mut job = Job::new(rules(1, 1, 2));
    assert_eq!(job.join(1, left(1, 3, 2)), ["1: end 1", "1: close", "finish 1"]);
}

#[test]
fn a_newcomer_with_a_history_does_not_confuse_the_attempt() {
    let mut job = Job::new(rules(1, 2, 3));
    job.join(1, join(1));
    job.pass(5, &[1]);
    assert_eq!(
        job.join(2, Join { last_attempt: Some(40), restarts: 1, ..join(2) })[0],
        "1: stop 0 with 15: h2 joins"
    );
    assert!(job.stopped(1, 0)[0].starts_with("1: start 41 (restart 1)"));
}

#[test]
fn the_first_host_is_named_as_others_reach_it() {
    let seen = |text: &str| Some(text.to_owned());
    let cases = [
        (None, None, None, "127.0.0.1"),
        (None, None, Some("front"), "front"),
        (None, seen("127.0.0.1"), Some("front"), "front"),
        (None, seen("127.0.0.1"), None, "127.0.0.1"),
        (None, seen("10.0.0.9"), Some("front"), "10.0.0.9"),
        (Some("node1"), seen("10.0.0.9"), Some("front"), "node1"),
    ];
    for (own, seen, rule, expected) in cases {
        let address = rule.map(str::to_owned);
        let mut formation = Formation::new(Rules { address, ..rules(1, 1, 0) });
        let join = Join { address: own.map(str::to_owned), ..join(1) };
        let joined = Event::Joined { agent: AgentId(1), join, seen, remote: true };
        let actions = formation.handle(Duration::ZERO, joined);
        let start = actions.iter().find_map(|action| match action {
            Action::Send(_, ToAgent::Start(part)) => Some(part.master_addr.as_str()),
            _ => None,
        });
        assert_eq!(start, Some(expected));
    }
}

#[test]
fn a_host_that_leaves_costs_no_restart() {
    let mut job = Job::new(rules(1, 3, 0));
    for id in 1..=3 {
        job.join(id, join(id));
    }
    assert_eq!(
        job.say(1, FromAgent::Leaving),
        ["1: close", "2: stop 0 with 15: h1 leaves", "3: stop 0 with 15: h1 leaves"]
    );
    // Ranks that miss those of the host, or do not like to be stopped.
    job.now += Duration::from_secs(1);
    job.failed(2, 1_000, 9);
    job.stopped(2, 0);
    assert_eq!(
        job.stopped(3, 0),
        [
            "2: start 1 (restart 0): host 0/2 ranks 0+2/4 at 10.0.0.2:2002",
            "3: start 1 (restart 0): host 1/2 ranks 2+2/4 at 10.0.0.2:2002",
        ]
    );
    // What failed before somebody left is a failure.
    job.now += Duration::from_secs(1);
    job.say(2, FromAgent::Leaving);
    job.failed(3, 1_500, 9);
    assert_eq!(job.stopped(3, 1).last().unwrap(), "finish 9");
}

#[test]
fn too_few_are_left() {
    let mut job = Job::of_two(0);
    job.say(1, FromAgent::Leaving);
    assert_eq!(job.stopped(2, 0), ["2: waiting 1/2"]);
    // A spare leaves, or one whose work is done: nobody minds.
    let mut job = Job::of_two(0);
    job.finished(1, 0);
    assert_eq!(job.say(1, FromAgent::Leaving), ["1: close"]);
    assert_eq!(job.finished(2, 0).last().unwrap(), "finish 0");
}

#[test]
fn a_host_that_cannot_start_is_lost() {
    let mut job = Job::of_two(0);
    let reason = "cannot start rank 3 of 4: no memory".to_owned();
    let actions = job.say(2, FromAgent::Unable { reason });
    assert_eq!(
        actions,
        ["2: close", "1: stop 0 with 15: h2 is lost: cannot start rank 3 of 4: no memory"]
    );
    assert_eq!(job.stopped(1, 0).last().unwrap(), "finish 1");
}
