//! Remote side: `brigade __agent` on a host, at the other end of an ssh session or of a pipe.
//!
//! It first answers the launcher's requests, then becomes, by `exec`, an agent in the folder and with the variables of
//! the job, so that all later code sees the right ones.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use brigade_rendezvous::{Link, Secret, TimeLimits};
use brigade_ssh::reexec::role_command;
use brigade_ssh::remote_command::{AGENT, GREETING};
use brigade_ssh::wire::{self, WireError};
use nix::unistd::{dup2_stdin, dup2_stdout};

use super::message::{FromHost, Hello, HostJob, PROTOCOL, ToHost};
use super::store::{self, Store};
use crate::{HostFacts, LaunchError, LaunchPlan, agent};

/// Returns the launcher's command for an agent on this machine, at the other end of a pipe.
pub(super) fn agent_command() -> Command {
    let mut command = role_command(AGENT);
    // The launcher's own ssh session is unrelated to this agent.
    command.env_remove("SSH_CONNECTION");
    command
}

/// Runs the role; `entered` is `true` for its second part. Returns the exit code.
pub(crate) fn serve(entered: bool) -> u8 {
    // The ranks and their children must neither read from the session nor write into it.
    let streams = Streams::take();
    let result = streams
        .map_err(WireError::from)
        .and_then(|mut streams| if entered { job(&mut streams) } else { questions(&mut streams) });
    match result {
        Ok(code) => code,
        // The launcher has ended: there is no reader for a message.
        Err(WireError::Closed) => 0,
        Err(error) => {
            // To the session's stderr, which the launcher shows with this host's name.
            let _ = io::stderr().write_all(format!("brigade agent: {error}\n").as_bytes());
            1
        }
    }
}

/// The session's two streams. Descriptors 0 and 1 are `/dev/null` while they exist.
struct Streams {
    from: File,
    to: File,
    /// Time limit without data: a launcher that waits for other hosts sends a sign of life at intervals. After a cut
    /// that the system does not report, this process must not wait for ever.
    silence: Duration,
}

impl Streams {
    fn take() -> io::Result<Self> {
        let copy = |fd: std::os::fd::BorrowedFd<'_>| -> io::Result<File> {
            fd.try_clone_to_owned().map(File::from)
        };
        let this = Self {
            from: copy(io::stdin().as_fd())?,
            to: copy(io::stdout().as_fd())?,
            // The default, until the job's own limit is received.
            silence: TimeLimits::default().heartbeat_timeout(),
        };
        dup2_stdin(File::open("/dev/null")?)?;
        dup2_stdout(File::options().write(true).open("/dev/null")?)?;
        Ok(this)
    }

    /// Puts the streams back on descriptors 0 and 1, for a program that is started by `exec`.
    fn give_back(&self) -> io::Result<()> {
        dup2_stdin(&self.from)?;
        dup2_stdout(&self.to)?;
        Ok(())
    }

    fn send(&mut self, message: &FromHost) -> io::Result<()> {
        wire::send(&mut self.to, message)
    }

    fn receive(&mut self) -> Result<ToHost, WireError> {
        wire::receive(&mut self.from, self.silence)
    }

    /// Sends a refusal: the launcher shows the reason and closes the session.
    fn refuse(&mut self, reason: String, code: u8) -> Result<u8, WireError> {
        self.send(&FromHost::Refused { reason, code })?;
        Ok(code)
    }
}

/// Runs the first part, as the login shell has started it.
fn questions(streams: &mut Streams) -> Result<u8, WireError> {
    streams.to.write_all(GREETING.as_bytes())?;
    let executable = std::env::current_exe();
    streams.send(&FromHost::Hello(Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        executable: executable.map(|it| it.display().to_string()).unwrap_or_default(),
        ssh_connection: std::env::var("SSH_CONNECTION").ok(),
    }))?;
    let mut store = None;
    loop {
        match streams.receive()? {
            ToHost::Wait => {}
            ToHost::Look { files, together } => {
                let places = Store::find(&files, together);
                streams.send(&FromHost::Found { places })?;
            }
            ToHost::Store { file } => match Store::begin(file) {
                Ok(begun) => store = Some(begun),
                Err(reason) => return streams.refuse(reason, 1),
            },
            ToHost::Piece { bytes } => {
                let Some(begun) = &mut store else { return Err(out_of_order()) };
                match begun.write(&bytes) {
                    Ok(None) => {}
                    Ok(Some(place)) => {
                        store = None;
                        streams.send(&FromHost::Stored { place })?;
                    }
                    Err(reason) => return streams.refuse(reason, 1),
                }
            }
            ToHost::Enter { folder, variables, library_folders } => {
                if let Err(reason) = enter(&folder) {
                    return streams.refuse(reason, 1);
                }
                streams.give_back()?;
                return Err(become_agent(&variables, &library_folders).into());
            }
            ToHost::Job(_) | ToHost::Go => return Err(out_of_order()),
        }
    }
}

fn enter(folder: &OsStr) -> Result<(), String> {
    let path = Path::new(folder);
    std::env::set_current_dir(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!(
            "the working folder {} does not exist: make it, or give another with --workdir",
            path.display()
        ),
        io::ErrorKind::NotADirectory => format!("{} is not a folder", path.display()),
        _ => format!("cannot work in {}: {error}", path.display()),
    })
}

fn become_agent(variables: &[(OsString, OsString)], library_folders: &[OsString]) -> io::Error {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("brigade").args([AGENT, super::ENTERED]);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    // As a shell would set it.
    if let Ok(folder) = std::env::current_dir() {
        command.env("PWD", folder);
    }
    if !library_folders.is_empty() {
        let passed = variables.iter().find(|(name, _)| name == LIBRARY_PATH);
        let own = passed.map(|it| it.1.clone()).or_else(|| std::env::var_os(LIBRARY_PATH));
        let rest =
            own.as_deref().filter(|it| !it.is_empty()).into_iter().flat_map(std::env::split_paths);
        let all = library_folders.iter().map(Into::into).chain(rest);
        match std::env::join_paths(all) {
            Ok(path) => command.env(LIBRARY_PATH, path),
            Err(error) => return io::Error::other(error),
        };
    }
    command.exec()
}

/// Runs the second part, in the job's folder and with its variables.
fn job(streams: &mut Streams) -> Result<u8, WireError> {
    streams.send(&FromHost::Entered)?;
    let HostJob { host, mut options, secret, log_dir } = loop {
        match streams.receive()? {
            ToHost::Wait => {}
            ToHost::Job(job) => break *job,
            _ => return Err(out_of_order()),
        }
    };
    options.output.log_dir = log_dir.map(Into::into);
    options.secret = match secret.map(Secret::new).transpose() {
        Ok(secret) => secret,
        Err(error) => return streams.refuse(error.to_string(), 1),
    };
    let plan = LaunchPlan::resolve(&options, &HostFacts::gather(&options));
    let plan = match plan {
        Ok(plan) => LaunchPlan { host, ..plan },
        Err(error) => {
            let code = match &error {
                LaunchError::Program(error) => error.exit_code(),
                LaunchError::ForPython { .. } => 2,
                _ => 1,
            };
            return streams.refuse(error.to_string(), code);
        }
    };
    streams.silence = streams.silence.max(plan.limits.heartbeat_timeout());
    streams.send(&FromHost::Ready)?;
    loop {
        match streams.receive()? {
            ToHost::Wait => {}
            ToHost::Go => break,
            _ => return Err(out_of_order()),
        }
    }
    let (reader, writer): (OwnedFd, OwnedFd) =
        (streams.from.try_clone()?.into(), streams.to.try_clone()?.into());
    store::keep(&what_runs(&plan));
    let link = Link::new(reader, writer, Some(plan.limits))?;
    match agent::run_over(&plan, link) {
        Ok(outcome) => Ok(outcome.exit_code()),
        Err(error) => Err(io::Error::other(error.to_string()).into()),
    }
}

/// Returns files and folders that the job runs from, possibly among others.
fn what_runs(plan: &LaunchPlan) -> Vec<PathBuf> {
    let executable = std::env::current_exe().ok().into_iter();
    let lists = [LIBRARY_PATH, "PYTHONPATH"].into_iter().filter_map(std::env::var_os);
    let listed = lists.flat_map(|list| std::env::split_paths(&list).collect::<Vec<_>>());
    // A script or a folder of modules among the arguments of a Python program.
    let words = plan.args.iter().map(PathBuf::from);
    executable.chain([plan.program.clone()]).chain(listed).chain(words).collect()
}

fn out_of_order() -> WireError {
    io::Error::other("unexpected message; do both sides run the same version of brigade?").into()
}

const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
