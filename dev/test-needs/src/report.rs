//! Reports of test programs to `cargo xtask test` about tests that could not run.
//!
//! cargo-nextest gets the list of ignored tests from a program and does not show the reasons, so the reasons are
//! written to a separate file.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::need::{Need, required};

/// Variable with the path of the report file.
pub const REPORT: &str = "XTASK_TEST_REPORT";

/// Test that could not run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Missed {
    /// First of its needs that is not met.
    pub need: Need,
    /// Name of the program in cargo-nextest: `brigade-cli::hosts`.
    pub program: String,
    /// Name of the test.
    pub test: String,
}

impl Missed {
    /// Reads the reports of all test programs. A program that was run several times has written the same lines several
    /// times.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be read.
    pub fn read(path: &Path) -> io::Result<BTreeSet<Self>> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let line = |line: &str| {
            let mut words = line.split('\t');
            let need = words.next()?.parse().ok()?;
            Some(Self { need, program: words.next()?.to_owned(), test: words.next()?.to_owned() })
        };
        Ok(text.lines().filter_map(line).collect())
    }
}

/// Appends tests to the file, if the variable is set.
pub(crate) fn write(missed: &[Missed]) -> io::Result<()> {
    let Some(path) = env::var_os(REPORT).filter(|_| !missed.is_empty()) else { return Ok(()) };
    let line = |it: &Missed| format!("{}\t{}\t{}\n", it.need, it.program, it.test);
    let text: String = missed.iter().map(line).collect();
    // One write: programs may run in parallel.
    File::options().create(true).append(true).open(path)?.write_all(text.as_bytes())
}

/// Returns `true` if a test of libtest has to return because a need is not met, and reports it as a test that did not
/// run. libtest itself counts it as passed, so this is only for unit tests, which cannot be in a program with
/// [`main!`](crate::main!).
///
/// # Panics
/// Panics when `BRIGADE_REQUIRE` names the need, or the report cannot be written.
#[must_use]
pub fn is_missed(need: Need, program: &str, test: &str) -> bool {
    let Some(lack) = need.lacking() else { return false };
    let is_required = required().is_ok_and(|it| it.contains(&need));
    assert!(!is_required, "needs {}: {lack} (BRIGADE_REQUIRE names {need})", need.what());
    let missed = Missed { need, program: program.to_owned(), test: test.to_owned() };
    if let Err(error) = write(&[missed]) {
        panic!("cannot write {REPORT}: {error}");
    }
    eprintln!("not run: needs {}: {lack}", need.what());
    true
}
