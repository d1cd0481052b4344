//! Tests of what a test program reports about tests that can run, cannot run, fail and hang.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

use std::backtrace::Backtrace;
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_needs::{Missed, Need, Test, TimeLimit, needs, part, run};

/// Variable by which this program acts as one of the test programs that it examines.
const PART: &str = "SUITE_PART";

fn main() -> ExitCode {
    let inner = |tests: &[Test]| run("inner::program", tests);
    const ALWAYS: &[Need] = &[];
    match env::var(PART).as_deref() {
        Ok("needs etcd") => inner(&[
            Test { path: "program::passes", needs: ALWAYS, limit: None, body: || {} },
            Test { path: "program::elects", needs: &[Need::Etcd], limit: None, body: || {} },
            Test { path: "program::elects_again", needs: &[Need::Etcd], limit: None, body: || {} },
        ]),
        Ok("fails") => inner(&[Test {
            path: "program::fails",
            needs: ALWAYS,
            limit: None,
            body: || panic!("the reason"),
        }]),
        Ok("hangs") => {
            // Started before the time limit.
            let mut sleep = Command::new("sleep").arg("1000").spawn().unwrap();
            let _limit = TimeLimit::new("the test", Duration::from_millis(200));
            let _ = sleep.wait();
            ExitCode::SUCCESS
        }
        _ => brigade_test_needs::main("brigade-test-needs::outcomes"),
    }
}

/// Runs this program as one of the test programs, where no etcd is found.
fn play(part: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(arguments).env(PART, part).env("PATH", "/no/such/folder");
    for name in ["BRIGADE_REQUIRE", brigade_test_needs::REPORT] {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[needs()]
fn a_test_that_cannot_run_has_not_passed() {
    let output = play("needs etcd", &[], &[]);
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    assert!(said.contains("test elects       ... ignored"), "{said}");
    assert!(said.contains("1 passed; 0 failed; 2 ignored;"), "{said}");
    let reason = "2 ignored, which need an etcd server: etcd is not installed: `cargo xtask \
                  install etcd` installs it\n";
    assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
}

#[needs()]
fn where_it_is_required_it_has_failed() {
    for variables in [&[("BRIGADE_REQUIRE", "hosts,etcd")][..], &[("BRIGADE_REQUIRE", " etcd , ")]]
    {
        let output = play("needs etcd", &[], variables);
        assert_eq!(output.status.code(), Some(101));
        let said = text(&output.stdout);
        assert!(said.contains("1 passed; 2 failed; 0 ignored;"), "{said}");
        assert!(said.contains("needs an etcd server: etcd is not installed"), "{said}");
    }
    // A need is also checked for a test that is run by name.
    let output = play("needs etcd", &["elects", "--exact", "--include-ignored"], &[]);
    assert_eq!(output.status.code(), Some(101));
    assert!(text(&output.stdout).contains("0 passed; 1 failed; 0 ignored;"));
    let output = play("needs etcd", &[], &[("BRIGADE_REQUIRE", "hosts,ectd")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("`ectd` is nothing that tests need"));
}

#[needs()]
fn lists_are_those_of_libtest() {
    let list = |arguments: &[&str]| text(&play("needs etcd", arguments, &[]).stdout);
    let all = ["--list", "--format", "terse"];
    assert_eq!(list(&all), "passes: test\nelects: test\nelects_again: test\n");
    let ignored = ["--list", "--format", "terse", "--ignored"];
    assert_eq!(list(&ignored), "elects: test\nelects_again: test\n");
}

#[needs()]
fn ignored_tests_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let report = |arguments: &[&str]| -> BTreeSet<Missed> {
        let path = folder.path().join("report");
        let _ = fs::remove_file(&path);
        for _ in 0..2 {
            play("needs etcd", arguments, &[(brigade_test_needs::REPORT, path.to_str().unwrap())]);
        }
        Missed::read(&path).unwrap()
    };
    let missed = |test: &str| {
        let (program, test) = ("inner::program".to_owned(), test.to_owned());
        Missed { need: Need::Etcd, program, test }
    };
    let both = BTreeSet::from([missed("elects"), missed("elects_again")]);
    assert_eq!(report(&[]), both);
    assert_eq!(report(&["--list", "--format", "terse"]), both);
    assert_eq!(report(&["again"]), BTreeSet::from([missed("elects_again")]));
    assert_eq!(report(&["passes"]), BTreeSet::new());
    assert_eq!(Missed::read(&folder.path().join("nothing")).unwrap(), BTreeSet::new());
}

#[needs()]
fn a_panic_is_a_failure() {
    let output = play("fails", &[], &[]);
    assert_eq!(output.status.code(), Some(101));
    assert!(text(&output.stdout).contains("the reason"));
}

#[needs()]
fn hanging_tests_are_named_and_killed() {
    let output = play("hangs", &[], &[("PATH", "/usr/bin:/bin")]);
    assert_eq!(output.status.code(), Some(101));
    let said = text(&output.stderr);
    assert!(said.contains("the test has not ended within 0 s"), "{said}");
    let line = said.lines().find(|it| it.ends_with("sleep 1000")).unwrap();
    let pid = line.split_whitespace().next().unwrap();
    // It was sent SIGKILL, and may not have been scheduled since.
    let stat = Path::new("/proc").join(pid).join("stat");
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let state = fs::read_to_string(&stat).unwrap_or_default();
        let state = state.rsplit_once(") ").map_or("X", |it| it.1);
        if state.starts_with(['X', 'Z']) {
            break;
        }
        assert!(Instant::now() < deadline, "{line}: {state}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[part]
fn says_its_name() {
    eprintln!("a part");
}

#[needs()]
fn a_part_runs_in_a_process_of_its_own() {
    let output = play("none", &["--part", "says_its_name"], &[]);
    assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(0), "a part\n"));
    let output = play("none", &["--part", "says"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stderr), "brigade-test-needs::outcomes has no part `says`\n");
}

/// The workspace is built with line tables as its only debug information: a backtrace still contains the lines of a
/// test, and of our libraries that call it.
#[needs()]
fn a_backtrace_names_our_lines() {
    let (trace, line) = (Backtrace::force_capture().to_string(), line!());
    assert!(trace.contains(&format!("tests/outcomes.rs:{line}:")), "{trace}");
    assert!(trace.contains("src/harness.rs:"), "{trace}");
}
