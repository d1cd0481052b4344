//! Interruptions by the user, and hosts that leave.

use super::*;

#[test]
fn an_interruption_stops_all() {
    // (what agents say after the stop, exit code)
    let killed = |attempt| FromAgent::Stopped { attempt, port: 1, killed: true, stuck: None };
    let stopped = |attempt| FromAgent::Stopped { attempt, port: 1, killed: false, stuck: None };
    let finished = |attempt| FromAgent::Finished { attempt };
    let failed = |code| FromAgent::Failed(failure(2, 0, 0, ExitStatus::Code(code)));
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
        assert_eq!(job.job_result().code, code, "{second:?}");
        let cause = job.job_result().cause.clone();
        assert!(matches!(cause, Some(Cause::Interrupted { signal: TERM, .. })), "{cause:?}");
    }
}

#[test]
fn a_closed_output_decides_the_code() {
    let mut job = Job::of_two(0);
    job.interrupt(1, 13);
    for id in 1..=2 {
        job.finished(id, 0);
        job.stopped(id, 0);
    }
    assert_eq!(job.job_result().code, 141);
}

#[test]
fn a_second_interruption_kills() {
    let mut job = Job::of_two(0);
    job.interrupt(1, INT);
    // A scheduler sends the signal to all hosts.
    assert!(job.interrupt(2, INT).is_empty());
    assert_eq!(job.interrupt(2, INT), ["1: kill", "2: kill"]);
    assert!(job.interrupt(1, INT).is_empty());
    assert_eq!(job.pass(20, &[1, 2]).last().unwrap(), "finish 130");
}

#[test]
fn an_interruption_prevents_a_restart() {
    let mut job = Job::of_two(3);
    job.close(2);
    // No time limit has passed yet: the user did not cause the stop.
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
    assert_eq!(job.job_result().code, 9);
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
fn a_standby_that_is_interrupted_goes_alone() {
    let mut job = Job::of_two(0);
    job.join(3, join(3));
    assert_eq!(job.interrupt(3, INT), ["3: end 130", "3: close"]);
    job.finished(1, 0);
    job.finished(2, 0);
    assert_eq!(job.job_result().code, 0);
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
    // These ranks fail because those of the other host are gone, or because they are stopped.
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
    // A failure before a host left counts as a failure.
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
    // The same if no further host can join.
    let mut job = Job::new(Rules { late_hosts: false, ..rules(2, 2, 0) });
    job.join(1, join(1));
    job.join(2, join(2));
    job.say(1, FromAgent::Leaving);
    assert_eq!(job.stopped(2, 0).last().unwrap(), "finish 1");
    let cause = Cause::TooFewHosts { have: 1, need: 2, seconds: 0 };
    assert_eq!(job.job_result().cause, Some(cause));
    // A spare host leaves, or one whose ranks have finished: the attempt continues.
    let mut job = Job::of_two(0);
    job.finished(1, 0);
    assert_eq!(job.say(1, FromAgent::Leaving), ["1: close"]);
    assert_eq!(job.finished(2, 0).last().unwrap(), "finish 0");
}
