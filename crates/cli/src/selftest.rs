//! `brigade test`: the self-test, started as any other program.

use std::ffi::OsString;
use std::iter;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser};

use crate::config::Usage;
use crate::launch::{self, LaunchArgs};
use crate::usage;

/// Run a self-test with the current launch settings
///
/// Starts a small program as `brigade launch` would, with the same settings and flags, on this host or
/// on many: every collective, a training step, metrics, weights and a checkpoint. Each result is
/// compared with the expected one.
#[derive(Debug, Args)]
#[command(override_usage = USAGE, after_help = EXAMPLES)]
pub(crate) struct TestArgs {
    /// Program of the self-test [default: brigade-selftest beside this one]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// Flags of `brigade launch`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    flags: Vec<OsString>,
}

/// The flags as `brigade launch` reads them.
#[derive(Debug, Parser)]
#[command(name = "brigade test", disable_help_flag = true)]
struct Launch {
    #[command(flatten)]
    args: LaunchArgs,
}

/// Runs the test and gives its exit code.
pub(crate) fn run(args: &TestArgs) -> anyhow::Result<u8> {
    let program = args.program()?.into_os_string();
    let words = iter::once(OsString::from("brigade test"))
        .chain(args.flags.iter().cloned())
        .chain(["--no-python".into(), "--".into(), program]);
    let launch = Launch::try_parse_from(words).map_err(|error| {
        Usage(usage::line(&error).unwrap_or_else(|| error.render().to_string()))
    })?;
    launch::run(&launch.args)
}

impl TestArgs {
    fn program(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.program {
            return Ok(path.clone());
        }
        let this = std::env::current_exe().context("cannot find this program's own file")?;
        let beside = this.with_file_name(NAME);
        anyhow::ensure!(
            beside.is_file(),
            "{} is not there: build it with `cargo build -p {NAME}`, with --release if this program \
             was, or name it with --program",
            beside.display()
        );
        Ok(beside)
    }
}

const NAME: &str = "brigade-selftest";

const USAGE: &str = "brigade test [--program <PATH>] [FLAGS OF LAUNCH]...";

const EXAMPLES: &str = "\
Examples:
  brigade test --nproc 2
  brigade test --hosts node1:4,node2:4
  brigade test --config cluster.toml";
