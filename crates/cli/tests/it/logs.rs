//! Tests of the destinations of the ranks' output in `brigade launch`: log files, the console, or both.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use brigade_test_needs::TimeLimit;
use nix::pty::{Winsize, openpty};
use nix::unistd::geteuid;
use tempfile::TempDir;

use crate::job::{BRIGADE, Job, Run, brigade};
use crate::person::Person;

const SPEAK: &str = "echo out $RANK; echo err $RANK >&2";

/// Job with log files, and their folder.
struct Logged {
    base: TempDir,
    run: Run,
}

impl Logged {
    fn new(nproc: usize, flags: &[&str], script: &str) -> Self {
        let base = tempfile::tempdir().unwrap();
        let mut job = Job::new(nproc);
        job.command.arg("--log-dir").arg(base.path());
        let run = flags.iter().fold(job, |job, flag| job.flag(flag)).sh(script).run();
        Self { base, run }
    }

    /// Returns the folder of its only attempt.
    fn attempt(&self) -> PathBuf {
        let runs: Vec<_> = fs::read_dir(self.base.path()).unwrap().map(Result::unwrap).collect();
        assert_eq!(runs.len(), 1, "one folder for one job");
        runs[0].path().join("attempt_0")
    }

    /// Returns the content of a file of the attempt; `None` if it does not exist.
    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.attempt().join(name)).ok()
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn a_log_folder_alone_keeps_everything_and_shows_it() {
    let logged = Logged::new(2, &[], SPEAK);
    assert_eq!(logged.run.code, 0);
    assert_eq!(sorted(&logged.run.stdout), ["[0] out 0", "[1] out 1"]);
    for rank in 0..2 {
        assert_eq!(logged.read(&format!("{rank}/stdout.log")), Some(format!("out {rank}\n")));
        assert_eq!(logged.read(&format!("{rank}/stderr.log")), Some(format!("err {rank}\n")));
    }
    let folder = logged.attempt().parent().unwrap().to_owned();
    let said = format!("brigade: logs are in {}", folder.display());
    assert!(logged.run.stderr.lines().any(|line| line == said), "{}", logged.run.stderr);
    assert_eq!(sorted(&logged.run.stderr).len(), 3);
}

#[test]
fn the_run_folder_has_the_jobs_name() {
    let logged = Logged::new(1, &[], "echo $TORCHELASTIC_RUN_ID");
    let folder = logged.attempt().parent().unwrap().to_owned();
    let (id, random) = folder.file_name().unwrap().to_str().unwrap().rsplit_once('_').unwrap();
    assert_eq!(logged.run.stdout, format!("[0] {id}\n"));
    assert_eq!(random.len(), 6);
}

#[test]
fn modes() {
    // Flags; then, for each of two ranks: stdout shown, stdout kept, stderr shown, stderr kept.
    let table: [(&[&str], [[bool; 4]; 2]); 7] = [
        (&["--tee=0"], [[true, false, true, false]; 2]),
        (&["--redirects=3"], [[false, true, false, true]; 2]),
        (&["-r1"], [[false, true, true, false]; 2]),
        (&["-t", "2"], [[true, false, true, true]; 2]),
        (&["--redirects", "0:3,1:2"], [[false, true, false, true], [true, false, false, true]]),
        (&["--redirects=3", "--tee=0:3"], [[true, true, true, true], [false, true, false, true]]),
        (
            &["--local-ranks-filter=1", "--tee=3"],
            [[false, true, false, true], [true, true, true, true]],
        ),
    ];
    for (flags, expected) in table {
        let logged = Logged::new(2, flags, SPEAK);
        for (rank, expected) in expected.into_iter().enumerate() {
            let (out, err) = (format!("out {rank}\n"), format!("err {rank}\n"));
            let found = [
                logged.run.stdout.contains(&format!("[{rank}] {out}")),
                logged.read(&format!("{rank}/stdout.log")) == Some(out),
                logged.run.stderr.contains(&format!("[{rank}] {err}")),
                logged.read(&format!("{rank}/stderr.log")) == Some(err),
            ];
            assert_eq!(found, expected, "{flags:?}, rank {rank}");
            for (i, name) in [(1, "stdout"), (3, "stderr")] {
                let there = logged.read(&format!("{rank}/{name}.log")).is_some();
                assert_eq!(there, expected[i], "{flags:?}: {name} of {rank} is a file");
            }
        }
    }
}

#[test]
fn local_ranks_may_have_two_digits() {
    let logged = Logged::new(12, &["--redirects=11:1"], SPEAK);
    assert_eq!(logged.read("11/stdout.log").as_deref(), Some("out 11\n"));
    assert!(!logged.run.stdout.contains("out 11\n"));
    assert_eq!(logged.run.stdout.lines().count(), 11);
}

#[test]
fn log_files_hold_the_bytes_as_they_were_written() {
    // 4 MB of every kind of byte, with long lines, carriage returns and no final line break.
    let script = "head -c 4000000 /dev/urandom > $DIR/sent; printf end >> $DIR/sent; cat $DIR/sent; \
                  cp $DIR/sent $LOGS/sent";
    let base = tempfile::tempdir().unwrap();
    let mut job = Job::new(1);
    job.command.env("LOGS", base.path()).arg("--log-dir").arg(base.path()).arg("--redirects=3");
    let run = job.sh(script).run();
    assert_eq!((run.code, run.raw_stdout.len()), (0, 0));
    let find = |name: &str| {
        let entries = fs::read_dir(base.path()).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| path.join(name)).find(|path| path.exists()).unwrap()
    };
    let kept = fs::read(find("attempt_0/0/stdout.log")).unwrap();
    assert!(kept == fs::read(base.path().join("sent")).unwrap(), "{} bytes", kept.len());
}

#[test]
fn the_last_lines_of_a_redirected_rank_are_in_the_report() {
    let script = "echo fine; echo the reason >&2; exit 3";
    let logged = Logged::new(1, &["--redirects=3"], script);
    assert_eq!((logged.run.code, logged.run.stdout.as_str()), (3, ""));
    let report = "brigade: its last lines on stderr:\n  the reason\n";
    assert!(logged.run.stderr.ends_with(report), "{}", logged.run.stderr);
}

#[test]
fn words_are_collected_from_all_ranks_under_tee() {
    let script = "echo loss $RANK; echo other; printf 'error at the end' >&2";
    let flags = ["--duplicate-stdout-filters=loss,nothing", "--duplicate-stderr-filters=error"];
    let logged = Logged::new(2, &flags, script);
    let stdout = logged.read("filtered_stdout.log").unwrap();
    assert_eq!(sorted(&stdout), ["[0] loss 0", "[1] loss 1"]);
    let stderr = logged.read("filtered_stderr.log").unwrap();
    assert_eq!(sorted(&stderr), ["[0] error at the end", "[1] error at the end"]);

    let logged = Logged::new(2, &[flags[0], "--tee=1:1"], script);
    assert_eq!(logged.read("filtered_stdout.log").unwrap(), "[1] loss 1\n");
    assert!(logged.read("filtered_stderr.log").is_none());
}

#[test]
fn without_a_log_folder_files_are_temporary_and_named() {
    let temporary = tempfile::tempdir().unwrap();
    let mut job = Job::new(1);
    job.command.env("TMPDIR", temporary.path());
    let run = job.flag("--redirects=1").sh(SPEAK).run();
    assert_eq!(run.stdout, "");
    let said =
        run.stderr.lines().find_map(|line| line.strip_prefix("brigade: logs are in ")).unwrap();
    assert!(said.starts_with(temporary.path().to_str().unwrap()), "{said}");
    assert_eq!(
        fs::read_to_string(Path::new(said).join("attempt_0/0/stdout.log")).unwrap(),
        "out 0\n"
    );
}

#[test]
fn nothing_is_left_among_the_temporary_files_of_a_job_without_logs() {
    let temporary = tempfile::tempdir().unwrap();
    for script in [SPEAK, "exit 3"] {
        let mut job = Job::new(2);
        job.command.env("TMPDIR", temporary.path());
        job.sh(script).run();
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
    }
    // A job that needs no such folder does not create one.
    let nowhere = temporary.path().join("nowhere");
    let mut job = Job::new(1);
    job.command.env("TMPDIR", &nowhere);
    assert_eq!(job.sh(SPEAK).run().code, 0);
    assert!(!nowhere.exists());
}

#[test]
fn dev_null_keeps_no_logs() {
    let run = Job::new(1).flag("--log-dir=/dev/null").flag("--redirects=1").sh(SPEAK).run();
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("", "[0] err 0\n"));
}

#[test]
fn invalid_log_options_are_refused_before_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let file = format!("--log-dir={}", file.display());
    let table: [(&[&str], i32, &str); 9] = [
        (&["--tee=4"], 2, "expected a mode from 0 to 3, or RANK:MODE pairs such as 0:3,1:2"),
        (&["--redirects=0:1,0:2"], 2, "local rank 0 is given twice"),
        (&["--redirects=1-2:3"], 2, "expected RANK:MODE, such as 0:3, found \"1-2:3\""),
        (&["--tee=5:3"], 2, "--tee names local rank 5, but this host has only local ranks 0 to 1"),
        (&["--local-ranks-filter=x"], 2, "expected a local rank, a number from 0, found \"x\""),
        (&["--duplicate-stdout-filters=,"], 2, "expected words with commas between them"),
        (&["--color=blue"], 2, "expected auto, always or never, found \"blue\""),
        (&[&file], 1, "choose another folder with --log-dir"),
        (&["--log-dir=/proc/nothing"], 1, "cannot keep logs in /proc/nothing: "),
    ];
    for (flags, code, message) in table {
        let script = "echo started";
        let run = flags.iter().fold(Job::new(2), |job, flag| job.flag(flag)).sh(script).run();
        assert_eq!(run.code, code, "{flags:?}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{flags:?}: {}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(code == 2 || run.stderr.matches("os error").count() == 1, "{}", run.stderr);
    }
}

#[test]
fn too_few_descriptors_are_said_before_a_program_runs() {
    // Between too few descriptors for the ranks' pipes and enough for everything, there are too few for log files.
    let folder = tempfile::tempdir().unwrap();
    let mut refusals = Vec::new();
    for limit in (60..).step_by(8) {
        let script = format!(
            "ulimit -n {limit} && exec {BRIGADE} launch --nproc 24 --log-dir {} echo started",
            folder.path().display()
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        if output.status.success() {
            break;
        }
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{stderr}");
        assert_eq!(stderr.matches("Too many open files").count(), 1, "{stderr}");
        refusals.push(stderr);
    }
    let said = ".log (`ulimit -n` is too low): Too many open files";
    assert!(refusals.iter().any(|refusal| refusal.contains(said)), "{refusals:?}");
}

#[test]
fn a_folder_without_permission_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    // Root may write everywhere, so root becomes another user. The program is copied to a place where others may read
    // it.
    let program = folder.path().join("brigade");
    fs::copy(BRIGADE, &program).unwrap();
    let locked = folder.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(program);
    if geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    command.env("BRIGADE_CONFIG", "/dev/null").current_dir("/");
    command.args(["launch", "--nproc=1", "--log-dir"]).arg(&locked).arg("true");
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot keep logs in "), "{stderr}");
    assert!(stderr.contains("Permission denied"), "{stderr}");
}

#[test]
fn colours() {
    let colored = "\x1b[36m[0]\x1b[0m out 0\n\x1b[33m[1]\x1b[0m out 1\n";
    let run = |flag: &str, vars: &[(&str, &str)]| {
        let mut job = Job::new(2).flag(flag);
        for name in ["NO_COLOR", "CLICOLOR_FORCE"] {
            job.command.env_remove(name);
        }
        job.command.envs(vars.iter().copied());
        let run = job.sh("echo out $RANK").run();
        let mut lines: Vec<_> = run.stdout.split_inclusive('\n').collect();
        lines.sort_unstable();
        lines.concat()
    };
    let plain = "[0] out 0\n[1] out 1\n";
    assert_eq!(run("--color=auto", &[]), plain, "a pipe is not a terminal");
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.split_inclusive('\n').collect();
        lines.sort_unstable();
        lines.concat()
    };
    assert_eq!(run("--color=always", &[]), sorted(colored));
    assert_eq!(run("--color=auto", &[("CLICOLOR_FORCE", "1")]), sorted(colored));
    assert_eq!(run("--color=auto", &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]), plain);
    assert_eq!(run("--color=never", &[("CLICOLOR_FORCE", "1")]), plain);
}

#[test]
fn the_terminal_is_coloured_and_the_file_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).unwrap();
    let mut command = brigade();
    command.args(["launch", "--nproc=1", "--log-dir"]).arg(folder.path()).args(["echo", "out"]);
    command.env_remove("NO_COLOR").env("TERM", "xterm").stdin(Stdio::null());
    let end = || Stdio::from(terminal.slave.try_clone().unwrap());
    let status = command.stdout(end()).stderr(end()).status().unwrap();
    assert!(status.success());
    // After its last writer, the terminal returns an error after the output.
    drop((command, terminal.slave));
    let mut shown = Vec::new();
    let _ = File::from(terminal.master).read_to_end(&mut shown);
    let shown = String::from_utf8_lossy(&shown).into_owned();
    assert!(shown.contains("\x1b[36m[0]\x1b[0m out\r\n"), "{shown}");
    let run = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(fs::read_to_string(run.join("attempt_0/0/stdout.log")).unwrap(), "out\n");
}

#[test]
fn a_prefix_from_the_environment() {
    let mut job = Job::new(1);
    job.command.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}/$local_rank]:");
    assert_eq!(job.sh("echo out").run().stdout, "[default0/0]:out\n");
}

#[test]
fn quiet_hides_the_launcher_but_not_a_failure() {
    let script = "echo out; touch $DIR/$RANK; if [ $RANK = 0 ]; then \
                  until [ -e $DIR/1 ]; do :; done; exit 3; fi; sleep 1000 & wait";
    let logged = Logged::new(2, &["--quiet", "--redirects=0"], script);
    assert_eq!(logged.run.code, 3);
    let lines: Vec<_> = logged.run.stderr.lines().collect();
    assert!(lines[0].starts_with("brigade: rank 0 on ") && lines[0].ends_with("exit code 3"));
    assert_eq!(lines[1..], ["brigade: its last lines on stdout:", "  out"]);
}

/// Starts a job of one rank on a terminal of its own.
fn on_a_terminal(flags: &[&str], script: &str) -> Person {
    let mut words = vec!["--ctty", BRIGADE, "launch"];
    words.extend(flags);
    words.extend(["sh", "-c", script]);
    let mut command = Command::new("setsid");
    command.args(words).env("BRIGADE_CONFIG", "/dev/null").env("TERM", "xterm");
    Person::answering(command)
}

#[test]
fn one_rank_has_the_terminal() {
    let _limit = TimeLimit::new("a rank that reads from the keyboard", LIMIT);
    let script = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] || exit 9; printf '10%%\\r20%%\\rname? '; \
                  read -r name; echo \"hello $name\"";
    let mut person = on_a_terminal(&[], script);
    person.expect("10%\r20%\rname? ");
    person.types("ada\n");
    person.expect("hello ada");
    assert_eq!(person.ends(), 0);

    let folder = tempfile::tempdir().unwrap();
    let logs = format!("--log-dir={}", folder.path().display());
    // Flags that need lines, or turn it off.
    for flag in ["--no-raw", "--prefix=[$rank] ", "--tee=3"] {
        // Otherwise --tee would keep its files among the temporary ones.
        let flags = [flag, logs.as_str()];
        let flags = if flag.starts_with("--tee") { &flags[..] } else { &flags[..1] };
        let mut person = on_a_terminal(flags, "[ ! -t 0 ] && [ ! -t 1 ] && echo none");
        person.expect("none\r\n");
        assert_eq!(person.ends(), 0, "{flag}");
    }
    // One stream may go to a file and the other to the terminal.
    let folder = tempfile::tempdir().unwrap();
    let logs = format!("--log-dir={}", folder.path().display());
    let script = "[ -t 0 ] && [ ! -t 1 ] && echo quiet && echo loud >&2";
    let mut person = on_a_terminal(&["--raw", "--redirects=1", &logs], script);
    person.expect("loud\r\n");
    assert_eq!(person.ends(), 0);
    let run = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(fs::read_to_string(run.join("attempt_0/0/stdout.log")).unwrap(), "quiet\n");
}

#[test]
fn ctrl_c_is_for_the_rank_that_has_the_terminal() {
    let _limit = TimeLimit::new("a rank that is interrupted on its terminal", LIMIT);
    // A program that handles the signal, like a debugger, continues.
    let script = "trap 'echo caught; c=1' INT; echo ready; until [ $c ]; do sleep 0.02; done; \
                  read -r code; exit $code";
    let mut person = on_a_terminal(&[], script);
    person.expect("ready");
    person.types("\x03");
    person.expect("caught");
    person.types("7\n");
    person.expect("failed: exit code 7");
    assert_eq!(person.ends(), 7);

    // A program that ends by the signal has not failed: nothing is reported, nothing restarts.
    let mut person = on_a_terminal(&["--max-restarts=3"], "echo ready; exec sleep 1000");
    person.expect("ready");
    person.types("\x03");
    person.expect("brigade: stopped by SIGINT\r\n");
    assert_eq!(person.ends(), 130);
}

#[test]
fn ctrl_z_suspends_a_job_that_has_the_terminal() {
    let _limit = TimeLimit::new("a job that is suspended", LIMIT);
    let script = format!(
        "'{BRIGADE}' launch sh -c 'echo ready; read -r name; echo \"hello $name\"'; \
         echo \"stopped $?\"; fg; echo \"ended $?\""
    );
    let mut command = Command::new("setsid");
    command.args(["--ctty", "sh", "-m", "-c", &script]);
    command.env("BRIGADE_CONFIG", "/dev/null").env("TERM", "xterm");
    let mut person = Person::answering(command);
    person.expect("ready");
    person.types("\x1a");
    // 128 + SIGSTOP.
    person.expect("stopped 147");
    person.types("ada\n");
    person.expect("hello ada");
    person.expect("ended 0");
    assert_eq!(person.ends(), 0);
}

#[test]
fn raw_is_refused_where_it_cannot_be() {
    let refuse = |flags: &[&str]| {
        let output = brigade().arg("launch").args(flags).arg("true").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let start = "brigade: --raw connects the rank to the terminal, so the launcher does not read its output: ";
    let refused = refuse(&["--raw", "--nproc=2"]);
    assert_eq!(refused, format!("{start}2 ranks cannot share one terminal: use --nproc 1\n"));
    let refused = refuse(&["--raw", "--log-dir=logs"]);
    assert!(refused.starts_with(&format!("{start}--log-dir writes to a file what is shown")));
    let refused = refuse(&["--raw", "--hosts=localhost:1"]);
    assert!(refused.contains("raw (flag --raw) with a list of hosts"), "{refused}");
}

#[test]
fn raw_passes_any_stdin_through() {
    let mut job = Job::new(1).flag("--raw");
    job.command.stdin(Stdio::from(File::open("/proc/version").unwrap()));
    let run = job.words(["cat"]).run();
    assert_eq!(run.stdout, fs::read_to_string("/proc/version").unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
}

/// Script of a rank that reports its progress to its launcher, and waits.
const REPORT: &str = "printf '{\"label\":\"epoch 3\",\"position\":%d,\"length\":40,\"rate\":9.5}\\n' \
                      $((7 - RANK)) > /proc/self/fd/$BRIGADE_PROGRESS_FD; \
                      until [ -e $DIR/go ]; do sleep 0.02; done; echo line of $RANK";

#[test]
fn a_live_line_stands_below_the_lines_of_the_ranks() {
    let _limit = TimeLimit::new("a live line", LIMIT);
    let folder = tempfile::tempdir().unwrap();
    for flags in [&["--nproc=2"][..], &["--hosts=localhost:2", "--prefix=[${rank}] "]] {
        let go = folder.path().join("go");
        let _ = fs::remove_file(&go);
        let mut command = Command::new(BRIGADE);
        command.arg("launch").args(flags).args(["--color=never", "--env"]);
        command.arg(format!("DIR={}", folder.path().display())).args(["sh", "-c", REPORT]);
        command.env("BRIGADE_CONFIG", "/dev/null").env("TERM", "xterm");
        let mut person = Person::answering(command);
        person.expect(
            "epoch 3: 7/40 (18 %), 9.50 it/s, 00:03 left | 2 ranks 19.0 it/s, slowest rank 1: 6/40",
        );
        fs::write(&go, "").unwrap();
        let (code, mut lines) = person.screen();
        lines.sort();
        assert_eq!(code, 0);
        // The progress line is removed, and has split no other line.
        assert_eq!(lines, ["[0] line of 0", "[1] line of 1"], "{flags:?}");
    }
}

#[test]
fn a_quiet_launcher_and_a_file_have_no_live_line() {
    let script = "for i in 1 2 3; do printf '\\rtrain: %d0%%|#  | %d/10 [00:01<00:05, 2.00it/s]' $i $i >&2; \
                  done; printf '\\n' >&2; echo out";
    let run = Job::new(2).sh(script).run();
    let mut lines: Vec<&str> = run.stderr.lines().collect();
    lines.sort_unstable();
    let last = |rank| format!("[{rank}] train: 30%|#  | 3/10 [00:01<00:05, 2.00it/s]");
    assert_eq!(lines, [last(0), last(1)], "a bar is its last state");
    let run = Job::new(1).flag("--quiet").sh(script).run();
    assert_eq!(run.stderr.matches("[0] train: ").count(), 3, "{:?}", run.stderr);

    // A log file has each byte.
    let logged = Logged::new(2, &[], script);
    let text = fs::read_to_string(logged.attempt().join("0/stderr.log")).unwrap();
    assert_eq!(text.matches("\rtrain: ").count(), 3, "{text:?}");
}

#[test]
fn malformed_reports_are_ignored() {
    let script = "exec 2>/proc/self/fd/$BRIGADE_PROGRESS_FD; i=0; \
                  while [ $i -lt 200 ]; do echo '{\"position\":-1,\"label\":7}' >&2; \
                  head -c 5000 /dev/zero >&2; i=$((i + 1)); done; echo alive";
    let run = Job::new(2).sh(script).run();
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert_eq!(run.stdout.matches("alive").count(), 2);
}

const LIMIT: Duration = Duration::from_secs(100);
