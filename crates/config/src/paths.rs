//! Locations of settings files.

use std::path::{Path, PathBuf};

use crate::source::Source;
use crate::variables::{CONFIG, Variables};

/// Path of a settings file, with the reason why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsPath {
    /// Path of the file.
    pub path: PathBuf,
    /// Reason why the file was chosen.
    pub chosen_by: ChosenBy,
}

/// Reason why a settings file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// The flag `--config` selects the file.
    Flag,
    /// The variable `BRIGADE_CONFIG` selects the file.
    Variable,
    /// The user's settings, at their default location.
    User,
    /// The settings of Accelerate, at their default location. The user has no settings file for Brigade.
    Accelerate,
}

impl ChosenBy {
    /// Returns `true` if the user named the file. It must then exist.
    #[must_use]
    pub fn is_named(self) -> bool {
        matches!(self, Self::Flag | Self::Variable)
    }

    /// Returns the reason as a phrase, for errors and explanations.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Flag => "flag --config",
            Self::Variable => "environment BRIGADE_CONFIG",
            Self::User => "the user's own settings",
            Self::Accelerate => "Accelerate's default, because there is no Brigade settings file",
        }
    }
}

/// Returns the settings file to read: the one that the user named, or else the user's own, or else Accelerate's.
#[must_use]
pub fn to_read(
    flag: Option<&Path>,
    variables: &Variables,
    is_there: impl Fn(&Path) -> bool,
) -> Option<SettingsPath> {
    if let Some(named) = named(flag, variables) {
        return Some(named);
    }
    let user = own(variables).map(|path| SettingsPath { path, chosen_by: ChosenBy::User });
    let accelerate = accelerate_default(variables)
        .map(|path| SettingsPath { path, chosen_by: ChosenBy::Accelerate });
    user.into_iter().chain(accelerate).find(|place| is_there(&place.path))
}

/// Returns the settings file to write: the one that the user named, or else the user's own. Returns `None` without a
/// home folder.
#[must_use]
pub fn to_write(flag: Option<&Path>, variables: &Variables) -> Option<SettingsPath> {
    named(flag, variables)
        .or_else(|| own(variables).map(|path| SettingsPath { path, chosen_by: ChosenBy::User }))
}

fn named(flag: Option<&Path>, variables: &Variables) -> Option<SettingsPath> {
    let flag = flag.map(|path| SettingsPath { path: path.to_owned(), chosen_by: ChosenBy::Flag });
    flag.or_else(|| {
        let path = variables.value(CONFIG)?.into();
        Some(SettingsPath { path, chosen_by: ChosenBy::Variable })
    })
}

/// Returns `$XDG_CONFIG_HOME/brigade/config.toml`, by default in `~/.config`. By the XDG convention a relative path in
/// the variable is ignored.
fn own(variables: &Variables) -> Option<PathBuf> {
    let folder = absolute(variables, "XDG_CONFIG_HOME")
        .or_else(|| Some(absolute(variables, "HOME")?.join(".config")))?;
    Some(folder.join("brigade").join("config.toml"))
}

/// Returns `$HF_HOME/accelerate/default_config.yaml`, by default in `~/.cache/huggingface`.
fn accelerate_default(variables: &Variables) -> Option<PathBuf> {
    let folder = variables.value("HF_HOME").map(PathBuf::from).or_else(|| {
        let cache = absolute(variables, "XDG_CACHE_HOME")
            .or_else(|| Some(absolute(variables, "HOME")?.join(".cache")))?;
        Some(cache.join("huggingface"))
    })?;
    Some(folder.join("accelerate").join("default_config.yaml"))
}

/// Returns `true` if `source` is the file that `accelerate config` writes at Accelerate's default location: the user
/// did not ask Brigade to read that file.
#[must_use]
pub fn is_accelerates_default(source: &Source, variables: &Variables) -> bool {
    matches!(source, Source::File { path, .. } if Some(path) == accelerate_default(variables).as_ref())
}

fn absolute(variables: &Variables, name: &str) -> Option<PathBuf> {
    variables.value(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_file_is_read() {
        // --config, variables, what is there, what is read
        type Case<'a> =
            (Option<&'a str>, &'a [(&'a str, &'a str)], &'a [&'a str], Option<(&'a str, ChosenBy)>);
        let own = "/h/.config/brigade/config.toml";
        let accelerate = "/h/.cache/huggingface/accelerate/default_config.yaml";
        let home = ("HOME", "/h");
        let table: [Case<'_>; 10] = [
            (Some("a.toml"), &[home, (CONFIG, "b.toml")], &[own], Some(("a.toml", ChosenBy::Flag))),
            (None, &[home, (CONFIG, "b.toml")], &[own], Some(("b.toml", ChosenBy::Variable))),
            (None, &[home, (CONFIG, "")], &[own], Some((own, ChosenBy::User))),
            (None, &[home], &[own, accelerate], Some((own, ChosenBy::User))),
            (None, &[home], &[accelerate], Some((accelerate, ChosenBy::Accelerate))),
            (None, &[home], &[], None),
            (None, &[], &[own], None),
            (
                None,
                &[home, ("XDG_CONFIG_HOME", "/x")],
                &["/x/brigade/config.toml"],
                Some(("/x/brigade/config.toml", ChosenBy::User)),
            ),
            (None, &[home, ("XDG_CONFIG_HOME", "x")], &[own], Some((own, ChosenBy::User))),
            (
                None,
                &[home, ("HF_HOME", "/f")],
                &["/f/accelerate/default_config.yaml"],
                Some(("/f/accelerate/default_config.yaml", ChosenBy::Accelerate)),
            ),
        ];
        for (flag, set, there, expected) in table {
            let variables: Variables = set.iter().copied().collect();
            let found = to_read(flag.map(Path::new), &variables, |path| {
                there.iter().any(|it| Path::new(it) == path)
            });
            let expected =
                expected.map(|(path, chosen_by)| SettingsPath { path: path.into(), chosen_by });
            assert_eq!(found, expected, "{flag:?} {set:?} {there:?}");
        }
    }
}
