//! Tests in which ranks and agents are killed at any time.

use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Hosts, finish};
use crate::job::{self, Running};

#[test]
fn after_any_kill_the_job_ends_and_no_process_is_left() {
    let mut random = brigade_test_needs::random();
    for round in 0..12 {
        let hosts = Hosts::new();
        let (nodes, restarts) = (2 + random.usize(..2), random.usize(..3));
        let restarts = format!("--max-restarts={restarts}");
        let script = "setsid sleep 1000 & echo $$ > $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; wait; \
                      sleep 1000 & wait";
        let launchers: Vec<Running> = (0..nodes)
            .map(|node| {
                let job = hosts.numbered(node, nodes, 2).flag(&restarts);
                // Some may be killed before the rendezvous is complete.
                job.flag("--rdzv-conf=join_timeout=2").sh(script).start()
            })
            .collect();
        // Kills ranks and agents at any time, until the job is over.
        let mut kills = 0;
        while launchers.iter().all(|launcher| job::state_of(launcher.pid()) != Some('Z')) {
            let spin = random.u64(..3_000_000);
            (0..spin).for_each(|turn| {
                std::hint::black_box(turn);
            });
            let files: Vec<_> =
                fs::read_dir(hosts.all.path()).unwrap().map(Result::unwrap).collect();
            if random.u8(..6) == 0 {
                launchers[random.usize(..nodes)].send(Signal::SIGKILL);
            } else if let Some(file) = files.get(random.usize(..files.len().max(1)))
                && let Ok(pid) = fs::read_to_string(file.path()).unwrap_or_default().trim().parse()
                && is_rank(pid, hosts.all.path())
            {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            kills += 1;
        }
        println!("round {round}: {nodes} hosts, {restarts}, {kills} kills");
        // `finish` checks that nothing is left.
        for run in finish(launchers) {
            assert!([1, 137].contains(&run.code), "{}: {}", run.code, run.stderr);
        }
    }
}

/// Returns `true` if the process is a rank of this job, and not another one with its process ID.
fn is_rank(pid: i32, all: &Path) -> bool {
    let mark = format!("ALL={}", all.display());
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environ.split(|byte| *byte == 0).any(|var| var == mark.as_bytes())
}
