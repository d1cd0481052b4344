//! Reading and changing one setting of a settings file by name.

use std::path::Path;

use toml_edit::{DocumentMut, Item, Table};

use crate::error::ConfigError;
use crate::file::{self, normal};
use crate::layer::{ENV_PREFIX, Layer, PLUGIN_PREFIX};
use crate::plugin_arguments::{ARGUMENTS, PluginArgument};
use crate::settings::{ACCELERATE, ENV, Setting, TABLE};
use crate::source::Source;
use crate::{document, suggest};

/// Name of a setting, of a variable for the ranks (`env.NAME`), or of an argument of Accelerate's plugins
/// (`accelerate.NAME`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingName {
    table: &'static str,
    key: String,
}

impl SettingName {
    /// Parses a name, with dashes or underscores.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] for an unknown name, with the most similar known one.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        if let Some(key) = text.strip_prefix(ENV_PREFIX) {
            return Ok(Self { table: ENV.name, key: key.to_owned() });
        }
        if let Some(key) = text.strip_prefix(PLUGIN_PREFIX) {
            let key = normal(key);
            if PluginArgument::named(&key).is_some() {
                return Ok(Self { table: ACCELERATE.name, key });
            }
            let hint = suggest::closest(&key, ARGUMENTS.iter().map(|it| it.name)).map_or_else(
                || "`accelerate launch --help` lists the arguments of its plugins".to_owned(),
                |name| format!("did you mean `{PLUGIN_PREFIX}{name}`?"),
            );
            return Err(unknown(text, &hint));
        }
        let name = normal(text);
        if let Some(setting) = Setting::named(&name) {
            return Ok(Self { table: setting.table, key: name });
        }
        let hint = suggest::setting(text).map_or_else(
            || "`brigade config show` lists those there are".to_owned(),
            |name| format!("did you mean `{name}`?"),
        );
        Err(unknown(text, &hint))
    }

    /// Returns the setting's value in a layer, in the form of a flag or variable; `None` if it is not set.
    ///
    /// ```
    /// use brigade_config::{Layer, edit::SettingName};
    ///
    /// let role = SettingName::parse("role")?;
    /// assert_eq!(role.value(&Layer::defaults()).as_deref(), Some("default"));
    /// # Ok::<(), brigade_config::ConfigError>(())
    /// ```
    #[must_use]
    pub fn value(&self, layer: &Layer) -> Option<String> {
        let settings = &layer.settings;
        match self.table {
            table if table == ENV.name => settings.env.get(&self.key).cloned(),
            table if table == ACCELERATE.name => settings.accelerate.get(&self.key).cloned(),
            _ => settings.text(&self.key),
        }
    }

    /// Returns a layer that contains this setting alone.
    fn layer(&self, value: &str) -> Result<Layer, ConfigError> {
        let mut layer = Layer::default();
        let source = Source::Argument(self.to_string());
        if self.table == ENV.name {
            layer.set_env(&self.key, value, source)?;
        } else if self.table == ACCELERATE.name {
            layer.set_plugin(&self.key, value, source)?;
        } else if !layer.settings.set(&self.key, value) {
            let fault = TABLE.iter().find(|it| it.name == self.key).map(|it| it.fault(value));
            let fault = fault.unwrap_or_default();
            return Err(ConfigError::Contradiction(format!("{} is `{value}`: {fault}", self.key)));
        }
        Ok(layer)
    }
}

impl std::fmt::Display for SettingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.table {
            table if table == ENV.name || table == ACCELERATE.name => {
                write!(f, "{table}.{}", self.key)
            }
            _ => f.write_str(&self.key),
        }
    }
}

fn unknown(name: &str, hint: &str) -> ConfigError {
    ConfigError::Contradiction(format!("no setting is called `{name}`: {hint}"))
}

/// Returns the text of a settings file with one value changed or added. Comments, order and spellings are kept.
///
/// # Errors
/// Fails when the file cannot be read as settings, before or after the change, or the value is not valid for the
/// setting.
///
/// ```
/// use brigade_config::edit::{SettingName, set};
///
/// let text = "version = 1\n[ranks]\nnproc = 2 # both GPUs\n";
/// let text = set("job.toml".as_ref(), text, &SettingName::parse("nproc")?, "4")?;
/// assert_eq!(text, "version = 1\n[ranks]\nnproc = 4 # both GPUs\n");
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
pub fn set(
    path: &Path,
    text: &str,
    name: &SettingName,
    value: &str,
) -> Result<String, ConfigError> {
    let layer = name.layer(value)?;
    file::read(path, text)?;
    let broken =
        |error: toml_edit::TomlError| ConfigError::syntax(path, text, 1, "TOML", error.message());
    let mut document: DocumentMut = text.parse().map_err(broken)?;
    if document.is_empty() {
        let made = document::write(&layer.settings, "Made by `brigade config set`.");
        // The file contains only comments.
        return Ok(if text.trim().is_empty() { made } else { format!("{text}\n{made}") });
    }
    let row = document::write(&layer.settings, "");
    let row: DocumentMut = row.parse().map_err(broken)?;
    let new = row.get(name.table).and_then(Item::as_table).and_then(|it| it.get(&name.key));
    let Some(new) = new.and_then(Item::as_value).cloned() else {
        return Err(ConfigError::Contradiction(format!("{name} cannot be written to a file")));
    };
    let place = document.iter().find(|(key, _)| normal(key) == name.table);
    let place = place.map_or_else(|| name.table.to_owned(), |(key, _)| key.to_owned());
    let table = document.entry(&place).or_insert_with(|| Item::Table(Table::new()));
    let Some(table) = table.as_table_like_mut() else {
        return Err(ConfigError::Contradiction(format!("`{place}` is not a table")));
    };
    let is_variable = name.table == ENV.name;
    let same = |key: &str| if is_variable { key == name.key } else { normal(key) == name.key };
    let old = table.iter().find(|(key, _)| same(key)).map(|(key, _)| key.to_owned());
    match old.and_then(|key| table.get_mut(&key)) {
        Some(item) => {
            let mut new = new;
            if let Some(old) = item.as_value() {
                *new.decor_mut() = old.decor().clone();
            }
            *item = Item::Value(new);
        }
        None => {
            let mut new = new;
            new.decor_mut().clear();
            table.insert(&name.key, Item::Value(new));
        }
    }
    let text = document.to_string();
    file::read(path, &text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str, name: &str, value: &str) -> Result<String, String> {
        let set = SettingName::parse(name).and_then(|name| set("f".as_ref(), text, &name, value));
        set.map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_there_stays() {
        let text = "# mine\nversion = 1\n\n[ranks]\nnproc = \"gpu\" # all\n\n[env]\nA = \"1\"\n";
        let table = [
            ("nproc", "2", "nproc = 2 # all\n"),
            ("threads_per_rank", "3", "nproc = \"gpu\" # all\nthreads-per-rank = 3\n"),
            ("env.A", "x y", "A = \"x y\"\n"),
            ("env.B", "2", "A = \"1\"\nB = \"2\"\n"),
            ("max-restarts", "2", "[failure]\nmax-restarts = 2\n"),
            ("hosts", "a:2,b", "hosts = [\"a:2\", \"b\"]\n"),
        ];
        for (name, value, expected) in table {
            let changed = changed(text, name, value).unwrap();
            assert!(changed.contains(expected), "{name}: {changed}");
            assert!(changed.starts_with("# mine\nversion = 1\n"), "{changed}");
            let layer = file::read("f".as_ref(), &changed).unwrap();
            let name = SettingName::parse(name).unwrap();
            assert_eq!(name.value(&layer).as_deref(), Some(value), "{changed}");
        }
        let argument = changed("version = 1\n", "accelerate.fsdp_version", "2").unwrap();
        assert_eq!(argument, "version = 1\n\n[accelerate]\nfsdp-version = \"2\"\n");
        let layer = file::read("f".as_ref(), &argument).unwrap();
        for spelling in ["accelerate.fsdp_version", "accelerate.fsdp-version"] {
            let name = SettingName::parse(spelling).unwrap();
            assert_eq!(name.value(&layer).as_deref(), Some("2"), "{spelling}");
        }
        let spelt = changed("version = 1\n[failure]\nmax_restarts = 1\n", "max-restarts", "2");
        assert_eq!(spelt.unwrap(), "version = 1\n[failure]\nmax_restarts = 2\n");
    }

    #[test]
    fn a_file_without_settings_becomes_one() {
        for text in ["", "# later\n", "# a conversion"] {
            let made = changed(text, "nproc", "2").unwrap();
            assert!(made.starts_with(text) && made.contains("nproc = 2\n"), "{made}");
            assert!(file::read("f".as_ref(), &made).is_ok(), "{made}");
        }
    }

    #[test]
    fn faults() {
        let text = "version = 1\n";
        let table = [
            (text, "nprc", "2", "no setting is called `nprc`: did you mean `nproc`?"),
            (text, "learning-rate", "2", "no setting is called `learning-rate`: `brigade config "),
            (text, "nproc", "0", "nproc is `0`: expected a whole number from 1"),
            (text, "env.RANK", "0", "env.RANK: RANK is set by the launcher"),
            (
                text,
                "accelerate.fsdp_version",
                "x",
                "accelerate.fsdp-version: fsdp-version is `x`, ",
            ),
            (
                text,
                "accelerate.fsdp_versoin",
                "2",
                "no setting is called `accelerate.fsdp_versoin`: did you mean `accelerate.fsdp-version`?",
            ),
            (
                text,
                "accelerate.q",
                "2",
                "no setting is called `accelerate.q`: `accelerate launch --",
            ),
            ("version = 2\n", "nproc", "2", "f:1: version 2 is newer"),
            ("a = [", "nproc", "2", "f:1: this is not TOML"),
        ];
        for (text, name, value, expected) in table {
            let error = changed(text, name, value).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
