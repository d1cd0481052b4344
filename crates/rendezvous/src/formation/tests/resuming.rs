//! Agents whose connection breaks or becomes silent, and that reconnect.

use super::*;

impl Job {
    fn disconnect(&mut self, id: u64, reset: bool) -> Vec<String> {
        let how = "the connection broke".into();
        self.event(Event::Disconnected { agent: AgentId(id), how, reset })
    }

    /// Agent `id` reconnects over the connection `10 * id`.
    fn resume(&mut self, id: u64, last_attempt: Option<u32>) -> Vec<String> {
        self.requests += 1;
        let join = Join { resume: self.requests, last_attempt, port: 3000, ..join(id) };
        let agent = AgentId(10 * id);
        self.event(Event::Joined { agent, join, seen: None, remote: true })
    }
}

#[test]
fn a_seat_is_kept_and_costs_one_round_trip() {
    let mut job = Job::of_two(0);
    assert!(job.disconnect(2, false).is_empty());
    assert!(job.pass(3, &[1]).is_empty());
    assert_eq!(job.resume(2, Some(0)), ["2: adopts 20", "2: resumed"]);
    assert!(job.pass(10, &[1, 2]).is_empty());
    job.finished(1, 0);
    assert_eq!(job.finished(2, 0).last().unwrap(), "finish 0");
}

#[test]
fn the_user_hears_of_a_cut_and_of_its_end() {
    let mut job = Job::of_two(0);
    let how = "no route to host".to_owned();
    let cut = Event::Disconnected { agent: AgentId(2), how, reset: false };
    let broke = "the connection to h2 broke: no route to host; its place is kept for 4 s";
    assert_eq!(job.lines(cut), [broke]);
    let join = Join { resume: 1, last_attempt: Some(0), ..join(2) };
    let back = Event::Joined { agent: AgentId(20), join, seen: None, remote: true };
    assert_eq!(job.lines(back), ["h2 is connected again"]);
    job.now += Duration::from_secs(1);
    let silent = "no message from h2 for 0.8 s; after 4 s it counts as lost";
    assert_eq!(job.lines(Event::Alive { agent: AgentId(1) }), [silent]);
    assert_eq!(job.lines(Event::Alive { agent: AgentId(2) }), ["h2 sends messages again"]);
}

#[test]
fn a_connection_that_comes_late_is_closed() {
    let mut job = Job::of_two(0);
    let come = |job: &mut Job, connection, resume| {
        let join = Join { resume, last_attempt: Some(0), ..join(2) };
        let agent = AgentId(connection);
        job.event(Event::Joined { agent, join, seen: None, remote: true })
    };
    assert_eq!(come(&mut job, 22, 2), ["2: adopts 22", "2: resumed"]);
    assert_eq!(come(&mut job, 21, 1), ["21: close"]);
    assert_eq!(come(&mut job, 23, 3), ["2: adopts 23", "2: resumed"]);
}

/// Its connection broke or was refused before the coordinator had read the agent's message.
#[test]
fn one_whose_first_request_was_lost_is_a_new_host() {
    let mut job = Job::new(rules(2, 3, 0));
    job.join(1, join(1));
    assert_eq!(job.resume(2, None), ["20: resumed", "20: waiting 2/2"]);
    // The first request was only slow.
    assert_eq!(job.join(2, join(2)), ["2: close"]);
    let started = job.pass(5, &[1, 20]);
    assert_eq!(started.len(), 2, "{started:?}");
    assert!(started[1].starts_with("20: start 0 (restart 0): host 1/2 "), "{started:?}");
    // The host is subject to the same rules as any other.
    let mut job = Job::new(Rules { run_id: "k".into(), ..rules(1, 1, 0) });
    assert!(job.resume(1, None)[0].starts_with("10: refused: h1 takes part in another job"));
}

/// Nothing is due until the disconnected agent reconnects or is lost.
#[test]
fn one_that_is_away_while_all_stop_is_waited_for_without_looking() {
    let mut job = Job::of_two(0);
    job.failed(1, 1, 3);
    let stop = job.now + rules(2, 2, 0).limits.stop();
    job.pass(48, &[1, 2]);
    job.disconnect(2, false);
    job.stopped(1, 0);
    while job.now < stop {
        job.now = job.formation.deadline().expect("it is not over");
        assert!(job.event(Event::Tick).is_empty());
        let due = job.formation.deadline();
        assert!(due.is_some_and(|due| due > job.now), "at {:?}: {due:?}", job.now);
        job.event(Event::Alive { agent: AgentId(1) });
    }
    assert_eq!(job.pass(4, &[1]).last().unwrap(), "finish 3");
}

#[test]
fn a_seat_is_not_kept_for_ever() {
    let mut job = Job::of_two(0);
    job.disconnect(2, false);
    assert_eq!(
        job.pass(4, &[1]),
        [
            "2: close",
            "1: stop 0 with 15: h2 is lost: the connection broke, and it did not come back"
        ]
    );
    let refused = "20: refused: h2 (pid 7) is not part of the job any more: it was considered lost";
    assert_eq!(job.resume(2, Some(0)), [refused, "20: close"]);
}

#[test]
fn after_a_reset_an_agent_comes_back_at_once_or_never() {
    let mut job = Job::of_two(0);
    job.disconnect(2, true);
    job.now += Duration::from_millis(100);
    assert_eq!(job.resume(2, Some(0)), ["2: adopts 20", "2: resumed"]);
    job.disconnect(2, true);
    let lost = job.pass(1, &[1]);
    assert!(lost[1].starts_with("1: stop 0 with 15: h2 is lost: "), "{lost:?}");
    assert!(job.now < Duration::from_secs(2));
}

#[test]
fn what_was_missed_is_told_again() {
    // The agent has missed a stop.
    let mut job = Job::of_two(1);
    job.disconnect(2, false);
    job.failed(1, 1, 3);
    let stop = "2: stop 0 with 15: rank 1 on h1 (local rank 0, pid 77) failed: exit code 3; restart 1 of 1";
    assert_eq!(job.resume(2, Some(0)), ["2: adopts 20", "2: resumed", stop]);
    job.stopped(1, 0);
    assert_eq!(job.stopped(2, 0).len(), 2, "both start again");
    // The agent has missed a start: it takes part in the current attempt.
    assert_eq!(
        job.resume(2, Some(0)),
        [
            "2: adopts 20",
            "2: resumed",
            "2: start 1 (restart 1): host 1/2 ranks 2+2/4 at 10.0.0.1:2001"
        ]
    );
    // The agent has missed a start and the stop after it: there is nothing to stop.
    let mut job = Job::of_two(1);
    job.failed(1, 1, 3);
    job.stopped(1, 0);
    job.stopped(2, 0);
    job.failed(1, 2, 4);
    job.stopped(1, 1);
    assert_eq!(
        job.resume(2, Some(0)),
        ["2: adopts 20", "2: resumed", "1: end 4", "1: close", "2: end 4", "2: close", "finish 4"]
    );
    // The agent has missed the order to kill the ranks.
    let mut job = Job::of_two(0);
    job.interrupt(1, INT);
    job.interrupt(1, INT);
    let said = job.resume(2, Some(0));
    assert_eq!(said[2..], ["2: stop 0 with 2: SIGINT on h1", "2: kill"]);
}

#[test]
fn a_request_that_is_sent_again_is_one_request() {
    let mut job = Job::of_two(0);
    let interrupt = |count| FromAgent::Interrupted { signal: INT, count };
    assert_eq!(job.say(2, interrupt(1)).len(), 2);
    job.resume(2, Some(0));
    assert!(job.say(2, interrupt(1)).is_empty());
    assert_eq!(job.say(2, interrupt(2)), ["1: kill", "2: kill"]);
}

#[test]
fn an_attempt_does_not_begin_without_one_that_is_away() {
    let mut job = Job::of_two(1);
    job.failed(1, 1, 3);
    job.stopped(2, 0);
    job.disconnect(2, false);
    assert!(job.stopped(1, 0).is_empty());
    assert!(job.formation.deadline().is_some());
    let said = job.resume(2, Some(0));
    assert_eq!(said[..2], ["2: adopts 20", "2: resumed"]);
    assert_eq!(said.len(), 4, "and now both start: {said:?}");
}

#[test]
fn one_that_is_away_hears_of_the_end() {
    let mut job = Job::of_two(0);
    job.finished(2, 0);
    job.disconnect(2, false);
    assert_eq!(job.finished(1, 0), ["1: end 0", "1: close", "finish 0"]);
    assert!(job.formation.has_uninformed_members());
    assert_eq!(job.resume(2, Some(0)), ["2: adopts 20", "2: resumed", "2: end 0", "2: close"]);
    assert!(!job.formation.has_uninformed_members());

    // The coordinator does not wait for it without limit, either.
    let mut job = Job::of_two(0);
    job.finished(2, 0);
    job.disconnect(2, false);
    job.finished(1, 0);
    job.pass(5, &[]);
    assert!(!job.formation.has_uninformed_members());
    assert_eq!(job.formation.deadline(), None);
}

#[test]
fn a_user_without_patience_does_not_wait_for_one_that_is_away() {
    let mut job = Job::of_two(0);
    job.disconnect(2, false);
    job.interrupt(1, INT);
    job.interrupt(1, INT);
    job.stopped(1, 0);
    job.pass(4, &[1]);
    assert_eq!(job.job_result().code, 130);
}

#[test]
fn a_host_whose_ranks_cannot_be_killed_is_let_go() {
    let stuck = |attempt| FromAgent::Stopped {
        attempt,
        port: 1,
        killed: true,
        stuck: Some("rank 2 (pid 9, state D) is stuck in the kernel".into()),
    };
    // The job ends, and its exit code shows that a process is left.
    let mut job = Job::of_two(0);
    job.failed(1, 1, 3);
    job.stopped(1, 0);
    assert_eq!(job.say(2, stuck(0)).last().unwrap(), "finish 137");
    assert!(matches!(&job.job_result().cause, Some(Cause::Failed(failure)) if failure.rank == 1));
    // The job continues without the host.
    let mut job = Job::new(rules(1, 2, 1));
    job.join(1, join(1));
    job.join(2, join(2));
    job.failed(1, 1, 3);
    job.stopped(1, 0);
    assert_eq!(
        job.say(2, stuck(0)),
        [
            "2: refused: rank 2 (pid 9, state D) is stuck in the kernel",
            "2: close",
            "1: start 1 (restart 1): host 0/1 ranks 0+2/2 at 10.0.0.1:2001"
        ]
    );
    job.finished(1, 1);
    assert_eq!(job.job_result().code, 0);
}
