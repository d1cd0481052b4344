//! The agent: starts the ranks of a plan, watches them, stops them all when one fails.

mod ending;
mod report;
mod running;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use brigade_world::StoreHost;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::getpid;

pub use ending::{Ending, Failure, Outcome};
use running::Running;

use crate::output::{Notice, Output};
use crate::survivors::Survivors;
use crate::watch::Watch;
use crate::{LaunchError, LaunchPlan, StorePort};

/// Runs the job to its end, with its output on this process's stdout and stderr.
///
/// Blocks until no process of the job is left. Call it from the main thread, before the process
/// has others: the kernel kills the ranks when the thread that started them ends, and signals that
/// the agent waits for must be blocked in all threads.
///
/// When a rank fails, the others get SIGTERM and, after the plan's time limit, SIGKILL. SIGINT,
/// SIGTERM, SIGHUP and SIGQUIT are forwarded with the same limit; SIGINT while the job is stopping
/// kills at once. SIGUSR1 and SIGUSR2 are forwarded and mean nothing here; Ctrl-Z suspends the
/// ranks, too.
///
/// After a job these signals stay blocked in this thread: one that comes too late (schedulers send
/// SIGTERM more than once) must not end the process before it has said how the job ended.
///
/// Errors: the system could not start all ranks; none of them has run the program then.
pub fn run(plan: &LaunchPlan) -> Result<Outcome, LaunchError> {
    let signals = watched_signals();
    let before = signals
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map_err(LaunchError::system("block signals"))?;
    match start(plan, &signals) {
        Ok(job) => Ok(job.watch_to_the_end()),
        Err(error) => {
            // The mask that was there before can be set again, or could not have been there.
            let _ = before.thread_set_mask();
            Err(error)
        }
    }
}

/// A started job.
struct Job {
    ranks: Vec<Running>,
    signals: SignalFd,
    output: Output,
    survivors: Survivors,
    watch: Watch,
    /// Holds the port until the job is over.
    _port: StorePort,
    shutdown_timeout: Duration,
    stopping: Option<Stopping>,
    /// The user has asked a second time.
    impatient: bool,
    /// The first rank that failed.
    failed: Option<usize>,
}

/// Why the job is being stopped, and when patience ends.
struct Stopping {
    cause: Cause,
    /// `None` once the ranks have been killed.
    deadline: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    RankFailed,
    Signal(Signal),
    OutputClosed,
}

/// Any error on the way drops the gates, and with them the ranks that wait there.
fn start(plan: &LaunchPlan, watched: &SigSet) -> Result<Job, LaunchError> {
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals =
        SignalFd::with_flags(watched, flags).map_err(LaunchError::system("wait for signals"))?;
    let port = StorePort::reserve().map_err(LaunchError::system("reserve a port"))?;
    let socket = port.socket().map_err(LaunchError::system("bind the store's socket"))?;

    let size = plan.world_size.as_usize();
    let mut ranks = Vec::with_capacity(size);
    let mut gates = Vec::with_capacity(size);
    let mut pipes = Vec::with_capacity(size);
    for rank in 0..size {
        // Rank 0 learns its descriptor's number at the gate.
        let world = plan.world(rank, port.endpoint(StoreHost::Rank0))?;
        let (running, gate, pipe) = Running::start(plan, &world)
            .map_err(LaunchError::system(format!("start rank {rank} of {size}")))?;
        ranks.push(running);
        gates.push(gate);
        pipes.push(pipe);
    }
    let survivors = Survivors {
        run_id: plan.run_id.clone(),
        sessions: ranks.iter().map(|rank| rank.pid().as_raw()).collect(),
    };
    let watch = Watch::start(&survivors).map_err(LaunchError::system("start the watch"))?;
    let output = Output::start(pipes).map_err(LaunchError::system("carry the ranks' output"))?;
    for (rank, gate) in gates.into_iter().enumerate() {
        gate.open((rank == 0).then_some(&socket))
            .map_err(LaunchError::system(format!("let rank {rank} start")))?;
    }
    Ok(Job {
        ranks,
        signals,
        output,
        survivors,
        watch,
        _port: port,
        shutdown_timeout: plan.shutdown_timeout,
        stopping: None,
        impatient: false,
        failed: None,
    })
}

impl Job {
    fn watch_to_the_end(mut self) -> Outcome {
        while self.running() > 0 {
            self.wait(self.stopping.as_ref().and_then(|stopping| stopping.deadline));
            while let Some(signal) = self.next_signal() {
                self.handle(signal);
            }
            if self.output.notice() == Notice::Closed && self.stopping.is_none() {
                self.stop(Cause::OutputClosed, Signal::SIGTERM);
            }
            self.kill_when_due();
        }
        let killed = self.killed();
        self.survivors.kill();
        let all_written = self.write_the_rest();
        self.watch.dismiss();
        for rank in &mut self.ranks {
            rank.reap();
        }

        let failure = self.failed.map(|rank| self.ranks[rank].failure(rank));
        let cause = self.stopping.map(|stopping| stopping.cause);
        // A thread that still writes is left alone; it ends with this process.
        let tails = if all_written { self.output.into_tails() } else { Vec::new() };
        let tail = failure.as_ref().and_then(|failure| tails.get(failure.rank));
        if all_written {
            report::print(failure.as_ref(), cause, tail);
        }
        let stopped_by = match cause {
            Some(Cause::OutputClosed) => Some(Signal::SIGPIPE),
            Some(Cause::Signal(signal)) if killed => Some(signal),
            _ => None,
        };
        Outcome { failure, stopped_by: stopped_by.map(|signal| signal as i32) }
    }

    fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.ending().is_none()).count()
    }

    /// Waits for a signal, a notice or the end of patience. Costs nothing meanwhile.
    fn wait(&self, deadline: Option<Instant>) {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            // A millisecond more than less, or it would turn round and round in the last one.
            Some(at) => {
                let millis = at.saturating_duration_since(Instant::now()).as_millis() + 1;
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds = [
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.output.control(), PollFlags::POLLIN),
        ];
        // EINTR: look round and wait again.
        let _ = poll(&mut fds, timeout);
    }

    fn next_signal(&self) -> Option<Signal> {
        let info = self.signals.read_signal().ok().flatten()?;
        Signal::try_from(info.ssi_signo.cast_signed()).ok()
    }

    fn handle(&mut self, signal: Signal) {
        match signal {
            Signal::SIGCHLD => self.look_for_ended(),
            Signal::SIGUSR1 | Signal::SIGUSR2 => self.send(signal),
            Signal::SIGTSTP => self.suspend(),
            Signal::SIGINT if self.stopping.is_some() => {
                self.impatient = true;
                self.kill();
            }
            _ if self.stopping.is_some() => {
                self.impatient = true;
                self.send(signal);
            }
            _ => {
                self.stop(Cause::Signal(signal), signal);
                self.output.say(&format!(
                    "{signal}: waiting up to {} s for {} to stop; SIGINT (Ctrl-C) kills now",
                    self.shutdown_timeout.as_secs_f64(),
                    report::count(self.running()),
                ));
            }
        }
    }

    fn look_for_ended(&mut self) {
        for rank in 0..self.ranks.len() {
            let Some(ending) = self.ranks[rank].look() else { continue };
            if ending == Ending::Code(0) || self.failed.is_some() {
                continue;
            }
            // What the agent has killed is no cause.
            if !self.killed() {
                self.failed = Some(rank);
            }
            if self.stopping.is_none() {
                self.stop(Cause::RankFailed, Signal::SIGTERM);
                if self.running() > 0 {
                    let failure = self.ranks[rank].failure(rank);
                    let others = report::count(self.running());
                    self.output.say(&format!("{failure}; stopping {others}"));
                }
            }
        }
    }

    fn stop(&mut self, cause: Cause, signal: Signal) {
        let now = Instant::now();
        let deadline = Some(now.checked_add(self.shutdown_timeout).unwrap_or(now + FOREVER));
        self.stopping = Some(Stopping { cause, deadline });
        self.send(signal);
    }

    fn kill_when_due(&mut self) {
        let deadline = self.stopping.as_ref().and_then(|stopping| stopping.deadline);
        if self.running() > 0 && deadline.is_some_and(|at| at <= Instant::now()) {
            self.output.say(&format!(
                "{} did not stop within {} s: killed",
                report::count(self.running()),
                self.shutdown_timeout.as_secs_f64(),
            ));
            self.kill();
        }
    }

    fn kill(&mut self) {
        self.send(Signal::SIGKILL);
        if let Some(stopping) = &mut self.stopping {
            stopping.deadline = None;
        }
    }

    fn killed(&self) -> bool {
        self.stopping.as_ref().is_some_and(|stopping| stopping.deadline.is_none())
    }

    fn send(&self, signal: Signal) {
        for rank in &self.ranks {
            rank.send(signal);
        }
    }

    fn suspend(&self) {
        self.send(Signal::SIGSTOP);
        // Returns when somebody continues this process.
        let _ = kill(getpid(), Signal::SIGSTOP);
        self.send(Signal::SIGCONT);
    }

    /// Waits for the output thread. False when it is given up: whoever reads our output has stopped
    /// reading, and a second signal to stop came before this or comes now.
    fn write_the_rest(&mut self) -> bool {
        self.output.finish();
        let mut deadline = self.impatient.then(|| Instant::now() + LAST_LINES);
        loop {
            if self.output.notice() == Notice::Finished {
                return true;
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return false;
            }
            self.wait(deadline);
            while let Some(signal) = self.next_signal() {
                if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) {
                    deadline = deadline.or_else(|| Some(Instant::now() + LAST_LINES));
                }
            }
        }
    }
}

/// How long the last lines of stopped ranks may take to be written once the user has lost patience.
const LAST_LINES: Duration = Duration::from_millis(500);
/// A limit beyond the clock's range is a year.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

fn watched_signals() -> SigSet {
    [
        Signal::SIGCHLD,
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTSTP,
    ]
    .into_iter()
    .collect()
}
