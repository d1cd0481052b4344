//! Progress bars and the table of epochs.

use std::iter::{RepeatN, repeat_n};
use std::time::{Duration, Instant};

use brigade_rank_env::text::escaped;
use brigade_train::Progress as Bar;

use crate::callback::{Callback, Step};
use crate::recorder::EpochRow;
use crate::state::LearnerState;

/// Shows the progress of each epoch, on a terminal as a bar, elsewhere as a line at intervals, and prints a row of the
/// table of epochs after each (fastai's `ProgressCallback`). Every fit has one unless the Learner is
/// [quiet](crate::Learner::quiet).
#[derive(Debug, Default)]
pub struct Progress {
    bar: Option<Bar<RepeatN<()>>>,
    shown: Option<Instant>,
    smooth: Option<f64>,
}

/// Minimum interval between two reads of the loss, because each waits for the device.
const BETWEEN_LOSSES: Duration = Duration::from_millis(500);

impl Progress {
    /// Makes the callback, which has no options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn begin(&mut self, learner: &LearnerState, what: &str) {
        let items = repeat_n((), learner.batches());
        let label = format!("epoch {}/{} {what}", learner.epoch() + 1, learner.epochs());
        self.bar = Some(learner.accelerator().progress(items).label(label));
    }
}

impl Callback for Progress {
    fn order(&self) -> i32 {
        60
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.smooth = None;
        let names = learner.recorder().names();
        learner.accelerator().println(header(names));
        Ok(())
    }

    fn before_train(&mut self, learner: &mut LearnerState) -> Step {
        self.begin(learner, "train");
        Ok(())
    }

    fn before_validate(&mut self, learner: &mut LearnerState) -> Step {
        self.begin(learner, "validate");
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        let Some(bar) = &mut self.bar else { return Ok(()) };
        let due = self.shown.is_none_or(|last| last.elapsed() >= BETWEEN_LOSSES);
        if learner.is_training() && due {
            self.shown = Some(Instant::now());
            let smooth = learner.recorder().smooth_losses().last().copied();
            let loss = match (smooth, learner.batch_loss()) {
                (Some(loss), _) => Some(loss),
                (None, Some(loss)) => Some(loss.f_double_value(&[])?),
                (None, None) => None,
            };
            if let Some(loss) = loss {
                bar.values().set("loss", loss);
            }
        }
        bar.next();
        Ok(())
    }

    fn after_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.bar = None;
        Ok(())
    }

    fn after_validate(&mut self, _learner: &mut LearnerState) -> Step {
        self.bar = None;
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        self.bar = None;
        if let Some(row) = learner.recorder().rows().last() {
            learner.accelerator().println(line(learner.recorder().names(), row));
        }
        Ok(())
    }

    fn after_fit(&mut self, _learner: &mut LearnerState) -> Step {
        self.bar = None;
        Ok(())
    }
}

fn header(names: &[String]) -> String {
    let names = std::iter::once("epoch").chain(names.iter().map(String::as_str));
    let names = names.chain(["time"]).map(|name| escaped(name).to_string());
    names.map(|name| column(&name, &name)).collect()
}

fn line(names: &[String], row: &EpochRow) -> String {
    let mut text = column("epoch", &row.epoch.to_string());
    for (name, value) in names.iter().zip(&row.values) {
        let value = value.map_or_else(String::new, |value| format!("{value:.6}"));
        text += &column(&escaped(name).to_string(), &value);
    }
    text + &column("time", &time(row.time))
}

/// Formats a column as wide as fastai's: two more than the name and at least ten.
fn column(name: &str, text: &str) -> String {
    format!("{text:<width$}", width = name.len().max(8) + 2)
}

fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{:02}", seconds % 60)
    } else {
        format!("{minutes:02}:{:02}", seconds % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_metrics_cannot_command_a_terminal() {
        let names = ["train_loss".to_owned(), "recall of \x1b]52;c;cm0gLXJm\x07\n".to_owned()];
        let header = header(&names);
        assert_eq!(
            header,
            "epoch     train_loss  recall of \\u{1b}]52;c;cm0gLXJm\\u{7}\\n  time      "
        );
        let values = vec![Some(0.5), Some(0.25)];
        let line = line(&names, &EpochRow { epoch: 0, values, time: Duration::from_secs(61) });
        assert_eq!(line.len(), header.len());
        assert_eq!(line.find("0.250000"), header.find("recall"), "{header}\n{line}");
    }
}
