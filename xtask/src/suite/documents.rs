//! Doc tests, which cargo-nextest does not run.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use brigade_test_needs::descendants;

use crate::cargo;

/// Doc tests that run beside the other tests, which wait for a tenth of their time.
pub(super) struct Documents(JoinHandle<Result<Finished>>);

/// Doc tests that have run.
struct Finished {
    status: ExitStatus,
    output: Vec<u8>,
    time: Duration,
}

impl Documents {
    /// Starts the doc tests. What they print is kept until their end.
    pub(super) fn start(mut command: Command) -> Result<Self> {
        eprintln!("$ {} (beside the other tests)", cargo::line(&command));
        let started = Instant::now();
        let (output, writer) = io::pipe().context("cannot make a pipe")?;
        command.stderr(writer.try_clone().context("cannot copy a pipe")?).stdout(writer);
        let child = command.stdin(Stdio::null()).spawn().context("cannot start cargo")?;
        // The command owns the pipe's other ends: cargo's end must close it.
        drop(command);
        Ok(Self(thread::spawn(move || {
            let mut text = Vec::new();
            let status = read(child, output, &mut text)?;
            Ok(Finished { status, output: text, time: started.elapsed() })
        })))
    }

    /// Waits for the doc tests, and prints their sum, or all that they have printed where one has failed.
    pub(super) fn finish(self) -> Result<(ExitStatus, Duration)> {
        let done = self.0.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let done = done?;
        io::stdout().lock().write_all(done.shown()).context("cannot print")?;
        Ok((done.status, done.time))
    }
}

impl Finished {
    /// Returns what is of interest: the last line, or all lines where a test has failed.
    fn shown(&self) -> &[u8] {
        let end = self.output.len().saturating_sub(1);
        let last = self.output[..end].iter().rposition(|byte| *byte == b'\n');
        let begin = last.map_or(0, |position| position + 1);
        if self.status.success() { &self.output[begin..] } else { &self.output }
    }
}

/// Runs `cargo test`, and adds up its many summary lines to one.
pub(super) fn run(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", cargo::line(command));
    // Cargo's own progress is on standard error and stays on the terminal.
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let output = child.stdout.take().context("cargo has no standard output")?;
    read(child, output, &mut io::stdout().lock())
}

/// Copies what `cargo test` prints, with a line that adds up its many summary lines. A test program in which a test hangs
/// is killed: libtest has no time limit.
fn read(
    mut child: Child,
    output: impl Read + Send + 'static,
    out: &mut impl Write,
) -> Result<ExitStatus> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n') {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let (mut totals, mut slow) = (Totals::default(), Slow::default());
    loop {
        match lines.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                let mut line = line.context("cannot read what cargo prints")?;
                let text = String::from_utf8_lossy(&line);
                totals.add(&text);
                slow.hear(&text, Instant::now());
                line.push(b'\n');
                out.write_all(&line).context("cannot print")?;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(test) = slow.hung(Instant::now()) {
            eprintln!("{test} hangs; its program is killed:");
            // Cargo itself continues with the next program.
            let processes = descendants(child.id());
            for (pid, description) in &processes {
                eprintln!("  {pid}  {description}");
            }
            let mut kill = Command::new("kill");
            let _ = kill.arg("-KILL").args(processes.keys().map(u32::to_string)).output();
            slow = Slow::default();
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    writeln!(out, "{}", totals.closing_line(status.success())).context("cannot print")?;
    Ok(status)
}

/// State of a running test program by libtest's output, to find a test that hangs.
#[derive(Debug, Default)]
struct Slow {
    /// Tests that libtest reported as slow. It only does so with several threads.
    tests: HashMap<String, Instant>,
    /// Time of the last line; `None` between programs, where cargo may build.
    heard: Option<Instant>,
}

impl Slow {
    fn hear(&mut self, line: &str, now: Instant) {
        if self.heard.is_some() || is_start(line) {
            self.heard = Some(now);
        }
        let Some(rest) = line.strip_prefix("test ") else { return };
        if let Some((test, _)) = rest.split_once(" has been running for over ") {
            self.tests.insert(test.to_owned(), now);
        } else if let Some((test, _)) = rest.split_once(" ... ") {
            self.tests.remove(test);
        } else if rest.starts_with("result: ") {
            *self = Self::default();
        }
    }

    /// Returns a test that has been running for as long as cargo-nextest allows.
    fn hung(&self, now: Instant) -> Option<&str> {
        let hung = self.tests.iter().find(|it| now.duration_since(*it.1) >= LIMIT - A_MINUTE);
        let is_silent = || self.heard.is_some_and(|heard| now.duration_since(heard) >= LIMIT);
        hung.map(|it| it.0.as_str()).or_else(|| is_silent().then_some("a test without a name"))
    }
}

/// Returns `true` for `running 3 tests`, the first line of a test program.
fn is_start(line: &str) -> bool {
    let count = line.strip_prefix("running ").and_then(|rest| rest.split_once(" test"));
    count.is_some_and(|(count, _)| count.parse::<u64>().is_ok())
}

/// Time limit as in `.config/nextest.toml`.
const LIMIT: Duration = Duration::from_secs(240);
/// Time after which libtest reports a test as slow.
const A_MINUTE: Duration = Duration::from_secs(60);

/// Sum of libtest's `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    runs: u64,
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// Adds "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …".
    fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        self.runs += 1;
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(count) = count.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }

    fn closing_line(&self, success: bool) -> String {
        let Self { runs, passed, failed, ignored } = self;
        let result = if success { "ok" } else { "FAILED" };
        format!(
            "total result: {result}. {passed} passed; {failed} failed; {ignored} ignored; \
             in {runs} test programs"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_add_up() {
        let mut totals = Totals::default();
        for line in [
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.52s",
            "test tests::x ... ok",
            "test result: FAILED. 40 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals, Totals { runs: 2, passed: 43, failed: 2, ignored: 1 });
        assert_eq!(
            totals.closing_line(false),
            "total result: FAILED. 43 passed; 2 failed; 1 ignored; in 2 test programs"
        );
    }

    #[test]
    fn beside_other_tests_the_lines_of_failures_are_shown_and_else_the_sum() {
        let of = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            Documents::start(shell).unwrap().0.join().unwrap().unwrap()
        };
        let line = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; finished in 1s'";
        let sum = "passed; 0 failed; 0 ignored; in 1 test programs\n";
        let passed = of(&format!("echo Doc-tests a >&2; {line}"));
        assert_eq!(passed.shown(), format!("total result: ok. 2 {sum}").as_bytes());
        let failed = of(&format!("echo Doc-tests a >&2; {line}; exit 101"));
        let shown = String::from_utf8_lossy(failed.shown());
        assert!(shown.starts_with("Doc-tests a\ntest result: "), "{shown}");
        assert!(shown.ends_with(&format!("total result: FAILED. 2 {sum}")), "{shown}");
        assert_eq!(failed.status.code(), Some(101));
    }

    #[test]
    fn a_test_of_four_minutes_counts_as_hanging() {
        let (mut slow, start) = (Slow::default(), Instant::now());
        let long = start + (LIMIT - A_MINUTE);
        slow.hear("test a::b has been running for over 60 seconds", start);
        assert_eq!(slow.hung(start), None);
        assert_eq!(slow.hung(long), Some("a::b"));
        slow.hear("test a::b ... ok", long);
        assert_eq!(slow.hung(long), None);
        slow.hear("test src/lib.rs - x (line 3) has been running for over 60 seconds", start);
        assert_eq!(slow.hung(long), Some("src/lib.rs - x (line 3)"));
        slow.hear("test result: ok. 3 passed; 0 failed", long);
        assert_eq!(slow.hung(long), None);
    }

    /// With one thread libtest does not report slow tests.
    #[test]
    fn a_program_that_is_silent_for_four_minutes_hangs() {
        let (mut slow, start) = (Slow::default(), Instant::now());
        let half = start + LIMIT / 2;
        assert_eq!(slow.hung(start + LIMIT), None, "cargo builds");
        slow.hear("running 2 tests", start);
        slow.hear("test a ... ok", half);
        assert_eq!(slow.hung(start + LIMIT), None);
        assert!(slow.hung(half + LIMIT).is_some());
        slow.hear("test result: ok. 2 passed; 0 failed", half + LIMIT);
        assert_eq!(slow.hung(half + 2 * LIMIT), None);
    }
}
