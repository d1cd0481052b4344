//! Settings with their sources, as a table or as JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use brigade_config::{Layer, Settings, SettingsPath, Source, TABLE};
use brigade_rank_env::text::escaped;
use serde_json::{Map, Value, json};

use crate::secrets::shown;

/// Selection of the settings to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Settings that have a value.
    Set,
    /// All settings, with or without a value.
    All,
}

/// Returns a row for each setting (name, value, source), then the notes.
pub(crate) fn text(
    layers: &Layer,
    file: Option<&SettingsPath>,
    which: Which,
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    match file {
        Some(place) => {
            let reason = place.chosen_by.reason();
            writeln!(out, "settings file: {} ({reason})\n", escaped(place.path.display()))?;
        }
        None => writeln!(out, "settings file: none\n")?,
    }
    let rows = rows(layers, which);
    let widths = [0, 1].map(|column| {
        rows.iter().map(|row| row[column].chars().count().min(MAX_WIDTH)).max().unwrap_or(0)
    });
    for [name, value, source] in &rows {
        writeln!(out, "{name:0$}  {value:1$}  {2}", widths[0], widths[1], escaped(source))?;
    }
    if !layers.notes.is_empty() {
        writeln!(out, "\nnotes")?;
    }
    for note in &layers.notes {
        writeln!(out, "  {}", escaped(note))?;
    }
    Ok(())
}

fn rows(layers: &Layer, which: Which) -> Vec<[String; 3]> {
    let mut rows: Vec<[String; 3]> = Vec::new();
    for setting in TABLE {
        match (layers.settings.text(setting.name), layers.source(setting.name)) {
            (Some(value), Some(source)) => {
                let value = escaped(value).to_string();
                rows.push([setting.name.to_owned(), value, source.to_string()]);
            }
            _ if which == Which::All => {
                rows.push([setting.name.to_owned(), "-".to_owned(), "not set".to_owned()]);
            }
            _ => {}
        }
    }
    let tables = [("accelerate", &layers.settings.accelerate), ("env", &layers.settings.env)];
    for (table, values) in tables {
        for (name, value) in values {
            let value = escaped(shown(name, value)).to_string();
            let name = format!("{table}.{name}");
            let source = layers.source(&name).map(ToString::to_string).unwrap_or_default();
            rows.push([escaped(name).to_string(), value, source]);
        }
    }
    rows
}

/// Returns every setting with its value and source, `null` if it is not set.
pub(crate) fn json(layers: &Layer, file: Option<&SettingsPath>) -> Map<String, Value> {
    let source = |name: &str| layers.source(name).map(ToString::to_string);
    let setting = |name: &str| {
        let value = layers.settings.value(name).and_then(|it| serde_json::to_value(it).ok());
        json!({ "value": value, "source": source(name) })
    };
    let settings: Map<String, Value> =
        TABLE.iter().map(|it| (it.name.to_owned(), setting(it.name))).collect();
    let table = |table: &str, values: &BTreeMap<String, String>| -> Map<String, Value> {
        let row = |(name, value): (&String, &String)| {
            let source = source(&format!("{table}.{name}"));
            (name.clone(), json!({ "value": shown(name, value), "source": source }))
        };
        values.iter().map(row).collect()
    };
    let note = |note: &brigade_config::Note| {
        let source = (note.source != Source::Default).then(|| note.source.to_string());
        json!({ "source": source, "text": note.text, "warning": note.is_warning })
    };
    let notes: Vec<Value> = layers.notes.iter().map(note).collect();
    let file = file.map(
        |it| json!({ "path": it.path.display().to_string(), "because": it.chosen_by.reason() }),
    );
    let mut answer = Map::new();
    answer.insert("settings_file".to_owned(), file.unwrap_or_default());
    answer.insert("settings".to_owned(), settings.into());
    let Settings { accelerate, env, .. } = &layers.settings;
    answer.insert("accelerate".to_owned(), table("accelerate", accelerate).into());
    answer.insert("env".to_owned(), table("env", env).into());
    answer.insert("notes".to_owned(), notes.into());
    answer
}

/// Maximum width of the column. A longer value moves only its own source to the right.
const MAX_WIDTH: usize = 32;
