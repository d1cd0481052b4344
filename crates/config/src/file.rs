//! Reader of Brigade's settings files: TOML, with one table for each kind of setting.

use std::borrow::Cow;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::ConfigError;
use crate::layer::Layer;
use crate::settings::{ACCELERATE, ENV, Setting, TABLES};
use crate::source::Source;
use crate::suggest;
use crate::value::Raw;

/// Version of the settings file's layout that this program writes.
pub const VERSION: i64 = 1;

/// Reads a settings file. Each value's source is the line of its key.
///
/// An empty file is valid and sets nothing, so `/dev/null` can be passed.
///
/// # Errors
/// Text that is not TOML, another version, an unknown key, or a value of the wrong type. The message contains the line
/// number.
///
/// ```
/// use brigade_config::file;
///
/// let layer = file::read("job.toml".as_ref(), "version = 1\n[ranks]\nnproc = 4\n")?;
/// assert_eq!(layer.settings.text("nproc").as_deref(), Some("4"));
/// assert_eq!(layer.source("nproc").unwrap().to_string(), "job.toml:3");
///
/// let error = file::read("job.toml".as_ref(), "version = 1\n[ranks]\nnprc = 4\n").unwrap_err();
/// assert_eq!(error.to_string(), "job.toml:3: unknown key `nprc`: did you mean `nproc`?");
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
pub fn read(path: &Path, text: &str) -> Result<Layer, ConfigError> {
    let document = parse(path, text)?;
    check_version(path, text, &document)?;
    let lines = Lines { path, text };
    let mut layer = Layer::default();
    for (key, value) in in_order(&document) {
        let (at, name) = (lines.source(key), normal(key.get_ref()));
        if name == VERSION_KEY {
            continue;
        }
        let Some(table) = value.get_ref().as_table() else {
            return Err(unknown_outside(at, key.get_ref(), &name));
        };
        if name == ENV.name {
            read_env(&lines, table, &mut layer)?;
        } else if name == ACCELERATE.name {
            read_plugins(&lines, table, &mut layer)?;
        } else if TABLES.iter().any(|it| it.name == name) {
            read_table(&lines, &name, table, &mut layer)?;
        } else {
            let tables = TABLES.iter().map(|it| it.name).chain([ACCELERATE.name, ENV.name]);
            let hint = suggest::closest(&name, tables)
                .map_or_else(String::new, |table| format!(": did you mean [{table}]?"));
            return Err(ConfigError::UnknownKey { at, key: key.get_ref().to_string(), hint });
        }
    }
    Ok(layer)
}

/// Parses the document, with the offset of every key and value.
pub(crate) fn parse<'a>(path: &Path, text: &'a str) -> Result<DeTable<'a>, ConfigError> {
    let document = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_at(text, span.start));
        let mut message = error.message().to_owned();
        if text.contains("distributed_type:") {
            message += " (it looks like a file of Accelerate's: those end in .yaml or .json)";
        }
        ConfigError::syntax(path, text, line, "TOML", &message)
    })?;
    Ok(document.into_inner())
}

/// Returns `true` if the file has a version key.
pub(crate) fn has_version(document: &DeTable<'_>) -> bool {
    document.contains_key(VERSION_KEY)
}

fn check_version(path: &Path, text: &str, document: &DeTable<'_>) -> Result<(), ConfigError> {
    let path = path.to_owned();
    let Some((key, value)) = document.iter().find(|(key, _)| key.get_ref() == VERSION_KEY) else {
        if document.is_empty() {
            return Ok(());
        }
        let message = format!(
            "no version: write `{VERSION_KEY} = {VERSION}` above everything else, or run `brigade config \
             update --config {}`",
            path.display()
        );
        return Err(ConfigError::Version { path, line: 1, message });
    };
    let found = raw(value.get_ref());
    if found == Raw::Integer(VERSION) {
        return Ok(());
    }
    let message = match found {
        Raw::Integer(newer) if newer > VERSION => format!(
            "version {newer} is newer than this program, which reads versions up to {VERSION}: use a \
             newer brigade"
        ),
        other => format!("version is {}, expected {VERSION}", other.shown()),
    };
    Err(ConfigError::Version { path, line: line_at(text, key.span().start), message })
}

fn read_table(
    lines: &Lines<'_>,
    table_name: &str,
    table: &DeTable<'_>,
    layer: &mut Layer,
) -> Result<(), ConfigError> {
    for (key, value) in in_order(table) {
        let (at, name) = (lines.source(key), normal(key.get_ref()));
        let key = key.get_ref().to_string();
        match Setting::named(&name) {
            None => return Err(unknown(at, key)),
            Some(setting) if setting.table != table_name => {
                let hint = format!(" in [{table_name}]: it belongs in [{}]", setting.table);
                return Err(ConfigError::UnknownKey { at, key, hint });
            }
            Some(_) if layer.source(&name).is_some() => {
                return Err(ConfigError::Twice { at, key });
            }
            Some(_) => layer.read(&name, &raw(value.get_ref()), at)?,
        }
    }
    Ok(())
}

fn read_plugins(
    lines: &Lines<'_>,
    table: &DeTable<'_>,
    layer: &mut Layer,
) -> Result<(), ConfigError> {
    for (key, value) in in_order(table) {
        let (at, name) = (lines.source(key), normal(key.get_ref()));
        let text = match raw(value.get_ref()) {
            Raw::Text(text) => text,
            value @ (Raw::Integer(_) | Raw::Float(_) | Raw::Bool(_)) => value.shown(),
            other => return Err(ConfigError::wrong(at, &name, other.shown(), "a text")),
        };
        layer.set_plugin(&name, &text, at)?;
    }
    Ok(())
}

fn read_env(lines: &Lines<'_>, table: &DeTable<'_>, layer: &mut Layer) -> Result<(), ConfigError> {
    for (key, value) in in_order(table) {
        read_variable(layer, key.get_ref(), value.get_ref(), lines.source(key))?;
    }
    Ok(())
}

/// Reads a variable for the ranks. Variables are texts, but `1` and `true` need no quotation marks.
pub(crate) fn read_variable(
    layer: &mut Layer,
    name: &str,
    value: &DeValue<'_>,
    at: Source,
) -> Result<(), ConfigError> {
    match raw(value) {
        Raw::Text(text) => layer.set_env(name, &text, at),
        value @ (Raw::Integer(_) | Raw::Float(_) | Raw::Bool(_)) => {
            layer.set_env(name, &value.shown(), at)
        }
        other => Err(ConfigError::wrong(at, name, other.shown(), "a text")),
    }
}

fn unknown(at: Source, key: String) -> ConfigError {
    let hint = if TOTALS.contains(&normal(&key).as_str()) {
        ": it counts the ranks of all hosts, where `nproc` counts those of one".to_owned()
    } else if let Some(name) = suggest::setting(&key) {
        format!(": did you mean `{name}`?")
    } else {
        ": `brigade config show` lists those there are".to_owned()
    };
    ConfigError::UnknownKey { at, key, hint }
}

fn unknown_outside(at: Source, key: &str, name: &str) -> ConfigError {
    let key = key.to_owned();
    if let Some(setting) = Setting::named(name) {
        let hint = format!(" outside of a table: it belongs in [{}]", setting.table);
        return ConfigError::UnknownKey { at, key, hint };
    }
    unknown(at, key)
}

/// Sorts by position in the file, so that the first mistake is reported.
pub(crate) fn in_order<'t, 'i>(
    table: &'t DeTable<'i>,
) -> Vec<(&'t Key<'i>, &'t Spanned<DeValue<'i>>)> {
    let mut rows: Vec<_> = table.iter().collect();
    rows.sort_by_key(|(key, _)| key.span().start);
    rows
}

pub(crate) type Key<'i> = Spanned<Cow<'i, str>>;

/// Replaces underscores by dashes: keys may be written with either.
pub(crate) fn normal(key: &str) -> String {
    key.replace('_', "-")
}

pub(crate) fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(|_| Raw::Other(number.to_string()), Raw::Integer),
        DeValue::Float(number) => number
            .as_str()
            .parse()
            .map_or_else(|_| Raw::Other(number.as_str().to_owned()), Raw::Float),
        DeValue::Boolean(value) => Raw::Bool(*value),
        DeValue::Datetime(date) => Raw::Other(date.to_string()),
        DeValue::Array(items) => Raw::List(items.iter().map(|it| raw(it.get_ref())).collect()),
        DeValue::Table(table) => Raw::Table(
            table.iter().map(|(key, it)| (key.get_ref().to_string(), raw(it.get_ref()))).collect(),
        ),
    }
}

/// Settings file that is being read.
struct Lines<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Lines<'_> {
    fn source<T>(&self, key: &Spanned<T>) -> Source {
        Source::File { path: self.path.to_owned(), line: line_at(self.text, key.span().start) }
    }
}

pub(crate) fn line_at(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count()
}

const VERSION_KEY: &str = "version";
/// Keys of Accelerate's number of ranks on all machines, for which there is no setting.
const TOTALS: [&str; 1] = ["num-processes"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_names_its_line() {
        let table = [
            ("version = 1\n[ranks]\nnproc = [\n", "f:3: this is not TOML: unclosed array"),
            ("[ranks]\n", "f:1: no version: write `version = 1` above everything else, or run "),
            (
                "\nversion = 2\n",
                "f:2: version 2 is newer than this program, which reads versions up to 1",
            ),
            ("version = \"1\"\n", "f:1: version is \"1\", expected 1"),
            ("version = 1\n[rank]\n", "f:2: unknown key `rank`: did you mean [ranks]?"),
            ("version = 1\n[model]\n", "f:2: unknown key `model`"),
            (
                "version = 1\n\nnproc = 2\n",
                "f:3: unknown key `nproc` outside of a table: it belongs in [ranks]",
            ),
            (
                "version = 1\n[hosts]\nnproc = 2\n",
                "f:3: unknown key `nproc` in [hosts]: it belongs in [ranks]",
            ),
            (
                "version = 1\n[ranks]\nnum_processes = 2\n",
                "f:3: unknown key `num_processes`: it counts the ranks of all hosts, where `nproc` counts those of one",
            ),
            (
                "version = 1\n[ranks]\nlr = 2\n",
                "f:3: unknown key `lr`: `brigade config show` lists those there are",
            ),
            (
                "version = 1\n[ranks]\nnproc = 0\n",
                "f:3: nproc is 0, expected a whole number from 1, or auto, gpu or cpu",
            ),
            (
                "version = 1\n[output]\n\nquiet = \"yes\"\n",
                "f:4: quiet is \"yes\", expected true or false",
            ),
            (
                "version = 1\n[hosts]\nmaster-port = \"29500\"\n",
                "f:3: master-port is \"29500\", expected a port, from 0 to 65535",
            ),
            (
                "version = 1\n[hosts]\nmaster-port = 99999\n",
                "f:3: master-port is 99999, expected a port, from 0 to 65535",
            ),
            (
                "version = 1\n[hosts]\nhosts = 1979-05-27\n",
                "f:3: hosts is 1979-05-27, expected hosts with their numbers of ranks",
            ),
            (
                "version = 1\n[hosts]\nnode-rank = 99999999999999999999\n",
                "f:3: node-rank is 99999999999999999999, expected a whole number",
            ),
            (
                "version = 1\n[hosts]\nenv-pass = [\"A\"]\nenv_pass = [\"B\"]\n",
                "f:4: duplicate key `env_pass`",
            ),
            ("version = 1\n[output]\ntee = \"0:9\"\n", "f:3: tee is \"0:9\", expected "),
            (
                "version = 1\n[ranks]\ndevices = [1, 1]\n",
                "f:3: devices is a list, expected all, or numbers",
            ),
            ("version = 1\n[env]\nA = [1]\n", "f:3: A is a list, expected a text"),
            ("version = 1\n[env]\nRANK = 1\n", "f:3: RANK is set by the launcher"),
            ("distributed_type: NO\n", "f:1: this is not TOML: "),
        ];
        for (text, expected) in table {
            let error = read("f".as_ref(), text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text:?} gave {error:?}");
        }
    }

    #[test]
    fn empty_files_say_nothing() {
        for text in ["", "\n# a comment\n"] {
            assert_eq!(read("f".as_ref(), text).unwrap(), Layer::default());
        }
    }

    #[test]
    fn values_have_the_kinds_one_expects() {
        let text = "version = 1\n[ranks]\nnproc = \"gpu\"\ndevices = [0, \"2\"]\n[hosts]\n\
                    nnodes = \"1:4\"\nmaster_port = 29500\n[rendezvous]\n\
                    rdzv-conf = { join_timeout = 600, timeout = 1.5 }\n[failure]\n\
                    shutdown-timeout = 2.5\n[output]\nquiet = true\n[env]\nA = 1\nB = \"x y\"\n";
        let layer = read("f".as_ref(), text).unwrap();
        let table = [
            ("nproc", "gpu"),
            ("devices", "0,2"),
            ("nnodes", "1:4"),
            ("master-port", "29500"),
            ("rdzv-conf", "join_timeout=600,timeout=1.5"),
            ("shutdown-timeout", "2.5"),
            ("quiet", "true"),
        ];
        for (name, expected) in table {
            assert_eq!(layer.settings.text(name).as_deref(), Some(expected), "{name}");
        }
        let env: Vec<_> =
            layer.settings.env.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(env, [("A", "1"), ("B", "x y")]);
        assert_eq!(layer.source("env.B").unwrap().to_string(), "f:16");
    }
}
