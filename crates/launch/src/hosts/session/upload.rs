//! Upload of `--sync` to one host: queries which files are missing, and sends them.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use brigade_ssh::HostSpec;
use brigade_ssh::remote_command::GREETING;
use brigade_ssh::wire::{self, WireError};

use super::super::bundle::{Bundle, Contents};
use super::super::error::HostFailure;
use super::super::message::{FileMark, FromHost, ToHost};
use super::{GREETING_LIMIT, LaunchRequest, Session};
use crate::Program;

impl Session {
    /// Sends this executable to the shell on the host, which reads exactly these bytes and then runs them.
    pub(super) fn send_brigade(
        &mut self,
        request: &LaunchRequest,
        say: &dyn Fn(&str),
    ) -> Result<(), HostFailure> {
        let Some(mark) = &request.brigade_mark else { return Err(self.out_of_order()) };
        let name = mark.name.display().to_string();
        let mut progress = Progress::start(&self.host, name, mark.size, say);
        let mut file =
            File::open("/proc/self/exe").map_err(|error| self.local("brigade", &error))?;
        let mut buffer = vec![0; PIECE];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    self.to
                        .write_all(&buffer[..n])
                        .map_err(|error| self.explain(&WireError::System(error)))?;
                    progress.advance(n);
                }
                Err(error) => return Err(self.local("brigade", &error)),
            }
        }
        match wire::skip_to(&mut self.from, &[GREETING], GREETING_LIMIT, &mut Vec::new()) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explain(&error)),
        }
    }

    /// Copies the files of the bundle that the host lacks, and returns the places of all of them.
    pub(super) fn copy(
        &mut self,
        bundle: &Bundle,
        say: &dyn Fn(&str),
    ) -> Result<Copied, HostFailure> {
        let together = bundle.contents != Contents::Program;
        self.send(&ToHost::Look { files: bundle.files.clone(), together })?;
        let answer: FromHost = self.receive_within(LOOK_LIMIT)?;
        let FromHost::Found { places } = answer else { return Err(self.out_of_order()) };
        let missing: Vec<_> =
            bundle.files.iter().zip(&places).filter(|it| it.1.is_none()).map(|it| it.0).collect();
        let mut sources = together
            .then(|| {
                let size = missing.iter().map(|it| it.size).sum();
                missing.first().map(|first| {
                    Progress::start(&self.host, several(first, missing.len()), size, say)
                })
            })
            .flatten();
        let mut all = Vec::new();
        for (file, place) in bundle.files.iter().zip(places.iter().cloned()) {
            all.push(match (place, &mut sources) {
                (Some(place), _) => place,
                (None, Some(progress)) => self.send_file(file, progress)?,
                (None, None) => {
                    let name = file.name.display().to_string();
                    let mut progress = Progress::start(&self.host, name, file.size, say);
                    self.send_file(file, &mut progress)?
                }
            });
        }
        Ok(bundle.copied(all))
    }

    fn send_file(
        &mut self,
        mark: &FileMark,
        progress: &mut Progress<'_>,
    ) -> Result<OsString, HostFailure> {
        let name = mark.path.display().to_string();
        let mut file = File::open(&mark.path).map_err(|error| self.local(&name, &error))?;
        self.send(&ToHost::Store { file: mark.clone() })?;
        let mut sent = 0;
        loop {
            let mut bytes = vec![0; PIECE];
            let n = file.read(&mut bytes).map_err(|error| self.local(&name, &error))?;
            if n == 0 && sent < mark.size {
                return Err(self.failure(format!("--sync: {name} has changed meanwhile"), 1));
            }
            bytes.truncate(n);
            sent += n as u64;
            self.send(&ToHost::Piece { bytes })?;
            progress.advance(n);
            if sent >= mark.size {
                break;
            }
        }
        match self.receive_within(LOOK_LIMIT)? {
            FromHost::Stored { place } => Ok(place),
            _ => Err(self.out_of_order()),
        }
    }

    fn local(&self, what: &str, error: &io::Error) -> HostFailure {
        self.failure(format!("--sync: cannot read {what}: {error}"), 1)
    }
}

impl Bundle {
    /// Returns how the program is started from the places of its files.
    fn copied(&self, places: Vec<OsString>) -> Copied {
        let mut copied = Copied::default();
        let moved = |i: usize| places[i] != self.files[i].path;
        match &self.contents {
            Contents::Program => {
                let libraries = (1..places.len()).filter(|i| moved(*i));
                let folders = libraries.filter_map(|i| Path::new(&places[i]).parent());
                copied.library_folders = folders.map(Into::into).collect();
                copied.program = places.into_iter().next().map(Program::Executable);
            }
            Contents::Script => copied.program = places.into_iter().next().map(Program::Auto),
            Contents::Module(name) if !places.is_empty() && moved(0) => {
                let depth = Path::new(&self.files[0].name).components().count();
                let folder = Path::new(&places[0]).ancestors().nth(depth);
                copied.program = folder.map(|folder| Program::ModuleIn {
                    name: name.clone(),
                    folder: folder.to_owned(),
                });
            }
            // At its own path, which Python searches first.
            Contents::Module(_) => {}
        }
        copied
    }
}

/// Describes the files, for example "train.py and 3 files beside it".
fn several(first: &FileMark, count: usize) -> String {
    let name = first.name.display();
    match count - 1 {
        0 => name.to_string(),
        1 => format!("{name} and 1 file beside it"),
        more => format!("{name} and {more} files beside it"),
    }
}

/// Paths of the copied files on a host.
#[derive(Debug, Default)]
pub(super) struct Copied {
    /// Program to run in place of the one that the user named, if it was copied.
    pub(super) program: Option<Program>,
    pub(super) library_folders: Vec<OsString>,
}

/// Progress of a copy, for the user.
struct Progress<'a> {
    host: String,
    name: String,
    size: u64,
    sent: u64,
    start: Instant,
    last: Instant,
    say: &'a dyn Fn(&str),
}

impl<'a> Progress<'a> {
    fn start(host: &HostSpec, name: String, size: u64, say: &'a dyn Fn(&str)) -> Self {
        let (host, now) = (host.to_string(), Instant::now());
        say(&format!("{host}: copying {name} ({})", megabytes(size)));
        Self { host, name, size, sent: 0, start: now, last: now, say }
    }

    fn advance(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        let (host, name) = (&self.host, &self.name);
        let (sent, size) = (megabytes(self.sent), megabytes(self.size));
        if self.sent < self.size && self.last.elapsed() > PROGRESS {
            self.last = Instant::now();
            (self.say)(&format!("{host}: copying {name}: {sent} of {size}"));
        }
        if self.sent == self.size && self.start.elapsed() > PROGRESS {
            let seconds = self.start.elapsed().as_secs();
            (self.say)(&format!("{host}: copied {name} ({size}) in {seconds} s"));
        }
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10)
}

/// Time limit for the digests of all files on the host, or for the last piece of a file on a slow connection.
const LOOK_LIMIT: Duration = Duration::from_secs(600);
const PROGRESS: Duration = Duration::from_secs(5);
const PIECE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(megabytes(431_260_000), "431.2 MB");
        assert_eq!(megabytes(0), "0.0 MB");
    }
}
