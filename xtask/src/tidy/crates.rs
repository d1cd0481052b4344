//! Rules about crates: which ones may link libtorch, that these find it, and that shipped crates build nothing that is
//! for tests.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs;
use std::path::Path;

use anyhow::Result;

use super::Findings;
use crate::checkout::Checkout;
use crate::metadata::{Dependency, Metadata, Package};

/// Reads `cargo metadata` and follows the dependencies of each package of the workspace.
pub(super) fn check(checkout: &Checkout, findings: &mut Findings) -> Result<()> {
    let metadata = Metadata::of(checkout, &["--all-features"])?;
    findings.violations.extend(shipped_for_tests(&metadata));
    let graph = Graph::new(&metadata);
    for id in &metadata.workspace_members {
        let Some(package) = metadata.packages.iter().find(|it| it.id == *id) else { continue };
        let name = package.name.as_str();
        if package.never_links_libtorch()
            && let Some(path) = graph.path_to(id, LIBTORCH, Edges::Shipped)
        {
            findings.violations.push(format!(
                "{name} must not link libtorch, because starting is a feature: {}",
                path.join(" -> ")
            ));
        }
        if graph.path_to(id, LIBTORCH, Edges::All).is_some() {
            let script = package.manifest_path.replace("Cargo.toml", "build.rs");
            check_run_path(checkout, name, Path::new(&script), findings);
        }
        if package.is_published() && graph.path_to(id, LIBTORCH, Edges::Shipped).is_some() {
            check_documentation(checkout, name, Path::new(&package.manifest_path), findings);
        }
    }
    Ok(())
}

/// Returns dependencies of published crates, outside of their own tests, on crates for development or for tests.
fn shipped_for_tests(metadata: &Metadata) -> Vec<String> {
    let packages: HashMap<&str, &Package> =
        metadata.packages.iter().map(|it| (it.id.as_str(), it)).collect();
    let mut violations = Vec::new();
    for node in &metadata.resolve.nodes {
        let Some(package) = packages.get(node.id.as_str()).filter(|it| it.is_published()) else {
            continue;
        };
        for dependency in node.deps.iter().filter(|it| it.is_shipped()) {
            let Some(used) = packages.get(dependency.pkg.as_str()) else { continue };
            let reason = if !used.is_published() {
                "is for development only"
            } else if used.is_for_tests() && !package.is_for_tests() {
                "is for tests"
            } else {
                continue;
            };
            violations.push(format!(
                "{} is published and depends on {}, which {reason}: make it a dev-dependency",
                package.name, used.name
            ));
        }
    }
    violations
}

/// Checks the run path: a crate's link arguments apply to its own programs and tests only, so each crate needs the
/// lines.
fn check_run_path(checkout: &Checkout, name: &str, script: &Path, findings: &mut Findings) {
    let text = fs::read_to_string(script).unwrap_or_default();
    if !(text.contains("rustc-link-arg=") && text.contains("-rpath")) {
        findings.violations.push(format!(
            "{}: {name} links libtorch, so it needs the run path that other crates' build.rs sets",
            checkout.relative(script).display()
        ));
    }
}

/// Checks the documentation's settings: docs.rs has no libtorch.
fn check_documentation(checkout: &Checkout, name: &str, manifest: &Path, findings: &mut Findings) {
    let text = fs::read_to_string(manifest).unwrap_or_default();
    let settings = text.split_once("[package.metadata.docs.rs]").map_or("", |it| it.1);
    if !settings.split("\n[").next().unwrap_or_default().contains("doc-only") {
        findings.violations.push(format!(
            "{}: {name} links libtorch, so docs.rs needs `[package.metadata.docs.rs]` with \
             `features = [\"brigade-torch/doc-only\"]`",
            checkout.relative(manifest).display()
        ));
    }
}

/// Dependencies that count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edges {
    /// Dependencies that users of the crate build.
    Shipped,
    /// All dependencies, including those of its own tests.
    All,
}

struct Graph<'a> {
    names: HashMap<&'a str, &'a str>,
    dependencies: HashMap<&'a str, &'a [Dependency]>,
}

impl<'a> Graph<'a> {
    fn new(metadata: &'a Metadata) -> Self {
        let names = metadata.packages.iter().map(|it| (it.id.as_str(), it.name.as_str()));
        let nodes = metadata.resolve.nodes.iter();
        Self {
            names: names.collect(),
            dependencies: nodes.map(|it| (it.id.as_str(), it.deps.as_slice())).collect(),
        }
    }

    /// Returns the names on a shortest path from one package to the package of that name.
    ///
    /// Development dependencies count for the first package only: those of others are not built.
    fn path_to(&self, from: &'a str, name: &str, edges: Edges) -> Option<Vec<&'a str>> {
        let mut came_from: HashMap<&str, &str> = HashMap::new();
        let mut seen = HashSet::from([from]);
        let mut queue = VecDeque::from([from]);
        while let Some(id) = queue.pop_front() {
            if self.names.get(id).copied() == Some(name) {
                let mut path = vec![id];
                while let Some(previous) = path.last().and_then(|it| came_from.get(it)) {
                    path.push(previous);
                }
                return Some(
                    path.iter().rev().filter_map(|it| self.names.get(it).copied()).collect(),
                );
            }
            for dependency in self.dependencies.get(id).copied().unwrap_or_default() {
                let counts = dependency.is_shipped() || (edges == Edges::All && id == from);
                if counts && seen.insert(&dependency.pkg) {
                    came_from.insert(&dependency.pkg, id);
                    queue.push_back(&dependency.pkg);
                }
            }
        }
        None
    }
}

const LIBTORCH: &str = "torch-sys";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_what_is_built() {
        let metadata: Metadata = serde_json::from_str(
            r#"{
                "workspace_members": ["cli", "launch"],
                "packages": [
                    {"id": "cli", "name": "brigade-cli", "manifest_path": ""},
                    {"id": "launch", "name": "brigade-launch", "manifest_path": ""},
                    {"id": "sys", "name": "torch-sys", "manifest_path": ""}
                ],
                "resolve": {"nodes": [
                    {"id": "cli", "deps": [{"pkg": "launch", "dep_kinds": [{"kind": null}]}]},
                    {"id": "launch", "deps": [{"pkg": "sys", "dep_kinds": [{"kind": "dev"}]}]},
                    {"id": "sys", "deps": []}
                ]}
            }"#,
        )
        .unwrap();
        let graph = Graph::new(&metadata);
        assert_eq!(graph.path_to("launch", LIBTORCH, Edges::Shipped), None);
        let path = graph.path_to("launch", LIBTORCH, Edges::All).unwrap();
        assert_eq!(path, ["brigade-launch", "torch-sys"]);
        // The tests of `launch` are not a part of `cli`.
        assert_eq!(graph.path_to("cli", LIBTORCH, Edges::All), None);
        assert_eq!(
            graph.path_to("cli", "brigade-launch", Edges::Shipped).unwrap(),
            ["brigade-cli", "brigade-launch"]
        );
    }
    #[test]
    fn what_is_shipped_builds_nothing_that_is_for_tests() {
        let package = |name: &str, rest: &str| {
            format!(r#"{{"id": "{name}", "name": "{name}", "manifest_path": ""{rest}}}"#)
        };
        let for_tests = r#", "metadata": {"brigade": {"for-tests": true}}"#;
        let edge = |to: &str, kind: &str| {
            format!(r#"{{"pkg": "{to}", "dep_kinds": [{{"kind": {kind}}}]}}"#)
        };
        let node = |name: &str, deps: &[String]| {
            format!(r#"{{"id": "{name}", "deps": [{}]}}"#, deps.join(", "))
        };
        let packages = [
            package("tests", r#", "publish": []"#),
            package("kit", for_tests),
            package("library", ""),
            package("careful", r#", "publish": null"#),
            package("example", r#", "publish": []"#),
        ];
        let nodes = [
            node("tests", &[]),
            node("kit", &[edge("tests", "null")]),
            node("library", &[edge("kit", "null"), edge("tests", r#""build""#)]),
            node("careful", &[edge("kit", r#""dev""#), edge("tests", r#""dev""#)]),
            node("example", &[edge("kit", "null"), edge("tests", "null")]),
        ];
        let text = format!(
            r#"{{"workspace_members": [], "packages": [{}], "resolve": {{"nodes": [{}]}}}}"#,
            packages.join(", "),
            nodes.join(", ")
        );
        let found = shipped_for_tests(&serde_json::from_str(&text).unwrap());
        assert_eq!(
            found,
            [
                "kit is published and depends on tests, which is for development only: make it a dev-dependency",
                "library is published and depends on kit, which is for tests: make it a dev-dependency",
                "library is published and depends on tests, which is for development only: make it a dev-dependency",
            ]
        );
    }
}
