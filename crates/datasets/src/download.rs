//! Downloads that are whole or not there: resumed, checked, then renamed into place.

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

/// How to download: from where, and how long to try.
///
/// What has arrived is kept in `.NAME.part` beside the file, also when the process is killed; the next try or
/// call asks for the rest, if the server has ranges and says that its file is still the same (`ETag` or
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
    /// Addresses that the file's name is appended to, in the order of trial. Empty: the mirrors
    /// of the set. What comes from here must have the published checksum as well, where there is one.
    pub base_urls: Vec<String>,
    /// How often in a row a mirror is tried that cannot be reached, breaks off or reports a fault of its
    /// own. A try that brings more of the file than there was before counts as the first. A file that is not
    /// there (404) is not asked for again, one with another checksum once more.
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

/// Whether a file was downloaded now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    /// All of it.
    Now,
    /// At least a part of it was there before.
    Before,
}

impl Download {
    /// Brings each of `files` into `folder`, unless it lies there already with the right digest.
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

    /// Brings `file` into `folder` from the first of `urls`, or of this object's own addresses, that has it,
    /// unless it lies there already and `again` is not set. It appears under its name only when it is whole,
    /// checked and on the disk. One process at a time does this; the others find it done.
    pub(crate) fn fetch(
        &self,
        file: &RemoteFile<'_>,
        urls: &[String],
        folder: &Path,
        again: bool,
    ) -> Result<Fetched, DatasetError> {
        let target = folder.join(file.name);
        // Without a lock first: the folder may be read-only.
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

    /// Tries one address until nothing more can be hoped for.
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

/// Why one attempt failed, by what can be done about it.
#[derive(Debug)]
enum Failure {
    /// Worth another attempt.
    Passing(String),
    /// Another file than the published one: damaged on its way, or replaced.
    Mismatch(String),
    /// The mirror would say the same again.
    Lasting(String),
    /// Another mirror would not help.
    Disk(DatasetError),
}

#[cfg(test)]
mod tests;
