//! Handle of a file whose tensors are read.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Opens a file for reading.
///
/// # Errors
/// Fails if the file cannot be opened, and with [`io::ErrorKind::InvalidInput`] for a named pipe, a device or a folder:
/// tensors are read at their offsets, and opening a pipe would wait for a writer.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let text = "it is not a regular file, whose tensors can be read at their offsets";
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Handle of a file whose tensors are read: a file that stays open, or one that is opened for each read. Folders with a
/// file for each tensor can have more files than a process may have open.
#[derive(Debug)]
pub struct FileHandle(Handle);

#[derive(Debug)]
enum Handle {
    Open(File),
    Closed { path: PathBuf, device: u64, inode: u64 },
}

impl From<File> for FileHandle {
    fn from(file: File) -> Self {
        Self(Handle::Open(file))
    }
}

impl FileHandle {
    /// Returns the handle of a file that is closed now and opened again for each read.
    pub(crate) fn closed(path: &Path, file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let (device, inode) = (metadata.dev(), metadata.ino());
        Ok(Self(Handle::Closed { path: path.to_owned(), device, inode }))
    }

    /// Returns the file, open at any position.
    ///
    /// # Errors
    /// Fails if a closed file cannot be opened or is no longer a regular file, and with [`io::ErrorKind::NotFound`] if
    /// another file has its name now.
    pub(crate) fn open(&self) -> io::Result<OpenedFile<'_>> {
        match &self.0 {
            Handle::Open(file) => Ok(OpenedFile::Held(file)),
            Handle::Closed { path, device, inode } => {
                let file = open_regular(path)?;
                let metadata = file.metadata()?;
                if (metadata.dev(), metadata.ino()) != (*device, *inode) {
                    let text = "it was replaced while the weights were in use: load them again";
                    return Err(io::Error::new(io::ErrorKind::NotFound, text));
                }
                Ok(OpenedFile::Own(file))
            }
        }
    }
}

/// An open file of a [`FileHandle`].
#[derive(Debug)]
pub(crate) enum OpenedFile<'h> {
    Held(&'h File),
    Own(File),
}

impl Deref for OpenedFile<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Held(file) => file,
            Self::Own(file) => file,
        }
    }
}
