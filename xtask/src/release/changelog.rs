//! The changelog, in the format of Keep a Changelog.

use anyhow::{Context, Result, ensure};

pub(crate) const FILE: &str = "CHANGELOG.md";

const UNRELEASED: &str = "## Unreleased";

/// Counts the entries of a part: `Unreleased` or a version.
///
/// # Errors
/// Fails if the part is missing or has no entries.
pub(crate) fn entries(text: &str, part: &str) -> Result<usize> {
    let mut lines = text.lines().skip_while(|line| !is_heading(line, part));
    let heading = lines.next();
    heading.with_context(|| format!("{FILE} has no heading `## {part}`: add it, with entries"))?;
    let entries = lines.take_while(|line| !line.starts_with("## "));
    let count = entries.filter(|line| line.starts_with("- ")).count();
    ensure!(
        count > 0,
        "{FILE} has no entries under `## {part}`: add a line `- …` for each change that a user notices"
    );
    Ok(count)
}

/// Puts the unreleased entries under a heading with version and date, below an empty part for the next release.
///
/// # Errors
/// Fails if there are no entries, or if the version has a heading already.
pub(crate) fn released(text: &str, version: &str, date: &str) -> Result<String> {
    entries(text, "Unreleased")?;
    ensure!(
        !text.lines().any(|line| is_heading(line, version)),
        "{FILE} has a heading for {version} already: put the entries of both parts under `{UNRELEASED}`"
    );
    let line = format!("\n{UNRELEASED}\n");
    Ok(text.replacen(&line, &format!("{line}\n{}\n", heading(version, date)), 1))
}

/// Returns the heading of a release.
pub(crate) fn heading(version: &str, date: &str) -> String {
    format!("## {version} - {date}")
}

fn is_heading(line: &str, part: &str) -> bool {
    line.strip_prefix("## ").and_then(|it| it.split(' ').next()) == Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Changelog\n\nText.\n\n## Unreleased\n\nSome words.\n\n### Added\n\n- A thing.\n- Another.\n\n\
                        ## 0.1.0 - 2026-12-01\n\n### Added\n\n- All.\n";

    #[test]
    fn unreleased_entries_get_a_heading_with_version_and_date() {
        let released = released(TEXT, "0.2.0", "2027-01-31").unwrap();
        let expected = TEXT.replace("## Unreleased\n", "## Unreleased\n\n## 0.2.0 - 2027-01-31\n");
        assert_eq!(released, expected);
        assert_eq!(entries(&released, "0.2.0").unwrap(), 2);
        // The next release needs entries of its own.
        let error = super::released(&released, "0.2.1", "2027-02-01").unwrap_err().to_string();
        assert!(error.contains("no entries under `## Unreleased`"), "{error}");
    }

    #[test]
    fn a_version_is_released_once() {
        let error = released(TEXT, "0.1.0", "2027-01-31").unwrap_err().to_string();
        assert!(error.contains("has a heading for 0.1.0 already"), "{error}");
    }

    #[test]
    fn parts_end_at_the_next_heading() {
        assert_eq!(entries(TEXT, "Unreleased").unwrap(), 2);
        assert_eq!(entries(TEXT, "0.1.0").unwrap(), 1);
        let error = entries(TEXT, "0.1").unwrap_err().to_string();
        assert!(error.contains("no heading `## 0.1`"), "{error}");
    }

    #[test]
    fn the_changelog_of_this_checkout_has_such_parts() {
        let checkout = crate::checkout::Checkout::find().unwrap();
        let text = std::fs::read_to_string(checkout.root().join(FILE)).unwrap();
        assert!(text.contains(&format!("\n{UNRELEASED}\n")), "{text}");
    }
}
