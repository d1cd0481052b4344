//! `brigade test`: starts the self-test like any other program.

mod build;

use std::ffi::{OsStr, OsString};
use std::iter;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser};

use crate::config::Usage;
use crate::launch::{self, LaunchArgs};
use crate::setup::SourceArgs;
use crate::source::Source;
use crate::usage;

/// Run a self-test with the current launch settings
///
/// Starts a small program as `brigade launch` would, with the same settings and flags, on this host or
/// on many: every collective, a training step, metrics, weights and a checkpoint. Each result is
/// compared with the expected one.
///
/// The program links libtorch. The first test builds it with cargo into ~/.cache/brigade (XDG_CACHE_HOME), which takes
/// some minutes: with the libtorch that `brigade setup` has set for the Cargo project in this folder, else with the one
/// that it would fetch.
#[derive(Debug, Args)]
#[command(override_usage = USAGE, after_help = EXAMPLES)]
pub(crate) struct TestArgs {
    /// Program of the self-test [default: beside this one, else built]
    #[arg(long, value_name = "PATH")]
    #[arg(conflicts_with_all = ["cuda", "libtorch", "pytorch", "brigade"])]
    program: Option<PathBuf>,

    #[command(flatten)]
    libtorch: SourceArgs,

    /// Checkout of Brigade to build from [default: this one's, or crates.io]
    #[arg(long, value_name = "DIR")]
    brigade: Option<PathBuf>,

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

/// Runs the test and returns its exit code.
pub(crate) fn run(args: &TestArgs) -> anyhow::Result<u8> {
    // Wrong flags are reported before a build that takes minutes.
    args.launch(NAME.as_ref())?;
    launch::run(&args.launch(args.program()?.as_os_str())?)
}

impl TestArgs {
    fn launch(&self, program: &OsStr) -> anyhow::Result<LaunchArgs> {
        let words = iter::once(OsString::from("brigade test"))
            .chain(self.flags.iter().cloned())
            .chain(["--no-python".into(), "--".into(), program.to_owned()]);
        let launch = Launch::try_parse_from(words).map_err(|error| {
            let words = iter::once("test".into()).chain(self.flags.iter().cloned());
            let line = launch::refusal(&error, words).or_else(|| usage::line(&error));
            Usage(line.unwrap_or_else(|| error.render().to_string()))
        })?;
        Ok(launch.args)
    }

    fn program(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.program {
            return Ok(path.clone());
        }
        let this = std::env::current_exe().context("cannot find this program's own file")?;
        let beside = this.with_file_name(NAME);
        if self.brigade.is_none() && !self.libtorch.is_given() && beside.is_file() {
            return Ok(beside);
        }
        build::built(&self.libtorch, &Source::new(self.brigade.as_deref())?)
    }
}

const NAME: &str = "brigade-selftest";

const USAGE: &str = "brigade test [OPTIONS] [FLAGS OF LAUNCH]...";

const EXAMPLES: &str = "\
Examples:
  brigade test --nproc 2
  brigade test --hosts node1:4,node2:4
  brigade test --config cluster.toml
  brigade test --cuda --nproc gpu";
