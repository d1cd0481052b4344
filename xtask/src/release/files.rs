//! The files that have the version.

use anyhow::{Context, Result};
use toml_edit::{DocumentMut, Item, TableLike, Value};

use super::changelog;
use super::version::Version;

/// Change of a file in the checkout.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) file: &'static str,
    pub(crate) before: String,
    pub(crate) after: String,
    /// Summary for the terminal.
    pub(crate) summary: String,
}

const MANIFEST: &str = "Cargo.toml";
/// The fuzzers are a workspace of their own.
const LOCKS: [&str; 2] = ["Cargo.lock", "fuzz/Cargo.lock"];
const PYTHON: &str = "pyproject.toml";

/// Returns what a release changes: versions in manifests and lock files, and the changelog's heading. Files that stay the
/// same are left out.
pub(crate) fn changes(
    read: impl Fn(&str) -> Result<String>,
    members: &[String],
    version: Version,
    date: &str,
) -> Result<Vec<Change>> {
    let version = version.to_string();
    let mut changes = Vec::new();
    let mut add = |file: &'static str, edit: &dyn Fn(&str) -> Result<(String, String)>| {
        let before = read(file)?;
        let (after, summary) = edit(&before).with_context(|| format!("cannot change {file}"))?;
        if after != before {
            changes.push(Change { file, before, after, summary });
        }
        Ok::<(), anyhow::Error>(())
    };
    let counted = |(after, count): (String, usize)| (after, format!("{version}, {count} times"));
    add(MANIFEST, &|text| manifest(text, &version).map(counted))?;
    for file in LOCKS {
        add(file, &|text| lock(text, members, &version).map(counted))?;
    }
    add(PYTHON, &|text| python(text, &version).map(counted))?;
    add(changelog::FILE, &|text| {
        let count = changelog::entries(text, "Unreleased")?;
        let heading = changelog::heading(&version, date);
        let after = changelog::released(text, &version, date)?;
        Ok((after, format!("`{heading}` for {count} entries")))
    })?;
    Ok(changes)
}

/// Changes the workspace's version, and the versions by which its packages require each other.
fn manifest(text: &str, version: &str) -> Result<(String, usize)> {
    let mut document: DocumentMut = text.parse()?;
    let workspace = table(document.get_mut("workspace")).context("it has no workspace")?;
    let own = table(workspace.get_mut("package")).and_then(|it| it.get_mut("version"));
    let mut count = set(own.context("the workspace has no version")?, version);
    let dependencies = table(workspace.get_mut("dependencies"));
    for (_, dependency) in dependencies.context("the workspace has no dependencies")?.iter_mut() {
        // Versions alone are strings.
        let Some(dependency) = dependency.as_table_like_mut() else { continue };
        let is_own = dependency.contains_key("path");
        if let Some(required) = dependency.get_mut("version").filter(|_| is_own) {
            count += set(required, version);
        }
    }
    Ok((document.to_string(), count))
}

/// Changes the versions of the workspace's packages.
fn lock(text: &str, members: &[String], version: &str) -> Result<(String, usize)> {
    let mut document: DocumentMut = text.parse()?;
    let packages = document.get_mut("package").and_then(Item::as_array_of_tables_mut);
    let mut count = 0;
    for package in packages.context("it lists no packages")?.iter_mut() {
        let name = package.get("name").and_then(Item::as_str).unwrap_or_default();
        let is_own = package.get("source").is_none() && members.iter().any(|it| it == name);
        if let Some(found) = package.get_mut("version").filter(|_| is_own) {
            count += set(found, version);
        }
    }
    Ok((document.to_string(), count))
}

/// Changes the version of the Python package, unless it is read from `Cargo.toml`.
fn python(text: &str, version: &str) -> Result<(String, usize)> {
    let mut document: DocumentMut = text.parse()?;
    let project = table(document.get_mut("project")).context("it has no project")?;
    let count = project.get_mut("version").map_or(0, |it| set(it, version));
    Ok((document.to_string(), count))
}

fn table(item: Option<&mut Item>) -> Option<&mut dyn TableLike> {
    item?.as_table_like_mut()
}

/// Replaces a string and keeps the space around it; returns the number of changes.
fn set(item: &mut Item, text: &str) -> usize {
    let Some(value) = item.as_value_mut().filter(|it| it.as_str() != Some(text)) else { return 0 };
    let decor = value.decor().clone();
    *value = Value::from(text);
    *value.decor_mut() = decor;
    1
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::checkout::Checkout;

    #[test]
    fn versions_change_and_nothing_beside_them() {
        let text = "[workspace]\n\n[workspace.package] # shared\nversion = \"0.1.0\" # now\n\n[workspace.dependencies]\n\
                    brigade = { path = \"crates/brigade\", version = \"0.1.0\" }\nbrigade-gpu = { path = \"gpu\" }\n\
                    other = { version = \"0.1.0\" }\nplain = \"0.1.0\"\n";
        let expected = text.replace("\"0.1.0\" # now", "\"0.2.0\" # now").replace(
            "crates/brigade\", version = \"0.1.0\"",
            "crates/brigade\", version = \"0.2.0\"",
        );
        assert_eq!(manifest(text, "0.2.0").unwrap(), (expected, 2));

        let text = "version = 4\n\n[[package]]\nname = \"brigade\"\nversion = \"0.1.0\"\ndependencies = [\n \"other\",\n]\n\n\
                    [[package]]\nname = \"other\"\nversion = \"0.1.0\"\nsource = \"registry\"\nchecksum = \"1\"\n\n\
                    [[package]]\nname = \"strange\"\nversion = \"0.1.0\"\n";
        let expected = text.replacen("0.1.0", "0.2.0", 1);
        assert_eq!(lock(text, &["brigade".to_owned()], "0.2.0").unwrap(), (expected, 1));
    }

    #[test]
    fn the_files_of_this_checkout_change_in_their_versions_alone() {
        let checkout = Checkout::find().unwrap();
        let read =
            |file: &str| -> Result<String> { Ok(fs::read_to_string(checkout.root().join(file))?) };
        let members = crate::release::members(&checkout).unwrap();
        let version: Version = "7.8.9".parse().unwrap();
        let changes = changes(read, &members, version, "2027-01-31").unwrap();
        let files: Vec<_> = changes.iter().map(|it| it.file).collect();
        // The wheel has the version of Cargo.toml.
        assert_eq!(files, ["Cargo.toml", "Cargo.lock", "fuzz/Cargo.lock", "CHANGELOG.md"]);
        for change in &changes[..3] {
            let lines = change.before.lines().zip(change.after.lines());
            let changed: Vec<_> = lines.filter(|(before, after)| before != after).collect();
            assert!(!changed.is_empty(), "{}", change.file);
            assert!(change.summary.contains(&format!(" {} times", changed.len())), "{change:?}");
            assert_eq!(change.before.lines().count(), change.after.lines().count());
            for (before, after) in changed {
                let current = env!("CARGO_PKG_VERSION");
                assert_eq!(before.replace(current, "7.8.9"), after, "{}", change.file);
            }
        }
    }
}
