//! Downloads that are whole or not there: checked, then renamed into place.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use tempfile::Builder;
use ureq::{Agent, http::StatusCode};

use crate::DatasetError;

/// How to download: from where, and how long to try.
///
/// ```
/// use brigade_datasets::Download;
///
/// let mirror = Download::from(["http://mirror.example.org/mnist"]);
/// assert_eq!(mirror.base_urls, ["http://mirror.example.org/mnist"]);
/// assert_eq!(mirror.attempts, 3);
/// ```
#[derive(Clone, Debug)]
pub struct Download {
    /// Addresses that the file's name is appended to, in the order of trial. Empty: the mirrors
    /// of the set. What comes from here must have the published checksum as well.
    pub base_urls: Vec<String>,
    /// How often a mirror is tried that cannot be reached, breaks off or reports a fault of its
    /// own. A file that is not there (404) or has another checksum is not asked for again.
    pub attempts: u32,
    /// The pause before the second attempt; doubled before each further one.
    pub pause: Duration,
    /// The time limit for a connection and for each pause of the sender.
    pub timeout: Duration,
    /// Whether the variables `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` count.
    pub proxy_from_environment: bool,
}

impl Default for Download {
    fn default() -> Self {
        Self {
            base_urls: Vec::new(),
            attempts: 3,
            pause: Duration::from_secs(1),
            timeout: Duration::from_secs(30),
            proxy_from_environment: true,
        }
    }
}

impl<const N: usize> From<[&str; N]> for Download {
    /// The defaults, with these addresses in place of the published mirrors.
    fn from(base_urls: [&str; N]) -> Self {
        Self { base_urls: base_urls.map(str::to_owned).into(), ..Self::default() }
    }
}

/// A file as it was published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteFile {
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    pub(crate) sha256: &'static str,
}

impl Download {
    /// Brings each of `files` into `folder`, unless it lies there already with the right digest.
    /// A file appears under its name only when it is whole, checked and on the disk.
    pub(crate) fn fetch_all(
        &self,
        files: &[RemoteFile],
        mirrors: &[&str],
        folder: &Path,
    ) -> Result<(), DatasetError> {
        let mirrors: Vec<&str> = match self.base_urls.is_empty() {
            true => mirrors.to_vec(),
            false => self.base_urls.iter().map(String::as_str).collect(),
        };
        fs::create_dir_all(folder).map_err(|cause| DatasetError::Write {
            path: folder.into(),
            bytes: files.iter().map(|file| file.bytes).sum(),
            cause,
        })?;
        let agent = self.agent();
        for file in files {
            let target = folder.join(file.name);
            let failures = match existing(file, &target) {
                Existing::Published => continue,
                Existing::Missing => Vec::new(),
                Existing::Other(fact) => {
                    tracing::warn!("{fact}; downloading it again");
                    vec![fact]
                }
            };
            self.fetch(&agent, file, &mirrors, &target, failures)?;
        }
        Ok(())
    }

    fn fetch(
        &self,
        agent: &Agent,
        file: &RemoteFile,
        mirrors: &[&str],
        target: &Path,
        mut failures: Vec<String>,
    ) -> Result<(), DatasetError> {
        for mirror in mirrors {
            let url = format!("{}/{}", mirror.trim_end_matches('/'), file.name);
            let mut pause = self.pause;
            for attempt in 1.. {
                tracing::info!(url, bytes = file.bytes, attempt, "downloading");
                match fetch_once(agent, &url, file, target) {
                    Ok(()) => return Ok(()),
                    Err(Failure::Disk(error)) => return Err(error),
                    Err(Failure::Passing(reason)) if attempt < self.attempts => {
                        tracing::warn!(url, reason, attempt, "download failed, trying again");
                        thread::sleep(pause);
                        pause *= 2;
                    }
                    Err(Failure::Passing(reason)) => {
                        failures.push(format!("{url}: {reason} (tried {attempt} times)"));
                        break;
                    }
                    Err(Failure::Lasting(reason)) => {
                        failures.push(format!("{url}: {reason}"));
                        break;
                    }
                }
            }
        }
        Err(DatasetError::Download { file: file.name.into(), failures })
    }

    fn agent(&self) -> Agent {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(self.timeout))
            .timeout_recv_response(Some(self.timeout))
            .timeout_per_read(Some(self.timeout))
            .user_agent(concat!("brigade/", env!("CARGO_PKG_VERSION")));
        if !self.proxy_from_environment {
            config = config.proxy(None);
        }
        config.build().new_agent()
    }
}

/// What lies in the place of a file.
enum Existing {
    /// The published file.
    Published,
    /// Nothing that can be read.
    Missing,
    /// Something else, in words.
    Other(String),
}

/// Compares what lies at `target` with the published file, by its digest. A stamp beside it says that this
/// was done, for as long as the system knows of no change to the file. One that has only just come gets no stamp
/// yet, and is compared again the next time.
fn existing(file: &RemoteFile, target: &Path) -> Existing {
    let Ok(found) = fs::metadata(target) else { return Existing::Missing };
    // The time before the comparison, in which the file may change as well.
    let settled = is_settled(&found, SystemTime::now());
    let (shown, expected) = (target.display(), file.bytes);
    if found.len() != expected {
        let found = found.len();
        return Existing::Other(format!(
            "{shown} has {found} bytes, the published file {expected}"
        ));
    }
    if fs::read_to_string(stamp_path(target)).is_ok_and(|stamp| stamp == stamp_text(file, &found)) {
        return Existing::Published;
    }
    match File::open(target).and_then(sha256) {
        Ok(sha256) if sha256 == file.sha256 => {
            if settled {
                stamp(file, target, &found);
            }
            Existing::Published
        }
        Ok(sha256) => Existing::Other(format!(
            "{shown} has sha256 {sha256}, the published file {}",
            file.sha256
        )),
        Err(error) => Existing::Other(format!("{shown} cannot be read: {error}")),
    }
}

/// Whether each change to the file from `now` on gives it another ctime than it has. That counts in ticks of the
/// kernel, of 10 ms at most (before Linux 6.13, and wherever nothing has asked for the time since the last tick):
/// what is younger can change without a trace (git's "racy" entries).
fn is_settled(found: &Metadata, now: SystemTime) -> bool {
    const TWO_TICKS: Duration = Duration::from_millis(20);
    let (Ok(seconds), Ok(nanoseconds)) =
        (u64::try_from(found.ctime()), u32::try_from(found.ctime_nsec()))
    else {
        return false;
    };
    let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds);
    // A clock that is behind that of the file system's host tells nothing.
    now.duration_since(changed).is_ok_and(|age| age >= TWO_TICKS)
}

/// Remembers that a file was compared with its digest, in the state in which it is now. Where the stamp
/// cannot be written, as in a folder that is shared read-only, the file is compared again the next time.
fn stamp(file: &RemoteFile, target: &Path, verified: &Metadata) {
    let path = stamp_path(target);
    let folder = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    let written = temporary_in(&folder, file.name).and_then(|mut part| {
        part.write_all(stamp_text(file, verified).as_bytes())?;
        part.persist(&path).map_err(|error| error.error)
    });
    if let Err(error) = written {
        tracing::debug!("cannot write {}: {error}", path.display());
    }
}

/// `.NAME.verified` beside the file.
fn stamp_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.verified"))
}

/// The digest, and what changes when the file does: a program can set the time of the last write, but not
/// that of the last change (ctime).
fn stamp_text(file: &RemoteFile, found: &Metadata) -> String {
    format!(
        "sha256 {} bytes {} inode {} mtime {}.{:09} ctime {}.{:09}\n",
        file.sha256,
        found.len(),
        found.ino(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec()
    )
}

fn sha256(mut file: File) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(hash)),
            Ok(count) => hash.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hexadecimal(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why one attempt failed, by what can be done about it.
enum Failure {
    /// Worth another attempt.
    Passing(String),
    /// The mirror would say the same again.
    Lasting(String),
    /// Another mirror would not help.
    Disk(DatasetError),
}

/// Why this program cannot talk to that server, if it cannot.
fn unreachable(url: &str, has_tls: bool) -> Option<&'static str> {
    let needs_tls = url.get(..6).is_some_and(|it| it.eq_ignore_ascii_case("https:"));
    (needs_tls && !has_tls)
        .then_some("this program was built without the feature `https` of the crate brigade")
}

fn fetch_once(agent: &Agent, url: &str, file: &RemoteFile, target: &Path) -> Result<(), Failure> {
    if let Some(reason) = unreachable(url, cfg!(feature = "https")) {
        return Err(Failure::Lasting(reason.to_owned()));
    }
    let mut response = agent.get(url).call().map_err(|error| match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::RequireHttpsOnly(_) => {
            Failure::Lasting(error.to_string())
        }
        error => Failure::Passing(error.to_string()),
    })?;
    match response.status() {
        StatusCode::OK => {}
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            return Err(Failure::Passing(format!("the server answered {status}")));
        }
        status => return Err(Failure::Lasting(format!("the server answered {status}"))),
    }

    let write_error = |cause| {
        Failure::Disk(DatasetError::Write { path: target.into(), bytes: file.bytes, cause })
    };
    let folder = target.parent().map_or_else(PathBuf::new, Path::to_owned);
    // Removed on every way out but the last; a killed process leaves only this name behind.
    let mut part = temporary_in(&folder, file.name).map_err(write_error)?;
    let (bytes, sha256) = copy(response.body_mut().as_reader(), &mut part, file, target)?;
    if bytes < file.bytes {
        let reason = format!("the file ended after {bytes} of {} bytes", file.bytes);
        return Err(Failure::Passing(reason));
    }
    if bytes > file.bytes || sha256 != file.sha256 {
        let bytes = if bytes > file.bytes { "more".to_owned() } else { bytes.to_string() };
        return Err(Failure::Lasting(format!(
            "checksum mismatch for {}: expected {} bytes with sha256 {}, found {bytes} bytes with \
             sha256 {sha256}",
            target.display(),
            file.bytes,
            file.sha256,
        )));
    }
    part.as_file().sync_all().map_err(write_error)?;
    // Without a stamp: the rename has changed it just now.
    part.persist(target).map_err(|error| write_error(error.error))?;
    Ok(())
}

fn temporary_in(folder: &Path, name: &str) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = Builder::new();
    let prefix = format!(".{name}.");
    builder.prefix(&prefix).suffix(".part");
    // As any other file: a data folder is often shared. The process's mask still applies.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Copies and hashes in one pass; stops at the first byte too many.
fn copy(
    from: impl Read,
    to: &mut impl Write,
    file: &RemoteFile,
    target: &Path,
) -> Result<(u64, String), Failure> {
    let mut from = from.take(file.bytes + 1);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let mut bytes = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                let reason = format!("broke off after {bytes} of {} bytes: {error}", file.bytes);
                return Err(Failure::Passing(reason));
            }
        };
        hash.update(&buffer[..count]);
        to.write_all(&buffer[..count]).map_err(|cause| {
            Failure::Disk(DatasetError::Write { path: target.into(), bytes: file.bytes, cause })
        })?;
        bytes += count as u64;
    }
    Ok((bytes, hexadecimal(hash)))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    const BODY: &[u8] = b"four and twenty blackbirds";

    fn file() -> RemoteFile {
        let sha256 = "590a5f6ba472edb53193656a2b731bfb71ebafddd561c9117294b4da0eb4c620";
        RemoteFile { name: "pie.gz", bytes: BODY.len() as u64, sha256 }
    }

    /// Answers one connection after another with these bytes, then closes; returns the paths that
    /// were asked for.
    fn serve(answers: Vec<Vec<u8>>) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/data/", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            answers.iter().map(|answer| reply(listener.accept().unwrap().0, answer)).collect()
        });
        (url, server)
    }

    fn reply(mut stream: TcpStream, answer: &[u8]) -> String {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let request = lines.next().unwrap().unwrap();
        while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
        stream.write_all(answer).unwrap();
        request.split(' ').nth(1).unwrap().to_owned()
    }

    fn ok(length: usize, body: &[u8]) -> Vec<u8> {
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
        [head.as_bytes(), body].concat()
    }

    fn status(line: &str) -> Vec<u8> {
        format!("HTTP/1.1 {line}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").into()
    }

    fn options(urls: &[&str]) -> Download {
        Download {
            base_urls: urls.iter().map(|url| (*url).to_owned()).collect(),
            pause: Duration::ZERO,
            proxy_from_environment: false,
            ..Download::default()
        }
    }

    /// Runs one download against a server with these answers; what the folder holds afterwards.
    fn run(answers: Vec<Vec<u8>>) -> (Result<(), String>, Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let (url, server) = serve(answers);
        let result = options(&[&url])
            .fetch_all(&[file()], &["http://unused.invalid/"], folder.path())
            .map_err(|error| error.to_string());
        let names = names(folder.path());
        if result.is_ok() {
            assert_eq!(fs::read(folder.path().join(file().name)).unwrap(), BODY);
        }
        (result, names, server.join().unwrap())
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_good_file_arrives_and_is_not_fetched_twice() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("MNIST/raw");
        let (url, server) = serve(vec![ok(BODY.len(), BODY)]);
        options(&[&url]).fetch_all(&[file()], &[], &deep).unwrap();
        assert_eq!(server.join().unwrap(), ["/data/pie.gz"]);
        assert_eq!(fs::read(deep.join("pie.gz")).unwrap(), BODY);
        assert_eq!(names(&deep), ["pie.gz"]);
        // The server is gone: this would fail if it asked.
        options(&[&url]).fetch_all(&[file()], &[], &deep).unwrap();
    }

    #[test]
    fn a_file_of_the_right_size_with_other_bytes_is_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("pie.gz");
        let mut wrong = BODY.to_vec();
        wrong[3] ^= 1;
        fs::write(&target, &wrong).unwrap();
        let offline = options(&["http://127.0.0.1:1"]);
        let error = offline.fetch_all(&[file()], &[], folder.path()).unwrap_err().to_string();
        for part in ["pie.gz has sha256 ", ", the published file 590a5f6b", "refused"] {
            assert!(error.contains(part), "{error}");
        }
        let (url, server) = serve(vec![ok(BODY.len(), BODY)]);
        options(&[&url]).fetch_all(&[file()], &[], folder.path()).unwrap();
        assert_eq!((fs::read(&target).unwrap(), server.join().unwrap().len()), (BODY.to_vec(), 1));
    }

    #[test]
    fn a_file_is_compared_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("pie.gz");
        // Put there by hand: the first call that finds it a little old compares it, and writes the stamp.
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
        assert!(stamp.starts_with(&format!("sha256 {} bytes 26 ", file().sha256)), "{stamp}");
        assert!(matches!(existing(&file(), &target), Existing::Published));

        // Another content under the old times.
        let times = fs::metadata(&target).unwrap().modified().unwrap();
        let changed = File::options().write(true).open(&target).unwrap();
        (&changed).write_all(b"five").unwrap();
        changed.set_modified(times).unwrap();
        assert!(matches!(existing(&file(), &target), Existing::Other(_)));
        // A stamp that was copied from elsewhere does not speak of this file.
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

    #[test]
    fn temporary_failures_are_retried() {
        let busy = status("503 Service Unavailable");
        let (result, names, asked) =
            run(vec![busy, ok(BODY.len(), &BODY[..9]), ok(BODY.len(), BODY)]);
        assert_eq!(result, Ok(()));
        assert_eq!((names.len(), asked.len()), (1, 3));
    }

    #[test]
    fn a_failed_download_says_why_and_leaves_nothing() {
        let mut wrong = BODY.to_vec();
        wrong[3] ^= 1;
        type Row = (&'static str, Vec<Vec<u8>>, Vec<&'static str>);
        let table: Vec<Row> = vec![
            ("missing", vec![status("404 Not Found")], vec!["the server answered 404 Not Found"]),
            (
                "cut short by the server",
                vec![ok(9, &BODY[..9]); 3],
                vec!["the file ended after 9 of 26 bytes (tried 3 times)"],
            ),
            (
                "dropped in the middle",
                vec![ok(26, &BODY[..9]); 3],
                vec!["after 9 of 26 bytes", "(tried 3 times)"],
            ),
            ("dropped at once", vec![vec![]; 3], vec!["pie.gz: ", "(tried 3 times)"]),
            ("not HTTP", vec![b"220 smtp ready\r\n\r\n".to_vec(); 3], vec!["(tried 3 times)"]),
            (
                "other bytes",
                vec![ok(26, &wrong)],
                vec![
                    "checksum mismatch for ",
                    "/pie.gz: expected 26 bytes with sha256 ",
                    "found 26",
                ],
            ),
            (
                "too many bytes",
                vec![ok(27, &[BODY, b"!"].concat())],
                vec!["checksum mismatch", "found more bytes"],
            ),
        ];
        for (name, answers, expected) in table {
            let count = answers.len();
            let (result, names, asked) = run(answers);
            let error = result.expect_err(name);
            assert!(error.starts_with("cannot download pie.gz: http://127.0.0.1:"), "{error}");
            for part in expected {
                assert!(error.contains(part), "{name}: {error}");
            }
            assert_eq!((names, asked.len()), (vec![], count), "{name}");
        }
    }

    #[test]
    fn the_checksum_error_shows_both_sums() {
        let (result, ..) = run(vec![ok(26, &[b'x'; 26])]);
        let error = result.unwrap_err();
        let found: String =
            Sha256::digest([b'x'; 26]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(error.contains(file().sha256) && error.contains(&found), "{error}");
    }

    #[test]
    fn tls_needs_the_feature() {
        assert!(unreachable("HTTPS://host/", false).is_some_and(|it| it.contains("`https`")));
        assert_eq!(unreachable("https://host/", true), None);
        assert_eq!(unreachable("http://host/https:", false), None);
    }

    #[test]
    fn the_next_mirror_is_asked_and_every_failure_is_told() {
        let folder = tempfile::tempdir().unwrap();
        // Nothing listens on port 1, and only root could.
        let closed = "http://127.0.0.1:1";
        let (missing, first) = serve(vec![status("404 Not Found")]);
        let (good, second) = serve(vec![ok(BODY.len(), BODY)]);
        options(&[closed, &missing, &good]).fetch_all(&[file()], &[], folder.path()).unwrap();
        assert_eq!((first.join().unwrap().len(), second.join().unwrap().len()), (1, 1));

        let (missing, first) = serve(vec![status("404 Not Found")]);
        let empty = tempfile::tempdir().unwrap();
        let error = options(&[closed, &missing])
            .fetch_all(&[file()], &[], empty.path())
            .unwrap_err()
            .to_string();
        first.join().unwrap();
        assert!(error.contains(closed) && error.contains(&missing), "{error}");
        assert!(error.contains("refused") && error.contains("404"), "{error}");
    }

    #[test]
    fn a_full_disk_ends_the_download_with_the_path() {
        /// Takes a few bytes, then is full.
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let count = bytes.len().min(self.0);
                self.0 -= count;
                if count == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(count) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let Err(Failure::Disk(error)) = copy(BODY, &mut Full(9), &file(), Path::new("d/pie.gz"))
        else {
            panic!("a full disk is the disk's fault");
        };
        let error = error.to_string();
        assert!(error.starts_with("cannot write d/pie.gz: "), "{error}");
        assert!(error.ends_with("; 26 bytes are needed there"), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        fs::write(&blocked, b"in the way").unwrap();
        let error = options(&["http://127.0.0.1:1/"])
            .fetch_all(&[file()], &[], &blocked.join("raw"))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("cannot write ") && error.contains("file/raw"), "{error}");
    }
}
