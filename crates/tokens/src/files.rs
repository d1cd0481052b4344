//! Atomic writing of files, and their errors.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// Makes the error of a file or folder from the system's reason.
pub(crate) fn io_error(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::Io { path: path.to_owned(), source }
}

/// Makes a file from what `write` writes: it replaces the file of this name when all of it is on the disk, and a
/// process that is killed meanwhile changes nothing.
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

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Makes a file for a moment that others may read once it has its name.
fn temporary(folder: &Path) -> std::io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    // The process's umask takes away what it does not allow.
    let permissions = fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().permissions(permissions).tempfile_in(folder)
}

/// Waits until the names of a folder's files are on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(io_error(folder))
}
