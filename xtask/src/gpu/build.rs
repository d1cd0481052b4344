//! Cargo builds of the programs for one libtorch, without paths of this machine in them.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use brigade_libtorch_setup::Libtorch;
use serde::Deserialize;

use super::programs::{PROGRAMS, RUNNER, TestProgram};
use crate::cargo::{self, Cargo, plain_cargo};
use crate::checkout::Checkout;
use crate::setup;

/// Build of the programs for one libtorch.
pub(super) struct Build<'a> {
    checkout: &'a Checkout,
    pub(super) libtorch: Libtorch,
    /// `true` for the feature `cuda` and the profile `gpu`, fit for another machine.
    pub(super) cuda: bool,
    /// Folder of the workspace that is built.
    pub(super) root: PathBuf,
    target: PathBuf,
}

/// Program that cargo has built.
#[derive(Debug)]
pub(super) struct Built {
    /// Folder of the package, relative to the root.
    pub(super) package: String,
    pub(super) target: String,
    pub(super) is_test: bool,
    pub(super) path: PathBuf,
}

impl<'a> Build<'a> {
    /// Creates a build for GPUs, with the libtorch of this version, such as `2.13`.
    pub(super) fn with_cuda(checkout: &'a Checkout, version: &str) -> Result<Self> {
        let libtorch = setup::for_gpus(checkout, version)?;
        eprintln!("{}", libtorch.description());
        let target = checkout.root().join("target/gpu").join(version);
        let root = if libtorch.version().starts_with("2.11") {
            with_older_tch(checkout, &target.join("source"))?
        } else {
            checkout.root().to_path_buf()
        };
        Ok(Self { checkout, libtorch, cuda: true, root, target })
    }

    /// Creates a build with the results of `cargo xtask test`: nothing is compiled again after it.
    pub(super) fn of_the_suite(checkout: &'a Checkout) -> Result<Self> {
        let libtorch = setup::ensure(checkout)?;
        let root = checkout.root().to_path_buf();
        let target = root.join("target");
        Ok(Self { checkout, libtorch, cuda: false, root, target })
    }

    /// Builds everything; `None` if cargo has failed, with its message printed.
    pub(super) fn run(&self, tests: &[TestProgram]) -> Result<Option<Vec<Built>>> {
        let mut built = Vec::new();
        for mut command in self.commands(tests)? {
            command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
            eprintln!("$ {}", cargo::line(&command));
            let output = command.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
            if !output.status.success() {
                return Ok(None);
            }
            built.extend(self.programs(&String::from_utf8_lossy(&output.stdout)));
        }
        for test in tests {
            let is_it =
                |it: &Built| it.is_test && it.package == test.folder && it.target == test.name;
            if (self.cuda || test.is_short) && !built.iter().any(is_it) {
                bail!("cargo has built no test program {} of {}", test.name, test.folder);
            }
        }
        Ok(Some(built))
    }

    fn commands(&self, tests: &[TestProgram]) -> Result<Vec<Command>> {
        if !self.cuda {
            // The same arguments as in the suite, as cargo would build other features anew.
            let cargo = Cargo::new(self.checkout)?;
            let programs = cargo.command(&["build", "--workspace", "--bins", "--examples"]);
            let mut build = cargo.command(&["test", "--workspace", "--no-run"]);
            let names: BTreeSet<_> =
                tests.iter().filter(|it| it.is_short).map(|it| &it.name).collect();
            build.args(names.into_iter().flat_map(|it| ["--test", it]));
            return Ok(vec![programs, build]);
        }
        let mut cargo = plain_cargo(self.checkout);
        cargo.current_dir(&self.root).args(["build", "--profile", "gpu", "--bins"]);
        let packages = tests.iter().map(|it| &*it.package).chain(PROGRAMS.iter().map(|it| it.0));
        for package in packages.chain([RUNNER.0, "brigade"]).collect::<BTreeSet<_>>() {
            cargo.args(["-p", package]);
        }
        let targets: BTreeSet<_> = tests.iter().map(|it| &it.name).collect();
        cargo.args(targets.into_iter().flat_map(|it| ["--test", it]));
        cargo.args(["--features", "brigade/cuda,brigade-torch/cuda,brigade-train/cuda"]);
        self.fit_for_another_machine(&mut cargo)?;
        Ok(vec![cargo])
    }

    /// Removes run paths and paths of source files, and sets folders of packages relative to the root of the archive.
    fn fit_for_another_machine(&self, cargo: &mut Command) -> Result<()> {
        let (checkout, root) = (text(self.checkout.root())?, text(&self.root)?);
        let home = cargo_home()?;
        let (home, torch) = (text(&home)?, text(self.libtorch.folder())?);
        let tools = self.target.with_file_name("tools");
        fs::create_dir_all(&tools).with_context(|| format!("cannot make {}", tools.display()))?;
        let tool = |name: &str, script: &str| -> Result<PathBuf> {
            let path = tools.join(name);
            // Cargo's fingerprints contain its modification time.
            if fs::read_to_string(&path).ok().as_deref() != Some(script) {
                fs::write(&path, script)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                    .with_context(|| format!("cannot make {} a program", path.display()))?;
            }
            Ok(path)
        };
        cargo.env("CARGO_TARGET_DIR", &self.target).env("CARGO_INCREMENTAL", "0");
        cargo.env("BRIGADE_ROOT", root).env("RUSTC_WORKSPACE_WRAPPER", tool("rustc", RUSTC)?);
        cargo.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", tool("linker", LINKER)?);
        let flags = |option: &str, maps: &[(&str, &str)]| {
            let flags = maps.iter().map(|(from, to)| format!("{option}={from}={to}"));
            flags.collect::<Vec<_>>().join(" ")
        };
        let mut maps = vec![(root, "."), (torch, "libtorch"), (home, "cargo")];
        if root != checkout {
            // First: of several prefixes that match, the last one counts.
            maps.insert(0, (checkout, "."));
        }
        let of_rust: Vec<_> = maps.iter().copied().filter(|it| it.0 != torch).collect();
        cargo.env("RUSTFLAGS", flags("--remap-path-prefix", &of_rust));
        let maps = flags("-ffile-prefix-map", &maps);
        let c_flags = format!("{maps} -ffunction-sections -fdata-sections");
        cargo.env("CFLAGS", &c_flags).env("CXXFLAGS", &c_flags);
        if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
            cargo.env("LIBTORCH", self.libtorch.folder());
        }
        if self.libtorch.bypasses_version_check() {
            cargo.env("LIBTORCH_BYPASS_VERSION_CHECK", "1");
        }
        Ok(())
    }

    /// Returns the executables in cargo's messages.
    fn programs(&self, messages: &str) -> Vec<Built> {
        #[derive(Deserialize)]
        struct Message {
            manifest_path: Option<PathBuf>,
            executable: Option<PathBuf>,
            target: Option<Target>,
        }
        #[derive(Deserialize)]
        struct Target {
            name: String,
            kind: Vec<String>,
        }

        let messages = messages.lines().filter_map(|it| serde_json::from_str::<Message>(it).ok());
        messages
            .filter_map(|message| {
                let (path, target) = (message.executable?, message.target?);
                let package = message.manifest_path?;
                let package = package.parent()?.strip_prefix(&self.root).ok()?.to_str()?.to_owned();
                let is_test = target.kind.iter().any(|it| it == "test");
                Some(Built { package, target: target.name, is_test, path })
            })
            .collect()
    }

    /// Returns texts that no program for another machine may contain.
    pub(super) fn own_paths(&self) -> Result<Vec<String>> {
        let home = env::home_dir().context("this user has no home folder")?;
        let cargo_home = cargo_home()?;
        let paths = [self.checkout.root(), self.libtorch.folder(), &home.join("."), &cargo_home];
        paths.into_iter().map(|path| Ok(text(path)?.trim_end_matches('.').to_owned())).collect()
    }
}

/// Creates a workspace with the tch for libtorch 2.11: links to everything in the checkout, and a `Cargo.lock` of its
/// own, because tch's C++ calls functions that only its own version of libtorch has.
fn with_older_tch(checkout: &Checkout, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let entries = fs::read_dir(checkout.root()).context("cannot read the checkout")?;
    for entry in entries {
        let entry = entry.context("cannot read the checkout")?;
        let name = entry.file_name();
        let (from, to) = (entry.path(), folder.join(&name));
        let hidden = name.to_string_lossy().starts_with('.');
        if entry.path().join("CACHEDIR.TAG").exists() || name == "target" || hidden {
            continue;
        }
        if ["Cargo.toml", "Cargo.lock"].iter().any(|it| name == *it) {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        } else if fs::read_link(&to).ok().as_deref() != Some(&from) {
            symlink(&from, &to)
                .with_context(|| format!("cannot make the link {}", to.display()))?;
        }
    }
    let mut update = plain_cargo(checkout);
    update.current_dir(folder).args(["update", "--quiet", "-p", "tch", "--precise", TCH]);
    let status = cargo::run(&mut update)?;
    ensure!(status.success(), "cargo cannot take tch {TCH}");
    Ok(folder.to_path_buf())
}

/// Version of tch for libtorch 2.11.
const TCH: &str = "0.24.0";

fn cargo_home() -> Result<PathBuf> {
    let named = env::var_os("CARGO_HOME").map(PathBuf::from);
    named.or_else(|| Some(env::home_dir()?.join(".cargo"))).context("this user has no home folder")
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Script that replaces rustc. Tests find their files by `env!("CARGO_MANIFEST_DIR")`, which must be relative to the
/// root of the archive, where they run.
const RUSTC: &str = r#"#!/bin/sh
case "$CARGO_MANIFEST_DIR" in
"$BRIGADE_ROOT") CARGO_MANIFEST_DIR=. ;;
*) CARGO_MANIFEST_DIR="${CARGO_MANIFEST_DIR#"$BRIGADE_ROOT"/}" ;;
esac
export CARGO_MANIFEST_DIR
exec "$@"
"#;

/// Script that replaces the linker: the packages' build scripts set the run path of their programs.
const LINKER: &str = r#"#!/bin/sh
for argument do
    shift
    case "$argument" in
    -Wl,-rpath,*) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec cc "$@"
"#;
