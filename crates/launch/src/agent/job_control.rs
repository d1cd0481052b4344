//! Job control: the process group in the foreground of the terminal is this process's, or that of a rank.
//!
//! A rank with the terminal is like a job of a shell: a process group of its own in the terminal's session, in the
//! foreground. Ctrl-C therefore reaches the program, which may be a debugger, and not the launcher. Ctrl-Z stops the
//! program; the launcher detects that and stops itself, so that the shell takes the terminal back.

use std::fs::File;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgid, getpgrp, getpid, setpgid, tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process.
#[derive(Debug)]
pub(super) struct JobControl {
    terminal: File,
    /// Terminal settings at the start of the job.
    modes: Option<Termios>,
    /// `true` if a rank has the terminal.
    given: bool,
}

impl JobControl {
    /// Opens the terminal. Returns `None` without one.
    pub(super) fn open() -> Option<Self> {
        let terminal = open_terminal()?;
        let modes = tcgetattr(&terminal).ok();
        Some(Self { terminal, modes, given: false })
    }

    /// Returns `true` if this process's group is in the foreground.
    pub(super) fn is_in_foreground(&self) -> bool {
        tcgetpgrp(&self.terminal) == Ok(getpgrp())
    }

    /// Notes that a rank is about to take the terminal, which it does itself before its program starts.
    pub(super) fn expect_taking(&mut self) {
        self.given = self.is_in_foreground();
    }

    /// Makes a rank's process group the foreground group of the terminal, if this process's group has it.
    pub(super) fn give(&mut self, rank: Pid) {
        if self.is_in_foreground() && set_foreground(&self.terminal, rank).is_ok() {
            self.given = true;
        }
    }

    /// Takes the terminal back from the rank that has it. After a killed program, the terminal's settings are restored.
    pub(super) fn take_back(&mut self, was_killed: bool) {
        if !std::mem::take(&mut self.given) {
            return;
        }
        // Fails if the terminal was closed.
        let _ = set_foreground(&self.terminal, getpgrp());
        if let Some(modes) = self.modes.as_ref().filter(|_| was_killed) {
            let _ = tcsetattr(&self.terminal, SetArg::TCSADRAIN, modes);
        }
    }
}

/// Makes this process, which is about to become a rank's program, a process group of its own, and the
/// one in the foreground if that is its agent's.
pub(crate) fn lead_foreground(agent: Pid) -> nix::Result<()> {
    let before = getpgid(Some(agent));
    setpgid(getpid(), getpid())?;
    if let Some(terminal) = open_terminal()
        && tcgetpgrp(&terminal) == before
    {
        // Otherwise the terminal would stop a background process that requests this.
        SigSet::from(Signal::SIGTTOU).thread_block()?;
        set_foreground(&terminal, getpid())?;
    }
    Ok(())
}

/// Opens the controlling terminal, independent of the standard streams.
fn open_terminal() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

/// Puts a process group into the foreground. SIGTTOU has to be blocked.
fn set_foreground(terminal: &File, group: Pid) -> nix::Result<()> {
    tcsetpgrp(terminal, group)
}
