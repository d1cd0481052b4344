//! Downloads that are resumed, checked, then renamed to their final name.

mod checks;
mod part;
mod transfer;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use ureq::Agent;

pub(crate) use checks::RemoteFile;
use checks::{Existing, existing};
use part::Part;
use transfer::Received;

use crate::DatasetError;

/// Options of a download: mirrors, number of attempts, time limits and proxies.
///
/// Bytes that were received are kept in `.NAME.part` beside the file, also if the process is killed. The next attempt
/// or call requests the rest, if the server supports ranges and reports that its file has not changed (`ETag` or
/// `Last-Modified`).
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
    /// Base addresses to which the file name is appended, in the order in which they are tried. If empty, the published
    /// mirrors of the dataset are used. Files from these addresses are also compared with the published checksum, if
    /// one is known. Defaults to an empty list.
    pub base_urls: Vec<String>,
    /// Maximum number of attempts in a row for a mirror that cannot be reached, breaks off or reports a server error.
    /// An attempt that extends the received part of the file resets the count. A file that does not exist (404) is not
    /// requested again, one with a wrong checksum once more. Defaults to 3.
    pub attempts: u32,
    /// Pause before the second attempt. It is doubled before each further one. Defaults to 1 second.
    pub pause: Duration,
    /// Time limit for connecting, and for each wait for further bytes. Defaults to 30 seconds.
    pub timeout: Duration,
    /// `true` to use the proxies of the variables `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`. Defaults to
    /// `true`.
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
    /// Returns the default options with these addresses instead of the published mirrors.
    fn from(base_urls: [&str; N]) -> Self {
        Self { base_urls: base_urls.map(str::to_owned).into(), ..Self::default() }
    }
}

/// Extent of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    /// The whole file was downloaded.
    Now,
    /// Only the rest of the file, or nothing: a part or the whole existed before.
    Before,
}

impl Download {
    /// Downloads the `files` that do not exist in `folder` with the right digest.
    pub(crate) fn fetch_all(
        &self,
        files: &[RemoteFile<'_>],
        mirrors: &[&str],
        folder: &Path,
    ) -> Result<(), DatasetError> {
        for file in files {
            let urls: Vec<String> = mirrors.iter().map(|base| joined(base, file.name)).collect();
            self.fetch(file, &urls, folder, false)?;
        }
        Ok(())
    }

    /// Downloads `file` into `folder` from the first address that has it (one of `urls`, or of this object's own
    /// addresses), unless it exists there and `again` is not set. It appears under its name only when it is complete,
    /// checked and synced to disk. One process at a time does this; the others find the file complete.
    pub(crate) fn fetch(
        &self,
        file: &RemoteFile<'_>,
        urls: &[String],
        folder: &Path,
        again: bool,
    ) -> Result<Fetched, DatasetError> {
        let target = folder.join(file.name);
        // Checked without a lock first, because the folder may be read-only.
        if !again && matches!(existing(file, &target), Existing::Published) {
            return Ok(Fetched::Before);
        }
        let bytes = file.bytes.unwrap_or_default();
        fs::create_dir_all(folder).map_err(|cause| DatasetError::Write {
            path: folder.into(),
            bytes,
            cause,
        })?;
        let mut part = Part::open(&target)?;
        let mut failures = Vec::new();
        match existing(file, &target) {
            _ if again => {}
            Existing::Published => return Ok(Fetched::Before),
            Existing::Missing => {}
            Existing::Other(fact) => {
                tracing::warn!("{fact}; downloading it again");
                failures.push(fact);
            }
        }
        let own: Vec<String> = self.base_urls.iter().map(|base| joined(base, file.name)).collect();
        let agent = self.agent();
        for url in if own.is_empty() { urls } else { &own } {
            match self.fetch_from(&agent, url, file, &mut part) {
                Ok(Received::All) => return Ok(Fetched::Now),
                Ok(Received::Rest) => return Ok(Fetched::Before),
                Err(Failure::Disk(error)) => return Err(error),
                Err(
                    Failure::Passing(reason) | Failure::Mismatch(reason) | Failure::Lasting(reason),
                ) => failures.push(format!("{url}: {reason}")),
            }
        }
        Err(DatasetError::Download { file: file.name.into(), failures })
    }

    /// Tries one address until further attempts are useless.
    fn fetch_from(
        &self,
        agent: &Agent,
        url: &str,
        file: &RemoteFile<'_>,
        part: &mut Part,
    ) -> Result<Received, Failure> {
        let (mut attempt, mut pause, mut furthest) = (1, self.pause, part.len()?);
        let mut is_second = false;
        loop {
            tracing::info!(url, bytes = file.bytes, attempt, "downloading");
            let received = part.receive(agent, url, file);
            match received.and_then(|received| part.finish(file).map(|()| received)) {
                Err(Failure::Mismatch(reason)) => {
                    part.clear()?;
                    if is_second {
                        return Err(Failure::Mismatch(format!("{reason} (downloaded twice)")));
                    }
                    tracing::warn!(url, reason, "downloading it once more");
                    is_second = true;
                }
                Err(Failure::Passing(reason)) => {
                    let length = part.len()?;
                    if length > furthest {
                        (attempt, pause, furthest) = (1, self.pause, length);
                    }
                    if attempt >= self.attempts {
                        return Err(Failure::Passing(format!("{reason} (tried {attempt} times)")));
                    }
                    tracing::warn!(url, reason, attempt, "download failed, trying again");
                    thread::sleep(pause);
                    pause *= 2;
                    attempt += 1;
                }
                done => return done,
            }
        }
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

fn joined(base: &str, name: &str) -> String {
    format!("{}/{name}", base.trim_end_matches('/'))
}

/// Reason why one attempt failed, by how to continue.
#[derive(Debug)]
enum Failure {
    /// A temporary failure: worth another attempt.
    Passing(String),
    /// The file differs from the published one: damaged in transit, or replaced.
    Mismatch(String),
    /// A permanent failure: the mirror would return the same again.
    Lasting(String),
    /// A failure of the local disk: another mirror would not help.
    Disk(DatasetError),
}

#[cfg(test)]
mod tests;
