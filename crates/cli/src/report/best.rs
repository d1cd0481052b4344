//! Selection of a run's best epoch.

use super::Mode;
use super::record::Record;

/// Best epoch by a monitored value, or the best step if there are no epochs.
#[derive(Debug, PartialEq)]
pub(super) struct Best {
    pub(super) monitor: String,
    pub(super) mode: Mode,
    pub(super) value: f64,
    /// Number of the epoch, or `None` if steps were counted.
    pub(super) epoch: Option<f64>,
    pub(super) step: Option<f64>,
}

impl Record {
    /// Finds the best epoch by a value, or the best step if no epoch has the value. Returns `None` if nothing was
    /// logged that could be monitored.
    ///
    /// # Errors
    /// Fails for a value that was not logged: the message names those that were.
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

    /// Returns the validation loss, or else another loss except the training loss, the first metric, or the loss of the
    /// steps.
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
