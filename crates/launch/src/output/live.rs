//! Progress line of all ranks: below their output on a terminal, else a plain line at intervals.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::time::{Duration, Instant};

use brigade_rank_env::{Pace, ProgressReport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::color::is_users_terminal;

/// Last progress report of each rank.
pub(crate) type Reports = BTreeMap<usize, ProgressReport>;

/// Progress line on this process's stderr.
#[derive(Debug)]
pub(crate) struct LiveLine {
    /// `true` if the stream is a terminal, so that the line can be redrawn.
    is_terminal: bool,
    /// Progress bar, while there is progress to show.
    bar: Option<ProgressBar>,
    /// Schedule of plain lines.
    pace: Pace,
    quiet: bool,
}

impl LiveLine {
    pub(crate) fn new(quiet: bool) -> Self {
        let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
        let is_terminal = !is_dumb && is_users_terminal(&io::stderr());
        Self { is_terminal, bar: None, pace: Pace::new(Instant::now()), quiet }
    }

    /// Writes lines of the ranks while the progress line is hidden.
    pub(crate) fn around<T>(&self, write: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Shows the reports. Returns a plain line if one is due and the output is not a terminal.
    pub(crate) fn show(&mut self, reports: &Reports) -> Option<String> {
        let Some(text) = summary(reports).filter(|_| !self.quiet) else {
            self.clear();
            return None;
        };
        if !self.is_terminal {
            return self.pace.due(Instant::now()).then(|| format!("brigade: {text}\n"));
        }
        let bar = || {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{wide_msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        };
        self.bar.get_or_insert_with(bar).set_message(text);
        None
    }

    /// Removes the line.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Summarizes the reports: the progress of a single rank, or of several the total throughput and the slowest rank.
fn summary(reports: &Reports) -> Option<String> {
    let (_, first) = reports.first_key_value()?;
    let mut text = first.text();
    if reports.len() > 1 {
        let unit = first.throughput().1;
        let same = reports.values().filter(|report| report.throughput().1 == unit);
        let sum: f64 = same.map(|report| report.throughput().0).sum();
        text.push_str(&format!(" | {} ranks", reports.len()));
        // Unknown before the first item is done.
        if sum > 0.0 {
            text.push_str(&format!(" {sum:.1} {unit}/s"));
        }
        if let Some((rank, report)) = slowest(reports, &first.label) {
            text.push_str(&format!(
                ", slowest rank {rank}: {}{}",
                report.position,
                report.length.map_or_else(String::new, |length| format!("/{length}")),
            ));
        }
    }
    Some(text)
}

/// Returns the slowest rank of those in the same loop: the one with the least progress, and among several the one with
/// the lowest rate.
fn slowest<'a>(reports: &'a Reports, label: &str) -> Option<(usize, &'a ProgressReport)> {
    let key = |report: &ProgressReport| {
        (report.fraction().unwrap_or(0.0), report.position, report.throughput().0)
    };
    let in_loop = reports.iter().filter(|(_, report)| report.label == label);
    let least = in_loop.min_by(|(_, a), (_, b)| {
        let (a, b) = (key(a), key(b));
        a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.total_cmp(&b.2))
    });
    least.map(|(rank, report)| (*rank, report))
}

/// Minimum interval between two redraws of the line.
pub(crate) const BETWEEN_DRAWS: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn report(position: u64, rate: f64) -> ProgressReport {
        let (label, length) = ("epoch 3".to_owned(), Some(100));
        ProgressReport { label, position, length, rate, ..ProgressReport::default() }
    }

    #[test]
    fn one_line_for_all() {
        assert_eq!(summary(&Reports::new()), None);
        let mut reports = Reports::from([(0, report(50, 10.0))]);
        let alone = "epoch 3: 50/100 (50 %), 10.0 it/s, 00:05 left";
        assert_eq!(summary(&reports).unwrap(), alone);
        reports.insert(1, report(50, 9.0));
        reports.insert(2, report(49, 11.0));
        let shown = summary(&reports).unwrap();
        assert_eq!(shown, format!("{alone} | 3 ranks 30.0 it/s, slowest rank 2: 49/100"));
        reports.insert(2, report(50, 11.0));
        assert!(summary(&reports).unwrap().ends_with("slowest rank 1: 50/100"));
        // A rank with another unit is not added up, and a rank in another loop not compared.
        let other = ProgressReport { throughput: Some((7.0, "tokens".into())), ..report(50, 1.0) };
        reports.insert(3, ProgressReport { label: "read".into(), ..other });
        assert!(summary(&reports).unwrap().contains("| 4 ranks 30.0 it/s, slowest rank 1"));
    }

    #[test]
    fn where_there_is_no_terminal_lines_are_rare() {
        let mut line = LiveLine {
            is_terminal: false,
            bar: None,
            pace: Pace::new(Instant::now()),
            quiet: false,
        };
        let reports = Reports::from([(0, report(50, 10.0))]);
        assert_eq!(line.show(&reports), None, "none for a loop that is over soon");
        if let Some(before) = Instant::now().checked_sub(Duration::from_secs(11)) {
            line.pace = Pace::new(before);
            assert!(line.show(&reports).unwrap().starts_with("brigade: epoch 3: 50/100"));
            assert_eq!(line.show(&reports), None);
            (line.pace, line.quiet) = (Pace::new(before), true);
            assert_eq!(line.show(&reports), None);
        }
    }
}
