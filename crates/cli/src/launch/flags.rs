//! Flags for settings, generated from the table of settings.

use std::ffi::OsStr;

use brigade_config::{Layer, Setting, Settings, Source, TABLE};
use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

use super::foreign::COMPATIBILITY;

/// Settings from the flags.
#[derive(Clone, Debug, Default)]
pub(super) struct SettingFlags(pub(super) Layer);

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        TABLE.iter().fold(command, |command, setting| {
            let command = command.arg(flag(setting));
            if setting.is_switch { command.arg(negation(setting)) } else { command }
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut layer = Layer::default();
        for setting in TABLE {
            let name = setting.name;
            let text = if !setting.is_switch {
                matches.get_one::<String>(name).map(String::as_str)
            } else if matches.get_flag(name) {
                Some("true")
            } else if matches.get_flag(&negated(name)) {
                Some("false")
            } else {
                None
            };
            if let Some(text) = text {
                // The parser of the flag has validated it.
                let flag = if text == "false" { negated(name) } else { name.to_owned() };
                let _ = layer.set(name, text, Source::Flag(flag));
            }
        }
        Ok(Self(layer))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn flag(setting: &'static Setting) -> Arg {
    let arg = Arg::new(setting.name)
        .long(setting.name)
        .aliases(spellings(setting))
        .help(help(setting, setting.summary()))
        .long_help(long_help(setting))
        .help_heading(heading(setting))
        .hide_short_help(!COMMON.contains(&setting.name));
    let arg = match SHORT.iter().find(|it| it.0 == setting.name) {
        Some((_, short)) => arg.short(*short),
        None => arg,
    };
    if setting.is_switch {
        return arg.action(ArgAction::SetTrue).overrides_with(negated(setting.name));
    }
    // The sentences of the help contain them.
    let arg = arg.hide_possible_values(true);
    arg.value_name(setting.value_name)
        .allow_negative_numbers(true)
        .value_parser(SettingParser(setting))
}

/// Parser that validates the value of a flag, and returns the words for shell completion.
#[derive(Clone, Copy)]
struct SettingParser(&'static Setting);

impl TypedValueParser for SettingParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, Error> {
        let setting = self.0;
        let parse = move |text: &str| {
            let is_good = Settings::default().set(setting.name, text);
            if is_good { Ok(text.to_owned()) } else { Err(setting.fault(text)) }
        };
        parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = self.0.words;
        (!words.is_empty()).then(|| Box::new(words.iter().map(PossibleValue::new)) as Box<_>)
    }
}

/// Returns the flag that turns a switch off, which a file or a variable may have turned on.
fn negation(setting: &'static Setting) -> Arg {
    Arg::new(negated(setting.name))
        .long(negated(setting.name))
        .alias(negated(setting.name).replace('-', "_"))
        .action(ArgAction::SetTrue)
        .overrides_with(setting.name)
        .hide(true)
}

fn negated(name: &str) -> String {
    format!("no-{name}")
}

fn help(setting: &Setting, words: &str) -> String {
    match setting.default {
        Some(default) if !setting.is_switch => format!("{words} [default: {default}]"),
        _ => words.to_owned(),
    }
}

/// Returns the long help of a setting, with the flag that turns a switch off.
fn long_help(setting: &Setting) -> String {
    let text = help(setting, &setting.meaning());
    if setting.is_switch { format!("{text} [off: --{}]", negated(setting.name)) } else { text }
}

/// Returns the names of torchrun and Accelerate, with dashes and underscores, for existing command lines.
fn spellings(setting: &Setting) -> Vec<String> {
    let names = [setting.name].into_iter().chain(setting.also.iter().copied());
    names
        .flat_map(|name| [name.to_owned(), name.replace('-', "_")])
        .filter(|spelling| spelling != setting.name)
        .collect()
}

fn heading(setting: &Setting) -> &'static str {
    if OF_ACCELERATE.iter().any(|it| setting.name.starts_with(it)) {
        return COMPATIBILITY;
    }
    HEADINGS.iter().find(|it| it.0 == setting.table).map_or("Options", |it| it.1)
}

/// Tables of a settings file, with the headings of the help.
const HEADINGS: &[(&str, &str)] = &[
    ("ranks", "Ranks and devices"),
    ("hosts", "Several hosts"),
    ("rendezvous", "Several hosts"),
    ("failure", "Failure"),
    ("output", "Output"),
    ("training", "Training"),
];
/// Settings that only Python programs with Accelerate read.
const OF_ACCELERATE: &[&str] = &["dynamo-", "debug-collectives"];
/// Options that `-h` shows: at most 16 for a launch, with those that are not settings.
const COMMON: &[&str] = &[
    "nproc",
    "devices",
    "cpu",
    "hosts",
    "hostfile",
    "nnodes",
    "node-rank",
    "rdzv-endpoint",
    "max-restarts",
    "log-dir",
    "quiet",
    "mixed-precision",
];
/// Short flags of torchrun, Accelerate and DeepSpeed.
const SHORT: &[(&str, char)] =
    &[("hostfile", 'H'), ("tee", 't'), ("redirects", 'r'), ("quiet", 'q')];
