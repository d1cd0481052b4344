//! Hosts that join, wait or are refused, and the order of their ranks.

use super::*;

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
    assert_eq!(*job.job_result(), JobResult { code: 0, cause: None });
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
            "h1 has brigade 9.1 (protocol 9), the coordinator has 0.1.0 (protocol 3): install the \
             same version on all hosts",
        ),
        (
            Join { run_id: "other".into(), ..join(1) },
            "h1 takes part in another job: give the same \
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
    // The host with this node rank may have died without a notice, and this may be the same host again.
    assert!(job.join(2, first(2)).is_empty());
    job.now += Duration::from_millis(500);
    assert_eq!(
        job.event(Event::Alive { agent: AgentId(1) }),
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
fn no_host_is_waited_for_when_none_can_come() {
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
    assert_eq!(job.job_result().cause, Some(cause));
}

#[test]
fn too_few_hosts_end_the_wait() {
    let mut job = Job::new(rules(2, 2, 0));
    job.join(1, join(1));
    let shown = job.pass(600, &[1]);
    assert_eq!(shown, ["1: end 1", "1: close", "finish 1"]);
    let cause = Cause::TooFewHosts { have: 1, need: 2, seconds: 600 };
    assert_eq!(job.job_result().cause, Some(cause));
    // The same if no host joins at all.
    let mut job = Job::new(rules(2, 2, 0));
    assert_eq!(job.formation.deadline(), Some(Duration::from_secs(600)));
    assert_eq!(job.pass(600, &[]), ["finish 1"]);
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
fn a_standby_takes_the_place_of_a_lost_host() {
    let mut job = Job::of_two(1);
    // A host that requests the first node rank does not displace another one, either.
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
    // An agent that connects again later counts as a new one.
    job.join(3, left(3, 7, 2));
    job.stopped(1, 8);
    assert!(job.stopped(2, 8)[0].starts_with("1: start 9 (restart 3)"));

    let mut job = Job::new(rules(1, 1, 2));
    assert_eq!(job.join(1, left(1, 3, 2)), ["1: end 1", "1: close", "finish 1"]);
}

#[test]
fn a_new_coordinator_keeps_the_order() {
    let left = |id, place| Join { last_attempt: Some(4), last_node_rank: Some(place), ..join(id) };
    let mut job = Job::new(rules(4, 4, 4));
    job.join(1, join(1));
    job.join(2, left(2, 3));
    job.join(3, left(3, 1));
    let start = job.join(4, left(4, 2));
    let hosts: Vec<_> = start.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(hosts, ["3:", "4:", "2:", "1:"]);
    // Hosts that join later get later node ranks.
    job.close(3);
    for id in [4, 2, 1] {
        job.stopped(id, 5);
    }
    let start = job.join(5, Join { last_node_rank: Some(0), ..join(5) });
    let hosts: Vec<_> = start.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(hosts, ["4:", "2:", "1:", "5:"]);
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
fn one_that_waits_for_a_node_rank_is_told_once_that_the_job_is_over() {
    let mut job = Job::new(rules(3, 3, 0));
    let ranked = |id| Join { node_rank: Some(2), ..join(id) };
    job.join(1, ranked(1));
    job.now += Duration::from_secs(1);
    job.join(2, ranked(2));
    job.now += Duration::from_secs(1);
    job.event(Event::Interrupt { signal: INT });
    assert_eq!(job.job_result().code, 130);
    assert!(job.event(Event::Alive { agent: AgentId(1) }).is_empty());
}
