//! Packages that cargo resolves for this workspace, with those of others, and their dependencies.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cargo::plain_cargo;
use crate::checkout::Checkout;
use crate::workspace::{OwnMetadata, Settings};

/// Output of `cargo metadata`, as far as it is used here.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) workspace_members: Vec<String>,
    pub(crate) resolve: Resolve,
}

impl Metadata {
    /// Reads it from cargo, called with these arguments.
    pub(crate) fn of(checkout: &Checkout, arguments: &[&str]) -> Result<Self> {
        let mut cargo = plain_cargo(checkout);
        cargo.args(["metadata", "--format-version", "1"]).args(arguments);
        let output = cargo.output().context("cannot start cargo")?;
        if !output.status.success() {
            bail!("cargo metadata fails: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata says")
    }

    /// Returns the packages of the workspace.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|it| self.workspace_members.contains(&it.id))
    }

    /// Returns the package of the workspace that has this name.
    pub(crate) fn member(&self, name: &str) -> Result<&Package> {
        let found = self.members().find(|it| it.name == name);
        found.with_context(|| format!("{name} is not a package of this workspace"))
    }
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// Registry or repository; `None` for a package of the workspace.
    pub(crate) source: Option<String>,
    pub(crate) manifest_path: String,
    /// Registries to which it may be published; `None` for all.
    pub(crate) publish: Option<Vec<String>>,
    /// Its own features, with what they turn on.
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    targets: Vec<Target>,
    metadata: Option<OwnMetadata>,
}

impl Package {
    /// Returns `true` if other crates can use it, and not only as a procedural macro.
    pub(crate) fn is_library(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|it| it == "lib"))
    }

    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    pub(crate) fn is_for_tests(&self) -> bool {
        self.settings().is_some_and(|it| it.for_tests)
    }

    pub(crate) fn never_links_libtorch(&self) -> bool {
        self.settings().is_some_and(|it| it.without_libtorch)
    }

    fn settings(&self) -> Option<&Settings> {
        self.metadata.as_ref()?.brigade.as_ref()
    }
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Deserialize)]
pub(crate) struct Resolve {
    pub(crate) nodes: Vec<Node>,
}

#[derive(Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) deps: Vec<Dependency>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

impl Dependency {
    /// Returns `true` if it is built for users of the crate, and not only for its own tests.
    pub(crate) fn is_shipped(&self) -> bool {
        self.dep_kinds.iter().any(|it| it.kind.as_deref() != Some("dev"))
    }

    /// Returns `true` if the crate itself uses it, and not only its build script or its tests.
    pub(crate) fn is_linked(&self) -> bool {
        self.dep_kinds.iter().any(|it| it.kind.is_none())
    }
}

#[derive(Deserialize)]
struct DependencyKind {
    /// Kind of the dependency: `None` for a normal one, otherwise "dev" or "build".
    kind: Option<String>,
}
