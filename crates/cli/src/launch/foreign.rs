//! Flags of torchrun and Accelerate that correspond to no single setting.
//!
//! There are four kinds: flags with a meaning of their own, flags that become variables for Python programs, flags
//! without effect, and refused flags. Flags of job files are refused, too.

use std::ffi::OsString;

use brigade_config::plugin_arguments::{ARGUMENTS, Plugin, PluginArgument};
use brigade_config::{ConfigError, Layer, Note, Source};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

/// Values of these flags.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignFlags {
    /// Accelerate's number of ranks on all hosts.
    num_processes: Option<usize>,
    /// torchrun's switch for a standalone job.
    standalone: bool,
    /// Accelerate's switch that maps to a mode of the setting `bind`.
    affinity: bool,
    /// Accelerate's switch of torch_xla's precision.
    downcasts: bool,
    /// Signals that are passed to the ranks.
    signals: Option<String>,
    /// Arguments of Accelerate's plugins.
    plugins: Vec<(&'static PluginArgument, String)>,
    /// Flags without effect that were given.
    idle: Vec<&'static Idle>,
}

/// Flag without effect.
#[derive(Debug)]
struct Idle {
    name: &'static str,
    takes_value: bool,
    reason: &'static str,
}

impl ForeignFlags {
    /// Returns `true` for torchrun's `--standalone`: one host, whatever the environment.
    pub(super) fn is_standalone(&self) -> bool {
        self.standalone
    }

    /// Adds the values to the other flags.
    ///
    /// # Errors
    /// Fails if flags exclude each other, or a value is not valid.
    pub(super) fn add_to(&self, flags: &mut Layer) -> Result<(), ConfigError> {
        for (argument, text) in &self.plugins {
            let source = Source::Flag(argument.name.to_owned());
            flags.set_plugin(argument.name, text, source)?;
        }
        self.choose_plugin(flags)?;
        if self.affinity && flags.settings.bind.is_none() {
            let _ = flags.set("bind", "numa", Source::Flag(AFFINITY.to_owned()));
        }
        if self.downcasts {
            let source = Source::Flag(DOWNCAST.to_owned());
            flags.set_env("ACCELERATE_DOWNCAST_BF16", "True", source)?;
        }
        if let Some(signals) = &self.signals {
            let others: Vec<&str> =
                signals.split(',').map(str::trim).filter(|it| !HANDLED.contains(it)).collect();
            let is_warning = !others.is_empty();
            let text = if is_warning {
                format!("{} is not honoured: {SIGNALS_THAT_REACH}", others.join(","))
            } else {
                "has no effect: these signals reach the ranks anyway".to_owned()
            };
            flags.notes.push(Note { source: Source::Flag(SIGNALS.to_owned()), text, is_warning });
        }
        if self.standalone {
            flags.note(Source::Flag(STANDALONE.to_owned()), ALONE);
        }
        for idle in &self.idle {
            let text = format!("has no effect: {}", idle.reason);
            flags.note(Source::Flag(idle.name.to_owned()), text);
        }
        Ok(())
    }

    /// Turns off plugins of a file if a flag chooses another plugin, or none.
    fn choose_plugin(&self, flags: &mut Layer) -> Result<(), ConfigError> {
        let is_given = |name: &str| flags.settings.accelerate.contains_key(name);
        let is_multi_gpu = self.idle.iter().any(|it| it.name == MULTI_GPU);
        let exclusive = [Plugin::Fsdp, Plugin::DeepSpeed].into_iter().filter_map(Plugin::switch);
        let mut chosen: Vec<&str> = exclusive.filter(|it| is_given(it)).collect();
        chosen.extend(is_multi_gpu.then_some(MULTI_GPU));
        if let [one, other, ..] = chosen.as_slice() {
            return Err(ConfigError::Contradiction(format!(
                "--{one} and --{other} exclude each other, as in Accelerate"
            )));
        }
        chosen.extend(Plugin::Megatron.switch().filter(|it| is_given(it)));
        let Some(first) = chosen.first() else { return Ok(()) };
        let source = Source::Flag((*first).to_owned());
        for switch in Plugin::switches() {
            if !flags.settings.accelerate.contains_key(switch) {
                flags.set_plugin(switch, "false", source.clone())?;
            }
        }
        Ok(())
    }

    /// Divides Accelerate's total number of ranks among the hosts, once their number is known.
    ///
    /// # Errors
    /// Fails if the number of hosts does not divide it.
    pub(super) fn share_out(&self, layers: &mut Layer) -> Result<(), String> {
        let Some(total) = self.num_processes else { return Ok(()) };
        let source = Source::Flag(TOTAL.to_owned());
        if let Some(Source::Flag(_)) = layers.source("nproc") {
            return Err(format!(
                "--nproc and --{TOTAL} exclude each other: one counts the ranks of each host, the other those of all"
            ));
        }
        if layers.is_given("hosts") || layers.is_given("hostfile") {
            return Err(format!(
                "--{TOTAL} counts the ranks of all hosts: with a list of hosts, give each its number, as in node1:4"
            ));
        }
        let nodes = layers.settings.nnodes.unwrap_or_default();
        if nodes.min != nodes.max {
            return Err(format!(
                "--{TOTAL} counts the ranks of all hosts, of which there may be {} to {}: give --nproc, the number on each",
                nodes.min, nodes.max
            ));
        }
        let hosts = nodes.max;
        if total % hosts != 0 {
            return Err(format!(
                "--{TOTAL} {total} cannot be shared out among {hosts} hosts: it counts the ranks of all of them, and each has the same number"
            ));
        }
        layers
            .set("nproc", &(total / hosts).to_string(), source.clone())
            .map_err(|error| error.to_string())?;
        if hosts > 1 {
            let text = format!("{total} ranks on {hosts} hosts are {} on each", total / hosts);
            layers.note(source, text);
        }
        Ok(())
    }
}

/// Explains why an unknown flag is refused, if it is one of Accelerate, or one of job files, which `brigade emit`
/// prints. `args` are the arguments of this process, without its name.
pub(crate) fn refusal(error: &Error, args: impl Iterator<Item = OsString>) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = flag.split('=').next().unwrap_or(flag);
    let name = flag.trim_start_matches('-').replace('_', "-");
    let args: Vec<String> = args.map(|it| it.to_string_lossy().into_owned()).collect();
    if let Some(reason) = moved_to_emit(&name, &args).or_else(|| number_of_ranks(flag, &args)) {
        return Some(reason);
    }
    let begins = |prefix: &&str| match prefix.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == **prefix,
    };
    let (_, reason) = REFUSED.iter().find(|(names, _)| names.iter().any(&begins))?;
    Some(format!("{flag} is not possible: {reason}"))
}

/// Names the command that prints job files, for `brigade launch --emit slurm` and the like.
fn moved_to_emit(flag: &str, args: &[String]) -> Option<String> {
    if flag != EMIT && !JOB_FILE_FLAGS.contains(&flag) {
        return None;
    }
    if args.first().is_none_or(|command| command != "launch") {
        return None;
    }
    let value = args.iter().enumerate().find_map(|(i, arg)| {
        let rest = arg.strip_prefix("--emit")?;
        rest.strip_prefix('=')
            .or_else(|| args.get(i + 1).filter(|_| rest.is_empty()).map(|value| &**value))
    });
    let command = match value {
        Some(value @ ("slurm" | "k8s" | "jobset")) => format!("`brigade emit {value}`"),
        Some("pytorchjob") => "`brigade emit k8s`".to_owned(),
        _ => "`brigade emit slurm`, `brigade emit k8s` or `brigade emit jobset`".to_owned(),
    };
    Some(format!(
        "--{flag} is not an option of `brigade launch`: {command} prints a job file, with the same \
         options for the job"
    ))
}

/// Suggests `--nproc` for mpirun's flags of the number of ranks: `-n 4`, `-n4`, `-np 4` and `--np=4`.
fn number_of_ranks(flag: &str, args: &[String]) -> Option<String> {
    if !["-n", "--n", "--np"].contains(&flag) {
        return None;
    }
    let starts = args.first().is_some_and(|it| ["launch", "test", "emit"].contains(&it.as_str()));
    let place = args.iter().position(|it| it.starts_with(flag)).filter(|_| starts)?;
    let word = args[place].trim_start_matches('-').trim_start_matches('n').trim_start_matches('p');
    let spelled = if args[place].starts_with("-np") { "-np" } else { flag };
    let number = match word.trim_start_matches('=') {
        "" => args.get(place + 1).map_or("N", String::as_str),
        joined => joined,
    };
    let number = if number.parse::<u64>().is_ok() { number } else { "N" };
    Some(format!(
        "{spelled} is a flag of mpirun: give --nproc {number}, the number of ranks on each host"
    ))
}

impl Args for ForeignFlags {
    fn augment_args(command: Command) -> Command {
        let total = foreign(TOTAL)
            .value_name("N")
            .help("Accelerate's count of the ranks of all hosts together")
            .value_parser(clap::value_parser!(u64).range(1..));
        let standalone = foreign(STANDALONE).action(ArgAction::SetTrue).hide(true);
        let affinity =
            foreign(AFFINITY).action(ArgAction::SetTrue).help("Accelerate's name for --bind numa");
        let downcast = foreign(DOWNCAST).action(ArgAction::SetTrue).hide(true);
        let signals = foreign(SIGNALS)
            .value_name("SIGNAL,..")
            .help("Ignored; the forwarded signals are always SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2");
        let command = command.args([total, standalone, affinity, downcast, signals]);
        let command = IDLE.iter().fold(command, |command, idle| {
            let arg = foreign(idle.name).hide(true);
            command.arg(if idle.takes_value { arg } else { arg.action(ArgAction::SetTrue) })
        });
        ARGUMENTS.iter().fold(command, |command, argument| {
            let arg = foreign(argument.name).hide(true);
            command.arg(if argument.kind.is_switch() {
                arg.action(ArgAction::SetTrue)
            } else {
                arg.allow_negative_numbers(true).value_parser(|text: &str| argument.parse(text))
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn foreign(name: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .alias(name.replace('-', "_"))
        .help_heading(COMPATIBILITY)
        .hide_short_help(true)
}

impl FromArgMatches for ForeignFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let is_there = |idle: &&Idle| {
            matches.value_source(idle.name) == Some(clap::parser::ValueSource::CommandLine)
        };
        let plugins = ARGUMENTS.iter().filter_map(|argument| {
            let text = if argument.kind.is_switch() {
                matches.get_flag(argument.name).then(|| "true".to_owned())
            } else {
                matches.get_one::<String>(argument.name).cloned()
            };
            Some((argument, text?))
        });
        let total = matches.get_one::<u64>(TOTAL).and_then(|it| usize::try_from(*it).ok());
        Ok(Self {
            num_processes: total,
            standalone: matches.get_flag(STANDALONE),
            affinity: matches.get_flag(AFFINITY),
            downcasts: matches.get_flag(DOWNCAST),
            signals: matches.get_one::<String>(SIGNALS).cloned(),
            plugins: plugins.collect(),
            idle: IDLE.iter().filter(is_there).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Heading of flags for compatibility with torchrun and Accelerate.
pub(super) const COMPATIBILITY: &str = "Compatibility";
const MULTI_GPU: &str = "multi-gpu";
const TOTAL: &str = "num-processes";
const STANDALONE: &str = "standalone";
/// Help text of `--standalone`.
pub(super) const ALONE: &str =
    "each attempt has a free port, whatever the values of --master-port and MASTER_PORT";
const AFFINITY: &str = "enable-cpu-affinity";
const DOWNCAST: &str = "downcast-bf16";
const SIGNALS: &str = "signals-to-handle";
const HANDLED: [&str; 6] = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"];
const SIGNALS_THAT_REACH: &str =
    "SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 reach the ranks";

macro_rules! idle {
    ($($name:tt $takes_value:literal $reason:literal;)*) => {
        &[$(Idle { name: $name, takes_value: $takes_value, reason: $reason },)*]
    };
}

const IDLE: &[Idle] = idle! {
    MULTI_GPU false "--nproc sets the number of ranks";
    "same-network" false "hosts meet at the address that they are given";
    "monitor-interval" true "the end of a rank is noticed at once";
    "start-method" true "ranks are programs, which are always started anew";
    "event-log-handler" true "there are no event handlers";
    "logs-specs" true "log files have torchrun's own layout";
    "run-path" false "a rank's Python runs one script";
    "use-env" false "ranks always read their rank from the environment";
    "main-training-function" true "each rank runs the whole program";
    "tpu" false "TPUs are found without it";
    "no-tpu-cluster" false "hosts are reached over ssh, not by gcloud";
};

const EMIT: &str = "emit";
/// Options of `brigade emit` alone.
const JOB_FILE_FLAGS: [&str; 7] =
    ["account", "cpus-per-node", "gpus-per-node", "image", "job-name", "partition", "time-limit"];

/// Prefixes of Accelerate's flags that are refused, with the reason.
const REFUSED: &[(&[&str], &str)] = &[
    (&["tpu-*", "vm"], "Brigade does not start jobs by gcloud: name the hosts with --hosts"),
    (&["aws-*"], "Brigade does not start jobs on Amazon SageMaker: use `accelerate launch`"),
];
