//! A bar that shows the progress of an epoch, or plain lines without a terminal.

use std::sync::Arc;
use std::time::{Duration, Instant};

use brigade_rank_env::ProgressReport;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use crate::watch::Watch;

/// An iterator that shows its progress on the main process's terminal. Made by [`crate::Accelerator::progress`].
#[derive(Debug)]
pub struct Progress<I> {
    iterator: I,
    bar: ProgressBar,
    label: String,
    began: Instant,
    watch: Arc<Watch>,
    /// `true` if plain lines are printed: on the main process, if standard error is not a terminal.
    lines: bool,
    values: ProgressValues,
    /// Time of the last report to the launcher.
    reported: Option<Instant>,
}

/// Values shown beside a progress bar, which the body of the loop sets. Made by [`Progress::values`].
#[derive(Debug, Clone, Default)]
pub struct ProgressValues(Arc<Mutex<Values>>);

#[derive(Debug, Default)]
struct Values {
    named: Vec<(String, String)>,
    throughput: Option<(f64, String)>,
}

impl<I: Iterator> Progress<I> {
    pub(crate) fn new(watch: &Arc<Watch>, items: impl IntoIterator<IntoIter = I>) -> Self {
        let iterator = items.into_iter();
        let length = iterator.size_hint().1.map(|length| length as u64);
        // Other ranks hide the bar, too, and print no lines.
        let is_told = watch.launcher.is_some();
        let lines = watch.rank == 0 && watch.screen.is_hidden() && !is_told;
        // Hidden until it is complete: each change of a visible bar draws it.
        let mut bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::hidden());
        let template = match length {
            Some(_) => {
                "{prefix}{wide_bar} {pos}/{len} [{elapsed_precise}<{eta_precise}, {per_sec}]{msg}"
            }
            None => "{prefix}{spinner} {pos} [{elapsed_precise}, {per_sec}]{msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        if !watch.screen.is_hidden() && !is_told {
            bar = watch.screen.add(bar);
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self {
            iterator,
            bar,
            label: String::new(),
            began: Instant::now(),
            watch: Arc::clone(watch),
            lines,
            values: ProgressValues::default(),
            reported: None,
        }
    }
}

impl<I> Progress<I> {
    /// Sets the label shown before the bar, such as `train` or `epoch 3`. Defaults to no label.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self.bar.set_prefix(format!("{} ", self.label));
        self
    }

    /// Returns a handle of the values shown beside the bar.
    #[must_use]
    pub fn values(&self) -> ProgressValues {
        self.values.clone()
    }

    fn report(&self, now: Instant) -> ProgressReport {
        let seconds = now.duration_since(self.began).as_secs_f64();
        let lately = self.bar.per_sec();
        let whole = if seconds > 0.0 { self.bar.position() as f64 / seconds } else { 0.0 };
        let values = self.values.0.lock();
        ProgressReport {
            label: self.label.clone(),
            position: self.bar.position(),
            length: self.bar.length(),
            rate: match self.bar.position() {
                // The first item is counted as soon as it is returned, so it has no rate yet.
                0 | 1 => 0.0,
                _ if self.watch.launcher.is_some() && lately > 0.0 => lately,
                _ => whole,
            },
            throughput: values.throughput.clone(),
            values: values.named.clone(),
            done: false,
        }
    }

    fn line(&self, now: Instant) {
        let due = self.watch.pace.lock().due(now);
        if due {
            self.watch.print_line(&self.report(now).text());
        }
    }

    fn report_to_launcher(&mut self, now: Instant) {
        let is_early = self.reported.is_some_and(|last| now.duration_since(last) < BETWEEN_REPORTS);
        if let Some(launcher) = self.watch.launcher.as_ref().filter(|_| !is_early) {
            self.reported = Some(now);
            launcher.send(&self.report(now));
        }
    }
}

impl ProgressValues {
    /// Shows a value under this name, such as a loss or a learning rate, and replaces the one before.
    pub fn set(&self, name: &str, value: f64) {
        let text = match value.abs() {
            size if size != 0.0 && !(1e-3..1e5).contains(&size) => format!("{value:.2e}"),
            _ => format!("{value:.4}"),
        };
        let mut values = self.0.lock();
        match values.named.iter_mut().find(|(known, _)| known == name) {
            Some((_, shown)) => *shown = text,
            None => values.named.push((name.to_owned(), text)),
        }
    }

    /// Shows a throughput of this rank in place of iterations per second, such as `1200.0, "samples"`. The launcher
    /// adds up the throughputs of all ranks.
    pub fn rate(&self, per_second: f64, unit: &str) {
        let mut values = self.0.lock();
        values.throughput = Some((per_second, unit.to_owned()));
    }

    /// Returns the values as they are shown behind a bar.
    fn message(&self) -> String {
        let values = self.0.lock();
        let rate = values.throughput.iter().map(|(rate, unit)| format!(", {rate:.1} {unit}/s"));
        let named = values.named.iter().map(|(name, value)| format!(", {name} {value}"));
        rate.chain(named).collect()
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
        } else if self.watch.launcher.is_some() {
            self.report_to_launcher(Instant::now());
        } else if !self.bar.is_hidden() {
            let message = self.values.message();
            if !message.is_empty() {
                self.bar.set_message(message);
            }
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
        if let Some(launcher) = &self.watch.launcher {
            launcher.send(&ProgressReport { done: true, ..self.report(Instant::now()) });
        }
        // Otherwise the bars of all epochs stay in memory.
        self.watch.screen.remove(&self.bar);
    }
}

/// Minimum interval between two reports.
const BETWEEN_REPORTS: Duration = Duration::from_millis(200);
