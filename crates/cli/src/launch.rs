//! `brigade launch`: the flags and their way to the launcher.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use brigade_launch::{
    BindMode, CargoKind, CargoTarget, Color, DeviceList, HostFacts, LaunchOptions, LaunchPlan,
    LineFilter, LocalRanks, NprocSpec, OutputOptions, PlacementOptions, Program, StreamModes,
    agent,
};
use clap::Args;

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
    /// Number of ranks; or auto (one for each GPU, or for each core where there is none), gpu, cpu
    /// [default: the number of --devices]
    #[arg(long, value_name = "N", required_unless_present = "devices")]
    nproc: Option<NprocSpec>,

    /// GPUs that the ranks see, as in 0,2; or all
    #[arg(long, value_name = "IDS")]
    devices: Option<DeviceList>,

    /// Processors that each rank may use: none (all), cores (its share of its NUMA node's cores),
    /// numa (its NUMA node), socket, core-complex (one last-level cache). A rank's node is its
    /// GPU's; ranks without one are spread out
    #[arg(long, value_name = "TO", default_value_t)]
    bind: BindMode,

    /// Tell each rank that it is local rank 0, and show it one GPU only
    #[arg(long)]
    virtual_local_rank: bool,

    /// OMP_NUM_THREADS of each rank [default: what the environment says, else the cores divided by
    /// the ranks, or those that --bind gives it]
    #[arg(long, value_name = "N")]
    threads_per_rank: Option<usize>,

    /// How long ranks may take to stop before they are killed
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    shutdown_timeout: Duration,

    /// The program, a path or a name that is looked up in PATH, or a Python script (*.py); and its
    /// arguments, which are passed on as they are, but ${local_rank} is replaced
    // One list: as two arguments, a first `--` after the program would be taken for ours.
    #[arg(trailing_var_arg = true, value_name = "PROGRAM")]
    #[arg(required_unless_present_any = ["bin", "example"])]
    command: Vec<OsString>,

    #[command(flatten)]
    kind: KindArgs,

    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Program")]
struct KindArgs {
    /// PROGRAM is a Python module: run it with `python -u -m`
    #[arg(short, long)]
    module: bool,

    /// Run PROGRAM as it is, even if its name ends in .py; else that means `python -u PROGRAM`, with
    /// the Python of PYTHON_EXEC or PATH
    #[arg(long, conflicts_with = "module")]
    no_python: bool,

    /// Build this binary with Cargo, once, and run it
    #[arg(long, value_name = "NAME", conflicts_with_all = ["module", "no_python", "example"])]
    bin: Option<String>,

    /// Build this example with Cargo, once, and run it
    #[arg(long, value_name = "NAME", conflicts_with_all = ["module", "no_python"])]
    example: Option<String>,

    /// Package of the binary or example
    #[arg(short, long, value_name = "NAME")]
    package: Option<String>,

    /// Build with optimizations, as --profile release
    #[arg(long, conflicts_with = "profile")]
    release: bool,

    /// Profile to build with
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,

    /// Features to build with
    #[arg(long, value_name = "FEATURE,...", value_delimiter = ',')]
    features: Vec<String>,
}

impl KindArgs {
    fn program(&self, name: Option<&OsString>) -> Program {
        let target = match (&self.bin, &self.example) {
            (Some(name), _) => Some((CargoKind::Bin, name)),
            (None, Some(name)) => Some((CargoKind::Example, name)),
            (None, None) => None,
        };
        if let Some((kind, name)) = target {
            let release = self.release.then(|| "release".to_owned());
            return Program::Cargo(CargoTarget {
                kind,
                package: self.package.clone(),
                profile: self.profile.clone().or(release),
                features: self.features.clone(),
                ..CargoTarget::bin(name)
            });
        }
        let name = name.cloned().unwrap_or_default();
        match (self.module, self.no_python) {
            (true, _) => Program::Module(name),
            (_, true) => Program::Executable(name),
            _ => Program::Auto(name),
        }
    }

    fn is_cargo(&self) -> bool {
        self.bin.is_some() || self.example.is_some()
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
struct OutputArgs {
    /// Keep each rank's output in files under a folder of the job in this one: attempt_N/LOCAL_RANK/
    /// stdout.log and stderr.log. Without --tee and --redirects, all output goes to the console, too
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Streams to write to log files and not to the console: 0 none, 1 stdout, 2 stderr, 3 both; or
    /// such a mode for some local ranks, as in 0:3,12:1
    #[arg(short = 'r', long, value_name = "MODES")]
    redirects: Option<StreamModes>,

    /// Streams to write to log files and to the console
    #[arg(short = 't', long, value_name = "MODES")]
    tee: Option<StreamModes>,

    /// Show only these local ranks on the console, as in 0,1
    #[arg(long, value_name = "RANKS")]
    local_ranks_filter: Option<LocalRanks>,

    /// Collect lines of stdout with one of these words, of all ranks under --tee, in
    /// filtered_stdout.log
    #[arg(long, value_name = "WORD,...")]
    duplicate_stdout_filters: Option<LineFilter>,

    /// The same for stderr, in filtered_stderr.log
    #[arg(long, value_name = "WORD,...")]
    duplicate_stderr_filters: Option<LineFilter>,

    /// Colour each rank's prefix: auto (on a terminal), always, never
    #[arg(long, value_name = "WHEN", default_value_t)]
    color: Color,

    /// Say nothing but what the ranks print, unless the job fails
    #[arg(short, long)]
    quiet: bool,
}

impl OutputArgs {
    fn options(&self) -> OutputOptions {
        OutputOptions {
            log_dir: self.log_dir.clone(),
            redirects: self.redirects.clone(),
            tee: self.tee.clone(),
            local_ranks_filter: self.local_ranks_filter.clone(),
            duplicate_stdout: self.duplicate_stdout_filters.clone(),
            duplicate_stderr: self.duplicate_stderr_filters.clone(),
            prefix: None,
            color: self.color,
            quiet: self.quiet,
        }
    }
}

/// Runs the job and gives its exit code.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    let (name, arguments) = match args.command.split_first() {
        // The program has a flag of its own: all of these are its arguments.
        _ if args.kind.is_cargo() => (None, args.command.as_slice()),
        Some((name, arguments)) => (Some(name), arguments),
        None => (None, &[][..]),
    };
    let options = LaunchOptions {
        // Without a number there are devices to count.
        nproc: args.nproc.unwrap_or(NprocSpec::Gpu),
        program: args.kind.program(name),
        args: arguments.to_vec(),
        threads_per_rank: args.threads_per_rank,
        shutdown_timeout: args.shutdown_timeout,
        output: args.output.options(),
        placement: PlacementOptions {
            devices: args.devices.clone(),
            bind: args.bind,
            virtual_local_rank: args.virtual_local_rank,
        },
    };
    let mut plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options))?;
    plan.prepare()?;
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
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --nproc auto --bin train --release -- --epochs 4";

const LONG_EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --nproc auto --bin train --release -- --epochs 4
  brigade launch --nproc gpu --bind numa --log-dir logs -m package.train
  brigade launch --nproc 2 -- sh -c 'echo rank $RANK of $WORLD_SIZE'

Exit codes:
  0         every rank succeeded
  N         the first rank that failed exited with N, or signal N - 128 killed it
  2         a wrong argument
  126, 127  the program cannot be run, or was not found
  1         the system could not start the job";
