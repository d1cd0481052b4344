//! Tests of `cargo xtask semver` in small repositories.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use brigade_test_needs::{needs, semver_checks};
use tempfile::TempDir;

/// Source of the library `base`, whose feature `cuda` cannot be compiled.
fn base(names: &[&str]) -> String {
    format!(
        "#[cfg(feature = \"cuda\")]\ncompile_error!(\"there is no CUDA\");\n{}",
        functions(names)
    )
}

/// Repository with two libraries in a workspace; `app` depends on `base`.
struct Repository {
    folder: TempDir,
}

impl Repository {
    fn new() -> Self {
        let repository = Self { folder: tempfile::tempdir().unwrap() };
        let workspace = "[workspace]\nresolver = \"3\"\nmembers = [\"base\", \"app\"]\n";
        repository.write("Cargo.toml", workspace);
        for (name, rest) in [
            ("base", "\n[features]\ncuda = []\nmore = []\n"),
            ("app", "\n[dependencies]\nbase = { path = \"../base\", version = \"0.1.0\" }\n"),
        ] {
            let package =
                format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
            repository.write(&format!("{name}/Cargo.toml"), &(package + rest));
        }
        repository.write("base/src/lib.rs", &base(&["first", "second"]));
        repository.write("app/src/lib.rs", &functions(&["run"]));
        repository.write(".gitignore", "target\n");
        repository.commit("first");
        repository
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.folder.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn git(&self, arguments: &[&str]) {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=a", "-c", "user.email=a@example.org"]).args(arguments);
        let output = git.current_dir(self.folder.path()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    }

    fn commit(&self, message: &str) {
        let mut cargo = Command::new("cargo");
        cargo.args(["generate-lockfile", "--offline"]).current_dir(self.folder.path());
        assert!(cargo.status().unwrap().success());
        if !self.folder.path().join(".git").exists() {
            self.git(&["init", "--quiet"]);
        }
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--message", message]);
    }

    fn semver(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("semver").args(arguments);
        // xtask takes its parent folder for the checkout.
        command.env("CARGO_MANIFEST_DIR", self.folder.path().join("xtask"));
        command.env_remove("CARGO_TARGET_DIR");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        if let Some(program) = semver_checks(root) {
            let path = env::var_os("PATH").unwrap_or_default();
            let folders = [program.parent().unwrap().to_path_buf()];
            let path = env::join_paths(folders.into_iter().chain(env::split_paths(&path)));
            command.env("PATH", path.unwrap());
        }
        command.output().unwrap()
    }
}

fn functions(names: &[&str]) -> String {
    names.iter().map(|it| format!("pub fn {it}() {{}}\n")).collect()
}

fn text(output: &Output) -> String {
    let Output { stdout, stderr, .. } = output;
    format!("{}{}", String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr))
}

#[needs()]
fn without_a_release_there_is_nothing_to_compare() {
    let repository = Repository::new();
    repository.git(&["tag", "other"]);
    let output = repository.semver(&[]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("no tag v* marks a release"), "{}", text(&output));
}

#[needs(SemverChecks, limit = 900)]
fn a_removed_function_is_refused_and_an_added_one_is_a_minor_change() {
    let repository = Repository::new();
    repository.git(&["tag", "v0.1.0"]);
    repository.write("base/src/lib.rs", &base(&["first"]));
    repository.write(
        "new/Cargo.toml",
        "[package]\nname = \"new\"\nversion = \"0.1.0\"\nedition = \"2024\"\n",
    );
    repository.write("new/src/lib.rs", "");
    let workspace = "[workspace]\nresolver = \"3\"\nmembers = [\"base\", \"app\", \"new\"]\n";
    repository.write("Cargo.toml", workspace);
    repository.commit("second");

    // The second time cargo has built both versions before.
    for _ in 0..2 {
        let refused = repository.semver(&[]);
        assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
        for part in ["semver: new is new since v0.1.0", "function base::second"] {
            assert!(text(&refused).contains(part), "{part} is missing:\n{}", text(&refused));
        }
    }
    let major = repository.semver(&["--release-type", "major"]);
    assert!(major.status.success(), "{}", text(&major));

    repository.write("base/src/lib.rs", &base(&["first", "second", "third"]));
    repository.commit("third");
    let minor = repository.semver(&["--baseline", "v0.1.0", "--release-type", "minor"]);
    assert!(minor.status.success(), "{}", text(&minor));
}
