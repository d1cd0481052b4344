//! Tests that could not run because something is missing on this machine.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::process::{Command, Stdio};

use brigade_test_needs::{Missed, Need};
use serde::Deserialize;

/// Prints one line for each need: the number of tests that did not run, and the remedy.
pub(super) fn tell(missed: &BTreeSet<Missed>) {
    let mut counts: BTreeMap<Need, usize> = BTreeMap::new();
    for test in missed {
        *counts.entry(test.need).or_default() += 1;
    }
    for (need, count) in counts {
        // No longer lacking if a user has installed it while the tests ran.
        let lack = need.lacking().map_or_else(String::new, |lack| format!(": {lack}"));
        let tests = if count == 1 { "test that needs" } else { "tests that need" };
        eprintln!("not run: {count} {tests} {}{lack}", need.what());
    }
}

/// Returns the ignored tests that nextest's filter selects, with their programs; `None` if the arguments are not for a
/// list.
pub(super) fn wanted(list: &mut Command) -> Option<HashSet<(String, String)>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct List {
        rust_suites: HashMap<String, Suite>,
    }
    #[derive(Deserialize)]
    struct Suite {
        testcases: HashMap<String, Case>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Case {
        filter_match: Match,
    }
    #[derive(Deserialize)]
    struct Match {
        status: String,
    }

    let output = list.stderr(Stdio::null()).output().ok().filter(|it| it.status.success())?;
    let list: List = serde_json::from_slice(&output.stdout).ok()?;
    let tests = list.rust_suites.into_iter().flat_map(|(program, suite)| {
        let ignored =
            suite.testcases.into_iter().filter(|it| it.1.filter_match.status == "matches");
        ignored.map(move |(test, _)| (program.clone(), test))
    });
    Some(tests.collect())
}
