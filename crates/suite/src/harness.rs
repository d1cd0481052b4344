//! The harness: libtest's arguments and output, and tests that are ignored for a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};

use crate::limit::{self, TimeLimit};
use crate::need::{Lack, Need, required};
use crate::report::{self, Missed};

/// Tests that cannot run without the same needs: each has its path in the test program, as libtest
/// would name it, and fails by a panic.
pub type Group<'a> = (&'static [Need], &'a [(&'static str, fn())]);

/// A function that a test program runs in a process of its own: its tests start this program once
/// more, with the arguments `--part NAME`.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// What such a process does.
    pub body: fn(),
}

/// Makes the `main` of a test program with `harness = false`: lists its parts, its tests, and what
/// they need.
///
/// A test that is not listed is dead code, which clippy refuses. `#[test]` has no effect in such a
/// program, which `cargo xtask tidy` refuses.
#[macro_export]
macro_rules! suite {
    (
        $(part $part:ident;)*
        $(always: $($test:path),+ $(,)?;)?
        $(needs $($need:ident)+: $($needy:path),+ $(,)?;)*
    ) => {
        fn main() -> ::std::process::ExitCode {
            let program = ::std::concat!(
                ::std::env!("CARGO_PKG_NAME"), "::", ::std::env!("CARGO_CRATE_NAME")
            );
            let parts = [$($crate::Part { name: ::std::stringify!($part), body: $part },)*];
            let groups: &[$crate::Group<'_>] = &[
                $((&[], &[$((::std::stringify!($test), $test),)+]),)?
                $((
                    &[$($crate::Need::$need,)+],
                    &[$((::std::stringify!($needy), $needy),)+],
                ),)*
            ];
            $crate::run(program, &parts, groups)
        }
    };
}

/// Runs the tests, or one of the parts, as the arguments of this process say.
#[must_use]
pub fn run(program: &str, parts: &[Part], groups: &[Group<'_>]) -> ExitCode {
    let mut words = env::args().skip(1);
    if words.next().as_deref() == Some("--part") {
        let name = words.next().unwrap_or_default();
        let Some(part) = parts.iter().find(|it| it.name == name) else {
            eprintln!("{program} has no part `{name}`");
            return ExitCode::from(2);
        };
        (part.body)();
        return ExitCode::SUCCESS;
    }
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
    let needs: BTreeSet<Need> = groups.iter().flat_map(|it| it.0).copied().collect();
    let lacking: BTreeMap<Need, Lack> =
        needs.into_iter().filter_map(|need| Some((need, need.lacking()?))).collect();

    let (mut trials, mut missed) = (Vec::new(), Vec::new());
    for (needs, tests) in groups {
        let lack = needs.iter().find_map(|need| Some((*need, lacking.get(need)?)));
        for (name, body) in *tests {
            let limit = if needs.contains(&Need::RustKernel) {
                limit::OF_A_NOTEBOOK
            } else {
                limit::OF_A_TEST
            };
            let trial = trial(name, *body, limit, lack, &required);
            if let Some((need, _)) = lack
                && trial.has_ignored_flag()
                && !arguments.is_filtered_out(&trial)
            {
                let (program, test) = (program.to_owned(), (*name).to_owned());
                missed.push(Missed { need, program, test });
            }
            trials.push(trial);
        }
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
