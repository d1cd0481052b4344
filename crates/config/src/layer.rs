//! Settings with their sources, and the order of precedence of layers.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use brigade_rank_env::env;

use crate::error::{ConfigError, fault};
use crate::plugin_arguments::{ARGUMENTS, PluginArgument};
use crate::settings::{Setting, Settings, TABLE};
use crate::source::Source;
use crate::suggest;
use crate::value::Raw;

/// Settings with the source of each value.
///
/// ```
/// use brigade_config::{Layer, Source};
///
/// let mut flags = Layer::default();
/// flags.set("max-restarts", "3", Source::Flag("max-restarts".into()))?;
/// let layers = flags.over(Layer::defaults());
/// assert_eq!(layers.settings.max_restarts, Some(3));
/// assert_eq!(layers.source("max-restarts").unwrap().to_string(), "flag --max-restarts");
/// assert_eq!(layers.source("role").unwrap().to_string(), "default");
/// assert_eq!(layers.source("hosts"), None);
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Values of the settings.
    pub settings: Settings,
    /// Notes about the settings, for the user.
    pub notes: Vec<Note>,
    /// Sources by name. A variable for the ranks is `env.NAME`, an argument of Accelerate's plugins `accelerate.NAME`.
    sources: BTreeMap<String, Source>,
}

/// Note about a setting that has no effect, or not the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Source of the setting.
    pub source: Source,
    /// Text that explains what happens instead, and why.
    pub text: String,
    /// `true` if the note is shown at each launch, and not only with `--explain`.
    pub is_warning: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.text)
    }
}

impl Layer {
    /// Returns the lowest layer: the defaults of all settings.
    #[must_use]
    pub fn defaults() -> Self {
        let mut layer = Self::default();
        for setting in TABLE {
            if let Some(default) = setting.default {
                layer.settings.set(setting.name, default);
                layer.mark(setting.name, Source::Default);
            }
        }
        layer
    }

    /// Sets a value from the text of a variable or flag.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if the text is not a value of the setting.
    pub fn set(&mut self, name: &str, text: &str, source: Source) -> Result<(), ConfigError> {
        if !self.settings.set(name, text) {
            return Err(ConfigError::text(source, name, text));
        }
        self.mark(name, source);
        Ok(())
    }

    /// Sets a value from a file.
    pub(crate) fn read(
        &mut self,
        name: &str,
        raw: &Raw,
        source: Source,
    ) -> Result<(), ConfigError> {
        if !self.settings.read(name, raw) {
            let mut error = ConfigError::value(source, name, raw.shown());
            // `quiet = "yes"` has the wrong type, `tee = "9"` the wrong text.
            let setting = Setting::named(name);
            let text = match raw {
                Raw::Text(text) => Some(text.clone()),
                _ => raw
                    .json()
                    .filter(|_| setting.is_some_and(|known| known.takes_table))
                    .map(|value| value.to_string()),
            };
            if let (Some(text), ConfigError::Value { wrong, .. }) = (text, &mut error)
                && !Settings::default().set(name, &text)
                && let Some(setting) = setting
            {
                *wrong = fault(setting, &text);
            }
            return Err(error);
        }
        self.mark(name, source);
        Ok(())
    }

    /// Sets an environment variable for the ranks.
    ///
    /// # Errors
    /// [`ConfigError::Variable`] if the name or value is not valid, or the launcher itself sets or reads the variable.
    pub fn set_env(&mut self, name: &str, value: &str, source: Source) -> Result<(), ConfigError> {
        let reason = if name.is_empty() || name.contains(['=', '\0']) {
            "is not a valid name of a variable"
        } else if env::TABLE.iter().any(|it| it.name == name) {
            "is set by the launcher, with a different value for each rank"
        } else if env::LAUNCHERS_OWN.contains(&name) {
            "is read by the launcher and not passed to the ranks: set it where the launcher runs"
        } else if value.contains('\0') {
            "has a value with a zero byte in it"
        } else {
            self.settings.env.insert(name.to_owned(), value.to_owned());
            self.mark(&format!("{ENV_PREFIX}{name}"), source);
            return Ok(());
        };
        Err(ConfigError::Variable { source_of: source, name: name.to_owned(), reason })
    }

    /// Sets an argument of Accelerate's plugins.
    ///
    /// # Errors
    /// [`ConfigError::UnknownKey`] for an unknown argument, [`ConfigError::Value`] for a value that it does not accept.
    pub fn set_plugin(
        &mut self,
        name: &str,
        text: &str,
        source: Source,
    ) -> Result<(), ConfigError> {
        let Some(argument) = PluginArgument::named(name) else {
            let hint = suggest::closest(name, ARGUMENTS.iter().map(|argument| argument.name))
                .map_or_else(String::new, |known| format!(": did you mean `{known}`?"));
            return Err(ConfigError::UnknownKey { at: source, key: name.to_owned(), hint });
        };
        match argument.parse(text) {
            Ok(value) => {
                self.keep_plugin(name, value, source);
                Ok(())
            }
            Err(wrong) => Err(ConfigError::Value {
                source_of: source,
                name: name.to_owned(),
                found: format!("`{text}`"),
                wrong,
            }),
        }
    }

    pub(crate) fn keep_plugin(&mut self, name: &str, value: String, source: Source) {
        self.settings.accelerate.insert(name.to_owned(), value);
        self.mark(&format!("{PLUGIN_PREFIX}{name}"), source);
    }

    /// Removes an argument of Accelerate's plugins.
    pub(crate) fn reset_plugin(&mut self, name: &str) {
        self.settings.accelerate.remove(name);
        self.sources.remove(&format!("{PLUGIN_PREFIX}{name}"));
    }

    /// Returns the source of a setting, of a variable (`env.NAME`), or of an argument of Accelerate's plugins
    /// (`accelerate.NAME`). Returns `None` if it is not set.
    #[must_use]
    pub fn source(&self, name: &str) -> Option<&Source> {
        self.sources.get(name)
    }

    /// Returns `true` if a value comes from this file.
    #[must_use]
    pub fn has_source_in(&self, file: &Path) -> bool {
        self.sources.values().any(|it| matches!(it, Source::File { path, .. } if path == file))
    }

    /// Returns `true` if the setting was set by the user, and is not a default.
    #[must_use]
    pub fn is_given(&self, name: &str) -> bool {
        self.source(name).is_some_and(|source| *source != Source::Default)
    }

    /// Returns this layer with the values of `lower` where this layer has none.
    #[must_use]
    pub fn over(self, lower: Self) -> Self {
        let mut layers = lower;
        layers.settings.overlay(self.settings);
        layers.sources.extend(self.sources);
        layers.notes.extend(self.notes);
        layers
    }

    /// Resets a setting to its default.
    pub fn reset(&mut self, name: &str) {
        self.settings.unset(name);
        self.sources.remove(name);
        if let Some(default) = Setting::named(name).and_then(|it| it.default) {
            self.settings.set(name, default);
            self.mark(name, Source::Default);
        }
    }

    pub(crate) fn mark(&mut self, name: &str, source: Source) {
        self.sources.insert(name.to_owned(), source);
    }

    /// Adds a note about a setting, which `--explain` shows.
    pub fn note(&mut self, source: Source, text: impl Into<String>) {
        self.notes.push(Note { source, text: text.into(), is_warning: false });
    }

    /// Adds a warning about a setting, which is shown at each launch.
    pub fn warn(&mut self, source: Source, text: impl Into<String>) {
        self.notes.push(Note { source, text: text.into(), is_warning: true });
    }
}

/// Prefix of variables' names among the sources.
pub(crate) const ENV_PREFIX: &str = "env.";
/// Prefix of the names of plugin arguments among the sources.
pub(crate) const PLUGIN_PREFIX: &str = "accelerate.";

#[cfg(test)]
mod tests {
    use super::*;

    fn flag(name: &str) -> Source {
        Source::Flag(name.to_owned())
    }

    #[test]
    fn the_upper_layer_wins_and_keeps_the_rest() {
        let mut lower = Layer::default();
        let file = Source::File { path: "a.toml".into(), line: 3 };
        lower.set("nproc", "2", file.clone()).unwrap();
        lower.set("role", "actor", file.clone()).unwrap();
        lower.set_env("A", "1", file.clone()).unwrap();
        lower.set_env("B", "1", file.clone()).unwrap();
        let mut upper = Layer::default();
        upper.set("nproc", "gpu", flag("nproc")).unwrap();
        upper.set_env("B", "2", flag("env")).unwrap();

        let both = upper.over(lower);
        assert_eq!(both.settings.text("nproc").as_deref(), Some("gpu"));
        assert_eq!(both.source("nproc"), Some(&flag("nproc")));
        assert_eq!(both.source("role"), Some(&file));
        assert_eq!(both.settings.env.values().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(both.source("env.A"), Some(&file));
        assert_eq!(both.source("env.B"), Some(&flag("env")));
    }

    #[test]
    fn wrong_values_say_what_was_expected() {
        let mut layer = Layer::default();
        let table = [
            ("nproc", "0", "`0`, expected a whole number from 1, or auto, gpu or cpu"),
            ("nnodes", "4:1", "`4:1`, expected a number of hosts from 1, or MIN:MAX"),
            ("master-port", "70000", "`70000`, expected a port, from 0 to 65535"),
            ("shutdown-timeout", "-1", "`-1`, expected a number of seconds"),
            ("env-pass", "a,,b", "`a,,b`, expected a list of words, separated by commas"),
            ("hosts", "a:x", "`a:x`, expected a number of ranks after `:`"),
        ];
        for (name, text, expected) in table {
            let error = layer.set(name, text, flag(name)).unwrap_err().to_string();
            assert_eq!(error, format!("flag --{name}: {name} is {expected}"));
        }
        assert_eq!(layer, Layer::default());
        let error = layer.set_env("BRIGADE_RDZV_SECRET", "0", flag("env")).unwrap_err().to_string();
        let expected = "flag --env: BRIGADE_RDZV_SECRET is read by the launcher and not passed";
        assert!(error.starts_with(expected), "{error}");
        let error = layer.set_env("RANK", "0", flag("env")).unwrap_err().to_string();
        assert!(error.starts_with("flag --env: RANK is set by the launcher"), "{error}");
    }
}
