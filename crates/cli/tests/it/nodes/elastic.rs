//! Tests of hosts that join, leave and are lost while the job continues.

use std::fs;

use nix::sys::signal::Signal;

use super::Hosts;
use crate::job;

#[test]
fn hosts_come_and_leave() {
    let hosts = Hosts::new();
    // Each attempt writes its size; the job ends on the test's request.
    let script = "echo $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; touch $ALL/$WORLD_SIZE-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let flag = "--rdzv-conf=last_call_timeout=0.05,join_interval=0";
    let start = || hosts.elastic("1:3", 1).flag(flag).sh(script).start();
    let first = start();
    hosts.wait_for(&["1-0"]);
    let second = start();
    hosts.wait_for(&["2-0", "2-1"]);
    let third = start();
    hosts.wait_for(&["3-0", "3-1", "3-2"]);
    fs::remove_file(hosts.all.path().join("2-0")).unwrap();
    fs::remove_file(hosts.all.path().join("2-1")).unwrap();
    second.send(Signal::SIGTERM);
    let second = second.finish();
    assert_eq!(second.code, 143);
    assert!(second.stderr.contains("this host has left the job"), "{}", second.stderr);
    hosts.wait_for(&["2-0", "2-1"]);
    hosts.touch("end");
    let (first, third) = (first.finish(), third.finish());
    assert_eq!((first.code, third.code), (0, 0), "{}{}", first.stderr, third.stderr);
    let sizes: Vec<&str> = first.lines_of(0);
    assert_eq!(sizes, ["1 0", "2 0", "3 0", "2 0"], "none of this costs a restart");
}

#[test]
fn a_host_that_comes_and_goes_does_not_restart_the_others_again_and_again() {
    let hosts = Hosts::new();
    let script = "echo $WORLD_SIZE; touch $ALL/$WORLD_SIZE-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let flag = "--rdzv-conf=last_call_timeout=0.05,join_interval=3600";
    let start = || hosts.elastic("1:2", 1).flag(flag).sh(script).start();
    let mut first = start();
    hosts.wait_for(&["1-0"]);
    let second = start();
    hosts.wait_for(&["2-0", "2-1"]);
    fs::remove_file(hosts.all.path().join("1-0")).unwrap();
    second.send(Signal::SIGTERM);
    assert_eq!(second.finish().code, 143);
    hosts.wait_for(&["1-0"]);
    let again = start();
    first.wait_for_stderr("before it joins: a host has joined a running attempt shortly before");
    hosts.touch("end");
    let (first, again) = (first.finish(), again.finish());
    assert_eq!((first.code, again.code), (0, 0), "{}{}", first.stderr, again.stderr);
    assert_eq!(first.lines_of(0), ["1", "2", "1"]);
    assert_eq!(again.stdout, "", "it had no rank");
}

#[test]
fn a_lost_host_costs_a_restart() {
    let hosts = Hosts::new();
    let script = "echo $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; touch $ALL/$WORLD_SIZE-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let start = |serve| {
        let serve = format!("--rdzv-conf=is_host={serve}");
        hosts.elastic("1:2", 1).flag("--max-restarts=1").flag(&serve).sh(script).start()
    };
    let (first, second) = (start(true), start(false));
    hosts.wait_for(&["2-0", "2-1"]);
    second.send(Signal::SIGKILL);
    assert_eq!(second.finish().code, 137);
    hosts.wait_for(&["1-0"]);
    hosts.touch("end");
    let first = first.finish();
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert_eq!(first.stdout.lines().last().unwrap(), "[0] 1 1");
    assert!(first.stderr.contains("restart 1 of 1"), "{}", first.stderr);
}

/// Killed or stopped: no other host replaces it, as a network that is cut in two would then have a job on both sides.
#[test]
fn the_host_that_serves_is_lost() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let hosts = Hosts::new();
        let start = |serve| {
            let serve = format!("--rdzv-conf=is_host={serve}");
            let job = hosts.elastic("1:2", 1).flag("--max-restarts=3").flag(&serve);
            job.sh(super::STAY).start()
        };
        let (first, second) = (start(true), start(false));
        job::wait_until(|| fs::read_dir(hosts.all.path()).unwrap().count() >= 2);
        first.send(signal);
        let second = second.finish();
        assert_eq!(second.code, 1, "{}", second.stderr);
        let last = second.stderr.lines().last().unwrap();
        let start = format!(
            "brigade: the connection to {}, where the job is coordinated, is lost: ",
            hosts.address()
        );
        assert!(last.starts_with(&start), "{}", second.stderr);
        assert!(last.ends_with("needs --rdzv-backend etcd and --max-restarts"), "{last}");
        if signal == Signal::SIGSTOP {
            first.send(Signal::SIGTERM);
            first.send(Signal::SIGCONT);
        }
        let expected: &[i32] = if signal == Signal::SIGKILL { &[137] } else { &[1, 143] };
        assert!(expected.contains(&first.finish().code));
    }
}
