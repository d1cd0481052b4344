//! Versions of releases.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, Result, bail};

/// Version without a pre-release part: Python and cargo write these in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u64,
    minor: u64,
    patch: u64,
}

impl Version {
    /// Returns the name of the release's tag.
    pub(crate) fn tag(self) -> String {
        format!("v{self}")
    }

    fn next(self, size: Size) -> Self {
        let Self { major, minor, patch } = self;
        match size {
            Size::Patch => Self { major, minor, patch: patch + 1 },
            Size::Minor => Self { major, minor: minor + 1, patch: 0 },
            Size::Major => Self { major: major + 1, minor: 0, patch: 0 },
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |part: &str| -> Option<u64> {
            let is_plain = part.bytes().all(|it| it.is_ascii_digit());
            let is_short = part == "0" || !part.starts_with('0');
            part.parse().ok().filter(|_| is_plain && is_short)
        };
        let parts: Option<Vec<u64>> = text.split('.').map(number).collect();
        match parts.as_deref() {
            Some(&[major, minor, patch]) => Ok(Self { major, minor, patch }),
            _ => bail!("`{text}` is not a version: three numbers are wanted, such as 0.2.0"),
        }
    }
}

/// Part of the version that a release increments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Patch,
    Minor,
    Major,
}

impl Size {
    /// Returns the word of cargo-semver-checks for a step to `version`: before 1.0 a minor version may break, and a
    /// patch may add.
    pub(crate) fn for_semver_checks(self, version: Version) -> &'static str {
        let is_early = version.major == 0;
        match self {
            Self::Patch if !is_early => "patch",
            Self::Patch => "minor",
            Self::Minor if !is_early => "minor",
            Self::Minor | Self::Major => "major",
        }
    }
}

/// Returns the size of the step from the last release to `version`; `None` for the first release of all. Without a
/// release, the version in `Cargo.toml` is meant to be the first, or a step is made from it.
///
/// # Errors
/// Fails if it is not the next version of some size: a number was left out or mistyped.
pub(crate) fn size(
    last: Option<Version>,
    current: Version,
    version: Version,
) -> Result<Option<Size>> {
    if last.is_none() && version == current {
        return Ok(None);
    }
    let from = last.unwrap_or(current);
    let sizes = [Size::Patch, Size::Minor, Size::Major];
    if let Some(size) = sizes.into_iter().find(|size| from.next(*size) == version) {
        return Ok(Some(size));
    }
    let [patch, minor, major] = sizes.map(|size| from.next(size));
    let first = if last.is_none() { format!("{current}, ") } else { String::new() };
    bail!("{version} does not follow {from}: choose {first}{patch}, {minor} or {major}");
}

/// Returns the versions among tags, one a line.
pub(crate) fn of_tags(tags: &str) -> Vec<Version> {
    tags.lines().filter_map(|tag| tag.strip_prefix('v')?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn versions_are_three_numbers() {
        assert_eq!(version("10.0.3").to_string(), "10.0.3");
        assert!(version("0.10.0") > version("0.9.9"));
        for wrong in ["1.2", "1.2.3.4", "v1.2.3", "1.2.x", "1.02.3", "1.2.3-rc.1", "1.+2.3", ""] {
            let error = wrong.parse::<Version>().unwrap_err().to_string();
            assert!(error.contains("three numbers"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_release_is_a_step_from_the_last_one() {
        let size = |last: Option<&str>, current, next| {
            size(last.map(version), version(current), version(next))
        };
        assert_eq!(size(None, "0.1.0", "0.1.0").unwrap(), None);
        assert_eq!(size(None, "0.1.0", "0.2.0").unwrap(), Some(Size::Minor));
        assert_eq!(size(Some("0.1.0"), "0.1.0", "0.1.1").unwrap(), Some(Size::Patch));
        // The version was written before.
        assert_eq!(size(Some("0.1.0"), "0.2.0", "0.2.0").unwrap(), Some(Size::Minor));
        assert_eq!(size(Some("1.2.3"), "1.2.3", "2.0.0").unwrap(), Some(Size::Major));
        for wrong in ["0.1.2", "0.3.0", "0.2.1", "2.0.0", "0.0.9"] {
            let error = size(Some("0.1.0"), "0.1.0", wrong).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("{wrong} does not follow 0.1.0: choose 0.1.1, 0.2.0 or 1.0.0")
            );
        }
    }

    #[test]
    fn before_1_0_a_minor_version_may_break() {
        let word = |size: Size, to| size.for_semver_checks(version(to));
        assert_eq!((word(Size::Patch, "0.1.1"), word(Size::Minor, "0.2.0")), ("minor", "major"));
        assert_eq!((word(Size::Patch, "1.0.1"), word(Size::Minor, "1.1.0")), ("patch", "minor"));
        assert_eq!(word(Size::Major, "1.0.0"), "major");
    }

    #[test]
    fn other_tags_are_not_releases() {
        let tags = "v0.1.0\nv0.2.0-rc.1\nvery-old\n1.0.0\nv0.10.0\n";
        assert_eq!(of_tags(tags), [version("0.1.0"), version("0.10.0")]);
    }
}
