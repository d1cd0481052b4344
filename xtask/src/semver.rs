//! `cargo xtask semver`: compares the public API with that of a release, by cargo-semver-checks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use brigade_test_needs::{SEMVER_CHECKS_VERSION, semver_checks};
use clap::Args;
use toml_edit::DocumentMut;

use crate::cargo::{self, plain};
use crate::checkout::Checkout;
use crate::git::git;
use crate::metadata::{Metadata, Package};
use crate::setup;
use crate::workspace::Workspace;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Tag or commit to compare with [default: the last tag v*]
    #[arg(long, value_name = "REVISION")]
    baseline: Option<String>,
    /// Changes that are allowed, where Cargo.toml has the version of the baseline [default: those of a minor version]
    #[arg(long, value_name = "SIZE", value_parser = ["patch", "minor", "major"])]
    release_type: Option<String>,
}

/// Installs cargo-semver-checks if it is missing, and compares the public API with that of the baseline. Without a
/// baseline there is nothing to compare, which is not an error.
pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    let baseline = match &options.baseline {
        Some(baseline) => Some(baseline.clone()),
        None => last_tag(checkout),
    };
    let is_accepted = match baseline {
        Some(baseline) => {
            let checks = SemverChecks::find_or_install(checkout)?;
            checks.accept(checkout, &baseline, options.release_type.as_deref())?
        }
        None => {
            eprintln!("{NO_RELEASE}");
            true
        }
    };
    Ok(if is_accepted { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Compares with the last tag, where there is one and cargo-semver-checks is installed.
pub(crate) fn run_if_installed(checkout: &Checkout) -> Result<bool> {
    let Some(tag) = last_tag(checkout) else {
        eprintln!("{NO_RELEASE}");
        return Ok(true);
    };
    let Some(checks) = SemverChecks::find(checkout) else {
        eprintln!(
            "semver: left out: cargo-semver-checks is not installed (`cargo xtask semver` installs and runs it)"
        );
        return Ok(true);
    };
    checks.accept(checkout, &tag, None)
}

/// Returns the last tag of a release that is an ancestor of this commit.
fn last_tag(checkout: &Checkout) -> Option<String> {
    git(checkout, &["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]).ok()
}

pub(crate) const NO_RELEASE: &str = "semver: left out: no tag v* marks a release to compare with";

/// cargo-semver-checks, which compares the rustdoc JSON of two versions of a crate.
pub(crate) struct SemverChecks {
    program: PathBuf,
}

impl SemverChecks {
    /// Returns the one in `PATH`, or else the one in the checkout.
    fn find(checkout: &Checkout) -> Option<Self> {
        semver_checks(checkout.root()).map(|program| Self { program })
    }

    /// Returns the one in `PATH`, or else the one in the checkout, which cargo compiles if it is missing.
    pub(crate) fn find_or_install(checkout: &Checkout) -> Result<Self> {
        match Self::find(checkout) {
            Some(found) => Ok(found),
            None => Self::install(checkout).map(|program| Self { program }),
        }
    }

    /// Compiles it into the checkout's `tools/`.
    pub(crate) fn install(checkout: &Checkout) -> Result<PathBuf> {
        cargo::install(checkout, "cargo-semver-checks", SEMVER_CHECKS_VERSION)
    }

    /// Compares the libraries that are published now and were at the baseline. `size` is the size of the planned
    /// release in the words of cargo-semver-checks, where `Cargo.toml` does not have its version yet. Returns `false`
    /// if a library has changed more than this size allows.
    pub(crate) fn accept(
        &self,
        checkout: &Checkout,
        baseline: &str,
        size: Option<&str>,
    ) -> Result<bool> {
        let metadata = Metadata::of(checkout, &["--locked"])?;
        let before = libraries_at(checkout, baseline)?;
        let comparison = Comparison::new(&metadata, &before);
        for name in &comparison.added {
            eprintln!("semver: {name} is new since {baseline}");
        }
        for name in &comparison.removed {
            eprintln!(
                "semver: {name} was published at {baseline} and is not any more: the changelog must say so"
            );
        }
        // Its bindings compile only if it is found.
        let links_libtorch = metadata.packages.iter().any(|it| it.name == "torch-sys");
        let libtorch = if links_libtorch { Some(setup::ensure(checkout)?) } else { None };
        // One folder for all libraries: each would compile libtorch's bindings for itself, for both versions.
        let target = Workspace::of(checkout)?.target.join("semver");
        let mut is_accepted = true;
        for group in &comparison.groups {
            let mut command = plain(checkout, &self.program);
            command.args(["semver-checks", "--baseline-rev", baseline]);
            command.args(size.into_iter().flat_map(|it| ["--release-type", it]));
            command.args(group.arguments());
            // The baseline lies in a folder of its own, without .cargo/libtorch.toml.
            command.envs(libtorch.iter().map(|it| ("LIBTORCH", it.folder())));
            forget_documentation(&target)?;
            command.env("CARGO_TARGET_DIR", &target);
            is_accepted &= cargo::run(&mut command)?.success();
        }
        Ok(is_accepted)
    }
}

/// Removes rustdoc's output and what cargo remembers of it. Both versions of a library write the same file, so what cargo
/// takes for the output of one version may be that of the other.
fn forget_documentation(target: &Path) -> Result<()> {
    let fingerprints = target.join("debug/.fingerprint");
    let entries = fs::read_dir(&fingerprints).into_iter().flatten();
    let mut folders = entries.map(|it| Ok(it?.path())).collect::<io::Result<Vec<_>>>()?;
    folders.retain(|folder| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        files.map(|it| it.file_name()).any(|it| it.to_string_lossy().starts_with("doc-"))
    });
    folders.push(target.join("doc"));
    for folder in folders.iter().filter(|it| it.exists()) {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

/// Names of the published libraries, with their features.
type Libraries = BTreeMap<String, BTreeSet<String>>;

/// Published libraries now and at a baseline.
#[derive(Debug, Default, PartialEq)]
struct Comparison {
    added: Vec<String>,
    removed: Vec<String>,
    groups: Vec<Group>,
}

/// Libraries that cargo-semver-checks compares in one run.
#[derive(Debug, Default, PartialEq)]
struct Group {
    packages: Vec<String>,
    /// Features of baseline and current version, if not all of them can be compiled.
    features: Option<[Vec<String>; 2]>,
}

impl Comparison {
    fn new(metadata: &Metadata, before: &Libraries) -> Self {
        let published = metadata.members().filter(|it| it.is_published());
        let now: BTreeMap<&str, &Package> =
            published.filter(|it| it.is_library()).map(|it| (it.name.as_str(), it)).collect();
        let removed = before.keys().filter(|name| !now.contains_key(name.as_str()));
        let mut comparison = Self { removed: removed.cloned().collect(), ..Self::default() };
        let mut common = Group::default();
        for (name, package) in now {
            let Some(features) = before.get(name) else {
                comparison.added.push(name.to_owned());
                continue;
            };
            let current: BTreeSet<String> = package.features.keys().cloned().collect();
            if !features.union(&current).any(|it| is_excluded(it)) {
                common.packages.push(name.to_owned());
                continue;
            }
            let compared = [features, &current]
                .map(|names| names.iter().filter(|name| !is_excluded(name)).cloned().collect());
            comparison
                .groups
                .push(Group { packages: vec![name.to_owned()], features: Some(compared) });
        }
        if !common.packages.is_empty() {
            comparison.groups.insert(0, common);
        }
        comparison
    }
}

impl Group {
    fn arguments(&self) -> Vec<&str> {
        let mut arguments: Vec<&str> =
            self.packages.iter().flat_map(|it| ["--package", it.as_str()]).collect();
        if let Some([baseline, current]) = &self.features {
            arguments.push("--only-explicit-features");
            for (option, features) in
                [("--baseline-features", baseline), ("--current-features", current)]
            {
                arguments.extend(features.iter().flat_map(|it| [option, it.as_str()]));
            }
        }
        arguments
    }
}

/// Returns `true` for features that cannot be compiled on every machine, or not beside the others.
fn is_excluded(feature: &str) -> bool {
    ["cuda", "doc-only"].contains(&feature)
}

/// Reads the published libraries of the workspace at a revision.
fn libraries_at(checkout: &Checkout, revision: &str) -> Result<Libraries> {
    let manifest = |folder: &str| -> Result<DocumentMut> {
        let file = format!("{revision}:{folder}Cargo.toml");
        let text = git(checkout, &["show", &file])?;
        text.parse().with_context(|| format!("{file} is malformed"))
    };
    let workspace = manifest("")?;
    let members = workspace.get("workspace").and_then(|it| it.get("members")?.as_array());
    let members = members.with_context(|| format!("{revision}:Cargo.toml has no workspace"))?;
    let mut libraries = Libraries::new();
    for folder in members.iter().filter_map(|it| it.as_str()) {
        let manifest = manifest(&format!("{folder}/"))?;
        if let Some((name, features)) = library(&manifest) {
            let has_file = || {
                git(checkout, &["cat-file", "-e", &format!("{revision}:{folder}/src/lib.rs")])
                    .is_ok()
            };
            if manifest.contains_key("lib") || has_file() {
                libraries.insert(name, features);
            }
        }
    }
    Ok(libraries)
}

/// Returns name and features of a package, unless it is not published or a procedural macro, which has no public API that
/// cargo-semver-checks could compare.
fn library(manifest: &DocumentMut) -> Option<(String, BTreeSet<String>)> {
    let package = manifest.get("package")?;
    let publish = package.get("publish");
    let is_published = publish.is_none_or(|it| it.as_bool() != Some(false));
    let is_macro = manifest.get("lib").and_then(|it| it.get("proc-macro")?.as_bool());
    let features = manifest.get("features").and_then(|it| it.as_table_like());
    let features = features.into_iter().flat_map(|it| it.iter().map(|(name, _)| name.to_owned()));
    (is_published && is_macro != Some(true))
        .then(|| Some((package.get("name")?.as_str()?.to_owned(), features.collect())))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library_of(text: &str) -> Option<(String, BTreeSet<String>)> {
        library(&text.parse().unwrap())
    }

    #[test]
    fn published_libraries_are_read_from_their_manifests() {
        let (name, features) = library_of(
            "[package]\nname = \"a\"\nversion.workspace = true\n\n[features]\ndefault = []\ncuda = []\n",
        )
        .unwrap();
        assert_eq!(name, "a");
        assert_eq!(features, ["cuda", "default"].map(str::to_owned).into());
        assert_eq!(library_of("[package]\nname = \"a\"\npublish = false\n"), None);
        assert_eq!(library_of("[package]\nname = \"a\"\n\n[lib]\nproc-macro = true\n"), None);
    }

    #[test]
    fn the_libraries_of_this_checkout_are_compared_with_features_that_every_machine_compiles() {
        let checkout = Checkout::find().unwrap();
        let metadata = Metadata::of(&checkout, &["--locked"]).unwrap();
        let none = Comparison::new(&metadata, &Libraries::new());
        assert_eq!((none.groups, none.removed), (Vec::new(), Vec::new()));
        for name in ["brigade-derive", "brigade-cli", "xtask"] {
            assert!(!none.added.iter().any(|it| it == name), "{name} has no public API");
        }
        let before = |name: &str| {
            let features = ["default", "cuda", "older"].map(str::to_owned);
            (name.to_owned(), if name == "brigade" { features.into() } else { BTreeSet::new() })
        };
        let names = ["brigade", "brigade-sampling", "brigade-schedule", "brigade-gone"];
        let comparison = Comparison::new(&metadata, &names.map(before).into());
        assert_eq!(comparison.removed, ["brigade-gone"]);
        assert_eq!(comparison.groups.len(), 2);
        assert_eq!(
            comparison.groups[0].arguments(),
            ["--package", "brigade-sampling", "--package", "brigade-schedule"]
        );
        let arguments = comparison.groups[1].arguments().join(" ");
        let start = "--package brigade --only-explicit-features --baseline-features default \
                     --baseline-features older --current-features default --current-features https";
        assert!(arguments.starts_with(start), "{arguments}");
        assert!(!arguments.contains("cuda"), "{arguments}");
    }
}
