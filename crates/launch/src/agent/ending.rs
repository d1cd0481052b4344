//! How ranks end, and what that says about the job.

use std::fmt;
use std::process::ExitStatus;

use std::os::unix::process::ExitStatusExt;

use nix::sys::signal::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl Ending {
    /// The exit code that a shell gives: the code itself, or 128 + the signal's number.
    ///
    /// ```
    /// use brigade_launch::Ending;
    /// assert_eq!(Ending::Code(3).exit_code(), 3);
    /// assert_eq!(Ending::Signal(9).exit_code(), 137);
    /// assert_eq!(Ending::Signal(9).to_string(), "killed by SIGKILL");
    /// ```
    #[must_use]
    pub fn exit_code(self) -> u8 {
        // Both fit: a code is one byte, and signals stop at 64.
        match self {
            Self::Code(code) => code.to_le_bytes()[0],
            Self::Signal(signal) => 128 | signal.to_le_bytes()[0],
        }
    }

    pub(crate) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => match Signal::try_from(number) {
                Ok(signal) => write!(f, "killed by {signal}"),
                Err(_) => write!(f, "killed by signal {number}"),
            },
        }
    }
}

/// A rank that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which one.
    pub rank: usize,
    /// Its process number.
    pub pid: i32,
    /// How it ended.
    pub ending: Ending,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) failed: {}", self.rank, self.pid, self.ending)
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Outcome {
    /// The first rank that failed; the agent's own SIGKILL does not count.
    pub failure: Option<Failure>,
    /// The signal that stopped the job, where its ranks did not decide the exit code themselves:
    /// they had to be killed, or nobody read their output any more (SIGPIPE).
    pub stopped_by: Option<i32>,
}

impl Outcome {
    /// The first failing rank's code; 0 when none has failed and the job was not cut short.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match (&self.failure, self.stopped_by) {
            (_, Some(signal)) if signal == Signal::SIGPIPE as i32 => {
                Ending::Signal(signal).exit_code()
            }
            (Some(failure), _) => failure.ending.exit_code(),
            (None, Some(signal)) => Ending::Signal(signal).exit_code(),
            (None, None) => 0,
        }
    }
}
