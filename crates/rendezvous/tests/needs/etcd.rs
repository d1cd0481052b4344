//! Agents in processes of their own, elected by a real etcd: one is killed, one stands still.

#![allow(clippy::print_stdout)] // its agents speak by stdout

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use brigade_rendezvous::{
    Assignment, Coordinator, DiscoveryMethod, EtcdAccess, FromAgent, Join, Rendezvous,
    RendezvousNotice, RendezvousPlan, Rules, Secret, TimeLimits, ToAgent,
};
use brigade_test_hosts::Etcd;
use brigade_test_needs::needs;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ENDPOINTS: &str = "BRIGADE_TEST_ETCD";
const RUN_ID: &str = "elected";

/// The process of an agent, and what it says.
struct Host {
    process: Child,
    stdin: Option<ChildStdin>,
    said: Receiver<String>,
}

impl Host {
    /// This test's program once more, in the part of an agent.
    fn start(etcd: &Etcd) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--part", "etcd::agent"])
            .env(ENDPOINTS, etcd.endpoint())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, said) = channel();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        thread::spawn(move || {
            let ours = |line: &String| line.starts_with("> ");
            for line in lines.map_while(Result::ok).filter(ours) {
                let _ = sender.send(line[2..].to_owned());
            }
        });
        let stdin = process.stdin.take();
        Self { process, stdin, said }
    }

    /// Waits until it says something that begins so.
    fn wait(&self, beginning: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.said.recv_timeout(Duration::from_secs(100)) {
                Ok(line) if line.starts_with(beginning) => return line,
                Ok(line) => before.push(line),
                Err(error) => panic!("no `{beginning}` after {before:?}: {error}"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal).unwrap();
    }

    /// Its ranks have finished.
    fn finish(&mut self) {
        self.stdin.take().unwrap().write_all(b"finish").unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts three hosts; the first of them has the coordinator.
fn three(etcd: &Etcd) -> [Host; 3] {
    let first = Host::start(etcd);
    first.wait("serves");
    let hosts = [first, Host::start(etcd), Host::start(etcd)];
    for host in &hosts {
        host.wait("attempt 0: 3 hosts, restart 0");
    }
    hosts
}

#[needs(Etcd)]
fn a_killed_coordinator_is_replaced() {
    let etcd = Etcd::start();
    let [first, mut second, mut third] = three(&etcd);
    let start = Instant::now();
    first.signal(Signal::SIGKILL);
    for host in [&second, &third] {
        host.wait("attempt 1: 2 hosts, restart 1");
    }
    println!("the others went on {} ms later", start.elapsed().as_millis());
    second.finish();
    third.finish();
    for host in [&second, &third] {
        host.wait("end 0");
    }
    let late = Host::start(&etcd);
    let line = late.wait("failed");
    assert!(line.contains("the job `elected` is over (exit code 0)"), "{line}");
}

#[needs(Etcd)]
fn a_coordinator_that_stood_still_gives_way() {
    let etcd = Etcd::start();
    let [mut first, mut second, mut third] = three(&etcd);
    first.signal(Signal::SIGSTOP);
    for host in [&second, &third] {
        host.wait("attempt 1: 2 hosts, restart 1");
    }
    // Its lease has ended, and another coordinator was elected: the host connects to that one.
    first.signal(Signal::SIGCONT);
    for host in [&first, &second, &third] {
        host.wait("attempt 2: 3 hosts, restart 1");
    }
    for host in [&mut first, &mut second, &mut third] {
        host.finish();
    }
    for host in [&first, &second, &third] {
        host.wait("end 0");
    }
}

/// The process of an agent.
#[brigade_test_needs::part]
fn agent() {
    let endpoints = std::env::var(ENDPOINTS).unwrap();
    let (sender, finish) = channel();
    thread::spawn(move || {
        let mut word = [0; 6];
        if std::io::stdin().read_exact(&mut word).is_ok() {
            let _ = sender.send(());
        }
    });
    let mut agent = Agent { endpoints, finish, last: None };
    while agent.take_part() {}
}

struct Agent {
    endpoints: String,
    finish: Receiver<()>,
    last: Option<Assignment>,
}

impl Agent {
    /// Meets the others and takes part until it has lost its coordinator. False at the end.
    fn take_part(&mut self) -> bool {
        let plan = RendezvousPlan {
            method: DiscoveryMethod::Etcd {
                endpoints: self.endpoints.clone(),
                access: EtcdAccess::default(),
                address: None,
            },
            run_id: RUN_ID.into(),
            host: format!("host-{}", std::process::id()),
            secret: Some(Secret::new("known to the test").unwrap()),
            timeout: Duration::from_secs(60),
            limits: TimeLimits::default(),
        };
        let mut rendezvous = Rendezvous::start(plan).unwrap();
        let (mut link, _coordinator) = loop {
            wait(rendezvous.fd(), None);
            match rendezvous.next() {
                Some(RendezvousNotice::Join(link)) => break (link, None),
                Some(RendezvousNotice::Serve { listener, address }) => {
                    println!("> serves at {address}:{}", listener.port());
                    let rules = Rules {
                        run_id: RUN_ID.into(),
                        min_nodes: 2,
                        max_nodes: 3,
                        max_restarts: 3,
                        last_call: Duration::from_secs(100),
                        ..Rules::default()
                    };
                    let coordinator = Coordinator::start(rules, Some(listener), None).unwrap();
                    break (coordinator.link().unwrap(), Some(coordinator));
                }
                Some(RendezvousNotice::Failed(error)) => {
                    println!("> failed: {error}");
                    return false;
                }
                Some(RendezvousNotice::Say(_) | RendezvousNotice::Gone { .. }) | None => {}
            }
        };
        link.send(&FromAgent::Join(Join {
            run_id: RUN_ID.into(),
            sent: link.millis(Instant::now()),
            last_attempt: self.last.as_ref().map(|last| last.attempt),
            last_node_rank: self.last.as_ref().map(|last| last.node_rank),
            restarts: self.last.as_ref().map_or(0, |last| last.restarts),
            ..Join::new(&format!("host-{}", std::process::id()))
        }));
        let mut told = false;
        loop {
            wait(link.read_fd(), Some(Instant::now() + Duration::from_millis(50)));
            link.flush();
            loop {
                match link.receive() {
                    Ok(Some(ToAgent::Start(part))) => {
                        let Assignment { attempt, num_nodes, restarts, .. } = part;
                        println!("> attempt {attempt}: {num_nodes} hosts, restart {restarts}");
                        self.last = Some(part);
                    }
                    Ok(Some(ToAgent::Stop { attempt, .. })) => {
                        told = false;
                        link.send(&FromAgent::Stopped {
                            attempt,
                            port: 1,
                            killed: false,
                            stuck: None,
                        });
                    }
                    Ok(Some(ToAgent::End(job_result))) => {
                        // The coordinator here waits for its agent and for the others.
                        drop(link);
                        if let Some(coordinator) = _coordinator {
                            assert_eq!(coordinator.wait(), job_result);
                        }
                        println!("> end {}", job_result.code);
                        return false;
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => {
                        println!("> lost: {error}");
                        return true;
                    }
                }
            }
            if let Err(error) = link.keep_up(Instant::now()) {
                println!("> lost: {error}");
                return true;
            }
            if !told
                && let Some(last) = &self.last
                && self.finish.try_recv().is_ok()
            {
                link.send(&FromAgent::Finished { attempt: last.attempt });
                told = true;
            }
        }
    }
}

fn wait(fd: std::os::fd::BorrowedFd<'_>, until: Option<Instant>) {
    let limit = until.map_or(PollTimeout::NONE, |until| {
        let left = until.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    let _ = poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], limit);
}
