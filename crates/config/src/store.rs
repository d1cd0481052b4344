//! Writes a settings file whole, or not at all.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;

/// What to do with a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Leave it, and fail.
    Refuse,
    /// Put the new one in its place.
    Replace,
    /// The same, and keep the old one, with `.bak` after its name.
    KeepBeside,
}

/// Writes `text` to `path`. A reader sees the old file or the new one, never a part.
///
/// A link stays a link: what it points to is written. A new file gets the permissions that the
/// user's mask leaves, a replaced one keeps its own. Gives the place of the kept old file.
///
/// Errors when the folder is not there or may not be written to, or a file is there that is to be
/// left.
pub fn write(path: &Path, text: &str, existing: Existing) -> Result<Option<PathBuf>, ConfigError> {
    let fault = |reason: String| ConfigError::Unwritable { path: path.to_owned(), reason };
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = fs::metadata(&real).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        return Err(fault("it is not a file".to_owned()));
    }
    if old.is_some() && existing == Existing::Refuse {
        return Err(ConfigError::Exists(path.to_owned()));
    }
    let parent = real.parent().filter(|it| !it.as_os_str().is_empty());
    let folder = parent.unwrap_or_else(|| Path::new("."));
    let in_folder = |error: io::Error| {
        fault(match error.kind() {
            io::ErrorKind::NotFound => {
                format!("there is no folder {0}: make it with `mkdir -p {0}`", folder.display())
            }
            io::ErrorKind::NotADirectory => format!("{} is not a folder", folder.display()),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => format!(
                "the folder {} may not be written to; choose another file with --config",
                folder.display()
            ),
            _ => error.to_string(),
        })
    };
    let permissions = match &old {
        Some(old) => old.permissions(),
        None => Permissions::from_mode(NEW_FILE),
    };
    let mut file = tempfile::Builder::new()
        .permissions(permissions)
        .prefix(".brigade-")
        .tempfile_in(folder)
        .map_err(in_folder)?;
    file.write_all(text.as_bytes()).map_err(in_folder)?;
    file.as_file().sync_all().map_err(in_folder)?;

    let mut kept = None;
    if existing == Existing::KeepBeside && real.exists() {
        let mut name = real.clone().into_os_string();
        name.push(".bak");
        fs::copy(&real, &name)
            .map_err(|error| fault(format!("no copy of the old one: {error}")))?;
        kept = Some(name.into());
    }
    let done = if existing == Existing::Refuse {
        file.persist_noclobber(&real)
    } else {
        file.persist(&real)
    };
    done.map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => ConfigError::Exists(path.to_owned()),
        _ => in_folder(error.error),
    })?;
    Ok(kept)
}

/// Before the user's mask.
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
        assert!(error.ends_with("is there already: --force writes over it"), "{error}");
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
    fn what_is_in_the_way_is_said() {
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
        }
        assert_eq!(names(here), ["file"], "nothing is left behind");
    }
}
