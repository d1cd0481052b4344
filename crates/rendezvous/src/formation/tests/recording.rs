//! Recording of a job's events.

use super::*;
use crate::{CauseKind, JobEvent};

impl Job {
    fn recorded(&mut self, event: Event) -> Vec<JobEvent> {
        let actions = self.formation.handle(self.now, event);
        let recorded = actions.into_iter().filter_map(|action| match action {
            Action::Record(record) => Some(record.event),
            _ => None,
        });
        recorded.collect()
    }

    fn recorded_of(&mut self, id: u64, message: FromAgent) -> Vec<JobEvent> {
        self.recorded(Event::Message { agent: AgentId(id), message })
    }
}

fn two() -> Job {
    let mut job = Job::new(Rules { recorded: true, ..rules(2, 2, 1) });
    job.join(1, join(1));
    job.join(2, join(2));
    job
}

#[test]
fn each_start_and_each_end_is_written_down_once() {
    let mut job = two();
    let started = FromAgent::Started { attempt: 0, pids: vec![11, 12], at: 0 };
    let events = job.recorded_of(2, started.clone());
    let places: Vec<_> = events
        .iter()
        .map(|event| match event {
            JobEvent::Start { rank, local_rank, host, pid, .. } => {
                (*rank, *local_rank, host.as_str(), *pid)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(places, [(2, 0, "h2", 11), (3, 1, "h2", 12)]);
    let exited =
        FromAgent::Exited { attempt: 0, local_rank: 1, exit_status: ExitStatus::Signal(9), at: 0 };
    let events = job.recorded_of(2, exited.clone());
    let [JobEvent::Exit { rank: 3, pid: 12, code: None, signal: Some(signal), .. }] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(signal, "SIGKILL");
    // An agent that was cut off repeats all reports, and invalid ones have no effect.
    let beyond =
        FromAgent::Exited { attempt: 0, local_rank: 7, exit_status: ExitStatus::Code(0), at: 0 };
    let other = FromAgent::Started { attempt: 1, pids: vec![11, 12], at: 0 };
    for again in [started, exited, beyond, other] {
        assert_eq!(job.recorded_of(2, again), []);
    }
}

#[test]
fn a_cause_stands_before_the_restart_and_before_the_end() {
    let mut job = two();
    let fail = |attempt| FromAgent::Failed(failure(2, attempt, 5, ExitStatus::Code(7)));
    let stopped = |attempt| FromAgent::Stopped { attempt, port: 1, killed: false, stuck: None };
    assert_eq!(job.recorded_of(2, fail(0)), [], "another one may have failed before it");
    assert_eq!(job.recorded_of(1, stopped(0)), []);
    let events = job.recorded_of(2, stopped(0));
    let [JobEvent::Cause(cause), JobEvent::Restart { restarts: 1, .. }, JobEvent::Attempt { .. }] =
        &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((cause.cause, cause.rank, cause.code), (CauseKind::RankFailed, Some(2), Some(7)));
    job.recorded_of(2, fail(1));
    job.recorded_of(1, stopped(1));
    let events = job.recorded_of(2, stopped(1));
    assert!(matches!(&events[..], [JobEvent::Cause(_), JobEvent::End { code: 7 }]), "{events:?}");
}

#[test]
fn a_host_that_is_lost_leaves_and_is_the_cause() {
    let mut job = two();
    let how = || "the connection broke".to_owned();
    let events = job.recorded(Event::Closed { agent: AgentId(2), how: how() });
    assert_eq!(events, [JobEvent::Leave { host: "h2".into(), reason: how() }]);
    let stopped = FromAgent::Stopped { attempt: 0, port: 1, killed: false, stuck: None };
    let events = job.recorded_of(1, stopped);
    let Some(JobEvent::Cause(cause)) = events.first() else { panic!("{events:?}") };
    assert_eq!((cause.cause, cause.host.as_deref()), (CauseKind::HostLost, Some("h2")));
}

#[test]
fn what_is_not_wanted_is_not_written_down() {
    let mut job = Job::of_two(0);
    let started = FromAgent::Started { attempt: 0, pids: vec![11, 12], at: 0 };
    assert_eq!(job.recorded_of(1, started), []);
    assert_eq!(job.recorded(Event::Closed { agent: AgentId(2), how: String::new() }), []);
}
