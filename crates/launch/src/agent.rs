//! The agent: starts the ranks of a plan, watches them, stops them all when one fails.
//!
//! It is one loop over signals, the ranks' output, and the word of the coordinator, who decides
//! for all hosts. On a single host, too: the coordinator is then a thread of this process.

mod attempt;
mod error_files;
mod farewell;
mod group;
mod hearing;
mod ignored;
mod interrupt;
mod lines;
mod memory_killer;
mod outcome;
mod peers;
mod report;
mod running;
mod streamed;

use std::os::fd::AsFd;
use std::time::Instant;

use brigade_rendezvous::{Assignment, FromAgent, Link};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

pub use outcome::Outcome;
pub use report::text as report;

use crate::output::{Notice, Output, RunFolder, Terminal};
use crate::store_port::Reach;
use crate::watch::Watch;
use crate::{LaunchError, LaunchPlan, Meeting, StorePort};
use attempt::{Ended, Failed};
use group::Group;
use peers::Peers;
use streamed::Streamed;

/// Runs this host's part of the job to its end, with the output on this process's stdout and
/// stderr.
///
/// Blocks until no process of the job is left on this host. Call it from the main thread, before
/// the process has others: the kernel kills the ranks when the thread that started them ends, and
/// signals that the agent waits for must be blocked in all threads.
///
/// When a rank fails, the others get SIGTERM and, after the plan's time limit, SIGKILL; then the
/// job starts again, as often as the plan allows. SIGINT, SIGTERM, SIGHUP and SIGQUIT are
/// forwarded with the same limit; SIGINT while the job is stopping kills at once. SIGUSR1 and
/// SIGUSR2 are forwarded and mean nothing here; Ctrl-Z suspends the ranks, too, of a job on one
/// host.
///
/// After a job these signals stay blocked in this thread: one that comes too late (schedulers send
/// SIGTERM more than once) must not end the process before it has said how the job ended.
///
/// Errors: the hosts have not met, or the system could not start all ranks of this host; none of
/// them has run the program then.
pub fn run(plan: &LaunchPlan) -> Result<Outcome, LaunchError> {
    with_signals(|signals| {
        let terminal = Terminal::new().map_err(LaunchError::system("write to stdout"))?;
        let output = Output::start(&plan.output, Box::new(terminal));
        let output = output.map_err(LaunchError::system("start a thread"))?;
        Agent::new(plan, signals, output, None, Peers::find(plan)?)?.run()
    })
}

/// The same over a connection to the coordinator that is there: the output goes over it, too, and
/// how the job ended is told at its other end only.
///
/// Errors as [`run`].
pub fn run_over(plan: &LaunchPlan, link: Link) -> Result<Outcome, LaunchError> {
    with_signals(|signals| {
        let (streamed, show) =
            Streamed::new().map_err(LaunchError::system("make a socket pair"))?;
        let output =
            Output::start(&plan.output, show).map_err(LaunchError::system("start a thread"))?;
        Agent::new(plan, signals, output, Some(streamed), Peers::over(plan, link)?)?.run()
    })
}

struct Agent<'p> {
    plan: &'p LaunchPlan,
    signals: SignalFd,
    output: Output,
    /// Orders to write everything that have not been answered.
    draining: usize,
    /// Where the output goes to the coordinator.
    streamed: Option<Streamed>,
    peers: Peers<'p>,
    watch: Watch,
    folder: RunFolder,
    reach: Reach,
    /// For the next attempt, in case that this is the first host.
    port: Option<StorePort>,
    /// The attempt that is to begin.
    part: Option<Assignment>,
    /// The attempt that has processes here.
    group: Option<Group>,
    failed: Vec<Failed>,
    /// When the first rank failed of which the coordinator knows.
    first_failure: Option<Instant>,
    /// The attempt that was the last here.
    ended: Option<Ended>,
    /// The attempt that the coordinator wants stopped, until that is done.
    stop_asked: Option<u32>,
    /// The last line for the user that came with such a wish.
    reason: Option<String>,
    /// Hosts in the last attempt.
    hosts: usize,
    /// Restarts before the last attempt, and how many there may be.
    restarts: (u32, u32),
    /// The signal that asks this host to stop, and how often it has come.
    interrupted: Option<Signal>,
    impatient: bool,
    output_closed: bool,
    /// The coordinator is gone; another is looked for once nothing runs here.
    look_again: bool,
    /// How the job has ended, as soon as nothing runs here.
    outcome: Option<Outcome>,
    /// Why this host cannot take part.
    error: Option<LaunchError>,
    /// When to leave without the coordinator's word.
    give_up: Option<Instant>,
}

impl<'p> Agent<'p> {
    fn new(
        plan: &'p LaunchPlan,
        signals: SignalFd,
        output: Output,
        streamed: Option<Streamed>,
        peers: Peers<'p>,
    ) -> Result<Self, LaunchError> {
        let passing = RunFolder::passing(&plan.output, &plan.agent_id);
        let watch = Watch::start(&plan.agent_id, passing.as_deref());
        let watch = watch.map_err(LaunchError::system("start the watch"))?;
        let folder = match RunFolder::create(&plan.output, &plan.run_id, &plan.agent_id) {
            Ok(folder) => folder,
            Err(error) => {
                watch.dismiss();
                return Err(error);
            }
        };
        let alone = plan.meeting == Meeting::OneHost && streamed.is_none();
        Ok(Self {
            plan,
            signals,
            output,
            draining: 0,
            streamed,
            peers,
            watch,
            folder,
            reach: if alone { Reach::Loopback } else { Reach::Everywhere },
            port: None,
            part: None,
            group: None,
            failed: Vec::new(),
            first_failure: None,
            ended: None,
            stop_asked: None,
            reason: None,
            hosts: 1,
            restarts: (0, plan.max_restarts),
            interrupted: None,
            impatient: false,
            output_closed: false,
            look_again: false,
            outcome: None,
            error: None,
            give_up: None,
        })
    }

    fn run(mut self) -> Result<Outcome, LaunchError> {
        loop {
            while let Some(news) = self.peers.next() {
                self.hear(news);
            }
            self.start_when_written();
            self.turn();
            self.stream();
            if let Some(result) = self.result() {
                return self.finish(result);
            }
            if self.group.is_none() && std::mem::take(&mut self.look_again) {
                let begun = self.peers.begin();
                begun.unwrap_or_else(|error| self.fail(error));
                continue;
            }
            self.wait(self.deadline());
            self.take_signals();
            self.take_notices();
            self.leave_when_due();
        }
    }

    /// How it went, when nothing of the job runs here any more and nothing will.
    fn result(&mut self) -> Option<Result<Outcome, LaunchError>> {
        if self.group.is_some() {
            return None;
        }
        // An error is known to the coordinator as well, which has the last word while it is there.
        match self.error.take_if(|_| self.outcome.is_some() || !self.peers.are_met()) {
            Some(error) => Some(Err(error)),
            None => self.outcome.take().map(Ok),
        }
    }

    /// This host cannot take part.
    fn fail(&mut self, error: LaunchError) {
        self.error.get_or_insert(error);
    }

    /// Waits for anything to happen. Costs nothing meanwhile.
    fn wait(&self, deadline: Option<Instant>) {
        let timeout = match deadline {
            None => PollTimeout::NONE,
            // A millisecond more than less, or it would turn round and round in the last one.
            Some(at) => {
                let millis = at.saturating_duration_since(Instant::now()).as_millis() + 1;
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds = self.peers.fds();
        fds.push(PollFd::new(self.signals.as_fd(), PollFlags::POLLIN));
        fds.push(PollFd::new(self.output.control(), PollFlags::POLLIN));
        let streamed = self.streamed.as_ref().map(Streamed::control);
        fds.extend(streamed.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        // EINTR: look round and wait again.
        let _ = poll(&mut fds, timeout);
    }

    fn take_notices(&mut self) {
        while let Some(notice) = self.output.notice() {
            match notice {
                Notice::Closed => self.output_is_closed(),
                Notice::Tail { local_rank, tail } => self.hear_tail(local_rank, tail),
                Notice::Drained(_) => self.draining = self.draining.saturating_sub(1),
                Notice::Gone => {
                    self.draining = 0;
                    return;
                }
            }
        }
    }

    /// Sends as much of the output as may be sent.
    fn stream(&mut self) {
        if let Some(streamed) = &mut self.streamed {
            while let Some(message) = streamed.next() {
                self.peers.send(&message);
            }
        }
    }

    /// A line for the user, wherever he is.
    fn say(&mut self, text: &str) {
        if self.streamed.is_some() {
            self.peers.send(&FromAgent::Say { text: text.to_owned() });
        } else {
            self.output.say(text);
        }
    }
}

/// Gives `run` the signals that the agent waits for, which are blocked meanwhile.
pub(crate) fn with_signals<T>(
    run: impl FnOnce(SignalFd) -> Result<T, LaunchError>,
) -> Result<T, LaunchError> {
    let watched = interrupt::watched();
    let before = watched
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map_err(LaunchError::system("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&watched, flags);
    let result = signals.map_err(LaunchError::system("wait for signals")).and_then(run);
    if result.is_err() {
        // Nothing has run. The mask that was there before can be set again, or could not have been
        // there.
        let _ = SigSet::thread_set_mask(&before);
    }
    result
}
