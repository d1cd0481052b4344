//! Measurements as processes: this program, a peer's script, the launcher.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};

/// One side of a comparison: how to start it.
pub(crate) struct Side {
    program: PathBuf,
    arguments: Vec<String>,
}

impl Side {
    /// A measurement of this program.
    pub(crate) fn own(name: &str) -> Self {
        let program = std::env::current_exe().unwrap_or_else(|_| "brigade-bench".into());
        Self { program, arguments: vec!["--measure".to_owned(), name.to_owned()] }
    }

    /// A script of a peer with its arguments, where one is installed.
    pub(crate) fn peer(script: &str, arguments: &[&str]) -> Option<Self> {
        let mut all = vec![script_path(script)];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Some(Self { program: python()?.into(), arguments: all })
    }

    /// A script under torchrun, on two processes of one thread.
    pub(crate) fn torchrun(script: &str, arguments: &[&str]) -> Option<Self> {
        let launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"];
        let mut all: Vec<String> = launcher.map(str::to_owned).into();
        all.push(script_path(script));
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Some(Self { program: python()?.into(), arguments: all })
    }

    /// Any command.
    pub(crate) fn command(program: PathBuf, arguments: impl IntoIterator<Item = String>) -> Self {
        Self { program, arguments: arguments.into_iter().collect() }
    }

    /// The lists of numbers that it prints as JSON in its last line.
    pub(crate) fn lists<const N: usize>(&self) -> Result<[Vec<f64>; N]> {
        let output = self.start().output().with_context(|| self.line())?;
        if !output.status.success() {
            bail!(
                "{} ended with {}: {}",
                self.line(),
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or_default();
        let lists: Vec<Vec<f64>> = serde_json::from_str(last)
            .with_context(|| format!("{} printed {last:?}", self.line()))?;
        let found = lists.len();
        lists.try_into().map_err(|_| anyhow!("{} printed {found} lists, not {N}", self.line()))
    }

    /// Seconds from its start to its end.
    pub(crate) fn seconds_until_end(&self) -> Result<f64> {
        let start = Instant::now();
        let output = self.start().output().with_context(|| self.line())?;
        let seconds = start.elapsed().as_secs_f64();
        if !output.status.success() {
            bail!("{} ended with {}", self.line(), output.status);
        }
        Ok(seconds)
    }

    fn start(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null());
        command
    }

    fn line(&self) -> String {
        format!("{} {}", self.program.display(), self.arguments.join(" "))
    }
}

/// The binary `brigade`, beside this one.
pub(crate) fn brigade() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let brigade = own.with_file_name("brigade");
    if !brigade.exists() {
        bail!("{} is not there: cargo build --release -p brigade-cli", brigade.display());
    }
    Ok(brigade)
}

/// The middle value. Sorts.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn python() -> Option<OsString> {
    std::env::var_os("BRIGADE_PEER_PYTHON")
}

fn script_path(script: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(script).to_string_lossy().into_owned()
}
