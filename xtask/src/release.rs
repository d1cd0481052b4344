//! `cargo xtask release`: from a clean checkout to a tagged commit with its packages. Never pushes or uploads.

mod changelog;
mod files;
mod version;

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::cargo::Cargo;
use crate::check;
use crate::checkout::Checkout;
use crate::git::git;
use crate::metadata::Metadata;
use crate::package;
use crate::semver::{self, SemverChecks};
use crate::workspace::Workspace;

use files::Change;
use version::{Size, Version};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Version of the release: the next patch, minor or major one, or the first
    #[arg(value_name = "X.Y.Z")]
    version: Version,
    /// Check and build, but write, commit and tag nothing
    #[arg(long)]
    dry_run: bool,
}

/// Checks the checkout, writes the version, checks the crates, builds the packages, commits and tags.
pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    let version = options.version;
    is_clean(checkout)?;
    let released = Released::of(checkout, version)?;
    let (changes, size) = plan(checkout, options, &released)?;
    for change in &changes {
        eprintln!("{}: {}", change.file, change.summary);
    }
    let writes = !options.dry_run;
    let mut written = Written { checkout, changes: &changes, is_kept: false };
    if writes {
        written.write()?;
    } else if released.current != version {
        eprintln!(
            "release: --dry-run writes nothing: crates and packages are built as {}",
            released.current
        );
    }

    let cargo = Cargo::new(checkout)?;
    ensure!(
        cargo.run(&check::PACKAGE)?.success(),
        "crates.io would refuse the crates: cargo's last lines say why"
    );
    let size = size.map(|size| size.for_semver_checks(version));
    ensure!(
        keeps_its_api(checkout, released.last, size)?,
        "the public API has changed more than a version {version} may: choose the next minor or major version, or take \
         the change back"
    );
    if writes {
        let files: Vec<&str> = changes.iter().map(|it| it.file).collect();
        let message = format!("Release {version}");
        git(checkout, &[&["commit", "--quiet", "--message", &message, "--"], &files[..]].concat())?;
        written.is_kept = true;
    }
    let failed = if writes { UNDO } else { "the packages could not be built" };
    let code = package::run(checkout, &package::Options::default()).context(failed)?;
    if writes {
        let tag = version.tag();
        git(checkout, &["tag", "--annotate", "--message", &format!("Brigade {version}"), &tag])?;
    }

    let folder = package::folder(&Workspace::of(checkout)?);
    eprintln!("\nrelease: {version}{}", if writes { "" } else { ", nothing written" });
    package::list(checkout, &folder)?;
    if writes {
        let tag = version.tag();
        eprintln!("commit `Release {version}` and tag {tag}, not pushed. Next:");
        eprintln!(
            "  git push origin HEAD {tag}     # CI builds the packages again and drafts the release"
        );
        eprintln!("  cargo publish --workspace");
        eprintln!("`git tag -d {tag} && git reset --hard HEAD~1` undoes it");
    }
    Ok(code)
}

/// Compares the public API with that of the last release, if there is one.
fn keeps_its_api(checkout: &Checkout, last: Option<Version>, size: Option<&str>) -> Result<bool> {
    let Some(last) = last else {
        eprintln!("{}", semver::NO_RELEASE);
        return Ok(true);
    };
    SemverChecks::find_or_install(checkout)?.accept(checkout, &last.tag(), size)
}

/// Returns the changes of files, and the size of the step from the last release: none for the first one, and at a commit
/// that has the release's tag.
fn plan(
    checkout: &Checkout,
    options: &Options,
    released: &Released,
) -> Result<(Vec<Change>, Option<Size>)> {
    let version = options.version;
    let read = |file: &str| read(checkout, file);
    if !released.is_tagged {
        released.refuse(version)?;
        let size = version::size(released.last, released.current, version)?;
        return Ok((files::changes(read, &members(checkout)?, version, &today()?)?, size));
    }
    let tag = version.tag();
    ensure!(
        options.dry_run,
        "this commit has the tag {tag} already: with --dry-run it is checked and built again"
    );
    ensure!(
        released.current == version,
        "this commit has the tag {tag}, but Cargo.toml has version {}: remove the tag (`git tag -d {tag}`), or check out \
         the right commit",
        released.current
    );
    changelog::entries(&read(changelog::FILE)?, &version.to_string())?;
    eprintln!("release: this commit has the tag {tag}: there is nothing to write");
    Ok((Vec::new(), None))
}

/// Context of errors after the commit.
const UNDO: &str = "the version is committed but not tagged, because the packages could not be built (`git reset --hard \
                    HEAD~1` undoes the commit)";

/// Releases as Git's tags name them.
struct Released {
    /// Version in `Cargo.toml`.
    current: Version,
    /// The latest one, other than the version that is to be released.
    last: Option<Version>,
    /// `true` if this commit has the tag of the version that is to be released.
    is_tagged: bool,
    /// All tagged versions.
    all: Vec<Version>,
}

impl Released {
    fn of(checkout: &Checkout, version: Version) -> Result<Self> {
        let metadata = Metadata::of(checkout, &["--locked"])?;
        let current = metadata.member("brigade")?.version.parse()?;
        let here = git(checkout, &["tag", "--points-at", "HEAD"])?;
        let all = version::of_tags(&git(checkout, &["tag", "--list", "v*"])?);
        Ok(Self {
            current,
            last: all.iter().copied().filter(|it| *it < version).max(),
            is_tagged: version::of_tags(&here).contains(&version),
            all,
        })
    }

    /// Fails if the version was released from another commit, or before a later one.
    fn refuse(&self, version: Version) -> Result<()> {
        let latest = self.all.iter().max().filter(|it| **it >= version);
        let Some(latest) = latest else { return Ok(()) };
        bail!("{} is released already: choose a version after {latest}", latest.tag());
    }
}

/// Changes that are taken back unless they were committed: the working tree was clean before.
struct Written<'a> {
    checkout: &'a Checkout,
    changes: &'a [Change],
    is_kept: bool,
}

impl Written<'_> {
    fn write(&mut self) -> Result<()> {
        for change in self.changes {
            fs::write(self.checkout.root().join(change.file), &change.after)
                .with_context(|| format!("cannot write {}", change.file))?;
        }
        Ok(())
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for change in self.changes {
            let path = self.checkout.root().join(change.file);
            if fs::read_to_string(&path).is_ok_and(|text| text == change.before) {
                continue;
            }
            if let Err(error) = fs::write(&path, &change.before) {
                let file = change.file;
                eprintln!("cannot take back {file} ({error}): `git checkout -- {file}` does");
            }
        }
    }
}

fn is_clean(checkout: &Checkout) -> Result<()> {
    let status = git(checkout, &["status", "--porcelain"])?;
    ensure!(
        status.is_empty(),
        "the working tree has changes that no commit has: commit them or remove them first\n{}",
        status.lines().take(10).collect::<Vec<_>>().join("\n")
    );
    Ok(())
}

/// Names of the workspace's packages, whose versions are in the lock files.
fn members(checkout: &Checkout) -> Result<Vec<String>> {
    let metadata = Metadata::of(checkout, &["--locked"])?;
    Ok(metadata.members().map(|it| it.name.clone()).collect())
}

fn read(checkout: &Checkout, file: &str) -> Result<String> {
    fs::read_to_string(checkout.root().join(file)).with_context(|| format!("cannot read {file}"))
}

/// Returns today's date in UTC, such as `2027-01-31`.
fn today() -> Result<String> {
    let output = Command::new("date").args(["-u", "+%F"]).output().context("cannot start date")?;
    ensure!(output.status.success(), "date failed");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
