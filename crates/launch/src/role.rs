//! The small roles in which the agent starts its own executable.
//!
//! Between `fork` and `exec` only a few system calls are allowed, and Rust calls what runs there
//! unsafe. Starting our own executable, which then prepares itself and becomes the program by
//! `exec`, is plain safe code, for about a millisecond per rank.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_world::env;
use nix::sys::signal::SigSet;
use nix::unistd::{Pid, dup2_stdin, setsid};

use crate::agent::lead_foreground;
use crate::gate::{self, Opening};
use crate::{CpuSet, hosts, leash, reaper};

/// Plays a role if this process was started for one, and gives its exit code.
///
/// A program that calls [`crate::agent::run`] calls this first in `main`, before it reads its
/// arguments. In the role of a rank it does not return: the process becomes the program.
#[must_use]
pub fn play_if_asked() -> Option<u8> {
    let mut args = std::env::args_os().skip(1);
    let role = args.next()?;
    if role == RANK {
        Some(become_rank(args).unwrap_or(MALFORMED))
    } else if role == REAPER {
        Some(become_reaper(args).unwrap_or(MALFORMED))
    } else if role == SESSION {
        Some(become_session(args).unwrap_or(MALFORMED))
    } else if role == hosts::ROLE {
        Some(hosts::remote::serve(args.next().is_some_and(|part| part == hosts::ENTERED)))
    } else {
        None
    }
}

/// The agent's command for a rank: this executable, in the role of a rank, about to run a program.
///
/// It binds itself to `cpus` before, so that not even the program's loader runs elsewhere. `gate` is
/// the number of its end of the gate, where that is not its stdin because the rank is to have this
/// process's terminal.
pub(crate) fn rank_command(
    program: &OsStr,
    name: &OsStr,
    args: &[OsString],
    cpus: Option<&CpuSet>,
    gate: Option<RawFd>,
) -> Command {
    let mut command = this_executable(RANK);
    command.arg(std::process::id().to_string());
    command.arg(gate.map_or_else(|| STDIN.to_owned(), |number| number.to_string()));
    command.arg(cpus.map_or_else(|| ANY.to_owned(), ToString::to_string));
    command.arg(program).arg(name).args(args);
    command
}

/// The agent's command for its reaper.
pub(crate) fn reaper_command(agent: &str, folder: Option<&Path>) -> Command {
    let mut command = this_executable(REAPER);
    // Its own environment must not make it part of a job, not even of one around this one.
    command.env_clear().arg(std::process::id().to_string()).arg(agent).args(folder);
    command
}

/// The launcher's command for an agent on this machine, at the other end of a pipe.
pub(crate) fn agent_command() -> Command {
    let mut command = command(hosts::ROLE);
    // The launcher's own session is none of this agent's.
    command.env_remove("SSH_CONNECTION");
    command
}

/// The launcher's command for a client of ssh, whose arguments are to follow.
pub(crate) fn session_command(client: &Path) -> Command {
    let mut command = this_executable(SESSION);
    command.arg(std::process::id().to_string()).arg(client);
    command
}

/// This executable in a role that others have made for it.
pub(crate) fn command(role: &str) -> Command {
    this_executable(role)
}

fn this_executable(role: &str) -> Command {
    // Not its path: that may name another file by now, after an upgrade or a rebuild.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("brigade").arg(role);
    // The launcher has read them; neither ranks nor clients of ssh are to know or to log them.
    for name in env::LAUNCHERS_OWN {
        command.env_remove(name);
    }
    command
}

/// Arguments: agent's process number, gate, processors, program's file, its name, its arguments.
fn become_rank(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let agent = args.next()?.to_str()?.parse().ok()?;
    let gate = args.next()?.into_string().ok()?;
    let gate: Option<RawFd> = if gate == STDIN { None } else { Some(gate.parse().ok()?) };
    let cpus = args.next()?.into_string().ok()?;
    let cpus: Option<CpuSet> = if cpus == ANY { None } else { Some(cpus.parse().ok()?) };
    let program = args.next()?;
    let name = args.next()?;
    let mut command = Command::new(&program);
    command.arg0(&name).args(args);

    let error = match prepare_rank(agent, gate, cpus.as_ref(), &mut command) {
        // The agent is gone: nobody is left to tell.
        Ok(false) => return Some(0),
        Ok(true) => command.exec(),
        Err(error) => error,
    };
    eprintln!("brigade: cannot run {}: {error}", program.display());
    Some(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

fn prepare_rank(
    agent: u32,
    gate: Option<RawFd>,
    cpus: Option<&CpuSet>,
    command: &mut Command,
) -> io::Result<bool> {
    if gate.is_none() {
        setsid()?;
    } else {
        lead_foreground(Pid::from_raw(agent.cast_signed()))?;
    }
    if !leash::tie_to(agent)? {
        return Ok(false);
    }
    let opening = match gate {
        Some(number) => gate::wait_at(number)?,
        None => gate::wait(io::stdin())?,
    };
    let Opening::Start { socket, progress } = opening else { return Ok(false) };
    let given = [(env::BRIGADE_STORE_FD, socket), (env::BRIGADE_PROGRESS_FD, progress)];
    for (name, fd) in given {
        if let Some(fd) = fd {
            command.env(name, fd.to_string());
        }
    }
    if let Some(cpus) = cpus {
        cpus.bind().map_err(|error| {
            io::Error::new(error.kind(), format!("it cannot be bound to CPUs {cpus}: {error}"))
        })?;
    }
    if gate.is_none() {
        // Several ranks cannot share a keyboard.
        dup2_stdin(File::open("/dev/null")?)?;
    }
    // The agent blocks the signals it waits for, and a child inherits that.
    SigSet::empty().thread_set_mask()?;
    Ok(true)
}

/// Arguments: launcher's process number, client's file, its arguments.
fn become_session(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let launcher = args.next()?.to_str()?.parse().ok()?;
    let client = args.next()?;
    let mut command = Command::new(&client);
    command.arg0(Path::new(&client).file_name()?).args(args);
    let error = match leash::tie_to(launcher) {
        Ok(false) => return Some(0),
        // The launcher blocks the signals it waits for, and a child inherits that.
        Ok(true) => match SigSet::empty().thread_set_mask() {
            Ok(()) => command.exec(),
            Err(error) => error.into(),
        },
        Err(error) => error,
    };
    eprintln!("brigade: cannot run {}: {error}", client.display());
    Some(126)
}

/// Arguments: agent's process number, agent's name, folder to remove.
fn become_reaper(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let agent_pid = args.next()?.to_str()?.parse().ok()?;
    let agent = args.next()?.into_string().ok()?;
    reaper::wait_and_clear_up(agent, agent_pid, args.next().map(PathBuf::from));
    Some(0)
}

const RANK: &str = "__rank";
const REAPER: &str = "__reaper";
const SESSION: &str = "__session";
/// In place of processors: those that the agent may use.
const ANY: &str = "any";
/// In place of a number: the gate is the rank's stdin.
const STDIN: &str = "stdin";
/// Somebody typed a hidden role by hand.
const MALFORMED: u8 = 2;
