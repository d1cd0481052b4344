//! Role of a rank's process before its program starts: the agent's executable, in its own session, waiting at its gate.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use brigade_rank_env::env;
use brigade_ssh::die_with_parent;
use brigade_ssh::reexec::role_command;
use nix::sys::signal::SigSet;
use nix::unistd::{Pid, dup2_stdin, setsid};

use super::job_control::lead_foreground;
use crate::CpuSet;
use crate::start_gate::{self, Opening};

/// First command-line argument of this role.
pub(crate) const RANK: &str = "__rank";

/// Returns the command that starts a rank: this executable, in the role of a rank, which then runs a program.
///
/// It binds itself to `cpus` before, so that not even the program's loader runs elsewhere. `gate` is
/// the number of its end of the gate, if that is not its stdin because the rank is to have this
/// process's terminal.
pub(super) fn rank_command(
    program: &OsStr,
    name: &OsStr,
    args: &[OsString],
    cpus: Option<&CpuSet>,
    gate: Option<RawFd>,
) -> Command {
    let mut command = role_command(RANK);
    command.arg(std::process::id().to_string());
    command.arg(gate.map_or_else(|| STDIN.to_owned(), |number| number.to_string()));
    command.arg(cpus.map_or_else(|| ANY.to_owned(), ToString::to_string));
    command.arg(program).arg(name).args(args);
    command
}

/// Runs the role: replaces this process with the program, or returns the exit code of a failure. Returns `None` for
/// malformed arguments.
///
/// Arguments: agent's process number, gate, processors, program's file, its name, its arguments.
pub(crate) fn become_rank(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
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
        // The agent has ended: there is no process to report to.
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
    if !die_with_parent(agent)? {
        return Ok(false);
    }
    let opening = match gate {
        Some(number) => start_gate::wait_at(number)?,
        None => start_gate::wait(io::stdin())?,
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

/// Argument in place of processors: the rank may use those of the agent.
const ANY: &str = "any";
/// Argument in place of a descriptor's number: the gate is the rank's stdin.
const STDIN: &str = "stdin";
