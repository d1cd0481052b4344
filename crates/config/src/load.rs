//! Loading of settings from files and the environment.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::error::ConfigError;
use crate::layer::Layer;
use crate::paths::{self, ChosenBy, SettingsPath};
use crate::settings::Settings;
use crate::source::Source;
use crate::variables::Variables;
use crate::{accelerate, file};

/// Settings from files and the environment, before any flag.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Layer of the settings: environment over file over defaults.
    pub layer: Layer,
    /// Settings file that was read, if there was one.
    pub file: Option<SettingsPath>,
}

/// Reads the settings file, if there is one, and the environment.
///
/// The file is `named`, or else that of `BRIGADE_CONFIG`, or else the user's own, or else the one that `accelerate
/// config` wrote. The user did not ask Brigade to read the last one, so it only causes a warning if it cannot be used.
///
/// # Errors
/// Fails when a named file cannot be read, or when a value in a file or variable is not valid for its setting.
pub fn load(named: Option<&Path>, variables: &Variables) -> Result<Loaded, ConfigError> {
    let place = paths::to_read(named, variables, Path::exists);
    let mut lower = match &place {
        Some(place) => read_place(place)?,
        None => Layer::default(),
    };
    if let Some(home) = variables.value("HOME") {
        expand(&mut lower.settings, Path::new(home));
    }
    let layer = variables.layer()?.over(lower.over(Layer::defaults()));
    Ok(Loaded { layer, file: place })
}

/// Expands `~/` as a shell does on a command line. Folders on other hosts are not expanded: the home folder may differ.
fn expand(settings: &mut Settings, home: &Path) {
    for path in [&mut settings.hostfile, &mut settings.rdzv_secret_file, &mut settings.log_dir] {
        if let Some(path) = path
            && let Ok(rest) = path.strip_prefix("~")
        {
            *path = home.join(rest);
        }
    }
}

fn read_place(place: &SettingsPath) -> Result<Layer, ConfigError> {
    let read = read_text(place).and_then(|text| read_layer(&place.path, &text));
    match read {
        Err(error) if place.chosen_by == ChosenBy::Accelerate => {
            let mut layer = Layer::default();
            let source = Source::File { path: place.path.clone(), line: 1 };
            layer.warn(
                source,
                format!("not used: {error}; run `brigade config` to write a Brigade settings file"),
            );
            Ok(layer)
        }
        read => read,
    }
}

/// Reads a settings file of either kind: those of Accelerate end in `.yaml`, `.yml` or `.json`.
///
/// # Errors
/// Returns the same errors as [`file::read`] and [`accelerate::read`].
pub fn read_layer(path: &Path, text: &str) -> Result<Layer, ConfigError> {
    if is_accelerates(path) {
        accelerate::read(path, text).map(|import| import.layer)
    } else {
        file::read(path, text)
    }
}

/// Returns `true` if the file's extension is one of Accelerate's: YAML or JSON. Brigade's own files are TOML.
#[must_use]
pub fn is_accelerates(path: &Path) -> bool {
    path.extension().is_some_and(|found| {
        ["yaml", "yml", "json"].iter().any(|ending| found.eq_ignore_ascii_case(ending))
    })
}

/// Reads the text of a settings file.
///
/// # Errors
/// Fails when the file cannot be read, is not UTF-8, or is too long for a settings file.
pub fn read_text(place: &SettingsPath) -> Result<String, ConfigError> {
    let fault = |source| ConfigError::Unreadable {
        path: place.path.clone(),
        asked_by: place.chosen_by.reason().to_owned(),
        source,
    };
    let mut text = String::new();
    // The length of a device or pipe is unknown before reading.
    let length = File::open(&place.path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(fault)?;
    if length as u64 > MAX_BYTES {
        return Err(fault(io::Error::other("it is too long for a settings file")));
    }
    Ok(text)
}

/// Maximum size of a settings file: a thousand times that of a long one.
const MAX_BYTES: u64 = 1 << 22;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_speak_of_the_home_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        let text =
            "version = 1\n[hosts]\nhostfile = \"~/hosts\"\n[output]\nlog-dir = \"~x/logs\"\n";
        std::fs::write(&path, text).unwrap();
        let variables = [("HOME", "/h"), ("BRIGADE_WORKDIR", "~/job")].into_iter().collect();
        let settings = load(Some(&path), &variables).unwrap().layer.settings;
        assert_eq!(settings.hostfile.unwrap(), Path::new("/h/hosts"));
        assert_eq!(settings.log_dir.unwrap(), Path::new("~x/logs"));
        assert_eq!(settings.workdir.unwrap(), Path::new("~/job"));
    }
}
