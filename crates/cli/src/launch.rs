//! `brigade launch`: the flags and their way to the launcher.

use std::ffi::OsString;
use std::time::Duration;

use brigade_launch::{HostFacts, LaunchOptions, LaunchPlan, agent, hosts};
use clap::Args;

use crate::hosts::HostsArgs;

/// Run a program as several ranks on this host
///
/// Starts the program N times and tells each its place through torchrun's environment variables
/// (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Brigade programs and PyTorch
/// scripts read them without further arguments.
///
/// Every line of output is prefixed with its rank. When a rank fails, the others are stopped, its
/// last lines are shown, and its exit code becomes the launcher's. Nothing is left running, even
/// when the launcher itself is killed. The ranks' standard input is empty.
#[derive(Debug, Args)]
#[command(override_usage = USAGE, after_help = EXAMPLES, after_long_help = LONG_EXAMPLES)]
pub(crate) struct LaunchArgs {
    /// Number of ranks
    #[arg(long, value_name = "N", required_unless_present_any = ["hosts", "hostfile"])]
    nproc: Option<usize>,

    #[command(flatten)]
    hosts: HostsArgs,

    /// OMP_NUM_THREADS of each rank [default: what the environment says, else the cores divided by
    /// the ranks]
    #[arg(long, value_name = "N")]
    threads_per_rank: Option<usize>,

    /// How long ranks may take to stop before they are killed
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    shutdown_timeout: Duration,

    /// The program, a path or a name that is looked up in PATH, and its arguments, which are passed
    /// on as they are
    // One list: as two arguments, a first `--` after the program would be taken for ours.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the job and gives its exit code.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    let (program, arguments) = args.command.split_first().unzip();
    let options = LaunchOptions {
        nproc: args.nproc.unwrap_or(1),
        local_addr: None,
        program: program.cloned().unwrap_or_default(),
        args: arguments.unwrap_or_default().to_vec(),
        threads_per_rank: args.threads_per_rank,
        shutdown_timeout: args.shutdown_timeout,
    };
    if let Some(hosts) = args.hosts.options(args.nproc.is_some())? {
        return Ok(hosts::run(&options, &hosts)?.exit_code());
    }
    let plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options))?;
    Ok(agent::run(&plan)?.exit_code())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

const USAGE: &str = "brigade launch [OPTIONS] --nproc <N> [--] <PROGRAM> [ARGS]...";

const EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 python3 train.py --lr 0.1";

const LONG_EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 python3 train.py --lr 0.1
  brigade launch --nproc 2 -- sh -c 'echo rank $RANK of $WORLD_SIZE'

Exit codes:
  0         every rank succeeded
  N         the first rank that failed exited with N, or signal N - 128 killed it
  2         a wrong argument
  126, 127  the program cannot be run, or was not found
  1         the system could not start the job";
