//! Tests of `brigade launch --hosts` without a network: this machine alone, with a replacement for ssh.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use brigade_test_needs::needs;

use crate::job::BRIGADE;
use crate::site::write_script;

/// Returns `brigade launch` with these arguments, which is killed after one or two minutes.
fn launch(words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "180", BRIGADE, "launch"]).args(words);
    command.env("BRIGADE_CONFIG", "/dev/null").env_remove("OMP_NUM_THREADS");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Each session needs some descriptors of the launcher; most systems allow a process 1024.
#[needs()]
fn five_hundred_hosts_within_the_usual_limit_of_open_files() {
    const HOSTS: usize = 500;
    let folder = tempfile::tempdir().unwrap();
    // A client that is not called ssh gets two arguments: the host and the command line.
    let ssh = folder.path().join("stand-in");
    write_script(&ssh, "#!/bin/sh\nexec sh -c \"$2\"\n");
    let hosts: Vec<String> = (1..=HOSTS).map(|number| format!("host{number}")).collect();
    let script = "echo $RANK of $WORLD_SIZE with $(ulimit -Sn) files";
    let words = ["--hosts", &hosts.join(","), "--nproc=1", "sh", "-c", script];
    let inner = launch(&words);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 1024; exec \"$@\"", "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    command.env("BRIGADE_SSH", ssh).env("BRIGADE_CONFIG", "/dev/null").stdin(Stdio::null());

    let output = command.output().unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let after_prefix = |line| str::split_once(line, "] ").map_or(line, |(_, rest)| rest.trim());
    let mut lines: Vec<&str> = stdout.lines().map(after_prefix).collect();
    let mut expected: Vec<String> =
        (0..HOSTS).map(|rank| format!("{rank} of {HOSTS} with 1024 files")).collect();
    lines.sort_unstable();
    expected.sort_unstable();
    assert_eq!(lines, expected, "{said}");
}

/// The rank ends while its last lines wait until the launcher may receive more of them.
///
/// Runs 200 times with `BRIGADE_TEST_STALLS=full`.
#[needs()]
fn the_last_bytes_reach_a_slow_reader() {
    const LINES: usize = 2_000_000 / 3;
    let script = format!("yes ab | head -n {LINES}; echo the end");
    let is_full = std::env::var("BRIGADE_TEST_STALLS").as_deref() == Ok("full");
    for _ in 0..if is_full { 200 } else { 4 } {
        let mut job =
            launch(&["--hosts", "localhost", "--nproc=1", "sh", "-c", &script]).spawn().unwrap();
        let (lines, last) = read_slowly(&mut job);
        assert_eq!(job.wait().unwrap().code(), Some(0));
        assert_eq!((lines, &*last), (LINES + 1, "[localhost:0] the end\n"));
    }
}

/// Returns the number of lines, and the last one.
fn read_slowly(job: &mut Child) -> (usize, String) {
    let mut stdout = BufReader::with_capacity(64 << 10, job.stdout.take().unwrap());
    let (mut count, mut last) = (0, Vec::new());
    loop {
        let bytes = stdout.fill_buf().unwrap();
        if bytes.is_empty() {
            return (count, String::from_utf8(last).unwrap());
        }
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if last.ends_with(b"\n") {
                last.clear();
            }
            last.extend_from_slice(line);
            count += usize::from(line.ends_with(b"\n"));
        }
        let length = bytes.len();
        stdout.consume(length);
        thread::sleep(Duration::from_millis(1));
    }
}
