//! The ranks of this host in one attempt.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use brigade_rendezvous::{Assignment, Ending};
use brigade_world::StoreHost;
use nix::sys::signal::Signal;

use super::memory_killer::MemoryKiller;
use super::running::Running;
use crate::output::{AttemptFolder, Output};
use crate::survivors::{self, Survivors};
use crate::watch::Watch;
use crate::{LaunchError, LaunchPlan, StorePort};

/// Ranks that have been started together and are stopped together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) part: Assignment,
    ranks: Vec<Running>,
    survivors: Survivors,
    /// Holds the port until the attempt is over.
    _port: StorePort,
    folder: AttemptFolder,
    memory_killer: MemoryKiller,
    /// What the ranks have been asked to stop with.
    asked: Vec<Signal>,
    /// Ranks that are ending by themselves, and until when they may.
    going: Option<(Vec<usize>, Instant)>,
    patience: Patience,
    /// Until when what is left is looked for.
    sweep_until: Option<Instant>,
}

/// How long ranks may still take to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// Nobody has asked them to.
    Endless,
    Until(Instant),
    /// They have been killed.
    Over,
}

impl Group {
    /// Starts the ranks. Any error on the way drops the gates, and with them the ranks that wait
    /// there: none has run the program.
    pub(super) fn start(
        plan: &LaunchPlan,
        part: Assignment,
        port: StorePort,
        folder: AttemptFolder,
        output: &mut Output,
        watch: &mut Watch,
    ) -> Result<Self, LaunchError> {
        let size = part.nproc;
        let socket = if part.node_rank == 0 {
            Some(
                port.socket_at(&part.master_addr)
                    .map_err(LaunchError::system("bind the store's socket"))?,
            )
        } else {
            None
        };
        let memory_killer = MemoryKiller::look();
        let mut ranks = Vec::with_capacity(size);
        let mut gates = Vec::with_capacity(size);
        let mut streams = Vec::with_capacity(size);
        for local_rank in 0..size {
            // Rank 0 learns its descriptor's number at the gate.
            let world = plan.world(&part, local_rank, StoreHost::Rank0)?;
            let error_file = folder.error_file(local_rank);
            let (running, gate, stream) = Running::start(plan, &world, error_file.as_deref())
                .map_err(LaunchError::system(format!("start rank {local_rank} of {size}")))?;
            ranks.push(running);
            gates.push(gate);
            streams.push(stream);
        }
        let survivors = Survivors {
            agent: plan.agent_id.clone(),
            sessions: ranks.iter().map(|rank| rank.pid().as_raw()).collect(),
        };
        watch.guard(&survivors.sessions);
        output.attach(streams, &folder)?;
        for (local_rank, gate) in gates.into_iter().enumerate() {
            gate.open(if local_rank == 0 { socket.as_ref() } else { None })
                .map_err(LaunchError::system(format!("let rank {local_rank} start")))?;
        }
        Ok(Self {
            part,
            ranks,
            survivors,
            _port: port,
            folder,
            memory_killer,
            asked: Vec::new(),
            going: None,
            patience: Patience::Endless,
            sweep_until: None,
        })
    }

    /// Ranks that have not ended.
    pub(super) fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.ending().is_none()).count()
    }

    /// All have ended, with 0.
    pub(super) fn is_finished(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ending() == Some(Ending::Code(0)))
    }

    /// The ranks that have ended since the last look. `first` is the process that the system says
    /// was the first of them.
    pub(super) fn look(&mut self, first: Option<i32>) -> Vec<usize> {
        let is_first = |rank: &Running| Some(rank.pid().as_raw()) == first;
        let mut order: Vec<usize> = (0..self.ranks.len()).collect();
        order.sort_by_key(|&local_rank| !is_first(&self.ranks[local_rank]));
        order.retain(|&local_rank| self.ranks[local_rank].look().is_some());
        order
    }

    /// How a rank ended, where that is neither success nor what the agent has brought about.
    pub(super) fn failure(&self, local_rank: usize) -> Option<Ending> {
        self.ranks.get(local_rank)?.failure()
    }

    pub(super) fn pid(&self, local_rank: usize) -> i32 {
        self.ranks[local_rank].pid().as_raw()
    }

    /// Where the rank leaves its error.
    pub(super) fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        self.folder.error_file(local_rank)
    }

    pub(super) fn memory_killer(&self) -> &MemoryKiller {
        &self.memory_killer
    }

    /// Asks the ranks to stop; kills them when that takes longer than `patience`, counted from the
    /// first time.
    pub(super) fn stop(&mut self, signal: Signal, patience: Duration) {
        self.begin_to_stop(signal, patience);
        self.going = None;
        self.ranks.iter_mut().for_each(|rank| rank.ask(signal));
    }

    /// The same after a failure, but leaves some time to ranks that have written an error and are
    /// on their way out: theirs may be the cause, and killed halfway they could not end with the
    /// code that belongs to it.
    pub(super) fn stop_others(&mut self, signal: Signal, patience: Duration) {
        self.begin_to_stop(signal, patience);
        let mut going = Vec::new();
        for local_rank in 0..self.ranks.len() {
            let file = self.error_file(local_rank).and_then(|path| path.metadata().ok());
            let has_error = file.is_some_and(|file| file.is_file() && file.len() > 0);
            let rank = &mut self.ranks[local_rank];
            if has_error && rank.ending().is_none() {
                going.push(local_rank);
            } else {
                rank.ask(signal);
            }
        }
        self.going = (!going.is_empty()).then(|| (going, Instant::now() + GOING_TAKES));
    }

    fn begin_to_stop(&mut self, signal: Signal, patience: Duration) {
        if self.patience == Patience::Endless {
            let now = Instant::now();
            self.patience = Patience::Until(now.checked_add(patience).unwrap_or(now + FOREVER));
        }
        self.asked.push(signal);
    }

    /// Asks those who had some time left and have used it up.
    pub(super) fn ask_when_due(&mut self) {
        let due = |(_, until): &mut (_, Instant)| *until <= Instant::now();
        let Some((going, _)) = self.going.take_if(due) else { return };
        let signal = self.asked.last().copied().unwrap_or(Signal::SIGTERM);
        for local_rank in going {
            self.ranks[local_rank].ask(signal);
        }
    }

    /// The ranks have been sent this already.
    pub(super) fn was_asked(&self, signal: Signal) -> bool {
        self.asked.contains(&signal)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.patience != Patience::Endless
    }

    /// Kills at once.
    pub(super) fn kill(&mut self) {
        self.patience = Patience::Over;
        self.ranks.iter_mut().for_each(|rank| rank.ask(Signal::SIGKILL));
    }

    /// Patience came to its end while ranks were running.
    pub(super) fn is_killed(&self) -> bool {
        self.patience == Patience::Over
    }

    /// It is time to kill.
    pub(super) fn is_due(&self) -> bool {
        self.running() > 0 && matches!(self.patience, Patience::Until(at) if at <= Instant::now())
    }

    /// When to look again, if nothing else happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.sweep_until.is_some() {
            // No descriptor says when a process that is not our child has ended.
            return Some(Instant::now() + survivors::LOOK_AGAIN);
        }
        let kill = match self.patience {
            Patience::Until(at) if self.running() > 0 => Some(at),
            _ => None,
        };
        let going = self.going.as_ref().map(|(_, until)| *until);
        kill.into_iter().chain(going).min()
    }

    pub(super) fn send(&self, signal: Signal) {
        for rank in &self.ranks {
            rank.send(signal);
        }
    }

    /// Kills what the ranks, which have all ended, have left. True when nothing is there any more,
    /// or is stuck in the kernel; else to be called again.
    pub(super) fn sweep(&mut self) -> bool {
        let now = Instant::now();
        let until = *self.sweep_until.get_or_insert(now + survivors::LIMIT);
        self.survivors.kill_once() == 0 || now > until
    }

    /// Lets the system forget the ranks, of which nothing is left; gives the folder of what they
    /// have left on disk.
    pub(super) fn end(mut self, watch: &mut Watch) -> AttemptFolder {
        // First: a number that has been given up may be a stranger's next.
        watch.guard(&[]);
        for rank in &mut self.ranks {
            rank.reap();
        }
        self.folder
    }
}

/// How long a rank that has written its error may take to end.
const GOING_TAKES: Duration = Duration::from_secs(3);
/// A limit beyond the clock's range is a year.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
