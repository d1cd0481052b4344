//! Random blows against jobs on several hosts, in every way of starting them: each time the job ends
//! with the right code or goes on as configured, soon, and leaves no process and no port.
//!
//! `BRIGADE_TEST_SEED` repeats a run, `BRIGADE_TEST_KILLS` makes it longer. Times are printed, and
//! decide nothing.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use brigade_hostkit::{Etcd, Process};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::ended::kills;
use crate::site::{Run, Running, Site, empty, listening, site, wait_until};

/// Ranks on each host.
const SIZES: [usize; 3] = [1, 2, 1];
const RANKS: usize = 4;
/// Says that it is there, and stays until the test wants the job to end.
const RANK: &str = "echo $$ > $WORLD_SIZE-$TORCHELASTIC_RESTART_COUNT-$RANK; \
                    until [ -e end ]; do sleep 0.05; done";
/// The usual time is too long for a test of what comes after it.
const SILENCE: &str = "--heartbeat-timeout=4";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// One command, over ssh.
    Ssh,
    /// One command on each host, whose number is fixed.
    Static,
    /// Hosts that come and leave, with the coordinator on the first of them.
    Elastic,
    /// The same, with the coordinator on any of them.
    Etcd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    /// A rank is killed.
    Rank,
    /// The agent of a host is killed; on the first host of a job over ssh, the launcher.
    Agent,
    /// ssh, or its other end, is killed.
    Session,
    /// The host is cut off, and lives on.
    Cut,
    /// The host is cut off and all on it is killed, as when its power fails.
    Power,
}

pub(crate) fn random_blows() {
    let mut random = brigade_suite::random();
    let rounds = kills().unwrap_or(8);
    let site = site(4);
    // On the last host, where no part of a job runs.
    let _etcd = Etcd::start_on(site.host(SIZES.len()));
    let mut longest: BTreeMap<(Way, Blow), (usize, Duration)> = BTreeMap::new();
    for round in 0..rounds {
        let way = [Way::Ssh, Way::Static, Way::Elastic, Way::Etcd][random.usize(..4)];
        let blow = match random.usize(..6) {
            0 | 1 => Blow::Rank,
            2 => Blow::Agent,
            3 if way == Way::Ssh => Blow::Session,
            3 => Blow::Agent,
            4 => Blow::Cut,
            _ => Blow::Power,
        };
        let plan = Plan {
            number: round,
            way,
            blow,
            host: random.usize(..3),
            max_restarts: random.usize(..2),
            // While the hosts meet and while the job ends by itself: whatever it says, it must end.
            at: match random.usize(..4) {
                0 => Some(Duration::from_millis(random.u64(..800))),
                _ => None,
            },
            dice: random.u64(..1 << 32),
        };
        let round = Round { site: &site, plan };
        let took = if plan.at.is_some() { round.anytime() } else { round.in_the_middle() };
        if let Some(took) = took {
            eprintln!("{plan}: {} ms", took.as_millis());
            let entry = longest.entry((way, blow)).or_default();
            *entry = (entry.0 + 1, entry.1.max(took));
        } else {
            eprintln!("{plan}: over");
        }
        empty(&site.work);
    }
    let mut table = String::new();
    for ((way, blow), (count, longest)) in longest {
        let (way, blow) = (format!("{way:?}"), format!("{blow:?}"));
        let _ = writeln!(table, "{way:<8} {blow:<8} {count:>4} {:>6} ms", longest.as_millis());
    }
    eprintln!(
        "in the middle of a job, and the longest time until all had ended or went on:\n{table}"
    );
}

/// A coordinator that is cut off from etcd and from the others must not begin an attempt of its own:
/// somebody else coordinates the job by then.
pub(crate) fn a_coordinator_that_is_cut_off_does_not_go_on_alone() {
    let site = site(4);
    let _etcd = Etcd::start_on(site.host(SIZES.len()));
    let plan = Plan {
        number: 0,
        way: Way::Etcd,
        blow: Blow::Cut,
        host: 0,
        max_restarts: 2,
        at: None,
        dice: 0,
    };
    let round = Round { site: &site, plan };
    let first = round.start_on(0);
    round.wait_for_ranks(1, 0);
    let others = [round.start_on(1), round.start_on(2)];
    round.wait_for_ranks(RANKS, 0);
    site.host(0).cut();
    round.wait_for_ranks(RANKS - SIZES[0], 1);
    wait_until("the end of the first", || first.has_ended());
    fs::write(site.work.join("end"), "").unwrap();
    for run in others.map(Running::outcome) {
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    site.host(0).restore();
    let run = first.outcome();
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("no attempt is begun here"), "{}", run.stderr);
    assert!(!site.work.join("1-1-0").exists(), "{}", run.stderr);
    round.nothing_is_left();
}

/// What one round does.
#[derive(Clone, Copy, Debug)]
struct Plan {
    number: u64,
    way: Way,
    blow: Blow,
    host: usize,
    max_restarts: usize,
    /// When, counted from the start; `None`: once all ranks are there.
    at: Option<Duration>,
    dice: u64,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, way, blow, host, max_restarts, at, .. } = self;
        let host = host + 1;
        write!(f, "round {number}: {way:?}, {max_restarts} restarts, {blow:?} on node{host}")?;
        at.map_or(Ok(()), |at| write!(f, " after {} ms", at.as_millis()))
    }
}

/// What is to become of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It goes on with these ranks, in the next attempt.
    GoesOn { ranks: usize },
    /// It ends with this code, and says so with these words.
    Ends { code: i32, says: &'static str },
}

struct Round<'s> {
    site: &'s Site,
    plan: Plan,
}

impl<'s> Round<'s> {
    fn fate(&self) -> Fate {
        let Plan { way, blow, host, max_restarts, .. } = self.plan;
        let ends = |says| Fate::Ends { code: 1, says };
        match (way, blow) {
            (_, Blow::Rank) if max_restarts == 0 => {
                Fate::Ends { code: 137, says: "killed by SIGKILL" }
            }
            (_, Blow::Rank) => Fate::GoesOn { ranks: RANKS },
            (Way::Ssh | Way::Static, _) => ends(" is lost"),
            // Whoever serves the meeting cannot be replaced: the others could not find each other.
            (Way::Elastic, _) if host == 0 => ends(" is lost"),
            (Way::Elastic | Way::Etcd, _) if max_restarts == 0 => ends(" is lost"),
            (Way::Elastic | Way::Etcd, _) => Fate::GoesOn { ranks: RANKS - SIZES[host] },
        }
    }

    /// The host that serves the meeting loses the others, and needs none of them. They cannot go on
    /// without it, so there is one job still.
    fn goes_on_alone(&self) -> bool {
        let Plan { way, blow, host, max_restarts, .. } = self.plan;
        way == Way::Elastic && blow == Blow::Cut && host == 0 && max_restarts > 0
    }

    /// All ranks are there, and nobody has an end in mind.
    fn in_the_middle(&self) -> Option<Duration> {
        let Plan { blow, host, .. } = self.plan;
        let mut launchers = self.start();
        self.wait_for_ranks(RANKS, 0);
        let start = Instant::now();
        self.strike();
        let takes_host = matches!(blow, Blow::Cut | Blow::Power | Blow::Agent);
        let struck = if launchers.len() == 1 { 0 } else { host };
        let fate = self.fate();
        // Whoever is struck sees another end than the others.
        let lost =
            (takes_host && (launchers.len() > 1 || host == 0)).then(|| launchers.remove(struck));
        match fate {
            Fate::GoesOn { ranks } => self.wait_for_ranks(ranks, 1),
            Fate::Ends { .. } => {
                let lost = lost.iter().filter(|_| !self.goes_on_alone());
                for launcher in launchers.iter().chain(lost) {
                    wait_until(&format!("{}: the end", self.plan), || launcher.has_ended());
                }
            }
        }
        if self.goes_on_alone() {
            self.wait_for_ranks(SIZES[0], 1);
        }
        let took = start.elapsed();
        fs::write(self.site.work.join("end"), "").unwrap();
        for launcher in &launchers {
            wait_until(&format!("{}: the end", self.plan), || launcher.has_ended());
        }
        if matches!(blow, Blow::Cut | Blow::Power) {
            self.site.host(host).restore();
        }
        let survivors: Vec<Run> = launchers.into_iter().map(Running::outcome).collect();
        for run in &survivors {
            match fate {
                Fate::GoesOn { .. } => assert_eq!(run.code, 0, "{}: {}", self.plan, run.stderr),
                Fate::Ends { code, says } => {
                    assert_eq!(run.code, code, "{}: {}", self.plan, run.stderr);
                    assert!(run.stderr.contains(says), "{}: {}", self.plan, run.stderr);
                }
            }
        }
        if let Some(lost) = lost {
            let run = lost.outcome();
            let code = match blow {
                Blow::Cut if self.goes_on_alone() => 0,
                Blow::Cut => 1,
                _ => 137,
            };
            assert_eq!(run.code, code, "{}: {}", self.plan, run.stderr);
            assert!(blow != Blow::Cut || run.stderr.contains(" is lost"), "{}", run.stderr);
        }
        self.nothing_is_left();
        Some(took)
    }

    /// The job ends soon by itself: at any moment until then.
    fn anytime(&self) -> Option<Duration> {
        let Plan { blow, host, at, .. } = self.plan;
        fs::write(self.site.work.join("end"), "").unwrap();
        let launchers = self.start();
        thread::sleep(at.unwrap_or_default());
        self.strike();
        for launcher in &launchers {
            wait_until(&format!("{}: the end", self.plan), || launcher.has_ended());
        }
        if matches!(blow, Blow::Cut | Blow::Power) {
            self.site.host(host).restore();
        }
        for launcher in launchers {
            let run = launcher.outcome();
            let Run { code, stderr, .. } = &run;
            assert!([0, 1, 137].contains(code), "{}: {code}: {stderr}", self.plan);
            assert!(*code != 1 || stderr.contains("brigade: "), "{}: {stderr}", self.plan);
        }
        self.nothing_is_left();
        None
    }

    fn start(&self) -> Vec<Running<'s>> {
        match self.plan.way {
            Way::Ssh => {
                let restarts = format!("--max-restarts={}", self.plan.max_restarts);
                let flags = ["--hosts", "node1:1,node2:2,node3:1", &restarts, SILENCE];
                vec![self.site.launch_with(&flags).sh(RANK).start()]
            }
            _ => (0..SIZES.len()).map(|host| self.start_on(host)).collect(),
        }
    }

    /// One of several launchers.
    fn start_on(&self, host: usize) -> Running<'s> {
        let Plan { number, way, max_restarts, .. } = self.plan;
        let (nproc, restarts) =
            (format!("--nproc={}", SIZES[host]), format!("--max-restarts={max_restarts}"));
        // Whoever cannot find the others gives up before the test does.
        let common = [
            &nproc,
            &restarts,
            "--rdzv-conf=join_timeout=6,last_call_timeout=0.2,join_interval=0",
            SILENCE,
        ];
        let (rank, id) = (format!("--node-rank={host}"), format!("--rdzv-id=round-{number}"));
        let flags: &[&str] = match way {
            Way::Static => &["--nnodes=3", &rank, "--master-addr=node1"],
            Way::Elastic => &["--nnodes=1:3", "--rdzv-endpoint=node1"],
            _ => &["--nnodes=1:3", "--rdzv-backend=etcd", "--rdzv-endpoint=node4:2379", &id],
        };
        self.site.launch_on(host, &common).args(flags.iter().copied()).sh(RANK).start()
    }

    fn wait_for_ranks(&self, ranks: usize, attempt: usize) {
        let there = |rank| self.site.work.join(format!("{ranks}-{attempt}-{rank}")).exists();
        let what = format!("{}: {ranks} ranks of attempt {attempt}", self.plan);
        wait_until(&what, || (0..ranks).all(there));
    }

    fn strike(&self) {
        let host = self.site.host(self.plan.host);
        let is_agent = |it: &Process| {
            let word = it.command.get(1).map(String::as_str);
            let is_launcher = word == Some("launch") && self.plan.host == 0;
            match self.plan.way {
                Way::Ssh => is_launcher || word == Some("__agent") && self.plan.host > 0,
                _ => word == Some("launch"),
            }
        };
        let is_rank = |it: &Process| {
            it.command.get(2).is_some_and(|it| it == RANK)
                && it.environment.iter().any(|it| it.starts_with("RANK="))
        };
        let is_session = |it: &Process| {
            it.command.first().is_some_and(|it| it == "ssh" || it.starts_with("sshd: "))
        };
        match self.plan.blow {
            Blow::Rank => self.kill_one(is_rank),
            Blow::Agent => self.kill_one(is_agent),
            Blow::Session => self.kill_one(is_session),
            Blow::Cut => host.cut(),
            Blow::Power => {
                host.cut();
                let kill = |it: Process| {
                    let _ = kill(Pid::from_raw(it.pid), Signal::SIGKILL);
                };
                host.processes().into_iter().for_each(kill);
            }
        }
    }

    /// Kills one of them, if there is one: it may not have begun, or have ended by itself.
    fn kill_one(&self, wanted: impl Fn(&Process) -> bool) {
        let mut found = self.site.host(self.plan.host).processes();
        found.retain(wanted);
        // Not what one of them has forked and is about to be another program.
        let all: Vec<i32> = found.iter().map(|it| it.pid).collect();
        found.retain(|it| !all.contains(&it.parent));
        found.sort_by_key(|it| it.pid);
        let chosen = self.plan.dice.checked_rem(found.len() as u64);
        let victim = chosen.and_then(|it| found.get(usize::try_from(it).unwrap()));
        assert!(victim.is_some() || self.plan.at.is_some(), "{}: nobody is there", self.plan);
        let _ = victim.map(|it| kill(Pid::from_raw(it.pid), Signal::SIGKILL));
    }

    /// No process of the job is on its hosts, and nobody listens there but sshd.
    fn nothing_is_left(&self) {
        for host in &self.site.network.hosts()[..SIZES.len()] {
            let what = format!("{}: no process on {}", self.plan, host.name());
            wait_until(&what, || host.processes().is_empty());
            let ports = listening(host);
            assert!(ports.iter().all(|port| *port == 22), "{}: ports {ports:?}", self.plan);
        }
    }
}
