//! The reaper: a process that outlives a killed agent, and cleans up after it.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use brigade_ssh::reexec::role_command;
use nix::unistd::setsid;

use crate::leftovers::{Look, Orphans, Session};

/// First command-line argument of this role.
pub(crate) const REAPER: &str = "__reaper";

/// The agent's handle of a running reaper, one for all attempts.
#[derive(Debug)]
pub(crate) struct Reaper {
    child: Child,
    orders: Option<ChildStdin>,
}

impl Reaper {
    /// Starts a reaper for this agent, which also removes a folder.
    pub(crate) fn start(agent: &str, folder: Option<&Path>) -> io::Result<Self> {
        let mut command = reaper_command(agent, folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Its working directory would keep a file system from being unmounted.
        let mut child = command.current_dir("/").spawn()?;
        let orders = child.stdin.take();
        Ok(Self { child, orders })
    }

    /// Returns the reaper's process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sets the sessions of living ranks, in place of all earlier ones.
    pub(crate) fn guard(&mut self, sessions: &[Session]) {
        let words = sessions.iter().map(|session| format!("{}:{}", session.number, session.start));
        self.order(&words.collect::<Vec<_>>().join(" "));
    }

    /// Ends the reaper, after the agent has cleaned up itself.
    pub(crate) fn dismiss(mut self) {
        self.order(DISMISSED);
        self.orders = None;
        let _ = self.child.wait();
    }

    fn order(&mut self, line: &str) {
        if let Some(orders) = &mut self.orders {
            // Fails when the reaper was killed.
            let _ = orders.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Returns the command that starts the reaper.
fn reaper_command(agent: &str, folder: Option<&Path>) -> Command {
    let mut command = role_command(REAPER);
    // An inherited environment would make it part of a job, possibly of one around this job.
    command.env_clear().arg(std::process::id().to_string()).arg(agent).args(folder);
    command
}

/// Runs the role, and returns the exit code. Returns `None` for malformed arguments.
///
/// Arguments: agent's process number, agent's name, folder to remove.
pub(crate) fn become_reaper(mut args: impl Iterator<Item = OsString>) -> Option<u8> {
    let agent_pid = args.next()?.to_str()?.parse().ok()?;
    let agent = args.next()?.into_string().ok()?;
    wait_and_clear_up(agent, agent_pid, args.next().map(PathBuf::from));
    Some(0)
}

/// Waits for the end of its stdin, a pipe whose other end only the agent holds, and then cleans up.
///
/// The pipe closes while the agent is still exiting, so its ranks may get another parent only later: the reaper
/// searches until it finds nothing twice in a row.
fn wait_and_clear_up(agent: String, agent_pid: i32, folder: Option<PathBuf>) {
    // Signals to the agent's process group, or from its terminal, must not reach this process. Fails only for the
    // leader of a group, which they do not reach anyway.
    let _ = setsid();
    // Signals that schedulers and service managers send to each process of a job are blocked already: the agent waits
    // for them, and the mask is inherited.
    let mut orders = Vec::new();
    let _ = io::stdin().read_to_end(&mut orders);
    if let Some(sessions) = last_order(&orders) {
        let orphans = Orphans { agent, agent_pid, sessions };
        let (mut pause, mut clean) = (FIRST_PAUSE, 0);
        // A process that sleeps in the kernel ends only when the kernel returns, however late.
        loop {
            let Look { killed, incomplete } = orphans.kill_once();
            clean = if killed > 0 || incomplete { 0 } else { clean + 1 };
            if clean == 2 {
                break;
            }
            thread::sleep(pause);
            pause = (pause * 3 / 2).min(MAX_PAUSE);
        }
        if let Some(folder) = folder {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// Returns the sessions to watch, or `None` when there is nothing to do any more.
fn last_order(orders: &[u8]) -> Option<Vec<Session>> {
    let orders = String::from_utf8_lossy(orders);
    // The agent did not act on a line that its end has cut short either.
    let last =
        orders.rsplit_once('\n').map_or("", |(whole, _)| whole.rsplit('\n').next().unwrap_or(""));
    let session = |word: &str| {
        let (number, start) = word.split_once(':')?;
        Some(Session { number: number.parse().ok()?, start: start.parse().ok()? })
    };
    (last != DISMISSED).then(|| last.split(' ').filter_map(session).collect())
}

const DISMISSED: &str = "all clear";
/// First pause between two searches: no descriptor becomes readable when a process that is not a child ends.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders() {
        let table: [(&str, Option<&[i32]>); 8] = [
            ("", Some(&[])),
            ("12:1 34:2\n", Some(&[12, 34])),
            ("12:1 34:1\n\n", Some(&[])),
            ("12:1 34:1\n\n56:1\n", Some(&[56])),
            ("12:1 34:1\n\n56:1", Some(&[])),
            ("12:1\nall clear\n", None),
            ("12:1\nall cle", Some(&[12])),
            ("all clear\n", None),
        ];
        for (orders, expected) in table {
            let sessions = last_order(orders.as_bytes());
            let numbers = sessions.map(|all| all.iter().map(|it| it.number).collect::<Vec<_>>());
            assert_eq!(numbers.as_deref(), expected, "{orders:?}");
        }
    }
}
