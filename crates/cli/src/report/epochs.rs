//! Values that a run has logged per epoch.

use brigade_track::Value;
use brigade_track::reader::Logged;
use indexmap::IndexMap;

/// Values of lines with a whole number as `epoch`.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// Rows by epoch, in the order of the first line of each.
    rows: Vec<(f64, Row)>,
    /// Names, in the order of first occurrence.
    pub(super) columns: Vec<String>,
}

/// Values of one epoch. Of repeated values the last one counts.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) step: Option<u64>,
    pub(super) values: IndexMap<String, Value>,
}

impl Epochs {
    pub(super) fn log(&mut self, epoch: f64, step: Option<u64>, values: &IndexMap<String, Logged>) {
        // Nearly always the last one.
        let place = self.rows.iter().rposition(|(known, _)| *known == epoch);
        let place = place.unwrap_or_else(|| {
            self.rows.push((epoch, Row::default()));
            self.rows.len() - 1
        });
        let Some((_, row)) = self.rows.get_mut(place) else { return };
        row.step = step.or(row.step);
        for (name, logged) in values.iter().filter(|(name, _)| *name != "epoch") {
            let Logged::Value(value) = logged else { continue };
            if !self.columns.contains(name) {
                if self.columns.len() >= MOST_COLUMNS {
                    continue;
                }
                self.columns.push(name.clone());
            }
            row.values.insert(name.clone(), value.clone());
        }
    }

    pub(super) fn rows(&self) -> impl DoubleEndedIterator<Item = (f64, &Row)> {
        self.rows.iter().map(|(epoch, row)| (*epoch, row))
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the numbers of one name, by epoch.
    pub(super) fn points(&self, name: &str) -> Vec<(f64, f64)> {
        let number = |(epoch, row): (f64, &Row)| Some((epoch, row.values.get(name)?.number()?));
        let mut points: Vec<(f64, f64)> = self.rows().filter_map(number).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    }

    /// Returns the names that have numbers.
    pub(super) fn metrics(&self) -> impl Iterator<Item = &str> {
        let columns = self.columns.iter().map(String::as_str);
        columns.filter(|name| *name != TIME && !self.points(name).is_empty())
    }
}

/// Name of the duration of an epoch in seconds, which is not a metric.
pub(super) const TIME: &str = "time";
/// Maximum number of columns of a table.
const MOST_COLUMNS: usize = 30;
