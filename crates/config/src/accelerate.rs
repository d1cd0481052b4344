//! Accelerate's own configuration files, read as they are.
//!
//! Every key of its `ClusterConfig` has one of four outcomes, and the caller learns which: it becomes
//! settings, it says nothing, it is left out with a reason, or the file cannot be used because of
//! it. None is dropped in silence.

use std::path::Path;

use keys::Keys;

use crate::error::ConfigError;
use crate::layer::{ENV_PREFIX, Layer, PLUGIN_PREFIX};
use crate::source::Source;
use crate::suggest;
use crate::value::Raw;

mod keys;
mod yaml;

/// What a file of Accelerate's says.
#[derive(Clone, Debug, PartialEq)]
pub struct Import {
    /// Its settings, and a warning for each key that was left out.
    pub layer: Layer,
    /// Every key with its outcome, in the order of the file.
    pub rows: Vec<Row>,
}

/// One key of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its line, from 1.
    pub line: usize,
    /// Its name.
    pub key: String,
    /// Its value, shortened.
    pub value: String,
    /// What became of it.
    pub outcome: KeyOutcome,
}

/// What becomes of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// These settings, by name and value; a variable for the ranks as `env.NAME`, an argument of a
    /// plugin as `accelerate.NAME`.
    Becomes(Vec<(String, String)>),
    /// It asks for nothing, or for what is the case anyway.
    Nothing,
    /// It has no effect in Accelerate either: why.
    Idle(String),
    /// It is not honoured, and the job may run without it: why.
    LeftOut(String),
    /// It is not honoured, and the job would be another one without it: why.
    Refused(String),
}

/// Reads a file in YAML, or in JSON where it ends in `.json`.
///
/// `num_processes` counts the ranks of all machines; `nproc` counts those of one.
///
/// Errors: what is not YAML, an unknown key, a value of the wrong kind, ranks that do not divide
/// by the machines, and keys that ask for what Brigade does not do.
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
    // Last, because a file that asks for SageMaker has no such key, and is refused for better
    // reasons.
    if keys.entry(keys::KIND).is_none() {
        let message = format!("every file of Accelerate's has {}, this one has not", keys::KIND);
        let path = path.to_owned();
        return Err(ConfigError::Syntax {
            path,
            line: 1,
            format: "a file of Accelerate's",
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
                self.layer.note(source, format!("{} does nothing: {reason}", entry.key));
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

/// One key of a file with its value, as it was read.
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
