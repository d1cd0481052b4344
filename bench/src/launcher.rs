//! Measurements of the launcher: its overhead over a program, its cost while idle, and the effects of a lost host on
//! the others.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

use crate::comparisons::{Comparison, milliseconds};
use crate::processes::{self, Side, median};
use crate::simulated::{Cost, Disturbance, Loss, disturb, reform};
use crate::table::Row;

pub(crate) fn all() -> Vec<Comparison> {
    vec![
        Comparison { name: "launch-overhead", run: launch_overhead },
        Comparison { name: "launch-64-ranks", run: launch_64_ranks },
        Comparison { name: "idle-agent-memory", run: idle_agent_memory },
        Comparison { name: "idle-agent-processor", run: idle_agent_processor },
        Comparison { name: "messages-after-a-loss", run: messages_after_a_loss },
        Comparison { name: "messages-after-a-cut", run: messages_after_a_cut },
    ]
}

/// Compares a program under the launcher with the program alone.
fn launch_overhead(rounds: usize) -> Result<Vec<Row>> {
    let launched = launch(&["--nproc", "1", "true"])?;
    let alone = Side::command("true".into(), []);
    let (mut ours, mut other) = (Vec::new(), Vec::new());
    for round in 0..rounds * 6 {
        // Each side is the first of a pair equally often.
        if round % 2 == 0 {
            ours.push(launched.seconds_until_end()?);
        }
        other.push(alone.seconds_until_end()?);
        if round % 2 == 1 {
            ours.push(launched.seconds_until_end()?);
        }
    }
    let (ours, other) = (median(&mut ours), median(&mut other));
    let added = ours - other;
    Ok(vec![Row {
        what: "`brigade launch --nproc 1 true` against `true` alone",
        ours: milliseconds(ours),
        other: milliseconds(other),
        ratio: format!("+{}", milliseconds(added)),
        goal: "under +15 ms".to_owned(),
        reached: added < 0.015,
    }])
}

/// Measures the time from the start of a job of many small ranks to its end.
fn launch_64_ranks(rounds: usize) -> Result<Vec<Row>> {
    let job = launch(&["--nproc", "64", "true"])?;
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        seconds.push(job.seconds_until_end()?);
    }
    let seconds = median(&mut seconds);
    Ok(vec![Row {
        what: "`brigade launch --nproc 64 true`",
        ours: format!("{seconds:.2} s"),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "under 2 s".to_owned(),
        reached: seconds < 2.0,
    }])
}

fn idle_agent_memory(_rounds: usize) -> Result<Vec<Row>> {
    let agents = Agents::start()?;
    let mut bytes = Vec::new();
    for agent in agents.pids() {
        bytes.push(resident(agent)?);
    }
    agents.stop()?;
    let most = bytes.into_iter().fold(0.0, f64::max);
    Ok(vec![Row {
        what: "memory of an idle agent: the larger one of two hosts, with the coordinator in it",
        ours: format!("{:.1} MB", most / 1e6),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "at most 10 MB".to_owned(),
        reached: most <= 10e6,
    }])
}

fn idle_agent_processor(_rounds: usize) -> Result<Vec<Row>> {
    let agents = Agents::start()?;
    let used = |pids: [u32; 2]| -> Result<Vec<f64>> { pids.into_iter().map(processor).collect() };
    let (start, before) = (Instant::now(), used(agents.pids())?);
    thread::sleep(Duration::from_secs(20));
    let after = used(agents.pids())?;
    let elapsed = start.elapsed().as_secs_f64();
    agents.stop()?;
    let most = before.iter().zip(&after).map(|(a, b)| (b - a) / elapsed).fold(0.0, f64::max);
    Ok(vec![Row {
        what: "processor of an idle agent in 20 s: the busier one of two hosts",
        ours: format!("{:.3} % of a core", 100.0 * most),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "under 0.1 %".to_owned(),
        reached: most < 0.001,
    }])
}

/// Counts messages in a simulation, with the real decisions and simulated agents, time and network.
fn messages_after_a_loss(_rounds: usize) -> Result<Vec<Row>> {
    let costs = [10, 100, 1000].map(|hosts| reform(hosts, 1, Loss::Silent, SEED));
    Ok(vec![Row {
        what: "messages per agent to re-form after a host fell silent: 10, 100, 1,000 simulated hosts",
        ours: messages(&costs),
        other: times(&costs),
        ratio: format!("{:.1}x", costs[2].messages as f64 / costs[0].messages as f64),
        goal: "does not grow".to_owned(),
        reached: costs[2].messages <= costs[0].messages,
    }])
}

/// Counts messages in the same simulation, when no host can reach the coordinator for a while, and all reconnect at
/// once.
fn messages_after_a_cut(_rounds: usize) -> Result<Vec<Row>> {
    let cut = Duration::from_secs(10);
    let costs = [10, 100, 1000].map(|hosts| disturb(hosts, hosts, Disturbance::Cut, cut, SEED));
    // One request and its answer, and the attempt continues.
    let one_round_trip = |cost: &Cost| (cost.messages, cost.attempts, cost.refused) == (2, 1, 0);
    Ok(vec![Row {
        what: "messages per agent to re-join after a cut of 10 s: 10, 100, 1,000 simulated hosts",
        ours: messages(&costs),
        other: times(&costs),
        ratio: format!("{:.1}x", costs[2].messages as f64 / costs[0].messages as f64),
        goal: "2, one round trip".to_owned(),
        reached: costs.iter().all(one_round_trip),
    }])
}

fn messages(costs: &[Cost; 3]) -> String {
    costs.each_ref().map(|cost| cost.messages.to_string()).join(", ")
}

fn times(costs: &[Cost; 3]) -> String {
    let seconds = costs.each_ref().map(|cost| format!("{:.1}", cost.time.as_secs_f64()));
    format!("{} s", seconds.join(", "))
}

fn launch(arguments: &[&str]) -> Result<Side> {
    let words = std::iter::once("launch").chain(arguments.iter().copied()).map(str::to_owned);
    Ok(Side::command(processes::brigade()?, words))
}

/// Agents of a job on two simulated hosts of this machine, whose ranks sleep.
struct Agents([Child; 2]);

impl Agents {
    fn start() -> Result<Self> {
        // Closed at once: another process is unlikely to take it before the first agent does.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let brigade = processes::brigade()?;
        let start = |node: usize| {
            let mut command = Command::new(&brigade);
            command.args(["launch", "--nproc", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]);
            command.arg(format!("--node-rank={node}")).arg(format!("--master-port={port}"));
            command.args(["sh", "-c", "echo ready; exec sleep 1000"]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            command.spawn().with_context(|| format!("cannot start {}", brigade.display()))
        };
        let mut agents = Self([start(0)?, start(1)?]);
        for agent in &mut agents.0 {
            let stdout = agent.stdout.take().context("its output is not a pipe")?;
            let ready = BufReader::new(stdout).lines().take(2).filter(Result::is_ok).count();
            if ready < 2 {
                bail!("the ranks of an idle job have not started");
            }
        }
        // The startup is over then.
        thread::sleep(Duration::from_secs(2));
        Ok(agents)
    }

    fn pids(&self) -> [u32; 2] {
        [self.0[0].id(), self.0[1].id()]
    }

    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.0[0].id().cast_signed()), Signal::SIGTERM)?;
        for agent in &mut self.0 {
            agent.wait()?;
        }
        Ok(())
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        for agent in &mut self.0 {
            // Fails if it has been waited for.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// Returns the resident memory in bytes, shared pages included.
fn resident(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|rest| rest.trim().strip_suffix(" kB")).context("no VmRSS")?;
    Ok(1024.0 * kibibytes.trim().parse::<f64>()?)
}

/// Returns the processor time in seconds of all threads. The counters of `/proc/PID/stat` are too coarse: a tick of 10
/// ms is half of an agent's limit in 20 s.
fn processor(pid: u32) -> Result<f64> {
    let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed()))?;
    Ok(Duration::from(clock.now()?).as_secs_f64())
}

/// Any seed would do: the number of messages is the same for all.
const SEED: u64 = 7;
