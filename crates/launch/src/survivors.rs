//! Finds and kills what ranks have left behind.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use brigade_world::env;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What marks a process as part of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survivors {
    /// The agent's name, inherited through the environment. This finds a process that has left its
    /// rank's session on purpose.
    pub(crate) agent: String,
    /// One session per rank, named by the rank's process number. The rank must not have been
    /// reaped, or the number may belong to a stranger.
    pub(crate) sessions: Vec<i32>,
}

impl Survivors {
    /// Kills every process of the job, and returns when none is left, or after [`LIMIT`] when one
    /// is stuck in the kernel.
    pub(crate) fn kill(&self) {
        let deadline = Instant::now() + LIMIT;
        while self.kill_once() > 0 && Instant::now() < deadline {
            // No descriptor says when a process that is not our child has ended.
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Kills what is there now, and says how many that were.
    pub(crate) fn kill_once(&self) -> usize {
        let mark = format!("{}={}", env::BRIGADE_AGENT, self.agent);
        let left = self.find(mark.as_bytes());
        for pid in &left {
            // Fails for one that has ended since, or that belongs to another user.
            let _ = kill(*pid, Signal::SIGKILL);
        }
        left.len()
    }

    fn find(&self, mark: &[u8]) -> Vec<Pid> {
        // Agent and watch are older than every rank. What is older than they are need not be asked
        // for its environment, which takes longer than all the rest.
        let this = std::process::id().cast_signed();
        let since = Stat::of(this).map_or(0, |stat| stat.start);
        let mut seen = HashSet::from([this]);
        let mut members = Vec::new();
        for _ in 0..MOST_LISTS {
            let mut is_complete = true;
            for pid in processes().filter(|pid| seen.insert(*pid)).collect::<Vec<_>>() {
                match Stat::of(pid).filter(|stat| !stat.is_dead) {
                    Some(stat) if stat.start < since => {}
                    Some(stat) => {
                        members.extend(self.has(pid, &stat, mark).then(|| Pid::from_raw(pid)));
                    }
                    // It may have left a child that is younger than the list.
                    None => is_complete = false,
                }
            }
            if is_complete {
                break;
            }
        }
        members
    }

    fn has(&self, pid: i32, stat: &Stat, mark: &[u8]) -> bool {
        self.sessions.contains(&stat.session)
            || fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|var| var == mark))
    }
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// What the kernel says about a process.
struct Stat {
    is_dead: bool,
    session: i32,
    /// When it started, in ticks of the system's clock.
    start: u64,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The command in parentheses may hold anything, parentheses and blanks included.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let is_dead = matches!(fields.next()?, "Z" | "X");
        let session = fields.nth(2)?.parse().ok()?;
        let start = fields.nth(15)?.parse().ok()?;
        Some(Self { is_dead, session, start })
    }
}

/// How long one that is stuck in the kernel is waited for.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// On a host where processes end all the time, one of them ends while we look.
const MOST_LISTS: usize = 20;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn finds_by_session_and_by_name() {
        // A shell in a session of its own with a child, and a process that only has the name.
        let mut session = Command::new("setsid")
            .args(["sh", "-c", "echo $$; sleep 1000 & wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut leader = String::new();
        BufReader::new(session.stdout.take().unwrap()).read_line(&mut leader).unwrap();
        let mut named = Command::new("sleep")
            .arg("1000")
            .env(env::BRIGADE_AGENT, "survivors-test")
            .spawn()
            .unwrap();
        let mut stranger = Command::new("sleep")
            .arg("1000")
            .env(env::BRIGADE_AGENT, "survivors-test-2")
            .spawn()
            .unwrap();

        let sessions = vec![leader.trim().parse().unwrap()];
        Survivors { agent: "survivors-test".to_owned(), sessions }.kill();

        session.wait().unwrap();
        named.wait().unwrap();
        assert_eq!(stranger.try_wait().unwrap(), None, "a stranger was killed");
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }
}
