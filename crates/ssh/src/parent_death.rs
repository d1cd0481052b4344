//! Ties a process to the one that started it, so that it cannot outlive it.

use std::io;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};

/// Makes the kernel kill this process when its parent, process `parent`, ends. The setting survives `exec`.
///
/// Returns `false` when the parent has ended already: the caller should end, too. The kernel ties the two *threads*:
/// the parent must keep the thread that started this process, and the tie holds while the calling thread lives. This
/// process's own children do not inherit the setting.
///
/// # Errors
/// The system has no parent-death signal.
pub fn die_with_parent(parent: u32) -> io::Result<bool> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // In this order: a parent that ended before the call sends no signal, but this process has another parent then.
    Ok(getppid() == Pid::from_raw(parent.cast_signed()))
}
