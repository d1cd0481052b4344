//! Durations of a new user's first steps: from an empty folder to a trained model, in this checkout and in a new
//! project.
//!
//! Every command is one of the page `docs/first-steps.md`, in its order, in folders that are empty at first: build
//! folders, the cache with libtorch, the installed program. Only cargo's downloads of crates exist already.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use brigade_test_hosts::Network;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::comparisons::Comparison;
use crate::table::Row;

pub(crate) fn all() -> Vec<Comparison> {
    vec![
        Comparison { name: "newcomer-project", run: project },
        Comparison { name: "newcomer-demo", run: demo },
        Comparison { name: "newcomer-packages", run: packages },
    ]
}

/// Installs `brigade`, and creates, trains, changes, tests and resumes projects. One round: it takes minutes.
fn project(_rounds: usize) -> Result<Vec<Row>> {
    let workspace = Workspace::new()?;
    let install = workspace.timed(&checkout(), "cargo install --path crates/cli")?;
    let new = workspace.timed(workspace.root.path(), "brigade new digits")?;
    let digits = workspace.root.path().join("digits");
    let first = workspace.timed(&digits, "cargo build")?;
    let train = workspace.timed(&digits, "cargo run")?;
    replace(&digits.join("src/main.rs"), "128", "256")?;
    let edit = workspace.timed(&digits, "cargo build")?;
    let two = workspace.timed(&digits, "brigade launch --nproc 2")?;
    let test = workspace.timed(&digits, "cargo test")?;
    let hosts = workspace.two_hosts(&digits)?;
    workspace.interrupt_and_resume()?;

    Ok(vec![
        row("`cargo install --path crates/cli`", install, None),
        row("`brigade new digits`, libtorch fetched", new, None),
        row("first `cargo build` of the new project", first, Some(100.0)),
        row("`cargo run` then: 10 epochs", train, None),
        row("`cargo build` after an edit of its main.rs", edit, Some(10.0)),
        row("`brigade launch --nproc 2` then: 10 epochs", two, None),
        row("`cargo test`, first time: a test on two ranks", test, None),
        row("the same on two hosts, `brigade launch --hosts`: 10 epochs", hosts, None),
    ])
}

/// Returns the row of a command that took so many seconds.
fn row(what: &'static str, seconds: f64, goal: Option<f64>) -> Row {
    Row {
        what,
        ours: format!("{seconds:.1} s"),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: goal.map_or_else(|| "-".to_owned(), |goal| format!("under {goal} s")),
        reached: goal.is_none_or(|goal| seconds < goal),
    }
}

/// Runs `cargo xtask demo` in a fresh clone, downloads of libtorch included.
fn demo(_rounds: usize) -> Result<Vec<Row>> {
    let workspace = Workspace::new()?;
    let clone = format!("git clone --quiet . {}", workspace.root.path().join("brigade").display());
    workspace.timed(&checkout(), &clone)?;
    let seconds = workspace.timed(&workspace.root.path().join("brigade"), "cargo xtask demo")?;
    let what = "`cargo xtask demo` in a fresh clone: from nothing to a trained model";
    Ok(vec![row(what, seconds, Some(200.0))])
}

/// Installs the wheel that `cargo xtask package` has built into an environment that has PyTorch, launches a Python script
/// with it, and trains a new project.
fn packages(_rounds: usize) -> Result<Vec<Row>> {
    let python = env::var_os("BRIGADE_PEER_PYTHON").map(PathBuf::from);
    let python = python.context("BRIGADE_PEER_PYTHON does not name a Python with PyTorch")?;
    let wheel = wheel()?;
    let workspace = Workspace::new()?;
    let root = workspace.root.path();
    let site_packages = |python: &Path| {
        let question = "import sysconfig; print(sysconfig.get_path(\"purelib\"))";
        workspace.printed(root, &format!("{} -c '{question}'", python.display()))
    };
    let installed = site_packages(&python)?;
    workspace.timed(root, &format!("{} -m venv .", python.display()))?;
    let own = site_packages(&root.join("bin/python"))?;
    fs::write(Path::new(own.trim()).join("pytorch.pth"), installed)?;

    let pip = format!("pip install --quiet --no-index {}", wheel.display());
    let install = workspace.timed(root, &pip)?;
    let script = "import os, torch\nprint(os.environ['RANK'], torch.ones(2).sum().item())\n";
    fs::write(root.join("train.py"), script)?;
    let launch = workspace.timed(root, "brigade launch --nproc 2 train.py")?;
    // The crates of this version are not published: the project depends on the checkout's.
    let new = format!("brigade new digits --pytorch --brigade {}", checkout().display());
    let new = workspace.timed(root, &new)?;
    let digits = root.join("digits");
    let run = workspace.timed(&digits, "cargo run")?;
    let release = workspace.timed(&digits, "cargo build --release")?;

    let script = "`pip install` of the wheel, two ranks of a script with PyTorch";
    let project = "`brigade new digits --pytorch`, `cargo run`: a trained model of 10 epochs";
    Ok(vec![
        row(script, install + launch, Some(20.0)),
        row(project, new + run, Some(100.0)),
        row("`cargo build --release` then", release, None),
    ])
}

/// The wheel for this processor among the packages of this checkout.
fn wheel() -> Result<PathBuf> {
    let folder = checkout().canonicalize()?.join("target/dist");
    let end = format!("_{}.whl", env::consts::ARCH);
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten().map(|it| it.path());
    let wheel = entries.into_iter().find(|path| path.to_string_lossy().ends_with(&end));
    wheel.with_context(|| {
        format!("no wheel in {}: `cargo xtask package` builds it", folder.display())
    })
}

/// Folders that are empty at first, and an environment without variables of this checkout's build.
struct Workspace {
    root: TempDir,
}

impl Workspace {
    fn new() -> Result<Self> {
        Ok(Self { root: tempfile::tempdir().context("cannot make a temporary folder")? })
    }

    fn environment(&self, command: &mut Command) {
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            let of_this_build = text.starts_with("CARGO_") && text != "CARGO_HOME";
            let decides = [
                "LIBTORCH",
                "RUSTFLAGS",
                "BRIGADE_",
                "OMP_",
                "LD_LIBRARY_PATH",
                "VIRTUAL_ENV",
                "PYTHON",
            ];
            if of_this_build || decides.iter().any(|it| text.starts_with(it)) {
                command.env_remove(&name);
            }
        }
        let mut path = OsString::from(self.root.path().join("bin"));
        path.push(":");
        path.push(env::var_os("PATH").unwrap_or_default());
        command.env("PATH", path).env("XDG_CACHE_HOME", self.root.path().join("cache"));
        command.env("CARGO_INSTALL_ROOT", self.root.path());
    }

    fn command(&self, folder: &Path, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(folder).stdin(Stdio::null());
        self.environment(&mut command);
        if line.starts_with("cargo install") {
            // Otherwise it would use what this checkout has built.
            command.env("CARGO_TARGET_DIR", self.root.path().join("install"));
        }
        command
    }

    /// Returns the seconds from the start of a command to its end, which must succeed.
    fn timed(&self, folder: &Path, line: &str) -> Result<f64> {
        eprintln!("  $ {line}");
        let start = Instant::now();
        self.printed(folder, line)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the text that a command prints.
    fn printed(&self, folder: &Path, line: &str) -> Result<String> {
        let output = self.command(folder, line).output().with_context(|| line.to_owned())?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line}: {}: {errors}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs the project's program on two hosts with a shared folder, through ssh.
    fn two_hosts(&self, project: &Path) -> Result<f64> {
        let network = Network::new(2);
        let line = "brigade launch --hosts node1:1,node2:1 -- target/debug/digits";
        let mut command = network.host(0).command_in(project, "sh");
        self.environment(&mut command);
        command.env("BRIGADE_SSH", format!("ssh -F {}", network.ssh_config().display()));
        command.args(["-c", line]).stdin(Stdio::null());
        eprintln!("  $ {line}");
        let start = Instant::now();
        let output = command.output().context("cannot start brigade on a host")?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "on two hosts: {}: {errors}", output.status);
        ensure!(printed.contains("epoch 10/10"), "on two hosts: {printed}");
        Ok(start.elapsed().as_secs_f64())
    }

    /// Stops a run with Ctrl-C after its first checkpoint, and resumes it.
    fn interrupt_and_resume(&self) -> Result<()> {
        self.timed(self.root.path(), "brigade new run --template complete")?;
        let folder = self.root.path().join("run");
        let launch = |line: &str| {
            eprintln!("  $ {line}");
            let mut command = self.command(&folder, &format!("exec {line}"));
            // Dependencies of both projects are built once here; a user's second project takes as long as the first.
            command.env("CARGO_TARGET_DIR", self.root.path().join("digits/target"));
            command.stdout(Stdio::piped());
            command
        };
        let mut first = launch("brigade launch --nproc 2 -- --epochs 300");
        let mut first = first.stderr(Stdio::null()).spawn()?;
        let mut printed = BufReader::new(first.stdout.take().context("its output is a pipe")?);
        let mut text = String::new();
        while !text.contains("epoch 10/300") {
            let read = printed.read_line(&mut text)?;
            ensure!(read > 0, "the run to interrupt has ended: {text}");
        }
        kill(Pid::from_raw(first.id().cast_signed()), Signal::SIGINT)?;
        let status = first.wait()?;
        ensure!(status.code() == Some(130), "after Ctrl-C the launcher ended with {status}");
        let mut resumed = launch("brigade launch --nproc 2 -- --epochs 300 --resume");
        let resumed = resumed.output()?;
        let printed = String::from_utf8_lossy(&resumed.stdout);
        let errors = String::from_utf8_lossy(&resumed.stderr);
        ensure!(resumed.status.success(), "--resume: {}: {errors}", resumed.status);
        ensure!(printed.contains("goes on after step"), "--resume: {printed}");
        ensure!(printed.contains("epoch 300/300"), "--resume: {printed}");
        Ok(())
    }
}

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn replace(file: &Path, from: &str, to: &str) -> Result<()> {
    let text = fs::read_to_string(file)?;
    ensure!(text.contains(from), "{} has no {from}", file.display());
    fs::write(file, text.replace(from, to))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_command_of_the_page_is_run() {
        let page = include_str!("../../docs/first-steps.md");
        let blocks = page.split("```sh\n").skip(1).map(|it| it.split("```").next().unwrap());
        let lines: Vec<&str> = blocks.flat_map(str::lines).collect();
        assert!(lines.len() > 8, "{lines:?}");
        for line in lines {
            let command = line.split(" #").next().unwrap().trim();
            // The shell's own `cd`, whose folder is that of a command here.
            let is_run = include_str!("newcomer.rs").contains(&format!("\"{command}\""));
            assert!(command.starts_with("cd ") || is_run, "docs/first-steps.md: {command}");
        }
    }
}
