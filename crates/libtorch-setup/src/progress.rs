//! Progress display of a long step: a bar on a terminal, or occasional lines in a log.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Progress through a known number of bytes. Writes to standard error.
#[derive(Debug)]
pub(crate) enum Progress {
    Bar(ProgressBar),
    Lines { label: String, total: u64, next_percent: u64 },
}

impl Progress {
    pub(crate) fn new(label: &str, total: u64) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines { label: label.to_owned(), total, next_percent: LINE_PERCENT };
        }
        let bar = ProgressBar::new(total).with_message(label.to_owned());
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self::Bar(bar)
    }

    /// Sets the number of bytes done so far. More than the total counts as the total.
    pub(crate) fn set(&mut self, done: u64) {
        match self {
            Self::Bar(bar) => bar.set_position(done.min(bar.length().unwrap_or(done))),
            Self::Lines { label, total, next_percent } => {
                // Small steps end before a line about them could be read.
                if *total < LINES_FROM_BYTES {
                    return;
                }
                let percent = done.min(*total) * 100 / *total;
                if percent >= *next_percent {
                    eprintln!("{label}: {percent} %");
                    *next_percent = (percent / LINE_PERCENT + 1) * LINE_PERCENT;
                }
            }
        }
    }

    /// Removes the bar from the screen.
    pub(crate) fn finish(self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Formats a size as "526.6 MB": decimal units, as in pip and on disks.
pub(crate) fn megabytes(bytes: u64) -> String {
    let millions = bytes as f64 / 1e6;
    if millions < 1000.0 {
        format!("{millions:.1} MB")
    } else {
        format!("{:.2} GB", millions / 1e3)
    }
}

const TEMPLATE: &str = "{msg:40} {bar:30} {bytes:>10} / {total_bytes:10} {eta:>4}";
const LINE_PERCENT: u64 = 20;
const LINES_FROM_BYTES: u64 = 20_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_decimal() {
        assert_eq!(megabytes(526_574_961), "526.6 MB");
        assert_eq!(megabytes(2_513_398_184), "2.51 GB");
        assert_eq!(megabytes(134_086), "0.1 MB");
    }
}
