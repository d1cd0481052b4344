//! Tests of hosts that cannot take part, or do not join.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use super::{Hosts, STAY, finish};
use crate::job::{self, Job};

#[test]
fn refused_hosts_get_a_reason() {
    let refused = |job: Job, message: &str| {
        let run = job.sh("echo started").run();
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains(message), "{}\nexpected {message}", run.stderr);
        assert!(run.stdout.is_empty());
    };
    let hosts = Hosts::new();
    let (right, wrong) = (hosts.secret("right"), hosts.secret("wrong"));
    let mut first = hosts.numbered(0, 3, 1).flag(&right).sh(STAY).start();
    // A variable has the same effect.
    let variable = fs::read_to_string(hosts.all.path().join("right")).unwrap();
    let mut second = hosts.numbered(1, 3, 1);
    second.command.env("BRIGADE_RDZV_SECRET", variable);
    let second = second.sh(STAY).start();
    // Otherwise the launcher that is to be refused might be the first with its node rank.
    first.wait_for_stderr("joined: 2 of 3 hosts");
    refused(hosts.numbered(2, 3, 1).flag(&wrong), "its job has another secret: set the same");
    refused(hosts.numbered(2, 3, 1), "its job has a secret, and this host was given none");
    let other = hosts.numbered(2, 3, 1).flag(&right).flag("--rdzv-id=guess");
    refused(other, "takes part in another job: give the same --rdzv-id on all hosts");
    refused(hosts.numbered(1, 3, 1).flag(&right), "needs another --node-rank");
    refused(hosts.numbered(0, 3, 1).flag(&right), "in use");
    // A secret file that other users can read is refused.
    let path = hosts.all.path().join("right");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let run = hosts.numbered(2, 3, 1).flag(&right).sh("echo started").run();
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("its mode 644 lets other users read or change it"),
        "{}",
        run.stderr
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    // The job was not affected.
    let third = hosts.numbered(2, 3, 1).flag(&right).sh(STAY).start();
    hosts.wait_for(&["0-0", "0-1", "0-2"]);
    first.send(Signal::SIGTERM);
    for run in finish(vec![first, second, third]) {
        assert_eq!(run.code, 143, "{}", run.stderr);
    }
}

#[test]
fn the_name_of_a_job_is_not_told_to_one_that_guesses() {
    let hosts = Hosts::new();
    let mut first = hosts.numbered(0, 2, 1).flag("--rdzv-id=topsecret").sh(STAY).start();
    first.wait_for_stderr("waiting for other hosts: 1 of 2");
    let guess = hosts.numbered(1, 2, 1).flag("--rdzv-id=guess").sh("echo started").run();
    assert_eq!((guess.code, guess.stdout.as_str()), (1, ""), "{}", guess.stderr);
    assert!(guess.stderr.contains("takes part in another job"), "{}", guess.stderr);
    assert!(!guess.stderr.contains("topsecret"), "{}", guess.stderr);
    first.send(Signal::SIGINT);
    let first = first.finish();
    assert!(!first.stderr.contains("guess"), "{}", first.stderr);
    // On the loopback interface no other host can join.
    assert!(!first.stderr.contains("has no secret"), "{}", first.stderr);
}

#[test]
fn ranks_do_not_see_what_only_launchers_are_to_know() {
    let hosts = Hosts::new();
    let start = |node| {
        let mut job = hosts.numbered(node, 2, 1);
        job.command.env("BRIGADE_RDZV_SECRET", "known to the launchers alone");
        job.command.env("BRIGADE_ETCD_PASSWORD", "known to the launchers alone");
        job.command.env("OTHER", "known to all");
        job.sh("env; tr '\\0' '\\n' </proc/self/environ").start()
    };
    for run in finish(vec![start(0), start(1)]) {
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(run.stdout.contains("OTHER=known to all"), "{}", run.stdout);
        assert!(!run.stdout.contains("known to the launchers alone"), "{}", run.stdout);
    }
    let alone = hosts.any(1).flag("--env=BRIGADE_RDZV_SECRET=x").sh("echo started").run();
    assert_eq!((alone.code, alone.stdout.as_str()), (2, ""), "{}", alone.stderr);
    assert!(alone.stderr.contains("not passed to the ranks"), "{}", alone.stderr);
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
