//! `brigade launch`: the flags and their way to the launcher.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;

use brigade_config::plugins::{self, Kind, PluginArgument};
use brigade_config::{
    ChosenBy, ConfigError, Layer, Place, Source, TABLE, Variables, is_accelerates, load, rivals,
};
use brigade_launch::emit::JobFile;
use brigade_launch::events::EventsTarget;
use brigade_launch::hosts::{HostsFacts, HostsPlan, VariableFile};
use brigade_launch::{
    ForPython, HostFacts, LaunchError, LaunchOptions, LaunchPlan, Program, Secret, Surroundings,
    agent,
};
use clap::Args;

use crate::config::Usage;
use crate::emit::{self, EmitArgs};

use explain::Explanation;
use flags::SettingFlags;
use foreign::ForeignFlags;
pub(crate) use foreign::refusal;
use program::ProgramArgs;

mod explain;
mod flags;
mod foreign;
mod hosts;
mod meeting;
mod options;
mod program;

/// Run a program as several ranks, on this host or on many
///
/// Starts the program N times and tells each its place through torchrun's environment variables
/// (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Brigade programs and PyTorch
/// scripts read them without further arguments.
///
/// Every line of output is prefixed with its rank. When a rank fails, the others are stopped, its
/// last lines are shown, and its exit code becomes the launcher's. Nothing is left running, even
/// when the launcher itself is killed. The ranks' standard input is empty, except that a job of one
/// rank on a terminal has that terminal (--raw).
///
/// What no flag says, a variable does (--max-restarts is BRIGADE_MAX_RESTARTS), else the settings
/// file, else a default. Flags of torchrun and `accelerate launch` are taken under their own names,
/// with either kind of dash; --no-NAME unsets a switch that a file or a variable has set.
#[derive(Debug, Args)]
#[command(override_usage = USAGE, after_help = EXAMPLES, after_long_help = LONG_EXAMPLES)]
pub(crate) struct LaunchArgs {
    /// Settings to use instead of the user's own; a file of Accelerate's ends in .yaml or .json
    #[arg(long, value_name = "FILE", aliases = ["config-file", "config_file"])]
    config: Option<PathBuf>,

    /// Print what would be done, and where each value comes from, and start nothing
    #[arg(long)]
    explain: bool,

    /// Explain in JSON
    #[arg(long, requires = "explain", hide_short_help = true)]
    json: bool,

    #[command(flatten)]
    program: ProgramArgs,

    #[command(flatten)]
    flags: SettingFlags,

    /// Variable for every rank; NAME alone, or PREFIX_*, is handed on to the hosts of --hosts as it is
    /// here (NCCL_*, OMP_*, TORCH_*, PYTHON* and their kin are handed on anyway). A VALUE is seen by
    /// every user of this machine (`ps`): for a token, export it and give its NAME alone
    #[arg(long, value_name = "NAME[=VALUE]", help_heading = "What to run", hide_short_help = true)]
    env: Vec<String>,

    #[command(flatten)]
    emit: EmitArgs,

    #[command(flatten)]
    foreign: ForeignFlags,
}

/// Runs the job and gives its exit code.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    let variables = Variables::gather();
    let (mut layers, file) = args.layers(&variables)?;
    if let Some(target) = args.emit.emit {
        let (job, unused) = args.job_file(&mut layers, &variables)?;
        if layers.settings.quiet != Some(true) {
            say_lines(file_in_use(file.as_ref(), &layers, unused.as_deref()));
        }
        say_warnings(&layers);
        emit::print(&job, target, io::stdout().lock())?;
        return Ok(0);
    }
    let (options, unused) = options::options(&mut layers, &args.program, &variables)?;
    let hosts = hosts::options(&layers)?;
    let job = match hosts {
        // Each host decides for itself: the program may be there and not here.
        Some(hosts) => {
            let plan =
                HostsFacts::gather().and_then(|facts| HostsPlan::resolve(&options, &hosts, &facts));
            Job::OnHosts(Box::new(plan.map_err(LaunchError::from)?))
        }
        None => Job::Here(Box::new(LaunchPlan::resolve(&options, &HostFacts::gather(&options))?)),
    };
    if args.explain {
        let explanation =
            Explanation { layers: &layers, file: file.as_ref(), options: &options, job: &job };
        explanation.write(args.json, io::stdout().lock())?;
        return Ok(0);
    }
    if !options.output.quiet {
        say_lines(file_in_use(file.as_ref(), &layers, unused.as_deref()));
        say_lines(variable_files_in_use(&job));
    }
    say_warnings(&layers);
    let outcome = match job {
        Job::OnHosts(plan) => brigade_launch::hosts::run(&options, &plan)?,
        Job::Here(mut plan) => {
            plan.prepare()?;
            agent::run(&plan)?
        }
    };
    Ok(outcome.exit_code())
}

fn say_lines(lines: impl IntoIterator<Item = String>) {
    for line in lines {
        let _ = io::stderr().write_all(format!("brigade: {line}\n").as_bytes());
    }
}

fn say_warnings(layers: &Layer) {
    for note in layers.notes.iter().filter(|note| note.is_warning) {
        let line = match note.source {
            Source::Scheduler(_) => format!("brigade: note: {}\n", note.text),
            _ => format!("brigade: warning: {note}\n"),
        };
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Names the file of Accelerate's that has a say in the job, though its command line does not name it.
fn file_in_use(
    file: Option<&Place>,
    layers: &Layer,
    unused_plugins: Option<&str>,
) -> Option<String> {
    let place = file.filter(|place| {
        place.chosen_by != ChosenBy::Flag
            && is_accelerates(&place.path)
            && layers.has_source_in(&place.path)
    })?;
    let reason = place.chosen_by.reason();
    let mut line = format!("settings are from {} ({reason})", place.path.display());
    if let Some(unused) = unused_plugins {
        line.push_str(&format!("; its {unused} is for Python programs and not used"));
    }
    Some(line)
}

/// The same for DeepSpeed's files of variables.
fn variable_files_in_use(job: &Job) -> Vec<String> {
    let Job::OnHosts(plan) = job else { return Vec::new() };
    let line = |VariableFile { path, names }: &VariableFile| {
        format!("the hosts get {} from {} (DeepSpeed's)", names.join(", "), path.display())
    };
    plan.variable_files.iter().map(line).collect()
}

/// What this command starts.
enum Job {
    /// The ranks of this host.
    Here(Box<LaunchPlan>),
    /// Agents on a list of hosts.
    OnHosts(Box<HostsPlan>),
}

impl LaunchArgs {
    /// All layers, one over the other, and the file that one of them comes from.
    fn layers(&self, variables: &Variables) -> anyhow::Result<(Layer, Option<Place>)> {
        let loaded = load(self.config.as_deref(), variables)?;
        let mut flags = self.flags.0.clone();
        self.foreign.add_to(&mut flags)?;
        self.variables(&mut flags)?;
        let mut given = flags.over(loaded.layer);
        if self.emit.emit.is_none() && !self.foreign.is_standalone() {
            surround(&mut given)?;
        }
        let mut layers = rivals::settle(given)?;
        self.foreign.share_out(&mut layers).map_err(ConfigError::Contradiction)?;
        Ok((layers, loaded.file))
    }

    /// The job that `--emit` writes a file for: every setting is in it, whichever layer it is from,
    /// because the launchers in the job have neither this environment nor, perhaps, these files. With
    /// the plugins that a file names and that are not used.
    fn job_file(
        &self,
        layers: &mut Layer,
        variables: &Variables,
    ) -> anyhow::Result<(JobFile, Option<String>)> {
        if let Some(name) = SAID_BY_THE_SCHEDULER.iter().find(|it| is_flag(layers, it)) {
            return Err(Usage(format!("--emit with --{name}: the scheduler says that")).into());
        }
        if self.program.is_cargo() {
            let reason = "--emit without a program: job files do not build it; build it first, and name the program";
            return Err(Usage(reason.to_owned()).into());
        }
        let (for_python, unused) = options::plugins(layers, &self.program, variables)?;
        let program = self.program.program(variables)?;
        if let Some(ForPython { what, .. }) = &for_python
            && program.is_python_here() == Some(false)
        {
            let program = self.program.words().first().cloned().unwrap_or_default();
            return Err(LaunchError::ForPython { what: what.clone(), program }.into());
        }
        let mut flags = settings_as_flags(layers);
        if for_python.is_some() {
            flags.extend(plugins_as_flags(layers));
        }
        flags.extend(match program {
            Program::Module(_) => Some("--module".into()),
            Program::Executable(_) => Some("--no-python".into()),
            _ => None,
        });
        let settings = &layers.settings;
        let nodes = settings.nnodes.unwrap_or_default();
        // A file that was named is one that the launchers in the job read.
        let secret = match settings.rdzv_secret_file {
            None if nodes.max > 1 => Some(Secret::generate()?),
            _ => None,
        };
        let timeout = settings.shutdown_timeout;
        let job = JobFile {
            nodes: nodes.min..=nodes.max,
            nproc: settings.text("nproc"),
            shutdown_timeout: timeout.unwrap_or_else(|| LaunchOptions::default().shutdown_timeout),
            env: settings.env.clone().into_iter().collect(),
            secret,
            ..self.emit.job_file(flags, self.program.words())
        };
        Ok((job, unused))
    }

    /// `--env`: a variable with a value is for every rank, one without is handed on to hosts.
    fn variables(&self, flags: &mut Layer) -> Result<(), ConfigError> {
        let source = || Source::Flag("env".to_owned());
        let mut names: Vec<String> =
            flags.settings.env_pass.iter().flat_map(|it| it.0.clone()).collect();
        let before = names.len();
        for text in &self.env {
            match text.split_once('=') {
                Some((name, value)) => flags.set_env(name, value, source())?,
                None => names.push(text.clone()),
            }
        }
        if names.len() > before {
            flags.set("env-pass", &names.join(","), source())?;
        }
        Ok(())
    }
}

/// What the scheduler around this process says of the job, where nobody else does. Whoever says by
/// a flag how the hosts meet is believed, whatever the scheduler thinks.
fn surround(given: &mut Layer) -> anyhow::Result<()> {
    let by_user = |name: &&str| match given.source(name) {
        Some(Source::Flag(_)) => true,
        Some(Source::Variable(variable)) => variable.starts_with("BRIGADE_"),
        _ => false,
    };
    if MEETING.iter().any(by_user) {
        return Ok(());
    }
    let surroundings = Surroundings::here().map_err(LaunchError::from)?;
    for (name, text, source) in surroundings.settings() {
        if !matches!(given.source(name), Some(Source::Flag(_) | Source::Variable(_))) {
            given.set(name, &text, Source::Scheduler(source.to_owned()))?;
        }
    }
    if let Some(note) = surroundings.note {
        given.warn(Source::Scheduler("scheduler".to_owned()), note);
    }
    Ok(())
}

/// Every setting that somebody has made, as the flag that makes it. Those of another kind of job are
/// left out with a warning.
fn settings_as_flags(layers: &mut Layer) -> Vec<OsString> {
    let (mut flags, mut left_out, mut descriptor) = (Vec::new(), Vec::new(), None);
    for setting in TABLE.iter().filter(|it| layers.is_given(it.name)) {
        let Some(text) = layers.settings.text(setting.name) else { continue };
        if matches!(&layers.settings.events, Some(EventsTarget::Descriptor(_)))
            && setting.name == EVENTS
        {
            descriptor = Some(text);
        } else if SAID_BY_THE_SCHEDULER.contains(&setting.name) || OF_A_LIST.contains(&setting.name)
        {
            left_out.push((setting.name, text));
        } else if setting.name != NNODES {
            flags.extend(as_flag(setting.name, text, setting.is_switch));
        }
    }
    for (name, text) in left_out {
        let source = layers.source(name).cloned().unwrap_or(Source::Default);
        layers.warn(
            source,
            format!("{name} {text} is not in the job file: the scheduler has the hosts"),
        );
    }
    if let Some(text) = descriptor {
        let source = layers.source(EVENTS).cloned().unwrap_or(Source::Default);
        layers.warn(
            source,
            format!(
                "events {text} is not in the job file: a job has no descriptor of this process"
            ),
        );
    }
    flags
}

/// The same of the arguments of Accelerate's plugins.
fn plugins_as_flags(layers: &Layer) -> Vec<OsString> {
    let flag = |(argument, text): (&PluginArgument, String)| {
        let is_switch = argument.kind == Kind::Switch;
        (!is_switch || text == "true").then(|| as_flag(argument.name, text, is_switch))
    };
    plugins::given(layers).into_iter().filter_map(flag).flatten().collect()
}

/// `--name VALUE` in two words, `--name` or `--no-name` for a switch.
fn as_flag(name: &str, text: String, is_switch: bool) -> Vec<OsString> {
    match (is_switch, text.as_str()) {
        (true, "true") => vec![format!("--{name}").into()],
        (true, _) => vec![format!("--no-{name}").into()],
        // It would be taken for a flag.
        (false, text) if text.starts_with('-') => vec![format!("--{name}={text}").into()],
        (false, _) => vec![format!("--{name}").into(), text.into()],
    }
}

fn is_flag(layers: &Layer, name: &str) -> bool {
    matches!(layers.source(name), Some(Source::Flag(_)))
}

/// Settings by which a user says how hosts meet.
const MEETING: [&str; 5] = ["nnodes", "node-rank", "hosts", "hostfile", "rdzv-endpoint"];
/// Settings that a job file has no place for.
const SAID_BY_THE_SCHEDULER: [&str; 6] =
    ["node-rank", "master-addr", "master-port", "hosts", "hostfile", "rdzv-endpoint"];

/// Settings of a job whose hosts are started from here.
const OF_A_LIST: [&str; 6] = ["include", "exclude", "ssh-command", "workdir", "sync", "env-pass"];
const NNODES: &str = "nnodes";
const EVENTS: &str = "events";

const USAGE: &str = "brigade launch [OPTIONS] [--] <PROGRAM> [ARGS]...";

const EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --nproc 2 --explain ./train";

const LONG_EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --nproc 2 --bin train -- --epochs 4
  brigade launch --nproc 2 -- sh -c 'echo rank $RANK of $WORLD_SIZE'
  brigade launch --nproc 2 --explain ./train
  brigade launch --hosts node1:4,node2:4 ./train
  brigade launch --nproc 4 --nnodes 2 --node-rank 0 --master-addr node1 ./train
  brigade launch --nproc 4 --nnodes 2 --emit slurm ./train > train.sbatch
  brigade launch --nproc 4 --nnodes 1:4 --max-restarts 3 --rdzv-endpoint node1:29400 ./train

Exit codes:
  0         every rank succeeded
  N         the first rank that failed exited with N, or signal N - 128 killed it
  2         a wrong argument, variable or settings file
  126, 127  the program cannot be run, or was not found
  1         the system could not start the job, or a host of it was lost";
