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
    /// Ranks that cannot be killed are left to the reaper: it must not be dismissed.
    pub(super) leaves_ranks: bool,
}

/// Processes are being killed, again and again: no descriptor says when a process that is not a child has ended.
struct Sweep {
    /// When to look again.
    at: Instant,
    /// The pause after that.
    pause: Duration,
}

impl Cleanup {
    /// Adopts the orphans of ranks from now on, and starts the reaper, which removes the folder `passing`, too.
    pub(super) fn start(plan: &LaunchPlan, passing: Option<&Path>) -> Result<Self, LaunchError> {
        let mut descendants = Descendants::adopt(&plan.agent_id)
            .map_err(LaunchError::system("adopt orphans of the ranks"))?;
        let reaper = Reaper::start(&plan.agent_id, passing)
            .map_err(LaunchError::system("start the reaper"))?;
        descendants.except(reaper.pid());
        Ok(Self { reaper, descendants, sweep: None, leaves_ranks: false })
    }

    /// A child of this process has ended. `ranks` are the process numbers of the present ranks.
    pub(super) fn forget(&mut self, ended: i32, ranks: &[i32]) {
        if self.descendants.forget(ended, ranks) {
            // An orphan of a rank. Of several that end at a time only one is named.
            self.descendants.forget_ended(ranks);
        }
    }

    /// Begins to kill what the ranks have left.
    pub(super) fn begin_sweep(&mut self) {
        self.sweep = Some(Sweep { at: Instant::now(), pause: FIRST_LOOK });
    }

    /// Ends the sweep, whether all is gone or not.
    pub(super) fn end_sweep(&mut self) {
        self.sweep = None;
    }

    /// When to call [`Cleanup::sweep`] again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.sweep.as_ref().map(|sweep| sweep.at)
    }

    /// Kills what is left, where that is due. Returns `true` once nothing is.
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
