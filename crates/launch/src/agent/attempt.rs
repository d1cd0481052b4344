//! What becomes of the ranks of this host: started, failed, ended.

use std::ops::Range;
use std::time::{Duration, Instant};

use brigade_rendezvous::{Assignment, Ending, FromAgent, RankFailure, Stream};
use nix::sys::signal::Signal;

use super::Agent;
use super::error_files::Left;
use super::group::Group;
use super::peers;
use crate::output::{AttemptFolder, Tail};
use crate::{LaunchError, Meeting, StorePort};

/// A rank that has failed and whose last lines have been asked for.
#[derive(Debug)]
pub(super) struct Failed {
    local_rank: usize,
    ending: Ending,
    seen: Instant,
}

/// An attempt of which no process is left here.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) attempt: u32,
    /// The place of this host in it.
    pub(super) node_rank: usize,
    /// Ranks had to be killed.
    killed: bool,
    /// All ranks ended with 0.
    finished: bool,
    /// Until when the coordinator need not know, because output is still on its way.
    until: Instant,
    pub(super) told: bool,
    pub(super) folder: AttemptFolder,
    ranks: Range<usize>,
}

impl Ended {
    /// The failure was one of this host's.
    pub(super) fn is_of(&self, failure: &RankFailure) -> bool {
        failure.attempt == self.attempt && self.ranks.contains(&failure.rank)
    }
}

impl Agent<'_> {
    /// Starts this host's ranks, once the output of those before them is written: a reader that has
    /// paused would else have us collect the pipes of attempt after attempt.
    pub(super) fn start_when_written(&mut self) {
        let Some(part) = self.part.take_if(|_| self.draining == 0) else { return };
        if let Err(error) = self.start(part) {
            self.peers.send(&FromAgent::Unable { reason: error.to_string() });
            self.fail(error);
        }
    }

    fn start(&mut self, part: Assignment) -> Result<(), LaunchError> {
        if self.group.is_some() || part.nproc != self.plan.local_world_size.as_usize() {
            self.peers.lose("it gave this host a part that cannot be its own");
            return Ok(());
        }
        if part.node_rank != 0 && peers::is_loopback(&part.master_addr) && !self.peers.are_near() {
            return Err(LaunchError::Refused {
                reason: format!(
                    "rank 0 is at {}, which other hosts cannot reach: give its host --local-addr \
                     with a name or address that they can",
                    part.master_addr
                ),
            });
        }
        (self.stop_asked, self.ended, self.first_failure) = (None, None, None);
        self.failed.clear();
        self.hosts = part.num_nodes;
        self.restarts = (part.restarts, part.max_restarts);
        let port = self.port.take().map_or_else(|| self.reserve(), Ok)?;
        let folder = self.folder.attempt(part.attempt, part.nproc)?;
        let (output, watch) = (&mut self.output, &mut self.watch);
        let group = Group::start(self.plan, part, port, folder, output, watch)?;
        self.group = Some(group);
        Ok(())
    }

    /// An attempt that was over before it began here.
    pub(super) fn skip(&mut self, part: &Assignment) {
        self.ended = Some(Ended {
            attempt: part.attempt,
            node_rank: part.node_rank,
            killed: false,
            finished: false,
            until: Instant::now(),
            told: false,
            folder: AttemptFolder::default(),
            ranks: 0..0,
        });
    }

    /// Reserves a port for the ranks' store, in case that this is the first host.
    ///
    /// Errors when there is none, or none of those that the user has named.
    pub(super) fn reserve(&self) -> Result<StorePort, LaunchError> {
        // On the other hosts nobody uses it, and a port of the user's may be taken there.
        let is_first = match self.plan.meeting {
            Meeting::Static { node_rank, .. } | Meeting::Launcher { node_rank } => node_rank == 0,
            _ => true,
        };
        match self.plan.store_port.filter(|_| is_first) {
            Some(range) => StorePort::reserve_in(self.reach, range).map_err(LaunchError::system(
                format!("use port {range} for the ranks' store (--store-port)"),
            )),
            None => StorePort::reserve(self.reach).map_err(LaunchError::system("reserve a port")),
        }
    }

    /// Looks for ranks that have ended; `first` is the process that the system names.
    pub(super) fn look_for_ended(&mut self, first: Option<i32>) {
        let Some(group) = &mut self.group else { return };
        let seen = Instant::now();
        for local_rank in group.look(first) {
            if let Some(ending) = group.failure(local_rank) {
                self.output.ask_tail(local_rank);
                self.failed.push(Failed { local_rank, ending, seen });
            }
        }
    }

    /// The last lines of a rank are there.
    pub(super) fn hear_tail(&mut self, local_rank: usize, tail: Tail) {
        if let Some(index) = self.failed.iter().position(|failed| failed.local_rank == local_rank) {
            let failed = self.failed.remove(index);
            self.tell_failure(&failed, tail);
        }
    }

    /// Moves on everything that depends on time or on the ranks' ends alone.
    pub(super) fn turn(&mut self) {
        // Whoever reads our output has paused: the failure is told without last lines.
        while self.failed.first().is_some_and(|failed| failed.seen + TAIL_TAKES <= Instant::now()) {
            let failed = self.failed.remove(0);
            let unknown = "(not known: nobody was reading the launcher's output)".to_owned();
            self.tell_failure(&failed, Tail { stderr: vec![unknown], ..Tail::default() });
        }
        let timeout = self.plan.shutdown_timeout;
        if let Some(group) = &mut self.group {
            group.ask_when_due();
            if group.is_due() {
                let ranks = super::report::count(group.running(), "rank");
                group.kill();
                self.say(&format!(
                    "{ranks} did not stop within {} s: killed",
                    timeout.as_secs_f64()
                ));
            } else if group.running() == 0 && self.failed.is_empty() && group.sweep() {
                self.end_attempt();
            }
        }
        self.tell_ended();
    }

    fn end_attempt(&mut self) {
        let Some(group) = self.group.take() else { return };
        let first = group.part.first_rank;
        self.ended = Some(Ended {
            attempt: group.part.attempt,
            node_rank: group.part.node_rank,
            killed: group.is_killed(),
            finished: group.is_finished(),
            until: Instant::now() + OUTPUT_TAKES,
            told: false,
            ranks: first..first + group.part.nproc,
            folder: group.end(&mut self.watch),
        });
        self.output.drain();
        self.draining += 1;
    }

    /// Tells the coordinator that the attempt has ended here, once what was printed is on its way.
    fn tell_ended(&mut self) {
        let shown = self.is_shown();
        let Some(ended) = &mut self.ended else { return };
        let (attempt, killed) = (ended.attempt, ended.killed);
        let asked = self.stop_asked == Some(attempt);
        if !ended.told && (shown || asked && ended.until <= Instant::now()) {
            ended.told = true;
            if ended.finished {
                self.peers.send(&FromAgent::Finished { attempt });
            }
        }
        if self.ended.as_ref().is_some_and(|ended| ended.told) && asked {
            self.stop_asked = None;
            match self.reserve() {
                Ok(port) => {
                    let message = FromAgent::Stopped { attempt, port: port.number(), killed };
                    self.port = Some(port);
                    self.peers.send(&message);
                }
                Err(error) => self.peers.lose(&error.to_string()),
            }
        }
    }

    /// Where output goes to the coordinator, all of it has gone.
    fn is_shown(&self) -> bool {
        self.streamed.as_ref().is_none_or(|streamed| {
            self.draining == 0 && streamed.is_empty() && self.peers.is_flushed()
        })
    }

    fn tell_failure(&mut self, failed: &Failed, tail: Tail) {
        let Some(group) = &self.group else { return };
        let Failed { local_rank, ending, seen } = *failed;
        let left = group.error_file(local_rank).as_deref().and_then(Left::read);
        // The error was written before the process went on to end, and others saw it going.
        let at = left.as_ref().and_then(|left| seen.checked_sub(left.age)).unwrap_or(seen);
        if self.first_failure.is_some_and(|first| first <= at) {
            return;
        }
        self.first_failure = Some(at);
        let (stream, last_lines) = if tail.stderr.is_empty() {
            (Stream::Stdout, tail.stdout)
        } else {
            (Stream::Stderr, tail.stderr)
        };
        let was_killed = ending.exit_code() == Ending::Signal(Signal::SIGKILL as i32).exit_code();
        let failure = RankFailure {
            attempt: group.part.attempt,
            rank: group.part.first_rank + local_rank,
            local_rank,
            host: self.plan.host.clone(),
            pid: group.pid(local_rank),
            ending,
            at: self.peers.millis(at),
            last_lines,
            stream,
            error: left.map(|left| left.text),
            hint: if was_killed { group.memory_killer().hint() } else { None },
        };
        self.peers.send(&FromAgent::Failed(failure));
    }

    /// When to take a turn even if nothing else happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let ended = self.ended.as_ref().filter(|ended| !ended.told).map(|ended| ended.until);
        let ended = ended.filter(|_| self.stop_asked.is_some());
        let failed = self.failed.first().map(|failed| failed.seen + TAIL_TAKES);
        let group = self.group.as_ref().and_then(Group::deadline);
        [ended, failed, group, self.peers.deadline(), self.give_up].into_iter().flatten().min()
    }
}

/// How long the last lines of a failed rank are waited for.
const TAIL_TAKES: Duration = Duration::from_millis(100);
/// How long an attempt that is to stop may wait for its output to be taken.
const OUTPUT_TAKES: Duration = Duration::from_secs(3);
