//! Reader of Accelerate's configuration files.
//!
//! Every key of its `ClusterConfig` has one of these outcomes, which the caller gets: it becomes settings, it has no
//! meaning, it is left out with a reason, or the file cannot be used because of it. No key is dropped silently.

use std::path::Path;

use keys::Keys;

use crate::error::ConfigError;
use crate::layer::{ENV_PREFIX, Layer, PLUGIN_PREFIX};
use crate::source::Source;
use crate::suggest;
use crate::value::Raw;

mod keys;
mod yaml;

/// Settings and outcomes of the keys of an Accelerate configuration file.
#[derive(Clone, Debug, PartialEq)]
pub struct Import {
    /// Settings of the file, and a warning for each key that was left out.
    pub layer: Layer,
    /// Every key with its outcome, in the order of the file.
    pub rows: Vec<Row>,
}

/// Key of an Accelerate configuration file, with its outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Line number of the key, from 1.
    pub line: usize,
    /// Name of the key.
    pub key: String,
    /// Value of the key, shortened for display.
    pub value: String,
    /// Outcome of the key.
    pub outcome: KeyOutcome,
}

/// Outcome of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The key becomes these settings, by name and value. A variable for the ranks is `env.NAME`, an argument of a
    /// plugin `accelerate.NAME`.
    Becomes(Vec<(String, String)>),
    /// The key has no effect, or its value is the default behaviour.
    Nothing,
    /// The key has no effect in Accelerate either, for this reason.
    Idle(String),
    /// The key is ignored, and the job can run without it. Contains the reason.
    LeftOut(String),
    /// The key is not supported, and ignoring it would change the job. Contains the reason.
    Refused(String),
}

/// Reads a file in YAML, or in JSON if its name ends in `.json`.
///
/// `num_processes` is the number of ranks on all machines; the setting `nproc` is the number on one.
///
/// # Errors
/// Text that is not YAML, an unknown key, a value of the wrong type, a number of ranks that the machines do not divide,
/// and keys for features that Brigade does not have.
///
/// ```
/// use brigade_config::accelerate;
///
/// let text = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n\
///             machine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n";
/// let import = accelerate::read("a.yaml".as_ref(), text)?;
/// assert_eq!(import.layer.settings.text("nproc").as_deref(), Some("4"));
/// assert_eq!(import.layer.source("nproc").unwrap().to_string(), "a.yaml:3");
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
pub fn read(path: &Path, text: &str) -> Result<Import, ConfigError> {
    let entries = yaml::read(path, text)?;
    let keys = Keys::new(path, &entries);
    let mut import = Import { layer: Layer::default(), rows: Vec::new() };
    for entry in &entries {
        let Some(outcome) = keys.outcome(entry)? else {
            let hint = suggest::closest(&entry.key.replace('_', "-"), Keys::dashed())
                .map_or_else(String::new, |name| {
                    format!(": did you mean `{}`?", name.replace('-', "_"))
                });
            return Err(ConfigError::UnknownKey {
                at: keys.source(entry),
                key: entry.key.clone(),
                hint,
            });
        };
        import.take(&keys, entry, outcome)?;
    }
    let reasons: Vec<String> = import.rows.iter().filter_map(Row::refusal).collect();
    if !reasons.is_empty() {
        return Err(ConfigError::NotHonoured { path: path.to_owned(), reasons });
    }
    // Checked last: a file for SageMaker lacks this key, and is refused with a better message.
    if keys.entry(keys::KIND).is_none() {
        let message = format!("the key {} is missing", keys::KIND);
        let path = path.to_owned();
        return Err(ConfigError::Syntax {
            path,
            line: 1,
            format: "an Accelerate settings file",
            message,
        });
    }
    Ok(import)
}

impl Import {
    fn take(
        &mut self,
        keys: &Keys<'_>,
        entry: &Entry,
        outcome: KeyOutcome,
    ) -> Result<(), ConfigError> {
        let source = keys.source(entry);
        match &outcome {
            KeyOutcome::Becomes(settings) => {
                for (name, text) in settings {
                    if let Some(name) = name.strip_prefix(ENV_PREFIX) {
                        self.layer.set_env(name, text, source.clone())?;
                    } else if let Some(name) = name.strip_prefix(PLUGIN_PREFIX) {
                        self.layer.keep_plugin(name, text.clone(), source.clone());
                    } else {
                        self.layer.set(name, text, source.clone())?;
                    }
                }
            }
            KeyOutcome::LeftOut(reason) => {
                self.layer.warn(source, format!("{} is not honoured: {reason}", entry.key));
            }
            KeyOutcome::Idle(reason) => {
                self.layer.note(source, format!("{} has no effect: {reason}", entry.key));
            }
            KeyOutcome::Nothing | KeyOutcome::Refused(_) => {}
        }
        let value = entry.value.shown();
        self.rows.push(Row { line: entry.line, key: entry.key.clone(), value, outcome });
        Ok(())
    }
}

impl Row {
    fn refusal(&self) -> Option<String> {
        let KeyOutcome::Refused(reason) = &self.outcome else { return None };
        Some(format!("line {}: {}: {reason}", self.line, self.key))
    }
}

/// Key of a file with its parsed value.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    key: String,
    line: usize,
    value: Raw,
}

impl Entry {
    fn source(&self, path: &Path) -> Source {
        Source::File { path: path.to_owned(), line: self.line }
    }
}

#[cfg(test)]
mod tests;
