//! `cargo xtask measure`, with which cargo-nextest starts each test.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

#[test]
fn the_time_of_a_process_is_written_with_its_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("times");
    let run = |script: &str, test: Option<&str>| -> ExitStatus {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(["measure", "sh", "-c", script]).env("XTASK_TEST_TIMES", &file);
        command.env("NEXTEST_BINARY_ID", "a::it").env_remove("NEXTEST_TEST_NAME");
        command.envs(test.map(|it| ("NEXTEST_TEST_NAME", it))).status().unwrap()
    };
    assert!(run("exit 0", None).success());
    assert!(!file.exists(), "a list of tests is no test");
    assert_eq!(run("exit 3", Some("fails")).code(), Some(3));
    assert_eq!(run("kill -KILL $$", Some("is_killed")).signal(), Some(9));
    run("sleep 0.3", Some("waits"));
    run("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done", Some("computes"));
    let text = fs::read_to_string(&file).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().map(|it| it.split('\t').collect()).collect();
    let names: Vec<_> = rows.iter().map(|it| (it[0], it[1])).collect();
    assert_eq!(names, ["fails", "is_killed", "waits", "computes"].map(|it| ("a::it", it)));
    let micros = |row: usize, column: usize| rows[row][column].parse::<u64>().unwrap();
    assert!(micros(2, 2) >= micros(2, 3) + 200_000, "it waited: {rows:?}");
    assert!(micros(3, 3) > micros(2, 3), "it computed: {rows:?}");
}

#[test]
fn a_program_that_is_missing_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let output = command.args(["measure", "/no/such/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("cannot start /no/such/program"), "{said}");
}
