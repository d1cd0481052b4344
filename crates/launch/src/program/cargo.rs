//! Cargo targets: built once, before the ranks start.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use brigade_rank_env::env;
use brigade_ssh::executable;
use serde::{Deserialize, Serialize};

use serde_json::Value;

use super::{Invocation, ProgramError, Search};

/// Cargo target with an executable, which `cargo build` builds.
///
/// ```
/// use brigade_launch::{CargoKind, CargoTarget};
/// let target = CargoTarget { kind: CargoKind::Example, ..CargoTarget::bin("mnist") };
/// assert_eq!(target.to_string(), "cargo build --example mnist");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CargoTarget {
    /// Kind of the target.
    pub kind: CargoKind,
    /// Name of the target.
    pub name: String,
    /// Package of the target. Defaults to Cargo's own choice.
    pub package: Option<String>,
    /// Cargo profile. `--release` means `release`. Defaults to `dev`.
    pub profile: Option<String>,
    /// Cargo features to enable.
    pub features: Vec<String>,
    /// Path of the manifest. By default Cargo looks for one from the working folder upwards.
    // Other hosts get what was built. A path need not be text, which is all that serde takes.
    #[serde(skip)]
    pub manifest_path: Option<PathBuf>,
}

/// Kind of a Cargo target with an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CargoKind {
    /// Binary target, as in `cargo run --bin`.
    Bin,
    /// Example target, as in `cargo run --example`.
    Example,
}

/// Result of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Built {
    pub(crate) executable: PathBuf,
    /// Folders that may contain the executable's shared libraries, as `cargo run` sets them.
    pub(crate) libraries: Vec<PathBuf>,
}

impl CargoTarget {
    /// Returns a binary target with Cargo's defaults.
    #[must_use]
    pub fn bin(name: impl Into<String>) -> Self {
        Self {
            kind: CargoKind::Bin,
            name: name.into(),
            package: None,
            profile: None,
            features: Vec::new(),
            manifest_path: None,
        }
    }

    /// Returns the binary that a plain `cargo run` in the working folder would run, of this package if one is given.
    /// Runs Cargo, but builds nothing.
    ///
    /// # Errors
    /// There is no Cargo project here, no such package in it, or no binary that is the only one or the
    /// `default-run`.
    pub fn default_binary(package: Option<&str>) -> Result<Self, ProgramError> {
        let mut command = Command::new(CARGO);
        command.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]);
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| ProgramError::NoProject {
            reason: format!("cargo cannot be started: {error}"),
        })?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let reason = text.lines().next().unwrap_or_default().trim();
            let reason = reason.strip_prefix("error: ").unwrap_or(reason).to_owned();
            return Err(ProgramError::NoProject { reason });
        }
        let metadata: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| ProgramError::NoBuild { reason: error.to_string() })?;
        let target = default_binary(&metadata, package)?;
        Ok(Self { package: package.map(str::to_owned), ..target })
    }

    /// Checks that Cargo is installed. The executable is known only after the build.
    pub(super) fn find(&self, search: Search<'_>) -> Result<Invocation, ProgramError> {
        executable::find(CARGO.as_ref(), search.path)
            .map_err(|error| error.with_hint(&format!(": {} needs it", self.kind.option())))?;
        Ok(Invocation { file: (&self.name).into(), name: (&self.name).into(), args: Vec::new() })
    }

    /// Builds the target, with Cargo's progress and messages on this process's stderr.
    pub(crate) fn build(&self) -> Result<Built, ProgramError> {
        let no_build = |error: std::io::Error| ProgramError::NoBuild { reason: error.to_string() };
        let mut command = Command::new(CARGO);
        // Build scripts are third-party programs, which must not see the launcher's own variables.
        for name in env::LAUNCHERS_OWN {
            command.env_remove(name);
        }
        // Diagnostics go to stderr in their usual form; the rest is parsed below.
        command.args(self.arguments()).arg("--message-format=json-render-diagnostics");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut cargo = command.spawn().map_err(no_build)?;
        let mut messages = Messages::default();
        let read = match cargo.stdout.take() {
            Some(stdout) => messages.read(BufReader::new(stdout), self),
            None => Ok(()),
        };
        let status = cargo.wait().map_err(no_build)?;
        if !status.success() {
            return Err(ProgramError::BuildFailed { exit_status: status.into() });
        }
        read.map_err(no_build)?;
        messages.built(self)
    }

    fn arguments(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["build".into()];
        let mut option = |name: &str, value: OsString| args.extend([name.into(), value]);
        option(self.kind.option(), (&self.name).into());
        if let Some(package) = &self.package {
            option("--package", package.into());
        }
        if let Some(profile) = &self.profile {
            option("--profile", profile.into());
        }
        if !self.features.is_empty() {
            option("--features", self.features.join(",").into());
        }
        if let Some(path) = &self.manifest_path {
            option("--manifest-path", path.into());
        }
        args
    }
}

impl CargoKind {
    fn option(self) -> &'static str {
        match self {
            Self::Bin => "--bin",
            Self::Example => "--example",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bin => "bin",
            Self::Example => "example",
        }
    }
}

/// Shows the command that builds the target.
impl fmt::Display for CargoTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CARGO)?;
        self.arguments().iter().try_for_each(|arg| write!(f, " {}", arg.display()))
    }
}

/// Cargo's messages about the target.
#[derive(Debug, Default)]
struct Messages {
    /// Executables, each with the name of its package.
    found: Vec<(PathBuf, String)>,
    /// Folders that build scripts ask the linker to search.
    linked: BTreeSet<PathBuf>,
}

impl Messages {
    fn read(&mut self, messages: impl BufRead, target: &CargoTarget) -> std::io::Result<()> {
        for line in messages.split(b'\n') {
            // Other lines were printed by programs that Cargo ran.
            if let Ok(message) = serde_json::from_slice::<Value>(&line?) {
                self.take(&message, target);
            }
        }
        Ok(())
    }

    fn take(&mut self, message: &Value, target: &CargoTarget) {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        match message["reason"].as_str() {
            Some("compiler-artifact") => {
                let built = &message["target"];
                let kinds = built["kind"].as_array().map(Vec::as_slice).unwrap_or_default();
                let is_it = built["name"] == target.name.as_str()
                    && kinds.iter().any(|kind| kind == target.kind.name());
                if let Some(executable) = text(&message["executable"]).filter(|_| is_it) {
                    let id = text(&message["package_id"]).unwrap_or_default();
                    self.found.push((executable.into(), package_name(&id).to_owned()));
                }
            }
            Some("build-script-executed") => {
                let paths = message["linked_paths"].as_array().map(Vec::as_slice);
                self.linked.extend(paths.unwrap_or_default().iter().filter_map(|path| {
                    let path = path.as_str()?;
                    Some(path.split_once('=').map_or(path, |(_kind, path)| path).into())
                }));
            }
            _ => {}
        }
    }

    fn built(mut self, target: &CargoTarget) -> Result<Built, ProgramError> {
        let what = format!("{} {}", target.kind.name(), target.name);
        if self.found.len() > 1 {
            let mut packages: Vec<_> = self.found.into_iter().map(|(_, package)| package).collect();
            packages.sort_unstable();
            return Err(ProgramError::Ambiguous { target: what, packages });
        }
        let Some((executable, _)) = self.found.pop() else {
            return Err(ProgramError::NothingBuilt { target: what });
        };
        let libraries = libraries(&executable, target.kind, self.linked);
        Ok(Built { executable, libraries })
    }
}

/// Returns the library folders that Cargo itself sets for `cargo run`: those in the target folder, not in the system.
fn libraries(executable: &Path, kind: CargoKind, linked: BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let up = match kind {
        CargoKind::Bin => 1,
        CargoKind::Example => 2,
    };
    let Some(profile) = executable.ancestors().nth(up) else { return Vec::new() };
    let mut folders: Vec<_> = linked.into_iter().filter(|path| path.starts_with(profile)).collect();
    folders.extend([profile.to_owned(), profile.join("deps")]);
    folders
}

/// Returns the binary that `cargo run` would choose, according to `cargo metadata`: among those of the named package,
/// else of the default members, the `default-run`, else the only one.
fn default_binary(metadata: &Value, package: Option<&str>) -> Result<CargoTarget, ProgramError> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let members = list(&metadata["workspace_default_members"]);
    let chosen = list(&metadata["packages"]).into_iter().filter(|candidate| match package {
        Some(name) => candidate["name"] == name,
        None => members.contains(&candidate["id"]),
    });
    let chosen: Vec<Value> = chosen.collect();
    if let (Some(name), []) = (package, chosen.as_slice()) {
        return Err(ProgramError::NoProject {
            reason: format!("the workspace has no package {name}"),
        });
    }
    let defaults: Vec<&str> = chosen.iter().filter_map(|it| it["default_run"].as_str()).collect();
    if let [name] = defaults.as_slice() {
        return Ok(CargoTarget::bin(*name));
    }
    let targets = chosen.iter().flat_map(|it| list(&it["targets"]));
    let is_binary = |target: &Value| list(&target["kind"]).iter().any(|kind| kind == "bin");
    let names = targets.filter(is_binary).filter_map(|it| it["name"].as_str().map(str::to_owned));
    let names: Vec<String> = names.collect();
    match names.as_slice() {
        [name] => Ok(CargoTarget::bin(name)),
        _ => Err(ProgramError::NoDefaultBinary { names }),
    }
}

/// Extracts the package's name from its ID: `path+file:///src/name#0.1.0`, `path+file:///src/folder#name@0.1.0`, `name
/// 0.1.0 (path+...)`.
fn package_name(id: &str) -> &str {
    let Some((source, fragment)) = id.split_once('#') else {
        return id.split_whitespace().next().unwrap_or(id);
    };
    match fragment.split_once('@') {
        Some((name, _version)) => name,
        None => source.rsplit('/').next().unwrap_or(source),
    }
}

const CARGO: &str = "cargo";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &str, target: &CargoTarget) -> Result<Built, ProgramError> {
        let mut messages = Messages::default();
        messages.read(lines.as_bytes(), target).unwrap();
        messages.built(target)
    }

    #[test]
    fn the_command() {
        let target = CargoTarget {
            package: Some("vision".to_owned()),
            profile: Some("release".to_owned()),
            features: vec!["cuda".to_owned(), "gpt/flash".to_owned()],
            manifest_path: Some("a/Cargo.toml".into()),
            ..CargoTarget::bin("train")
        };
        assert_eq!(
            target.to_string(),
            "cargo build --bin train --package vision --profile release --features cuda,gpt/flash \
             --manifest-path a/Cargo.toml"
        );
    }

    #[test]
    fn the_executable_among_the_messages() {
        let lines = r#"
{"reason":"build-script-executed","package_id":"x","linked_paths":["native=/t/debug/build/x/out","/usr/lib"],"out_dir":"/t/debug/build/x/out"}
{"reason":"compiler-artifact","package_id":"path+file:///w/dep#0.1.0","target":{"kind":["lib"],"name":"train"},"executable":null}
{"reason":"compiler-artifact","package_id":"path+file:///w/train#0.1.0","target":{"kind":["custom-build"],"name":"build-script-build"},"executable":null}
not a message
{"reason":"compiler-artifact","package_id":"path+file:///w/train#0.1.0","target":{"kind":["example"],"name":"train"},"executable":"/t/debug/examples/train"}
{"reason":"compiler-artifact","package_id":"path+file:///w/train#0.1.0","target":{"kind":["bin"],"name":"train"},"executable":"/t/debug/train"}
{"reason":"build-finished","success":true}"#;
        let bin = CargoTarget::bin("train");
        let example = CargoTarget { kind: CargoKind::Example, ..bin.clone() };
        let folders: Vec<PathBuf> =
            ["/t/debug/build/x/out", "/t/debug", "/t/debug/deps"].map(PathBuf::from).to_vec();
        let built = |executable: &str| {
            Ok(Built { executable: executable.into(), libraries: folders.clone() })
        };
        assert_eq!(read(lines, &bin), built("/t/debug/train"));
        assert_eq!(read(lines, &example), built("/t/debug/examples/train"));
        assert_eq!(
            read(lines, &CargoTarget::bin("other")).unwrap_err().to_string(),
            "cargo build wrote no executable of bin other; please file a bug"
        );
        let twice = format!("{lines}{}", lines.replace("/w/train#0.1.0", "/w/b#vision@2.0.0"));
        assert_eq!(
            read(&twice, &bin).unwrap_err().to_string(),
            "several packages have bin train: choose one with --package train or --package vision"
        );
    }

    #[test]
    fn the_binary_that_cargo_would_run() {
        let metadata = |packages: Value| {
            let ids: Vec<Value> =
                packages.as_array().unwrap().iter().map(|it| it["id"].clone()).collect();
            serde_json::json!({ "packages": packages, "workspace_default_members": ids })
        };
        let package = |name: &str, default: Option<&str>, binaries: &[&str]| {
            let binaries =
                binaries.iter().map(|it| serde_json::json!({ "kind": ["bin"], "name": it }));
            let library = serde_json::json!({ "kind": ["lib"], "name": name });
            let targets: Vec<Value> = binaries.chain([library]).collect();
            serde_json::json!({ "id": name, "name": name, "default_run": default, "targets": targets })
        };
        let (one, two) = (package("a", None, &["a"]), package("b", None, &["x", "y"]));
        let chosen = package("c", Some("y"), &["x", "y"]);
        let ask = |packages: &[&Value], name: Option<&str>| {
            let packages = packages.iter().map(|it| (*it).clone()).collect();
            default_binary(&metadata(Value::Array(packages)), name).map(|it| it.name)
        };
        assert_eq!(ask(&[&one], None), Ok("a".to_owned()));
        assert_eq!(ask(&[&chosen], None), Ok("y".to_owned()));
        assert_eq!(ask(&[&one, &two], Some("a")), Ok("a".to_owned()));
        let names = ["x", "y"].map(str::to_owned).to_vec();
        assert_eq!(ask(&[&two], None), Err(ProgramError::NoDefaultBinary { names }));
        let none = ProgramError::NoDefaultBinary { names: Vec::new() };
        assert_eq!(ask(&[&package("l", None, &[])], None), Err(none));
        let reason = "the workspace has no package z".to_owned();
        assert_eq!(ask(&[&one], Some("z")), Err(ProgramError::NoProject { reason }));
    }

    #[test]
    fn names_of_packages() {
        for (id, name) in [
            ("path+file:///src/train#0.1.0", "train"),
            ("path+file:///src/folder#train@0.1.0", "train"),
            ("registry+https://github.com/rust-lang/crates.io-index#train@0.1.0", "train"),
            ("train 0.1.0 (path+file:///src/train)", "train"),
        ] {
            assert_eq!(package_name(id), name);
        }
    }
}
