//! Finds and kills what ranks have left behind.
//!
//! While the agent lives, these are its descendants: it is a *subreaper* (`PR_SET_CHILD_SUBREAPER`),
//! so a process whose parent has ended becomes a child of the agent, however it has detached itself.
//! A process that a rank has had started by a service (a job of `sbatch`, a window of a running
//! `tmux`, a unit of `systemd-run`) is none, and is left alone.
//!
//! After the agent's own death its descendants belong to whoever adopts orphans, among others. The
//! reaper tells them by the ranks' sessions and by the agent's name in their environment; see
//! [`Orphans`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use brigade_world::env;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

/// The processes of this machine at one moment, as far as this process may see them.
#[derive(Debug, Default)]
struct Processes(BTreeMap<i32, Stat>);

/// What the kernel says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The letter of its state: R runs, S sleeps, D sleeps in the kernel, Z has ended.
    pub(crate) state: char,
    parent: i32,
    session: i32,
    /// When it started, in ticks of the system's clock: with its number, its identity.
    start: u64,
}

impl Stat {
    /// Reads it; `None` where there is no such process.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&stat))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The command in parentheses may hold anything, parentheses and blanks included.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let start = fields.nth(15)?.parse().ok()?;
        Some(Self { state, parent, session, start })
    }

    fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

impl Processes {
    fn look() -> Self {
        let entries = fs::read_dir("/proc").into_iter().flatten();
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Self(numbers.filter_map(|pid: i32| Some((pid, Stat::of(pid)?))).collect())
    }

    /// The processes whose parents, up to `root`, are all there.
    fn descendants(&self, root: i32, except: &BTreeSet<i32>) -> BTreeSet<i32> {
        let mut found = BTreeSet::new();
        let mut parents = BTreeSet::from([root]);
        while !parents.is_empty() {
            let is_new = |pid: &i32, stat: &Stat| {
                parents.contains(&stat.parent) && !except.contains(pid) && !found.contains(pid)
            };
            let children = self.0.iter().filter(|(pid, stat)| is_new(pid, stat));
            let children: BTreeSet<i32> = children.map(|(pid, _)| *pid).collect();
            found.extend(&children);
            parents = children;
        }
        found
    }
}

/// The descendants of this process, which has to be a subreaper.
#[derive(Clone, Debug, Default)]
pub(crate) struct Descendants {
    /// Children that are no ranks and have started none, each with its start.
    helpers: Vec<(i32, u64)>,
}

impl Descendants {
    /// From now on orphans among the descendants of this process become its children. The children
    /// that it has now are not counted.
    ///
    /// # Errors
    /// The kernel has no subreapers.
    pub(crate) fn adopt() -> io::Result<Self> {
        nix::sys::prctl::set_child_subreaper(true)?;
        let this = std::process::id().cast_signed();
        let Processes(all) = Processes::look();
        let children = all.into_iter().filter(|(_, stat)| stat.parent == this);
        Ok(Self { helpers: children.map(|(pid, stat)| (pid, stat.start)).collect() })
    }

    /// Adds a child that is not counted.
    pub(crate) fn except(&mut self, pid: u32) {
        let pid = pid.cast_signed();
        self.helpers.extend(Stat::of(pid).map(|stat| (pid, stat.start)));
    }

    /// Kills what is there now but the `ranks`, which have ended and are not reaped yet. Says how
    /// many living processes there were: none means that all are gone.
    pub(crate) fn kill_once(&self, ranks: &[i32]) -> usize {
        let this = std::process::id().cast_signed();
        let all = Processes::look();
        let is_helper =
            |(pid, start): &&(i32, u64)| all.0.get(pid).is_some_and(|stat| stat.start == *start);
        let helpers = self.helpers.iter().filter(is_helper).map(|(pid, _)| *pid).collect();
        let found = all.descendants(this, &helpers);
        let mut living = 0;
        for pid in found {
            let stat = all.0[&pid];
            if !stat.is_dead() {
                living += usize::from(send_kill(pid, &stat));
            } else if stat.parent == this && !ranks.contains(&pid) {
                let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
        living
    }

    /// Lets the system forget all adopted processes that have ended.
    pub(crate) fn forget_ended(&self, ranks: &[i32]) {
        let this = std::process::id().cast_signed();
        let Processes(all) = Processes::look();
        let ended = all.into_iter().filter(|(_, stat)| stat.parent == this && stat.is_dead());
        for (pid, _) in ended {
            self.forget(pid, ranks);
        }
    }

    /// Lets the system forget an adopted process that has ended. True where it was one.
    pub(crate) fn forget(&self, pid: i32, ranks: &[i32]) -> bool {
        let known = ranks.contains(&pid) || self.helpers.iter().any(|(helper, _)| *helper == pid);
        !known && waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)).is_ok()
    }
}

/// What an agent that was killed has left, seen from its reaper: a child of the same agent, so that
/// the kernel gives both of them, and all other orphans of the agent, to the same new parent.
#[derive(Clone, Debug)]
pub(crate) struct Orphans {
    /// The agent's name, inherited through the environment.
    pub(crate) agent: String,
    /// One session for each rank.
    pub(crate) sessions: Vec<Session>,
}

/// The session of a rank, which has its process number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) number: i32,
    /// When the rank started. The kernel gives the number to another process only once the session
    /// is empty: where one has it that started at another time, nothing is left of the rank.
    pub(crate) start: u64,
}

impl Session {
    /// That of a rank that leads one, or is about to.
    pub(crate) fn of(rank: i32) -> Self {
        Self { number: rank, start: Stat::of(rank).map_or(0, |stat| stat.start) }
    }
}

impl Orphans {
    /// Kills what is there now, and says how many that were.
    ///
    /// A process belongs to the agent if it is in the session of one of its ranks; or if it has the
    /// agent's name in its environment, is in the same control group as this process or below it,
    /// and descends, over such processes, from the one that has adopted this process. The last two
    /// leave out what a service has started for a rank, which may have the rank's environment.
    pub(crate) fn kill_once(&self) -> usize {
        let this = std::process::id().cast_signed();
        let all = Processes::look();
        let own = all.0.get(&this).copied();
        let (since, adopter) = own.map_or((0, 1), |stat| (stat.start, stat.parent));
        let sessions = self.sessions.iter().filter(|session| {
            all.0.get(&session.number).is_none_or(|leader| leader.start == session.start)
        });
        let sessions: BTreeSet<i32> = sessions.map(|session| session.number).collect();
        let is_young = |pid: &i32, stat: &Stat| *pid != this && stat.start >= since;
        let young = all.0.iter().filter(|(pid, stat)| is_young(pid, stat));
        let (mut members, others): (Vec<_>, Vec<_>) =
            young.partition(|(_, stat)| sessions.contains(&stat.session));
        // First: a process that sleeps in the kernel may hold up whoever reads its environment.
        let mut killed = kill_all(&members);
        let mark = format!("{}={}", env::BRIGADE_AGENT, self.agent);
        let group = control_groups("self");
        let marked = others.into_iter().filter(|(pid, stat)| {
            !stat.is_dead()
                && has_variable(**pid, mark.as_bytes())
                && is_below(&control_groups(&pid.to_string()), &group)
        });
        let marked: BTreeMap<&i32, &Stat> = marked.collect();
        let descends = |pid: &i32| {
            let mut pid = *pid;
            while let Some(stat) = marked.get(&pid) {
                let parent = all.0.get(&stat.parent);
                if stat.parent == adopter
                    || parent.is_none_or(|parent| sessions.contains(&parent.session))
                {
                    return true;
                }
                pid = stat.parent;
            }
            false
        };
        members = marked.iter().filter(|(pid, _)| descends(pid)).map(|(a, b)| (*a, *b)).collect();
        killed += kill_all(&members);
        killed
    }
}

fn kill_all(processes: &[(&i32, &Stat)]) -> usize {
    let living = processes.iter().filter(|(_, stat)| !stat.is_dead());
    living.filter(|(pid, stat)| send_kill(**pid, stat)).count()
}

/// Kills the very process that was looked at. False where it is gone, or is another user's.
fn send_kill(pid: i32, stat: &Stat) -> bool {
    let Some(number) = rustix::process::Pid::from_raw(pid) else { return false };
    match pidfd_open(number, PidfdFlags::empty()) {
        Ok(process) => {
            // The descriptor is of the process that has the number now: is it still the same?
            Stat::of(pid).is_some_and(|now| now.start == stat.start)
                && pidfd_send_signal(process, rustix::process::Signal::KILL).is_ok()
        }
        // A kernel before 5.3, or a sandbox without them.
        Err(error) if error.raw_os_error() == Errno::ENOSYS as i32 => {
            kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
        }
        Err(_) => false,
    }
}

fn has_variable(pid: i32, variable: &[u8]) -> bool {
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|var| var == variable))
}

/// The control groups of a process, one for each hierarchy; empty where the system has none.
fn control_groups(process: &str) -> Vec<String> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    groups.lines().map(str::to_owned).collect()
}

/// A process moves to a group below when it makes one for itself; a service moves it elsewhere.
fn is_below(groups: &[String], of: &[String]) -> bool {
    groups.len() == of.len()
        && groups.iter().zip(of).all(|(group, of)| {
            let of = of.trim_end_matches('/');
            group.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn process(parent: i32, session: i32) -> Stat {
        Stat { state: 'S', parent, session, start: 7 }
    }

    #[test]
    fn what_the_kernel_says() {
        let stat = "42 (a) b (c)) D 7 42 40 0 -1 4194560 101 0 0 0 0 0 0 0 20 0 1 0 1234 8192 1";
        let expected = Stat { state: 'D', parent: 7, session: 40, start: 1234 };
        assert_eq!(Stat::parse(stat), Some(expected));
        assert_eq!(Stat::parse("42 (a"), None);
        let this = Stat::of(std::process::id().cast_signed()).unwrap();
        assert!(!this.is_dead() && this.parent > 0 && this.start > 0);
    }

    #[test]
    fn descendants_of_descendants_but_not_of_helpers() {
        let all = [(2, 1), (3, 2), (4, 3), (5, 2), (6, 5), (7, 1), (1, 0)];
        let all = Processes(all.map(|(pid, parent)| (pid, process(parent, 1))).into());
        assert_eq!(all.descendants(2, &BTreeSet::new()), BTreeSet::from([3, 4, 5, 6]));
        assert_eq!(all.descendants(2, &BTreeSet::from([5])), BTreeSet::from([3, 4]));
    }

    #[test]
    fn control_groups_below() {
        let groups = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let agent = groups("4:memory:/job/1\n0::/user.slice/a");
        assert!(is_below(&agent, &agent));
        assert!(is_below(&groups("4:memory:/job/1\n0::/user.slice/a/own"), &agent));
        assert!(!is_below(&groups("4:memory:/job/1\n0::/user.slice/ab"), &agent));
        assert!(!is_below(&groups("4:memory:/job/2\n0::/user.slice/a"), &agent));
        assert!(is_below(&groups("0::/a"), &groups("0::/")) && is_below(&[], &[]));
    }

    fn first_line(child: &mut Child) -> i32 {
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn orphans_are_found_by_session_and_by_name() {
        // A shell in a session of its own with a child, and one that only has the name.
        let mut session = Command::new("setsid")
            .args(["sh", "-c", "echo $$; sleep 1000 & wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let leader = first_line(&mut session);
        let adopter = Stat::of(std::process::id().cast_signed()).unwrap().parent;
        let sleep = |name: &str| {
            let mut sleep = Command::new("sleep");
            sleep.arg("1000").env(env::BRIGADE_AGENT, name).spawn().unwrap()
        };
        // Its parent is this process, which is no process of the agent: a service, say.
        let mut served = sleep("leftovers-test");
        let mut stranger = sleep("leftovers-test-2");

        let orphans =
            Orphans { agent: "leftovers-test".to_owned(), sessions: vec![Session::of(leader)] };
        while orphans.kill_once() > 0 {}

        session.wait().unwrap();
        assert!(adopter > 0);
        for other in [&mut served, &mut stranger] {
            assert_eq!(other.try_wait().unwrap(), None, "a stranger was killed");
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }
}
