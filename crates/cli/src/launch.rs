//! `brigade launch`: passes its flags to the launcher. [`JobArgs`] are also those of `brigade emit`.

use std::io;
use std::path::PathBuf;

use brigade_config::{
    ChosenBy, ConfigError, Layer, SettingsPath, Source, Variables, conflicts, is_accelerates, load,
};
use brigade_launch::hosts::{HostsError, HostsPlan};
use brigade_launch::{HostFacts, LaunchError, LaunchPlan, Surroundings, agent};
use brigade_rank_env::env;
use brigade_ssh::{LocalFacts, VariableFile};
use clap::Args;

use crate::output;

use explain::Explanation;
use flags::SettingFlags;
use foreign::ForeignFlags;
pub(crate) use foreign::refusal;
use options::Resolved;
use program::ProgramArgs;

mod explain;
mod flags;
mod foreign;
mod hosts;
mod options;
mod program;
mod rendezvous;
pub(crate) mod settings_as_flags;
mod sharding;

/// Run a program as several ranks, on this host or on many
///
/// Starts the program once per rank, with torchrun's environment variables (RANK, WORLD_SIZE,
/// LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Brigade programs and PyTorch scripts read them without
/// further arguments. Without PROGRAM, the binary of the Cargo project in this folder is built and run.
///
/// Every line of output is prefixed with its rank. When a rank fails, the others are stopped, the last lines of the
/// failed rank are shown, and its exit code becomes the launcher's. Nothing is left running, even when the launcher
/// itself is killed. The ranks' standard input is empty, except that a job of one rank on a terminal has that terminal
/// (--raw).
///
/// A setting is taken from its flag, else from its variable (BRIGADE_MAX_RESTARTS for --max-restarts), else from the
/// settings file; otherwise it has its default. Flags of torchrun and `accelerate launch` are accepted under their own
/// names, with hyphens or underscores.
///
/// `brigade emit` takes the same options and prints a job file for Slurm or Kubernetes.
#[derive(Debug, Args)]
#[command(override_usage = USAGE, after_help = EXAMPLES, after_long_help = LONG_EXAMPLES)]
pub(crate) struct LaunchArgs {
    /// Print the ranks that would be started, and the source of each value
    #[arg(long)]
    explain: bool,

    /// Explain in JSON
    #[arg(long, requires = "explain", hide_short_help = true)]
    json: bool,

    #[command(flatten)]
    job: JobArgs,
}

// No doc comment: as a flattened one it would become the help's first paragraph.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// Settings file, in place of the user's own
    ///
    /// A name that ends in .yaml or .json is a file of Accelerate
    #[arg(long, value_name = "FILE", aliases = ["config-file", "config_file"])]
    config: Option<PathBuf>,

    #[command(flatten)]
    program: ProgramArgs,

    #[command(flatten)]
    flags: SettingFlags,

    /// Set a variable for every rank
    ///
    /// Every user of this machine can read the value while the command runs (`ps`). For a token, export the variable
    /// instead, and with --hosts pass its name to --env-pass
    #[arg(long, value_name = "NAME=VALUE", help_heading = "What to run", hide_short_help = true)]
    #[arg(value_parser = variable)]
    env: Vec<(String, String)>,

    #[command(flatten)]
    foreign: ForeignFlags,
}

/// Runs the job and returns its exit code.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    let variables = Variables::gather();
    let (mut layers, file) = args.job.layers(&variables, true)?;
    let Resolved { options, hosts, unused, sharding } =
        options::options(&mut layers, &args.job.program, &variables)?;
    let job = match hosts {
        // Checked on each host: the program may exist there and not here.
        Some(hosts) => {
            let plan = LocalFacts::gather()
                .map_err(HostsError::from)
                .and_then(|facts| HostsPlan::resolve(&options, &hosts, &facts));
            Job::OnHosts(Box::new(plan.map_err(LaunchError::from)?))
        }
        None => Job::Here(Box::new(LaunchPlan::resolve(&options, &HostFacts::gather(&options))?)),
    };
    if args.explain {
        let explanation = Explanation {
            layers: &layers,
            file: file.as_ref(),
            options: &options,
            job: &job,
            sharding: sharding.as_ref(),
        };
        explanation.write(args.json, output::Answer::new(io::stdout().lock()))?;
        return Ok(0);
    }
    if !options.output.quiet {
        say_lines(file_in_use(file.as_ref(), &layers, unused.as_deref()));
        say_lines(variable_files_in_use(&job));
        say_lines(sharding.iter().flat_map(|it| &it.notes).map(|note| format!("note: {note}")));
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
        output::say(&line);
    }
}

fn say_warnings(layers: &Layer) {
    for note in layers.notes.iter().filter(|note| note.is_warning) {
        output::say(&match note.source {
            Source::Scheduler(_) => format!("note: {}", note.text),
            _ => format!("warning: {note}"),
        });
    }
}

/// Names Accelerate's settings file if it is used without being named on the command line.
fn file_in_use(
    file: Option<&SettingsPath>,
    layers: &Layer,
    unused_plugins: Option<&str>,
) -> Option<String> {
    let place = file.filter(|place| {
        place.chosen_by != ChosenBy::Flag
            && is_accelerates(&place.path)
            && (layers.has_source_in(&place.path) || unused_plugins.is_some())
    })?;
    let reason = place.chosen_by.reason();
    let mut line = format!("settings are from {} ({reason})", place.path.display());
    if let Some(unused) = unused_plugins {
        line.push_str(&format!("; its {unused} is for Python programs and not used"));
    }
    Some(line)
}

/// Returns the names of DeepSpeed's files of variables in use.
fn variable_files_in_use(job: &Job) -> Vec<String> {
    let Job::OnHosts(plan) = job else { return Vec::new() };
    let line = |VariableFile { path, names }: &VariableFile| {
        format!("the hosts get {} from {} (DeepSpeed's)", names.join(", "), path.display())
    };
    plan.variable_files.iter().map(line).collect()
}

/// Processes that this command starts.
enum Job {
    /// Ranks of this host.
    Here(Box<LaunchPlan>),
    /// Agents on a list of hosts.
    OnHosts(Box<HostsPlan>),
}

impl JobArgs {
    /// Merges all layers, and returns the settings file among them. If the job is started here and now, they include
    /// what the scheduler around this process provides.
    fn layers(
        &self,
        variables: &Variables,
        is_started: bool,
    ) -> anyhow::Result<(Layer, Option<SettingsPath>)> {
        let loaded = load(self.config.as_deref(), variables)?;
        let mut flags = self.flags.0.clone();
        self.foreign.add_to(&mut flags)?;
        self.variables(&mut flags)?;
        let mut given = flags.over(loaded.layer);
        if is_started && !self.foreign.is_standalone() {
            surround(&mut given)?;
        }
        let mut layers = conflicts::resolve(given)?;
        if is_started {
            self.choose_port(&mut layers, variables)?;
        }
        self.foreign.share_out(&mut layers).map_err(ConfigError::Contradiction)?;
        Ok((layers, loaded.file))
    }

    /// Chooses the port of the ranks' store on one host: torchrun's flag for a standalone job leaves it free; without
    /// another setting it is `MASTER_PORT`, unless that is from a job around this launcher.
    fn choose_port(&self, layers: &mut Layer, variables: &Variables) -> Result<(), ConfigError> {
        let is_given = layers.is_given("master-port");
        let by_variable = variables.value(STANDALONE).is_some_and(|it| it == "1");
        if by_variable {
            layers.note(Source::Variable(STANDALONE.to_owned()), foreign::ALONE);
        }
        if self.foreign.is_standalone() || by_variable {
            if let Some(source) = layers.source("master-port").filter(|_| is_given).cloned() {
                layers.reset("master-port");
                layers.note(source, "master-port is overridden by standalone, as in torchrun");
            }
            return Ok(());
        }
        let is_one_host = layers.settings.nnodes.unwrap_or_default().max == 1
            && !layers.is_given("hosts")
            && !layers.is_given("hostfile");
        let of_an_outer_job = [env::RANK, env::TORCHELASTIC_RUN_ID, env::BRIGADE_AGENT];
        let is_within_a_job = of_an_outer_job.iter().any(|it| variables.value(it).is_some());
        match variables.value(env::MASTER_PORT) {
            Some(port) if is_one_host && !is_given && !is_within_a_job => {
                let source = Source::Variable(env::MASTER_PORT.to_owned());
                layers.set("master-port", &port.to_string_lossy(), source)
            }
            _ => Ok(()),
        }
    }

    /// Adds the variables of `--env`.
    fn variables(&self, flags: &mut Layer) -> Result<(), ConfigError> {
        for (name, value) in &self.env {
            flags.set_env(name, value, Source::Flag("env".to_owned()))?;
        }
        Ok(())
    }
}

/// Parses a variable of the form `NAME=VALUE`.
fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => Err(format!(
            "expected NAME=VALUE; to hand a variable of this environment on to hosts, use --env-pass {text}"
        )),
    }
}

/// Adds the scheduler's description of the job where no other setting has it. Flags of the user that define how the
/// hosts meet take precedence over the scheduler.
fn surround(given: &mut Layer) -> anyhow::Result<()> {
    let by_user = |name: &&str| match given.source(name) {
        Some(Source::Flag(_)) => true,
        Some(Source::Variable(variable)) => variable.starts_with("BRIGADE_"),
        _ => false,
    };
    if RENDEZVOUS.iter().any(by_user) {
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

/// Settings that define how hosts meet.
const RENDEZVOUS: [&str; 5] = ["nnodes", "node-rank", "hosts", "hostfile", "rdzv-endpoint"];
/// Variable of torchrun for a standalone job.
const STANDALONE: &str = "PET_STANDALONE";
const USAGE: &str = "brigade launch [OPTIONS] [--] [PROGRAM] [ARGS]...";

const EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 --release
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --hosts node1:4,node2:4 --explain ./train";

const LONG_EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 --release
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py --lr 0.1
  brigade launch --nproc 2 --bin train -- --epochs 4
  brigade launch --nproc 2 -- sh -c 'echo rank $RANK of $WORLD_SIZE'
  brigade launch --nproc 2 --explain ./train
  brigade launch --hosts node1:4,node2:4 ./train
  brigade launch --nproc 4 --nnodes 2 --node-rank 0 --master-addr node1 ./train
  brigade launch --nproc 4 --nnodes 1:4 --max-restarts 3 --rdzv-endpoint node1:29400 ./train

Exit codes:
  0         every rank succeeded
  N         the first rank that failed exited with N, or signal N - 128 killed it
  2         a wrong argument, variable or settings file
  126, 127  the program cannot be run, or was not found
  1         the system could not start the job, or a host of it was lost";
