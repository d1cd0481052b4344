//! Cleanup of processes that ranks leave behind on this host: after each attempt, and by the reaper after this process.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::leftovers::Descendants;
use crate::reaper::Reaper;
use crate::{LaunchError, LaunchPlan};

/// Kills the processes that ranks leave behind.
pub(super) struct Cleanup {
    pub(super) reaper: Reaper,
    descendants: Descendants,
    sweep: Option<Sweep>,
    /// `true` if ranks that cannot be killed are left to the reaper, so that it must not be dismissed.
    pub(super) leaves_ranks: bool,
}

/// Repeated killing of leftover processes: no descriptor becomes readable when a process that is not a child ends.
struct Sweep {
    /// Time of the next search.
    at: Instant,
    /// Pause after the next attempt.
    pause: Duration,
}

impl Cleanup {
    /// Becomes the parent of the ranks' orphans from now on, and starts the reaper, which also removes the folder
    /// `passing`.
    pub(super) fn start(plan: &LaunchPlan, passing: Option<&Path>) -> Result<Self, LaunchError> {
        let mut descendants = Descendants::adopt(&plan.agent_id)
            .map_err(LaunchError::system("adopt orphans of the ranks"))?;
        let reaper = Reaper::start(&plan.agent_id, passing)
            .map_err(LaunchError::system("start the reaper"))?;
        descendants.except(reaper.pid());
        Ok(Self { reaper, descendants, sweep: None, leaves_ranks: false })
    }

    /// Reaps an orphan of a rank after a child of this process has ended. `ranks` are the process numbers of the
    /// present ranks.
    pub(super) fn forget(&mut self, ended: i32, ranks: &[i32]) {
        if self.descendants.forget(ended, ranks) {
            // An orphan of a rank. When several end at the same time, only one is named.
            self.descendants.forget_ended(ranks);
        }
    }

    /// Begins to kill what the ranks have left.
    pub(super) fn begin_sweep(&mut self) {
        self.sweep = Some(Sweep { at: Instant::now(), pause: FIRST_LOOK });
    }

    /// Ends the sweep, even if processes are left.
    pub(super) fn end_sweep(&mut self) {
        self.sweep = None;
    }

    /// Returns the time at which to call [`Cleanup::sweep`] again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.sweep.as_ref().map(|sweep| sweep.at)
    }

    /// Kills leftover processes if a search is due. Returns `true` once none is left.
    pub(super) fn sweep(&mut self, ranks: &[i32]) -> bool {
        let now = Instant::now();
        let Some(sweep) = self.sweep.as_mut().filter(|sweep| sweep.at <= now) else { return false };
        if self.descendants.kill_once(ranks) == 0 {
            self.sweep = None;
            return true;
        }
        *sweep = Sweep { at: now + sweep.pause, pause: (sweep.pause * 3 / 2).min(MAX_LOOK) };
        false
    }
}

const FIRST_LOOK: Duration = Duration::from_millis(2);
const MAX_LOOK: Duration = Duration::from_millis(50);
