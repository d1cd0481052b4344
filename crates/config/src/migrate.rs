//! Migration of old settings files and of Accelerate's files to the current format.

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::accelerate::{self, KeyOutcome};
use crate::document;
use crate::error::ConfigError;
use crate::file;
use crate::layer::Layer;
use crate::load::is_accelerates;
use crate::settings::{ENV, Setting, TABLE, TABLES};
use crate::source::Source;
use crate::suggest;

/// Migrated settings file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Text of the new file.
    pub text: String,
    /// Changes, one line for each key.
    pub changes: Vec<String>,
    /// Path for the new file. A file of Accelerate's is kept, and the new one is written beside it.
    pub path: PathBuf,
}

/// Rewrites a settings file. Returns `None` if it is current.
///
/// An old file is one without a version: written by hand, with keys outside of tables or under the names of torchrun
/// and Accelerate. Comments are not carried over.
///
/// # Errors
/// Returns the same errors as [`file::read`] and [`accelerate::read`].
///
/// ```
/// use brigade_config::migrate;
///
/// let old = "nproc_per_node = 4\n";
/// let migration = migrate::rewrite("a.toml".as_ref(), old)?.unwrap();
/// assert_eq!(migration.changes, ["line 1: nproc_per_node = 4 -> nproc = 4 in [ranks]"]);
/// assert_eq!(migrate::rewrite("a.toml".as_ref(), &migration.text)?, None);
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
pub fn rewrite(path: &Path, text: &str) -> Result<Option<Migration>, ConfigError> {
    let heading = format!("Made from {} by `brigade config update`.", path.display());
    if is_accelerates(path) {
        let import = accelerate::read(path, text)?;
        return Ok(Some(Migration {
            text: document::write(&import.layer.settings, &heading),
            changes: import.rows.iter().map(change).collect(),
            path: path.with_extension("toml"),
        }));
    }
    let table = file::parse(path, text)?;
    if table.is_empty() || file::has_version(&table) {
        return file::read(path, text).map(|_| None);
    }
    let mut old = Old { path, text, layer: Layer::default(), changes: Vec::new() };
    old.read(&table)?;
    Ok(Some(Migration {
        text: document::write(&old.layer.settings, &heading),
        changes: old.changes,
        path: path.to_owned(),
    }))
}

fn change(row: &accelerate::Row) -> String {
    let became = match &row.outcome {
        KeyOutcome::Becomes(settings) => {
            let words = |(name, value): &(String, String)| format!("{name} = {value}");
            settings.iter().map(words).collect::<Vec<_>>().join(", ")
        }
        KeyOutcome::Nothing => "nothing: this is the default".to_owned(),
        KeyOutcome::Idle(reason) => format!("nothing: {reason}"),
        KeyOutcome::LeftOut(reason) | KeyOutcome::Refused(reason) => format!("left out: {reason}"),
    };
    format!("line {}: {}: {} -> {became}", row.line, row.key, row.value)
}

/// File without a version that is being read.
struct Old<'a> {
    path: &'a Path,
    text: &'a str,
    layer: Layer,
    changes: Vec<String>,
}

impl Old<'_> {
    fn read(&mut self, table: &DeTable<'_>) -> Result<(), ConfigError> {
        for (key, value) in file::in_order(table) {
            let name = file::normal(key.get_ref());
            let is_table = TABLES.iter().any(|it| it.name == name);
            match value.get_ref() {
                DeValue::Table(inner) if is_table => {
                    for (key, value) in file::in_order(inner) {
                        self.setting(
                            key.get_ref(),
                            key.span().start,
                            value.get_ref(),
                            Some(&name),
                        )?;
                    }
                }
                DeValue::Table(inner) if name == ENV.name => {
                    for (key, value) in file::in_order(inner) {
                        let source = self.source(key.span().start);
                        file::read_variable(
                            &mut self.layer,
                            key.get_ref(),
                            value.get_ref(),
                            source,
                        )?;
                    }
                }
                value => self.setting(key.get_ref(), key.span().start, value, None)?,
            }
        }
        Ok(())
    }

    fn setting(
        &mut self,
        key: &str,
        offset: usize,
        value: &DeValue<'_>,
        table: Option<&str>,
    ) -> Result<(), ConfigError> {
        let (at, raw) = (self.source(offset), file::raw(value));
        let normal = file::normal(key);
        let own = |it: &&Setting| it.name == normal || it.also.contains(&normal.as_str());
        let Some(setting) = TABLE.iter().find(own) else {
            let hint = suggest::setting(key)
                .map_or_else(String::new, |name| format!(": did you mean `{name}`?"));
            return Err(ConfigError::UnknownKey { at, key: key.to_owned(), hint });
        };
        if self.layer.source(setting.name).is_some() {
            return Err(ConfigError::Twice { at, key: key.to_owned() });
        }
        self.layer.read(setting.name, &raw, at)?;
        if table != Some(setting.table) || key != setting.name {
            let new = self.layer.settings.value(setting.name);
            self.changes.push(format!(
                "line {}: {key} = {} -> {} = {} in [{}]",
                file::line_at(self.text, offset),
                raw.shown(),
                setting.name,
                new.map(|it| it.to_string()).unwrap_or_default(),
                setting.table,
            ));
        }
        Ok(())
    }

    fn source(&self, offset: usize) -> Source {
        Source::File { path: self.path.to_owned(), line: file::line_at(self.text, offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_a_version() {
        let old = "# mine\nnproc_per_node = 4\nmaster-addr = \"a\"\n\n[hosts]\nnode_rank = 1\nnnodes = 2\n\n[env]\nA = 1\n";
        let migration = rewrite("a.toml".as_ref(), old).unwrap().unwrap();
        assert_eq!(
            migration.changes,
            [
                "line 2: nproc_per_node = 4 -> nproc = 4 in [ranks]",
                "line 3: master-addr = \"a\" -> master-addr = \"a\" in [hosts]",
                "line 6: node_rank = 1 -> node-rank = 1 in [hosts]",
            ]
        );
        assert_eq!(migration.path, Path::new("a.toml"));
        let read = file::read("a.toml".as_ref(), &migration.text).unwrap();
        for (name, text) in
            [("nproc", "4"), ("master-addr", "a"), ("node-rank", "1"), ("nnodes", "2")]
        {
            assert_eq!(read.settings.text(name).as_deref(), Some(text));
        }
        assert_eq!(read.settings.env["A"], "1");
    }

    #[test]
    fn files_of_accelerates() {
        let old = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\ntpu_name: x\n\
                   machine_rank: 0\nmain_process_ip: a\n";
        let migration = rewrite("b/a.yaml".as_ref(), old).unwrap().unwrap();
        assert_eq!(
            migration.changes,
            [
                "line 1: distributed_type: \"MULTI_GPU\" -> nothing: this is the default",
                "line 2: num_machines: 2 -> nnodes = 2",
                "line 3: num_processes: 8 -> nproc = 4",
                "line 4: tpu_name: \"x\" -> nothing: it is for TPUs only",
                "line 5: machine_rank: 0 -> node-rank = 0",
                "line 6: main_process_ip: \"a\" -> master-addr = a",
            ]
        );
        assert_eq!(migration.path, Path::new("b/a.toml"));
    }

    #[test]
    fn current_files_stay() {
        for text in ["", "version = 1\n[ranks]\nnproc = 2\n"] {
            assert_eq!(rewrite("a.toml".as_ref(), text).unwrap(), None);
        }
        let faults = [
            ("version = 2\n", "a.toml:1: version 2 is newer"),
            ("nprc = 2\n", "a.toml:1: unknown key `nprc`: did you mean `nproc`?"),
            ("nproc = 2\nnproc_per_node = 2\n", "a.toml:2: duplicate key `nproc_per_node`"),
            ("[model]\nlayers = 2\n", "a.toml:1: unknown key `model`"),
            ("nproc = 0\n", "a.toml:1: nproc is 0, expected"),
        ];
        for (text, expected) in faults {
            let error = rewrite("a.toml".as_ref(), text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text:?} gave {error:?}");
        }
    }
}
