//! Settings of a command line as flags of the launchers in a job file.

use std::ffi::OsString;

use brigade_config::plugin_arguments::PluginArgument;
use brigade_config::plugins;
use brigade_config::{Layer, Source, TABLE, Variables};
use brigade_launch::events::EventsTarget;
use brigade_launch::{LaunchError, LaunchOptions, Program, Secret};

use crate::config::Usage;
use crate::job_file::JobFile;

use super::options::PluginChoice;
use super::rendezvous::OF_A_LIST;
use super::{JobArgs, file_in_use, options, say_lines, say_warnings, sharding};

impl JobArgs {
    /// Returns the job with the settings of all layers: the launchers in the job lack this environment and perhaps
    /// these files. Warnings are written to stderr.
    ///
    /// # Errors
    /// Fails if a setting is wrong, or is one that only the scheduler can set, or if there is no program.
    pub(crate) fn job_file(&self) -> anyhow::Result<JobFile> {
        let variables = Variables::gather();
        let (mut layers, file) = self.layers(&variables, false)?;
        let (job, unused) = self.described(&mut layers, &variables)?;
        if layers.settings.quiet != Some(true) {
            say_lines(file_in_use(file.as_ref(), &layers, unused.as_deref()));
        }
        say_warnings(&layers);
        Ok(job)
    }

    /// Returns the job, and the plugins of a file that are ignored.
    fn described(
        &self,
        layers: &mut Layer,
        variables: &Variables,
    ) -> anyhow::Result<(JobFile, Option<String>)> {
        if let Some(name) = SAID_BY_THE_SCHEDULER.iter().find(|it| is_flag(layers, it)) {
            let reason = format!("--{name} cannot be used in a job file: the scheduler sets it");
            return Err(Usage(reason).into());
        }
        if self.program.is_cargo() {
            let reason = "a job file needs a program that is built already: build it, and name it after the options";
            return Err(Usage(reason.to_owned()).into());
        }
        let program = self.program.program(variables)?;
        sharding::settle(layers, &program)?;
        sharding::settle_axes(layers, &program)?;
        let (chosen, unused) = options::plugins(layers, &program, variables)?;
        if let Some(PluginChoice { plugins, .. }) = &chosen
            && !plugins.only_for_python().is_empty()
            && program.is_python_here() == Some(false)
        {
            let program = self.program.words().first().cloned().unwrap_or_default();
            let (what, remedy) = (plugins.only_for_python(), plugins.remedy().to_owned());
            return Err(LaunchError::ForPython { what, program, remedy }.into());
        }
        let mut flags = settings_as_flags(layers);
        if chosen.is_some() {
            flags.extend(plugins_as_flags(layers));
        }
        flags.extend(match program {
            Program::Module(_) => Some("--module".into()),
            Program::Executable(_) => Some("--no-python".into()),
            _ => None,
        });
        let settings = &layers.settings;
        let nodes = settings.nnodes.unwrap_or_default();
        // A named file is read by the launchers in the job.
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
            flags,
            command: self.program.words().to_vec(),
            ..JobFile::default()
        };
        Ok((job, unused))
    }
}

/// Returns every explicit setting as its flag. Settings of another kind of job are left out with a warning.
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

/// Returns the arguments of Accelerate's plugins as flags.
fn plugins_as_flags(layers: &Layer) -> Vec<OsString> {
    let flag = |(argument, text): (&PluginArgument, String)| {
        let is_switch = argument.kind.is_switch();
        let text = if is_switch { text.to_lowercase() } else { text };
        (!is_switch || text == "true").then(|| as_flag(argument.name, text, is_switch))
    };
    plugins::given(layers).into_iter().filter_map(flag).flatten().collect()
}

/// Formats `--name VALUE` as two words, and a switch as `--name` or `--no-name`.
fn as_flag(name: &str, text: String, is_switch: bool) -> Vec<OsString> {
    match (is_switch, text.as_str()) {
        (true, "true") => vec![format!("--{name}").into()],
        (true, _) => vec![format!("--no-{name}").into()],
        // It would be parsed as a flag.
        (false, text) if text.starts_with('-') => vec![format!("--{name}={text}").into()],
        (false, _) => vec![format!("--{name}").into(), text.into()],
    }
}

/// Returns `true` if an option of `brigade launch` has an effect in a job file.
pub(crate) fn can_be_given(option: &str) -> bool {
    let of_cargo = ["bin", "example", "package", "release", "profile", "features"];
    ![&of_cargo[..], &SAID_BY_THE_SCHEDULER, &OF_A_LIST].concat().contains(&option)
}

fn is_flag(layers: &Layer, name: &str) -> bool {
    matches!(layers.source(name), Some(Source::Flag(_)))
}

/// Settings that a job file cannot contain.
const SAID_BY_THE_SCHEDULER: [&str; 6] =
    ["node-rank", "master-addr", "master-port", "hosts", "hostfile", "rdzv-endpoint"];

const NNODES: &str = "nnodes";
const EVENTS: &str = "events";
