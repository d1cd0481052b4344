//! `cargo xtask test`: the whole suite on whatever runner there is.
//!
//! cargo-nextest runs each test in its own process, limits its time and keeps multi-process tests
//! from crowding each other (.config/nextest.toml); a fresh machine has only `cargo test`.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::setup;

/// Builds every program and test, then runs them; the runner's closing line comes last.
pub(crate) fn run(checkout: &Checkout, runner_arguments: &[String]) -> Result<ExitCode> {
    let libtorch = setup::ensure(checkout)?;
    let cargo = Cargo::new(checkout, &libtorch);
    // Tests start `brigade` and the examples from the target folder.
    let built = cargo.run(&["build", "--workspace", "--bins", "--examples"])?;
    if !built.success() {
        return Ok(cargo::exit_code(built));
    }

    let whole = runner_arguments.is_empty();
    let mut arguments: Vec<&str> = runner_arguments.iter().map(String::as_str).collect();
    if !names_packages(runner_arguments) {
        arguments.insert(0, "--workspace");
    }
    if has_nextest() {
        // Doc tests, which nextest does not run, go first: its summary is the last word then.
        let documents = whole.then(|| {
            let mut command = cargo.command(&["test", "--workspace", "--doc", "--no-fail-fast"]);
            run_cargo_test(&mut command)
        });
        let mut command = cargo.command(&["nextest", "run", "--no-fail-fast"]);
        let tests = cargo::run(command.args(&arguments))?;
        if let Some(documents) = documents.transpose()?
            && !documents.success()
        {
            eprintln!("error: doc tests failed");
            return Ok(cargo::exit_code(documents));
        }
        return Ok(cargo::exit_code(tests));
    }
    let mut command = cargo.command(&["test", "--no-fail-fast"]);
    Ok(cargo::exit_code(run_cargo_test(command.args(&arguments))?))
}

/// With options such as `-p`, cargo must not be told `--workspace`, which overrules them.
fn names_packages(arguments: &[String]) -> bool {
    arguments.iter().take_while(|it| *it != "--").any(|it| {
        let long = ["--package", "--manifest-path", "--workspace", "--all"];
        (it.starts_with("-p") && !it.starts_with("--")) || long.iter().any(|o| it.starts_with(o))
    })
}

fn has_nextest() -> bool {
    let version = Command::new("cargo-nextest").args(["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs `cargo test`, whose many closing lines it adds up to one.
fn run_cargo_test(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", cargo::line(command));
    // Cargo's own progress is on standard error and stays on the terminal.
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let mut totals = Totals::default();
    if let Some(output) = child.stdout.take() {
        let mut out = io::stdout().lock();
        for line in BufReader::new(output).split(b'\n') {
            let mut line = line.context("cannot read what cargo prints")?;
            totals.add(&String::from_utf8_lossy(&line));
            line.push(b'\n');
            out.write_all(&line).context("cannot print")?;
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    let mut out = io::stdout().lock();
    writeln!(out, "{}", totals.closing_line(status.success())).context("cannot print")?;
    Ok(status)
}

/// The sum of libtest's `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    runs: u64,
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …"
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
    fn package_options_are_seen() {
        let names =
            |text: &str| names_packages(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(names("-p brigade-plan"));
        assert!(names("some_test --package=xtask"));
        assert!(!names("some_test"));
        assert!(!names("--profile ci"));
        assert!(!names("some_test -- -p"));
    }
}
