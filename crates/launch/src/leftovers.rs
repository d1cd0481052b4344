//! Finds and kills what ranks have left behind.
//!
//! While the agent runs, these are its descendants: it is a *subreaper* (`PR_SET_CHILD_SUBREAPER`), so a process whose
//! parent has ended becomes a child of the agent, however it has detached itself. A process that a service has started
//! for a rank (a job of `sbatch`, a window of a running `tmux`, a unit of `systemd-run`) is not a descendant, and is
//! not killed. In a container whose first process is the agent, other orphans become its children, too; those of ranks
//! are recognized in the same way as by the reaper.
//!
//! After the agent's own death its descendants belong to the process that adopts orphans, among others. The reaper
//! recognizes them by the ranks' sessions and by the agent's name in their environment; see [`Orphans`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

use brigade_rank_env::env;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

/// The processes of this machine at one moment, as far as this process may see them, by process number.
#[derive(Debug, Default)]
struct Processes(BTreeMap<i32, Stat>);

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Letter of the process's state: R runs, S sleeps, D sleeps in the kernel, Z has ended.
    pub(crate) state: char,
    parent: i32,
    session: i32,
    /// Start time in ticks of the system's clock. Together with its number it identifies the process.
    start: u64,
    /// Reason why its environment cannot be read yet or any more, if so.
    memory: Memory,
}

/// State of a process's memory, as far as its environment is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// A program with an environment.
    Program,
    /// A program with an empty environment.
    NoEnvironment,
    /// A program is being loaded (`exec`): its environment does not exist yet.
    Loading,
    /// No memory: a kernel thread, or a process that is about to end.
    None,
}

impl Stat {
    /// Reads the fields. `None` if the process does not exist.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&stat))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The command in parentheses may contain anything, including parentheses and blanks.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let flags: u32 = fields.nth(2)?.parse().ok()?;
        let start = fields.nth(12)?.parse().ok()?;
        let (env_start, env_end): (u64, u64) =
            (fields.nth(27)?.parse().ok()?, fields.next()?.parse().ok()?);
        let memory = match (env_end, env_end.saturating_sub(env_start)) {
            (0, _) if flags & (PF_EXITING | PF_KTHREAD) != 0 => Memory::None,
            (0, _) => Memory::Loading,
            (_, 0) => Memory::NoEnvironment,
            _ => Memory::Program,
        };
        Some(Self { state, parent, session, start, memory })
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

    /// Returns the processes whose chain of parents up to `root` is complete.
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

/// Descendants of this process, which has to be a subreaper.
#[derive(Clone, Debug, Default)]
pub(crate) struct Descendants {
    /// Children that are not ranks and have started none, each with its start time.
    helpers: Vec<(i32, u64)>,
    /// Variable in the environment of ranks, if this process is the first one of its namespace, to which the kernel
    /// gives all orphans there.
    mark: Option<String>,
}

impl Descendants {
    /// Makes orphans among the descendants of this process its children from now on. Its present children are not
    /// counted. `agent` is this process's name in the ranks' environment.
    ///
    /// # Errors
    /// The kernel does not support subreapers.
    pub(crate) fn adopt(agent: &str) -> io::Result<Self> {
        nix::sys::prctl::set_child_subreaper(true)?;
        let this = std::process::id().cast_signed();
        let Processes(all) = Processes::look();
        let children = all.into_iter().filter(|(_, stat)| stat.parent == this);
        let helpers = children.map(|(pid, stat)| (pid, stat.start)).collect();
        let mark = (this == 1).then(|| format!("{}={agent}", env::BRIGADE_AGENT));
        Ok(Self { helpers, mark })
    }

    /// Excludes a child from the count.
    pub(crate) fn except(&mut self, pid: u32) {
        let pid = pid.cast_signed();
        self.helpers.extend(Stat::of(pid).map(|stat| (pid, stat.start)));
    }

    /// Kills the present descendants except `ranks`, which have ended and are not reaped yet. Returns the number of
    /// living processes that it found; 0 means that none is left.
    pub(crate) fn kill_once(&self, ranks: &[i32]) -> usize {
        let this = std::process::id().cast_signed();
        let all = Processes::look();
        let is_helper =
            |(pid, start): &&(i32, u64)| all.0.get(pid).is_some_and(|stat| stat.start == *start);
        let helpers = self.helpers.iter().filter(is_helper).map(|(pid, _)| *pid);
        let (strangers, mut living) = self.strangers(&all, this, ranks);
        let found = all.descendants(this, &helpers.chain(strangers).collect());
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

    /// Returns the adopted processes that do not come from a rank, such as those that `kubectl exec` has left in a
    /// container. The processes of a rank are in its session, or have the agent's name. Also returns how many of them
    /// are included only because their program is still being loaded.
    fn strangers(&self, all: &Processes, this: i32, ranks: &[i32]) -> (Vec<i32>, usize) {
        let Some(mark) = &self.mark else { return (Vec::new(), 0) };
        let is_adopted = |(pid, stat): &(&i32, &Stat)| {
            let of_rank = ranks.contains(pid) || ranks.contains(&stat.session);
            stat.parent == this && !stat.is_dead() && !of_rank
        };
        let mut loading = 0;
        let is_strange = |pid: &i32| match environment_has(*pid, mark.as_bytes()) {
            Some(has) => !has,
            None => {
                loading += 1;
                true
            }
        };
        let adopted = all.0.iter().filter(is_adopted).map(|(pid, _)| *pid);
        let strangers = adopted.filter(is_strange).collect();
        (strangers, loading)
    }

    /// Reaps all adopted processes that have ended.
    pub(crate) fn forget_ended(&self, ranks: &[i32]) {
        let this = std::process::id().cast_signed();
        let Processes(all) = Processes::look();
        let ended = all.into_iter().filter(|(_, stat)| stat.parent == this && stat.is_dead());
        for (pid, _) in ended {
            self.forget(pid, ranks);
        }
    }

    /// Reaps an adopted process that has ended. Returns `true` if it was one.
    pub(crate) fn forget(&self, pid: i32, ranks: &[i32]) -> bool {
        let known = ranks.contains(&pid) || self.helpers.iter().any(|(helper, _)| *helper == pid);
        !known && waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)).is_ok()
    }
}

/// The processes that a killed agent has left, as seen by its reaper. The reaper was a child of the same agent, so the
/// kernel gives it and all other orphans of the agent to the same new parent.
#[derive(Clone, Debug)]
pub(crate) struct Orphans {
    /// Name of the agent, inherited through the environment.
    pub(crate) agent: String,
    /// Process number of the agent.
    pub(crate) agent_pid: i32,
    /// Sessions of the ranks.
    pub(crate) sessions: Vec<Session>,
}

/// Session of a rank. Its number is the rank's process number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) number: i32,
    /// Start time of the rank. The kernel reuses the number only once the session is empty: if the process with it has
    /// another start time, nothing is left of the rank.
    pub(crate) start: u64,
}

impl Session {
    /// Returns the session of a rank that leads one, or is about to.
    pub(crate) fn of(rank: i32) -> Self {
        Self { number: rank, start: Stat::of(rank).map_or(0, |stat| stat.start) }
    }
}

/// Result of one search for orphans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    /// Number of killed processes.
    pub(crate) killed: usize,
    /// `true` if there may be others, which this search could not distinguish from unrelated processes.
    pub(crate) incomplete: bool,
}

impl Orphans {
    /// Kills all orphans that exist now.
    ///
    /// A process belongs to the agent if it is in the session of one of its ranks; or if it has the agent's name in its
    /// environment, is in the same control group as this process or below it, and descends, through such processes,
    /// from the one that has adopted this process. The last two conditions exclude processes that a service has started
    /// for a rank, which may have the rank's environment.
    ///
    /// Reading `/proc` is not atomic. The search is incomplete while the agent still exists, whose children get a new
    /// parent only after its descriptors have been closed; if this process, or another one, got another parent
    /// meanwhile; and while a program is being loaded, whose environment does not exist yet.
    pub(crate) fn kill_once(&self) -> Look {
        let this = std::process::id().cast_signed();
        let all = Processes::look();
        let adopter = Stat::of(this).map(|stat| stat.parent);
        let sorted = self.sort(this, &all);
        // First: reading the environment of a process that sleeps in the kernel may block.
        let mut killed = kill_all(&sorted.in_sessions);
        let group = control_groups("self");
        let mark = format!("{}={}", env::BRIGADE_AGENT, self.agent);
        let mut loading = false;
        let marked = sorted.others.into_iter().filter(|(pid, _)| {
            match environment_has(*pid, mark.as_bytes()) {
                Some(has) => has && is_below(&control_groups(&pid.to_string()), &group),
                None => {
                    loading = true;
                    false
                }
            }
        });
        let marked: BTreeMap<i32, Stat> = marked.collect();
        let (found, orphaned) = Self::descending(&marked, &all, sorted.adopter, &sorted.sessions);
        killed += kill_all(&found);
        let adopted = adopter == Some(sorted.adopter) && sorted.adopter != self.agent_pid;
        Look { killed, incomplete: loading || orphaned || !adopted }
    }

    /// Returns the living processes that this agent may have left, according to `/proc`.
    fn sort(&self, this: i32, all: &Processes) -> YoungProcesses {
        let own = all.0.get(&this).copied();
        let (since, adopter) = own.map_or((0, 1), |stat| (stat.start, stat.parent));
        let sessions = self.sessions.iter().filter(|session| {
            all.0.get(&session.number).is_none_or(|leader| leader.start == session.start)
        });
        let sessions: BTreeSet<i32> = sessions.map(|session| session.number).collect();
        let is_young = |pid: i32, stat: &Stat| pid != this && stat.start >= since;
        let young = all.0.iter().map(|(pid, stat)| (*pid, *stat));
        let young = young.filter(|(pid, stat)| is_young(*pid, stat) && !stat.is_dead());
        let (in_sessions, others) = young.partition(|(_, stat)| sessions.contains(&stat.session));
        YoungProcesses { adopter, sessions, in_sessions, others }
    }

    /// Returns the processes with the agent's name that descend from the adopter, directly or through others of them,
    /// or from a rank. Also returns `true` if one of them was read before its parent ended, so that its new parent is
    /// not known yet.
    fn descending(
        marked: &BTreeMap<i32, Stat>,
        all: &Processes,
        adopter: i32,
        sessions: &BTreeSet<i32>,
    ) -> (Vec<(i32, Stat)>, bool) {
        let mut orphaned = false;
        let mut descends = |pid: i32| {
            let mut pid = pid;
            while let Some(stat) = marked.get(&pid) {
                let parent = all.0.get(&stat.parent);
                let is_rank = parent.is_some_and(|parent| sessions.contains(&parent.session));
                if stat.parent == adopter || is_rank {
                    return true;
                }
                // A parent that cannot be seen may belong to a service.
                let has_ended = |it: &Stat| it.is_dead();
                orphaned |= parent.map_or_else(|| !is_there(stat.parent), has_ended);
                pid = stat.parent;
            }
            false
        };
        let found = marked.iter().filter(|(pid, _)| descends(**pid));
        let found = found.map(|(pid, stat)| (*pid, *stat)).collect();
        (found, orphaned)
    }
}

/// Returns `true` if a process exists, even if `/proc` does not show it. Parent 0 is a process outside of this
/// namespace.
fn is_there(pid: i32) -> bool {
    pid == 0 || kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// Processes of this machine that have started after the reaper.
#[derive(Debug)]
struct YoungProcesses {
    /// The parent of the reaper.
    adopter: i32,
    /// Sessions of ranks whose numbers have not been reused.
    sessions: BTreeSet<i32>,
    in_sessions: Vec<(i32, Stat)>,
    others: Vec<(i32, Stat)>,
}

fn kill_all(processes: &[(i32, Stat)]) -> usize {
    processes.iter().filter(|(pid, stat)| send_kill(*pid, stat)).count()
}

/// Kills exactly the process that was examined. Returns `false` if it has ended, or belongs to another user.
fn send_kill(pid: i32, stat: &Stat) -> bool {
    let Some(number) = rustix::process::Pid::from_raw(pid) else { return false };
    match pidfd_open(number, PidfdFlags::empty()) {
        Ok(process) => {
            // The descriptor belongs to the process that has the number now; check that it is the same one.
            Stat::of(pid).is_some_and(|now| now.start == stat.start)
                && pidfd_send_signal(process, rustix::process::Signal::KILL).is_ok()
        }
        // A kernel before 5.3, or a sandbox without process descriptors.
        Err(error) if error.raw_os_error() == Errno::ENOSYS as i32 => {
            kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
        }
        Err(_) => false,
    }
}

/// Returns `true` if a process was started with this variable, or `None` while its program is being loaded.
fn environment_has(pid: i32, variable: &[u8]) -> Option<bool> {
    // Another user's process cannot belong to this job.
    let Ok(environ) = fs::read(format!("/proc/{pid}/environ")) else { return Some(false) };
    if environ.is_empty() {
        // The kernel's present answer may be about another program, loaded in the meantime.
        let memory = Stat::of(pid).map_or(Memory::None, |stat| stat.memory);
        return matches!(memory, Memory::None | Memory::NoEnvironment).then_some(false);
    }
    Some(environ.split(|byte| *byte == 0).any(|var| var == variable))
}

/// Flags of a process in `/proc/PID/stat`, from include/linux/sched.h.
const PF_EXITING: u32 = 0x4;
const PF_KTHREAD: u32 = 0x20_0000;

/// Returns the control groups of a process, one for each hierarchy. Empty if the system has none.
fn control_groups(process: &str) -> Vec<String> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    groups.lines().map(str::to_owned).collect()
}

/// Returns `true` if `groups` are the same as `of` or below them. A process moves to a group below when it creates one
/// for itself; a service moves it elsewhere.
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
        Stat { state: 'S', parent, session, start: 7, memory: Memory::Program }
    }

    #[test]
    fn what_the_kernel_says() {
        let stat = |flags: u32, env_start: u64, env_end: u64| {
            let text = format!(
                "42 (a) b (c)) D 7 42 40 0 -1 {flags} 101 0 0 0 0 0 0 0 20 0 1 0 1234 8192 1 2 3 4 \
                 5 6 7 0 0 0 0 0 0 0 17 1 0 0 0 0 0 8 9 10 11 12 {env_start} {env_end} 0\n"
            );
            Stat::parse(&text).unwrap()
        };
        let expected =
            Stat { state: 'D', parent: 7, session: 40, start: 1234, memory: Memory::Program };
        assert_eq!(stat(4_194_560, 13, 14), expected);
        let memory = |flags, env_start, env_end| stat(flags, env_start, env_end).memory;
        assert_eq!(memory(4_194_560, 13, 13), Memory::NoEnvironment);
        assert_eq!(memory(4_194_560, 0, 0), Memory::Loading);
        assert_eq!(memory(4_194_564, 0, 0), Memory::None, "it ends");
        assert_eq!(memory(0x20_8040, 0, 0), Memory::None, "a thread of the kernel");
        assert_eq!(Stat::parse("42 (a"), None);
        let this = Stat::of(std::process::id().cast_signed()).unwrap();
        assert!(!this.is_dead() && this.parent > 0 && this.start > 0);
        assert_eq!(this.memory, Memory::Program);
    }

    #[test]
    fn an_environment_that_is_empty_is_known() {
        let start = |program: &str| {
            let mut command = Command::new(program);
            command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped());
            command
        };
        // The programs have been loaded once they have answered.
        let mut bare = start("/bin/sh").args(["-c", "echo 1; read end"]).spawn().unwrap();
        let mut named = start("/bin/sh");
        let mut named = named.args(["-c", "echo 1; read end"]).env("A", "b").spawn().unwrap();
        for child in [&mut bare, &mut named] {
            assert_eq!(first_line(child), 1);
        }
        let pid = |child: &Child| child.id().cast_signed();
        assert_eq!(environment_has(pid(&bare), b"A=b"), Some(false));
        assert_eq!(environment_has(pid(&named), b"A=b"), Some(true));
        assert_eq!(environment_has(pid(&named), b"A=c"), Some(false));
        for mut child in [bare, named] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(environment_has(0, b"A=b"), Some(false), "no such process");
    }

    #[test]
    fn orphans_of_which_the_new_parent_is_not_known_yet() {
        let dead = |parent, session| Stat { state: 'Z', ..process(parent, session) };
        // Process 2 is the adopter, 10 was a rank, 20 has ended, 30 is a service.
        let gone = i32::MAX;
        let all = [(2, process(1, 1)), (10, dead(2, 10)), (20, dead(2, 20)), (30, process(1, 30))];
        let descending = |marked: &[(i32, i32)]| {
            let marked = marked.iter().map(|(pid, parent)| (*pid, process(*parent, *pid)));
            let marked: BTreeMap<i32, Stat> = marked.collect();
            let all = Processes(all.iter().copied().chain(marked.clone()).collect());
            let (found, orphaned) = Orphans::descending(&marked, &all, 2, &BTreeSet::from([10]));
            (found.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>(), orphaned)
        };
        assert_eq!(descending(&[(11, 10), (12, 11), (22, 2)]), (vec![11, 12, 22], false));
        assert_eq!(descending(&[(31, 30), (32, 31), (33, 0)]), (vec![], false));
        assert_eq!(descending(&[(21, 20)]), (vec![], true));
        assert_eq!(descending(&[(11, 10), (41, gone), (42, 41)]), (vec![11], true));
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
        // Its parent is this process, which does not belong to the agent, as with a service.
        let mut served = sleep("leftovers-test");
        let mut stranger = sleep("leftovers-test-2");

        let mut orphans = Orphans {
            agent: "leftovers-test".to_owned(),
            agent_pid: 0,
            sessions: vec![Session::of(leader)],
        };
        while orphans.kill_once() != (Look { killed: 0, incomplete: false }) {}

        session.wait().unwrap();
        assert!(adopter > 0);
        for other in [&mut served, &mut stranger] {
            assert_eq!(other.try_wait().unwrap(), None, "a stranger was killed");
            other.kill().unwrap();
            other.wait().unwrap();
        }
        // While the agent is the parent of this process, the search is incomplete.
        orphans.agent_pid = adopter;
        assert!(orphans.kill_once().incomplete);
    }
}
