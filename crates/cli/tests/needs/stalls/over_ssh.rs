//! Tests of a network between hosts that is cut and repaired, and of stalls at either end of a session.

use std::fs;
use std::path::Path;

use brigade_test_hosts::Host;
use brigade_test_needs::needs;
use nix::sys::signal::Signal;

use super::{
    COUNT, Times, finish_soon, recover, result, send, sleep, stop_for, times, wait_for_ranks,
};
use crate::site::{Running, Site, site, wait_until};

/// Returns the ranks' script, with its files in the folder where the job is started, which all hosts see.
fn script(all: &Path) -> String {
    format!("ALL={}; {COUNT}", all.display())
}

fn agent(site: &Site, host: usize) -> i32 {
    let processes = site.host(host).processes();
    let agent = processes.iter().find(|it| it.command.get(1).is_some_and(|it| it == "__agent"));
    agent.expect("an agent").pid
}

fn has_ranks(host: &Host) -> bool {
    let is_rank = |variable: &String| variable.starts_with("RANK=");
    host.processes().iter().any(|process| process.environment.iter().any(is_rank))
}

/// Starts one launcher for two hosts.
fn over_ssh<'s>(site: &'s Site, times: &Times) -> Running<'s> {
    let job = site.launch("node1:1,node2:1").args([&*times.flag()]);
    let job = job.sh(&script(&site.work)).start();
    wait_for_ranks(&site.work, 2);
    job
}

/// Starts a launcher on each of three hosts.
fn over_tcp<'s>(site: &'s Site, times: &Times) -> Vec<Running<'s>> {
    let start = |host: usize| {
        let rank = format!("--node-rank={host}");
        let flags = ["--nproc=1", "--nnodes=3", &rank, "--master-addr=node1", &*times.flag()];
        site.launch_on(host, &flags).sh(&script(&site.work)).start()
    };
    let launchers = (0..3).map(start).collect();
    wait_for_ranks(&site.work, 3);
    launchers
}

/// Returns `true` for a line `[node2:1] result …` or `[1] result …`.
fn has_result(stdout: &str, rank: u64) -> bool {
    let end = format!("] {}", result(rank));
    stdout.lines().any(|line| line.ends_with(&end) && line.contains(&format!("{rank}]")))
}

/// Returns the ports of a host from which it is connected to the coordinator.
fn connections(host: &Host) -> Vec<u16> {
    let table = host.sh("cat /proc/net/tcp");
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        // State 01 is an established connection; its other end has the port 29500.
        let is_wanted = remote.ends_with(":733C") && state == "01";
        let (_, port) = local.rsplit_once(':').filter(|_| is_wanted)?;
        Some(u16::from_str_radix(port, 16).unwrap())
    };
    table.lines().filter_map(port).collect()
}

/// Formats ports as a set of nftables.
fn set(ports: &[u16]) -> String {
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    format!("{{ {} }}", ports.join(", "))
}

#[needs(Hosts)]
fn a_launcher_and_an_agent_that_are_stopped_for_a_while() {
    let site = site(2);
    let times = times();
    let job = over_ssh(&site, &times);
    for &stall in times.stalls {
        let launcher = job.freeze();
        sleep(stall);
        launcher.thaw();
        recover();
        stop_for(agent(&site, 1), stall);
    }
    finish_soon(&site.work);
    let run = job.finish();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!((0..2).all(|rank| has_result(&run.stdout, rank)), "{}", run.stdout);
    assert!(run.stderr.contains("no message from node2 for "), "{}", run.stderr);
    assert!(run.stderr.contains("node2 sends messages again"), "{}", run.stderr);
}

#[needs(Hosts)]
fn a_launcher_or_an_agent_that_is_stopped_for_too_long() {
    let site = site(2);
    let times = times();
    for launcher in [true, false] {
        let job = over_ssh(&site, &times);
        if launcher {
            let launcher = job.freeze();
            wait_until("the end of the ranks", || !has_ranks(site.host(1)));
            launcher.thaw();
        } else {
            let agent = agent(&site, 1);
            send(agent, Signal::SIGSTOP);
            wait_until("the end of the launcher", || job.has_ended());
            send(agent, Signal::SIGCONT);
        }
        let run = job.finish();
        assert_eq!(run.code, 1, "{}", run.stderr);
        let named = if launcher { " is lost: " } else { "node2 is lost: no message from it for " };
        assert!(run.stderr.contains(named) && run.stderr.contains("node"), "{}", run.stderr);
        crate::site::empty(&site.work);
    }
}

#[needs(Hosts)]
fn a_link_that_is_cut_and_mended_under_sessions() {
    let site = site(2);
    let times = times();
    let job = over_ssh(&site, &times);
    for &cut in times.cuts_over_ssh {
        site.host(1).cut();
        sleep(cut);
        site.host(1).restore();
        // Until TCP retransmits: its last pause was as long as the cut.
        sleep(cut);
        recover();
    }
    finish_soon(&site.work);
    let run = job.finish();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!((0..2).all(|rank| has_result(&run.stdout, rank)), "{}", run.stdout);
}

#[needs(Hosts)]
fn a_link_that_is_cut_and_mended_between_launchers() {
    let site = site(3);
    let times = times();
    let launchers = over_tcp(&site, &times);
    for &stall in times.stalls {
        // The old connection of the agent remains dead: it must not wait for TCP's retransmissions.
        let old = connections(site.host(1));
        site.host(1).cut();
        sleep(stall);
        site.host(0).filter(&format!("tcp sport {} drop", set(&old)));
        site.host(1).filter(&format!("tcp dport {} drop", set(&old)));
        site.host(1).restore();
        let is_new = || connections(site.host(1)).iter().any(|port| !old.contains(port));
        wait_until("a new connection", is_new);
        recover();
        // Disconnects the coordinator.
        site.host(0).cut();
        sleep(stall);
        site.host(0).restore();
        recover();
    }
    finish_soon(&site.work);
    let mut said = Vec::new();
    for (rank, launcher) in (0..).zip(launchers) {
        let run = launcher.outcome();
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(has_result(&run.stdout, rank), "{}", run.stdout);
        said.push(run.stderr);
    }
    assert!(said[1].contains("connected to node1:29500 again after "), "{}", said[1]);
    assert!(said[0].contains("node2 is connected again"), "{}", said[0]);
    site.wait_until_empty();
}

#[needs(Hosts)]
fn a_link_that_is_cut_for_too_long() {
    let site = site(3);
    let times = times();
    let launchers = over_tcp(&site, &times);
    site.host(1).cut();
    for host in [0, 2] {
        wait_until("the end of the others", || launchers[host].has_ended());
    }
    site.host(1).restore();
    let mut said = Vec::new();
    for launcher in launchers {
        let run = launcher.outcome();
        assert_eq!(run.code, 1, "{}", run.stderr);
        said.push(run.stderr);
    }
    assert!(said[0].contains("node2 is lost: no message from it for "), "{}", said[0]);
    assert!(said[1].contains("the connection to node1:29500, where the job is"), "{}", said[1]);
    site.wait_until_empty();
}

/// Connections that are reset, as by a gateway that has lost its state, are re-established at once.
#[needs(Hosts)]
fn a_connection_that_is_reset_is_made_again() {
    let site = site(3);
    let times = times();
    let launchers = over_tcp(&site, &times);
    let old: Vec<u16> = [1, 2].into_iter().flat_map(|host| connections(site.host(host))).collect();
    assert_eq!(old.len(), 2, "one connection from each agent: {old:?}");
    // New connections pass: an agent has a fraction of a second to reconnect.
    let rule = format!("tcp sport {} tcp flags & rst == 0 reject with tcp reset", set(&old));
    site.host(0).filter(&rule);
    for host in [1, 2] {
        let is_new = || connections(site.host(host)).iter().any(|port| !old.contains(port));
        wait_until("a new connection", is_new);
    }
    // Longer than the time for which a lost agent's place is reserved.
    sleep(times.stalls[0]);
    finish_soon(&site.work);
    for (rank, launcher) in (0..).zip(launchers) {
        let run = launcher.outcome();
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(has_result(&run.stdout, rank), "{}", run.stdout);
    }
    site.wait_until_empty();
    let _ = fs::remove_file(site.work.join("fast"));
}
