//! Tests of `brigade launch` as the first process of a container.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use brigade_test_needs::{TimeLimit, needs};

use crate::job;

/// The kernel makes the first process of a container the parent of all orphans there, including those of `kubectl
/// exec`.
#[needs(Hosts)]
fn processes_of_others_in_a_container_live_on() {
    let _limit = TimeLimit::new("a launcher in a container", Duration::from_secs(180));
    let folder = tempfile::tempdir().unwrap();
    // The second attempt begins when the processes of the first one have ended.
    let rank = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \
                  setsid sleep 1000 & echo $! >left; \
                  until [ -e guest ]; do sleep 0.02; done; exit 1; \
                fi; \
                if kill -0 $(cat left) 2>/dev/null; then echo left; fi; \
                if kill -0 $(cat guest) 2>/dev/null; then echo guest; fi";
    let mut container = Command::new("unshare");
    container.args(["--pid", "--fork", "--kill-child", "--mount-proc", job::BRIGADE, "launch"]);
    container.args(["--nproc=1", "--max-restarts=1", "sh", "-c", rank]);
    container.current_dir(folder.path()).env("BRIGADE_CONFIG", "/dev/null");
    let container = container.stdout(Stdio::piped()).spawn().unwrap();
    job::wait_until(|| folder.path().join("left").exists());

    let id = container.id();
    let first = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let guest = "cd \"$1\" && { setsid sleep 1000 >/dev/null & echo $! >part; mv part guest; }";
    let mut exec = Command::new("nsenter");
    exec.args(["--target", first.trim(), "--pid", "--mount", "sh", "-c", guest, "sh"]);
    let status = exec.arg(folder.path()).env_remove("BRIGADE_AGENT").status().unwrap();
    assert!(status.success());

    let output = container.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "[0] guest\n");
}
