//! Several `brigade launch` that are one job: each plays a host, all on the loopback.

#![allow(clippy::unwrap_used)] // as in job: clippy knows only functions marked as tests

mod job;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::{IpAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use brigade_launch::{Reach, StorePort};
use job::{Job, Run, Running};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A job that is to run on several hosts.
struct Hosts {
    /// Holds the port until the launchers listen on it.
    port: StorePort,
    /// For files of all ranks: `$ALL`.
    all: TempDir,
}

impl Hosts {
    fn new() -> Self {
        Self {
            port: StorePort::reserve(Reach::Loopback).unwrap(),
            all: tempfile::tempdir().unwrap(),
        }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number())
    }

    /// A launcher of a job with numbered hosts.
    fn numbered(&self, node_rank: usize, nodes: usize, nproc: usize) -> Job {
        self.any(nproc)
            .flag(&format!("--nnodes={nodes}"))
            .flag(&format!("--node-rank={node_rank}"))
            .flag("--master-addr=127.0.0.1")
            .flag(&format!("--master-port={}", self.port.number()))
    }

    /// A launcher of a job whose hosts come and leave.
    fn elastic(&self, nodes: &str, nproc: usize) -> Job {
        self.any(nproc)
            .flag(&format!("--nnodes={nodes}"))
            .flag(&format!("--rdzv-endpoint={}", self.address()))
    }

    fn any(&self, nproc: usize) -> Job {
        let mut job = Job::new(nproc);
        job.command.env("ALL", self.all.path());
        job
    }

    /// Waits until ranks have made these files.
    fn wait_for(&self, names: &[&str]) {
        job::wait_until(|| names.iter().all(|name| self.all.path().join(name).exists()));
    }

    fn touch(&self, name: &str) {
        fs::write(self.all.path().join(name), "").unwrap();
    }
}

fn finish(launchers: Vec<Running>) -> Vec<Run> {
    launchers.into_iter().map(Running::finish).collect()
}

/// What ranks have printed with `env`, by rank.
fn variables(runs: &[Run]) -> BTreeMap<usize, BTreeMap<String, String>> {
    let mut ranks: BTreeMap<usize, BTreeMap<String, String>> = BTreeMap::new();
    for line in runs.iter().flat_map(|run| run.stdout.lines()) {
        let (rank, rest) = line.strip_prefix('[').unwrap().split_once("] ").unwrap();
        if let Some((name, value)) = rest.split_once('=') {
            let vars = ranks.entry(rank.parse().unwrap()).or_default();
            vars.insert(name.to_owned(), value.to_owned());
        }
    }
    ranks
}

/// A rank that is there, says so, and stays.
const STAY: &str = "echo $$ > $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; sleep 1000 & wait";

#[test]
fn numbered_hosts_share_out_the_ranks() {
    // Hosts of different sizes, the first one last.
    let hosts = Hosts::new();
    let sizes = [2, 1, 3];
    let start = |node| hosts.numbered(node, 3, sizes[node]).sh("env").start();
    let launchers = vec![start(1), start(2), start(0)];
    let runs = finish(launchers);
    for run in &runs {
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    let ranks = variables(&runs);
    assert_eq!(ranks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let places = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)];
    for (rank, (node, local_rank)) in places.into_iter().enumerate() {
        let vars = &ranks[&rank];
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", 6),
            ("LOCAL_RANK", local_rank),
            ("LOCAL_WORLD_SIZE", sizes[node]),
            ("GROUP_RANK", node),
            ("GROUP_WORLD_SIZE", 3),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", 6),
        ] {
            assert_eq!(vars[name], value.to_string(), "{name} of rank {rank}");
        }
        assert_eq!(vars["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(vars["TORCHELASTIC_RUN_ID"], "none");
        assert_eq!(vars.contains_key("BRIGADE_STORE_FD"), rank == 0);
        assert_ne!(vars["MASTER_PORT"], hosts.port.number().to_string(), "the agents' own port");
    }
    let ports: HashSet<&String> = ranks.values().map(|vars| &vars["MASTER_PORT"]).collect();
    assert_eq!(ports.len(), 1);
}

#[test]
fn rank_0_is_reached_at_its_address() {
    if !Path::new("/usr/bin/python3").exists() {
        eprintln!("skipped: no python3");
        return;
    }
    let program = "import os, socket, time\n\
         if os.environ['RANK'] == '0':\n    \
             server = socket.socket(fileno=int(os.environ['BRIGADE_STORE_FD']))\n    \
             server.listen()\n    \
             for _ in range(2): server.accept()[0].sendall(b'hello')\n\
         else:\n    \
             place = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n    \
             while True:\n        \
                 try: client = socket.create_connection(place); break\n        \
                 except ConnectionRefusedError: time.sleep(0.01)\n    \
             print(client.recv(5).decode())\n";
    let hosts = Hosts::new();
    let start =
        |node, nproc| hosts.numbered(node, 2, nproc).words(["python3", "-c", program]).start();
    let runs = finish(vec![start(0, 1), start(1, 2)]);
    assert_eq!((runs[0].code, runs[1].code), (0, 0), "{}", runs[0].stderr);
    assert_eq!(runs[1].stdout.matches("] hello\n").count(), 2, "{}", runs[1].stdout);
}

#[test]
fn a_failing_rank_ends_the_job_on_all_hosts() {
    for (failing, death, code, how) in [
        (3, "exit 7", 7, "exit code 7"),
        (0, "exit 7", 7, "exit code 7"),
        (1, "kill -KILL $$", 137, "killed by SIGKILL"),
    ] {
        let hosts = Hosts::new();
        let script = format!(
            "if [ $RANK = {failing} ]; then \
             until [ $(ls $ALL | wc -l) = 3 ]; do :; done; echo the reason >&2; {death}; fi; {STAY}"
        );
        let start = |node| hosts.numbered(node, 2, 2).sh(&script).start();
        let runs = finish(vec![start(0), start(1)]);
        for run in &runs {
            assert_eq!(run.code, code, "{}", run.stderr);
            let named = format!("brigade: rank {failing} on ");
            assert!(run.stderr.contains(&named), "{}", run.stderr);
            assert!(run.stderr.contains(&format!("failed: {how}; stopping ")), "{}", run.stderr);
            assert!(run.stderr.ends_with("on stderr:\n  the reason\n"), "{}", run.stderr);
        }
    }
}

#[test]
fn all_hosts_start_again() {
    let hosts = Hosts::new();
    let script = "echo $TORCHELASTIC_RESTART_COUNT at $MASTER_PORT; \
                  touch $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \
                  until [ -e $ALL/0-0 ] && [ -e $ALL/0-1 ]; do :; done; \
                  [ $RANK = 1 ] && exit 9; sleep 1000; fi; echo done";
    let start = |node| hosts.numbered(node, 2, 1).flag("--max-restarts=1").sh(script).start();
    let runs = finish(vec![start(0), start(1)]);
    let mut ports = Vec::new();
    for (rank, run) in runs.iter().enumerate() {
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(run.stderr.contains("failed: exit code 9; restart 1 of 1"), "{}", run.stderr);
        let lines = run.lines_of(rank);
        assert_eq!((lines.len(), lines[2]), (3, "done"));
        assert!(lines[0].starts_with("0 at ") && lines[1].starts_with("1 at "), "{lines:?}");
        ports.push((lines[0][5..].to_owned(), lines[1][5..].to_owned()));
    }
    assert_eq!(ports[0], ports[1], "the hosts agree");
    assert_ne!(ports[0].0, ports[0].1, "each attempt has a port of its own");
}

#[test]
fn a_signal_at_one_host_stops_all() {
    for (node, signal, code) in [(0, Signal::SIGINT, 130), (1, Signal::SIGTERM, 143)] {
        let hosts = Hosts::new();
        let start = |node| hosts.numbered(node, 2, 1).sh(STAY).start();
        let launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1"]);
        launchers[node].send(signal);
        for run in finish(launchers) {
            assert_eq!(run.code, code, "{}", run.stderr);
            assert!(
                run.stderr.ends_with(&format!("brigade: stopped by {signal}\n")),
                "{}",
                run.stderr
            );
        }
    }
}

#[test]
fn a_job_on_several_hosts_is_not_suspended() {
    let hosts = Hosts::new();
    let start = |node| hosts.numbered(node, 2, 1).sh(STAY).start();
    let mut launchers = vec![start(0), start(1)];
    hosts.wait_for(&["0-0", "0-1"]);
    for launcher in &mut launchers {
        launcher.send(Signal::SIGTSTP);
        launcher.wait_for_stderr("SIGTSTP: a job on several hosts cannot be suspended");
    }
    launchers[0].send(Signal::SIGTERM);
    for run in finish(launchers) {
        assert_eq!(run.code, 143, "{}", run.stderr);
    }
}

#[test]
fn a_killed_agent_ends_the_job() {
    // The one that coordinates, and another one.
    for killed in [0, 1] {
        let hosts = Hosts::new();
        let start = |node| hosts.numbered(node, 2, 2).sh(STAY).start();
        let launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1", "0-2", "0-3"]);
        launchers[killed].send(Signal::SIGKILL);
        let runs = finish(launchers);
        assert_eq!(runs[killed].code, 137);
        let survivor = &runs[1 - killed];
        assert_eq!(survivor.code, 1, "{}", survivor.stderr);
        let expected = match killed {
            0 => format!(
                "brigade: the connection to {}, where the job is coordinated, is lost: ",
                hosts.address()
            ),
            _ => " is lost: ".to_owned(),
        };
        let last = survivor.stderr.lines().last().unwrap();
        assert!(last.contains(&expected), "{}", survivor.stderr);
    }
}

#[test]
fn a_frozen_agent_is_lost() {
    // Nothing closes: only silence tells.
    for frozen in [0, 1] {
        let hosts = Hosts::new();
        let start = |node| hosts.numbered(node, 2, 1).sh(STAY).start();
        let mut launchers = vec![start(0), start(1)];
        hosts.wait_for(&["0-0", "0-1"]);
        launchers[frozen].send(Signal::SIGSTOP);
        let survivor = launchers.remove(1 - frozen).finish();
        assert_eq!(survivor.code, 1, "{}", survivor.stderr);
        assert!(survivor.stderr.contains(" is lost: "), "{}", survivor.stderr);
        let frozen = launchers.remove(0);
        frozen.send(Signal::SIGCONT);
        let run = frozen.finish();
        assert_eq!(run.code, 1, "it finds out when it wakes: {}", run.stderr);
    }
}

#[test]
fn who_cannot_take_part_is_told_why() {
    let refused = |job: Job, message: &str| {
        let run = job.sh("echo started").run();
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains(message), "{}\nexpected {message}", run.stderr);
        assert!(run.stdout.is_empty());
    };
    let hosts = Hosts::new();
    let secret = |text: &str| {
        let path = hosts.all.path().join(text);
        fs::write(&path, text).unwrap();
        format!("--rdzv-secret-file={}", path.display())
    };
    let (right, wrong) = (secret("right"), secret("wrong"));
    let mut first = hosts.numbered(0, 3, 1).flag(&right).sh(STAY).start();
    let second = hosts.numbered(1, 3, 1).flag(&right).sh(STAY).start();
    // Else the one that is to be refused might be the first with its number.
    first.wait_for_stderr("joined: 2 of 3 hosts");
    refused(hosts.numbered(2, 3, 1).flag(&wrong), "secret");
    refused(hosts.numbered(2, 3, 1), "secret");
    refused(hosts.numbered(2, 3, 1).flag(&right).flag("--rdzv-id=other"), "other");
    refused(hosts.numbered(1, 3, 1).flag(&right), "needs another --node-rank");
    refused(hosts.numbered(0, 3, 1).flag(&right), "in use");
    // None of this has hurt the job.
    let third = hosts.numbered(2, 3, 1).flag(&right).sh(STAY).start();
    hosts.wait_for(&["0-0", "0-1", "0-2"]);
    first.send(Signal::SIGTERM);
    for run in finish(vec![first, second, third]) {
        assert_eq!(run.code, 143, "{}", run.stderr);
    }
}

#[test]
fn a_host_that_cannot_start_its_ranks_is_lost() {
    let hosts = Hosts::new();
    let mut few = Command::new("sh");
    let args =
        hosts.numbered(1, 2, 24).command.get_args().map(ToOwned::to_owned).collect::<Vec<_>>();
    few.args(["-c", "ulimit -n 50 && exec \"$0\" \"$@\"", job::BRIGADE]).args(args);
    few.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let few = Job::of(few).sh("echo started").start();
    let main = hosts.numbered(0, 2, 1).sh(STAY).start();
    let (main, few) = (main.finish(), few.finish());
    assert_eq!((main.code, few.code), (1, 1), "{}{}", main.stderr, few.stderr);
    assert!(few.stderr.contains("brigade: cannot start rank "), "{}", few.stderr);
    assert!(few.stdout.is_empty());
    assert!(main.stderr.contains(" is lost: cannot start rank "), "{}", main.stderr);
}

#[test]
fn hosts_that_do_not_come() {
    let hosts = Hosts::new();
    let run = hosts.numbered(0, 2, 1).flag("--rdzv-conf=join_timeout=1").sh("echo started").run();
    assert_eq!(run.code, 1);
    assert!(run.stdout.is_empty());
    assert!(run.stderr.contains("only 1 of 2 hosts came within 1 s"), "{}", run.stderr);
    let run = hosts.numbered(1, 2, 1).flag("--rdzv-conf=join_timeout=1").sh("echo started").run();
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains(&hosts.address()), "{}", run.stderr);
}

#[test]
fn a_user_may_give_up_waiting() {
    for (node, waits) in [(0, "waiting for other hosts: 1 of 2 are there"), (1, "trying for up to")]
    {
        let hosts = Hosts::new();
        let mut job = hosts.numbered(node, 2, 1).sh("echo started").start();
        job.wait_for_stderr(waits);
        job.send(Signal::SIGINT);
        let run = job.finish();
        assert_eq!(run.code, 130, "{}", run.stderr);
        assert!(run.stdout.is_empty());
    }
}

#[test]
fn an_address_that_others_cannot_reach_is_refused() {
    // Two hosts that meet at an address of the network; one says that it is to be reached at its
    // loopback.
    let Some(address) = own_address() else {
        eprintln!("skipped: this host has no address but the loopback");
        return;
    };
    let hosts = Hosts::new();
    let start = |node, local: &str| {
        let port = format!("--master-port={}", hosts.port.number());
        let (nodes, node) = ("--nnodes=2", format!("--node-rank={node}"));
        let flags = [nodes, &node, &format!("--master-addr={address}"), &port, local];
        flags.iter().fold(hosts.any(1), |job, flag| job.flag(flag)).sh("echo started").start()
    };
    let runs = finish(vec![start(0, "--local-addr=127.0.0.1"), start(1, "--role=default")]);
    for run in &runs {
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains("--local-addr"), "{}", run.stderr);
    }
    assert!(runs[1].stdout.is_empty());
}

#[test]
fn whatever_is_killed_the_job_ends_and_nothing_stays() {
    let seed = job::seed();
    println!("BRIGADE_TEST_SEED={seed}");
    let mut random = job::Random::new(seed);
    for round in 0..12 {
        let hosts = Hosts::new();
        let (nodes, restarts) = (2 + random.below(2), random.below(3));
        let restarts = format!("--max-restarts={restarts}");
        let script = "setsid sleep 1000 & echo $$ > $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; wait; \
                      sleep 1000 & wait";
        let launchers: Vec<Running> = (0..nodes)
            .map(|node| {
                let job = hosts.numbered(node, nodes, 2).flag(&restarts);
                // Some may be killed before they have met.
                job.flag("--rdzv-conf=join_timeout=2").sh(script).start()
            })
            .collect();
        // Ranks and agents at any time, until the job is over.
        let mut kills = 0;
        while launchers.iter().all(|launcher| job::state_of(launcher.pid()) != Some('Z')) {
            let spin = random.below(3_000_000);
            (0..spin).for_each(|turn| {
                std::hint::black_box(turn);
            });
            let files: Vec<_> =
                fs::read_dir(hosts.all.path()).unwrap().map(Result::unwrap).collect();
            if random.below(6) == 0 {
                launchers[random.below(nodes)].send(Signal::SIGKILL);
            } else if let Some(file) = files.get(random.below(files.len().max(1)))
                && let Ok(pid) = fs::read_to_string(file.path()).unwrap_or_default().trim().parse()
                && is_rank(pid, hosts.all.path())
            {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            kills += 1;
        }
        println!("round {round}: {nodes} hosts, {restarts}, {kills} kills");
        // `finish` looks for what has stayed.
        for run in finish(launchers) {
            assert!([1, 137].contains(&run.code), "{}: {}", run.code, run.stderr);
        }
    }
}

/// The process is a rank of this job, and not a stranger with its number.
fn is_rank(pid: i32, all: &Path) -> bool {
    let mark = format!("ALL={}", all.display());
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environ.split(|byte| *byte == 0).any(|var| var == mark.as_bytes())
}

/// An address under which this host is reached over a network.
fn own_address() -> Option<IpAddr> {
    // Nothing is sent: the system only chooses the address that it would send from.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().unwrap().ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

#[test]
fn hosts_come_and_leave() {
    let hosts = Hosts::new();
    // Each attempt leaves its size; the job ends when the test says so.
    let script = "echo $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; touch $ALL/$WORLD_SIZE-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let flag = "--rdzv-conf=last_call_timeout=0.05";
    let start = || hosts.elastic("1:3", 1).flag(flag).sh(script).start();
    let first = start();
    hosts.wait_for(&["1-0"]);
    let second = start();
    hosts.wait_for(&["2-0", "2-1"]);
    let third = start();
    hosts.wait_for(&["3-0", "3-1", "3-2"]);
    fs::remove_file(hosts.all.path().join("2-0")).unwrap();
    fs::remove_file(hosts.all.path().join("2-1")).unwrap();
    second.send(Signal::SIGTERM);
    let second = second.finish();
    assert_eq!(second.code, 143);
    assert!(second.stderr.contains("this host has left the job"), "{}", second.stderr);
    hosts.wait_for(&["2-0", "2-1"]);
    hosts.touch("end");
    let (first, third) = (first.finish(), third.finish());
    assert_eq!((first.code, third.code), (0, 0), "{}{}", first.stderr, third.stderr);
    let sizes: Vec<&str> = first.lines_of(0);
    assert_eq!(sizes, ["1 0", "2 0", "3 0", "2 0"], "none of this costs a restart");
}

#[test]
fn a_lost_host_costs_a_restart() {
    let hosts = Hosts::new();
    let script = "echo $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; touch $ALL/$WORLD_SIZE-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let start = |serve| {
        let serve = format!("--rdzv-conf=is_host={serve}");
        hosts.elastic("1:2", 1).flag("--max-restarts=1").flag(&serve).sh(script).start()
    };
    let (first, second) = (start(true), start(false));
    hosts.wait_for(&["2-0", "2-1"]);
    second.send(Signal::SIGKILL);
    assert_eq!(second.finish().code, 137);
    hosts.wait_for(&["1-0"]);
    hosts.touch("end");
    let first = first.finish();
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert_eq!(first.stdout.lines().last().unwrap(), "[0] 1 1");
    assert!(first.stderr.contains("restart 1 of 1"), "{}", first.stderr);
}

#[test]
fn any_host_may_be_lost_with_etcd() {
    let Some(etcd) = Etcd::start() else {
        eprintln!("skipped: etcd is not installed");
        return;
    };
    let hosts = Hosts::new();
    let script = "n=$WORLD_SIZE-$TORCHELASTIC_RESTART_COUNT; echo $n; touch $ALL/$n-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let start = || {
        hosts
            .any(1)
            .flag("--nnodes=1:3")
            .flag("--rdzv-backend=etcd")
            .flag(&format!("--rdzv-endpoint={}", etcd.endpoint))
            .flag("--max-restarts=2")
            .sh(script)
            .start()
    };
    let mut launchers = vec![start(), start(), start()];
    hosts.wait_for(&["3-0-0", "3-0-1", "3-0-2"]);
    // Each time the one that coordinates: it says who joins.
    for (left, names) in [(2, &["2-1-0", "2-1-1"][..]), (1, &["1-2-0"])] {
        let main = coordinating(&launchers);
        let lost = launchers.remove(main);
        lost.send(Signal::SIGKILL);
        assert_eq!(lost.finish().code, 137);
        assert_eq!(launchers.len(), left);
        hosts.wait_for(names);
    }
    hosts.touch("end");
    let run = launchers.remove(0).finish();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let attempts = run.stdout.lines().map(|line| line.split_once(' ').unwrap().1);
    assert_eq!(attempts.collect::<Vec<_>>(), ["3-0", "2-1", "1-2"]);
}

/// Which of the launchers listens for the others.
fn coordinating(launchers: &[Running]) -> usize {
    let listening = fs::read_to_string("/proc/net/tcp").unwrap()
        + &fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    let inodes: HashSet<&str> = listening
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.get(3) == Some(&"0A"))
        .filter_map(|fields| fields.get(9).copied())
        .collect();
    let listens = |launcher: &Running| {
        let links = fs::read_dir(format!("/proc/{}/fd", launcher.pid())).unwrap();
        links.map(Result::unwrap).filter_map(|link| fs::read_link(link.path()).ok()).any(|target| {
            let inode = target.to_str().unwrap().strip_prefix("socket:[");
            inode.is_some_and(|inode| inodes.contains(inode.trim_end_matches(']')))
        })
    };
    launchers.iter().position(listens).expect("one of them listens")
}

/// An etcd of our own on the loopback.
struct Etcd {
    process: Child,
    endpoint: String,
    /// Held, but not listened at: etcd can, and nobody else gets them.
    _ports: [StorePort; 2],
    _data: TempDir,
}

impl Etcd {
    /// `None` where etcd is not installed.
    fn start() -> Option<Self> {
        let data = tempfile::tempdir().unwrap();
        let ports = [(); 2].map(|()| StorePort::reserve(Reach::Loopback).unwrap());
        let [client, peer] =
            [0, 1].map(|i: usize| format!("http://127.0.0.1:{}", ports[i].number()));
        let process = Command::new("etcd")
            .args(["--unsafe-no-fsync", "--name", "test", "--data-dir"])
            .arg(data.path())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let endpoint = client.trim_start_matches("http://").to_owned();
        job::wait_until(|| TcpStream::connect(&endpoint).is_ok());
        Some(Self { process, endpoint, _ports: ports, _data: data })
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
