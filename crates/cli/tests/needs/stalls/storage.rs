//! Tests of a file system that does not answer, and of a lack of memory.

use std::fs;

use brigade_test_hosts::{Disk, MemoryGroup};
use brigade_test_needs::needs;

use super::{COUNT, finish_soon, recover, sleep, succeed, times, wait_for_ranks};
use crate::job::{self, Running};
use crate::launchers::Hosts;

#[needs(Fuse)]
fn a_frozen_folder_of_logs() {
    let disk = Disk::mount();
    let (times, hosts) = (times(), Hosts::new());
    let logs = format!("--log-dir={}", disk.path().display());
    // The ranks print all the time, so that the thread that writes their logs is blocked, too.
    let script = format!("while :; do echo .; sleep 0.02; done & {COUNT}; kill $!");
    let launchers: Vec<Running> = (0..2)
        .map(|node| {
            hosts
                .numbered(node, 2, 1)
                .flag(&times.flag())
                .flag(&logs)
                .flag("--tee=3")
                .sh(&script)
                .start()
        })
        .collect();
    wait_for_ranks(hosts.all.path(), 2);
    // Any duration: only the logs wait.
    for stall in times.stalls.iter().copied().chain([times.too_long]) {
        disk.freeze();
        job::wait_until(|| disk.is_waited_for());
        sleep(stall);
        disk.thaw();
        recover();
    }
    finish_soon(hosts.all.path());
    for (rank, launcher) in launchers.into_iter().enumerate() {
        let run = launcher.finish();
        assert_eq!(run.code, 0, "{}", run.stderr);
        let results = run.lines_of(rank).into_iter().filter(|line| *line != ".");
        assert_eq!(results.collect::<Vec<_>>(), [super::result(rank as u64)], "{}", run.stderr);
        assert!(!run.stderr.contains("no message from"), "{}", run.stderr);
    }
    let written = fs::read_dir(disk.path()).unwrap().count();
    assert_eq!(written, 2, "a folder for each agent");
}

#[needs(Fuse)]
fn a_folder_of_logs_that_is_frozen_while_an_attempt_begins() {
    let disk = Disk::mount();
    let (times, hosts) = (times(), Hosts::new());
    let logs = format!("--log-dir={}", disk.path().display());
    let script = "touch $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
                  until [ -e $ALL/fail ]; do sleep 0.05; done; [ $RANK = 0 ] && exit 3; sleep 1000";
    let start = |node| {
        let job = hosts.numbered(node, 2, 1).flag(&times.flag()).flag("--max-restarts=1");
        let job = if node == 1 { job.flag(&logs) } else { job };
        job.sh(script).start()
    };
    let launchers = vec![start(0), start(1)];
    let there = |name: &str| hosts.all.path().join(name).exists();
    job::wait_until(|| there("0-0") && there("0-1"));
    disk.freeze();
    fs::write(hosts.all.path().join("fail"), "").unwrap();
    job::wait_until(|| disk.is_waited_for() && there("1-0"));
    sleep(times.too_long);
    disk.thaw();
    for launcher in launchers {
        let run = launcher.finish();
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    assert!(there("1-1"));
}

#[needs(MemoryGroups)]
fn memory_that_is_short_for_a_while() {
    let group = MemoryGroup::new();
    let (times, hosts) = (times(), Hosts::new());
    let launchers: Vec<Running> = (0..2)
        .map(|node| hosts.numbered(node, 2, 1).flag(&times.flag()).sh(COUNT).start())
        .collect();
    wait_for_ranks(hosts.all.path(), 2);
    for launcher in &launchers {
        group.add(launcher.pid());
    }
    for &stall in times.stalls {
        group.squeeze(1 << 20);
        sleep(stall);
        group.release();
        recover();
    }
    finish_soon(hosts.all.path());
    succeed(launchers);
}
