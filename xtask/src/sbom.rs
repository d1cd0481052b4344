//! Software bill of materials: the crates in a package, as CycloneDX in JSON.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use toml_edit::DocumentMut;

use crate::metadata::{Dependency, Metadata, Node, Package};

/// Checksums of crates by name and version.
pub(crate) struct Checksums(BTreeMap<(String, String), String>);

impl Checksums {
    /// Reads those of a `Cargo.lock`. Packages of the workspace have none.
    pub(crate) fn of_lock(text: &str) -> Result<Self> {
        let lock: DocumentMut = text.parse().context("Cargo.lock is malformed")?;
        let packages = lock.get("package").and_then(|it| it.as_array_of_tables());
        let mut checksums = BTreeMap::new();
        for package in packages.context("Cargo.lock lists no packages")? {
            let value = |key: &str| package.get(key).and_then(|it| it.as_str()).map(str::to_owned);
            if let (Some(name), Some(version), Some(checksum)) =
                (value("name"), value("version"), value("checksum"))
            {
                checksums.insert((name, version), checksum);
            }
        }
        Ok(Self(checksums))
    }
}

/// Lists what a package of the workspace is built from, directly or not. Crates that only build scripts use have the
/// scope `excluded`: they are not part of the result. The list has neither times nor random numbers, so that the same
/// sources give the same bytes.
pub(crate) fn of(
    metadata: &Metadata,
    checksums: &Checksums,
    package: &str,
    kind: &str,
) -> Result<Value> {
    let packages: HashMap<&str, &Package> =
        metadata.packages.iter().map(|it| (it.id.as_str(), it)).collect();
    let root = metadata.member(package)?;
    let nodes: HashMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|it| (it.id.as_str(), it)).collect();
    let built = reached(&nodes, &root.id, Dependency::is_shipped);
    let linked = reached(&nodes, &root.id, Dependency::is_linked);
    let found = |id: &str| {
        packages.get(id).copied().with_context(|| format!("cargo metadata has no package {id}"))
    };

    let mut components = BTreeMap::new();
    let mut dependencies = BTreeMap::new();
    for id in &built {
        let package = found(id)?;
        if package.id != root.id {
            let scope = if linked.contains(id) { "required" } else { "excluded" };
            let mut component = component(package, checksums, "library");
            component["scope"] = json!(scope);
            components.insert(reference(package), component);
        }
        let mut uses = BTreeSet::new();
        for dependency in nodes.get(id).into_iter().flat_map(|it| &it.deps) {
            if dependency.is_shipped() {
                uses.insert(reference(found(&dependency.pkg)?));
            }
        }
        dependencies.insert(reference(package), uses);
    }
    let dependencies: Vec<Value> = dependencies
        .into_iter()
        .map(|(package, uses)| json!({ "ref": package, "dependsOn": uses }))
        .collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": component(root, checksums, kind) },
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": dependencies,
    }))
}

/// Returns the packages that one is built from, with itself, along dependencies that count.
fn reached<'a>(
    nodes: &HashMap<&str, &'a Node>,
    root: &'a str,
    counts: impl Fn(&Dependency) -> bool,
) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::from([root]);
    let mut waiting = vec![root];
    while let Some(id) = waiting.pop() {
        let dependencies = nodes.get(id).into_iter().flat_map(|it| &it.deps);
        for dependency in dependencies.filter(|it| counts(it)) {
            if reached.insert(&dependency.pkg) {
                waiting.push(&dependency.pkg);
            }
        }
    }
    reached
}

fn component(package: &Package, checksums: &Checksums, kind: &str) -> Value {
    let reference = reference(package);
    let mut component = json!({
        "type": kind,
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "purl": reference,
    });
    if let Some(license) = &package.license {
        // Old crates separate alternatives by a slash, which SPDX does not allow.
        let expression = license.replace(" / ", "/").replace('/', " OR ");
        component["licenses"] = json!([{ "expression": expression }]);
    }
    let key = (package.name.clone(), package.version.clone());
    if let Some(checksum) = checksums.0.get(&key).filter(|_| package.source.is_some()) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// Returns the package URL of a crate.
fn reference(package: &Package) -> String {
    // `+` of build metadata would be read as a space.
    format!("pkg:cargo/{}@{}", package.name, package.version.replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let registry = "registry+https://github.com/rust-lang/crates.io-index";
        let package = |id: &str, version: &str, license: Option<&str>, source: Option<&str>| {
            json!({ "id": id, "name": id, "version": version, "license": license,
                    "source": source, "manifest_path": "" })
        };
        let uses = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "workspace_members": ["cli", "other"],
            "packages": [
                package("cli", "0.1.0", Some("MIT OR Apache-2.0"), None),
                package("other", "0.1.0", None, None),
                package("used", "1.2.3+4", Some("MIT/Apache-2.0"), Some(registry)),
                package("deep", "0.3.0", None, Some(registry)),
                package("script", "1.0.0", Some("MIT"), Some(registry)),
                package("tests", "1.0.0", Some("MIT"), Some(registry)),
            ],
            "resolve": { "nodes": [
                { "id": "cli", "deps": [
                    uses("used", Value::Null), uses("script", json!("build")), uses("tests", json!("dev")),
                ] },
                { "id": "other", "deps": [uses("tests", Value::Null)] },
                { "id": "used", "deps": [uses("deep", Value::Null)] },
                { "id": "deep", "deps": [] },
                { "id": "script", "deps": [uses("deep", Value::Null)] },
                { "id": "tests", "deps": [] },
            ] },
        });
        serde_json::from_value(metadata).unwrap()
    }

    #[test]
    fn an_sbom_lists_what_a_package_is_built_from() {
        let lock = "version = 4\n\n[[package]]\nname = \"used\"\nversion = \"1.2.3+4\"\nchecksum = \"ab12\"\n\n\
                    [[package]]\nname = \"cli\"\nversion = \"0.1.0\"\n";
        let checksums = Checksums::of_lock(lock).unwrap();
        let sbom = of(&metadata(), &checksums, "cli", "application").unwrap();
        assert_eq!(
            (&sbom["bomFormat"], &sbom["specVersion"]),
            (&json!("CycloneDX"), &json!("1.5"))
        );
        let root = &sbom["metadata"]["component"];
        assert_eq!(
            (&root["type"], &root["purl"]),
            (&json!("application"), &json!("pkg:cargo/cli@0.1.0"))
        );
        let components = sbom["components"].as_array().unwrap();
        let scopes: Vec<_> = components
            .iter()
            .map(|component| {
                (component["name"].as_str().unwrap(), component["scope"].as_str().unwrap())
            })
            .collect();
        // Not what tests need, nor what other packages need.
        assert_eq!(scopes, [("deep", "required"), ("script", "excluded"), ("used", "required")]);
        assert_eq!(
            components[2],
            json!({
                "type": "library", "bom-ref": "pkg:cargo/used@1.2.3%2B4", "name": "used",
                "version": "1.2.3+4", "purl": "pkg:cargo/used@1.2.3%2B4", "scope": "required",
                "licenses": [{ "expression": "MIT OR Apache-2.0" }],
                "hashes": [{ "alg": "SHA-256", "content": "ab12" }],
            })
        );
        assert!(components[0]["licenses"].is_null() && components[0]["hashes"].is_null());
        let dependencies = sbom["dependencies"].as_array().unwrap();
        assert_eq!(
            dependencies[0],
            json!({ "ref": "pkg:cargo/cli@0.1.0",
                    "dependsOn": ["pkg:cargo/script@1.0.0", "pkg:cargo/used@1.2.3%2B4"] })
        );
        assert_eq!(dependencies.len(), 4);
    }

    #[test]
    fn an_sbom_of_another_package_is_an_error() {
        let checksums = Checksums::of_lock("[[package]]\nname = \"a\"\n").unwrap();
        // A crate of the registry has a name, too.
        let error = of(&metadata(), &checksums, "used", "library").unwrap_err();
        assert_eq!(error.to_string(), "used is not a package of this workspace");
    }
}
