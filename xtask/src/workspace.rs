//! Packages of the workspace, from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cargo::plain_cargo;
use crate::checkout::Checkout;

/// Packages of the workspace, ordered by name.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Target folder of cargo: CARGO_TARGET_DIR may be anywhere.
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
}

/// Package of the workspace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Description in its `Cargo.toml`, one line; empty if it has none.
    pub(crate) description: String,
    /// Folder, relative to the root of the checkout.
    pub(crate) folder: PathBuf,
    /// Packages of the workspace that it depends on, including those for its build and its tests.
    pub(crate) dependencies: BTreeSet<String>,
    /// Packages among them that it needs when it runs, not only for its build or its tests.
    pub(crate) shipped_dependencies: BTreeSet<String>,
    /// Names of its test programs.
    pub(crate) tests: BTreeSet<String>,
    /// Names of its programs.
    pub(crate) programs: BTreeSet<String>,
    pub(crate) has_library: bool,
    pub(crate) settings: Settings,
}

/// Settings of a package in `[package.metadata.brigade]` of its `Cargo.toml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Settings {
    /// Other packages whose programs its tests start.
    pub(crate) starts: BTreeSet<String>,
    /// Files and folders outside of its folder that its tests read, relative to the root of the checkout.
    pub(crate) reads: BTreeSet<PathBuf>,
    /// Test programs that run on a GPU (`cargo xtask gpu`), in this order.
    pub(crate) on_gpus: Vec<String>,
    /// Those of the test programs that take seconds on one processor, and also run without a GPU.
    pub(crate) short: BTreeSet<String>,
    /// Numeric tests that do not run on TPUs (`cargo xtask test --device tpu`), by the beginnings of their names, with the
    /// reasons; `*` for all of them.
    pub(crate) not_on_tpu: BTreeMap<String, String>,
    /// `true` if it is published for tests of other packages: no other published package may depend on it.
    pub(crate) for_tests: bool,
    /// `true` if its shipped part never links libtorch: a program that starts ranks must start in milliseconds.
    pub(crate) without_libtorch: bool,
}

impl Workspace {
    /// Reads the metadata from cargo.
    pub(crate) fn of(checkout: &Checkout) -> Result<Self> {
        let output = plain_cargo(checkout)
            .args(["metadata", "--format-version", "1", "--no-deps"])
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("cargo metadata fails: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let metadata: Metadata = serde_json::from_slice(&output.stdout)
            .context("cannot read the output of cargo metadata")?;
        let names: BTreeSet<String> = metadata.packages.iter().map(|it| it.name.clone()).collect();
        let package = |package: PackageMetadata| -> Result<Package> {
            let targets = |kind: &str| -> BTreeSet<String> {
                let of_kind =
                    package.targets.iter().filter(|it| it.kind.iter().any(|it| it == kind));
                of_kind.map(|it| it.name.clone()).collect()
            };
            let folder = package.manifest_path.parent().unwrap_or_else(|| Path::new(""));
            let of_workspace =
                package.dependencies.iter().filter(|dependency| names.contains(&dependency.name));
            let shipped = of_workspace.clone().filter(|dependency| dependency.kind.is_none());
            let settings = package.metadata.and_then(|it| it.brigade);
            Ok(Package {
                folder: checkout.relative(folder).to_path_buf(),
                dependencies: of_workspace.map(|it| it.name.clone()).collect(),
                shipped_dependencies: shipped.map(|it| it.name.clone()).collect(),
                tests: targets("test"),
                programs: targets("bin"),
                has_library: !targets("lib").is_empty() || !targets("proc-macro").is_empty(),
                settings: settings.unwrap_or_default(),
                description: package.description.unwrap_or_default(),
                name: package.name,
            })
        };
        let packages: Result<Vec<_>> = metadata.packages.into_iter().map(package).collect();
        let mut packages = packages?;
        packages.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { target: metadata.target_directory, packages })
    }

    /// Returns the package of that name.
    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|it| it.name == name)
    }

    /// Returns the package by its name, or by its name without `brigade-`.
    pub(crate) fn named(&self, name: &str) -> Option<&Package> {
        self.package(name).or_else(|| self.package(&format!("brigade-{name}")))
    }

    /// Returns the programs of other packages that the tests of these packages start.
    pub(crate) fn started_by(&self, packages: &[&str]) -> BTreeSet<String> {
        let of = packages.iter().filter_map(|name| self.package(name));
        let started = of.flat_map(|it| &it.settings.starts).filter_map(|it| self.package(it));
        started.flat_map(|it| it.programs.iter().cloned()).collect()
    }

    /// Returns the names of test programs that have a module `numeric`, or are called so.
    pub(crate) fn with_numeric_tests(&self, checkout: &Checkout) -> BTreeSet<String> {
        let named = |package: &Package, name: &String| {
            let tests = checkout.root().join(&package.folder).join("tests");
            let of_program =
                [tests.join(name).join("main.rs"), tests.join(name).with_extension("rs")];
            name == "numeric"
                || of_program.iter().any(|file| {
                    fs::read_to_string(file).is_ok_and(|text| text.contains("\nmod numeric"))
                })
        };
        let all = self.packages.iter().flat_map(|it| it.tests.iter().map(move |name| (it, name)));
        all.filter(|(package, name)| named(package, name)).map(|(_, name)| name.clone()).collect()
    }

    /// Returns the package whose folder contains a file, by the file's path from the root.
    pub(crate) fn package_of(&self, file: &Path) -> Option<&Package> {
        let holders = self.packages.iter().filter(|it| file.starts_with(&it.folder));
        holders.max_by_key(|it| it.folder.components().count())
    }
}

#[derive(Deserialize)]
struct Metadata {
    target_directory: PathBuf,
    packages: Vec<PackageMetadata>,
}

#[derive(Deserialize)]
struct PackageMetadata {
    name: String,
    description: Option<String>,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
    metadata: Option<OwnMetadata>,
}

/// Metadata of a package in `[package.metadata]`.
#[derive(Deserialize)]
pub(crate) struct OwnMetadata {
    pub(crate) brigade: Option<Settings>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev` or `build`; none for what the package itself uses.
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}
