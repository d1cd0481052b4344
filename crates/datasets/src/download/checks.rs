//! Size and checksums of a published file, and their comparison with a file on disk.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use brigade_rank_env::text::counted;
use md5::Md5;
use sha2::{Digest, Sha256};

/// A published file: its name and the known facts about its content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteFile<'a> {
    pub(crate) name: &'a str,
    pub(crate) bytes: Option<u64>,
    pub(crate) sha256: Option<&'a str>,
    /// MD5 of the first mebibyte alone.
    pub(crate) md5_of_start: Option<&'a str>,
}

/// Descriptions of the expected and the found content of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl<'a> RemoteFile<'a> {
    pub(crate) const fn new(name: &'a str, bytes: u64, sha256: &'a str) -> Self {
        Self { name, bytes: Some(bytes), sha256: Some(sha256), md5_of_start: None }
    }

    /// Compares a file with all known facts. Reads only as much of it as that needs.
    pub(crate) fn difference(&self, file: &mut File) -> io::Result<Option<Difference>> {
        let bytes = file.metadata()?.len();
        if let Some(difference) = self.difference_in_size(bytes) {
            return Ok(Some(difference));
        }
        io::Seek::rewind(file)?;
        if let Some(expected) = self.md5_of_start {
            let found = digest::<Md5>(&mut file.take(START_BYTES))?;
            if !found.eq_ignore_ascii_case(expected) {
                let text = |sum| {
                    format!("{}, of which the first MiB has md5 {sum}", counted(bytes, "byte"))
                };
                let (expected, found) = (text(expected), text(&found));
                return Ok(Some(Difference { expected, found }));
            }
            io::Seek::rewind(file)?;
        }
        if let Some(expected) = self.sha256 {
            let found = digest::<Sha256>(file)?;
            if !found.eq_ignore_ascii_case(expected) {
                let text = |sum| format!("{} with sha256 {sum}", counted(bytes, "byte"));
                let (expected, found) = (text(expected), text(&found));
                return Ok(Some(Difference { expected, found }));
            }
        }
        Ok(None)
    }

    pub(crate) fn difference_in_size(&self, found: u64) -> Option<Difference> {
        let expected = self.bytes.filter(|expected| *expected != found)?;
        Some(Difference { expected: counted(expected, "byte"), found: counted(found, "byte") })
    }
}

/// Result of comparing an existing file with the published one.
pub(crate) enum Existing {
    /// The file is the published one.
    Published,
    /// The file does not exist or cannot be examined.
    Missing,
    /// Another file, with a description of the difference.
    Other(String),
}

/// Compares the file at `target` with the published file. After a SHA-256 comparison, a stamp file beside it records
/// the result, which is valid as long as the system reports no change to the file. A file that was changed only just
/// now gets no stamp yet, and is compared again the next time.
pub(crate) fn existing(file: &RemoteFile<'_>, target: &Path) -> Existing {
    let Ok(found) = fs::metadata(target) else { return Existing::Missing };
    // Taken before the comparison, during which the file may change as well.
    let settled = is_settled(&found, SystemTime::now());
    let shown = target.display();
    let stamped = |sha256| {
        fs::read_to_string(stamp_path(target))
            .is_ok_and(|stamp| stamp == stamp_text(sha256, &found))
    };
    if file.difference_in_size(found.len()).is_none() && file.sha256.is_some_and(stamped) {
        return Existing::Published;
    }
    match File::open(target).and_then(|mut open| file.difference(&mut open)) {
        Ok(None) => {
            if let Some(sha256) = file.sha256.filter(|_| settled) {
                stamp(file.name, sha256, target, &found);
            }
            Existing::Published
        }
        Ok(Some(Difference { expected, found })) => {
            Existing::Other(format!("{shown} has {found}, the published file {expected}"))
        }
        Err(error) => Existing::Other(format!("{shown} cannot be read: {error}")),
    }
}

/// Returns `true` if each change to the file from `now` on gives it another ctime than it has. The ctime counts in
/// ticks of the kernel, of 10 ms at most (before Linux 6.13, and wherever nothing has asked for the time since the last
/// tick): a younger file can change without another ctime (git's "racy" entries).
fn is_settled(found: &Metadata, now: SystemTime) -> bool {
    const TWO_TICKS: Duration = Duration::from_millis(20);
    let (Ok(seconds), Ok(nanoseconds)) =
        (u64::try_from(found.ctime()), u32::try_from(found.ctime_nsec()))
    else {
        return false;
    };
    let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds);
    // A clock that is behind that of the file system's host is not evidence.
    now.duration_since(changed).is_ok_and(|age| age >= TWO_TICKS)
}

/// Records that a file in its current state was compared with its digest. If the stamp cannot be written, as in a
/// folder that is shared read-only, the file is compared again the next time.
fn stamp(name: &str, sha256: &str, target: &Path, verified: &Metadata) {
    let path = stamp_path(target);
    let folder = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    let mut part = tempfile::Builder::new();
    let prefix = format!(".{name}.");
    part.prefix(&prefix).suffix(".part");
    // The usual mode of a file, because a data folder is often shared. The process's umask still applies.
    part.permissions(PermissionsExt::from_mode(0o666));
    let written = part.tempfile_in(folder).and_then(|mut part| {
        part.write_all(stamp_text(sha256, verified).as_bytes())?;
        part.persist(&path).map_err(|error| error.error)
    });
    if let Err(error) = written {
        tracing::debug!("cannot write {}: {error}", path.display());
    }
}

/// Returns `.NAME.verified` beside the file.
fn stamp_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.verified"))
}

/// Returns the text of the stamp: the digest, and attributes that change when the file does. A program can set the time
/// of the last write (mtime), but not that of the last change (ctime).
fn stamp_text(sha256: &str, found: &Metadata) -> String {
    format!(
        "sha256 {sha256} bytes {} inode {} mtime {}.{:09} ctime {}.{:09}\n",
        found.len(),
        found.ino(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec()
    )
}

/// Returns the digest of all bytes of `from`, in hexadecimal digits.
fn digest<D: Digest>(from: &mut impl Read) -> io::Result<String> {
    let mut hash = D::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => hash.update(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Number of bytes of an archive that fastai's checksum covers.
const START_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    const BODY: &[u8] = b"four and twenty blackbirds";

    fn file() -> RemoteFile<'static> {
        let sha256 = "590a5f6ba472edb53193656a2b731bfb71ebafddd561c9117294b4da0eb4c620";
        RemoteFile::new("pie.gz", BODY.len() as u64, sha256)
    }

    #[test]
    fn a_file_is_compared_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("pie.gz");
        // A file that was copied by hand: the first call that finds it old enough compares it, and writes the stamp.
        fs::write(&target, BODY).unwrap();
        let begun = Instant::now();
        let stamp = loop {
            assert!(matches!(existing(&file(), &target), Existing::Published));
            if let Ok(stamp) = fs::read_to_string(stamp_path(&target)) {
                break stamp;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no stamp is written");
            thread::sleep(Duration::from_millis(5));
        };
        let begins = format!("sha256 {} bytes 26 ", file().sha256.unwrap());
        assert!(stamp.starts_with(&begins), "{stamp}");
        assert!(matches!(existing(&file(), &target), Existing::Published));

        // Another content with the old times.
        let times = fs::metadata(&target).unwrap().modified().unwrap();
        let changed = File::options().write(true).open(&target).unwrap();
        (&changed).write_all(b"five").unwrap();
        changed.set_modified(times).unwrap();
        assert!(matches!(existing(&file(), &target), Existing::Other(_)));
        // A stamp that was copied from another file is not valid for this one.
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("pie.gz"), [b'x'; 26]).unwrap();
        fs::write(stamp_path(&other.path().join("pie.gz")), stamp).unwrap();
        assert!(matches!(existing(&file(), &other.path().join("pie.gz")), Existing::Other(_)));
    }

    #[test]
    fn a_file_that_has_only_just_changed_is_not_settled() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let found = written.as_file().metadata().unwrap();
        let changed =
            SystemTime::UNIX_EPOCH + Duration::new(found.ctime() as u64, found.ctime_nsec() as u32);
        let after = |milliseconds| changed + Duration::from_millis(milliseconds);
        for (now, settled) in [(after(0), false), (after(10), false), (after(20), true)] {
            assert_eq!(is_settled(&found, now), settled, "{now:?} of {changed:?}");
        }
        assert!(!is_settled(&found, changed - Duration::from_secs(3600)), "another host's clock");
    }

    /// Digests of zeros, computed with md5sum.
    #[test]
    fn the_md5_is_that_of_the_first_mebibyte() {
        let mebibyte = "b6d81b360a5672d80c27430f39153e2c";
        let expect = |bytes, md5_of_start| RemoteFile {
            name: "zeros",
            bytes: Some(bytes),
            sha256: None,
            md5_of_start: Some(md5_of_start),
        };
        let mut zeros = tempfile::tempfile().unwrap();
        zeros.set_len((1 << 20) + 5).unwrap();
        assert_eq!(expect((1 << 20) + 5, mebibyte).difference(&mut zeros).unwrap(), None);
        // Of a file shorter than 1 MiB, it is the digest of the whole file.
        zeros.set_len(26).unwrap();
        let difference = expect(26, mebibyte).difference(&mut zeros).unwrap().unwrap();
        assert_eq!(
            difference.expected,
            format!("26 bytes, of which the first MiB has md5 {mebibyte}")
        );
        let found = difference.found.rsplit(' ').next().unwrap().to_uppercase();
        assert_eq!(expect(26, &found).difference(&mut zeros).unwrap(), None);
        let difference = expect(27, &found).difference(&mut zeros).unwrap().unwrap();
        assert_eq!((&*difference.expected, &*difference.found), ("27 bytes", "26 bytes"));
    }
}
