//! Selection of packages whose tests a change concerns: the packages with changed files, then those that depend on
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::checkout::Checkout;
use crate::workspace::Workspace;

/// Packages to test with the reason for each: those that changed first, then by their distance from one of them.
pub(super) type Levels = Vec<BTreeMap<String, String>>;

/// Returns the files that differ from a commit, whether committed since or not, including new ones; relative to the
/// root.
pub(super) fn files(checkout: &Checkout, commit: &str) -> Result<Vec<PathBuf>> {
    let mut files = BTreeSet::new();
    let commit = format!("{commit}^{{commit}}");
    let lists: [&[&str]; 2] = [
        &["diff", "--name-only", "--no-renames", "-z", &commit, "--"],
        &["ls-files", "--others", "--exclude-standard", "-z"],
    ];
    for arguments in lists {
        files.extend(
            git(checkout, arguments)?.split('\0').filter(|it| !it.is_empty()).map(PathBuf::from),
        );
    }
    Ok(files.into_iter().collect())
}

/// Returns the last commit of the branch that a remote has, or else the last commit.
pub(super) fn default_commit(checkout: &Checkout) -> String {
    let pushed = ["@{upstream}", "origin/main"].into_iter().find_map(|branch| {
        git(checkout, &["merge-base", "HEAD", branch]).ok().map(|it| it.trim().to_owned())
    });
    pushed.unwrap_or_else(|| "HEAD".to_owned())
}

fn git(checkout: &Checkout, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    let output = command.args(arguments).current_dir(checkout.root()).output();
    let output = output.context("cannot start git, which finds the changed files")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("`git {}` fails: {}", arguments.join(" "), reason.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the packages that these files concern, and the files that concern none.
pub(super) fn levels(workspace: &Workspace, files: &[PathBuf]) -> (Levels, Vec<PathBuf>) {
    let (mut changed, mut unknown) = (BTreeMap::new(), Vec::new());
    let mut add = |name: &str, file: &Path, reason: &str| {
        changed.entry(name.to_owned()).or_insert_with(|| format!("{} {reason}", file.display()));
    };
    for file in files {
        if OF_ALL.iter().any(|it| file == Path::new(it)) {
            for package in &workspace.packages {
                add(&package.name, file, "differs, which concerns all");
            }
            continue;
        }
        let owner = workspace.package_of(file);
        if let Some(owner) = owner {
            add(&owner.name, file, "differs");
        }
        let is_read = |it: &PathBuf| file.starts_with(it);
        let readers = workspace.packages.iter().filter(|it| it.settings.reads.iter().any(is_read));
        let mut has_reader = false;
        for reader in readers {
            add(&reader.name, file, "differs, which its tests read");
            has_reader = true;
        }
        if owner.is_none() && !has_reader {
            unknown.push(file.clone());
        }
    }
    let mut levels = vec![changed];
    loop {
        let known = |name: &str| levels.iter().any(|it| it.contains_key(name));
        let last = &levels[levels.len() - 1];
        let mut next = BTreeMap::new();
        for package in workspace.packages.iter().filter(|it| !known(&it.name)) {
            let depends = package.dependencies.iter().find(|it| last.contains_key(*it));
            let starts = package.settings.starts.iter().find(|it| last.contains_key(*it));
            let reason = match (depends, starts) {
                (Some(other), _) => format!("depends on {other}"),
                (None, Some(other)) => format!("its tests start a program of {other}"),
                (None, None) => continue,
            };
            next.insert(package.name.clone(), reason);
        }
        if next.is_empty() {
            break;
        }
        levels.push(next);
    }
    levels.retain(|it| !it.is_empty());
    (levels, unknown)
}

/// Files that affect how every package is built or tested.
const OF_ALL: [&str; 4] =
    ["Cargo.lock", "Cargo.toml", ".config/nextest.toml", ".cargo/config.toml"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Settings};

    fn package(name: &str, folder: &str, dependencies: &[&str], settings: Settings) -> Package {
        Package {
            name: name.to_owned(),
            folder: PathBuf::from(folder),
            dependencies: dependencies.iter().map(|it| (*it).to_owned()).collect(),
            settings,
            ..Package::default()
        }
    }

    fn workspace() -> Workspace {
        let starts = Settings { starts: ["cli".to_owned()].into(), ..Settings::default() };
        let reads = Settings { reads: ["README.md".into()].into(), ..Settings::default() };
        Workspace {
            target: PathBuf::new(),
            packages: vec![
                package("cli", "crates/cli", &["plan"], reads),
                package("data", "crates/data", &["plan"], Settings::default()),
                package("example", "examples/one", &[], starts),
                package("macros", "crates/data/macros", &[], Settings::default()),
                package("plan", "crates/sampling", &[], Settings::default()),
                package("train", "crates/train", &["data", "plan"], Settings::default()),
            ],
        }
    }

    fn names(files: &[&str]) -> (Vec<Vec<String>>, usize) {
        let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
        let (levels, unknown) = levels(&workspace(), &files);
        (levels.into_iter().map(|it| it.into_keys().collect()).collect(), unknown.len())
    }

    #[test]
    fn the_nearest_packages_come_first() {
        let (levels, unknown) = names(&["crates/sampling/src/lib.rs"]);
        assert_eq!(levels, [&["plan"][..], &["cli", "data", "train"], &["example"]]);
        assert_eq!(unknown, 0);
        assert_eq!(names(&["crates/data/macros/src/lib.rs"]).0, [["macros"]]);
        assert_eq!(
            names(&["README.md", "LICENSE"]),
            (vec![vec!["cli".to_owned()], vec!["example".to_owned()]], 1)
        );
        assert_eq!(names(&["Cargo.lock"]).0[0].len(), 6);
        assert_eq!(names(&[]), (vec![], 0));
    }

    #[test]
    fn each_package_has_its_reason() {
        let (levels, _) = levels(&workspace(), &["crates/sampling/src/lib.rs".into()]);
        assert_eq!(levels[0]["plan"], "crates/sampling/src/lib.rs differs");
        assert_eq!(levels[1]["data"], "depends on plan");
        assert_eq!(levels[2]["example"], "its tests start a program of cli");
    }
}
