//! Atomic writing of files, and their errors.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// Returns a function that converts the system's error for a file or folder.
pub(crate) fn io_error(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::Io { path: path.to_owned(), source }
}

/// Creates a file atomically with the content that `write` writes: it replaces the file of this name when all of it is
/// on the disk, and a process that is killed before that changes nothing.
pub(crate) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let failed = io_error(path);
    let folder = folder_of(path);
    let mut writer = BufWriter::new(temporary(folder).map_err(&failed)?);
    write(&mut writer).and_then(|()| writer.flush()).map_err(&failed)?;
    let file = writer.into_inner().map_err(|error| failed(error.into_error()))?;
    file.as_file().sync_all().map_err(&failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    sync_folder(folder)
}

/// Returns the folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates a temporary file that others may read once it has its name.
fn temporary(folder: &Path) -> std::io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    // The umask of the process removes permissions.
    let permissions = fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().permissions(permissions).tempfile_in(folder)
}

/// Waits until the names of a folder's files are on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(io_error(folder))
}
