//! Table of the lines with an epoch, and the epoch at each step.

use brigade_rank_env::text::printable;
use brigade_track::Value;
use brigade_track::reader::Logged;
use indexmap::IndexMap;

/// Last values of each epoch, and the steps at which epochs begin and end.
#[derive(Debug, Clone, Default)]
pub(in crate::watch) struct Epochs {
    rows: Vec<Row>,
    columns: Vec<String>,
    /// Steps with their epochs, if epochs are logged as fractions.
    fractions: Vec<(f64, f64)>,
    /// Interval of the fractions that are kept.
    stride: u64,
    seen: u64,
    /// `true` if the last line belongs to the last epoch.
    pub(in crate::watch) is_open: bool,
}

/// Values of one epoch.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::watch) struct Row {
    pub(in crate::watch) epoch: f64,
    /// Number of the run's start that logged it first.
    pub(in crate::watch) start: u32,
    /// Values by the column's name; a later line of the same epoch takes precedence.
    pub(in crate::watch) values: IndexMap<String, Value>,
    first_step: f64,
    last_step: f64,
    /// Number of lines of the epoch.
    pub(in crate::watch) lines: u64,
}

impl Epochs {
    pub(super) fn log(
        &mut self,
        epoch: f64,
        step: f64,
        start: u32,
        values: &IndexMap<String, Logged>,
    ) {
        if epoch.fract() != 0.0 {
            self.log_fraction(epoch, step);
            return;
        }
        let place = match self.rows.last() {
            Some(last) if last.epoch < epoch => None,
            _ => self.rows.iter().rposition(|row| row.epoch == epoch),
        };
        let place = place.unwrap_or_else(|| {
            let (values, lines) = (IndexMap::new(), 0);
            self.rows.push(Row { epoch, start, values, first_step: step, last_step: step, lines });
            self.rows.len() - 1
        });
        self.is_open = true;
        let row = &mut self.rows[place];
        row.last_step = step;
        row.lines += 1;
        for (name, logged) in values.iter().filter(|(name, _)| *name != "epoch") {
            let Logged::Value(value) = logged else { continue };
            let name = printable(name);
            if !self.columns.contains(&name) {
                if self.columns.len() >= MOST_COLUMNS {
                    continue;
                }
                self.columns.push(name.clone());
            }
            let value = match value {
                Value::Text(text) => Value::Text(printable(text)),
                other => other.clone(),
            };
            row.values.insert(name, value);
        }
        if self.rows.len() > MOST {
            self.rows.drain(..MOST / 2);
        }
    }

    fn log_fraction(&mut self, epoch: f64, step: f64) {
        self.seen += 1;
        if self.seen.is_multiple_of(self.stride.max(1)) {
            self.fractions.push((step, epoch));
        }
        if self.fractions.len() > MOST {
            let mut odd = false;
            self.fractions.retain(|_| {
                odd = !odd;
                odd
            });
            self.stride = self.stride.max(1) * 2;
        }
    }

    pub(super) fn rewind(&mut self, step: f64) {
        self.rows.retain(|row| row.last_step < step);
        self.fractions.retain(|(at, _)| *at < step);
    }

    /// Returns the epochs in the order in which they were logged.
    pub(in crate::watch) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the names of the values, in the order of first occurrence.
    pub(in crate::watch) fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns the mapping from steps to epochs, as far as it is known.
    pub(in crate::watch) fn clock(&self) -> Clock {
        let mut knots = self.fractions.clone();
        if knots.is_empty() {
            // Either one line at the end of each epoch, or the epoch on each line.
            let is_summary = self.rows.iter().all(|row| row.lines <= 2);
            let from_0 = self.rows.first().is_some_and(|row| row.epoch == 0.0);
            knots.push((0.0, 0.0));
            knots.extend(self.rows.iter().map(|row| {
                if is_summary {
                    (row.last_step, row.epoch + f64::from(u8::from(from_0)))
                } else {
                    (row.first_step, row.epoch - f64::from(u8::from(!from_0)))
                }
            }));
        }
        let mut last = f64::NEG_INFINITY;
        knots.retain(|(step, _)| {
            let is_later = *step > last;
            last = last.max(*step);
            is_later
        });
        Clock(knots)
    }
}

/// Steps with the number of epochs done, in increasing order.
#[derive(Debug, Clone)]
pub(in crate::watch) struct Clock(Vec<(f64, f64)>);

impl Clock {
    /// Returns the number of epochs done at a step, with a fraction for the current one. Between and beyond the known
    /// steps, epochs have equal lengths. `None` if fewer than two steps are known.
    pub(in crate::watch) fn at(&self, step: f64) -> Option<f64> {
        let last = self.0.len().checked_sub(1).filter(|last| *last > 0)?;
        let after = self.0.partition_point(|(at, _)| *at < step).clamp(1, last);
        let ((from, begin), (to, end)) = (self.0[after - 1], self.0[after]);
        Some((begin + (step - from) / (to - from) * (end - begin)).max(0.0))
    }
}

/// Maximum number of epochs, and of fractions, that are kept.
const MOST: usize = 2048;
/// Maximum number of names of values in the table of epochs.
const MOST_COLUMNS: usize = 64;
