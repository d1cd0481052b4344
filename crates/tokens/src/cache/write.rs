//! Writing of the files of corpora.

use std::fs;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::format::{self, Header, NUMBERS};
use crate::corpus::{Builder, Key, Parts, Sink, Store, Width, widened};
use crate::files::{folder_of, io_error, sync_folder};
use crate::{Result, TokenCorpus};

/// File of numbers under a temporary name.
pub(super) struct FileSink {
    writer: BufWriter<NamedTempFile>,
    crc: crc32fast::Hasher,
    numbers_bytes: u64,
    path: PathBuf,
}

impl FileSink {
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = tempfile::Builder::new()
            .prefix(&prefix(path))
            .suffix(SUFFIX)
            // The umask of the process removes permissions.
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(folder_of(path))?;
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        writer.write_all(&[0; NUMBERS as usize])?;
        Ok(Self { writer, crc: crc32fast::Hasher::new(), numbers_bytes: 0, path: path.into() })
    }
}

impl Write for FileSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write_all(bytes)?;
        self.crc.update(bytes);
        self.numbers_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Sink for FileSink {
    fn place(&self) -> PathBuf {
        self.path.clone()
    }

    fn widen(self) -> io::Result<Self> {
        let mut wide = Self::create(&self.path)?;
        let mut narrow = self.writer.into_inner()?;
        narrow.seek(SeekFrom::Start(NUMBERS))?;
        let mut buffer = vec![0; 1 << 20];
        let mut left = self.numbers_bytes;
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let piece = &mut buffer[..piece];
            narrow.read_exact(piece)?;
            widened(piece, &mut wide)?;
            left -= piece.len() as u64;
        }
        Ok(wide)
    }
}

/// Writes the tables and the header, renames the file to its final name, and opens it.
pub(super) fn finish(builder: Builder<FileSink>, key: Key, path: &Path) -> Result<TokenCorpus> {
    let failed = io_error(path);
    let mut sink = None;
    // Nothing is read until the file has its name.
    let parts = builder.finish(key, |written, width| {
        sink = Some(written);
        Store::Memory(Vec::new(), width)
    })?;
    let Store::Memory(_, width) = parts.store else { return format::open(path) };
    if let Some(sink) = sink {
        complete(sink, &parts, width, path).map_err(&failed)?;
        sync_folder(folder_of(path))?;
    }
    format::open(path)
}

/// Writes an existing corpus.
pub(super) fn save(corpus: &TokenCorpus, path: &Path) -> Result<()> {
    let failed = io_error(path);
    let mut sink = FileSink::create(path).map_err(&failed)?;
    let parts = corpus.parts();
    let width = parts.store.width();
    let numbers = usize::try_from(corpus.token_count()).unwrap_or(usize::MAX);
    parts.store.pieces(0, numbers, |bytes| sink.write_all(bytes).map_err(&failed))?;
    complete(sink, parts, width, path).map_err(&failed)?;
    sync_folder(folder_of(path))
}

fn complete(sink: FileSink, parts: &Parts, width: Width, path: &Path) -> io::Result<()> {
    let FileSink { mut writer, crc: numbers_crc, .. } = sink;
    let mut crc = crc32fast::Hasher::new();
    let mut put = |bytes: &[u8]| {
        crc.update(bytes);
        writer.write_all(bytes)
    };
    let (text, token_ends) = parts.tokens.as_parts();
    let token_ends = token_ends.iter().map(|end| *end as u64);
    let numbers = parts.ends.iter().chain(&parts.times).copied().chain(token_ends);
    numbers.into_iter().try_for_each(|number| put(&number.to_le_bytes()))?;
    put(text.as_bytes())?;
    let header = Header {
        key: parts.key.0,
        width,
        texts: parts.ends.len() as u64,
        numbers: parts.ends.last().copied().unwrap_or(0),
        tokens: parts.times.len() as u64,
        token_bytes: text.len() as u64,
        numbers_crc: numbers_crc.finalize(),
        tables_crc: crc.finalize(),
    };
    let file = writer.into_inner()?;
    file.as_file().write_all_at(&header.to_bytes(), 0)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Removes the files that killed processes have left. The caller holds the lock, so none of them is being written.
pub(super) fn remove_leftovers(path: &Path) {
    let Ok(files) = fs::read_dir(folder_of(path)) else { return };
    for file in files.flatten() {
        let name = file.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&prefix(path)) && name.ends_with(SUFFIX) {
            // A file that cannot be removed is harmless.
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Returns the prefix of the temporary names of the file `path`.
fn prefix(path: &Path) -> String {
    format!(".{}-", path.file_name().unwrap_or_default().to_string_lossy())
}

const SUFFIX: &str = ".partial";
