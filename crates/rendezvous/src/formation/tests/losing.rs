//! Ranks that fail and lost hosts: the restarts that follow, and which failure was first.

use brigade_hardware::DeviceFault;

use super::*;

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
    assert!(matches!(&job.job_result().cause, Some(Cause::Failed(failure)) if failure.rank == 2));
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
    // Late messages of the old attempt have no effect.
    assert!(job.stopped(1, 0).is_empty());
    assert!(job.finished(1, 0).is_empty());
    let late = failure(2, 0, 6, ExitStatus::Code(4));
    assert!(job.say(2, FromAgent::Failed(late)).is_empty());
    job.failed(1, 9, 4);
    job.stopped(1, 1);
    assert_eq!(job.stopped(2, 1).last().unwrap(), "finish 4");
}

#[test]
fn the_first_failure_is_found_by_time() {
    let mut job = Job::new(rules(3, 3, 0));
    job.now = Duration::from_secs(100);
    // The clocks: that of h1 agrees with the coordinator's, that of h2 is 90 s behind, that of h3 900 s ahead.
    for (id, sent) in [(1, 100_000), (2, 10_000), (3, 1_000_000)] {
        job.join(id, Join { sent, ..join(id) });
    }
    job.now = Duration::from_secs(103);
    job.failed(1, 102_900, 11);
    job.failed(3, 1_002_880, 33);
    // 102.860 on the coordinator's clock: the first failure, and the last to be received.
    job.failed(2, 12_860, 22);
    for id in 1..=3 {
        job.stopped(id, 0);
    }
    assert_eq!(job.job_result().code, 22);
}

#[test]
fn a_better_idea_of_a_clock_counts() {
    let mut job = Job::new(rules(2, 2, 0));
    job.now = Duration::from_millis(2_000);
    job.join(1, Join { sent: 2_000, ..join(1) });
    // The clock seems to be 2 s behind, but the message was only slow.
    job.join(2, join(2));
    job.now = Duration::from_millis(3_000);
    job.failed(1, 2_100, 11);
    job.failed(2, 1_900, 22);
    job.say(2, FromAgent::Beat { sent: 3_000 });
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.job_result().code, 22);
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
    // Ranks of another host fail because the connections to this one broke.
    job.failed(3, 1, 9);
    job.stopped(3, 0);
    assert_eq!(
        job.stopped(2, 0),
        [
            "2: start 1 (restart 1): host 0/2 ranks 0+2/4 at 10.0.0.2:2002",
            "3: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.2:2002",
        ]
    );
    // No restart is left for the next failure.
    assert_eq!(job.close(3), ["2: stop 1 with 15: h3 is lost: the connection broke"]);
    assert_eq!(job.stopped(2, 1), ["2: end 1", "2: close", "finish 1"]);
    let cause = Cause::HostLost { host: "h3".into(), how: "the connection broke".into() };
    assert_eq!(job.job_result().cause, Some(cause));
}

#[test]
fn a_silent_host_is_lost() {
    let mut job = Job::of_two(0);
    assert!(job.pass(10, &[1, 2]).is_empty());
    assert_eq!(
        job.pass(4, &[2]),
        ["1: close", "2: stop 0 with 15: h1 is lost: no message from it for 4 s"]
    );
    // In one process there are no heartbeats, and no host counts as silent.
    let mut job = Job::new(rules(1, 1, 0));
    job.event(Event::Joined { agent: AgentId(1), join: join(1), seen: None, remote: false });
    assert_eq!(job.formation.deadline(), None);
    assert!(job.pass(100, &[]).is_empty());
}

#[test]
fn a_loss_explains_the_failures_it_causes() {
    // The connection breaks just after the ranks of the other host failed because of it.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.say(2, FromAgent::Beat { sent: 3_000 });
    job.failed(2, 2_990, 5);
    job.close(1);
    job.stopped(2, 0);
    assert!(matches!(job.job_result().cause, Some(Cause::HostLost { .. })));
    // The loss of a host has not caused a failure that the host reported before.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.failed(1, 2_990, 5);
    job.close(1);
    job.stopped(2, 0);
    assert_eq!(job.job_result().code, 5);
    // Neither has the loss of a host that is lost much later.
    let mut job = Job::of_two(0);
    job.now = Duration::from_millis(3_000);
    job.failed(2, 3_000, 5);
    job.pass(3, &[1, 2]);
    job.close(1);
    job.stopped(2, 0);
    assert_eq!(job.job_result().code, 5);
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
    let said = job.lines(Event::Message {
        agent: AgentId(3),
        message: FromAgent::Stopped { attempt: 1, port: 1, killed: false, stuck: None },
    });
    assert_eq!(said, ["waiting up to 600 s for 1 host more"]);
    assert_eq!(job.pass(600, &[3]), ["3: end 1", "3: close", "finish 1"]);
}

#[test]
fn too_few_survivors_end_when_no_host_can_come() {
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
    // All hosts are lost.
    let mut job = Job::of_two(0);
    job.finished(1, 0);
    job.close(1);
    job.finished(2, 0);
    assert_eq!(job.job_result().code, 0);
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
fn an_agent_that_does_not_stop_is_lost() {
    let mut job = Job::of_two(1);
    job.failed(1, 1, 1);
    job.stopped(1, 0);
    assert_eq!(job.pass(50, &[1, 2]), ["2: close", "1: waiting 1/2"]);
    let mut job = Job::of_two(0);
    job.failed(1, 1, 6);
    job.stopped(1, 0);
    job.pass(50, &[1, 2]);
    assert_eq!(job.job_result().code, 6, "the failure was first");
}

#[test]
fn agents_that_break_the_rules_are_lost() {
    let mut job = Job::of_two(0);
    let again = job.say(1, FromAgent::Join(join(1)));
    assert_eq!(again, ["1: close", "2: stop 0 with 15: h1 is lost: it joined twice"]);
    let mut job = Job::of_two(0);
    assert_eq!(job.stopped(1, 0)[0], "1: close");
    let mut job = Job::of_two(0);
    let wrong = FromAgent::Failed(failure(1, 0, 0, ExitStatus::Code(256)));
    job.say(1, wrong);
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.job_result().code, 1, "a failure is never a success");
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

#[test]
fn faults_of_devices_of_all_hosts_go_with_the_first_failure() {
    let mut job = Job::of_two(0);
    job.now = Duration::from_secs(1);
    let fault = |device: &str, count| DeviceFault {
        host: "h2".into(),
        device: device.into(),
        fault: "Xid 79".into(),
        count,
        ..DeviceFault::default()
    };
    let fails = |job: &mut Job, id, at, device_faults| {
        let failure = failure(id, 0, at, ExitStatus::Code(1));
        job.say(id, FromAgent::Failed(RankFailure { device_faults, ..failure }));
    };
    fails(&mut job, 1, 10, vec![]);
    fails(&mut job, 2, 500, vec![fault("0000:3b:00.0", 1)]);
    // The same host again reports an earlier failure and a later one.
    fails(&mut job, 2, 400, vec![fault("0000:3b:00.0", 7)]);
    fails(&mut job, 2, 600, vec![fault("0000:19:00.0", 2)]);
    job.stopped(1, 0);
    job.stopped(2, 0);
    let Some(Cause::Failed(failure)) = &job.job_result().cause else { panic!() };
    assert_eq!(failure.rank, 1);
    let mut found = failure.device_faults.clone();
    found.sort_by_key(|it| it.count);
    assert_eq!(found, [fault("0000:19:00.0", 2), fault("0000:3b:00.0", 7)]);
}
