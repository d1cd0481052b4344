//! Test harness with libtest's arguments and output, in which tests can be ignored for a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};

use crate::limit::{self, TimeLimit};
use crate::need::{Lack, Need, required};
use crate::report::{self, Missed};

/// Test of a program with [`main!`](crate::main!), as [`needs`](crate::needs) creates it.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Name of the crate, followed by the path in it.
    pub path: &'static str,
    /// Needs without which the test cannot run.
    pub needs: &'static [Need],
    /// Time limit, if the default of all tests is too short.
    pub limit: Option<Duration>,
    /// Body of the test, which fails by a panic.
    pub body: fn(),
}

/// Function that a test program runs in a process of its own, as [`part`](macro@crate::part) creates it.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Name of the crate, followed by the path in it.
    pub path: &'static str,
    /// Body of the process.
    pub body: fn(),
}

inventory::collect!(Test);
inventory::collect!(Part);

/// Defines the `main` of a test program with `harness = false`: it runs the functions of the program that are marked
/// with [`needs`](crate::needs), and with `--part PATH` one that is marked with [`part`](macro@crate::part).
///
/// `#[test]` has no effect in such a program, which `cargo xtask tidy` refuses. A function without any mark is dead
/// code, which clippy refuses.
#[macro_export]
macro_rules! main {
    () => {
        fn main() -> ::std::process::ExitCode {
            $crate::main(::std::concat!(
                ::std::env!("CARGO_PKG_NAME"),
                "::",
                ::std::env!("CARGO_CRATE_NAME")
            ))
        }
    };
}

/// Runs the tests of this program, or one of its parts, according to the arguments of this process.
#[must_use]
pub fn main(program: &str) -> ExitCode {
    let mut words = env::args().skip(1);
    if words.next().as_deref() == Some("--part") {
        let name = words.next().unwrap_or_default();
        let Some(part) = inventory::iter::<Part>.into_iter().find(|it| in_crate(it.path) == name)
        else {
            eprintln!("{program} has no part `{name}`");
            return ExitCode::from(2);
        };
        (part.body)();
        return ExitCode::SUCCESS;
    }
    let mut tests: Vec<Test> = inventory::iter::<Test>.into_iter().copied().collect();
    // The linker's order is arbitrary.
    tests.sort_by_key(|it| it.path);
    run(program, &tests)
}

/// Returns the path without the crate's name, as libtest names a test.
fn in_crate(path: &'static str) -> &'static str {
    path.split_once("::").map_or(path, |it| it.1)
}

/// Runs tests according to the arguments of this process.
#[must_use]
pub fn run(program: &str, tests: &[Test]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    if arguments.test_threads.is_none() {
        arguments.test_threads = env::var("RUST_TEST_THREADS").ok().and_then(|it| it.parse().ok());
    }
    let required = match required() {
        Ok(required) => required,
        Err(error) => {
            eprintln!("BRIGADE_REQUIRE: {error}");
            return ExitCode::from(2);
        }
    };
    let needs: BTreeSet<Need> = tests.iter().flat_map(|it| it.needs).copied().collect();
    let lacking: BTreeMap<Need, Lack> =
        needs.into_iter().filter_map(|need| Some((need, need.lacking()?))).collect();

    let (mut trials, mut missed) = (Vec::new(), Vec::new());
    for Test { path, needs, limit, body } in tests {
        let name = in_crate(path);
        let lack = needs.iter().find_map(|need| Some((*need, lacking.get(need)?)));
        let limit = limit.unwrap_or(limit::OF_A_TEST);
        let trial = trial(name, *body, limit, lack, &required);
        if let Some((need, _)) = lack
            && trial.has_ignored_flag()
            && !arguments.is_filtered_out(&trial)
        {
            let (program, test) = (program.to_owned(), name.to_owned());
            missed.push(Missed { need, program, test });
        }
        trials.push(trial);
    }
    if let Err(error) = report::write(&missed) {
        eprintln!("cannot write {}: {error}", report::REPORT);
        return ExitCode::from(2);
    }
    let is_list = arguments.list;
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !is_list && !arguments.include_ignored && !arguments.ignored {
        for (need, lack) in &lacking {
            let count = missed.iter().filter(|it| it.need == *need).count();
            if count > 0 {
                eprintln!("{count} ignored, which need {}: {lack}\n", need.what());
            }
        }
    }
    conclusion.exit_code()
}

fn trial(
    name: &'static str,
    body: fn(),
    limit: Duration,
    lack: Option<(Need, &Lack)>,
    required: &[Need],
) -> Trial {
    let Some((need, lack)) = lack else {
        return Trial::test(name, move || {
            let _limit = TimeLimit::new(name, limit);
            body();
            Ok(())
        });
    };
    let is_required = required.contains(&need);
    let mut reason = format!("needs {}: {lack}", need.what());
    if is_required {
        reason.push_str(&format!(" (BRIGADE_REQUIRE names {need})"));
    }
    // Ignored tests can be run by name, and then fail.
    Trial::test(name, move || Err(reason.into())).with_ignored_flag(!is_required)
}
