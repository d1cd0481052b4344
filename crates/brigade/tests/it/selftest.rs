//! Tests of the self-test alone, on two processes, and with a rank that fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SELFTEST: &str = env!("CARGO_BIN_EXE_brigade-selftest");

/// Returns the program `brigade`, which `cargo xtask test` builds before the tests run.
fn brigade() -> PathBuf {
    let path = Path::new(SELFTEST).with_file_name("brigade");
    assert!(path.is_file(), "{} is not built: cargo build -p brigade-cli", path.display());
    path
}

fn text(output: &Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn one_rank_alone_has_no_group() {
    let output = Command::new(SELFTEST).output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 process on 1 host"), "{text}");
    assert!(text.contains("skipped  reduce_scatter: one process has no group\n"), "{text}");
    assert!(text.contains("ok       weights: save, load, compare\n"), "{text}");
}

#[test]
fn facts_are_one_line_of_json() {
    let output = Command::new(SELFTEST).arg("--facts").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let facts: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(facts["built_for"], brigade_torch::libtorch_version().as_str());
    assert_eq!(facts["gpus"] == 0, facts["reason"].is_string(), "{facts}");
}

#[test]
fn dist_all_checks_pass_on_two_processes() {
    let output = Command::new(brigade()).args(["test", "--nproc", "2"]).output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("[0] 2 processes on 1 host"), "{text}");
    assert!(text.contains("[0] 15 checks passed\n"), "{text}");
    assert!(!text.contains("skipped") && !text.contains("FAILED"), "{text}");
}

#[test]
fn wrong_flags_are_answered_with_a_line() {
    let output = Command::new(brigade()).args(["test", "--nprc", "2"]).output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--nproc") && text.lines().count() == 1, "{text}");
    let output = Command::new(brigade()).args(["test", "--program", "/dev/null"]).output().unwrap();
    assert_eq!(output.status.code(), Some(126));
}
