//! Tests of the state machine rule by rule: events in, actions out.

mod any_order;
mod cut_off;

use std::collections::VecDeque;

use brigade_hardware::DeviceFault;
use brigade_rendezvous::{Cause, ExitStatus, JobResult};
use nix::sys::signal::Signal;

use super::*;
use crate::output::Tail;

fn facts(kind: Kind) -> Facts {
    Facts {
        host: "h1".to_owned(),
        nproc: 2,
        max_restarts: 1,
        limits: TimeLimits::new(Duration::from_secs(30), Duration::from_secs(30)),
        kind,
        may_leave: kind == Kind::Elected,
        near: false,
        coordinator: "node1:29400".to_owned(),
        forwards_output: kind == Kind::Launcher,
    }
}

fn part(attempt: u32) -> Assignment {
    Assignment {
        attempt,
        restarts: attempt,
        max_restarts: 1,
        node_rank: 1,
        num_nodes: 2,
        first_rank: 2,
        nproc: 2,
        world_size: 4,
        master_addr: "10.0.0.1".to_owned(),
        master_port: 1234,
        recorded: false,
    }
}

/// An agent, and its actions as text.
struct Host {
    state: AgentState,
    now: Duration,
    done: VecDeque<String>,
}

impl Host {
    fn new(facts: Facts) -> Self {
        let (state, actions) = AgentState::new(facts);
        let mut this = Self { state, now: Duration::from_secs(100), done: VecDeque::new() };
        this.done.extend(actions.iter().map(shown));
        this
    }

    /// Returns an agent that has joined.
    fn joined(kind: Kind) -> Self {
        Self::joined_with(facts(kind))
    }

    fn joined_with(facts: Facts) -> Self {
        let here = facts.kind == Kind::OneHost;
        let mut this = Self::new(facts);
        this.tell(Event::FolderMade);
        this.tell(Event::Connected { here });
        this.done.clear();
        this
    }

    /// Returns an agent whose ranks run.
    fn running(kind: Kind) -> Self {
        Self::running_with(facts(kind))
    }

    fn running_with(facts: Facts) -> Self {
        let mut this = Self::joined_with(facts);
        this.start(0);
        this
    }

    fn start(&mut self, attempt: u32) {
        assert_eq!(self.receive(ToAgent::Start(part(attempt))), [format!("prepare {attempt}")]);
        assert_eq!(self.tell(Event::Prepared { attempt }), [format!("start {attempt}")]);
        assert!(self.tell(Event::Started(vec![41, 42])).is_empty());
    }

    fn tell(&mut self, event: Event) -> Vec<String> {
        let actions = self.state.handle(self.now, event);
        let shown: Vec<String> = actions.iter().map(shown).collect();
        self.done.extend(shown.iter().cloned());
        shown
    }

    fn receive(&mut self, message: ToAgent) -> Vec<String> {
        self.tell(Event::Received(message))
    }

    fn stop(&mut self, attempt: u32, reason: &str) -> Vec<String> {
        let reason = reason.to_owned();
        self.receive(ToAgent::Stop { attempt, signal: 15, reason })
    }

    fn exit(&mut self, local_rank: usize, code: i32) -> Vec<String> {
        self.tell(Event::Exited { local_rank, exit_status: ExitStatus::Code(code) })
    }

    fn killed(&mut self, local_rank: usize, signal: Signal) -> Vec<String> {
        let exit_status = ExitStatus::Signal(signal as i32);
        self.tell(Event::Exited { local_rank, exit_status })
    }

    fn pass(&mut self, seconds: f64) -> Vec<String> {
        let end = self.now + Duration::from_secs_f64(seconds);
        let mut shown = Vec::new();
        while let Some(due) = self.state.deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            shown.extend(self.tell(Event::Tick));
        }
        self.now = end;
        shown
    }

    fn end(&mut self, code: u8) -> Vec<String> {
        self.receive(ToAgent::End(JobResult { code, cause: None }))
    }
}

fn shown(action: &Action) -> String {
    match action {
        Action::MakeFolder => "make folder".into(),
        Action::Connect => "connect".into(),
        Action::Reconnect { patient } => format!("reconnect, patient {patient}"),
        Action::StopReconnecting => "stop reconnecting".into(),
        Action::Join(JoinRequest { resume, last, restarts }) => {
            let last = last.map(|last| (last.attempt, last.node_rank));
            format!("join: resume {resume}, last {last:?}, {restarts} restarts")
        }
        Action::Send(FromAgent::Failed(failure)) => {
            let RankFailure { at, last_lines, error, .. } = failure;
            format!("failed: {} at {at}, {last_lines:?}, {error:?}", failure.summary())
        }
        Action::Send(message) => format!("send {message:?}"),
        Action::SendStopped { attempt, killed, stuck } => {
            format!("stopped {attempt}, killed {killed}, stuck {stuck:?}")
        }
        Action::Disconnect => "disconnect".into(),
        Action::Prepare { attempt } => format!("prepare {attempt}"),
        Action::Start(part) => format!("start {}", part.attempt),
        Action::FindErrors => "find errors".into(),
        Action::Ask { local_ranks, signal } => format!("ask {local_ranks:?} {signal}"),
        Action::Forward(signal) => format!("forward {signal}"),
        Action::Suspend => "suspend".into(),
        Action::CollectFailure { local_rank, killed } => {
            format!("collect {local_rank}, killed {killed}")
        }
        Action::Inspect(ranks) => format!("inspect {ranks:?}"),
        Action::Sweep => "sweep".into(),
        Action::Release => "release".into(),
        Action::LeaveToReaper => "leave to reaper".into(),
        Action::Drain => "drain".into(),
        Action::DropOutput => "drop output".into(),
        Action::Say(text) => format!("say: {text}"),
        Action::Report(Ok(outcome)) => format!("report {}", outcome.exit_code()),
        Action::Report(Err(error)) => format!("report error: {error}"),
        Action::Exit { written } => format!("exit, written {written}"),
    }
}

#[test]
fn a_job_from_its_beginning_to_its_end() {
    let mut host = Host::new(facts(Kind::OneHost));
    assert_eq!(host.tell(Event::FolderMade), ["connect"]);
    let joined = host.tell(Event::Connected { here: true });
    assert_eq!(joined, ["join: resume false, last None, 0 restarts"]);
    host.start(0);
    assert!(host.exit(0, 0).is_empty());
    assert_eq!(host.exit(1, 0), ["sweep"]);
    assert_eq!(host.tell(Event::Swept), ["release", "drain", "send Finished { attempt: 0 }"]);
    assert_eq!(host.end(0), ["disconnect", "report 0", "drain"]);
    assert!(host.tell(Event::OthersNotified).is_empty());
    assert!(host.tell(Event::Drained).is_empty(), "of the attempt");
    assert_eq!(host.tell(Event::Drained), ["exit, written true"]);
    assert_eq!(host.state.deadline(), None);
}

#[test]
fn a_line_that_comes_while_the_agent_leaves_is_written_before_it_exits() {
    let mut host = Host::new(facts(Kind::OneHost));
    host.tell(Event::FolderMade);
    host.tell(Event::Connected { here: true });
    host.start(0);
    host.exit(0, 0);
    host.exit(1, 0);
    host.tell(Event::Swept);
    assert_eq!(host.end(0), ["disconnect", "report 0", "drain"]);
    host.tell(Event::OthersNotified);
    let line = Event::Line("no more events are written".to_owned());
    assert_eq!(host.tell(line), ["say: no more events are written", "drain"]);
    assert!(host.tell(Event::Drained).is_empty(), "of the attempt");
    assert!(host.tell(Event::Drained).is_empty(), "of the report");
    assert_eq!(host.tell(Event::Drained), ["exit, written true"]);
}

#[test]
fn a_coordinator_that_ends_before_the_ranks_is_not_waited_for() {
    let mut host = Host::joined(Kind::OneHost);
    let lost =
        Event::ConnectionLost { how: "it was closed".to_owned(), may_resume: false, closed: false };
    host.start(0);
    // The coordinator has learnt that ranks could not be started, has informed all hosts, and has ended.
    let error = LaunchError::Refused { reason: "no".to_owned() };
    host.tell(Event::StartFailed { attempt: 0, error });
    host.tell(Event::OthersNotified);
    host.tell(lost);
    host.tell(Event::Swept);
    host.tell(Event::Drained);
    assert_eq!(host.tell(Event::Drained), ["exit, written true"]);
}

#[test]
fn a_host_is_finished_when_the_last_byte_of_its_output_is_on_its_way() {
    let mut host = Host::running(Kind::Launcher);
    host.exit(0, 0);
    host.exit(1, 0);
    assert_eq!(host.tell(Event::Swept), ["release", "drain"]);
    assert!(host.pass(1000.0).is_empty(), "however long the reader pauses");
    assert_eq!(host.tell(Event::Drained), ["send Finished { attempt: 0 }"]);

    // No cause of a stop waits for a reader that has paused.
    let mut host = Host::running(Kind::Launcher);
    host.stop(0, "no");
    host.tell(Event::Exiting(vec![]));
    host.killed(0, Signal::SIGTERM);
    host.killed(1, Signal::SIGTERM);
    host.tell(Event::Swept);
    assert!(host.pass(2.9).is_empty());
    assert_eq!(host.pass(0.2), ["stopped 0, killed false, stuck None"]);
}

/// A killed rank's connections are closed before the agent is notified: ranks that fail because of that may be reported
/// earlier, here and on other hosts.
#[test]
fn a_rank_that_was_killed_comes_before_those_that_fail_because_of_it() {
    let told = |host: &mut Host, local_rank| {
        host.tell(Event::Tail { local_rank, tail: Tail { stdout: vec![], stderr: vec![] } });
        host.tell(Event::FailureDetails {
            local_rank,
            error: None,
            hint: None,
            device_faults: vec![],
        })
    };
    for signal in [Signal::SIGKILL, Signal::SIGSEGV, Signal::SIGBUS] {
        let mut host = Host::running(Kind::Peers);
        host.exit(1, 1);
        let first = told(&mut host, 1);
        assert!(first[0].contains("rank 3") && first[0].contains(" at 100000,"), "{first:?}");
        host.stop(0, "rank 3 failed");
        host.now += Duration::from_millis(300);
        host.killed(0, signal);
        let second = told(&mut host, 0);
        assert!(second[0].contains("rank 2") && second[0].contains(" at 99300,"), "{second:?}");
    }
    // A signal that the launcher has sent is not a failure, and a failure that the end of a peer may cause is not
    // counted earlier.
    let mut host = Host::running(Kind::Peers);
    host.exit(1, 1);
    told(&mut host, 1);
    host.now += Duration::from_millis(300);
    host.killed(0, Signal::SIGABRT);
    assert!(told(&mut host, 0).iter().all(|it| !it.contains("failed")));
}

#[test]
fn the_first_failure_is_told_with_what_is_known() {
    let mut host = Host::running(Kind::Peers);
    assert_eq!(host.exit(1, 7), ["collect 1, killed false"]);
    let tail = Tail { stdout: vec![], stderr: vec!["no".to_owned()] };
    assert!(host.tell(Event::Tail { local_rank: 1, tail }).is_empty());
    host.now += Duration::from_millis(20);
    // The rank's error was written before its end.
    let error = Some(("ValueError".to_owned(), Duration::from_millis(500)));
    let told = host.tell(Event::FailureDetails {
        local_rank: 1,
        error,
        hint: None,
        device_faults: vec![],
    });
    assert_eq!(
        told,
        [
            "failed: rank 3 on h1 (local rank 1, pid 42) failed: exit code 7 at 99500, [\"no\"], Some(\"ValueError\")"
        ]
    );
    // A later failure is not the first one.
    host.killed(0, Signal::SIGABRT);
    assert_eq!(host.pass(3.0), ["sweep"]);

    // The last lines of a rank on a busy host may arrive late.
    let mut host = Host::running(Kind::Peers);
    host.exit(1, 7);
    host.tell(Event::FailureDetails {
        local_rank: 1,
        error: None,
        hint: None,
        device_faults: vec![],
    });
    assert!(host.pass(0.9).is_empty());
    let tail = Tail { stdout: vec![], stderr: vec!["late".to_owned()] };
    let told = host.tell(Event::Tail { local_rank: 1, tail });
    assert!(told[0].contains("late"), "{told:?}");

    // Nothing reads the output, and the file system of the error files does not answer.
    let mut host = Host::running(Kind::Peers);
    assert_eq!(host.killed(0, Signal::SIGKILL), ["collect 0, killed true"]);
    assert!(host.pass(1.9).is_empty());
    let told = host.pass(0.2);
    assert!(told[0].contains("rank 2 on h1 (local rank 0, pid 41) failed: killed by SIGKILL"));
    assert!(told[0].contains("was not being read"), "{told:?}");
}

#[test]
fn ranks_that_write_an_error_have_time_to_end() {
    let mut host = Host::running(Kind::Peers);
    let stopped = host.stop(0, "rank 0 failed");
    assert_eq!(stopped, ["find errors", "say: rank 0 failed; stopping 2 ranks"]);
    assert_eq!(host.tell(Event::Exiting(vec![1])), ["ask [0] SIGTERM"]);
    assert!(host.killed(0, Signal::SIGTERM).is_empty(), "that is not a failure");
    assert!(host.pass(2.9).is_empty());
    assert_eq!(host.pass(0.2), ["ask [1] SIGTERM"]);
    // Without an answer in time, all ranks are asked to stop; a busy host may take longer.
    let mut host = Host::running(Kind::Peers);
    host.stop(0, "rank 0 failed");
    assert!(host.pass(0.9).is_empty());
    assert_eq!(host.pass(0.2), ["ask [0, 1] SIGTERM"]);
    assert!(host.tell(Event::Exiting(vec![1])).is_empty(), "too late");
    // Whatever the limit is, SIGTERM comes long before SIGKILL.
    let limits = TimeLimits::new(Duration::from_secs(30), Duration::from_millis(500));
    let mut host = Host::running_with(Facts { limits, ..facts(Kind::Peers) });
    host.stop(0, "rank 0 failed");
    assert_eq!(host.pass(0.3), ["ask [0, 1] SIGTERM"]);
    assert_eq!(host.pass(0.3)[0], "ask [0, 1] SIGKILL");
}

#[test]
fn ranks_that_do_not_stop_are_killed_and_those_that_cannot_be_are_left() {
    let mut host = Host::running(Kind::OneHost);
    host.stop(0, "no");
    host.tell(Event::Exiting(vec![]));
    host.killed(0, Signal::SIGTERM);
    let killed = host.pass(30.0);
    assert_eq!(killed, ["ask [0, 1] SIGKILL", "say: 1 rank did not stop within 30 s: killed"]);
    assert!(host.pass(9.9).is_empty());
    assert_eq!(host.pass(0.2), ["inspect [1]"]);
    assert!(host.pass(1000.0).is_empty(), "once");
    let left = host.tell(Event::Inspected(vec![(1, 'D')]));
    let text = "rank 3 (pid 42, state D) is stuck in the kernel: still there 10 s after SIGKILL";
    assert_eq!(
        left,
        [
            format!(
                "say: {text}; a process of brigade (`__reaper`) waits for that and clears up then"
            ),
            "leave to reaper".to_owned(),
            "drain".to_owned(),
            format!("stopped 0, killed true, stuck Some({text:?})"),
        ]
    );
    // Independent of the result of the job.
    assert_eq!(host.end(3), ["disconnect", "report 137", "drain"]);

    // The job continues without this host.
    let mut host = Host::running(Kind::Peers);
    host.receive(ToAgent::Kill);
    host.pass(10.0);
    host.tell(Event::Inspected(vec![(0, 'D'), (1, 'D')]));
    let refused = host.receive(ToAgent::Refused { reason: "stuck".to_owned() });
    assert_eq!(refused, ["disconnect", "report 137", "drain"]);
}

#[test]
fn a_user_stops_a_job_and_loses_patience() {
    let mut host = Host::running(Kind::OneHost);
    assert_eq!(
        host.tell(Event::Signal(Signal::SIGINT)),
        [
            "ask [0, 1] SIGINT",
            "send Interrupted { signal: 2, count: 1 }",
            "say: SIGINT: waiting up to 30 s for 2 ranks to stop; SIGINT (Ctrl-C) kills now",
        ]
    );
    assert!(host.receive(ToAgent::Stop { attempt: 0, signal: 2, reason: "x".into() }).is_empty());
    assert_eq!(
        host.tell(Event::Signal(Signal::SIGINT)),
        ["ask [0, 1] SIGKILL", "send Interrupted { signal: 2, count: 2 }"]
    );
    // A rank that ignores SIGINT was sent SIGTERM.
    host.killed(0, Signal::SIGTERM);
    host.killed(1, Signal::SIGKILL);
    let swept = host.tell(Event::Swept);
    assert_eq!(swept, ["release", "drain", "stopped 0, killed true, stuck None"]);
    // The coordinator does not answer.
    assert_eq!(host.pass(2.0), ["report 130", "drain"]);
    assert_eq!(host.pass(0.5), ["exit, written false"]);
}

/// Schedulers may send SIGTERM repeatedly.
#[test]
fn a_signal_that_comes_again_leaves_time_for_the_verdict() {
    let mut host = Host::running(Kind::OneHost);
    for _ in 0..2 {
        host.tell(Event::Signal(Signal::SIGTERM));
    }
    host.stop(0, "x");
    // The ranks write a checkpoint.
    host.pass(10.0);
    for local_rank in 0..2 {
        host.exit(local_rank, 0);
    }
    host.tell(Event::Swept);
    assert!(host.pass(1.5).is_empty());
    assert_eq!(host.end(0), ["disconnect", "report 0", "drain"]);
}

#[test]
fn signals_for_the_ranks() {
    let mut host = Host::running(Kind::OneHost);
    assert_eq!(host.tell(Event::Signal(Signal::SIGUSR1)), ["forward SIGUSR1"]);
    assert_eq!(host.receive(ToAgent::Signal { signal: 12 }), ["forward SIGUSR2"]);
    assert!(host.receive(ToAgent::Signal { signal: 9 }).is_empty(), "no such thing");
    assert_eq!(host.tell(Event::Signal(Signal::SIGTSTP)), ["suspend"]);
    let mut host = Host::running(Kind::Peers);
    let said = host.tell(Event::Signal(Signal::SIGTSTP));
    assert!(said[0].starts_with("say: SIGTSTP: a job on several hosts cannot be suspended"));
}

#[test]
fn a_connection_that_breaks_is_made_again_while_the_ranks_run() {
    let mut host = Host::running(Kind::Peers);
    let lost =
        Event::ConnectionLost { how: "it was reset".to_owned(), may_resume: true, closed: false };
    assert_eq!(host.tell(lost), ["reconnect, patient false"]);
    assert!(host.pass(12.0).is_empty());
    assert_eq!(host.tell(Event::Reconnected), ["join: resume true, last Some((0, 1)), 0 restarts"]);
    let resumed = host.receive(ToAgent::Resumed);
    assert_eq!(resumed, ["say: connected to node1:29400 again after 12.0 s"]);
    // Messages that the coordinator may have missed are sent again.
    let mut host = Host::running(Kind::Peers);
    let lost = || Event::ConnectionLost {
        how: "it was reset".to_owned(),
        may_resume: true,
        closed: false,
    };
    host.exit(0, 3);
    host.pass(3.0);
    host.tell(Event::Signal(Signal::SIGTERM));
    host.tell(lost());
    host.tell(Event::Reconnected);
    let resumed = host.receive(ToAgent::Resumed);
    assert!(resumed[1].starts_with("failed: rank 2 on h1"), "{resumed:?}");
    assert_eq!(resumed[2], "send Interrupted { signal: 15, count: 1 }");
    // A repeated message of the coordinator is acted on once.
    assert!(host.receive(ToAgent::Start(part(0))).is_empty());
    host.stop(0, "x");
    assert!(host.stop(0, "x").is_empty());
}

#[test]
fn a_job_without_a_coordinator_ends_when_it_does_not_come_back() {
    let broken = || Event::ConnectionLost {
        how: "it was reset".to_owned(),
        may_resume: true,
        closed: false,
    };
    let stops = |host: &mut Host| {
        host.killed(0, Signal::SIGTERM);
        host.killed(1, Signal::SIGTERM);
        host.tell(Event::Swept).last().unwrap().clone()
    };
    // The coordinator did not come back in time.
    let mut host = Host::running(Kind::Peers);
    host.tell(broken());
    assert!(host.pass(29.0).is_empty());
    assert_eq!(host.pass(1.0), ["disconnect", "ask [0, 1] SIGTERM"]);
    assert_eq!(stops(&mut host), "drain");
    assert!(host.done.contains(&"report 1".to_owned()), "{:?}", host.done);
    // The coordinator has ended, which is detected at once.
    let mut host = Host::running(Kind::Peers);
    host.tell(broken());
    let gone = host.tell(Event::CoordinatorGone { how: "connection refused".to_owned() });
    assert_eq!(gone, ["disconnect", "ask [0, 1] SIGTERM"]);
    // A launcher's session is not resumed.
    let mut host = Host::running(Kind::Launcher);
    assert_eq!(host.tell(broken()), ["disconnect", "drop output", "ask [0, 1] SIGTERM"]);
    // Another coordinator may be elected once nothing runs here.
    let mut host = Host::running(Kind::Elected);
    host.tell(broken());
    let said = host.tell(Event::CoordinatorGone { how: "connection refused".to_owned() });
    assert!(said[1].contains("it was reset; looking for the others"), "{said:?}");
    assert_eq!(stops(&mut host), "connect");
    let join = host.tell(Event::Connected { here: true });
    assert_eq!(join, ["join: resume false, last Some((0, 1)), 0 restarts"]);
}

#[test]
fn a_coordinator_that_is_silent_is_looked_for_beside_the_old_connection() {
    let mut host = Host::running(Kind::Peers);
    let said = host.tell(Event::Quiet(true));
    assert_eq!(said[0], "reconnect, patient true");
    assert!(said[1].contains(
        "no message from the coordinator at node1:29400 for 6 s; the ranks continue for up to 24 s"
    ));
    let said = host.tell(Event::Quiet(false));
    assert_eq!(
        said,
        ["stop reconnecting", "say: the coordinator at node1:29400 sends messages again"]
    );
    // A second connection is faster.
    host.tell(Event::Quiet(true));
    host.tell(Event::Reconnected);
    host.receive(ToAgent::Resumed);
    assert!(host.tell(Event::Reconnected).is_empty(), "not asked for");
    // The seat was given away.
    host.tell(Event::Quiet(true));
    host.tell(Event::Reconnected);
    let refused = host.receive(ToAgent::Refused { reason: "too late".to_owned() });
    assert_eq!(refused, ["disconnect", "ask [0, 1] SIGTERM"]);
}

#[test]
fn files_that_do_not_answer_hold_up_nothing_else() {
    // The attempt is stopped while its files are made.
    let mut host = Host::joined(Kind::Peers);
    host.receive(ToAgent::Start(part(0)));
    assert_eq!(
        host.stop(0, "h2 failed"),
        ["say: h2 failed", "stopped 0, killed false, stuck None"]
    );
    assert!(host.tell(Event::Prepared { attempt: 0 }).is_empty(), "too late");
    // A user stops the host while the files are made.
    let mut host = Host::joined(Kind::Peers);
    host.receive(ToAgent::Start(part(0)));
    host.tell(Event::Signal(Signal::SIGINT));
    host.tell(Event::Signal(Signal::SIGINT));
    assert_eq!(host.pass(2.0), ["report 130", "drain"]);
}

#[test]
fn a_host_that_cannot_start_its_ranks() {
    let mut host = Host::joined(Kind::Peers);
    host.receive(ToAgent::Start(part(0)));
    host.tell(Event::Prepared { attempt: 0 });
    let error = LaunchError::Refused { reason: "no".to_owned() };
    let said = host.tell(Event::StartFailed { attempt: 0, error });
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].starts_with("send Unable") && said[1] == "sweep", "{said:?}");
    assert_eq!(host.tell(Event::Swept), ["release", "drain"]);
    let closed =
        Event::ConnectionLost { how: "closed".to_owned(), may_resume: true, closed: false };
    let left = host.tell(closed);
    assert_eq!(left, ["disconnect", "report error: this host cannot take part: no", "drain"]);
}

#[test]
fn a_host_that_cannot_start_its_ranks_during_a_cut_says_so_afterwards() {
    let mut host = Host::joined(Kind::Peers);
    host.receive(ToAgent::Start(part(0)));
    host.tell(Event::Prepared { attempt: 0 });
    host.tell(Event::ConnectionLost {
        how: "it was reset".to_owned(),
        may_resume: true,
        closed: false,
    });
    let error = LaunchError::Refused { reason: "no".to_owned() };
    host.tell(Event::StartFailed { attempt: 0, error });
    assert_eq!(host.tell(Event::Swept), ["release", "drain"]);
    host.tell(Event::Reconnected);
    let resumed = host.receive(ToAgent::Resumed);
    assert!(resumed[1].starts_with("send Unable") && resumed[1].contains("no"), "{resumed:?}");
    let closed =
        Event::ConnectionLost { how: "closed".to_owned(), may_resume: true, closed: false };
    let left = host.tell(closed);
    assert_eq!(left, ["disconnect", "report error: this host cannot take part: no", "drain"]);
}

/// The coordinator was never asked to admit the host, so there is no answer to wait for.
#[test]
fn a_host_that_cannot_ask_to_take_part_leaves() {
    let mut host = Host::running(Kind::Elected);
    let how = "connection refused".to_owned();
    host.tell(Event::ConnectionLost { how: how.clone(), may_resume: true, closed: false });
    host.tell(Event::CoordinatorGone { how });
    host.killed(0, Signal::SIGTERM);
    host.killed(1, Signal::SIGTERM);
    assert_eq!(host.tell(Event::Swept).last().unwrap(), "connect");
    host.tell(Event::Connected { here: false });
    let error = LaunchError::Refused { reason: "no port".to_owned() };
    let left = host.tell(Event::Failed(error));
    assert_eq!(left, ["disconnect", "report error: this host cannot take part: no port", "drain"]);
}

#[test]
fn a_host_leaves_a_job_that_can_do_without_it() {
    let mut host = Host::running(Kind::Elected);
    let said = host.tell(Event::Signal(Signal::SIGTERM));
    assert_eq!(said[..2], ["ask [0, 1] SIGTERM", "send Leaving"]);
    host.killed(0, Signal::SIGTERM);
    host.killed(1, Signal::SIGTERM);
    assert_eq!(host.tell(Event::Swept), ["release", "drain", "report 143", "drain"]);
}

/// Messages that are sent while the connection is cut are lost: the agent repeats that it leaves, and never asks for
/// the others to be stopped.
#[test]
fn a_host_that_leaves_during_a_cut_leaves_when_the_connection_is_back() {
    let broken = || Event::ConnectionLost {
        how: "it was reset".to_owned(),
        may_resume: true,
        closed: false,
    };
    let stops = |host: &mut Host| {
        host.tell(Event::Signal(Signal::SIGTERM));
        host.killed(0, Signal::SIGTERM);
        host.killed(1, Signal::SIGTERM);
        host.tell(Event::Swept)
    };
    // The ranks still stop when the connection is back.
    let mut host = Host::running(Kind::Elected);
    host.tell(broken());
    host.tell(Event::Signal(Signal::SIGTERM));
    host.tell(Event::Reconnected);
    assert_eq!(host.receive(ToAgent::Resumed)[1..], ["send Leaving"]);
    // The ranks have ended before.
    for cut in [broken(), Event::Quiet(true)] {
        let mut host = Host::running(Kind::Elected);
        host.tell(cut);
        assert_eq!(stops(&mut host), ["release", "drain"]);
        assert!(host.pass(3.0).is_empty());
        host.tell(Event::Reconnected);
        let resumed = host.receive(ToAgent::Resumed);
        assert_eq!(resumed[1..], ["send Leaving", "report 143", "drain"]);
    }
    // The connection was only slow.
    let mut host = Host::running(Kind::Elected);
    host.tell(Event::Quiet(true));
    stops(&mut host);
    let heard = host.tell(Event::Quiet(false));
    assert_eq!(heard[0], "stop reconnecting");
    assert_eq!(heard[2..], ["report 143", "drain"]);
    // The connection does not come back.
    let mut host = Host::running(Kind::Elected);
    host.tell(broken());
    stops(&mut host);
    assert!(host.pass(29.9).is_empty());
    assert_eq!(host.pass(0.2), ["disconnect", "report 143", "drain"]);
    // The connection breaks after the message was sent, so that it may not have arrived.
    let mut host = Host::running(Kind::Elected);
    host.tell(Event::Signal(Signal::SIGTERM));
    assert_eq!(host.tell(broken()), ["reconnect, patient false"]);
    host.tell(Event::Reconnected);
    assert_eq!(host.receive(ToAgent::Resumed)[1..], ["send Leaving"]);
    // The coordinator answers a host that leaves by closing the connection.
    let (how, may_resume, closed) = ("it was closed".to_owned(), true, true);
    assert_eq!(host.tell(Event::ConnectionLost { how, may_resume, closed }), ["disconnect"]);
    // An impatient user does not wait for that.
    let mut host = Host::running(Kind::Elected);
    host.tell(broken());
    stops(&mut host);
    host.tell(Event::Signal(Signal::SIGTERM));
    assert_eq!(host.pass(2.0), ["disconnect", "report 143", "drain"]);
}

#[test]
fn nothing_reads_the_output() {
    let mut host = Host::running(Kind::OneHost);
    let said = host.tell(Event::OutputClosed);
    assert_eq!(said, ["ask [0, 1] SIGTERM", "send Interrupted { signal: 13, count: 1 }"]);
    assert!(host.tell(Event::OutputClosed).is_empty());
    host.killed(0, Signal::SIGTERM);
    host.killed(1, Signal::SIGTERM);
    host.tell(Event::Swept);
    let interrupted = Cause::Interrupted { signal: 13, failure: None };
    let job_result = JobResult { code: 141, cause: Some(interrupted) };
    assert_eq!(host.receive(ToAgent::End(job_result)), ["disconnect", "report 141", "drain"]);
}

#[test]
fn the_end_waits_for_what_is_still_to_be_said() {
    // A coordinator in this process still has to inform the others.
    let mut host = Host::joined(Kind::Peers);
    host.end(0);
    assert!(host.tell(Event::Drained).is_empty());
    assert!(host.pass(31.9).is_empty());
    assert_eq!(host.pass(0.2), ["exit, written true"]);
    // A reader that has paused is waited for, but not if the user is impatient.
    let mut host = Host::joined(Kind::Peers);
    host.end(0);
    host.tell(Event::OthersNotified);
    assert!(host.pass(1000.0).is_empty());
    assert!(host.tell(Event::Signal(Signal::SIGINT)).is_empty());
    assert_eq!(host.pass(0.5), ["exit, written false"]);
}

#[test]
fn faults_of_devices_go_with_a_failure_or_are_said() {
    let fault =
        DeviceFault { fault: "Xid 79".into(), means: "gone".into(), ..DeviceFault::default() };
    let told = |host: &mut Host, local_rank: usize, device_faults: Vec<DeviceFault>| {
        host.tell(Event::Tail { local_rank, tail: Tail { stdout: vec![], stderr: vec![] } });
        host.tell(Event::FailureDetails { local_rank, error: None, hint: None, device_faults })
    };
    // This host's ranks are stopped because others failed: the reason may be a device of this host.
    let mut host = Host::running(Kind::Peers);
    host.stop(0, "rank 7 failed");
    let said = host.tell(Event::DeviceFaults(vec![fault.clone()]));
    assert_eq!(said, ["say: Xid 79 on a GPU: gone; "]);
    assert!(host.tell(Event::DeviceFaults(vec![fault.clone()])).is_empty(), "once");
    // A later failure is reported, too, if it carries faults of devices.
    let mut host = Host::running(Kind::Peers);
    host.exit(1, 1);
    assert!(told(&mut host, 1, vec![])[0].starts_with("failed: rank 3"));
    host.stop(0, "rank 3 failed");
    host.now += Duration::from_secs(1);
    host.exit(0, 1);
    assert!(told(&mut host, 0, vec![fault.clone()])[0].starts_with("failed: rank 2"));
    assert!(host.tell(Event::DeviceFaults(vec![fault])).is_empty(), "the failure has told it");
}
