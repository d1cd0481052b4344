//! Finds a program as a shell does.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// Error for a name that is not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutableError {
    /// The file does not exist.
    #[error("program {} not found{hint}", name.display())]
    NotFound {
        /// Name or path that was requested.
        name: OsString,
        /// Places that were searched, and the next thing to do.
        hint: String,
    },
    /// The file may not be executed.
    #[error("{} is not executable: `chmod +x` it, or give its interpreter first, as in `python3 {}`",
        path.display(), path.display())]
    NotExecutable {
        /// Path of the file.
        path: PathBuf,
    },
    /// The path leads to a directory.
    #[error("{} is a directory, not a program", path.display())]
    Directory {
        /// Path of the directory.
        path: PathBuf,
    },
}

impl ExecutableError {
    /// Appends to the hint of a program that was not found.
    #[must_use]
    pub fn with_hint(mut self, more: &str) -> Self {
        if let Self::NotFound { hint, .. } = &mut self {
            hint.push_str(more);
        }
        self
    }

    /// Returns the exit code that a shell gives for this error.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } | Self::Directory { .. } => 126,
        }
    }
}

/// Finds the executable file for `name`: the path itself if it has a slash, else the first match in `path`.
///
/// # Errors
/// The file does not exist, or it cannot be executed.
pub fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, ExecutableError> {
    if name.as_bytes().contains(&b'/') {
        let file = Path::new(name);
        return match kind_of(file) {
            Kind::Program => Ok(file.to_owned()),
            Kind::Directory => Err(ExecutableError::Directory { path: file.to_owned() }),
            Kind::Locked => Err(ExecutableError::NotExecutable { path: file.to_owned() }),
            Kind::Nothing => {
                Err(ExecutableError::NotFound { name: name.to_owned(), hint: String::new() })
            }
        };
    }
    let mut locked = None;
    if !name.is_empty() {
        // An empty part of PATH means the current directory, as in a shell.
        for folder in std::env::split_paths(path.unwrap_or_else(|| DEFAULT_PATH.as_ref())) {
            let file = if folder.as_os_str().is_empty() {
                Path::new(".").join(name)
            } else {
                folder.join(name)
            };
            match kind_of(&file) {
                Kind::Program => return Ok(file),
                Kind::Locked => locked = locked.or(Some(file)),
                Kind::Directory | Kind::Nothing => {}
            }
        }
    }
    if let Some(path) = locked {
        return Err(ExecutableError::NotExecutable { path });
    }
    let hint = match kind_of(Path::new(name)) {
        Kind::Program | Kind::Locked => {
            format!(" in PATH: for the file in this folder, write ./{}", name.display())
        }
        Kind::Directory | Kind::Nothing => " in PATH".to_owned(),
    };
    Err(ExecutableError::NotFound { name: name.to_owned(), hint })
}

/// Kind of file at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file that may be executed.
    Program,
    /// A file that may not be executed.
    Locked,
    /// A directory, which cannot be executed.
    Directory,
    /// No file, or none that this process can access.
    Nothing,
}

/// Returns the kind of file that a path leads to.
#[must_use]
pub fn kind_of(file: &Path) -> Kind {
    match file.metadata() {
        Err(_) => Kind::Nothing,
        Ok(meta) if meta.is_dir() => Kind::Directory,
        Ok(_) if access(file, AccessFlags::X_OK).is_ok() => Kind::Program,
        Ok(_) => Kind::Locked,
    }
}

/// Search path of a shell when PATH is not set.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn write(path: &Path, mode: u32) {
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn looks_where_a_shell_looks() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        fs::create_dir_all(a.join("both")).unwrap();
        fs::create_dir(&b).unwrap();
        write(&a.join("locked"), 0o644);
        write(&b.join("locked"), 0o755);
        write(&b.join("both"), 0o755);
        write(&b.join("data"), 0o644);
        let path = std::env::join_paths([&a, &b]).unwrap();
        let find = |name: &str| find(OsStr::new(name), Some(&path));

        assert_eq!(find("locked"), Ok(b.join("locked")), "goes on past a file it may not run");
        assert_eq!(find("both"), Ok(b.join("both")), "goes on past a directory");
        assert_eq!(find("data"), Err(ExecutableError::NotExecutable { path: b.join("data") }));
        assert!(matches!(find("neither"), Err(ExecutableError::NotFound { .. })));
        assert!(matches!(find(""), Err(ExecutableError::NotFound { .. })));

        let slash = |file: &Path| find(file.to_str().unwrap());
        assert_eq!(slash(&b.join("both")), Ok(b.join("both")));
        assert_eq!(slash(&a), Err(ExecutableError::Directory { path: a.clone() }));
        assert_eq!(
            slash(&a.join("locked")),
            Err(ExecutableError::NotExecutable { path: a.join("locked") })
        );
        assert!(matches!(slash(&a.join("none")), Err(ExecutableError::NotFound { .. })));
    }
}
