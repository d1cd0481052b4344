//! `cargo xtask demo`: trains a model on two processes, from a fresh checkout, in one command.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;

/// Trains on the embedded digits for a few epochs. Returns the launcher's exit code, or 1 if the accuracy is too low.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let programs = build(&Cargo::new(checkout)?)?;
    let program = |name: &str| {
        programs.get(name).with_context(|| format!("cargo built no program named {name}"))
    };

    let mut launch = Command::new(program("brigade")?);
    launch
        .args(["launch", "--nproc", "2", "--"])
        .arg(program("fashion_mnist")?)
        .args(["--data", "digits", "--epochs", "10"])
        .current_dir(checkout.root())
        .stdout(Stdio::piped());
    eprintln!("$ {}", cargo::line(&launch));
    let mut child = launch.spawn().context("cannot start brigade")?;
    let mut accuracy_percent = None;
    if let Some(output) = child.stdout.take() {
        accuracy_percent = pass_through(BufReader::new(output))?;
    }
    let status = child.wait().context("cannot wait for brigade")?;
    if !status.success() {
        eprintln!("error: the launch failed: {status}");
        return Ok(cargo::exit_code(status));
    }
    match accuracy_percent {
        None => bail!("the training printed no line `epoch E/N, accuracy = ...`"),
        Some(percent) if percent < WANTED_PERCENT => {
            bail!("the accuracy is {percent:.2} %, and {WANTED_PERCENT} % was expected")
        }
        Some(percent) => {
            eprintln!(
                "demo: accuracy {percent:.2} % on the test part, {WANTED_PERCENT} % expected"
            );
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Builds both programs and gets their paths from cargo: CARGO_TARGET_DIR may be anywhere.
fn build(cargo: &Cargo<'_>) -> Result<HashMap<String, PathBuf>> {
    let mut command = cargo.command(&["build", "-p", "brigade-cli"]);
    command.args(["-p", "fashion_mnist", "--message-format", "json-render-diagnostics"]);
    command.stdout(Stdio::piped());
    eprintln!("$ {}", cargo::line(&command));
    let output = command.spawn().context("cannot start cargo")?.wait_with_output();
    let output = output.context("cannot wait for cargo")?;
    if !output.status.success() {
        bail!("the build failed: {}", output.status);
    }
    let mut programs = HashMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let name = message["target"]["name"].as_str();
        if let (Some(name), Some(path)) = (name, message["executable"].as_str()) {
            programs.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    Ok(programs)
}

/// Copies the launch's output as it arrives. Returns the last accuracy in it, in percent.
fn pass_through(lines: impl BufRead) -> Result<Option<f64>> {
    let mut last = None;
    let mut out = io::stdout().lock();
    for line in lines.split(b'\n') {
        let mut line = line.context("cannot read what the launch prints")?;
        last = accuracy_percent(&String::from_utf8_lossy(&line)).or(last);
        line.push(b'\n');
        out.write_all(&line).and_then(|()| out.flush()).context("cannot print")?;
    }
    Ok(last)
}

/// 97.5 of "[rank 0] epoch 6/6, accuracy = 97.50".
pub(crate) fn accuracy_percent(line: &str) -> Option<f64> {
    let (before, after) = line.split_once(", accuracy = ")?;
    before.contains("epoch ").then_some(())?;
    let end = after.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(after.len());
    after[..end].parse().ok()
}

/// Minimum accuracy in percent. A CNN that learns reaches 98 to 99 % here; one whose gradients are not averaged, or
/// whose ranks read the same half of the data, stays below.
const WANTED_PERCENT: f64 = 97.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_accuracy_in_a_line() {
        assert_eq!(accuracy_percent("epoch 6/6, accuracy = 97.50"), Some(97.5));
        assert_eq!(accuracy_percent("[0] epoch 1/6, accuracy = 100.00 (best)"), Some(100.0));
        assert_eq!(accuracy_percent("epoch 6/6, loss = 0.1"), None);
        assert_eq!(accuracy_percent("epoch 6/6, accuracy = NaN"), None);
    }

    #[test]
    fn the_last_accuracy_counts() {
        let lines = "epoch 1/2, accuracy = 90.00\nepoch 2/2, accuracy = 98.25\n812 samples/s\n";
        assert_eq!(pass_through(lines.as_bytes()).unwrap(), Some(98.25));
        assert_eq!(pass_through("nothing\n".as_bytes()).unwrap(), None);
    }
}
