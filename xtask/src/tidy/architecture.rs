//! ARCHITECTURE.md: its table of crates is generated, its layers are those of the dependencies, the files that it names
//! exist, and it stays short.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Findings;
use crate::checkout::Checkout;
use crate::workspace::{Package, Workspace};

const PAGE: &str = "ARCHITECTURE.md";
const WRITE: &str = "cargo xtask tidy --write";
const BEGIN: &str =
    "<!-- Written by `cargo xtask tidy --write` from the descriptions in Cargo.toml. -->";
const END: &str = "<!-- The end of the table. -->";
/// A page that is longer is not read in one go; details belong into the crates' own documentation.
const MOST_BYTES: usize = 14_000;

/// Compares the page with the workspace, and replaces its table first where `write` is set.
pub(super) fn check(checkout: &Checkout, write: bool, findings: &mut Findings) -> Result<()> {
    let file = checkout.root().join(PAGE);
    let mut page = fs::read_to_string(&file).with_context(|| format!("cannot read {PAGE}"))?;
    let workspace = Workspace::of(checkout)?;
    let table = table(&workspace.packages);
    if write {
        page = with_table(&page, &table)?;
        fs::write(&file, &page).with_context(|| format!("cannot write {PAGE}"))?;
    }
    if with_table(&page, &table)? != page {
        findings.violations.push(format!(
            "{PAGE}: the table of crates differs from the descriptions in Cargo.toml: `{WRITE}` writes it anew"
        ));
    }
    findings.violations.extend(misplaced(&page, &workspace.packages));
    for (line, path) in named_paths(&page) {
        if !checkout.root().join(path).exists() {
            findings.violations.push(format!("{PAGE}:{line}: `{path}` does not exist"));
        }
    }
    if page.len() > MOST_BYTES {
        findings.violations.push(format!(
            "{PAGE} has {} bytes, more than {MOST_BYTES}: move details to the `//!` documentation of their crate",
            page.len()
        ));
    }
    Ok(())
}

/// Returns one row for each package outside of `examples/`, in the order of their folders.
fn table(packages: &[Package]) -> String {
    let mut shown: Vec<&Package> =
        packages.iter().filter(|package| !package.folder.starts_with("examples")).collect();
    shown.sort_by(|a, b| a.folder.cmp(&b.folder));
    let mut table = String::from("| Folder | What it is | No libtorch |\n|---|---|---|\n");
    for package in shown {
        let folder = package.folder.display();
        let mark = if package.settings.without_libtorch { "✓" } else { "" };
        table += &format!("| `{folder}` | {} | {mark} |\n", package.description);
    }
    table
}

/// Returns the page with this table between its two marks.
///
/// # Errors
/// A page without the marks.
fn with_table(page: &str, table: &str) -> Result<String> {
    let marks = page
        .split_once(BEGIN)
        .and_then(|(before, rest)| rest.split_once(END).map(|(_, after)| (before, after)));
    ensure!(marks.is_some(), "{PAGE} has no table between `{BEGIN}` and `{END}`");
    let (before, after) = marks.unwrap_or_default();
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

/// Names the crates that are not on exactly one line of the page's first block of text, and those whose dependencies are
/// not on a line above.
fn misplaced(page: &str, packages: &[Package]) -> Vec<String> {
    let block = page.split("```").nth(1).unwrap_or_default();
    let lines: Vec<Vec<&str>> =
        block.lines().map(|line| line.split_whitespace().collect()).collect();
    let line_of = |package: &Package| {
        let name = package.folder.strip_prefix("crates").ok()?.to_str()?.to_owned();
        let mut found = (0..lines.len()).filter(|&line| lines[line].contains(&name.as_str()));
        Some((found.next(), found.next().is_some()))
    };
    let mut violations = Vec::new();
    for package in packages {
        let Some((line, is_twice)) = line_of(package) else { continue };
        let Some(line) = line.filter(|_| !is_twice) else {
            violations.push(format!("{PAGE}: {} must be on one line of the layers", package.name));
            continue;
        };
        for used in packages.iter().filter(|it| package.shipped_dependencies.contains(&it.name)) {
            if line_of(used).is_some_and(|(found, _)| found.is_none_or(|found| found >= line)) {
                violations.push(format!(
                    "{PAGE}: {} depends on {}, which is not on a line above it",
                    package.name, used.name
                ));
            }
        }
    }
    violations
}

/// Returns the paths from the root of the checkout that stand in backticks, with their line numbers.
fn named_paths(page: &str) -> impl Iterator<Item = (usize, &str)> {
    page.lines().enumerate().flat_map(|(index, line)| {
        let spans = line.split('`').skip(1).step_by(2);
        spans.filter(|span| is_path(span)).map(move |span| (index + 1, span))
    })
}

/// Returns `true` for `crates/torch/src/bridge.rs` and `STYLE.md`, and `false` for `a / b` and `model.forward`.
fn is_path(span: &str) -> bool {
    let plain = |letter: char| letter.is_alphanumeric() || "_-./".contains(letter);
    let known = ["rs", "md", "toml", "cpp", "h"];
    let has_extension =
        Path::new(span).extension().is_some_and(|it| known.iter().any(|known| it == *known));
    span.chars().all(plain) && !span.starts_with('/') && (span.contains('/') || has_extension)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Settings;

    fn packages() -> Vec<Package> {
        let package = |name: &str, folder: &str, without_libtorch| Package {
            name: name.to_owned(),
            description: format!("The package {name}"),
            folder: folder.into(),
            settings: Settings { without_libtorch, ..Settings::default() },
            ..Package::default()
        };
        vec![
            package("b", "crates/b", false),
            package("a", "crates/a", true),
            package("c", "examples/c", false),
        ]
    }

    #[test]
    fn the_table_has_a_row_for_each_package_but_examples() {
        assert_eq!(
            table(&packages()),
            "| Folder | What it is | No libtorch |\n|---|---|---|\n\
             | `crates/a` | The package a | ✓ |\n\
             | `crates/b` | The package b |  |\n"
        );
    }

    #[test]
    fn a_table_replaces_the_one_between_the_marks() {
        let page = format!("# Page\n{BEGIN}\nold\n{END}\nrest\n");
        let written = with_table(&page, "new\n").unwrap();
        assert_eq!(written, format!("# Page\n{BEGIN}\n\nnew\n\n{END}\nrest\n"));
        assert_eq!(with_table(&written, "new\n").unwrap(), written);
        assert!(with_table("# Page\n", "new\n").is_err());
    }

    #[test]
    fn crates_depend_on_lines_above() {
        let mut packages = packages();
        packages[0].shipped_dependencies.insert("a".to_owned());
        assert_eq!(misplaced("```\na\nb\n```", &packages), Vec::<String>::new());
        let below = ["ARCHITECTURE.md: b depends on a, which is not on a line above it"];
        assert_eq!(misplaced("```\na b\n```", &packages), below);
        let twice = ["ARCHITECTURE.md: a must be on one line of the layers"];
        assert_eq!(misplaced("```\na\nb\na\n```", &packages), twice);
    }

    #[test]
    fn paths_are_told_from_other_code() {
        let page = "`crates/a/src/b.rs` and `STYLE.md`\n`x / y`, `model.forward`, `.ci/run`, `/proc/self`\n";
        let found: Vec<_> = named_paths(page).collect();
        assert_eq!(found, [(1, "crates/a/src/b.rs"), (1, "STYLE.md"), (2, ".ci/run")]);
    }
}
