//! The processes of this host's ranks in one attempt.

use brigade_rank_env::StoreHost;
use brigade_rendezvous::{Assignment, ExitStatus};
use nix::sys::signal::Signal;

use super::oom::OomKiller;
use super::rank_process::RankProcess;
use crate::leftovers::{Session, Stat};
use crate::open_files::OpenFiles;
use crate::output::{AttemptFiles, AttemptFolder, Output};
use crate::reaper::Reaper;
use crate::{LaunchError, LaunchPlan, StorePort};

/// Ranks that were started together.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) part: Assignment,
    processes: Vec<RankProcess>,
    /// Port of the ranks' store, held until the attempt is over.
    pub(super) port: StorePort,
    pub(super) folder: AttemptFolder,
    pub(super) oom_killer: OomKiller,
}

/// Inputs of the start of ranks.
pub(super) struct Starting<'a> {
    pub(super) plan: &'a LaunchPlan,
    pub(super) output: &'a mut Output,
    pub(super) reaper: &'a mut Reaper,
    pub(super) open_files: &'a OpenFiles,
}

impl Ranks {
    /// Starts the ranks. An error drops the gates, which ends the ranks that wait there before any of them has run the
    /// program.
    pub(super) fn start(
        with: Starting<'_>,
        part: Assignment,
        port: StorePort,
        files: AttemptFiles,
    ) -> Result<Self, LaunchError> {
        let Starting { plan, output, reaper, open_files } = with;
        let size = part.nproc;
        let socket = if part.node_rank == 0 {
            Some(
                port.socket_at(&part.master_addr)
                    .map_err(LaunchError::system("bind the store's socket"))?,
            )
        } else {
            None
        };
        let oom_killer = OomKiller::look();
        let folder = files.folder.clone();
        let mut processes = Vec::with_capacity(size);
        let mut gates = Vec::with_capacity(size);
        let mut streams = Vec::with_capacity(size);
        for local_rank in 0..size {
            // Rank 0 receives its descriptor's number at the gate.
            let world = plan.world(&part, local_rank, StoreHost::Rank0)?;
            let error_file = folder.error_file(local_rank);
            let (process, gate, progress, stream) =
                RankProcess::start(plan, &world, error_file.as_deref())
                    .map_err(LaunchError::system(format!("start rank {local_rank} of {size}")))?;
            open_files.lower_for(process.pid().as_raw().cast_unsigned());
            processes.push(process);
            gates.push((gate, progress));
            streams.push(stream);
        }
        let sessions: Vec<Session> =
            processes.iter().map(|process| Session::of(process.pid().as_raw())).collect();
        reaper.guard(&sessions);
        output.attach(streams, files)?;
        for (local_rank, (gate, progress)) in gates.into_iter().enumerate() {
            let socket = socket.as_ref().filter(|_| local_rank == 0);
            gate.open(socket, progress.as_ref())
                .map_err(LaunchError::system(format!("let rank {local_rank} start")))?;
        }
        Ok(Self { part, processes, port, folder, oom_killer })
    }

    /// Returns the process numbers, by local rank.
    pub(super) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid().as_raw()).collect()
    }

    /// Returns the ranks that have ended since the last call. `first` is the first of these processes according to the
    /// system.
    pub(super) fn look(&mut self, first: Option<i32>) -> Vec<(usize, ExitStatus)> {
        let is_first = |process: &RankProcess| Some(process.pid().as_raw()) == first;
        let mut order: Vec<usize> = (0..self.processes.len()).collect();
        order.sort_by_key(|&local_rank| !is_first(&self.processes[local_rank]));
        let look = |local_rank: usize| Some((local_rank, self.processes[local_rank].look()?));
        order.into_iter().filter_map(look).collect()
    }

    /// Returns `true` if the only rank was stopped. Reports that once.
    pub(super) fn is_stopped(&self) -> bool {
        self.processes.first().is_some_and(RankProcess::is_stopped)
    }

    /// Sends ranks and their children a signal that requests their end.
    pub(super) fn ask(&self, local_ranks: &[usize], signal: Signal) {
        for process in local_ranks.iter().filter_map(|local_rank| self.processes.get(*local_rank)) {
            process.ask(signal);
        }
    }

    /// Sends a signal to all ranks and their children.
    pub(super) fn send(&self, signal: Signal) {
        self.processes.iter().for_each(|process| process.send(signal));
    }

    /// Returns the process states of these ranks.
    pub(super) fn states(&self, local_ranks: &[usize]) -> Vec<(usize, char)> {
        let pids = self.pids();
        let state = |local_rank: usize| {
            let pid = pids.get(local_rank).copied().unwrap_or_default();
            (local_rank, Stat::of(pid).map_or('?', |stat| stat.state))
        };
        local_ranks.iter().map(|local_rank| state(*local_rank)).collect()
    }

    /// Reaps the ranks, of which no process is left.
    pub(super) fn release(&mut self, reaper: &mut Reaper) {
        // First: a process number that has been released may be another process's next.
        reaper.guard(&[]);
        for process in &mut self.processes {
            process.reap();
        }
    }
}
