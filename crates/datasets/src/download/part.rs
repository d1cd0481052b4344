//! The received part of a file whose download is not complete.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;
use ureq::http::header::{CONTENT_LENGTH, ETAG, HeaderMap, LAST_MODIFIED};

use super::Failure;
use super::checks::RemoteFile;
use crate::DatasetError;
use crate::lock::open_locked;
use crate::progress::Progress;

/// The locked file `.NAME.part` beside the target: the bytes that have been received, also by a process that was
/// killed. `.NAME.part.source` records where they come from.
#[derive(Debug)]
pub(super) struct Part {
    file: File,
    path: PathBuf,
    target: PathBuf,
    is_complete: bool,
}

/// The file on a server from which the bytes come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) url: String,
    /// Value for `If-Range`: a strong ETag or the time of the last change.
    pub(super) validator: Option<String>,
    /// Size of the whole file in bytes.
    pub(super) bytes: Option<u64>,
}

impl Source {
    /// Returns the source that an answer with the whole file describes.
    pub(super) fn of(url: &str, headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        // A weak ETag may be the same for different bytes with the same meaning.
        let etag = text(ETAG).filter(|etag| etag.starts_with('"'));
        Self {
            url: url.to_owned(),
            validator: etag.or_else(|| text(LAST_MODIFIED)).map(str::to_owned),
            bytes: text(CONTENT_LENGTH).and_then(|bytes| bytes.trim().parse().ok()),
        }
    }

    fn encode(&self) -> String {
        let bytes = self.bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        format!("{}\n{}\n{bytes}\n", self.url, self.validator.as_deref().unwrap_or_default())
    }

    fn decode(text: &str) -> Option<Self> {
        let mut lines = text.split('\n');
        let (url, validator, bytes) = (lines.next()?, lines.next()?, lines.next()?);
        lines.next()?;
        Some(Self {
            url: url.to_owned(),
            validator: Some(validator.to_owned()).filter(|it| !it.is_empty()),
            bytes: bytes.parse().ok(),
        })
    }
}

impl Part {
    /// Opens the existing part, or creates an empty one. Waits while another process holds it.
    pub(super) fn open(target: &Path) -> Result<Self, DatasetError> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = target.with_file_name(format!(".{name}.part"));
        let file = open_locked(&path).map_err(|cause| DatasetError::Write {
            path: path.clone(),
            bytes: 0,
            cause,
        })?;
        Ok(Self { file, path, target: target.into(), is_complete: false })
    }

    /// Returns the number of bytes that have been received.
    pub(super) fn len(&self) -> Result<u64, Failure> {
        Ok(self.file.metadata().map_err(|cause| self.failed(0, cause))?.len())
    }

    /// Returns the source of the received bytes, if bytes from `url` can be appended to them: if the server can check
    /// that its file has not changed, or a digest is known.
    pub(super) fn source(&self, url: &str, file: &RemoteFile<'_>) -> Option<Source> {
        let mut source = Source::decode(&fs::read_to_string(self.source_path()).ok()?)?;
        let is_same = source.url == url && source.validator.is_some();
        if !is_same {
            file.sha256?;
            source.validator = None;
        }
        Some(source)
    }

    /// Starts over, with a file from this source.
    pub(super) fn begin(&mut self, source: &Source) -> Result<(), Failure> {
        let bytes = source.bytes.unwrap_or_default();
        self.clear()?;
        let path = self.source_path();
        fs::write(&path, source.encode())
            .map_err(|cause| Failure::Disk(DatasetError::Write { path, bytes, cause }))
    }

    /// Discards the received bytes.
    pub(super) fn clear(&mut self) -> Result<(), Failure> {
        self.file.set_len(0).map_err(|cause| self.failed(0, cause))
    }

    /// Appends all bytes of `from`, to a file of `total` bytes. Stops as soon as there are too many.
    pub(super) fn append(
        &mut self,
        mut from: impl Read,
        total: Option<u64>,
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let of = total.map(|total| format!(" of {total}")).unwrap_or_default();
        let mut bytes = self
            .file
            .seek(SeekFrom::End(0))
            .map_err(|cause| self.failed(total.unwrap_or_default(), cause))?;
        let mut buffer = vec![0; 64 << 10];
        while total.is_none_or(|total| bytes <= total) {
            let count = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    let reason = format!("broke off after {bytes}{of} bytes: {error}");
                    return Err(Failure::Passing(reason));
                }
            };
            let arrived = buffer.get(..count).unwrap_or_default();
            self.file
                .write_all(arrived)
                .map_err(|cause| self.failed(total.unwrap_or(bytes + count as u64), cause))?;
            bytes += count as u64;
            progress.advance(count as u64);
        }
        match total {
            Some(total) if bytes < total => Err(Failure::Passing(format!(
                "the file ended after {bytes} of {}",
                counted(total, "byte")
            ))),
            _ => Ok(()),
        }
    }

    /// Compares the complete file with the published facts, and renames it to its target.
    pub(super) fn finish(&mut self, file: &RemoteFile<'_>) -> Result<(), Failure> {
        let bytes = self.len()?;
        let difference = file.difference(&mut self.file);
        if let Some(difference) = difference.map_err(|cause| self.failed(bytes, cause))? {
            return Err(Failure::Mismatch(format!(
                "checksum mismatch for {}: expected {}, found {}",
                self.target.display(),
                difference.expected,
                difference.found
            )));
        }
        let placed = self.file.sync_all().and_then(|()| fs::rename(&self.path, &self.target));
        placed.map_err(|cause| self.failed(bytes, cause))?;
        self.is_complete = true;
        // Left behind if the process is killed here; the next download overwrites it.
        let _ = fs::remove_file(self.source_path());
        Ok(())
    }

    fn failed(&self, bytes: u64, cause: io::Error) -> Failure {
        Failure::Disk(DatasetError::Write { path: self.target.clone(), bytes, cause })
    }

    fn source_path(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".source");
        path.into()
    }
}

impl Drop for Part {
    /// Keeps the received bytes for another attempt, and removes the files if there are none.
    fn drop(&mut self) {
        if !self.is_complete && self.file.metadata().is_ok_and(|found| found.len() == 0) {
            let _ = fs::remove_file(self.source_path());
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_as_they_were_written() {
        let mut source = Source {
            url: "https://host/a.tgz?b".into(),
            validator: Some("\"3f-1\"".into()),
            bytes: Some(9),
        };
        assert_eq!(Source::decode(&source.encode()), Some(source.clone()));
        source.validator = None;
        source.bytes = None;
        assert_eq!(Source::decode(&source.encode()), Some(source));
        // Left by a process that was killed during the write.
        for text in ["", "https://host/a.tgz", "https://host/a.tgz\n\"3f-1\"\n12"] {
            assert_eq!(Source::decode(text), None, "{text}");
        }
    }

    #[test]
    fn weak_etags_are_not_validators() {
        let source = |rows: &[(&'static str, &str)]| {
            let rows = rows.iter().map(|(name, value)| {
                (name.parse::<ureq::http::HeaderName>().unwrap(), value.parse().unwrap())
            });
            Source::of("u", &rows.collect())
        };
        let date = "Wed, 21 Oct 2015 07:28:00 GMT";
        let both = [("etag", "W/\"1\""), ("last-modified", date), ("content-length", "12")];
        assert_eq!(source(&both).validator.as_deref(), Some(date));
        assert_eq!(source(&both).bytes, Some(12));
        assert_eq!(source(&[("etag", "W/\"1\"")]).validator, None);
        let strong = [("etag", "\"1\""), ("last-modified", date)];
        assert_eq!(source(&strong).validator.as_deref(), Some("\"1\""));
    }
}
