//! Compiled C++ that the packages of a release carry, in the folder where builds look for it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::cache;

/// Folder of Brigade's compiled C++ that all projects of the user share: `$XDG_CACHE_HOME/brigade/objects`, by default in
/// `~/.cache`, or the folder that `BRIGADE_OBJECT_CACHE` names.
///
/// The build script of `brigade-torch` reads it. It checks what it finds there, and compiles everything itself where
/// nothing fits.
#[derive(Clone, Debug)]
pub struct ObjectCache {
    folder: PathBuf,
}

impl ObjectCache {
    /// Returns the user's cache, by the rules of the build script. Creates no files. `None` if `BRIGADE_OBJECT_CACHE` is
    /// empty, or the user has no home folder.
    #[must_use]
    pub fn of_user() -> Option<Self> {
        if let Some(folder) = env::var_os("BRIGADE_OBJECT_CACHE") {
            return (!folder.is_empty()).then(|| Self::at(PathBuf::from(folder)));
        }
        Some(Self::at(cache::of_brigade()?.join("objects")))
    }

    /// Returns a cache in this folder, which need not exist.
    #[must_use]
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the folder of the cache.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Copies the compiled C++ of the package that this program was installed from into the cache, each file whole or not
    /// at all. Returns `false` if the package has none, or the cache has the same files.
    ///
    /// Looks in `share/brigade`, beside the program as in an unpacked archive, or beside its folder `bin`.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or the cache cannot be written.
    pub fn install_from(&self, program: &Path) -> io::Result<bool> {
        let folders = program.ancestors().skip(1).take(2);
        let mut is_changed = false;
        for folder in folders.map(|it| it.join("share/brigade")) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if is_archive(&entry.file_name()) {
                    is_changed |= self.copy(&entry.path(), &entry.file_name())?;
                }
            }
        }
        Ok(is_changed)
    }

    fn copy(&self, from: &Path, name: &OsStr) -> io::Result<bool> {
        let bytes = fs::read(from)?;
        let to = self.folder.join(name);
        if fs::read(&to).is_ok_and(|found| found == bytes) {
            return Ok(false);
        }
        fs::create_dir_all(&self.folder)?;
        let mut unfinished = tempfile::Builder::new()
            .prefix(name)
            // The build script removes what an interruption leaves.
            .suffix(".unfinished")
            // What the user's mask allows.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(&self.folder)?;
        unfinished.write_all(&bytes)?;
        // Else a power failure after the rename leaves a file without its content.
        unfinished.as_file().sync_all()?;
        unfinished.persist(to)?;
        Ok(true)
    }
}

/// Returns `true` for the names under which the build script looks for archives from a release.
fn is_archive(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with("brigade-torch-") && name.ends_with(".objects")
}
