//! The folder into which an archive is unpacked, with checks of each entry.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use super::Limits;
use crate::DatasetError;
use crate::progress::Progress;

/// Creates an archive's entries below a folder, and nowhere else.
///
/// Symbolic links are made after everything else, so that nothing is ever written through one.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    archive: &'a Path,
    root: &'a Path,
    limits: Limits,
    /// Size of all files so far.
    bytes: u64,
    /// Number of bytes read that belong to no file.
    skipped: u64,
    /// Number of entries of any kind that were read.
    entries: u64,
    /// Number of files, folders and links that were made.
    files: u64,
    /// Folder of the last entry. The next entry is usually in the same one.
    folder: PathBuf,
    /// Location of each link in the tree, and its target.
    links: Vec<(PathBuf, PathBuf)>,
    link_bytes: usize,
    buffer: Vec<u8>,
    progress: Progress,
}

type Result<T> = std::result::Result<T, DatasetError>;

impl<'a> Tree<'a> {
    /// Starts with `root`, an empty folder.
    pub(super) fn new(archive: &'a Path, root: &'a Path, limits: Limits) -> Self {
        Self {
            archive,
            root,
            limits,
            bytes: 0,
            skipped: 0,
            entries: 0,
            files: 0,
            folder: PathBuf::new(),
            links: Vec::new(),
            link_bytes: 0,
            buffer: vec![0; 128 << 10],
            progress: Progress::new(format!("unpacking {}", archive.display()), 0, None),
        }
    }

    pub(super) fn archive(&self) -> &'a Path {
        self.archive
    }

    /// Counts one more entry. Entries for which nothing is created count too, because they also take time.
    pub(super) fn entry(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries > self.limits.files {
            return Err(self.too_many_files());
        }
        Ok(())
    }

    /// Returns the error of an entry that is refused.
    pub(super) fn refused(&self, name: &[u8], reason: impl Into<String>) -> DatasetError {
        let entry = String::from_utf8_lossy(name.get(..SHOWN_BYTES).unwrap_or(name)).into_owned();
        DatasetError::Refused { path: self.archive.into(), entry, reason: reason.into() }
    }

    /// Returns the error of an archive that cannot be read further: an error of the disk, or damage.
    pub(super) fn damaged(&self, cause: io::Error) -> DatasetError {
        let path = self.archive.into();
        match cause.raw_os_error() {
            Some(_) => DatasetError::Read { path, cause },
            None => DatasetError::DamagedArchive { path, entries: self.entries, cause },
        }
    }

    pub(super) fn directory(&mut self, name: &[u8]) -> Result<()> {
        let relative = self.relative(name)?;
        self.make_folder(&relative, name)
    }

    /// Creates a file with all bytes of `from`.
    pub(super) fn file(&mut self, name: &[u8], executable: bool, from: impl Read) -> Result<()> {
        let path = self.place(name)?;
        let mode = if executable { 0o777 } else { 0o666 };
        let mut options = File::options();
        options.write(true).create_new(true).mode(mode);
        let opened = match options.open(&path) {
            // Of two files with one name the later is kept, as in an archive to which files were appended.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                fs::remove_file(&path).and_then(|()| options.open(&path))
            }
            opened => opened,
        };
        let mut file = opened.map_err(|cause| write_error(&path, 0, cause))?;
        let left = self.limits.bytes - self.bytes;
        self.bytes += self.copy(from, left, |part, bytes| {
            file.write_all(part).map_err(|cause| write_error(&path, bytes, cause))
        })?;
        Ok(())
    }

    /// Reads and discards bytes that belong to no file.
    pub(super) fn skip(&mut self, from: impl Read) -> Result<()> {
        let left = self.limits.bytes.saturating_add(PADDING_BYTES) - self.skipped;
        self.skipped += self.copy(from, left, |_, _| Ok(()))?;
        Ok(())
    }

    /// Creates another name for an existing file.
    pub(super) fn hard_link(&mut self, name: &[u8], target: &[u8]) -> Result<()> {
        let original = self.root.join(self.relative(target)?);
        let is_file = |found: fs::Metadata| found.is_file();
        if !fs::symlink_metadata(&original).is_ok_and(is_file) {
            let target = String::from_utf8_lossy(target.get(..SHOWN_BYTES).unwrap_or(target));
            let reason =
                format!("it is a link to {target:?}, which is not an earlier file of the archive");
            return Err(self.refused(name, reason));
        }
        let path = self.place(name)?;
        if path == original {
            return Ok(());
        }
        let linked = match fs::hard_link(&original, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                fs::remove_file(&path).and_then(|()| fs::hard_link(&original, &path))
            }
            linked => linked,
        };
        linked.map_err(|cause| write_error(&path, 0, cause))
    }

    /// Records a symbolic link. It is created by `finish`.
    pub(super) fn symlink(&mut self, name: &[u8], target: &[u8]) -> Result<()> {
        let relative = self.relative(name)?;
        self.place(name)?;
        self.link_bytes += name.len() + target.len();
        if self.link_bytes > MAX_LINK_BYTES {
            return Err(
                self.refused(name, format!("there are more than {MAX_LINK_BYTES} bytes of links"))
            );
        }
        self.links.push((relative, PathBuf::from(OsStr::from_bytes(target))));
        Ok(())
    }

    /// Creates the links, and returns the folder that contains everything: the root, or the single folder in it.
    pub(super) fn finish(mut self) -> Result<PathBuf> {
        if self.files == 0 {
            let (path, found) = (self.archive.into(), "an archive without files".to_owned());
            return Err(DatasetError::NotAnArchive { path, found });
        }
        let links = std::mem::take(&mut self.links);
        let mut tops: BTreeSet<PathBuf> = BTreeSet::new();
        let entries = fs::read_dir(self.root).map_err(|cause| write_error(self.root, 0, cause))?;
        for entry in entries {
            let entry = entry.map_err(|cause| write_error(self.root, 0, cause))?;
            tops.insert(entry.path());
        }
        let linked = links.iter().filter(|(link, _)| link.components().count() == 1);
        tops.extend(linked.map(|(link, _)| self.root.join(link)));
        let only = tops.pop_first().filter(|top| tops.is_empty() && top.is_dir());
        let top = only.unwrap_or_else(|| self.root.to_owned());
        for (link, target) in links {
            let path = self.root.join(&link);
            let folder = path.parent().unwrap_or(self.root);
            let depth = folder.strip_prefix(&top).map_or(0, |inner| inner.components().count());
            if !stays_in(&target, depth) {
                let reason =
                    format!("it is a link to {target:?}, which may lead out of the folder");
                return Err(self.refused(link.as_os_str().as_bytes(), reason));
            }
            symlink(&target, &path).map_err(|cause| write_error(&path, 0, cause))?;
        }
        Ok(top)
    }

    /// Passes all bytes of `from`, up to `left`, to `to`, each time with the count so far. Returns the count.
    fn copy(
        &mut self,
        mut from: impl Read,
        left: u64,
        mut to: impl FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<u64> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut bytes = 0;
        let copied = loop {
            let count = match from.read(&mut buffer) {
                Ok(0) => break Ok(bytes),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => break Err(self.damaged(error)),
            };
            bytes += count as u64;
            if bytes > left {
                let (path, limit) = (self.archive.into(), self.limits.bytes);
                let (unit, option) = ("bytes", "max_bytes");
                break Err(DatasetError::ArchiveTooLarge { path, limit, unit, option });
            }
            if let Err(error) = to(buffer.get(..count).unwrap_or_default(), bytes) {
                break Err(error);
            }
            self.progress.advance(count as u64);
        };
        self.buffer = buffer;
        copied
    }

    /// Returns the path of a new file, whose folder exists.
    fn place(&mut self, name: &[u8]) -> Result<PathBuf> {
        self.count()?;
        let relative = self.relative(name)?;
        let folder = relative.parent().unwrap_or_else(|| Path::new(""));
        if relative.file_name().is_none() {
            return Err(self.refused(name, "it has no name"));
        }
        if folder != self.folder {
            self.make_folder(folder, name)?;
        }
        Ok(self.root.join(relative))
    }

    fn make_folder(&mut self, relative: &Path, name: &[u8]) -> Result<()> {
        let mut path = self.root.to_owned();
        for part in relative {
            path.push(part);
            match fs::create_dir(&path) {
                Ok(()) => self.count()?,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    if !path.is_dir() {
                        return Err(self.refused(name, "another entry is a file of the same name"));
                    }
                }
                Err(cause) => return Err(write_error(&path, 0, cause)),
            }
        }
        self.folder = relative.to_owned();
        Ok(())
    }

    fn count(&mut self) -> Result<()> {
        self.files += 1;
        if self.files > self.limits.files {
            return Err(self.too_many_files());
        }
        Ok(())
    }

    fn too_many_files(&self) -> DatasetError {
        let (path, limit) = (self.archive.into(), self.limits.files);
        DatasetError::ArchiveTooLarge { path, limit, unit: "files", option: "max_files" }
    }

    /// Returns an entry's path relative to the root, if it is inside of it.
    fn relative(&self, name: &[u8]) -> Result<PathBuf> {
        if name.len() > MAX_NAME_BYTES || name.contains(&0) {
            return Err(self.refused(name, "it is not the name of a file"));
        }
        let mut relative = PathBuf::new();
        for part in Path::new(OsStr::from_bytes(name)).components() {
            match part {
                Component::Normal(part) => relative.push(part),
                Component::CurDir => {}
                Component::ParentDir => {
                    return Err(self.refused(name, "a name with .. may lead out of the folder"));
                }
                Component::RootDir | Component::Prefix(_) => {
                    return Err(self.refused(name, "its name is absolute"));
                }
            }
        }
        Ok(relative)
    }
}

/// Returns `true` if a link in a folder `depth` levels below the root stays inside, whatever other links exist: `..` is
/// only allowed at its beginning, where all folders are real ones.
fn stays_in(target: &Path, depth: usize) -> bool {
    let mut parts = target.components().filter(|part| *part != Component::CurDir).peekable();
    let mut ups = 0;
    while parts.next_if_eq(&Component::ParentDir).is_some() {
        ups += 1;
    }
    ups <= depth && parts.all(|part| matches!(part, Component::Normal(_)))
}

fn write_error(path: &Path, bytes: u64, cause: io::Error) -> DatasetError {
    DatasetError::Write { path: path.into(), bytes, cause }
}

/// Maximum length of a name: `PATH_MAX`.
const MAX_NAME_BYTES: usize = 4096;
/// Number of bytes of an entry's name that are shown in an error.
const SHOWN_BYTES: usize = 200;
/// Maximum size of the padding after the end of a tar archive, which is written in blocks.
const PADDING_BYTES: u64 = 1 << 20;
/// Limit on the memory for links, which are kept until the end.
const MAX_LINK_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_go_up_only_at_their_beginning_and_never_out() {
        let table = [
            ("b", 0, true),
            ("a/b", 0, true),
            ("./b", 0, true),
            ("..", 1, true),
            (".././b", 1, true),
            ("../../b", 2, true),
            ("..", 0, false),
            ("../b", 0, false),
            ("../../b", 1, false),
            // If `x` is a link to the root, this is outside.
            ("x/..", 2, false),
            ("../x/../..", 3, false),
            ("/etc/passwd", 3, false),
            ("/", 3, false),
        ];
        for (target, depth, expected) in table {
            assert_eq!(stays_in(Path::new(target), depth), expected, "{target} at {depth}");
        }
    }
}
