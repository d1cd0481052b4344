//! Check that the other installations of Brigade on a host, and the project, have the running program's version.

use std::cmp::Ordering;

use semver::Version;

use crate::cluster::{Cluster, HostReport};
use crate::facts::{Facts, Installed, InstalledAs};
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let of_host = |(_, host, facts): (_, &HostReport, &Facts)| {
        other_versions(facts).into_iter().map(|it| it.on(&host.name)).collect::<Vec<_>>()
    };
    cluster.examined().flat_map(of_host).collect()
}

/// Returns a note for each installation of Brigade that is newer or older than the running program, with the steps to
/// one version. Versions that are not in the format of Semantic Versioning are left out, as they have no order.
///
/// ```
/// use brigade_doctor::{Facts, Installed, InstalledAs, other_versions};
///
/// let mut facts = Facts::default();
/// facts.host.brigade.version = "0.1.0".to_owned();
/// let path = "/opt/new/brigade".into();
/// facts.installed = vec![Installed { kind: InstalledAs::Program, version: "0.2.0".to_owned(), path }];
/// assert_eq!(other_versions(&facts)[0].remedy, "put /opt/new first in PATH, or remove the older program");
/// ```
#[must_use]
pub fn other_versions(facts: &Facts) -> Vec<Finding> {
    let running = &facts.host.brigade;
    let Ok(own) = Version::parse(&running.version) else { return Vec::new() };
    let this = format!("the running program {own} ({})", running.path.display());
    let about = |installed: &Installed| {
        let other = Version::parse(&installed.version).ok()?;
        let order = other.cmp_precedence(&own);
        let relation = match order {
            Ordering::Less => format!("older than {this}"),
            Ordering::Equal => return None,
            Ordering::Greater => format!("newer than {this}"),
        };
        let is_newer = order == Ordering::Greater;
        let path = installed.path.display();
        Some(match installed.kind {
            InstalledAs::Program if is_newer => {
                let folder = installed.path.parent().unwrap_or(&installed.path).display();
                note(format!("an update is installed: {path} is {other}, {relation}"))
                    .remedy(format!("put {folder} first in PATH, or remove the older program"))
            }
            InstalledAs::Program => {
                note(format!("{path} is {other}, {relation}")).remedy("remove the older program")
            }
            InstalledAs::Wheel if is_newer => note(format!(
                "an update is installed: the Python package in {path} is {other}, {relation}"
            ))
            .remedy(format!("put {path}/bin first in PATH, or start it with `python -m brigade`")),
            InstalledAs::Wheel => {
                note(format!("the Python package in {path} is {other}, {relation}"))
                    .remedy("upgrade the package")
                    .command(format!("pip install --upgrade 'brigade=={own}'"))
            }
            InstalledAs::Crate if is_newer => {
                note(format!("the project uses Brigade {other} ({path}), {relation}"))
                    .remedy("install the program in the project's version")
                    .command(format!("cargo install brigade-cli --version {other}"))
            }
            InstalledAs::Crate => {
                note(format!("the project uses Brigade {other} ({path}), {relation}"))
                    .remedy(format!("name version {own} in Cargo.toml and update the lock file"))
                    .command("cargo update --package brigade")
            }
        })
    };
    facts.installed.iter().filter_map(about).collect()
}

fn note(found: String) -> Finding {
    Finding::note(Subject::Brigade, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn installed(kind: InstalledAs, version: &str, path: &str) -> Installed {
        Installed { kind, version: version.to_owned(), path: path.into() }
    }

    /// Returns the note about an installation beside the running program 0.1.0.
    fn note_about(kind: InstalledAs, version: &str, path: &str) -> String {
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).installed = vec![installed(kind, version, path)];
        let findings = check(&cluster);
        let [Finding { verdict: Verdict::Note, found, remedy, command, .. }] = &findings[..] else {
            panic!("{findings:?}");
        };
        [found.as_str(), remedy, command].join(" | ")
    }

    #[test]
    fn each_other_version_is_named_with_the_steps_to_one_version() {
        use InstalledAs::{Crate, Program, Wheel};
        for (kind, version, path, expected) in [
            (
                Program,
                "0.2.0",
                "/opt/brigade",
                "an update is installed: /opt/brigade is 0.2.0, newer than the running program 0.1.0 \
                 (/usr/bin/brigade) | put /opt first in PATH, or remove the older program | ",
            ),
            (
                Program,
                "0.1.0-rc.1",
                "/opt/brigade",
                "/opt/brigade is 0.1.0-rc.1, older than the running program 0.1.0 (/usr/bin/brigade) | remove the older \
                 program | ",
            ),
            (
                Wheel,
                "0.10.0",
                "/venv",
                "an update is installed: the Python package in /venv is 0.10.0, newer than the running program 0.1.0 \
                 (/usr/bin/brigade) | put /venv/bin first in PATH, or start it with `python -m brigade` | ",
            ),
            (
                Wheel,
                "0.0.9",
                "/venv",
                "the Python package in /venv is 0.0.9, older than the running program 0.1.0 (/usr/bin/brigade) | upgrade \
                 the package | pip install --upgrade 'brigade==0.1.0'",
            ),
            (
                Crate,
                "0.2.0",
                "/app/Cargo.lock",
                "the project uses Brigade 0.2.0 (/app/Cargo.lock), newer than the running program 0.1.0 \
                 (/usr/bin/brigade) | install the program in the project's version | cargo install brigade-cli --version \
                 0.2.0",
            ),
            (
                Crate,
                "0.0.9",
                "/app/Cargo.lock",
                "the project uses Brigade 0.0.9 (/app/Cargo.lock), older than the running program 0.1.0 \
                 (/usr/bin/brigade) | name version 0.1.0 in Cargo.toml and update the lock file | cargo update --package \
                 brigade",
            ),
        ] {
            assert_eq!(note_about(kind, version, path), expected);
        }
    }

    #[test]
    fn equal_and_unordered_versions_are_not_named() {
        let mut cluster = fixtures::cluster(2);
        for host in 0..2 {
            fixtures::facts(&mut cluster, host).installed = vec![
                installed(InstalledAs::Program, "0.1.0", "/opt/brigade"),
                installed(InstalledAs::Wheel, "0.1.0rc1", "/venv"),
                installed(InstalledAs::Crate, "0.1.0+local", "/app/Cargo.lock"),
            ];
        }
        assert_eq!(check(&cluster), []);
    }
}
