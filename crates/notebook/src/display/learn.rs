//! Display of the results of a Learner.

use std::time::Duration;

use brigade_learn::callbacks::ShowGraph;
use brigade_learn::interpretation::ClassInterpretation;
use brigade_learn::{EpochRow, Learner, LrFinding, Recorder, Suggestion};

use super::table::Table;
use super::{CellDisplay, Content};

/// Shows the table of the epochs of the last fit.
impl CellDisplay for Learner {
    fn cell_content(&self) -> Content {
        self.recorder().cell_content()
    }
}

/// Shows the table of epochs, as fastai's.
impl CellDisplay for Recorder {
    fn cell_content(&self) -> Content {
        if self.rows().is_empty() {
            return Content::new("no epoch was trained yet");
        }
        let names = self.names().iter().map(String::as_str);
        let names = std::iter::once("epoch").chain(names).chain(["time"]);
        let table =
            Table::new(names.map(str::to_owned).collect(), self.rows().iter().map(row).collect());
        Content::new(table.text()).html(table.html())
    }
}

fn row(row: &EpochRow) -> Vec<String> {
    let value = |it: &Option<f64>| it.map_or_else(String::new, |value| format!("{value:.6}"));
    let mut texts = vec![row.epoch.to_string()];
    texts.extend(row.values.iter().map(value));
    texts.push(time(row.time));
    texts
}

/// Formats a time as fastai does: minutes and seconds, preceded by hours if there are any.
fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = format!("{minutes:02}:{:02}", seconds % 60);
    if hours > 0 { format!("{hours}:{rest}") } else { rest }
}

/// Makes a callback that plots the losses in the cell after each epoch: fastai's `ShowGraphCallback`.
///
/// ```
/// let callback = brigade_notebook::display::show_graph();
/// # let _ = callback;
/// ```
#[must_use]
pub fn show_graph() -> ShowGraph {
    ShowGraph::with(|chart| {
        chart.evcxr_display();
        Ok(())
    })
}

/// Shows the losses by the learning rate, with all suggestions that the curve allows.
impl CellDisplay for LrFinding {
    fn cell_content(&self) -> Content {
        let suggestions: Vec<String> = Suggestion::ALL
            .into_iter()
            .filter_map(|rule| Some(format!("{} {:.2e}", rule.name(), self.suggest(rule).ok()?)))
            .collect();
        let line = if suggestions.is_empty() {
            "no suggestion: begin at a smaller rate, or take more steps".to_owned()
        } else {
            format!("suggested: {}", suggestions.join(", "))
        };
        Content::stacked([self.plot(&Suggestion::ALL).cell_content(), Content::new(line)])
    }
}

/// Shows the confusion matrix, and precision, recall and F1 of each class.
impl CellDisplay for ClassInterpretation {
    fn cell_content(&self) -> Content {
        let matrix = self.plot_confusion_matrix(false).cell_content();
        Content::stacked([matrix, Content::new(self.classification_report())])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_fastai() {
        for (seconds, text) in
            [(0.4, "00:00"), (59.6, "01:00"), (754.0, "12:34"), (3671.0, "1:01:11")]
        {
            assert_eq!(time(Duration::from_secs_f64(seconds)), text);
        }
    }
}
