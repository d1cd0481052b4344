//! Processes with time limits: several at once, and none of them left behind.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use brigade_test_needs::descendants;
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getppid};

/// A process to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) limit: Duration,
}

/// How it went.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) job: Job,
    pub(crate) ending: Ending,
    pub(crate) seconds: f64,
    /// What it wrote to stdout and stderr, the last part of it where that is long.
    pub(crate) output: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Ended(ExitStatus),
    /// Its own time limit was over.
    TimedOut,
    /// The part's time was over, or a signal came.
    Stopped,
    /// The same, before it was started.
    NotRun,
}

/// What all processes are started with, and the end of all of them.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Where they run.
    folder: PathBuf,
    scratch: tempfile::TempDir,
    signals: SignalFd,
    /// The signal that ended everything.
    ended_by: Option<Signal>,
    started: u64,
}

impl Pool {
    /// Takes the signals that ask this process to end, and becomes the parent of processes whose parents end.
    ///
    /// # Errors
    /// The system refuses, or there is no temporary folder.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let watched: SigSet =
            [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        watched.thread_block().context("cannot block signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&watched, flags).context("cannot wait for signals")?;
        prctl::set_child_subreaper(true).context("cannot become a subreaper")?;
        Ok(Self {
            folder: folder.to_path_buf(),
            scratch: tempfile::tempdir().context("cannot make a temporary folder")?,
            signals,
            ended_by: None,
            started: 0,
        })
    }

    /// The signal by which the user ended everything.
    pub(crate) fn ended_by(&mut self) -> Option<Signal> {
        if self.ended_by.is_none()
            && let Ok(Some(signal)) = self.signals.read_signal()
        {
            self.ended_by = i32::try_from(signal.ssi_signo).ok().and_then(|it| it.try_into().ok());
        }
        self.ended_by
    }

    /// Runs the jobs, `at_once` of them at a time, until the deadline; in their order. `tell` hears of each end.
    ///
    /// # Errors
    /// A process cannot be started for want of a file for its output.
    pub(crate) fn run(
        &mut self,
        jobs: Vec<Job>,
        at_once: usize,
        deadline: Instant,
        mut tell: impl FnMut(&Done),
    ) -> Result<Vec<Done>> {
        let count = jobs.len();
        let mut open: VecDeque<(usize, Job)> = jobs.into_iter().enumerate().collect();
        let mut running: Vec<Running> = Vec::new();
        let mut done: Vec<Option<Done>> = (0..count).map(|_| None).collect();
        while !open.is_empty() || !running.is_empty() {
            let over = self.ended_by().is_some() || Instant::now() >= deadline;
            if over {
                for (number, job) in open.drain(..) {
                    let ending = Ending::NotRun;
                    done[number] = Some(Done { job, ending, seconds: 0.0, output: String::new() });
                }
            }
            while running.len() < at_once.max(1) {
                let Some((number, job)) = open.pop_front() else { break };
                running.push(self.start(number, job)?);
            }
            let mut at = 0;
            while at < running.len() {
                let Some(ending) = running[at].ending(over)? else {
                    at += 1;
                    continue;
                };
                let ended = running.swap_remove(at);
                let number = ended.number;
                let ended = ended.done(ending);
                tell(&ended);
                done[number] = Some(ended);
            }
            if !running.is_empty() {
                thread::sleep(POLL);
            }
        }
        end_descendants();
        Ok(done.into_iter().flatten().collect())
    }

    fn start(&mut self, number: usize, job: Job) -> Result<Running> {
        self.started += 1;
        let path = self.scratch.path().join(self.started.to_string());
        let output = File::create(&path).context("cannot make a file for a program's output")?;
        let mut command = Command::new(own_path()?);
        command.arg(EXECUTE).arg(process::id().to_string()).arg(&job.program);
        command.args(&job.arguments).current_dir(&self.folder);
        command.envs(job.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stderr(output.try_clone().context("cannot share a file")?);
        let child = command.stdout(output).process_group(0).spawn();
        let child = child.with_context(|| format!("cannot start {}", job.name))?;
        Ok(Running { number, job, child, output: path, started: Instant::now() })
    }
}

struct Running {
    number: usize,
    job: Job,
    child: Child,
    output: PathBuf,
    started: Instant,
}

impl Running {
    /// `None` while it runs and may.
    fn ending(&mut self, over: bool) -> Result<Option<Ending>> {
        if let Some(status) = self.child.try_wait().context("cannot wait for a process")? {
            // What it has left in its group; fails where that is nothing.
            let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
            return Ok(Some(Ending::Ended(status)));
        }
        let ending = match (over, self.started.elapsed() >= self.job.limit) {
            (true, _) => Ending::Stopped,
            (_, true) => Ending::TimedOut,
            _ => return Ok(None),
        };
        let pid = self.child.id();
        // Before the process itself: its children would become others'.
        let below: Vec<u32> = descendants(pid).into_keys().collect();
        // Fails where it has ended meanwhile.
        let _ = killpg(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        kill_all(&below);
        self.child.wait().context("cannot wait for a process")?;
        Ok(Some(ending))
    }

    fn done(self, ending: Ending) -> Done {
        let output = last_part(&self.output).unwrap_or_default();
        // A folder of this process's, removed with it.
        let _ = fs::remove_file(&self.output);
        Done { seconds: self.started.elapsed().as_secs_f64(), job: self.job, ending, output }
    }
}

/// Kills what jobs have left, which are this process's descendants now. A process that forks meanwhile leaves
/// another one, and one in a system call that does not end stays.
fn end_descendants() {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let living = descendants(process::id()).into_iter().filter(|it| !it.1.starts_with('Z'));
        let living: Vec<u32> = living.map(|it| it.0).collect();
        if living.is_empty() || Instant::now() >= deadline {
            return;
        }
        kill_all(&living);
        thread::sleep(POLL);
    }
}

fn kill_all(processes: &[u32]) {
    for process in processes {
        // Some have ended by now.
        let _ = kill(Pid::from_raw(process.cast_signed()), Signal::SIGKILL);
    }
}

/// The last bytes of a file, from the beginning of a line.
fn last_part(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let start = length.saturating_sub(KEPT_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(match text.split_once('\n') {
        Some((_, rest)) if start > 0 => rest.to_owned(),
        _ => text,
    })
}

fn own_path() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program")
}

/// Becomes the program of a job: with no signal blocked, and killed when the runner ends. Returns only when that
/// fails.
///
/// # Errors
/// The runner has ended, or there is no such program.
pub fn execute(arguments: &[String]) -> Result<()> {
    let [parent, program, rest @ ..] = arguments else { bail!("`{EXECUTE}` has no program") };
    SigSet::all().thread_unblock().context("cannot unblock signals")?;
    prctl::set_pdeathsig(Signal::SIGKILL).context("cannot ask for the parent's end")?;
    if Some(getppid().as_raw()) != parent.parse().ok() {
        bail!("the runner has ended");
    }
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot start {program}"))
}

/// How an exit status reads.
pub(crate) fn status_text(status: ExitStatus) -> String {
    match status.signal().map(Signal::try_from) {
        Some(Ok(signal)) => format!("killed by {signal}"),
        _ => status.to_string(),
    }
}

/// The first argument of a process that is to become a job's.
pub const EXECUTE: &str = "execute";

const POLL: Duration = Duration::from_millis(10);
const KEPT_BYTES: u64 = 64 << 10;
