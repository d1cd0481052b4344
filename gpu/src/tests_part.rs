//! Test programs: which tests they have, and each test as a process of its own.

use std::time::Duration;

use crate::jobs::{Done, Ending, Job, status_text};
use crate::report::{Outcome, Ran, last_lines};

/// The process that lists a program's tests. Those that are ignored are among them and say so when they are run, so
/// that each program is loaded once for its list: with libtorch that takes a second or two of a processor.
pub(crate) fn listing(program: &Job) -> Job {
    let words = ["--list", "--format", "terse"];
    Job { arguments: words.map(str::to_owned).to_vec(), ..program.clone() }
}

/// The names in what it prints.
pub(crate) fn listed(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// One test as a process.
pub(crate) fn job(program: &Job, test: &str, limit: Duration) -> Job {
    Job {
        name: format!("{} {test}", program.name),
        arguments: vec![test.to_owned(), "--exact".to_owned()],
        limit,
        ..program.clone()
    }
}

/// How a test went. A program that finds no test of that name ends well, too.
pub(crate) fn judged(done: &Done) -> Ran {
    let passed =
        |output: &str| output.lines().any(|it| it.starts_with("test result: ok. 1 passed"));
    let mut ran = judged_by_status(done);
    if ran.outcome == Outcome::Passed && !passed(&done.output) {
        let ignored = done.output.contains(" 1 ignored;");
        ran.outcome = if ignored { Outcome::Ignored } else { Outcome::Failed };
        ran.reason = if ignored { "ignored" } else { "no test of that name ran" }.to_owned();
        ran.output = last_lines(&done.output, SHOWN_LINES);
    }
    ran
}

/// How a process went that says it by its exit status.
pub(crate) fn judged_by_status(done: &Done) -> Ran {
    let (outcome, reason) = match done.ending {
        Ending::Ended(status) if status.success() => (Outcome::Passed, String::new()),
        Ending::Ended(status) => (Outcome::Failed, status_text(status)),
        Ending::TimedOut => {
            (Outcome::TimedOut, format!("not ended within {} s", done.job.limit.as_secs()))
        }
        Ending::Stopped => (Outcome::Stopped, "the part's time was over".to_owned()),
        Ending::NotRun => (Outcome::NotRun, "the part's time was over".to_owned()),
    };
    let output = match outcome {
        Outcome::Passed | Outcome::NotRun => String::new(),
        _ => last_lines(&done.output, SHOWN_LINES),
    };
    Ran { name: done.job.name.clone(), outcome, seconds: done.seconds, reason, output }
}

/// Lines of a failure's output in the report.
const SHOWN_LINES: usize = 60;

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn benchmarks_are_not_tests() {
        assert_eq!(listed("a::b: test\nc: test\nd: benchmark\n"), ["a::b", "c"]);
    }

    #[test]
    fn a_test_that_did_not_run_has_not_passed() {
        let done = |output: &str, ending| Done {
            job: Job {
                name: "a".to_owned(),
                program: PathBuf::new(),
                arguments: Vec::new(),
                variables: Vec::new(),
                limit: Duration::from_secs(60),
            },
            ending,
            seconds: 1.0,
            output: output.to_owned(),
        };
        let good = Ending::Ended(ExitStatus::from_raw(0));
        let outcome = |output: &str, ending| judged(&done(output, ending)).outcome;
        assert_eq!(outcome("test result: ok. 1 passed; 0 failed", good), Outcome::Passed);
        assert_eq!(
            outcome("test result: ok. 0 passed; 0 failed; 0 ignored;", good),
            Outcome::Failed
        );
        assert_eq!(
            outcome("test result: ok. 0 passed; 0 failed; 1 ignored;", good),
            Outcome::Ignored
        );
        let killed = judged(&done("", Ending::Ended(ExitStatus::from_raw(11))));
        assert_eq!(
            (killed.outcome, killed.reason.as_str()),
            (Outcome::Failed, "killed by SIGSEGV")
        );
        assert_eq!(outcome("", Ending::TimedOut), Outcome::TimedOut);
        assert_eq!(outcome("", Ending::NotRun), Outcome::NotRun);
    }
}
