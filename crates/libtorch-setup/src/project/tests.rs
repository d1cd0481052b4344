//! Tests that configure projects, configure them again, and revert the configuration.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::*;
use crate::cache::Cache;
use crate::libtorch::Wanted;
use crate::pins::Pins;

/// Project in a folder with a comma in its name, beside a libtorch of this version.
struct Fixture {
    folder: TempDir,
    libtorch: Libtorch,
}

impl Fixture {
    fn new(version: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("lib, torch");
        fs::create_dir_all(path.join("lib")).unwrap();
        fs::create_dir_all(path.join("include")).unwrap();
        fs::write(path.join("lib/libtorch_cpu.so"), "").unwrap();
        fs::write(path.join("build-version"), version).unwrap();
        fs::create_dir_all(folder.path().join("project/src")).unwrap();
        let manifest = "[package]\nname = \"project\"\nversion = \"0.1.0\"\nedition = \"2024\"\n";
        fs::write(folder.path().join("project/Cargo.toml"), manifest).unwrap();
        fs::write(folder.path().join("project/src/lib.rs"), "").unwrap();
        let wanted = Wanted::Folder { path, named: "--libtorch".to_owned() };
        let cache = Cache::at(folder.path().join("cache"));
        let pins = Pins::embedded().unwrap();
        let libtorch = Libtorch::find_or_fetch(&wanted, &cache, &pins).unwrap();
        Self { folder, libtorch }
    }

    fn project(&self) -> Project {
        Project::find(&self.folder.path().join("project/src")).unwrap()
    }

    fn configure(&self) -> Vec<String> {
        said(&self.project().configure(&self.libtorch, RunPath::All).unwrap())
    }

    fn remove(&self) -> Vec<String> {
        said(&self.project().remove().unwrap())
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.project().root().join(name)).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.project().root().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn git(&self) {
        let mut git = Command::new("git");
        git.args(["init", "--quiet"]).current_dir(self.project().root());
        assert!(git.status().unwrap().success());
    }

    /// Returns the flags that cargo gives to rustc by the configuration.
    fn flags_of_cargo(&self) -> String {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["rustc", "--offline", "--lib", "--", "--print", "link-args"]);
        cargo.args(["--crate-type", "cdylib"]);
        cargo.current_dir(self.project().root()).env("CARGO_TARGET_DIR", self.folder.path());
        for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "LIBTORCH"] {
            cargo.env_remove(name);
        }
        let output = cargo.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

fn said(changes: &[Change]) -> Vec<String> {
    changes.iter().map(Change::to_string).collect()
}

fn files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).unwrap() {
        found.push(entry.unwrap().file_name().into_string().unwrap());
    }
    found.sort();
    found
}

#[test]
fn a_project_without_a_configuration_gets_one_that_goes_again() {
    let fixture = Fixture::new("2.13.0");
    assert_eq!(fixture.configure(), ["wrote .cargo/libtorch.toml", "wrote .cargo/config.toml"]);
    assert!(fixture.read(".cargo/config.toml").contains("include = [{ path = \"libtorch.toml\""));
    assert_eq!(fixture.project().libtorch().unwrap().unwrap(), fixture.libtorch.folder());
    assert_eq!(fixture.configure(), Vec::<String>::new());
    assert_eq!(fixture.remove(), ["removed .cargo/config.toml", "removed .cargo/libtorch.toml"]);
    assert_eq!(files(fixture.project().root()), ["Cargo.toml", "src"]);
    assert_eq!(fixture.remove(), Vec::<String>::new());
}

#[test]
fn cargo_links_with_the_run_path() {
    let fixture = Fixture::new("2.13.0");
    fixture.configure();
    let folder = fixture.libtorch.folder().join("lib");
    let flags = fixture.flags_of_cargo();
    assert!(
        flags.contains(&format!("\"-Xlinker\" \"-rpath\" \"-Xlinker\" \"{}\"", folder.display())),
        "{flags}"
    );
}

#[test]
fn a_configuration_that_is_there_keeps_what_it_has() {
    let fixture = Fixture::new("2.11.0");
    for before in [
        "# mine\n[alias]\nt = \"test\" # short\n",
        "include = [\"other.toml\"]\n\n[alias]\nt = \"test\"\n",
        "# at the top\nx.y = 1\n",
    ] {
        fixture.write(".cargo/other.toml", "");
        fixture.write(".cargo/config.toml", before);
        assert_eq!(
            fixture.configure(),
            ["wrote .cargo/libtorch.toml", "added a line to .cargo/config.toml"]
        );
        let after = fixture.read(".cargo/config.toml");
        for line in before.lines().filter(|line| !line.starts_with("include")) {
            assert!(after.contains(line), "{line} is gone from {after}");
        }
        let version_check = "LIBTORCH_BYPASS_VERSION_CHECK = \"1\"";
        assert!(fixture.read(".cargo/libtorch.toml").contains(version_check));
        fixture.remove();
        assert_eq!(fixture.read(".cargo/config.toml"), before);
    }
}

#[test]
fn git_ignores_what_belongs_to_the_machine() {
    let fixture = Fixture::new("2.13.0");
    fixture.git();
    fixture.write(".gitignore", "/target");
    assert!(fixture.configure().contains(&"added a line to .gitignore".to_owned()));
    assert_eq!(fixture.read(".gitignore"), "/target\n/.cargo/libtorch.toml\n");
    assert_eq!(fixture.configure(), Vec::<String>::new());
    assert!(fixture.remove().contains(&"removed a line from .gitignore".to_owned()));
    assert_eq!(fixture.read(".gitignore"), "/target\n");
}

#[test]
fn a_malformed_configuration_is_named_and_left_alone() {
    let fixture = Fixture::new("2.13.0");
    fixture.write(".cargo/config.toml", "[alias\n");
    let root = fixture.folder.path().join("project");
    let error = Project::at(&root).configure(&fixture.libtorch, RunPath::All).unwrap_err();
    assert!(error.to_string().ends_with(".cargo/config.toml is malformed"), "{error:#}");
    assert_eq!(fs::read_to_string(root.join(".cargo/config.toml")).unwrap(), "[alias\n");
    // cargo itself fails earlier.
    let error = Project::find(&root).unwrap_err().to_string();
    assert!(error.contains("config.toml"), "{error}");
}

#[test]
fn flags_for_one_target_win_over_the_run_path_and_are_told() {
    let fixture = Fixture::new("2.13.0");
    fixture
        .write(".cargo/config.toml", "[target.x86_64-unknown-linux-gnu]\nrustflags = [\"-g\"]\n");
    let found = fixture.project().overriding_flags().unwrap();
    assert!(
        found.iter().any(|it| it.starts_with("[target.x86_64-unknown-linux-gnu] in ")),
        "{found:?}"
    );
}

#[test]
fn a_folder_outside_of_a_project_is_an_error() {
    let folder = TempDir::new().unwrap();
    let error = Project::find(folder.path()).unwrap_err().to_string();
    assert!(error.starts_with("cargo finds no project in "), "{error}");
    let error = Project::find(&folder.path().join("absent")).unwrap_err().to_string();
    assert!(error.contains("cannot find cargo, or the folder"), "{error}");
}
