//! `brigade launch`: the flags and their way to the launcher.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Error;
use brigade_launch::{
    BindMode, CargoKind, CargoTarget, Color, DeviceList, Endpoint, HostFacts, LaunchOptions,
    LaunchPlan, LineFilter, LocalRanks, Meeting, NodeRange, NprocSpec, OutputOptions, Patience,
    PlacementOptions, Program, Secret, StreamModes, agent, hosts,
};
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
    /// Number of ranks; or auto (one for each GPU, or for each core where there is none), gpu, cpu
    /// [default: the number of --devices]
    #[arg(long, value_name = "N", required_unless_present_any = ["devices", "hosts", "hostfile"])]
    nproc: Option<NprocSpec>,

    #[command(flatten)]
    hosts: HostsArgs,

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

    /// How often the job is started again after a failure
    #[arg(long, value_name = "N", default_value = "0")]
    max_restarts: u32,

    /// Number of hosts, or the fewest and the most that may take part
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1")]
    nnodes: NodeRange,

    /// Number of this host, from 0; all hosts meet at --master-addr and --master-port
    #[arg(long, value_name = "N", requires = "master_addr")]
    node_rank: Option<usize>,

    /// Name or address of host 0
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,

    /// Port at which host 0 waits for the others
    #[arg(long, value_name = "PORT", default_value = "29500")]
    master_port: u16,

    /// Where hosts that come and go meet; for etcd, its servers
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', conflicts_with = "node_rank")]
    rdzv_endpoint: Vec<Endpoint>,

    /// Name of the job, the same on all hosts
    #[arg(long, value_name = "ID")]
    rdzv_id: Option<String>,

    /// What the hosts meet through
    #[arg(long, value_name = "NAME", value_parser = ["static", "c10d", "etcd"])]
    rdzv_backend: Option<String>,

    /// More about the meeting: join_timeout=SECONDS, last_call_timeout=SECONDS, is_host=true|false
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = key_value)]
    rdzv_conf: Vec<(String, String)>,

    /// File with a secret that the agents of all hosts must have
    #[arg(long, value_name = "FILE")]
    rdzv_secret_file: Option<PathBuf>,

    /// Name or address under which other hosts reach this one
    #[arg(long, value_name = "HOST")]
    local_addr: Option<String>,

    /// ROLE_NAME of the ranks
    #[arg(long, value_name = "NAME", default_value = "default")]
    role: String,

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
    let (patience, serve) = conf(&args.rdzv_conf)?;
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
        max_restarts: args.max_restarts,
        nodes: args.nnodes,
        meeting: meeting(args, serve),
        run_id: args.rdzv_id.clone(),
        secret: args.rdzv_secret_file.as_deref().map(Secret::from_file).transpose()?,
        local_addr: args.local_addr.clone(),
        patience,
        role: args.role.clone(),
        output: args.output.options(),
        placement: PlacementOptions {
            devices: args.devices.clone(),
            bind: args.bind,
            virtual_local_rank: args.virtual_local_rank,
        },
    };
    if let Some(hosts) =
        args.hosts.options(args.nproc.is_some() || args.devices.is_some(), args.nnodes)?
    {
        return Ok(hosts::run(&options, &hosts)?.exit_code());
    }
    let mut plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options))?;
    plan.prepare()?;
    Ok(agent::run(&plan)?.exit_code())
}

fn meeting(args: &LaunchArgs, serve: Option<bool>) -> Meeting {
    let backend = args.rdzv_backend.as_deref();
    match (args.rdzv_endpoint.as_slice(), args.node_rank) {
        (endpoints, _) if backend == Some("etcd") => {
            Meeting::Etcd { endpoints: endpoints.to_vec() }
        }
        ([endpoint, ..], _) => Meeting::Elastic { endpoint: endpoint.clone(), serve },
        ([], Some(node_rank)) => Meeting::Static {
            node_rank,
            master_addr: args.master_addr.clone().unwrap_or_default(),
            master_port: args.master_port,
        },
        ([], None) => Meeting::OneHost,
    }
}

fn conf(pairs: &[(String, String)]) -> anyhow::Result<(Patience, Option<bool>)> {
    let (mut patience, mut serve) = (Patience::default(), None);
    for (key, value) in pairs {
        match key.as_str() {
            "join_timeout" | "timeout" => patience.join = seconds(value).map_err(Error::msg)?,
            "last_call_timeout" => patience.last_call = seconds(value).map_err(Error::msg)?,
            "is_host" => serve = Some(value.parse()?),
            _ => anyhow::bail!("--rdzv-conf {key}: not a setting of ours"),
        }
    }
    Ok((patience, serve))
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("KEY=VALUE is expected")?;
    Ok((key.to_owned(), value.to_owned()))
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
