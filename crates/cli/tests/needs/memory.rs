//! Test of `brigade launch` when a rank runs out of memory.

use std::process::{Command, Stdio};

use brigade_test_hosts::MemoryGroup;
use brigade_test_needs::needs;

use crate::job::{self, Job};

#[needs(MemoryGroups)]
fn a_rank_that_runs_out_of_memory() {
    let group = MemoryGroup::new();
    group.cap(64 << 20);
    // The kernel kills the shell's child, and the shell exits with it.
    let mut job = Job::new(1).sh("head -c 100000000 /dev/zero | tail; exit $?");
    let mut shell = Command::new("sh");
    shell.args(["-c", &group.script(), job::BRIGADE]).args(job.command.get_args());
    for (name, value) in job.command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    job.command = shell;
    let run = job.run();
    assert_eq!(run.code, 137, "{}", run.stderr);
    assert!(
        run.stderr.contains("brigade: memory ran out: the kernel has killed"),
        "{}",
        run.stderr
    );
}
