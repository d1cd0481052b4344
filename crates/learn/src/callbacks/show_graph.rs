//! The graph of the losses, drawn again after each epoch.

use std::fmt;
use std::path::PathBuf;

use brigade_plot::{Chart, Plot};
use brigade_torch::Result;

use crate::callback::{Callback, Phases, Ranks, Step};
use crate::error::LearnError;
use crate::state::LearnerState;

/// Plots the training loss of each batch, smoothed, and the validation loss of each epoch, after each epoch, on rank 0
/// (fastai's `ShowGraphCallback`). The axes have the length of the whole fit from the beginning, and begin at 0.
///
/// It prints text unless it is made by [`ShowGraph::file`] or [`ShowGraph::with`].
///
/// ```
/// use brigade_learn::callbacks::ShowGraph;
///
/// let to_terminal = ShowGraph::new();
/// let to_file = ShowGraph::file("loss.svg");
/// let own = ShowGraph::with(|chart| Ok(println!("{} lines", chart.series.len())));
/// # let _ = (to_terminal, to_file, own);
/// ```
pub struct ShowGraph {
    target: Target,
}

type Show = Box<dyn FnMut(&Chart) -> Result<()>>;

enum Target {
    Terminal,
    File(PathBuf),
    Function(Show),
}

/// Columns and lines of the graph as text.
const TEXT: (usize, usize) = (80, 16);

impl ShowGraph {
    /// Makes a callback that prints the graph as text of 80 columns and 16 lines.
    #[must_use]
    pub fn new() -> Self {
        Self { target: Target::Terminal }
    }

    /// Makes a callback that writes the graph to a file after each epoch: `.png`, `.svg` or `.txt`. Its folder is
    /// created if it is missing. A path with another extension, or to which nothing can be written, is an error before
    /// the first batch.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { target: Target::File(path.into()) }
    }

    /// Makes a callback that passes the graph to a function, such as one that shows it in a notebook.
    #[must_use]
    pub fn with(show: impl FnMut(&Chart) -> Result<()> + 'static) -> Self {
        Self { target: Target::Function(Box::new(show)) }
    }
}

impl Default for ShowGraph {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ShowGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target: &dyn fmt::Debug = match &self.target {
            Target::Terminal => &"the terminal",
            Target::File(path) => path,
            Target::Function(_) => &"a function",
        };
        f.debug_tuple("ShowGraph").field(target).finish()
    }
}

impl Callback for ShowGraph {
    fn order(&self) -> i32 {
        65
    }

    fn ranks(&self) -> Ranks {
        Ranks::Main
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, _learner: &mut LearnerState) -> Step {
        if let Target::File(path) = &self.target {
            if let Some(folder) = path.parent().filter(|it| !it.as_os_str().is_empty()) {
                std::fs::create_dir_all(folder)
                    .map_err(LearnError::file("cannot make the folder", folder))?;
            }
            Chart::new("Loss").save(path).map_err(LearnError::from)?;
        }
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        let chart = graph(learner);
        match &mut self.target {
            Target::Terminal => learner.accelerator().print(chart.to_text(TEXT.0, TEXT.1)),
            Target::File(path) => chart.save(path).map_err(LearnError::from)?,
            Target::Function(show) => show(&chart)?,
        }
        Ok(())
    }
}

/// Returns a chart of the losses so far. Its horizontal axis has room for the remaining epochs, each with as many
/// batches as the first one.
fn graph(learner: &LearnerState) -> Chart {
    let recorder = learner.recorder();
    let first = recorder.iters().first().copied().unwrap_or(0);
    let left = learner.epochs().saturating_sub(recorder.iters().len());
    let batches = recorder.losses().len() + left * first;
    let valid = recorder.column("valid_loss").into_iter().flatten();
    let losses = recorder.smooth_losses().iter().copied().chain(valid);
    let highest = losses.filter(|loss| loss.is_finite()).fold(0.0, f64::max);
    let chart = recorder.plot_loss(0);
    let chart = if batches > 0 { chart.x_range(0.0, batches as f64) } else { chart };
    if highest > 0.0 { chart.y_range(0.0, highest) } else { chart }
}
