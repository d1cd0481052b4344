//! Environment variables as a layer of settings.

use std::collections::BTreeMap;
use std::ffi::OsString;

use brigade_rank_env::env;

use crate::error::ConfigError;
use crate::layer::Layer;
use crate::settings::{Setting, TABLE};
use crate::source::Source;
use crate::suggest;

/// Environment variables of a process, captured once.
#[derive(Clone, Debug, Default)]
pub struct Variables(BTreeMap<String, OsString>);

impl Variables {
    /// Captures the variables of this process. Names that are not UTF-8 are skipped.
    #[must_use]
    pub fn gather() -> Self {
        let named = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value));
        Self(std::env::vars_os().filter_map(named).collect())
    }

    /// Returns a variable that is set and not empty.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&OsString> {
        self.0.get(name).filter(|value| !value.is_empty())
    }

    /// Returns the layer of the settings that the variables set.
    ///
    /// For each setting, the first one of these variables that is set takes precedence: `BRIGADE_…`, torchrun's
    /// `PET_…`, Accelerate's `ACCELERATE_…`. An empty variable counts as unset.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if a value is not valid for its setting.
    ///
    /// ```
    /// use brigade_config::Variables;
    ///
    /// let set = [("PET_NPROC_PER_NODE", "2"), ("BRIGADE_NPROC", "4")];
    /// let layer = Variables::from_iter(set).layer()?;
    /// assert_eq!(layer.settings.text("nproc").as_deref(), Some("4"));
    /// assert_eq!(layer.source("nproc").unwrap().to_string(), "environment BRIGADE_NPROC");
    /// # Ok::<(), brigade_config::ConfigError>(())
    /// ```
    pub fn layer(&self) -> Result<Layer, ConfigError> {
        let mut layer = Layer::default();
        for setting in TABLE {
            let own = setting.variable();
            let mut names = [own.as_str()].into_iter().chain(setting.variables.iter().copied());
            if let Some((name, value)) = names.find_map(|name| Some((name, self.value(name)?))) {
                let source = Source::Variable(name.to_owned());
                let Some(text) = value.to_str() else {
                    let found = format!("{} (not UTF-8)", value.display());
                    return Err(ConfigError::value(source, setting.name, found));
                };
                layer.set(setting.name, text, source)?;
            }
        }
        self.read_affinity(&mut layer);
        self.note_what_does_nothing(&mut layer);
        Ok(layer)
    }

    /// Maps Accelerate's switch to a mode of the setting `bind`.
    fn read_affinity(&self, layer: &mut Layer) {
        let is_on = self.value(CPU_AFFINITY).is_some_and(|value| value == "1" || value == "true");
        if is_on && layer.settings.bind.is_none() {
            layer.settings.set("bind", BIND_OF_AFFINITY);
            layer.mark("bind", Source::Variable(CPU_AFFINITY.to_owned()));
        }
    }

    fn note_what_does_nothing(&self, layer: &mut Layer) {
        for (name, reason) in WITHOUT_MEANING {
            if self.value(name).is_some() {
                layer.note(Source::Variable((*name).to_owned()), *reason);
            }
        }
        let known: Vec<String> = TABLE.iter().map(Setting::variable).collect();
        for name in self.0.keys().filter(|name| name.starts_with(OURS)) {
            let is_known = known.contains(name)
                || TABLE.iter().any(|it| it.variables.contains(&name.as_str()))
                || OTHERS.contains(&name.as_str())
                // Belongs to the host: a launcher inside a rank needs it, too.
                || name == env::BRIGADE_HOST_ROOT
                || OF_TESTS.iter().any(|start| name.starts_with(start))
                || env::TABLE.iter().any(|it| it.name == name);
            let word = name.trim_start_matches(OURS).to_ascii_lowercase();
            let meant = suggest::closest(&word, TABLE.iter().map(|it| it.name));
            if let (false, Some(setting)) = (is_known, meant.and_then(Setting::named)) {
                let text = format!("is not a setting: did you mean {}?", setting.variable());
                layer.warn(Source::Variable(name.clone()), text);
            }
        }
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for Variables {
    fn from_iter<T: IntoIterator<Item = (&'a str, &'a str)>>(pairs: T) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect())
    }
}

/// Returns Brigade's environment variables that only the launcher reads. They are not passed to the ranks: a launcher
/// that a rank starts would otherwise start on the same hosts again, or read a file that does not exist.
#[must_use]
pub fn of_the_launcher() -> Vec<String> {
    let settings = TABLE.iter().map(Setting::variable);
    let theirs = TABLE.iter().flat_map(|it| it.variables.iter().copied());
    let ours = theirs.chain(OTHERS).filter(|name| name.starts_with(OURS)).map(str::to_owned);
    settings.chain(ours).collect()
}

/// Variable with the path of the settings file to read.
pub(crate) const CONFIG: &str = "BRIGADE_CONFIG";
const OURS: &str = "BRIGADE_";
/// Brigade's variables that are not settings: their values are never shown, and no file can hold them.
const OTHERS: [&str; 3] = [CONFIG, env::BRIGADE_RDZV_SECRET, env::BRIGADE_ETCD_PASSWORD];
/// Prefixes of variables of Brigade's own tests.
const OF_TESTS: [&str; 2] = ["BRIGADE_TEST_", "BRIGADE_REQUIRE"];
const CPU_AFFINITY: &str = "ACCELERATE_CPU_AFFINITY";
pub(crate) const BIND_OF_AFFINITY: &str = "numa";

/// Variables of torchrun that have no effect here, with the reason.
const WITHOUT_MEANING: &[(&str, &str)] = &[
    ("PET_MONITOR_INTERVAL", "has no effect: the end of a rank is noticed at once"),
    ("PET_START_METHOD", "has no effect: ranks are programs, which are always started anew"),
    (
        "PET_SIGNALS_TO_HANDLE",
        "has no effect: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 reach the ranks",
    ),
    ("PET_EVENT_LOG_HANDLER", "has no effect: there are no event handlers"),
    ("PET_RUN_PATH", "has no effect: a rank's Python runs one script"),
    ("PET_LOGS_SPECS", "has no effect: log files have torchrun's own layout"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_counts_and_empty_is_unset() {
        // variables, setting, value, where from
        type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, Option<&'a str>, Option<&'a str>);
        let table: [Case<'_>; 8] = [
            (
                &[("BRIGADE_NPROC", "4"), ("PET_NPROC_PER_NODE", "2")],
                "nproc",
                Some("4"),
                Some("BRIGADE_NPROC"),
            ),
            (
                &[("BRIGADE_NPROC", ""), ("PET_NPROC_PER_NODE", "2")],
                "nproc",
                Some("2"),
                Some("PET_NPROC_PER_NODE"),
            ),
            (&[("ACCELERATE_USE_CPU", "TRUE")], "cpu", Some("true"), Some("ACCELERATE_USE_CPU")),
            (
                &[("ACCELERATE_MIXED_PRECISION", "bf16")],
                "mixed-precision",
                Some("bf16"),
                Some("ACCELERATE_MIXED_PRECISION"),
            ),
            (
                &[("ACCELERATE_CPU_AFFINITY", "1")],
                "bind",
                Some("numa"),
                Some("ACCELERATE_CPU_AFFINITY"),
            ),
            (&[("ACCELERATE_CPU_AFFINITY", "0")], "bind", None, None),
            (
                &[("ACCELERATE_CPU_AFFINITY", "1"), ("BRIGADE_BIND", "cores")],
                "bind",
                Some("cores"),
                Some("BRIGADE_BIND"),
            ),
            (&[("NPROC", "4")], "nproc", None, None),
        ];
        for (set, name, value, from) in table {
            let layer = set.iter().copied().collect::<Variables>().layer().unwrap();
            assert_eq!(layer.settings.text(name).as_deref(), value, "{set:?}");
            let from = from.map(|name| Source::Variable(name.to_owned()));
            assert_eq!(layer.source(name), from.as_ref(), "{set:?}");
        }
    }

    #[test]
    fn faults_and_typos() {
        let layer = |set: &[(&'static str, &'static str)]| {
            set.iter().copied().collect::<Variables>().layer()
        };
        assert_eq!(
            layer(&[("PET_NNODES", "none")]).unwrap_err().to_string(),
            "environment PET_NNODES: nnodes is `none`, expected a number of hosts from 1, or MIN:MAX"
        );
        let notes = layer(&[
            ("BRIGADE_NPROCS", "4"),
            ("BRIGADE_CONFIG", "x"),
            ("BRIGADE_SSH", "ssh"),
            ("BRIGADE_RDZV_SECRET", "known to the job"),
            ("BRIGADE_ETCD_PASSWORD", "known to etcd"),
            ("BRIGADE_HOST_ROOT", "/host"),
            ("BRIGADE_X", "1"),
            ("BRIGADE_REQUIRE", "hosts"),
            ("BRIGADE_TEST_ETCD", "1"),
        ]);
        let notes: Vec<String> = notes.unwrap().notes.iter().map(ToString::to_string).collect();
        assert_eq!(
            notes,
            ["environment BRIGADE_NPROCS: is not a setting: did you mean BRIGADE_NPROC?"]
        );
        let notes = layer(&[("PET_MONITOR_INTERVAL", "5")]).unwrap().notes;
        assert!(!notes[0].is_warning);
    }
}
