//! Random faults in jobs on four hosts that train and save checkpoints: every job ends either with the weights that
//! training without a fault has, bit by bit, or with the failure that its faults must cause, by name; and it leaves
//! nothing behind.
//!
//! The test has 12 faults. `cargo test -p brigade-cli --test needs -- --part faults::full` has 1,000;
//! `BRIGADE_FAULTS` sets another number for both, `BRIGADE_TEST_SEED` repeats a run, and
//! `BRIGADE_FAULTS_JOB` one of its jobs.
//! What follows a fault decides; how long that takes does not.

mod fault;
mod trainer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_hosts::{Disk, Etcd, Host, Process};
use brigade_test_needs::needs;
use fastrand::Rng;
use fault::{Burst, Expected, Fault, Kind, LaunchMode, RANKS, SIZES};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use trainer::{Model, Progress};

use crate::job;
use crate::site::{self, Run, Running, Site, site};

/// Heartbeat timeout. Long enough for a busy machine, and short enough to wait for it.
const HEARTBEAT: Duration = Duration::from_secs(6);
/// Maximum number of faults of one job, if none of them ends it.
const MAX_FAULTS: usize = 10;

/// Runs a rank of a job.
#[brigade_test_needs::part]
fn rank() {
    trainer::train();
}

/// Runs a few faults.
#[needs(Hosts, Etcd, Fuse)]
fn random_faults() {
    run(number("BRIGADE_FAULTS").unwrap_or(12));
}

/// Runs many faults, without the time limit of a test: each wait has its own.
#[brigade_test_needs::part]
fn full() {
    run(number("BRIGADE_FAULTS").unwrap_or(1000));
}

fn number(name: &str) -> Option<usize> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value}: expected a number")))
}

fn run(faults: usize) {
    let only = number("BRIGADE_FAULTS_JOB");
    // Before this thread has mounts of its own, in which the path may not exist.
    let program = std::env::current_exe().unwrap();
    let disk = Disk::mount();
    // After the disk, so that every host sees it; one more host than those of the jobs, for etcd.
    let site = site(SIZES.len() + 1);
    let etcd = Etcd::start_on(site.host(SIZES.len()));
    // A job's faults depend on its number and not on other jobs.
    let seed = brigade_test_needs::random().u64(..);
    let random = |job: usize| Rng::with_seed(seed.wrapping_add(job as u64));
    let world = World { site: &site, disk: &disk, program };
    world.prepare();
    let namespaces = world.namespaces();
    let (start, mut tally) = (Instant::now(), Tally::default());
    world.run(Plan::quiet(0), &mut random(0), &mut tally, 0);
    for number in only.map_or(1..usize::MAX, |job| job..job + 1) {
        let left = faults - tally.faults.min(faults);
        if left == 0 {
            break;
        }
        let mut random = random(number);
        let plan = Plan::random(number, &mut random);
        world.run(plan, &mut random, &mut tally, left);
    }
    eprintln!("{}{:.0} s", tally.table(), start.elapsed().as_secs_f64());
    drop(etcd);
    drop(site);
    drop(disk);
    let left = || processes_in(&namespaces);
    let all_ended = site::within(LIMIT, || left().is_empty());
    assert!(all_ended, "processes keep namespaces of the hosts: {:?}", left());
}

/// Environment of the jobs.
struct World<'s> {
    site: &'s Site,
    disk: &'s Disk,
    /// This test program, which is also the ranks' program.
    program: PathBuf,
}

/// Plan of one job.
#[derive(Clone, Copy, Debug)]
struct Plan {
    number: usize,
    mode: LaunchMode,
    max_restarts: u64,
    /// Time of its only fault, whatever the job is doing then. `None`: its faults occur while it trains.
    at: Option<Duration>,
    faults: usize,
}

impl Plan {
    /// Returns a job without faults.
    fn quiet(number: usize) -> Self {
        Self { number, mode: LaunchMode::Ssh, max_restarts: 0, at: None, faults: 0 }
    }

    fn random(number: usize, random: &mut Rng) -> Self {
        let modes = [LaunchMode::Ssh, LaunchMode::Static, LaunchMode::Elastic, LaunchMode::Etcd];
        let mode = modes[random.usize(..4)];
        let max_restarts = [0, 1, 3, 100, 100, 100][random.usize(..6)];
        let at = Duration::from_millis(random.u64(..1500));
        let at = (random.u8(..5) == 0).then_some(at);
        Self { number, mode, max_restarts, at, faults: random.usize(1..=MAX_FAULTS) }
    }
}

/// Counts of faults and outcomes.
#[derive(Debug, Default)]
struct Tally {
    faults: usize,
    jobs: usize,
    kinds: BTreeMap<Kind, usize>,
    fates: BTreeMap<(LaunchMode, String), usize>,
}

impl Tally {
    fn count(&mut self, burst: &Burst) {
        self.faults += burst.faults.len();
        burst.faults.iter().for_each(|fault| *self.kinds.entry(fault.kind).or_default() += 1);
    }

    fn became(&mut self, mode: LaunchMode, what: impl Into<String>) {
        *self.fates.entry((mode, what.into())).or_default() += 1;
    }

    fn table(&self) -> String {
        let mut lines = format!("{} faults in {} jobs\n", self.faults, self.jobs);
        let kinds = self.kinds.iter().map(|(kind, count)| format!("{count:>6} {kind:?}\n"));
        lines.extend(kinds);
        let fates = self.fates.iter();
        lines.extend(fates.map(|((mode, what), count)| {
            let mode = format!("{mode:?}");
            format!("{count:>6} {mode:<8} {what}\n")
        }));
        lines
    }
}

impl<'s> World<'s> {
    /// Gives every host its own folder for temporary files.
    fn prepare(&self) {
        for host in 0..SIZES.len() {
            let folder = self.temporary(host);
            fs::create_dir(&folder).unwrap();
            self.site.host(host).set_login_variable("TMPDIR", folder.to_str().unwrap());
        }
    }

    fn temporary(&self, host: usize) -> PathBuf {
        self.site.network.folder().join(format!("tmp-{}", self.site.host(host).name()))
    }

    fn namespaces(&self) -> Vec<File> {
        self.site.network.hosts().iter().map(Host::network_namespace).collect()
    }

    fn run(&self, plan: Plan, random: &mut Rng, tally: &mut Tally, most_faults: usize) {
        let checkpoints = self.disk.path().join(format!("job-{}", plan.number));
        fs::create_dir(&checkpoints).unwrap();
        let launchers = SIZES.map(|_| None);
        let mut job =
            TrainingJob { world: self, plan, checkpoints, launchers, powered_off: BTreeSet::new() };
        let (start, before) = (Instant::now(), tally.faults);
        match plan.at {
            Some(at) => job.anytime(at, random, tally),
            None => job.while_it_trains(random, tally, most_faults),
        }
        tally.jobs += 1;
        eprintln!(
            "job {}: {:?}, {} restarts: {} faults, {:.1} s",
            plan.number,
            plan.mode,
            plan.max_restarts,
            tally.faults - before,
            start.elapsed().as_secs_f64(),
        );
        site::empty(&self.site.work);
    }
}

/// Job that has been started.
struct TrainingJob<'w, 's> {
    world: &'w World<'s>,
    plan: Plan,
    checkpoints: PathBuf,
    /// Launchers by host; over ssh there is one.
    launchers: [Option<Running<'s>>; SIZES.len()],
    /// Hosts on which nothing was left that could have cleaned up.
    powered_off: BTreeSet<usize>,
}

impl<'s> TrainingJob<'_, 's> {
    fn site(&self) -> &'s Site {
        self.world.site
    }

    fn work(&self) -> &'s Path {
        &self.site().work
    }

    fn start(&mut self) {
        let hosts = if self.plan.mode == LaunchMode::Ssh { 1 } else { SIZES.len() };
        for host in 0..hosts {
            self.start_on(host);
        }
    }

    fn start_on(&mut self, host: usize) {
        let Plan { number, mode, max_restarts, .. } = self.plan;
        let flags: Vec<String> = match mode {
            LaunchMode::Ssh => {
                let name = |host: usize| self.site().host(host).name();
                let hosts = SIZES.iter().enumerate().map(|(i, n)| format!("{}:{n}", name(i)));
                vec![format!("--hosts={}", hosts.collect::<Vec<_>>().join(","))]
            }
            LaunchMode::Static => vec![
                format!("--nnodes={}", SIZES.len()),
                format!("--node-rank={host}"),
                "--master-addr=node1".to_owned(),
            ],
            LaunchMode::Elastic => {
                vec!["--nnodes=3:4".to_owned(), "--rdzv-endpoint=node1".to_owned()]
            }
            LaunchMode::Etcd => vec![
                "--nnodes=3:4".to_owned(),
                "--rdzv-backend=etcd".to_owned(),
                format!("--rdzv-endpoint=node{}:2379", SIZES.len() + 1),
                format!("--rdzv-id=job-{number}"),
            ],
        };
        let mut common = vec![
            format!("--max-restarts={max_restarts}"),
            format!("--heartbeat-timeout={}", HEARTBEAT.as_secs()),
        ];
        if mode != LaunchMode::Ssh {
            common.push(format!("--nproc={}", SIZES[host]));
            common.push(
                "--rdzv-conf=join_timeout=10,last_call_timeout=0.2,join_interval=0".to_owned(),
            );
        }
        let all: Vec<&str> = flags.iter().chain(&common).map(String::as_str).collect();
        let program = trainer::command(&self.world.program, self.work(), &self.checkpoints);
        let launch = self.site().launch_on(host, &all).args(["--"]);
        let launch = launch.args(program.iter().map(String::as_str));
        let launch = launch.env("TMPDIR", self.world.temporary(host));
        self.launchers[host] = Some(launch.start());
    }

    /// Injects one burst of faults after the other, each when the job has recovered from the previous one.
    fn while_it_trains(&mut self, random: &mut Rng, tally: &mut Tally, most_faults: usize) {
        let Plan { mode, max_restarts, .. } = self.plan;
        let before = tally.faults;
        let most = self.plan.faults.min(most_faults);
        self.start();
        let mut progress = self.wait_for("the first steps", |it| it.world == RANKS && it.step > 12);
        while tally.faults - before < most {
            let burst = Burst::random(random, mode);
            let expected = Expected::of(&burst, mode, max_restarts - progress.restarts);
            tally.count(&burst);
            tally.became(mode, format!("{expected:?}"));
            let what = format!("{burst}: {expected:?}");
            eprintln!("job {}, {mode:?}, step {}: {what}", self.plan.number, progress.step);
            self.inject(&burst, expected);
            match expected {
                Expected::NamesRank | Expected::NamesHost => return self.fails(&burst, &what),
                Expected::GoesOn | Expected::Restarts => {
                    let restarts = progress.restarts + u64::from(expected == Expected::Restarts);
                    progress = self.goes_on(&what, restarts, RANKS);
                }
                Expected::LosesHost => {
                    let host = burst.taken().unwrap().host;
                    let run = self.launchers[host].take().map(Running::outcome);
                    assert!(run.is_none_or(|run| run.code == 137));
                    let ranks = RANKS - SIZES[host] as u64;
                    progress = self.goes_on(&what, progress.restarts + 1, ranks);
                    // The host comes back.
                    self.site().host(host).restore();
                    self.start_on(host);
                    progress = self.goes_on("a host joins", progress.restarts, RANKS);
                }
            }
        }
        trainer::finish_at(self.work(), progress.step + 25);
        self.succeeds("the end", |code| code == 0);
        tally.became(mode, "ends with the right weights");
    }

    /// Injects one fault at any time, from the start of a job to its end.
    fn anytime(&mut self, at: Duration, random: &mut Rng, tally: &mut Tally) {
        let Plan { mode, max_restarts, .. } = self.plan;
        trainer::finish_at(self.work(), 120);
        let mut burst = Burst::random(random, mode);
        burst.faults.truncate(1);
        tally.count(&burst);
        self.start();
        thread::sleep(at);
        let expected = Expected::of(&burst, mode, max_restarts);
        let what = format!("{burst} after {} ms: {expected:?}", at.as_millis());
        eprintln!("job {}, {mode:?}: {what}", self.plan.number);
        self.inject(&burst, expected);
        match expected {
            // Also if there was nothing to stop or kill yet, or any more.
            Expected::GoesOn | Expected::Restarts => {
                self.succeeds(&what, |code| code == 0);
                tally.became(mode, "ends with the right weights, after a fault at any time");
            }
            Expected::NamesRank | Expected::NamesHost | Expected::LosesHost => {
                let right = self.succeeds(&what, |code| [0, 1, 137].contains(&code));
                let how = if right { "ends with the right weights" } else { "fails by name" };
                tally.became(mode, format!("{how}, after a fault at any time"));
            }
        }
    }

    /// Starts the faults, and ends those that last for a while.
    fn inject(&mut self, burst: &Burst, expected: Expected) {
        let mut stopped = Vec::new();
        let mut may_be_absent = self.plan.at.is_some();
        for fault in &burst.faults {
            self.begin(fault, may_be_absent, &mut stopped);
            // The failed process may have ended already.
            may_be_absent |= !fault.kind.is_short();
            thread::sleep(burst.pause);
        }
        let is_long = |kind| matches!(kind, Kind::LongCut | Kind::LongStop);
        if burst.faults.iter().any(|fault| is_long(fault.kind)) {
            // The other hosts notice the loss themselves, and the lost host when it is back.
            let failed = burst.taken().unwrap().host;
            let launchers = self.launchers.iter().enumerate();
            let survivors: Vec<_> = launchers
                .filter(|(host, _)| {
                    *host != failed || self.plan.mode == LaunchMode::Ssh && failed != 0
                })
                .filter_map(|(_, launcher)| launcher.as_ref())
                .collect();
            let found_out = || survivors.iter().all(|launcher| launcher.has_ended());
            if !survivors.is_empty() && expected == Expected::NamesHost {
                self.wait("the others find out", found_out);
            } else {
                thread::sleep(HEARTBEAT * 3 / 2);
            }
        } else if burst.faults.iter().any(|fault| !fault.kind.takes_host()) {
            thread::sleep(burst.lasts);
        }
        for fault in &burst.faults {
            match fault.kind {
                Kind::Cut | Kind::LongCut => self.site().host(fault.host).restore(),
                Kind::SlowDisk => self.world.disk.slow_down(Duration::ZERO),
                Kind::FreezeDisk => self.world.disk.thaw(),
                _ => {}
            }
        }
        stopped.into_iter().for_each(|pid| send(pid, Signal::SIGCONT));
        self.wake_outer();
    }

    fn begin(&mut self, fault: &Fault, may_be_absent: bool, stopped: &mut Vec<i32>) {
        let host = self.site().host(fault.host);
        let first = fault.host == 0;
        let is_agent = |it: &Process| match (self.plan.mode, it.command.get(1).map(String::as_str))
        {
            (LaunchMode::Ssh, Some("__agent")) => !first,
            (LaunchMode::Ssh, Some("launch")) => first,
            (_, word) => word == Some("launch"),
        };
        let is_rank = |it: &Process| trainer::is_rank(&it.environment);
        let is_session = |process: &Process| {
            process.command.first().is_some_and(|it| it == "ssh" || it.starts_with("sshd: "))
        };
        let mut processes = host.processes();
        match fault.kind {
            Kind::KillRank | Kind::StopRank => processes.retain(is_rank),
            Kind::StopAgent | Kind::KillAgent | Kind::LongStop => processes.retain(is_agent),
            Kind::KillSession => processes.retain(is_session),
            _ => {}
        }
        // Without processes that one of them has forked and that are about to execute another program.
        let all: BTreeSet<i32> = processes.iter().map(|it| it.pid).collect();
        let mut one = processes.iter().filter(|it| !all.contains(&it.parent)).collect::<Vec<_>>();
        one.sort_by_key(|it| it.pid);
        let one = (!one.is_empty()).then(|| one[fault.choice % one.len()].pid);
        let needs_one = matches!(
            fault.kind,
            Kind::KillRank
                | Kind::StopRank
                | Kind::StopAgent
                | Kind::KillAgent
                | Kind::KillSession
                | Kind::LongStop
        );
        assert!(one.is_some() || !needs_one || may_be_absent, "nothing is there for {fault}");
        match fault.kind {
            Kind::KillRank | Kind::KillAgent | Kind::KillSession => {
                one.iter().for_each(|it| send(*it, Signal::SIGKILL));
            }
            Kind::StopRank | Kind::StopAgent | Kind::LongStop => {
                one.iter().for_each(|it| send(*it, Signal::SIGSTOP));
                stopped.extend(one);
            }
            Kind::StopHost => {
                all.iter().for_each(|it| send(*it, Signal::SIGSTOP));
                stopped.extend(all);
            }
            Kind::Cut | Kind::LongCut => host.cut(),
            Kind::Power => {
                host.cut();
                self.powered_off.insert(fault.host);
                while !host.processes().is_empty() {
                    host.processes().iter().for_each(|it| send(it.pid, Signal::SIGKILL));
                }
            }
            Kind::SlowDisk => self.world.disk.slow_down(Duration::from_millis(8)),
            Kind::FreezeDisk => self.world.disk.freeze(),
        }
    }

    /// Waits until the job has trained further, which must be in this attempt.
    fn goes_on(&mut self, what: &str, restarts: u64, world: u64) -> Progress {
        let now = Progress::read(self.work()).unwrap();
        let is_further = |progress: Progress| {
            let is_new = (progress.restarts, progress.world) != (now.restarts, now.world);
            (progress.restarts, progress.world) == (restarts, world)
                && (is_new || progress.step > now.step + 5)
        };
        let progress = self.wait_for(what, |it| is_further(it) || it.restarts > restarts);
        if progress.restarts != restarts {
            self.panic(&format!("{what}: {progress:?}, but {restarts} restarts were expected"));
        }
        progress
    }

    /// Checks that the job fails as expected: the launchers of the remaining hosts name the cause.
    fn fails(&mut self, burst: &Burst, what: &str) {
        let mode = self.plan.mode;
        self.wait_for_end(what);
        self.powered_off.iter().for_each(|host| self.site().host(*host).restore());
        let taken = burst.taken();
        for (host, run) in self.outcomes() {
            let Run { code, stderr, .. } = &run;
            let was_there = |fault: Fault| match mode {
                LaunchMode::Ssh => fault.host == 0,
                _ => fault.host == host,
            };
            let on = |fault: Fault| format!("node{}", fault.host + 1);
            // Exit code, and words that one line must contain.
            let (expected, words) = match taken {
                None => {
                    let fault = burst.faults.iter().find(|it| it.kind == Kind::KillRank).unwrap();
                    let rank = format!(" on {} (", on(*fault));
                    (137, vec!["brigade: rank ".to_owned(), rank, "killed by SIGKILL".to_owned()])
                }
                Some(fault) if was_there(fault) => match fault.kind {
                    Kind::KillAgent | Kind::Power => (137, vec![]),
                    _ => (1, vec!["brigade: ".to_owned(), " is lost: ".to_owned()]),
                },
                // The host may have coordinated the job.
                Some(_) if mode == LaunchMode::Etcd => (1, vec![" is lost: ".to_owned()]),
                Some(fault) if fault.host == 0 => {
                    (1, vec![format!("the connection to {}:", on(fault)), " is lost: ".to_owned()])
                }
                Some(fault) => (1, vec![format!("{} is lost: ", on(fault))]),
            };
            let says = |line: &str| words.iter().all(|word| line.contains(word));
            assert!(
                *code == expected && (words.is_empty() || stderr.lines().any(says)),
                "{:?}: {what}: the launcher on node{} was to end with {expected} and {words:?}; it \
                 ended with {code}: {stderr}",
                self.plan,
                host + 1,
            );
        }
        self.leaves_nothing(what);
    }

    /// Checks that the job ends, and that it has the right weights if it succeeds. Returns `true` if it does.
    fn succeeds(&mut self, what: &str, may_end_with: impl Fn(i32) -> bool) -> bool {
        self.wait_for_end(what);
        self.powered_off.iter().for_each(|host| self.site().host(*host).restore());
        let (mut results, mut all, mut codes) = (Vec::new(), Vec::new(), Vec::new());
        for (host, run) in self.outcomes() {
            let Run { code, stdout, stderr } = run;
            all.push(format!("node{}: {code}: {stderr}", host + 1));
            codes.push(code);
            let is_named = code != 1 || stderr.contains("brigade: ");
            assert!(may_end_with(code) && is_named, "{:?}: {what}: {all:?}", self.plan);
            let result = |line: &str| line.split_once("] weights ").map(|it| it.1.to_owned());
            results.extend(stdout.lines().filter_map(result));
        }
        let succeeded = codes.contains(&0);
        if succeeded {
            let progress = Progress::read(self.work()).unwrap();
            let right = trainer::result(&Model::after(progress.step));
            // A launcher that was killed has shown nothing more; a rank that was killed has repeated its line.
            let ranks = if codes.iter().all(|code| *code == 0) { progress.world } else { 1 };
            let are_right = results.iter().all(|it| right == format!("weights {it}"));
            assert!(
                are_right && results.len() as u64 >= ranks,
                "{:?}: {what}: {right} of {ranks} ranks, but {results:?}: {all:?}",
                self.plan,
            );
        }
        self.leaves_nothing(what);
        succeeded
    }

    fn outcomes(&mut self) -> Vec<(usize, Run)> {
        let launchers = self.launchers.iter_mut().enumerate();
        launchers.filter_map(|(host, it)| Some((host, it.take()?.outcome()))).collect()
    }

    /// Checks that no process, port, shared memory or temporary file is left.
    fn leaves_nothing(&mut self, what: &str) {
        for index in 0..SIZES.len() {
            let host = self.site().host(index);
            let plan = self.plan;
            if !site::within(LIMIT, || host.processes().is_empty()) {
                panic!("{plan:?}: {what}: left on {}: {:#?}", host.name(), host.processes());
            }
            let ports = site::listening(host);
            assert!(ports.iter().all(|port| *port == 22), "{plan:?}: {what}: ports {ports:?}");
            let memory = host.sh("ls -A /dev/shm; tail -n +2 /proc/sysvipc/shm");
            assert_eq!(memory, "", "{plan:?}: {what}: shared memory on {}", host.name());
            let temporary = self.world.temporary(index);
            if self.powered_off.contains(&index) {
                fs::remove_dir_all(&temporary).unwrap();
                fs::create_dir(&temporary).unwrap();
            }
            let left: Vec<_> = fs::read_dir(&temporary).unwrap().map(Result::unwrap).collect();
            assert!(left.is_empty(), "{plan:?}: {what}: temporary files {left:?}");
        }
        fs::remove_dir_all(&self.checkpoints).unwrap();
    }

    fn wait_for(&mut self, what: &str, wanted: impl Fn(Progress) -> bool) -> Progress {
        let mut found = None;
        let deadline = Instant::now() + LIMIT;
        while found.is_none() {
            found = Progress::read(self.work()).filter(|it| wanted(*it));
            self.wake_outer();
            if let Some(ended) = self.launchers.iter().flatten().find(|it| it.has_ended()) {
                let pid = ended.outer_pid();
                self.panic(&format!("{what}: a launcher ({pid}) has ended"));
            }
            if Instant::now() > deadline {
                self.panic(&format!("{what}: never"));
            }
            thread::sleep(Duration::from_millis(3));
        }
        found.unwrap()
    }

    fn wait_for_end(&mut self, what: &str) {
        let have_ended = |this: &Self| this.launchers.iter().flatten().all(Running::has_ended);
        let deadline = Instant::now() + LIMIT;
        while !have_ended(self) {
            self.wake_outer();
            if Instant::now() > deadline {
                self.panic(&format!("{what}: it does not end"));
            }
            thread::sleep(Duration::from_millis(3));
        }
    }

    fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        assert!(site::within(LIMIT, condition), "{:?}: {what}: never", self.plan);
    }

    /// Continues an `nsenter` that stopped late because its launcher was stopped, and would never continue.
    fn wake_outer(&self) {
        self.launchers.iter().flatten().for_each(|it| send(it.outer_pid(), Signal::SIGCONT));
    }

    /// Fails with the launchers' output and the remaining files.
    fn panic(&mut self, what: &str) -> ! {
        let progress = Progress::read(self.work());
        let hosts = &self.site().network.hosts()[..SIZES.len()];
        let processes: Vec<String> = hosts
            .iter()
            .flat_map(|host| {
                let line = |process: Process| {
                    let state = job::state_of(process.pid);
                    format!(
                        "{} {} {state:?} {}\n",
                        host.name(),
                        process.pid,
                        process.command.join(" ")
                    )
                };
                host.processes().into_iter().map(line)
            })
            .collect();
        for launcher in self.launchers.iter().flatten() {
            send(launcher.pid_if_there(), Signal::SIGKILL);
        }
        let said = self.outcomes();
        panic!("{:?}: {what}; progress {progress:?}\n{}\n{said:#?}", self.plan, processes.concat(),);
    }
}

fn send(pid: i32, signal: Signal) {
    // Fails for a process that has ended.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Returns processes of this machine that are in one of these network namespaces, by process ID and name.
fn processes_in(namespaces: &[File]) -> Vec<String> {
    let numbers: BTreeSet<u64> = namespaces.iter().map(|it| it.metadata().unwrap().ino()).collect();
    let entries = fs::read_dir("/proc").unwrap().map(Result::unwrap);
    entries
        .filter(|entry| {
            let namespace = fs::metadata(entry.path().join("ns/net"));
            namespace.is_ok_and(|it| numbers.contains(&it.ino()))
        })
        .map(|entry| {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            format!("{} {}", entry.file_name().display(), name.trim())
        })
        .collect()
}

/// Limit that is only exceeded by something that never happens.
const LIMIT: Duration = Duration::from_secs(90);
