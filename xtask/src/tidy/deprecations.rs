//! Rule about deprecations: the changelog names each deprecated item of the public crates.

use std::fs;

use anyhow::{Context, Result};

use super::Findings;
use crate::checkout::Checkout;

pub(super) fn check(
    checkout: &Checkout,
    sources: &[(String, String)],
    findings: &mut Findings,
) -> Result<()> {
    let changelog = fs::read_to_string(checkout.root().join(CHANGELOG))
        .with_context(|| format!("cannot read {CHANGELOG}"))?;
    let named = under_deprecated(&changelog);
    let is_public = |path: &str| path.starts_with("crates/") && path.contains("/src/");
    for (path, contents) in sources.iter().filter(|(path, _)| is_public(path)) {
        for (line, name) in deprecated(contents) {
            if !named.iter().any(|entry| names(entry, &name)) {
                findings.violations.push(format!(
                    "{path}:{line}: `{name}` is deprecated, and {CHANGELOG} does not name it: add a line with `{name}` \
                     and its replacement under a heading \"{HEADING}\""
                ));
            }
        }
    }
    Ok(())
}

/// Returns the entries under the headings for deprecations, of all versions.
fn under_deprecated(changelog: &str) -> Vec<&str> {
    let mut is_under = false;
    let mut entries = Vec::new();
    for line in changelog.lines() {
        if line.starts_with('#') {
            is_under = line == HEADING;
        } else if is_under {
            entries.push(line);
        }
    }
    entries
}

/// Returns `true` if the entry has the name as code: `name`, `path::name` or `name()`.
fn names(entry: &str, name: &str) -> bool {
    let codes = entry.split('`').skip(1).step_by(2);
    let last =
        |code: &str| code.rsplit("::").next().unwrap_or(code).trim_end_matches("()").to_owned();
    codes.map(last).any(|code| code == name)
}

/// Returns the deprecated items of a file, with the line of the attribute.
fn deprecated(contents: &str) -> Vec<(usize, String)> {
    let mut items = Vec::new();
    let mut lines = contents.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let line = line.trim_start();
        if !line.starts_with("#[deprecated") {
            continue;
        }
        // The attribute may have several lines, and others may follow.
        let mut is_open = !line.ends_with(']');
        let item = lines.by_ref().map(|(_, line)| line.trim()).find(|line| {
            let is_item = !is_open && !line.starts_with("#[") && !line.starts_with("//");
            is_open = is_open && !line.ends_with(']');
            is_item
        });
        if let Some(name) = item.and_then(name_of) {
            items.push((number + 1, name));
        }
    }
    items
}

/// Returns the name that a line declares: of a function, a type, a field, or a variant.
fn name_of(line: &str) -> Option<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let words = line.split(|c: char| !is_name(c)).filter(|word| !word.is_empty());
    words.map(str::to_owned).find(|word| !KEYWORDS.contains(&word.as_str()))
}

const CHANGELOG: &str = "CHANGELOG.md";
const HEADING: &str = "### Deprecated";
/// Words before the name of an item.
const KEYWORDS: [&str; 16] = [
    "async",
    "const",
    "crate",
    "enum",
    "extern",
    "fn",
    "in",
    "macro_rules",
    "mod",
    "pub",
    "static",
    "struct",
    "super",
    "trait",
    "type",
    "unsafe",
];

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
/// Old.
#[deprecated(since = \"0.2.0\", note = \"use `new_way`\")]
#[must_use]
pub const fn old_way(this: u8) -> u8 {
}
pub struct Settings {
    #[deprecated]
    // A comment.
    pub width: usize,
}
    #[deprecated(
        since = \"0.2.0\",
        note = \"use `Wide`\"
    )]
    Narrow,
";

    #[test]
    fn deprecated_items_are_found_with_their_lines() {
        let found = deprecated(SOURCE);
        let expected = [(2, "old_way"), (7, "width"), (11, "Narrow")];
        assert_eq!(found, expected.map(|(line, name)| (line, name.to_owned())));
    }

    #[test]
    fn each_deprecated_item_is_in_the_changelog() {
        let changelog = "# Changelog\n\n`width`\n\n## 0.2.0\n\n### Deprecated\n\n- `brigade::old_way()`: use `new_way`.\n\n\
                         ### Removed\n\n- `Narrow`.\n";
        let entries = under_deprecated(changelog);
        let missing: Vec<_> = deprecated(SOURCE)
            .into_iter()
            .map(|(_, name)| name)
            .filter(|name| !entries.iter().any(|entry| names(entry, name)))
            .collect();
        assert_eq!(missing, ["width", "Narrow"]);
    }
}
