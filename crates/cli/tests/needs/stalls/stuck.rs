//! Test of a rank that sleeps in the kernel: SIGKILL does not end it, and the launcher does not wait.

use std::fs;

use brigade_test_hosts::Disk;
use brigade_test_needs::needs;

use super::is_in_state;
use crate::job::{self, Job};

#[needs(Fuse)]
fn a_rank_that_cannot_be_killed_is_left_to_the_reaper() {
    let disk = Disk::mount();
    disk.freeze();
    let script = format!(
        "echo $$ > $DIR/pid$RANK; [ $RANK = 1 ] && exec touch {}/file; \
         until [ -e $DIR/go ]; do sleep 0.05; done; exit 7",
        disk.path().display()
    );
    let job = Job::new(2).flag("--shutdown-timeout=0.2").sh(&script);
    let folder = job.folder().to_owned();
    let job = job.start();
    job::wait_until(|| disk.is_waited_for() && folder.join("pid1").exists());
    let stuck: i32 = fs::read_to_string(folder.join("pid1")).unwrap().trim().parse().unwrap();
    fs::write(folder.join("go"), "").unwrap();
    let run = job.outcome();
    assert_eq!(run.code, 137, "{}", run.stderr);
    let text = format!(
        "rank 1 (pid {stuck}, state D) is stuck in the kernel: still there 10 s after SIGKILL"
    );
    assert!(run.stderr.contains(&text), "{}", run.stderr);
    // The first failure is reported nevertheless.
    assert!(run.stderr.contains("failed: exit code 7"), "{}", run.stderr);
    assert!(is_in_state(stuck, 'D'), "it is still there");
    // The reaper waits for the rank, and exits when the rank has ended.
    assert!(!job::processes_with(&format!("DIR={}", folder.display())).is_empty());
    disk.thaw();
    job::wait_until(|| job::state_of(stuck).is_none_or(|state| state == 'Z'));
    job::wait_until(|| job::reapers_of(run.pid).is_empty());
}
