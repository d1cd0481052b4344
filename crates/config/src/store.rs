//! Atomic writing of settings files.

use std::fs::{self, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::ConfigError;

/// Action for a file that already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Keeps the file, and fails.
    Refuse,
    /// Replaces the file with the new one.
    Replace,
    /// Replaces the file, and keeps the old one with `.bak` appended to its name.
    KeepBeside,
}

/// Writes `text` to `path` atomically: a reader sees the old file or the new one, never a part.
///
/// A symbolic link is kept, and its target is written. A new file gets the permissions that the umask leaves, a
/// replaced one keeps its own. Returns the path of the old file if it was kept.
///
/// # Errors
/// [`ConfigError::Exists`] if the file exists and must be kept, [`ConfigError::Unwritable`] if the folder does not
/// exist or cannot be written to.
pub fn write(path: &Path, text: &str, existing: Existing) -> Result<Option<PathBuf>, ConfigError> {
    let place = Destination::at(path)?;
    if place.old.is_some() && existing == Existing::Refuse {
        return Err(ConfigError::Exists(path.to_owned()));
    }
    let mut file = place.new_file()?;
    file.write_all(text.as_bytes()).map_err(|error| place.fault(&error))?;
    file.as_file().sync_all().map_err(|error| place.fault(&error))?;

    let mut kept = None;
    if existing == Existing::KeepBeside && place.real.exists() {
        let mut name = place.real.clone().into_os_string();
        name.push(".bak");
        fs::copy(&place.real, &name)
            .map_err(|error| unwritable(path, format!("no copy of the old one: {error}")))?;
        kept = Some(name.into());
    }
    let done = if existing == Existing::Refuse {
        file.persist_noclobber(&place.real)
    } else {
        file.persist(&place.real)
    };
    done.map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => ConfigError::Exists(path.to_owned()),
        _ => place.fault(&error.error),
    })?;
    Ok(kept)
}

/// Checks that [`write()`] can create a file at `path`, before a user answers questions for it.
///
/// # Errors
/// [`ConfigError::Unwritable`], as of [`write()`]. An existing file is not an error.
pub fn check(path: &Path) -> Result<(), ConfigError> {
    Destination::at(path)?.new_file().map(|_| ())
}

/// Destination of a file to write.
struct Destination<'a> {
    /// Path as the user gave it.
    path: &'a Path,
    /// Path with all links resolved.
    real: PathBuf,
    old: Option<Metadata>,
}

impl<'a> Destination<'a> {
    fn at(path: &'a Path) -> Result<Self, ConfigError> {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let old = fs::metadata(&real).ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            return Err(unwritable(path, "it is not a file".to_owned()));
        }
        Ok(Self { path, real, old })
    }

    fn folder(&self) -> &Path {
        let parent = self.real.parent().filter(|it| !it.as_os_str().is_empty());
        parent.unwrap_or_else(|| Path::new("."))
    }

    /// Creates a temporary file beside it, which is deleted unless it is moved into place.
    fn new_file(&self) -> Result<NamedTempFile, ConfigError> {
        let permissions = match &self.old {
            Some(old) => old.permissions(),
            None => Permissions::from_mode(NEW_FILE),
        };
        let mut builder = tempfile::Builder::new();
        let file = builder.permissions(permissions).prefix(".brigade-").tempfile_in(self.folder());
        file.map_err(|error| self.fault(&error))
    }

    fn fault(&self, error: &io::Error) -> ConfigError {
        let folder = self.folder().display();
        let reason = match error.kind() {
            io::ErrorKind::NotFound => {
                format!("there is no folder {folder}: make it with `mkdir -p {folder}`")
            }
            io::ErrorKind::NotADirectory => format!("{folder} is not a folder"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => format!(
                "the folder {folder} may not be written to; choose another file with --config"
            ),
            _ => error.to_string(),
        };
        unwritable(self.path, reason)
    }
}

fn unwritable(path: &Path, reason: String) -> ConfigError {
    ConfigError::Unwritable { path: path.to_owned(), reason }
}

/// Permissions of a new file, before the umask.
const NEW_FILE: u32 = 0o666;

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |it: io::Result<fs::DirEntry>| it.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn old_files_are_left_replaced_or_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        assert_eq!(write(&path, "one", Existing::Refuse).unwrap(), None);
        let error = write(&path, "two", Existing::Refuse).unwrap_err().to_string();
        assert!(error.ends_with("already exists: pass --force to overwrite it"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");

        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert_eq!(write(&path, "two", Existing::Replace).unwrap(), None);
        let kept = write(&path, "three", Existing::KeepBeside).unwrap().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three");
        assert_eq!(fs::read_to_string(kept).unwrap(), "two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(folder.path()), ["a.toml", "a.toml.bak"]);
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write(&link, "new", Existing::Replace).unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn unwritable_paths_are_named_with_the_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path();
        fs::write(here.join("file"), "").unwrap();
        let table = [
            (here.join("none/a.toml"), "there is no folder"),
            (here.join("file/a.toml"), "is not a folder"),
            (here.to_owned(), "it is not a file"),
            ("/proc/a.toml".into(), "cannot write /proc/a.toml: "),
        ];
        for (path, expected) in table {
            let error = write(&path, "x", Existing::Replace).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(check(&path).unwrap_err().to_string(), error);
        }
        assert_eq!(names(here), ["file"], "nothing is left behind");
    }
}
