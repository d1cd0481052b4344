//! Epochs, and which of them is the best.

use brigade_track::Value;
use brigade_track::reader::Logged;
use indexmap::IndexMap;

use super::Mode;
use super::record::Record;

/// What was logged in lines with a whole number as `epoch`.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// By epoch, in the order of its first line.
    rows: Vec<(f64, Row)>,
    /// Names, in the order in which they came.
    pub(super) columns: Vec<String>,
}

/// One epoch; of values that were logged again, the last ones.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) step: Option<u64>,
    pub(super) values: IndexMap<String, Value>,
}

/// The epoch that a monitored value says is best, or the step where there are no epochs.
#[derive(Debug, PartialEq)]
pub(super) struct Best {
    pub(super) monitor: String,
    pub(super) mode: Mode,
    pub(super) value: f64,
    /// None where it was counted in steps.
    pub(super) epoch: Option<f64>,
    pub(super) step: Option<f64>,
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

    /// The numbers of one name, by epoch.
    pub(super) fn points(&self, name: &str) -> Vec<(f64, f64)> {
        let number = |(epoch, row): (f64, &Row)| Some((epoch, row.values.get(name)?.number()?));
        let mut points: Vec<(f64, f64)> = self.rows().filter_map(number).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    }

    /// The names that have numbers.
    pub(super) fn metrics(&self) -> impl Iterator<Item = &str> {
        let columns = self.columns.iter().map(String::as_str);
        columns.filter(|name| *name != TIME && !self.points(name).is_empty())
    }
}

impl Record {
    /// Finds the best epoch by a value, or the best step where no epoch has it; none where nothing was logged
    /// that could be monitored.
    ///
    /// # Errors
    /// For a value that was not logged: the message names those that were.
    pub(super) fn best(
        &self,
        monitor: Option<&str>,
        mode: Option<Mode>,
    ) -> Result<Option<Best>, String> {
        let Some(name) = monitor.or_else(|| self.default_monitor()) else { return Ok(None) };
        let mode = mode.unwrap_or_else(|| Mode::of(name));
        let of_epochs = self.epochs.points(name);
        let is_by_epoch = !of_epochs.is_empty();
        let points = match self.series.get(name) {
            _ if is_by_epoch => &of_epochs,
            Some(series) => &series.points,
            None => {
                let epochs = self.epochs.metrics();
                let mut names: Vec<&str> = epochs.collect();
                names.extend(self.series.keys().map(String::as_str));
                names.dedup();
                let names = match names.as_slice() {
                    [] => "it has logged no numbers".to_owned(),
                    names => format!("it has {}", names.join(", ")),
                };
                return Err(format!("the run has logged no {name:?} to monitor: {names}"));
            }
        };
        let mut best: Option<(f64, f64)> = None;
        for &(place, value) in points.iter().filter(|(_, value)| value.is_finite()) {
            if best.is_none_or(|(_, than)| mode.is_better(value, than)) {
                best = Some((place, value));
            }
        }
        Ok(best.map(|(place, value)| Best {
            monitor: name.to_owned(),
            mode,
            value,
            epoch: is_by_epoch.then_some(place),
            step: (!is_by_epoch).then_some(place),
        }))
    }

    /// The validation's loss, another loss that is not the training's, the first metric; or the loss of the steps.
    fn default_monitor(&self) -> Option<&str> {
        let metrics: Vec<&str> = self.epochs.metrics().collect();
        let is_valid = |name: &&&str| name.contains("loss") && !name.contains("train");
        let of_epochs = metrics
            .iter()
            .find(|name| **name == "valid_loss")
            .or_else(|| metrics.iter().find(is_valid))
            .or_else(|| metrics.iter().find(|name| !name.contains("train")))
            .or_else(|| metrics.first());
        let of_steps = || {
            let mut names = self.series.keys().map(String::as_str);
            names.find(|name| name.contains("loss"))
        };
        of_epochs.copied().or_else(of_steps)
    }
}

/// Seconds of an epoch, which are no metric.
pub(super) const TIME: &str = "time";
/// Columns that a table has room for.
const MOST_COLUMNS: usize = 30;
