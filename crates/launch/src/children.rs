//! Ranks of one host as child processes of this program, for a test or a function that is called on several ranks.
//!
//! [`ChildRanks`] starts this program again for each rank: the processes reach the same call, run its body as ranks,
//! and end with it. No plan, agent or file is needed, and no process is left behind. If one fails or hangs, a
//! [`Report`] names it, with its last step ([`note_step`]), its output, and what its threads wait for.
//!
//! ```
//! use std::convert::Infallible;
//! use std::panic::Location;
//!
//! use brigade_launch::children::ChildRanks;
//!
//! let ranks = ChildRanks::at(Location::caller(), 2);
//! let found = ranks.call(|world| Ok::<usize, Infallible>(world.rank.as_usize()))?;
//! assert_eq!(found, [0, 1]);
//! # Ok::<(), brigade_launch::children::Report>(())
//! ```

mod rank;
mod stuck;

use std::ffi::OsString;
use std::fmt::{self, Debug, Write};
use std::fs;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use brigade_rank_env::{StoreHost, World, WorldSize};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Interfaces, StorePort};

pub use rank::note_step;

/// Group of ranks on this host, each a process of this program. They share this host's cores, and rank 0 has a bound
/// socket for the store.
#[derive(Debug)]
pub struct ChildRanks {
    /// Name by which a process recognises that it is one of these ranks.
    name: String,
    /// Arguments with which the program reaches the same call again.
    arguments: Vec<OsString>,
    world_size: usize,
    time_limit: Duration,
    variables: Vec<(&'static str, &'static str)>,
}

impl ChildRanks {
    /// Describes `world_size` ranks of the test `path`, a module path with the crate's name and the function's. The
    /// test program must contain a test of that path that calls [`run`](Self::run).
    #[must_use]
    pub fn of_test(path: &str, world_size: usize) -> Self {
        // The harness does not count the crate as part of a test's name.
        let name = path.split_once("::").map_or(path, |(_, name)| name);
        Self::with_arguments(name.to_owned(), arguments_of_test(name), world_size)
    }

    /// Describes `world_size` ranks of a call at `place` of this program: the test of the running thread in a test
    /// program, else the program with its own arguments.
    #[must_use]
    pub fn at(place: &Location<'_>, world_size: usize) -> Self {
        // The harness runs each test in a thread with its name, or in the main thread if it runs one test at a time.
        let thread = thread::current();
        let arguments = match thread.name() {
            Some(name) if name != "main" => arguments_of_test(name),
            _ => std::env::args_os().skip(1).collect(),
        };
        Self::with_arguments(place.to_string(), arguments, world_size)
    }

    fn with_arguments(name: String, arguments: Vec<OsString>, world_size: usize) -> Self {
        let time_limit = Duration::from_secs(60);
        Self { name, arguments, world_size, time_limit, variables: Vec::new() }
    }

    /// Sets the time limit of all ranks together. Defaults to 60 s.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// Adds an environment variable for the ranks.
    #[must_use]
    pub fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }

    /// Runs the body on the ranks and waits for them. Returns `None` in a rank, after the body: the code that follows
    /// must lead to the end of the process. A rank fails when the body panics.
    ///
    /// # Errors
    /// A [`Report`] when a rank fails or hangs, or the system refuses to start processes.
    ///
    /// # Panics
    /// Panics in a rank if the body does.
    pub fn run(&self, body: impl FnOnce(World)) -> Option<Result<(), Report>> {
        if rank::is_rank_of(&self.name) {
            rank::run(body);
            return None;
        }
        Some(self.start().and_then(|mut ranks| ranks.wait(self.time_limit)))
    }

    /// Runs the body on the ranks and returns their results, by rank. A rank does not return: its process ends with the
    /// body.
    ///
    /// # Errors
    /// A [`Report`] when a rank fails or hangs, the system refuses to start processes, or a result cannot be sent to
    /// another process.
    ///
    /// # Panics
    /// Panics in a rank if the body panics or returns an error.
    pub fn call<R, E>(&self, body: impl FnOnce(World) -> Result<R, E>) -> Result<Vec<R>, Report>
    where
        R: Serialize + DeserializeOwned,
        E: Debug,
    {
        if rank::is_rank_of(&self.name) {
            rank::run(|world| match body(world) {
                Ok(result) => rank::leave(&result),
                Err(error) => panic!("the rank failed: {error:?}"),
            });
            rank::end();
        }
        let mut ranks = self.start()?;
        ranks.wait(self.time_limit)?;
        let results = ranks.ranks.iter().enumerate().map(|(rank, running)| {
            rank::result_of(&running.steps).map_err(|reason| {
                Report::of_headline(format!("cannot read the result of rank {rank}: {reason}"))
            })
        });
        results.collect()
    }

    fn start(&self) -> Result<Ranks, Report> {
        Ranks::start(self)
            .map_err(|error| Report::of_headline(format!("the ranks cannot be started: {error}")))
    }
}

/// Returns a command that starts this program as a rank among `world_size`, with its place in the environment. The
/// ranks' store listens on `port`, whose socket is rank 0's standard input; the other ranks have none.
///
/// # Errors
/// The rank is not below `world_size`, or the system refuses to prepare the process.
pub fn command(rank: usize, world_size: usize, port: &StorePort) -> io::Result<Command> {
    // As stdin, the socket cannot be inherited by another child of this process by accident, unlike a descriptor that
    // stays open over `exec`.
    let (host, stdin) = match rank {
        0 => (StoreHost::Rank0Fd(0), Stdio::from(port.socket()?)),
        _ => (StoreHost::Rank0, Stdio::null()),
    };
    let size = WorldSize::new(world_size).map_err(io::Error::other)?;
    let world = World::on_one_host(rank, size, port.endpoint(host)).map_err(io::Error::other)?;
    let mut command = Command::new(std::env::current_exe()?);
    world.describe_to(&mut command);
    command.stdin(stdin);
    Ok(command)
}

/// Returns the arguments with which a test harness runs one test alone.
fn arguments_of_test(name: &str) -> Vec<OsString> {
    [name, "--exact", "--nocapture", "--include-ignored"].map(OsString::from).to_vec()
}

/// Report about failed ranks: the reason for each failure, then the last step and the output of each rank, the first
/// failure first.
#[derive(Debug)]
pub struct Report {
    headline: String,
    ranks: Vec<String>,
}

impl Report {
    fn of_headline(headline: String) -> Self {
        Self { headline, ranks: Vec::new() }
    }
}

impl std::error::Error for Report {}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.headline, self.ranks.join(""))
    }
}

/// Started ranks. They are killed when this is dropped.
struct Ranks {
    ranks: Vec<Running>,
    /// Numbers of ranks in the order in which they end.
    endings: Receiver<usize>,
    _steps: tempfile::TempDir,
    _port: StorePort,
}

struct Running {
    child: Child,
    steps: PathBuf,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    ending: Option<ExitStatus>,
}

impl Ranks {
    fn start(described: &ChildRanks) -> io::Result<Self> {
        let port = StorePort::reserve(Interfaces::Loopback)?;
        let folder = tempfile::tempdir()?;
        let (tell, endings) = mpsc::channel();
        let mut started = Self { ranks: Vec::new(), endings, _steps: folder, _port: port };
        for rank in 0..described.world_size {
            let steps = started._steps.path().join(rank.to_string());
            let running = Running::start(described, rank, &started._port, steps, tell.clone())?;
            started.ranks.push(running);
        }
        Ok(started)
    }

    /// Waits until all have ended, one has failed or the time limit has passed.
    fn wait(&mut self, limit: Duration) -> Result<(), Report> {
        let deadline = Instant::now() + limit;
        for _ in 0..self.ranks.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(rank) = self.endings.recv_timeout(left) else {
                return Err(self.report_hang(limit));
            };
            if let Some(problem) = self.ranks[rank].problem() {
                return Err(self.report_failure(rank, &problem));
            }
        }
        Ok(())
    }

    fn report_failure(&mut self, failed: usize, problem: &str) -> Report {
        self.kill();
        let headline = format!("rank {failed} of {} failed: {problem}", self.ranks.len());
        let order = std::iter::once(failed).chain((0..self.ranks.len()).filter(|r| *r != failed));
        let ranks = order.map(|rank| self.ranks[rank].describe(rank, "")).collect();
        Report { headline, ranks }
    }

    fn report_hang(&mut self, limit: Duration) -> Report {
        // Before they are killed: afterwards there is nothing to examine.
        let stuck: Vec<Option<String>> = self.ranks.iter_mut().map(Running::where_stuck).collect();
        self.kill();
        let hung: Vec<String> = stuck
            .iter()
            .enumerate()
            .filter(|(_, place)| place.is_some())
            .map(|(rank, _)| rank.to_string())
            .collect();
        let headline = format!(
            "the time limit of {} s is over and {} of {} ranks had not ended: {}",
            limit.as_secs_f64(),
            hung.len(),
            self.ranks.len(),
            hung.join(", "),
        );
        let ranks = self.ranks.iter_mut().zip(stuck).enumerate();
        let ranks = ranks
            .map(|(rank, (running, place))| running.describe(rank, &place.unwrap_or_default()))
            .collect();
        Report { headline, ranks }
    }

    fn kill(&mut self) {
        for rank in &mut self.ranks {
            rank.reap();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Running {
    fn start(
        described: &ChildRanks,
        rank: usize,
        port: &StorePort,
        steps: PathBuf,
        tell: Sender<usize>,
    ) -> io::Result<Self> {
        let mut command = command(rank, described.world_size, port)?;
        command.args(&described.arguments);
        command.env(rank::RANK_OF, &described.name);
        command.env(rank::PARENT, std::process::id().to_string());
        command.env(rank::STEPS, &steps);
        command.envs(described.variables.iter().copied());
        // Ranks share cores: without this, libgomp's threads would spin and wait for each other.
        for (name, value) in [("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE")] {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;

        let stdout = child.stdout.take().map(read_to_end);
        let stderr = child.stderr.take().map(read_to_end);
        let pid = Pid::from_raw(child.id().cast_signed());
        thread::spawn(move || {
            // WNOWAIT: reaping the child here would free its pid for another process.
            let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            let _ = tell.send(rank);
        });
        Ok(Self { child, steps, stdout, stderr, ending: None })
    }

    /// Returns the failure of a rank that has ended, if it failed.
    fn problem(&mut self) -> Option<String> {
        let last_step = self.last_step();
        match self.reap() {
            Some(status) if status.success() && last_step.as_deref() == Some(rank::FINISHED) => {
                None
            }
            Some(status) if status.success() => Some(
                "it exited with 0 before the body had finished; does the test's name hold the \
                 module path?"
                    .to_owned(),
            ),
            Some(status) => match status.signal().map(Signal::try_from) {
                Some(Ok(signal)) => Some(format!("killed by {signal}")),
                _ => Some(status.to_string()),
            },
            None => Some("the system lost it".to_owned()),
        }
    }

    fn where_stuck(&mut self) -> Option<String> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        let alive = waitid(Id::Pid(self.pid()), flags)
            .is_ok_and(|status| status == nix::sys::wait::WaitStatus::StillAlive);
        (alive && self.ending.is_none()).then(|| stuck::describe(self.pid().as_raw()))
    }

    /// Describes everything that is known about a rank that has ended.
    fn describe(&mut self, rank: usize, stuck: &str) -> String {
        let mut text = format!("---- rank {rank}");
        match self.reap().and_then(|status| status.signal()) {
            Some(_) if !stuck.is_empty() => text.push_str(" hung and was killed"),
            Some(signal) if signal == Signal::SIGKILL as i32 => text.push_str(" was killed"),
            _ => {
                let _ = write!(text, ": {}", self.ending.unwrap_or_default());
            }
        }
        match self.last_step().as_deref() {
            Some(rank::FINISHED) => text.push_str(", its body had finished\n"),
            Some(step) => {
                let _ = writeln!(text, ", last step: {step}");
            }
            None => text.push_str(", it had noted no step\n"),
        }
        text.push_str(stuck);
        for (name, output) in [("stdout", self.stdout.take()), ("stderr", self.stderr.take())] {
            let output = output.and_then(|thread| thread.join().ok()).unwrap_or_default();
            text.push_str(&last_part(name, &String::from_utf8_lossy(&output)));
        }
        text
    }

    fn last_step(&self) -> Option<String> {
        last_line(&self.steps)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    fn reap(&mut self) -> Option<ExitStatus> {
        if self.ending.is_none() {
            // Kills its children, which would keep its output open, before it is reaped and its number reused. Has no
            // effect on a rank that has ended, and fails if all processes of the group have.
            let _ = killpg(self.pid(), Signal::SIGKILL);
            self.ending = self.child.wait().ok();
        }
        self.ending
    }
}

fn read_to_end(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Data that was read before an error is still useful.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

fn last_line(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok()?.lines().last().map(str::to_owned)
}

fn last_part(name: &str, output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    if lines.is_empty() {
        return String::new();
    }
    let left_out = lines.len().saturating_sub(SHOWN_LINES);
    let mut text = format!("{name}:\n");
    if left_out > 0 {
        let _ = writeln!(text, "  ({left_out} lines before)");
    }
    for line in &lines[left_out..] {
        let _ = writeln!(text, "  {line}");
    }
    text
}

const SHOWN_LINES: usize = 100;
