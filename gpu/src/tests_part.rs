//! Test programs: which tests they have, and each test as a process of its own.

use std::collections::HashSet;
use std::time::Duration;

use crate::jobs::{Done, Ending, Job, status_text};
use crate::report::{Outcome, Ran, last_lines};

/// A test of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) ignored: bool,
}

/// The two processes that list a program's tests: all, and those that are ignored.
pub(crate) fn listing(program: &Job) -> [Job; 2] {
    let words = |words: &[&str]| Job {
        arguments: words.iter().map(|&it| it.to_owned()).collect(),
        ..program.clone()
    };
    [words(&["--list", "--format", "terse"]), words(&["--list", "--format", "terse", "--ignored"])]
}

/// The tests, from what those two print. Some programs list ignored tests in the first one, too.
pub(crate) fn listed(all: &str, ignored: &str) -> Vec<Test> {
    let ignored: HashSet<&str> = names(ignored).collect();
    names(all).map(|name| Test { name: name.to_owned(), ignored: ignored.contains(name) }).collect()
}

fn names(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_suffix(": test"))
}

/// One test as a process.
pub(crate) fn job(program: &Job, test: &Test, limit: Duration) -> Job {
    Job {
        name: format!("{} {}", program.name, test.name),
        arguments: vec![test.name.clone(), "--exact".to_owned()],
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
    fn tests_are_listed_with_those_ignored() {
        let tests = listed("a::b: test\nc: test\nd: benchmark\n", "c: test\n");
        let test = |name: &str, ignored| Test { name: name.to_owned(), ignored };
        assert_eq!(tests, [test("a::b", false), test("c", true)]);
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
