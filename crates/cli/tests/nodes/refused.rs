//! Hosts that cannot take part, or do not come.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::fs;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::job::{self, Job};
use crate::{Hosts, STAY, finish};

#[test]
fn who_cannot_take_part_is_told_why() {
    let refused = |job: Job, message: &str| {
        let run = job.sh("echo started").run();
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains(message), "{}\nexpected {message}", run.stderr);
        assert!(run.stdout.is_empty());
    };
    let hosts = Hosts::new();
    let secret = |text: &str| {
        let path = hosts.all.path().join(text);
        fs::write(&path, text).unwrap();
        format!("--rdzv-secret-file={}", path.display())
    };
    let (right, wrong) = (secret("right"), secret("wrong"));
    let mut first = hosts.numbered(0, 3, 1).flag(&right).sh(STAY).start();
    let second = hosts.numbered(1, 3, 1).flag(&right).sh(STAY).start();
    // Else the one that is to be refused might be the first with its number.
    first.wait_for_stderr("joined: 2 of 3 hosts");
    refused(hosts.numbered(2, 3, 1).flag(&wrong), "secret");
    refused(hosts.numbered(2, 3, 1), "secret");
    refused(hosts.numbered(2, 3, 1).flag(&right).flag("--rdzv-id=other"), "other");
    refused(hosts.numbered(1, 3, 1).flag(&right), "needs another --node-rank");
    refused(hosts.numbered(0, 3, 1).flag(&right), "in use");
    // None of this has hurt the job.
    let third = hosts.numbered(2, 3, 1).flag(&right).sh(STAY).start();
    hosts.wait_for(&["0-0", "0-1", "0-2"]);
    first.send(Signal::SIGTERM);
    for run in finish(vec![first, second, third]) {
        assert_eq!(run.code, 143, "{}", run.stderr);
    }
}

#[test]
fn a_host_that_cannot_start_its_ranks_is_lost() {
    let hosts = Hosts::new();
    let mut few = Command::new("sh");
    let args =
        hosts.numbered(1, 2, 24).command.get_args().map(ToOwned::to_owned).collect::<Vec<_>>();
    few.args(["-c", "ulimit -n 50 && exec \"$0\" \"$@\"", job::BRIGADE]).args(args);
    few.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let few = Job::of(few).sh("echo started").start();
    let main = hosts.numbered(0, 2, 1).sh(STAY).start();
    let (main, few) = (main.finish(), few.finish());
    assert_eq!((main.code, few.code), (1, 1), "{}{}", main.stderr, few.stderr);
    assert!(few.stderr.contains("brigade: cannot start rank "), "{}", few.stderr);
    assert!(few.stdout.is_empty());
    assert!(main.stderr.contains(" is lost: cannot start rank "), "{}", main.stderr);
}

#[test]
fn hosts_that_do_not_come() {
    let hosts = Hosts::new();
    let run = hosts.numbered(0, 2, 1).flag("--rdzv-conf=join_timeout=1").sh("echo started").run();
    assert_eq!(run.code, 1);
    assert!(run.stdout.is_empty());
    assert!(run.stderr.contains("only 1 of 2 hosts came within 1 s"), "{}", run.stderr);
    let run = hosts.numbered(1, 2, 1).flag("--rdzv-conf=join_timeout=1").sh("echo started").run();
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains(&hosts.address()), "{}", run.stderr);
}

#[test]
fn a_user_may_give_up_waiting() {
    for (node, waits) in [(0, "waiting for other hosts: 1 of 2 are there"), (1, "trying for up to")]
    {
        let hosts = Hosts::new();
        let mut job = hosts.numbered(node, 2, 1).sh("echo started").start();
        job.wait_for_stderr(waits);
        job.send(Signal::SIGINT);
        let run = job.finish();
        assert_eq!(run.code, 130, "{}", run.stderr);
        assert!(run.stdout.is_empty());
    }
}
