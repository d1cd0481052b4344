//! Tests of jobs on several hosts that end early: by signals, kills, disconnections and closed pipes.

use std::fs;
use std::io::Read;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_hosts::{Etcd, Host, inner_process};
use brigade_test_needs::needs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::site::{Running, empty, listening, site, wait_until};

/// Script of a rank that creates a file and then waits.
const STAY: &str = "touch $RANK; sleep 1000 & wait";

#[needs(Hosts)]
fn signals_stop_everything_everywhere() {
    let site = site(3);
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let job = site.launch("node1:1,node2:1,node3:1").sh(STAY).start();
        site.wait_for_files(3);
        job.send(signal);
        let run = job.finish();
        assert_eq!(run.code, code, "{}", run.stderr);
        assert!(run.stderr.contains(&format!("stopped by {signal}")), "{}", run.stderr);
        empty(&site.work);
    }

    // Signals that only the ranks handle.
    let job = site
        .launch("node1:1,node2:1,node3:1")
        .sh("trap 'touch usr1.$RANK' USR1; trap 'exit 0' USR2; touch $RANK; \
             while :; do sleep 1000 & wait $!; done")
        .start();
    site.wait_for_files(3);
    job.send(Signal::SIGUSR1);
    site.wait_for_files(6);
    job.send(Signal::SIGUSR2);
    let run = job.finish();
    assert_eq!(run.code, 0, "{}", run.stderr);
    empty(&site.work);

    // Ctrl-Z suspends neither the launcher, which the hosts would consider lost, nor a rank.
    let mut job =
        site.launch("node2:1").sh("trap 'exit 5' TERM; touch $RANK; sleep 1000 & wait").start();
    site.wait_for_files(1);
    job.send(Signal::SIGTSTP);
    job.wait_for_stderr("a job on several hosts cannot be suspended");
    job.send(Signal::SIGTERM);
    assert_eq!(job.finish().code, 5);
    empty(&site.work);

    // Ranks that handle signals and continue: the second time they are killed. (Ranks that ignore SIGINT get SIGTERM.)
    let mut job = site
        .launch("node2:1,node3:1")
        .sh("trap : INT TERM; touch $RANK; while :; do sleep 1; done")
        .start();
    site.wait_for_files(2);
    job.send(Signal::SIGINT);
    job.wait_for_stderr("SIGINT");
    job.send(Signal::SIGINT);
    let run = job.finish();
    assert_eq!(run.code, 130, "{}", run.stderr);
}

#[needs(Hosts)]
fn a_signal_while_hosts_are_called() {
    let site = site(2);
    site.host(1).cut();
    let job = site.launch("node1:1,node2:1").sh(STAY).start();
    let launcher = job.pid();
    wait_until("ssh", || {
        let processes = site.host(0).processes();
        processes.iter().any(|child| {
            child.parent == launcher && child.command.first().is_some_and(|name| name == "ssh")
        })
    });
    job.send(Signal::SIGINT);
    let run = job.finish();
    assert_eq!(run.code, 130, "{}", run.stderr);
    assert!(!site.work.join("0").exists());
}

#[needs(Hosts)]
fn after_any_kill_no_process_is_left() {
    let site = site(3);
    let agent_of = |host: usize| {
        let processes = site.host(host).processes();
        let agent = processes.iter().find(|it| it.command.get(1).is_some_and(|it| it == "__agent"));
        agent.expect("an agent").pid
    };
    let sleeps = |host: usize| {
        site.host(host)
            .processes()
            .iter()
            .any(|process| process.command.first().is_some_and(|name| name == "sleep"))
    };
    type Fault<'a> = (&'a str, &'a dyn Fn(i32), i32, &'a str);
    let table: [Fault<'_>; 4] = [
        ("launcher", &|launcher| kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap(), 137, ""),
        ("sshd session", &|_| assert!(site.host(1).kill_sshd_sessions() >= 1), 1, "node2 is lost"),
        (
            "agent",
            &|_| kill(Pid::from_raw(agent_of(2)), Signal::SIGKILL).unwrap(),
            1,
            "node3 is lost",
        ),
        ("link", &|_| site.host(1).cut(), 1, "node2 is lost"),
    ];
    for (name, fault, code, said) in table {
        let job = site.launch("node1:1,node2:1,node3:1").args(["--heartbeat-timeout", "4"]);
        let job = job.sh(STAY).start();
        site.wait_for_files(3);
        wait_until("the ranks", || (0..3).all(sleeps));
        fault(job.pid());
        let start = Instant::now();
        wait_until("the ranks' end", || !(0..3).any(sleeps));
        eprintln!("{name}: no rank is left after {} ms", start.elapsed().as_millis());
        if name == "link" {
            // The processes on the far side end by themselves, but sshd there still waits for the launcher.
            site.host(1).restore();
        }
        let run = job.finish();
        eprintln!("{name}: over after {} ms: {}", start.elapsed().as_millis(), run.stderr);
        assert_eq!(run.code, code, "{name}: {}", run.stderr);
        assert!(run.stderr.contains(said), "{name}: {}", run.stderr);
        empty(&site.work);
    }
}

/// Kills a random process of a job at a random time, also while the hosts are connected and while the job ends.
/// `BRIGADE_TEST_SEED` repeats a run, `BRIGADE_TEST_KILLS` makes it longer.
#[needs(Hosts)]
fn random_kills() {
    let site = site(3);
    let mut random = brigade_test_needs::random();
    for round in 0..kills().unwrap_or(10) {
        let job = site.launch("node1:1,node2:2,node3:1").sh("touch $RANK; exec sleep 0.5").start();
        let launcher = job.pid();
        // Half of them while the hosts are connected, half of them once the ranks run.
        if random.bool() {
            site.wait_for_files(4);
        }
        thread::sleep(Duration::from_millis(random.u64(..600)));
        let host = random.usize(..3);
        let mut victims = site.host(host).processes();
        if host == 0 {
            // Not only `nsenter`'s child: the list contains everything that the launcher started.
            victims.retain(|it| it.pid == launcher || it.parent == launcher || random.bool());
        }
        let chosen = random.usize(..victims.len().max(1));
        let victim = victims.get(chosen).cloned();
        let name = victim.as_ref().map_or_else(|| "nothing".to_owned(), |it| it.command.join(" "));
        let name = format!("round {round} on node{}: {:.60}", host + 1, name.replace('\n', " "));
        // It may have ended by itself.
        let _ = victim.as_ref().map(|it| kill(Pid::from_raw(it.pid), Signal::SIGKILL));
        let run = job.finish();
        eprintln!("{name}: {}", run.code);
        // Too late, the job, a rank or the launcher itself; or a part of the script that looks for the executable and
        // checks its permissions, so that it is not found or not run.
        let was_unchecked = run.code == 126 && run.stderr.contains("there was not started: ");
        let was_not_found = run.code == 127 && run.stderr.contains("nor in PATH there: ");
        let is_usual = [0, 1, 137].contains(&run.code) || was_unchecked || was_not_found;
        assert!(is_usual, "{name}: {}: {}", run.code, run.stderr);
        let was_launcher = victim.is_some_and(|it| it.pid == launcher);
        if run.code != 0 && !was_launcher {
            assert!(run.stderr.contains("brigade: "), "{name}: nothing was said: {}", run.stderr);
        }
        empty(&site.work);
    }
}

/// Returns the requested number of rounds of random kills.
fn kills() -> Option<u64> {
    std::env::var("BRIGADE_TEST_KILLS").ok().map(|it| it.parse().unwrap())
}

/// A coordinator that is disconnected from etcd and from the others must not begin an attempt of its own: another host
/// coordinates the job by then.
#[needs(Hosts, Etcd)]
fn a_coordinator_that_is_cut_off_does_not_go_on_alone() {
    let site = site(4);
    // On the last host, where no part of the job runs.
    let etcd = Etcd::start_on(site.host(3));
    let flags = [
        "--nproc=1",
        "--nnodes=1:3",
        "--max-restarts=2",
        "--heartbeat-timeout=4",
        "--rdzv-backend=etcd",
        "--rdzv-endpoint=node4:2379",
        "--rdzv-id=cut-off",
        "--rdzv-conf=join_timeout=6,last_call_timeout=0.2,join_interval=0",
    ];
    let script = "touch $WORLD_SIZE-$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  until [ -e end ]; do sleep 0.05; done";
    let start = |host| site.launch_on(host, &flags).sh(script).start();
    let wait_for_ranks = |ranks: usize, attempt: usize| {
        let there = |rank| site.work.join(format!("{ranks}-{attempt}-{rank}")).exists();
        wait_until(&format!("{ranks} ranks of attempt {attempt}"), || (0..ranks).all(there));
    };
    let first = start(0);
    wait_for_ranks(1, 0);
    let others = [start(1), start(2)];
    wait_for_ranks(3, 0);
    site.host(0).cut();
    wait_for_ranks(2, 1);
    wait_until("the end of the first", || first.has_ended());
    fs::write(site.work.join("end"), "").unwrap();
    for run in others.map(Running::outcome) {
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    site.host(0).restore();
    let run = first.outcome();
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("this one starts no new attempt"), "{}", run.stderr);
    assert!(!site.work.join("1-1-0").exists(), "{}", run.stderr);
    drop(etcd);
    site.wait_until_empty();
    for host in site.network.hosts() {
        let ports = listening(host);
        assert!(ports.iter().all(|port| *port == 22), "{}: ports {ports:?}", host.name());
    }
}

#[needs(Hosts)]
fn readers_that_stop_and_go() {
    let site = site(2);
    // The pipe's reader is gone: the job ends, like any program in a pipe.
    let mut launch = site.launch("node1:1,node2:1").sh("touch $RANK; yes");
    let mut child = launch
        .command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 100_000]).unwrap();
    drop(stdout);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    site.wait_until_empty();

    // The reader has stopped reading: the ranks block, and Ctrl-C ends them nevertheless.
    let mut launch = site.launch("node1:1,node2:1").sh("yes $(seq -s , 99)");
    let mut child = launch
        .command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1000]).unwrap();
    let launcher = inner_process(child.id().cast_signed()).unwrap();
    let ranks = || -> Vec<String> {
        let of = |pid: i32| fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        let all = site.network.hosts().iter().flat_map(Host::processes);
        all.filter(|process| process.command.first().is_some_and(|program| program == "yes"))
            .map(|process| of(process.pid))
            .collect()
    };
    // Until none of them writes any more.
    wait_until("the ranks to stand still", || {
        let before = ranks();
        thread::sleep(Duration::from_millis(100));
        before.len() == 2 && before == ranks()
    });
    for _ in 0..2 {
        kill(Pid::from_raw(launcher), Signal::SIGINT).unwrap();
        wait_until("the ranks' end", || ranks().is_empty());
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(stdout);
    site.wait_until_empty();
}
