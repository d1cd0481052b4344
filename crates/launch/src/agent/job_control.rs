//! The foreground of the terminal: this process's group, or that of a rank to which it is handed.
//!
//! A rank that the terminal is passed through to is what a job is to a shell: a process group of its
//! own in the terminal's session, in the foreground. So Ctrl-C reaches the program and not the
//! launcher, which lets a debugger have it; and Ctrl-Z stops the program, which the launcher sees, and
//! stops itself so that the shell takes the terminal back.

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

    /// This process's group is in the foreground.
    pub(super) fn is_in_foreground(&self) -> bool {
        tcgetpgrp(&self.terminal) == Ok(getpgrp())
    }

    /// A rank is about to take the terminal, which it does by itself before its program starts.
    pub(super) fn expect_taking(&mut self) {
        self.given = self.is_in_foreground();
    }

    /// Makes a rank's process group the foreground group of the terminal, if this process's group has it.
    pub(super) fn give(&mut self, rank: Pid) {
        if self.is_in_foreground() && set_foreground(&self.terminal, rank).is_ok() {
            self.given = true;
        }
    }

    /// Takes the terminal back from the rank that has it. A program that was killed has not set it
    /// back to how it was.
    pub(super) fn take_back(&mut self, was_killed: bool) {
        if !std::mem::take(&mut self.given) {
            return;
        }
        // It fails where the terminal is gone.
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

/// The controlling terminal, whatever the standard streams are.
fn open_terminal() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

/// SIGTTOU has to be blocked.
fn set_foreground(terminal: &File, group: Pid) -> nix::Result<()> {
    tcsetpgrp(terminal, group)
}
