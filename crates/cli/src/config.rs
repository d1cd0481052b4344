//! `brigade config`: creates, shows and migrates settings files.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::Context;
use brigade_config::edit::{self, SettingName};
use brigade_config::store::Existing;
use brigade_config::value::Precision;
use brigade_config::{
    ChosenBy, Machine, Settings, SettingsPath, Variables, conflicts, document, load, migrate,
    read_text, store, to_write,
};
use brigade_launch::{NprocSpec, PlacementFacts, PlacementOptions};
use clap::{Args, Subcommand, ValueEnum};

use crate::output::{self, Answer};
use crate::secrets::shown;

mod ask;
pub(crate) mod show;

/// Create a settings file from the answers to some questions
///
/// `brigade launch` uses these settings unless a flag or a variable overrides them. The file is
/// $XDG_CONFIG_HOME/brigade/config.toml or ~/.config/brigade/config.toml, unless --config names another one. If it does
/// not exist, `brigade launch` reads the file that `accelerate config` wrote.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: Option<ConfigCommand>,

    #[command(flatten)]
    file: FileArgs,

    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Write settings for this machine, without questions
    Default {
        #[command(flatten)]
        file: FileArgs,

        /// Compute in this type
        #[arg(long, alias = "mixed_precision", value_name = "TYPE", default_value = "no")]
        mixed_precision: PrecisionArg,

        /// Overwrite an existing file
        #[arg(long)]
        force: bool,
    },
    /// Show every setting with its value and source
    Show {
        #[command(flatten)]
        file: FileArgs,

        /// Show as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the value of a setting: a flag's name, or env.NAME
    ///
    /// Prints the value that `brigade launch` would use: that of the variable, else of the settings file, else the
    /// default. Exits with 1 if there is none.
    Get {
        /// The setting: `nproc`, `env.NCCL_DEBUG`
        name: String,

        #[command(flatten)]
        file: FileArgs,
    },
    /// Write the value of a setting into the settings file
    ///
    /// The rest of the file is unchanged. A missing file is created.
    Set {
        /// The setting: `nproc`, `env.NCCL_DEBUG`
        name: String,

        /// Value in the form of the flag of `brigade launch`; true or false for a switch
        #[arg(allow_hyphen_values = true)]
        value: String,

        #[command(flatten)]
        file: FileArgs,
    },
    /// Convert an old settings file, or one of Accelerate, to the current format
    ///
    /// The old file is kept with .bak appended to its name. A file of Accelerate is not changed; the new one is written
    /// beside it.
    Update {
        #[command(flatten)]
        file: FileArgs,

        /// Overwrite an existing file
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
struct FileArgs {
    /// Settings file, in place of the user's own
    #[arg(long, value_name = "FILE", aliases = ["config-file", "config_file"])]
    config: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PrecisionArg {
    No,
    Fp16,
    Bf16,
}

/// Runs the command and returns the exit code.
pub(crate) fn run(args: &ConfigArgs) -> anyhow::Result<u8> {
    let variables = Variables::gather();
    match &args.command {
        None => questionnaire(args, &variables),
        Some(ConfigCommand::Default { file, mixed_precision, force }) => {
            let place = file.to_write(&variables)?;
            let machine = this_machine();
            let precision = match mixed_precision {
                PrecisionArg::No => Precision::No,
                PrecisionArg::Fp16 => Precision::Fp16,
                PrecisionArg::Bf16 => Precision::Bf16,
            };
            let heading = format!("Made by `brigade config default` for {}.", machine.words());
            let settings = machine.settings(Some(precision));
            write(&place, &settings, &heading, existing(*force, Existing::Refuse))?;
            say(&format!("wrote {}", place.path.display()))
        }
        Some(ConfigCommand::Show { file, json }) => {
            let loaded = load(file.config.as_deref(), &variables)?;
            let layers = conflicts::resolve(loaded.layer)?;
            let mut text = Vec::new();
            if *json {
                let value = show::json(&layers, loaded.file.as_ref()).into();
                text = serde_json::to_vec_pretty::<serde_json::Value>(&value)?;
            } else {
                show::text(&layers, loaded.file.as_ref(), show::Which::All, &mut text)?;
            }
            say(String::from_utf8_lossy(&text).trim_end())
        }
        Some(ConfigCommand::Get { name, file }) => {
            let name = SettingName::parse(name)?;
            let loaded = load(file.config.as_deref(), &variables)?;
            let layers = conflicts::resolve(loaded.layer)?;
            match name.value(&layers) {
                Some(value) => say(&value),
                None => anyhow::bail!("{name} is not set"),
            }
        }
        Some(ConfigCommand::Set { name, value, file }) => set(name, value, file, &variables),
        Some(ConfigCommand::Update { file, force }) => update(file, *force, &variables),
    }
}

fn questionnaire(args: &ConfigArgs, variables: &Variables) -> anyhow::Result<u8> {
    let place = args.file.to_write(variables)?;
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        anyhow::bail!(Usage(
            "`brigade config` asks questions, which needs a terminal: use `brigade config default`, \
             or the flags of `brigade launch`"
                .to_owned()
        ));
    }
    make_folder(&place)?;
    store::check(&place.path)?;
    let Some(settings) = ask::ask(&place.path, args.force, this_machine())? else {
        output::say("nothing was written");
        return Ok(INTERRUPTED);
    };
    write(&place, &settings, "Made by `brigade config`.", Existing::KeepBeside)?;
    say(&format!("wrote {}", place.path.display()))
}

fn set(name: &str, value: &str, file: &FileArgs, variables: &Variables) -> anyhow::Result<u8> {
    let name = SettingName::parse(name)?;
    let place = file.to_write(variables)?;
    let text = if place.path.exists() { read_text(&place)? } else { String::new() };
    if text.is_empty()
        && let Ok(other) = file.to_read(variables)
        && brigade_config::is_accelerates(&other.path)
    {
        // A settings file of Brigade's own would take precedence over everything in this one.
        anyhow::bail!(Usage(format!(
            "the settings are in {}, an Accelerate settings file: run `brigade config update` to convert \
             it to a Brigade settings file, which can be changed",
            other.path.display()
        )));
    }
    let text = edit::set(&place.path, &text, &name, value)?;
    make_folder(&place)?;
    store::write(&place.path, &text, Existing::Replace)?;
    let name = name.to_string();
    let variable = name.strip_prefix("env.").unwrap_or(&name);
    say(&format!("{name} is {} in {}", shown(variable, value), place.path.display()))
}

fn update(file: &FileArgs, force: bool, variables: &Variables) -> anyhow::Result<u8> {
    let place = file.to_read(variables)?;
    let text = read_text(&place)?;
    let Some(mut migration) = migrate::rewrite(&place.path, &text)? else {
        return say(&format!("{} is current", place.path.display()));
    };
    // Accelerate's own file is in a cache folder, which is not a place for settings.
    let own = file.to_write(variables)?;
    if place.chosen_by == ChosenBy::Accelerate {
        migration.path.clone_from(&own.path);
    }
    let is_same = migration.path == place.path;
    let careful = if is_same { Existing::KeepBeside } else { Existing::Refuse };
    let target = SettingsPath { path: migration.path, chosen_by: own.chosen_by };
    make_folder(&target)?;
    let kept = store::write(&target.path, &migration.text, existing(force && !is_same, careful))?;
    let mut words = migration.changes;
    words.push(match kept {
        Some(kept) => {
            format!("wrote {}, kept the old one as {}", target.path.display(), kept.display())
        }
        None => format!("wrote {}, left {} as it is", target.path.display(), place.path.display()),
    });
    say(&words.join("\n"))
}

fn existing(force: bool, otherwise: Existing) -> Existing {
    if force { Existing::Replace } else { otherwise }
}

fn write(
    place: &SettingsPath,
    settings: &Settings,
    heading: &str,
    existing: Existing,
) -> anyhow::Result<()> {
    make_folder(place)?;
    store::write(&place.path, &document::write(settings, heading), existing)?;
    Ok(())
}

/// Creates the user's own folder for settings. Any other missing folder is probably a typing error.
fn make_folder(place: &SettingsPath) -> anyhow::Result<()> {
    if let (ChosenBy::User, Some(folder)) = (place.chosen_by, place.path.parent()) {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    Ok(())
}

impl FileArgs {
    fn to_write(&self, variables: &Variables) -> anyhow::Result<SettingsPath> {
        let place = to_write(self.config.as_deref(), variables);
        let place = place.ok_or_else(|| Usage(HOMELESS.to_owned()))?;
        if brigade_config::is_accelerates(&place.path) {
            return Ok(SettingsPath { path: place.path.with_extension("toml"), ..place });
        }
        Ok(place)
    }

    fn to_read(&self, variables: &Variables) -> anyhow::Result<SettingsPath> {
        let place = brigade_config::to_read(self.config.as_deref(), variables, Path::exists);
        place.ok_or_else(|| {
            Usage(
                "there is no settings file to update: run `brigade config default` to write one"
                    .to_owned(),
            )
            .into()
        })
    }
}

/// Counts GPUs and cores, as a launch does.
fn this_machine() -> Machine {
    let facts = PlacementFacts::gather(&PlacementOptions::default(), NprocSpec::Gpu);
    Machine {
        gpus: facts.devices.visible.len(),
        device_word: facts.devices.kind.device_word(),
        cores: thread::available_parallelism().map_or(1, usize::from),
    }
}

/// Writes a message to stdout, in whole lines.
fn say(words: &str) -> anyhow::Result<u8> {
    match Answer::new(io::stdout().lock()).write_all(format!("{words}\n").as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(0),
    }
}

/// Error that the user can fix with another command line.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Exit code of a shell for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;
const HOMELESS: &str = "there is no home folder to keep settings in: set HOME, or name a file with \
                        --config";
const EXAMPLES: &str = "\
Examples:
  brigade config
  brigade config default --mixed-precision bf16
  brigade config show
  brigade config set nproc 2
  brigade config get nproc
  brigade config update --config old.yaml

Exit codes:
  0    done
  2    a wrong argument, variable or settings file
  130  interrupted, and nothing was written
  1    the system refused something";
