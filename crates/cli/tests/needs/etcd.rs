//! Tests of launchers that meet through a real etcd.

use std::collections::HashSet;
use std::fs;

use brigade_test_hosts::{Authority, Etcd};
use brigade_test_needs::needs;
use nix::sys::signal::Signal;

use crate::job::Running;
use crate::launchers::{self, Hosts};

#[needs(Etcd)]
fn any_host_may_be_lost_with_etcd() {
    let etcd = Etcd::start();
    let hosts = Hosts::new();
    // Each rank writes the name of its host to a file.
    let script = "n=$WORLD_SIZE-$TORCHELASTIC_RESTART_COUNT; echo $n; \
                  echo $HOST_NAME >$ALL/new-$n-$RANK; mv $ALL/new-$n-$RANK $ALL/$n-$RANK; \
                  until [ -e $ALL/end ]; do sleep 0.01; done";
    let start = |name: usize| {
        let mut job = hosts.any(1);
        job.command.env("HOST_NAME", name.to_string());
        job.flag("--nnodes=1:5")
            .flag("--rdzv-backend=etcd")
            .flag(&format!("--rdzv-endpoint={}", etcd.endpoint()))
            .flag("--max-restarts=3")
            .flag("--rdzv-conf=last_call_timeout=1,join_interval=0")
            .sh(script)
            .start()
    };
    let mut launchers: Vec<Running> = (0..5).map(start).collect();
    // Names of the hosts by rank, once they all exist. Five hosts may join in several steps, which use no restart.
    let order = |hosts: &Hosts, size: usize, attempt: usize| -> Vec<usize> {
        let files: Vec<String> = (0..size).map(|rank| format!("{size}-{attempt}-{rank}")).collect();
        hosts.wait_for(&files.iter().map(String::as_str).collect::<Vec<_>>());
        let read = |file: &String| fs::read_to_string(hosts.all.path().join(file)).unwrap();
        files.iter().map(|file| read(file).trim().parse().unwrap()).collect()
    };
    let mut names: Vec<usize> = (0..5).collect();
    let mut before = order(&hosts, 5, 0);
    // Each time the coordinating host: it reports which hosts join.
    for (left, attempt) in [(4, 1), (3, 2), (2, 3)] {
        let main = coordinating(&launchers);
        let (lost, name) = (launchers.remove(main), names.remove(main));
        lost.send(Signal::SIGKILL);
        assert_eq!(lost.finish().code, 137);
        assert_eq!(launchers.len(), left);
        // The remaining hosts keep their order, whichever coordinates now.
        before.retain(|other| *other != name);
        assert_eq!(order(&hosts, left, attempt), before);
    }
    // No restart is left.
    let main = coordinating(&launchers);
    let lost = launchers.remove(main);
    lost.send(Signal::SIGKILL);
    assert_eq!(lost.finish().code, 137);
    let run = launchers.remove(0).finish();
    assert_eq!(run.code, 1, "{}", run.stderr);
    let attempts = run.stdout.lines().map(|line| line.split_once(' ').unwrap().1);
    let attempts: Vec<&str> = attempts.filter(|it| !it.ends_with("-0")).collect();
    assert_eq!(attempts, ["4-1", "3-2", "2-3"]);
    assert!(run.stderr.ends_with("give more with --max-restarts\n"), "{}", run.stderr);
}

/// Returns the launcher that listens for the others.
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

#[needs(Etcd)]
fn an_etcd_with_certificates_brings_hosts_together() {
    let authority = Authority::new();
    let [ca, certificate, key] =
        ["ca.pem", "server.pem", "server-key.pem"].map(|name| authority.file(name));
    let etcd = Etcd::start_over_tls(&certificate, &key, Some(&ca));
    let hosts = Hosts::new();
    let folder = authority.folder().display().to_string();
    let conf = |authority: &str| {
        format!(
            "--rdzv-conf=cacert={authority}/ca.pem,cert={folder}/client.pem,\
             key={folder}/client-key.pem,last_call_timeout=1"
        )
    };
    let start = |conf: &str| {
        let endpoint = format!("--rdzv-endpoint=https://{}", etcd.endpoint());
        let flags = ["--nnodes=2", "--rdzv-backend=etcd", &endpoint, conf];
        flags.iter().fold(hosts.any(1), |job, flag| job.flag(flag)).sh("echo $RANK").start()
    };
    for run in launchers::finish(vec![start(&conf(&folder)), start(&conf(&folder))]) {
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    // The authority of another etcd: reported at once, and no rank starts.
    let other = Authority::new();
    let run = start(&conf(&other.folder().display().to_string())).finish();
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{}", run.stderr);
    assert!(run.stderr.contains("the certificate of etcd at https://"), "{}", run.stderr);
}
