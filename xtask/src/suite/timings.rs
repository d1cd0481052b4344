//! Durations of tests, and the part of them in which no processor worked for the test.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, raise};
use nix::sys::time::TimeVal;

use super::{forks, preload};
use crate::cargo;

/// Variable with the file for the durations of tests.
const TIMES: &str = "XTASK_TEST_TIMES";

/// Variable of glibc. With huge pages for what `malloc` returns, a fifth of the page faults of libtorch's start are left,
/// but freed memory is larger: not for tests that measure it, none of which is numeric.
const MALLOC: &str = "GLIBC_TUNABLES";

/// Durations of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Name of the program in cargo-nextest: `brigade-cli::needs`.
    pub(crate) program: String,
    pub(crate) test: String,
    pub(crate) elapsed: Duration,
    /// Processor time of the test's process and its descendants, except those that were not waited for.
    pub(crate) processor: Duration,
}

impl Timing {
    /// Returns the time in which no processor worked for the test: it waited, or others used the processors.
    pub(crate) fn waited(&self) -> Duration {
        self.elapsed.saturating_sub(self.processor)
    }

    fn line(&self) -> String {
        let Self { program, test, elapsed, processor } = self;
        format!("{program}\t{test}\t{}\t{}\n", elapsed.as_micros(), processor.as_micros())
    }

    fn parse(line: &str) -> Option<Self> {
        let [program, test, elapsed, processor] =
            line.split('\t').collect::<Vec<_>>().try_into().ok()?;
        let micros = |text: &str| text.parse().map(Duration::from_micros).ok();
        let (program, test) = (program.to_owned(), test.to_owned());
        Some(Self { program, test, elapsed: micros(elapsed)?, processor: micros(processor)? })
    }
}

/// Copies this program to a folder, to measure tests: cargo may replace the program while they are built.
pub(super) fn copy_of_this_program(folder: &Path) -> Result<PathBuf> {
    let copy = folder.join("xtask");
    let program = env::current_exe().context("cannot find the path of xtask's program")?;
    fs::copy(&program, &copy).with_context(|| format!("cannot copy {}", program.display()))?;
    Ok(copy)
}

/// Makes cargo-nextest start each test with `xtask measure`, which appends its durations to the file.
pub(super) fn measure_tests(nextest: &mut Command, xtask: &Path, file: &Path) -> Result<()> {
    let xtask = xtask.to_str().context("the path of the temporary folder is not UTF-8")?;
    let runner = serde_json::to_string(&[xtask, "measure"])?;
    nextest.args(["--config", &format!("target.'cfg(unix)'.runner = {runner}")]);
    nextest.env(TIMES, file);
    Ok(())
}

/// Runs a test program as it was called, and appends its duration to the file. The file is in a variable, and
/// cargo-nextest passes the names; if one is missing, as for lists of tests, nothing is written.
pub(crate) fn measure(command: &[OsString]) -> Result<ExitCode> {
    let [program, arguments @ ..] = command else { bail!("no program to measure is named") };
    let started = Instant::now();
    let mut command = Command::new(program);
    preload::preload(command.args(arguments));
    forks::hide(&mut command);
    let names = (env::var("NEXTEST_BINARY_ID"), env::var("NEXTEST_TEST_NAME"));
    let is_numeric = names.0.as_ref().is_ok_and(|program| program.ends_with("::numeric"));
    if is_numeric && env::var_os(MALLOC).is_none() {
        command.env(MALLOC, "glibc.malloc.hugetlb=1");
    }
    let is_a_test = names.1.is_ok();
    let forked = if is_a_test { forks::run(&command) } else { None };
    let (status, processor) = match forked {
        Some(outcome) => (outcome.status, outcome.processor),
        None => {
            let status = command.status();
            let status = status.with_context(|| format!("cannot start {}", program.display()))?;
            let usage =
                getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read processor times")?;
            (status, duration(usage.user_time()) + duration(usage.system_time()))
        }
    };
    let elapsed = started.elapsed();
    if let (Some(file), (Ok(program), Ok(test))) = (env::var_os(TIMES), names) {
        let line = Timing { program, test, elapsed, processor }.line();
        // One write: tests end concurrently.
        let mut file = File::options().create(true).append(true).open(file)?;
        file.write_all(line.as_bytes())?;
    }
    if let Some(signal) = status.signal().and_then(|it| Signal::try_from(it).ok()) {
        // So that the runner reports the signal.
        let _ = raise(signal);
    }
    Ok(cargo::exit_code(status))
}

fn duration(time: TimeVal) -> Duration {
    let micros = u64::try_from(time.tv_sec()).unwrap_or(0) * 1_000_000;
    Duration::from_micros(micros + u64::try_from(time.tv_usec()).unwrap_or(0))
}

/// Reads the durations of all tests; empty if no test has run.
pub(crate) fn read(file: &Path) -> Result<Vec<Timing>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(text.lines().filter_map(Timing::parse).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Formats the slowest tests and programs as lines of text: seconds, those without a processor, and names.
pub(super) fn summary(timings: &[Timing]) -> String {
    let mut text = String::new();
    let row = |text: &mut String, elapsed: Duration, waited: Duration, name: &str| {
        let (elapsed, waited) = (elapsed.as_secs_f64(), waited.as_secs_f64());
        let _ = writeln!(text, "{elapsed:8.1} {waited:9.1}  {name}");
    };
    let total: Duration = timings.iter().map(|it| it.elapsed).sum();
    let waited: Duration = timings.iter().map(Timing::waited).sum();
    let _ = writeln!(text, " seconds  waiting  slowest tests");
    for it in slowest(timings.to_vec(), |it| it.elapsed, TESTS) {
        row(&mut text, it.elapsed, it.waited(), &format!("{} {}", it.program, it.test));
    }
    let _ = writeln!(text, " seconds  waiting  slowest programs");
    for (name, tests, elapsed, waited) in slowest(programs(timings), |it| it.2, PROGRAMS) {
        row(&mut text, elapsed, waited, &format!("{name} ({tests} tests)"));
    }
    row(&mut text, total, waited, &format!("all {} tests", timings.len()));
    text
}

/// Formats a Markdown table of all programs, then of all tests, the slowest first.
pub(super) fn table(timings: &[Timing]) -> String {
    let mut text = "| program | tests | seconds | waiting |\n|---|---|---|---|\n".to_owned();
    for (name, tests, elapsed, waited) in slowest(programs(timings), |it| it.2, usize::MAX) {
        let (elapsed, waited) = (elapsed.as_secs_f64(), waited.as_secs_f64());
        let _ = writeln!(text, "| {name} | {tests} | {elapsed:.2} | {waited:.2} |");
    }
    text.push_str("\n| program | test | seconds | waiting |\n|---|---|---|---|\n");
    for it in slowest(timings.to_vec(), |it| it.elapsed, usize::MAX) {
        let (elapsed, waited) = (it.elapsed.as_secs_f64(), it.waited().as_secs_f64());
        let _ = writeln!(text, "| {} | {} | {elapsed:.2} | {waited:.2} |", it.program, it.test);
    }
    text
}

fn slowest<T>(mut all: Vec<T>, elapsed: impl Fn(&T) -> Duration, most: usize) -> Vec<T> {
    all.sort_by_key(|it| std::cmp::Reverse(elapsed(it)));
    all.truncate(most);
    all
}

/// Returns each program with the number of its tests, their duration and the part of it that they waited.
fn programs(timings: &[Timing]) -> Vec<(&str, usize, Duration, Duration)> {
    let mut programs: BTreeMap<&str, (usize, Duration, Duration)> = BTreeMap::new();
    for timing in timings {
        let program = programs.entry(&timing.program).or_default();
        *program = (program.0 + 1, program.1 + timing.elapsed, program.2 + timing.waited());
    }
    programs.into_iter().map(|(name, it)| (name, it.0, it.1, it.2)).collect()
}

/// Number of the slowest tests that are listed.
const TESTS: usize = 20;
/// Number of the slowest programs that are listed.
const PROGRAMS: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(program: &str, test: &str, elapsed: u64, processor: u64) -> Timing {
        let (program, test) = (program.to_owned(), test.to_owned());
        let (elapsed, processor) = (Duration::from_secs(elapsed), Duration::from_secs(processor));
        Timing { program, test, elapsed, processor }
    }

    #[test]
    fn the_slowest_come_first() {
        let timings =
            [timing("a::it", "x", 3, 1), timing("b::it", "y", 4, 9), timing("a::it", "z", 2, 2)];
        let said = summary(&timings);
        let lines: Vec<&str> = said.lines().map(str::trim).collect();
        assert_eq!(
            lines[1..4],
            ["4.0       0.0  b::it y", "3.0       2.0  a::it x", "2.0       0.0  a::it z"]
        );
        assert_eq!(
            lines[5..],
            [
                "5.0       2.0  a::it (2 tests)",
                "4.0       0.0  b::it (1 tests)",
                "9.0       2.0  all 3 tests"
            ]
        );
        assert!(table(&timings).starts_with("| program | tests | seconds | waiting |\n|---|---|---|---|\n| a::it | 2 | 5.00 | 2.00 |\n"));
    }

    #[test]
    fn a_line_is_read_back() {
        let one = timing("a::it", "m::x", 3, 1);
        assert_eq!(Timing::parse(one.line().trim_end()), Some(one));
        assert_eq!(Timing::parse("a\tb\tc"), None);
    }
}
