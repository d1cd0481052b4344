//! Commands that must succeed, and their output.

use std::io::Read;
use std::process::{Command, Stdio};

use brigade_test_needs::SYSTEM_PATH;

/// Reads a line byte by byte, so that nothing of the next line is consumed.
pub(crate) fn read_line(from: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while from.read(&mut byte).is_ok_and(|n| n == 1) && byte != *b"\n" {
        line.extend_from_slice(&byte);
    }
    String::from_utf8_lossy(&line).into_owned()
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
pub(crate) fn must(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `ip` with several commands in the network namespace of the process `inside`.
pub(crate) fn ip(inside: i32, commands: &str) {
    let script = commands.lines().map(|it| format!("ip {}", it.trim())).collect::<Vec<_>>();
    let mut command = Command::new("nsenter");
    command.args(["--net", "-t", &inside.to_string(), "sh", "-ec", &script.join("\n")]);
    must(command.env("PATH", SYSTEM_PATH));
}
