//! Folder for temporary files of a run of the suite.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Variable with the folder for temporary files.
pub(super) const TMPDIR: &str = "TMPDIR";

/// Folder for temporary files, in which files that tests leave behind are found.
pub(super) struct Temporary(TempDir);

impl Temporary {
    pub(super) fn new() -> Result<Self> {
        // Processes of other users, such as those of sshd, may need access.
        let permissions = Permissions::from_mode(0o1777);
        let mut folder = tempfile::Builder::new();
        let folder = folder.prefix("suite-").permissions(permissions.clone()).tempdir();
        let folder = folder.context("cannot make a temporary folder")?;
        // The umask was applied at creation.
        fs::set_permissions(folder.path(), permissions)
            .context("cannot open the temporary folder to all")?;
        Ok(Self(folder))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Lists the files that tests have left. Returns `true` if there are none.
    pub(super) fn is_clean(&self) -> Result<bool> {
        let left = leftovers(self.path())?;
        for name in &left {
            eprintln!("error: tests left {name} in the folder for temporary files");
        }
        Ok(left.is_empty())
    }
}

/// Returns files and folders of Brigade's, each with its content, which shows its origin.
fn leftovers(folder: &Path) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let entries = fs::read_dir(folder).context("cannot read the folder for temporary files")?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("brigade-") {
            continue;
        }
        let inside = fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let mut inside: Vec<String> =
            inside.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
        inside.sort();
        inside.truncate(5);
        left.push(match inside.as_slice() {
            [] => name,
            inside => format!("{name} (with {})", inside.join(", ")),
        });
    }
    left.sort();
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tests_leave_is_named() {
        let temporary = Temporary::new().unwrap();
        assert!(temporary.is_clean().unwrap());
        let folder = temporary.path().join("brigade-1-2");
        fs::create_dir_all(folder.join("attempt_0")).unwrap();
        fs::create_dir(temporary.path().join(".tmpAbc")).unwrap();
        fs::write(temporary.path().join("brigade-x"), "").unwrap();
        let expected = ["brigade-1-2 (with attempt_0)", "brigade-x"];
        assert_eq!(leftovers(temporary.path()).unwrap(), expected);
        assert!(!temporary.is_clean().unwrap());
    }
}
