//! Rule about time: a test that waits for long needs a documented reason.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use toml_edit::DocumentMut;

use super::Findings;
use crate::checkout::Checkout;
use crate::suite::{TIMINGS, timings};
use crate::workspace::Workspace;

/// Lists the tests that waited for long in the last run of the whole suite and are not in the list with a reason. Empty
/// if the suite has not run. Only notes, as every test waits on a busy machine.
pub(super) fn check(checkout: &Checkout, findings: &mut Findings) -> Result<()> {
    let timings = timings::read(&Workspace::of(checkout)?.target.join(TIMINGS))?;
    let list = fs::read_to_string(checkout.root().join(LIST))
        .with_context(|| format!("cannot read {LIST}"))?;
    findings.notes.extend(unexplained(&timings, &list)?);
    Ok(())
}

fn unexplained(timings: &[timings::Timing], list: &str) -> Result<Vec<String>> {
    let list: DocumentMut = list.parse().with_context(|| format!("{LIST} is not valid TOML"))?;
    let explained = |name: &str| list.get(name).is_some_and(|it| it.as_str() > Some(""));
    let named = timings.iter().map(|it| (format!("{} {}", it.program, it.test), it.waited()));
    let unexplained = named.filter(|(name, waited)| *waited > LONGEST && !explained(name));
    Ok(unexplained
        .map(|(name, waited)| {
            format!("{name} waited {:.0} s: {LIST} has no reason", waited.as_secs_f64())
        })
        .collect())
}

const LIST: &str = ".config/waits.toml";
const LONGEST: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_has_a_reason() {
        let timing = |test: &str, elapsed: u64| timings::Timing {
            program: "a::it".to_owned(),
            test: test.to_owned(),
            elapsed: Duration::from_secs(elapsed),
            processor: Duration::from_secs(1),
        };
        let timings = [timing("x", 12), timing("y", 12), timing("z", 11), timing("empty", 20)];
        let list = "\"a::it x\" = \"a time limit of 10 s\"\n\"a::it empty\" = \"\"\n";
        let named = unexplained(&timings, list).unwrap();
        assert_eq!(named.len(), 2, "{named:?}");
        assert_eq!(named[0], "a::it y waited 11 s: .config/waits.toml has no reason");
        assert!(unexplained(&timings, "x").is_err());
    }
}
