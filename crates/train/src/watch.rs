//! A run's output: progress bars, log lines, trackers. Shared by all clones of an
//! Accelerator.

pub(crate) mod log;
pub(crate) mod meter;
pub(crate) mod profile;
pub(crate) mod progress;
pub(crate) mod tracking;

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use brigade_rank_env::{Pace, ProgressPipe};
use brigade_track::{JsonLines, Tracker};
use indicatif::{MultiProgress, ProgressDrawTarget};
use parking_lot::Mutex;

use crate::processes::Processes;
use crate::watch::tracking::Trackers;

/// The trackers and the terminal of one process.
pub(crate) struct Watch {
    pub(crate) rank: usize,
    /// All progress bars of the process, so that they do not overwrite each other.
    pub(crate) screen: MultiProgress,
    /// Pipe through which `brigade launch` receives this rank's progress.
    pub(crate) launcher: Option<ProgressPipe>,
    /// Time of the next plain progress line, without a terminal.
    pub(crate) pace: Mutex<Pace>,
    pub(crate) trackers: Trackers,
}

/// Settings of [`Watch`] that the builder sets.
#[derive(Default)]
pub(crate) struct WatchOptions {
    pub(crate) trackers: Vec<Box<dyn Tracker>>,
    pub(crate) logging_dir: Option<PathBuf>,
}

impl WatchOptions {
    /// Returns `true` if neither a tracker nor a logging folder was set.
    pub(crate) fn is_default(&self) -> bool {
        self.trackers.is_empty() && self.logging_dir.is_none()
    }
}

impl Watch {
    pub(crate) fn new(options: WatchOptions, processes: &Processes) -> Self {
        let rank = processes.process_index();
        let mut trackers = options.trackers;
        if trackers.is_empty() {
            let folder = options.logging_dir.unwrap_or_else(|| PathBuf::from(FOLDER));
            trackers.push(Box::new(JsonLines::new(folder)));
        }
        let target = if rank == 0 {
            // The bars hide themselves if standard error is not a terminal.
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            rank,
            screen: MultiProgress::with_draw_target(target),
            launcher: ProgressPipe::from_env(),
            pace: Mutex::new(Pace::new(Instant::now())),
            trackers: Trackers::new(processes, trackers),
        }
    }

    /// Writes to standard output, while the bars are hidden.
    pub(crate) fn print(&self, text: fmt::Arguments<'_>) {
        self.screen.suspend(|| {
            let mut out = io::stdout().lock();
            // A closed pipe (`| head`) must not end the training.
            let _ = out.write_fmt(text).and_then(|()| out.flush());
        });
    }

    /// Writes a line to standard error in one call, while the bars are hidden.
    pub(crate) fn print_line(&self, line: &str) {
        self.screen.suspend(|| {
            let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
        });
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl fmt::Debug for WatchOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.trackers.iter().map(|tracker| tracker.name()).collect();
        f.debug_struct("WatchOptions")
            .field("trackers", &names)
            .field("logging_dir", &self.logging_dir)
            .finish()
    }
}

/// Default folder of trackers.
pub(crate) const FOLDER: &str = "runs";
