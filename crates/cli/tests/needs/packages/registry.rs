//! A registry of crates in a folder, which replaces crates.io: Brigade's crates as they would be published, and from
//! cargo's cache the crates that they depend on.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::text_of;

/// Registry with a home folder of cargo that uses it alone, without a network.
pub(super) struct Registry {
    folder: TempDir,
}

impl Registry {
    /// Creates a registry of the `.crate` files in a folder and of the packages in the checkout's `Cargo.lock`.
    pub(super) fn new(crates: &Path) -> Self {
        let registry = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir_all(registry.path("crates/index")).unwrap();
        fs::create_dir(registry.path("unpacked")).unwrap();
        registry.add_published(crates);
        registry.add_cached();
        fs::create_dir(registry.path("cargo")).unwrap();
        let config = format!(
            "[source.crates-io]\nreplace-with = \"folder\"\n\n[source.folder]\nlocal-registry = {:?}\n",
            registry.path("crates")
        );
        fs::write(registry.path("cargo/config.toml"), config).unwrap();
        registry
    }

    /// Returns the value of `CARGO_HOME`: crates are unpacked there, and removed with the registry.
    pub(super) fn cargo_home(&self) -> PathBuf {
        self.path("cargo")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn add_published(&self, crates: &Path) {
        for (file, checksum) in checksums(crates) {
            let archive = crates.join(&file);
            let unpacked = self.path("unpacked");
            text_of(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&unpacked));
            let folder = unpacked.join(file.strip_suffix(".crate").unwrap());
            let metadata = metadata(&folder, &["--no-deps", "--offline"]);
            self.add(&metadata["packages"][0], &archive, &checksum);
        }
    }

    fn add_cached(&self) {
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let lock = fs::read_to_string(checkout.join("Cargo.lock")).unwrap();
        let lock: toml_edit::DocumentMut = lock.parse().unwrap();
        let text = |table: &toml_edit::Table, key: &str| {
            table.get(key).and_then(|it| it.as_str()).map(str::to_owned)
        };
        let mut checksums: BTreeMap<(String, String), String> = lock["package"]
            .as_array_of_tables()
            .unwrap()
            .iter()
            .filter_map(|package| {
                Some((
                    (text(package, "name")?, text(package, "version")?),
                    text(package, "checksum")?,
                ))
            })
            .collect();
        // Also downloads what other systems need: the index must have it.
        let metadata = metadata(&checkout, &["--locked"]);
        let home = env::var_os("CARGO_HOME").map_or_else(
            || PathBuf::from(env::var_os("HOME").unwrap()).join(".cargo"),
            PathBuf::from,
        );
        let caches = fs::read_dir(home.join("registry/cache")).unwrap();
        let caches: Vec<PathBuf> = caches.map(|it| it.unwrap().path()).collect();
        for package in metadata["packages"].as_array().unwrap() {
            let text = |key: &str| package[key].as_str().unwrap().to_owned();
            let key = (text("name"), text("version"));
            // Packages of the workspace have none.
            let Some(checksum) = checksums.remove(&key) else { continue };
            let file = file_name(&key.0, &key.1);
            let archive = caches.iter().map(|it| it.join(&file)).find(|it| it.is_file());
            self.add(package, &archive.unwrap_or_else(|| panic!("no {file}")), &checksum);
        }
        // Some are locked and built on no system (`cfg(any())`): without dependencies and file, they only resolve.
        for ((name, version), checksum) in checksums {
            let entry = json!({
                "name": name, "vers": version, "deps": [], "cksum": checksum, "features": {}, "yanked": false,
            });
            self.write(&name, &entry);
        }
    }

    /// Adds a line to the file of a package in the index.
    fn write(&self, name: &str, entry: &Value) {
        let file = self.path("crates/index").join(place(name));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut index = File::options().create(true).append(true).open(file).unwrap();
        writeln!(index, "{entry}").unwrap();
    }

    /// Adds a package of `cargo metadata` to the index, in the format of crates.io.
    fn add(&self, package: &Value, archive: &Path, checksum: &str) {
        let dependencies = package["dependencies"].as_array().unwrap().iter().map(|it| {
            let is_renamed = !it["rename"].is_null();
            json!({
                "name": if is_renamed { &it["rename"] } else { &it["name"] },
                "package": if is_renamed { it["name"].clone() } else { Value::Null },
                "req": it["req"],
                "features": it["features"],
                "optional": it["optional"],
                "default_features": it["uses_default_features"],
                "target": it["target"],
                "kind": if it["kind"].is_null() { json!("normal") } else { it["kind"].clone() },
            })
        });
        let name = package["name"].as_str().unwrap();
        let version = package["version"].as_str().unwrap();
        let entry = json!({
            "name": name,
            "vers": version,
            "deps": dependencies.collect::<Vec<_>>(),
            "cksum": checksum,
            "features": {},
            "features2": package["features"],
            "yanked": false,
            "links": package["links"],
            "rust_version": package["rust_version"],
            "v": 2,
        });
        self.write(name, &entry);
        symlink(archive, self.path("crates").join(file_name(name, version))).unwrap();
    }
}

fn metadata(folder: &Path, arguments: &[&str]) -> Value {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--format-version", "1"]).args(arguments).current_dir(folder);
    serde_json::from_str(&text_of(&mut cargo)).unwrap()
}

/// SHA-256 of the files in a folder, by their names.
fn checksums(folder: &Path) -> BTreeMap<String, String> {
    let names = fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name());
    let lines = text_of(Command::new("sha256sum").args(names).current_dir(folder));
    let pairs = lines.lines().map(|line| line.split_once("  ").unwrap());
    pairs.map(|(checksum, name)| (name.to_owned(), checksum.to_owned())).collect()
}

fn file_name(package: &str, version: &str) -> String {
    format!("{package}-{version}.crate")
}

/// Path of a package's file in the index.
fn place(package: &str) -> String {
    let name = package.to_lowercase();
    match name.len() {
        1 => format!("1/{name}"),
        2 => format!("2/{name}"),
        3 => format!("3/{}/{name}", &name[..1]),
        _ => format!("{}/{}/{name}", &name[..2], &name[2..4]),
    }
}
