//! Display of a cell's last expression: tables, images and plots.
//!
//! evcxr calls `evcxr_display` on the last expression of a cell if it has such a method; [`CellDisplay`] gives it
//! to tensors, plots and, with the feature `learn`, what a Learner returns:
//!
//! | Value | Shown as |
//! | --- | --- |
//! | `Tensor` | shape, kind and device, with its values or, of a large one, a corner and statistics |
//! | [`images`]`(&tensor)` | pictures with their labels |
//! | [`curve`]`("Loss", &losses)` | a line for each list of numbers |
//! | [`schedule_plot`]`(&schedule, steps)` | learning rate and momentum of each step |
//! | [`Chart`], [`Heatmap`], [`Gallery`], [`Grid`] of `brigade-plot` | a picture |
//! | `Learner`, `Recorder` | the table of epochs |
//! | `LrFinding` | the curve with its suggestions |
//! | `ClassInterpretation` | the confusion matrix, and the report of each class |
//! | `Ok(value)`, `(a, b)`, `vec![a, b]` | their values |
//!
//! ```
//! use brigade_notebook::prelude::*;
//! use tch::Tensor;
//!
//! let tensor = Tensor::from_slice(&[1i64, 2, 3]);
//! assert!(tensor.cell_content().plain().starts_with("Tensor [3], Int64, cpu"));
//! tensor.evcxr_display(); // What evcxr does where `tensor` ends a cell.
//! ```
//!
//! Outside of a notebook, and in the ranks of a notebook, the same call prints text.

mod content;
mod curves;
mod images;
#[cfg(feature = "learn")]
mod learn;
mod numbers;
mod table;
mod tensor;

use std::env;
use std::fmt;
use std::io::{self, Write};

use brigade_plot::{Chart, Gallery, Grid, Heatmap, Plot};

use crate::call;

pub use content::Content;
pub use curves::{Curves, curve, schedule_plot};
pub use images::{Images, ImagesError, images};
#[cfg(feature = "learn")]
pub use learn::show_graph;

/// A value that a notebook's cell displays as a table or a picture.
///
/// A type defined in a notebook sets its own content with [`cell_content`](Self::cell_content):
///
/// ```
/// use brigade_notebook::display::{CellDisplay, Content};
///
/// struct Score(f64);
///
/// impl CellDisplay for Score {
///     fn cell_content(&self) -> Content {
///         Content::new(format!("score {}", self.0)).html(format!("<b>{}</b>", self.0))
///     }
/// }
///
/// Score(0.5).evcxr_display();
/// ```
pub trait CellDisplay {
    /// Returns the content of the cell in all its representations.
    #[must_use]
    fn cell_content(&self) -> Content;

    /// Prints the value for the cell: in each of its forms if evcxr reads them, else as text.
    ///
    /// Of several calls in a cell evcxr shows the last; a tuple shows several values.
    fn evcxr_display(&self) {
        let content = self.cell_content();
        let mut out = io::stdout().lock();
        let written =
            if is_cell() { content.write_to(&mut out) } else { content.write_plain(&mut out) };
        // Where standard output is closed, an error cannot be reported either.
        let _ = written.and_then(|()| out.flush());
    }
}

/// Returns `true` if evcxr reads this process's output. A rank inherits evcxr's variable, but its lines pass through
/// the launcher, which prefixes them.
fn is_cell() -> bool {
    env::var_os("EVCXR_IS_RUNTIME").is_some() && env::var_os(call::FOLDER).is_none()
}

impl CellDisplay for Content {
    fn cell_content(&self) -> Content {
        self.clone()
    }
}

/// Shows nothing, as a cell that ends with `;`.
impl CellDisplay for () {
    fn cell_content(&self) -> Content {
        Content::default()
    }
}

/// Shows the value, or the error's message.
impl<T: CellDisplay, E: fmt::Display> CellDisplay for Result<T, E> {
    fn cell_content(&self) -> Content {
        match self {
            Ok(value) => value.cell_content(),
            // The whole chain of an anyhow::Error.
            Err(error) => Content::new(format!("Error: {error:#}")),
        }
    }
}

/// Shows each value below the one before.
impl<T: CellDisplay> CellDisplay for [T] {
    fn cell_content(&self) -> Content {
        Content::stacked(self.iter().map(CellDisplay::cell_content))
    }
}

impl<A: CellDisplay, B: CellDisplay> CellDisplay for (A, B) {
    fn cell_content(&self) -> Content {
        Content::stacked([self.0.cell_content(), self.1.cell_content()])
    }
}

impl<A: CellDisplay, B: CellDisplay, C: CellDisplay> CellDisplay for (A, B, C) {
    fn cell_content(&self) -> Content {
        Content::stacked([self.0.cell_content(), self.1.cell_content(), self.2.cell_content()])
    }
}

impl CellDisplay for Chart {
    fn cell_content(&self) -> Content {
        Content::plot(self)
    }
}

impl CellDisplay for Heatmap {
    fn cell_content(&self) -> Content {
        Content::plot(self)
    }
}

impl CellDisplay for Gallery {
    fn cell_content(&self) -> Content {
        Content::plot(self)
    }
}

impl CellDisplay for Grid {
    fn cell_content(&self) -> Content {
        Content::plot(self)
    }
}

/// The size of plots as text: of a terminal of usual width.
const TEXT_COLUMNS: usize = 100;
const TEXT_LINES: usize = 24;

impl Content {
    /// Renders a plot as text and SVG, and as PNG unless it is too large.
    #[must_use]
    pub fn plot(plot: &impl Plot) -> Self {
        let content = Self::new(plot.to_text(TEXT_COLUMNS, TEXT_LINES)).svg(plot.to_svg());
        // A plot that is too large for PNG is shown in the other forms.
        match plot.to_png() {
            Ok(png) => content.png(png),
            Err(_) => content,
        }
    }
}
