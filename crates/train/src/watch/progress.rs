//! A bar that shows how far an epoch is, or plain lines where there is no terminal.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::accelerator::Accelerator;
use crate::watch::Watch;

/// An iterator with a bar on the main process's terminal. Made by [`Accelerator::progress`].
#[derive(Debug)]
pub struct Progress<I> {
    iterator: I,
    bar: ProgressBar,
    label: String,
    began: Instant,
    watch: Arc<Watch>,
    /// Whether plain lines are due: on the main process, when standard error is no terminal.
    lines: bool,
}

impl Accelerator {
    /// Shows how far the iterations over `items` are, on rank 0 only and on standard error: a bar on a
    /// terminal, below those of the loops around it; else a plain line now and then, the more rarely the
    /// longer the run, and none for a loop that is over soon.
    ///
    /// [`Accelerator::println`] and log lines do not tear the bar.
    pub fn progress<I: IntoIterator>(&self, items: I) -> Progress<I::IntoIter> {
        let iterator = items.into_iter();
        let length = iterator.size_hint().1.map(|length| length as u64);
        let watch = &self.watch;
        // On other ranks the screen is hidden, too, but there nobody wants lines either.
        let lines = self.is_main_process() && watch.screen.is_hidden();
        // Hidden until it is complete: each change of a visible bar draws it.
        let mut bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::hidden());
        let template = match length {
            Some(_) => {
                "{prefix}{wide_bar} {pos}/{len} [{elapsed_precise}<{eta_precise}, {per_sec}]"
            }
            None => "{prefix}{spinner} {pos} [{elapsed_precise}, {per_sec}]",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        if !watch.screen.is_hidden() {
            bar = watch.screen.add(bar);
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress {
            iterator,
            bar,
            label: String::new(),
            began: Instant::now(),
            watch: Arc::clone(watch),
            lines,
        }
    }
}

impl<I> Progress<I> {
    /// What stands before the bar: `train`, `epoch 3`.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self.bar.set_prefix(format!("{} ", self.label));
        self
    }

    fn line(&self, now: Instant) {
        let due = self.watch.pace.lock().unwrap_or_else(PoisonError::into_inner).due(now);
        if due {
            let elapsed = now.duration_since(self.began);
            self.watch.say(&line(&self.label, self.bar.position(), self.bar.length(), elapsed));
        }
    }
}

impl<I: Iterator> Iterator for Progress<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let item = self.iterator.next();
        match item {
            Some(_) => self.bar.inc(1),
            None => self.bar.finish_and_clear(),
        }
        if self.lines {
            self.line(Instant::now());
        }
        item
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.iterator.size_hint()
    }
}

impl<I> Drop for Progress<I> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        // Else a run of many epochs collects the bars of all of them.
        self.watch.screen.remove(&self.bar);
    }
}

/// When a line is due: 10 s after the one before, later in a run a tenth of its time so far, and at most
/// 5 minutes. So a day gives some 300 lines.
#[derive(Debug)]
pub(crate) struct Pace {
    began: Instant,
    last: Instant,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Self { began: now, last: now }
    }

    fn due(&mut self, now: Instant) -> bool {
        let apart = (now.duration_since(self.began) / 10).clamp(SHORTEST, LONGEST);
        let due = now.duration_since(self.last) >= apart;
        if due {
            self.last = now;
        }
        due
    }
}

fn line(label: &str, done: u64, all: Option<u64>, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    let rate = if seconds > 0.0 { done as f64 / seconds } else { 0.0 };
    let label = if label.is_empty() { String::new() } else { format!("{label}: ") };
    match all {
        Some(all) if all > 0 => {
            let left = if rate > 0.0 { all.saturating_sub(done) as f64 / rate } else { 0.0 };
            let percent = 100.0 * done as f64 / all as f64;
            format!("{label}{done}/{all} ({percent:.0} %), {rate:.1}/s, {} left", clock(left))
        }
        _ => format!("{label}{done}, {rate:.1}/s, {} so far", clock(seconds)),
    }
}

/// `1:02:03`, or `02:03`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.min(1e9) as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes:02}:{seconds:02}")
    }
}

const SHORTEST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_more_and_more_rarely() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let due: Vec<u64> = (0..200_000u64)
            .filter(|second| pace.due(began + Duration::from_secs(*second)))
            .collect();
        assert_eq!(due[..4], [10, 20, 30, 40]);
        assert!(due.windows(2).all(|pair| (10..=301).contains(&(pair[1] - pair[0]))));
        assert_eq!(due[due.len() - 1] - due[due.len() - 2], 300);
        assert!(due.len() < 720, "{}", due.len());
    }

    #[test]
    fn a_line_says_how_far_and_how_long() {
        let seconds = Duration::from_secs;
        assert_eq!(
            line("train", 120, Some(938), seconds(60)),
            "train: 120/938 (13 %), 2.0/s, 06:49 left"
        );
        assert_eq!(line("", 7200, None, seconds(3600)), "7200, 2.0/s, 1:00:00 so far");
        assert_eq!(line("", 0, Some(5), seconds(0)), "0/5 (0 %), 0.0/s, 00:00 left");
    }
}
