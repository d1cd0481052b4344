//! Cargo as a child process, with the same environment as a plain `cargo`.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result, bail};

use crate::checkout::Checkout;
use crate::setup;

/// Builder of cargo commands for a checkout that is set up.
#[derive(Debug)]
pub(crate) struct Cargo<'a> {
    checkout: &'a Checkout,
}

impl<'a> Cargo<'a> {
    /// Sets the checkout up if necessary.
    pub(crate) fn new(checkout: &'a Checkout) -> Result<Self> {
        setup::ensure(checkout)?;
        Ok(Self { checkout })
    }

    /// Returns the command `cargo ARGUMENTS…` in the checkout's root.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.like(&program());
        command.args(arguments);
        command
    }

    /// Returns a command of another program with cargo's environment.
    pub(crate) fn like(&self, program: &Path) -> Command {
        let mut command = plain(self.checkout, program);
        if setup::is_repeated(self.checkout) {
            command.env_remove("LIBTORCH");
        }
        command
    }

    /// Prints the command, runs it on this terminal, and waits.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<ExitStatus> {
        run(&mut self.command(arguments))
    }
}

fn program() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Returns cargo without any libtorch, for `cargo metadata` and `cargo fmt`.
pub(crate) fn plain_cargo(checkout: &Checkout) -> Command {
    plain(checkout, &program())
}

/// Returns a program of cargo's without any libtorch.
pub(crate) fn plain(checkout: &Checkout, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(checkout.root());
    // Variables that `cargo run` set for xtask are wrong for what the child builds; build scripts that watch them would
    // run again.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Returns a program of cargo's in the checkout's `tools/`, in a folder by its version. cargo compiles it if it is missing.
pub(crate) fn install(checkout: &Checkout, package: &str, version: &str) -> Result<PathBuf> {
    let name = package.strip_prefix("cargo-").unwrap_or(package);
    let folder = checkout.root().join("tools").join(format!("{name}-{version}"));
    let program = folder.join("bin").join(package);
    if !program.is_file() {
        eprintln!("{package} is not installed: cargo compiles it once, which takes some minutes");
        let mut install = plain_cargo(checkout);
        install.args(["install", package, "--version", version, "--locked", "--root"]).arg(&folder);
        // cargo-semver-checks is built as one unit by default: minutes for a program that runs for seconds.
        install.env("CARGO_PROFILE_RELEASE_LTO", "off");
        install.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        if !run(&mut install)?.success() {
            bail!("cargo cannot install {package} {version}: its last lines say why");
        }
    }
    Ok(program)
}

/// Prints the command, runs it on this terminal, and waits.
pub(crate) fn run(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", line(command));
    command.status().with_context(|| format!("cannot start {}", command.get_program().display()))
}

/// Formats the command as a user would type it.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line =
        program.file_name().unwrap_or_else(|| command.get_program()).display().to_string();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

/// Converts a child's exit status to an exit code: 128 + the signal's number if a signal ended it, as in a shell.
pub(crate) fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
