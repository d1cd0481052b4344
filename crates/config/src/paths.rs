//! Where settings files lie.

use std::path::{Path, PathBuf};

use crate::source::Source;
use crate::variables::{CONFIG, Variables};

/// A settings file, and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsPath {
    /// The file.
    pub path: PathBuf,
    /// What chose it.
    pub chosen_by: ChosenBy,
}

/// Why a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    /// `--config`.
    Flag,
    /// `BRIGADE_CONFIG`.
    Variable,
    /// It lies where the user's own settings lie.
    User,
    /// It lies where Accelerate keeps its own, and the user has none for Brigade.
    Accelerate,
}

impl ChosenBy {
    /// A user named the file, so it must be there.
    #[must_use]
    pub fn is_named(self) -> bool {
        matches!(self, Self::Flag | Self::Variable)
    }

    /// For errors and explanations.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Flag => "flag --config",
            Self::Variable => "environment BRIGADE_CONFIG",
            Self::User => "the user's own settings",
            Self::Accelerate => "Accelerate's default, because there is no file of Brigade's own",
        }
    }
}

/// The file to read: the one that a user named, else the user's, else Accelerate's.
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

/// The file to write: the one that a user named, else the user's. `None` without a home folder.
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

/// `$XDG_CONFIG_HOME/brigade/config.toml`, by default in `~/.config`. The convention says that a
/// relative path in the variable is to be ignored.
fn own(variables: &Variables) -> Option<PathBuf> {
    let folder = absolute(variables, "XDG_CONFIG_HOME")
        .or_else(|| Some(absolute(variables, "HOME")?.join(".config")))?;
    Some(folder.join("brigade").join("config.toml"))
}

/// `$HF_HOME/accelerate/default_config.yaml`, by default in `~/.cache/huggingface`.
fn accelerate_default(variables: &Variables) -> Option<PathBuf> {
    let folder = variables.value("HF_HOME").map(PathBuf::from).or_else(|| {
        let cache = absolute(variables, "XDG_CACHE_HOME")
            .or_else(|| Some(absolute(variables, "HOME")?.join(".cache")))?;
        Some(cache.join("huggingface"))
    })?;
    Some(folder.join("accelerate").join("default_config.yaml"))
}

/// Returns whether `source` is the file that `accelerate config` writes where Accelerate looks for it: the user has
/// not asked Brigade to read that file.
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
