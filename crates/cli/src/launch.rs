//! `brigade launch`: the flags and their way to the launcher.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::time::Duration;

use brigade_launch::emit::JobFile;
use brigade_launch::{HostFacts, LaunchError, LaunchOptions, LaunchPlan, Surroundings, agent};
use clap::Args;

use crate::emit::{self, EmitArgs};

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
    #[arg(long, value_name = "N")]
    nproc: usize,

    /// OMP_NUM_THREADS of each rank [default: what the environment says, else the cores divided by
    /// the ranks]
    #[arg(long, value_name = "N")]
    threads_per_rank: Option<usize>,

    /// How long ranks may take to stop before they are killed
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    shutdown_timeout: Duration,

    /// Number of hosts, or MIN:MAX, for the job file
    #[arg(long, value_name = "N", value_parser = hosts, default_value = "1", requires = "emit")]
    nnodes: RangeInclusive<usize>,

    /// The program, a path or a name that is looked up in PATH, and its arguments, which are passed
    /// on as they are
    // One list: as two arguments, a first `--` after the program would be taken for ours.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,

    // Last: its heading is for all that follows.
    #[command(flatten)]
    emit: EmitArgs,
}

/// Runs the job and gives its exit code.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    if let Some(target) = args.emit.emit {
        let nproc = args.nproc.to_string();
        let job = JobFile {
            nodes: args.nnodes.clone(),
            nproc,
            shutdown_timeout: args.shutdown_timeout,
            ..args.emit.job_file(std::env::args_os(), &args.command)
        };
        emit::print(&job, target, io::stdout().lock())?;
        return Ok(0);
    }
    let surroundings = Surroundings::here().map_err(LaunchError::from)?;
    if let Some(note) = &surroundings.note {
        let _ = io::stderr().write_all(format!("brigade: note: {note}\n").as_bytes());
    }
    let (program, arguments) = args.command.split_first().unzip();
    let options = LaunchOptions {
        nproc: args.nproc,
        program: program.cloned().unwrap_or_default(),
        args: arguments.unwrap_or_default().to_vec(),
        threads_per_rank: args.threads_per_rank,
        shutdown_timeout: args.shutdown_timeout,
    };
    let plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options))?;
    Ok(agent::run(&plan)?.exit_code())
}

fn hosts(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.parse(), max.parse()) {
        (Ok(min), Ok(max)) if (1..=max).contains(&min) => Ok(min..=max),
        _ => Err("it must be a number of hosts, N or MIN:MAX, from 1".to_owned()),
    }
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
