//! Finds a program as a shell does.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::ProgramError;

/// The file that `name` means: itself where it has a slash, else the first match in `path`.
pub(super) fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, ProgramError> {
    if name.as_bytes().contains(&b'/') {
        let file = Path::new(name);
        return match kind_of(file) {
            Kind::Program => Ok(file.to_owned()),
            Kind::Directory => Err(ProgramError::Directory { path: file.to_owned() }),
            Kind::Locked => Err(ProgramError::NotExecutable { path: file.to_owned() }),
            Kind::Nothing => {
                Err(ProgramError::NotFound { name: name.to_owned(), hint: String::new() })
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
        return Err(ProgramError::NotExecutable { path });
    }
    let hint = match kind_of(Path::new(name)) {
        Kind::Program | Kind::Locked => {
            format!(" in PATH: for the file in this folder, write ./{}", name.display())
        }
        Kind::Directory | Kind::Nothing => " in PATH".to_owned(),
    };
    Err(ProgramError::NotFound { name: name.to_owned(), hint })
}

pub(super) enum Kind {
    /// A file that may be run.
    Program,
    /// A file that may not.
    Locked,
    Directory,
    Nothing,
}

pub(super) fn kind_of(file: &Path) -> Kind {
    match file.metadata() {
        Err(_) => Kind::Nothing,
        Ok(meta) if meta.is_dir() => Kind::Directory,
        Ok(_) if access(file, AccessFlags::X_OK).is_ok() => Kind::Program,
        Ok(_) => Kind::Locked,
    }
}

/// Where a shell looks when PATH is not set.
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
        assert_eq!(find("data"), Err(ProgramError::NotExecutable { path: b.join("data") }));
        assert!(matches!(find("neither"), Err(ProgramError::NotFound { .. })));
        assert!(matches!(find(""), Err(ProgramError::NotFound { .. })));

        let slash = |file: &Path| find(file.to_str().unwrap());
        assert_eq!(slash(&b.join("both")), Ok(b.join("both")));
        assert_eq!(slash(&a), Err(ProgramError::Directory { path: a.clone() }));
        assert_eq!(
            slash(&a.join("locked")),
            Err(ProgramError::NotExecutable { path: a.join("locked") })
        );
        assert!(matches!(slash(&a.join("none")), Err(ProgramError::NotFound { .. })));
    }
}
