//! Stalls of agents, launchers, the coordinator, the link between two hosts, the file system under the logs, and
//! memory. A job survives every stall that is shorter than the heartbeat timeout, with the right results in its first
//! attempt; a longer one ends it with a line that names the host.
//!
//! With `BRIGADE_TEST_STALLS=full` the times are real: the default timeout of 30 s, stalls of 3, 10 and 25 s. Without
//! it, the timeout is 10 s, and there is one stall of 3 s, so that even one that takes three times as long on a busy
//! machine is survived.

mod over_ssh;
mod storage;
mod stuck;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use brigade_test_hosts::Etcd;
use brigade_test_needs::needs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::job::{self, Job, Running};
use crate::launchers::Hosts;

/// Durations in this run.
struct Times {
    heartbeat: f64,
    /// Stalls that are survived, in seconds.
    stalls: &'static [f64],
    /// Cuts that are survived by a connection that only TCP itself can repair, which retransmits after 0.2, 0.4, 0.8 …
    /// s.
    cuts_over_ssh: &'static [f64],
    /// Duration above the heartbeat timeout, for stalls that are survived however long they take: if a loss is
    /// expected, tests wait for it.
    too_long: f64,
}

fn times() -> Times {
    if std::env::var("BRIGADE_TEST_STALLS").as_deref() == Ok("full") {
        let stalls = &[3.0, 10.0, 25.0];
        Times { heartbeat: 30.0, stalls, cuts_over_ssh: stalls, too_long: 40.0 }
    } else {
        Times { heartbeat: 10.0, stalls: &[3.0], cuts_over_ssh: &[2.6], too_long: 13.0 }
    }
}

impl Times {
    fn flag(&self) -> String {
        format!("--heartbeat-timeout={}", self.heartbeat)
    }
}

fn sleep(seconds: f64) {
    thread::sleep(Duration::from_secs_f64(seconds));
}

/// Stops a process for a while.
fn stop_for(pid: i32, seconds: f64) {
    send(pid, Signal::SIGSTOP);
    sleep(seconds);
    send(pid, Signal::SIGCONT);
    recover();
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Waits for some heartbeats, so that one stall does not add to the next.
fn recover() {
    sleep(1.0);
}

/// Script of a rank that computes from its rank, creates a file, waits until it may finish, and prints its result.
const COUNT: &str = "s=$RANK; i=0; while [ $i -lt 300 ]; do i=$((i+1)); s=$(( (s * 31 + i) % 1000003 )); \
    [ $i = 100 ] && echo $$ > $ALL/there-$RANK && until [ -e $ALL/fast ]; do sleep 0.05; done; done; \
    echo result $s in attempt $TORCHELASTIC_RESTART_COUNT";

/// Returns the output of [`COUNT`].
fn result(rank: u64) -> String {
    let sum = (1..=300).fold(rank, |sum, i| (sum * 31 + i) % 1_000_003);
    format!("result {sum} in attempt 0")
}

/// Waits until these ranks run.
fn wait_for_ranks(all: &Path, ranks: usize) {
    job::wait_until(|| (0..ranks).all(|rank| all.join(format!("there-{rank}")).exists()));
}

/// Lets the ranks finish.
fn finish_soon(all: &Path) {
    fs::write(all.join("fast"), "").unwrap();
}

/// Checks that all launchers succeed, with the right results.
fn succeed(launchers: Vec<Running>) -> Vec<String> {
    let mut said = Vec::new();
    for (rank, launcher) in launchers.into_iter().enumerate() {
        let run = launcher.finish();
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(run.lines_of(rank), [result(rank as u64)], "{}", run.stderr);
        said.push(run.stderr);
    }
    said
}

#[needs()]
fn an_agent_and_a_coordinator_that_are_stopped_for_a_while() {
    let (times, hosts) = (times(), Hosts::new());
    let launchers: Vec<Running> = (0..3)
        .map(|node| hosts.numbered(node, 3, 1).flag(&times.flag()).sh(COUNT).start())
        .collect();
    wait_for_ranks(hosts.all.path(), 3);
    for &stall in times.stalls {
        for launcher in &launchers[..2] {
            stop_for(launcher.pid(), stall);
        }
    }
    finish_soon(hosts.all.path());
    let said = succeed(launchers);
    // Long silences are reported to the user, as is their end.
    assert!(said[0].contains("no message from "), "{}", said[0]);
    assert!(said[0].contains(" sends messages again"), "{}", said[0]);
    assert!(said[2].contains("no message from the coordinator at "), "{}", said[2]);
}

/// The lease of the coordinator ends while it is stopped, and it remains the coordinator nevertheless.
#[needs(Etcd)]
fn a_coordinator_that_etcd_has_elected_is_stopped_for_a_while() {
    let etcd = Etcd::start();
    let (times, all) = (times(), tempfile::tempdir().unwrap());
    let endpoint = format!("--rdzv-endpoint={}", etcd.endpoint());
    let id = format!("--rdzv-id=stalls-{}", std::process::id());
    let start = |_| {
        let flags = ["--nnodes=2", "--rdzv-backend=etcd", &endpoint, &id, "--local-addr=127.0.0.1"];
        let mut job = Job::new(1).flag(&times.flag()).words(flags);
        job.command.env("ALL", all.path());
        job.sh(COUNT).start()
    };
    let launchers: Vec<Running> = (0..2).map(start).collect();
    wait_for_ranks(all.path(), 2);
    for &stall in times.stalls {
        // One of them is the coordinator.
        for launcher in &launchers {
            stop_for(launcher.pid(), stall);
        }
    }
    finish_soon(all.path());
    for launcher in launchers {
        let run = launcher.finish();
        assert_eq!(run.code, 0, "{}", run.stderr);
        let results = (0..2).filter(|rank| run.lines_of(*rank) == [result(*rank as u64)]).count();
        assert_eq!(results, 1, "{}", run.stderr);
    }
}

#[needs()]
fn an_agent_that_is_stopped_for_too_long_is_lost() {
    for stopped in [0, 1] {
        let (times, hosts) = (times(), Hosts::new());
        let mut launchers: Vec<Running> = (0..2)
            .map(|node| hosts.numbered(node, 2, 1).flag(&times.flag()).sh(COUNT).start())
            .collect();
        wait_for_ranks(hosts.all.path(), 2);
        launchers[stopped].send(Signal::SIGSTOP);
        let run = launchers.remove(1 - stopped).finish();
        assert_eq!(run.code, 1, "{}", run.stderr);
        let expected = match stopped {
            0 => format!("the connection to 127.0.0.1:{}, ", hosts.port.number()),
            _ => format!("{} is lost: no message from it for {} s", host(), times.heartbeat),
        };
        assert!(run.stderr.contains(&expected), "{}", run.stderr);
        let stopped = launchers.remove(0);
        stopped.send(Signal::SIGCONT);
        let run = stopped.finish();
        assert_eq!(run.code, 1, "it finds out when it wakes: {}", run.stderr);
        assert!(run.stderr.contains(" is lost: "), "{}", run.stderr);
    }
}

fn host() -> String {
    nix::unistd::gethostname().unwrap().into_string().unwrap()
}

/// Returns `true` if the process has not been reaped and has this state.
fn is_in_state(pid: i32, state: char) -> bool {
    job::state_of(pid) == Some(state)
}
