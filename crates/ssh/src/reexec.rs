//! Starts this executable again in a small role, instead of running code between `fork` and `exec`.
//!
//! Between the two only a few system calls are allowed, and Rust calls what runs there unsafe. A child
//! that is this executable prepares itself in plain safe code, and becomes its program by `exec`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use brigade_rank_env::env;
use nix::sys::signal::SigSet;

use crate::die_with_parent;

/// Makes the command that starts this executable in a role, which is its first argument.
///
/// The role does not get the variables that are for launchers alone, the job's secret among them.
#[must_use]
pub fn role_command(role: &str) -> Command {
    // Not its path: that may name another file by now, after an upgrade or a rebuild.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("brigade").arg(role);
    for name in env::LAUNCHERS_OWN {
        command.env_remove(name);
    }
    command
}

/// Makes the command that starts an ssh client, which ends with the thread that starts it. The caller appends the
/// client's arguments.
#[must_use]
pub fn session_command(client: &Path) -> Command {
    let mut command = role_command(SESSION);
    command.arg(std::process::id().to_string()).arg(client);
    command
}

/// Replaces this process by the ssh client, in the role [`SESSION`]. Returns the exit code if that fails.
///
/// The arguments are those of [`session_command`] and what follows them: the parent's process number, the client's
/// file, its arguments. Returns `None` if they do not have this form.
pub fn become_session(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let parent = args.next()?.to_str()?.parse().ok()?;
    let client = args.next()?;
    let mut command = Command::new(&client);
    command.arg0(Path::new(&client).file_name()?).args(args);
    let error = match die_with_parent(parent) {
        Ok(false) => return Some(0),
        // The launcher blocks the signals it waits for, and a child inherits that.
        Ok(true) => match SigSet::empty().thread_set_mask() {
            Ok(()) => command.exec(),
            Err(error) => error.into(),
        },
        Err(error) => error,
    };
    eprintln!("brigade: cannot run {}: {error}", client.display());
    Some(CANNOT_RUN)
}

/// Name of the role of a process that becomes an ssh client.
pub const SESSION: &str = "__session";
/// Exit code of a shell for a program that cannot be run.
const CANNOT_RUN: u8 = 126;
