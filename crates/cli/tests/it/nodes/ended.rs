//! Tests of the end of a job with fixed node ranks: by a rank, a signal, or the loss of a host.

use nix::sys::signal::Signal;

use super::{Hosts, STAY, finish};

#[test]
fn a_failing_rank_ends_the_job_on_all_hosts() {
    for (failing, death, code, how) in [
        (3, "exit 7", 7, "exit code 7"),
        (0, "exit 7", 7, "exit code 7"),
        (1, "kill -KILL $$", 137, "killed by SIGKILL"),
    ] {
        let hosts = Hosts::new();
        let script = format!(
            "if [ $RANK = {failing} ]; then \
             until [ $(ls $ALL | wc -l) = 3 ]; do :; done; echo the reason >&2; {death}; fi; {STAY}"
        );
        let start = |node| hosts.numbered(node, 2, 2).sh(&script).start();
        let runs = finish(vec![start(0), start(1)]);
        for run in &runs {
            assert_eq!(run.code, code, "{}", run.stderr);
            let named = format!("brigade: rank {failing} on ");
            assert!(run.stderr.contains(&named), "{}", run.stderr);
            assert!(run.stderr.contains(&format!("failed: {how}; stopping ")), "{}", run.stderr);
            // As the rank's line on its own host, in the report on the other.
            assert_eq!(run.stderr.matches("the reason").count(), 1, "{}", run.stderr);
        }
    }
}

#[test]
fn a_signal_at_one_host_stops_all() {
    for (node, signal, code) in [(0, Signal::SIGINT, 130), (1, Signal::SIGTERM, 143)] {
        let hosts = Hosts::new();
        let start = |node| hosts.numbered(node, 2, 1).sh(STAY).start();
        let launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1"]);
        launchers[node].send(signal);
        for run in finish(launchers) {
            assert_eq!(run.code, code, "{}", run.stderr);
            assert!(
                run.stderr.ends_with(&format!("brigade: stopped by {signal}\n")),
                "{}",
                run.stderr
            );
        }
    }
}

#[test]
fn a_job_on_several_hosts_is_not_suspended() {
    let hosts = Hosts::new();
    let start = |node| hosts.numbered(node, 2, 1).sh(STAY).start();
    let mut launchers = vec![start(0), start(1)];
    hosts.wait_for(&["0-0", "0-1"]);
    for launcher in &mut launchers {
        launcher.send(Signal::SIGTSTP);
        launcher.wait_for_stderr("SIGTSTP: a job on several hosts cannot be suspended");
    }
    launchers[0].send(Signal::SIGTERM);
    for run in finish(launchers) {
        assert_eq!(run.code, 143, "{}", run.stderr);
    }
}

#[test]
fn a_killed_agent_ends_the_job() {
    // The coordinating host, and another one.
    for killed in [0, 1] {
        let hosts = Hosts::new();
        let start = |node| hosts.numbered(node, 2, 2).sh(STAY).start();
        let launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1", "0-2", "0-3"]);
        launchers[killed].send(Signal::SIGKILL);
        let runs = finish(launchers);
        assert_eq!(runs[killed].code, 137);
        let survivor = &runs[1 - killed];
        assert_eq!(survivor.code, 1, "{}", survivor.stderr);
        let expected = match killed {
            0 => format!(
                "brigade: the connection to {}, where the job is coordinated, is lost: ",
                hosts.address()
            ),
            _ => " is lost: ".to_owned(),
        };
        let last = survivor.stderr.lines().last().unwrap();
        assert!(last.contains(&expected), "{}", survivor.stderr);
        let remedy = "needs --rdzv-backend etcd and --max-restarts";
        assert_eq!(last.ends_with(remedy), killed == 0, "{last}");
    }
}

#[test]
fn a_frozen_agent_is_lost() {
    // No connection is closed: the loss is only noticed by silence.
    for frozen in [0, 1] {
        let hosts = Hosts::new();
        let start =
            |node| hosts.numbered(node, 2, 1).flag("--heartbeat-timeout=4").sh(STAY).start();
        let mut launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1"]);
        launchers[frozen].send(Signal::SIGSTOP);
        let survivor = launchers.remove(1 - frozen).finish();
        assert_eq!(survivor.code, 1, "{}", survivor.stderr);
        assert!(survivor.stderr.contains(" is lost: "), "{}", survivor.stderr);
        let frozen = launchers.remove(0);
        frozen.send(Signal::SIGCONT);
        let run = frozen.finish();
        assert_eq!(run.code, 1, "it finds out when it wakes: {}", run.stderr);
    }
}
