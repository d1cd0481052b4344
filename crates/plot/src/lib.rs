//! Plots of training runs as data, rendered as SVG, PNG or text.
//!
//! - [`Chart`]: lines, steps and points over linear or logarithmic axes, with markers.
//! - [`Bars`]: labelled horizontal bars.
//! - [`Heatmap`]: a matrix as coloured cells: a confusion matrix with its numbers, histograms over time.
//! - [`Gallery`]: images with lines of text.
//! - [`Grid`]: several of these side by side.
//!
//! All plots are plain data that can be compared and serialised. [`Plot`] renders them: [`to_svg`](Plot::to_svg),
//! [`to_png`](Plot::to_png), [`to_text`](Plot::to_text) for terminals, [`save`](Plot::save) for all three. PNG and SVG
//! come from the same drawing. The font is part of this crate, so that a picture does not depend on the machine;
//! letters that it lacks (it has those of European languages) are boxes in PNG.
//!
//! ```
//! use brigade_plot::{Chart, Plot};
//!
//! let losses = (0..100).map(|step| {
//!     let lr = 1e-7 * 10f64.powf(f64::from(step) * 0.08);
//!     (lr, 2.3 - lr.min(0.05) * 30.0 + (lr / 2.0).powi(2))
//! });
//! let chart = Chart::new("Learning rate finder")
//!     .x("learning rate")
//!     .log_x()
//!     .y("loss")
//!     .line("loss", losses)
//!     .vertical(1.6e-2, "valley");
//! assert!(chart.to_svg().starts_with("<svg"));
//! assert!(chart.to_png()?.starts_with(b"\x89PNG"));
//! assert!(chart.to_text(60, 15).contains("valley"));
//! # Ok::<(), brigade_plot::PlotError>(())
//! ```

mod axis;
mod bars;
mod chart;
mod color;
mod error;
mod font;
mod gallery;
mod grid;
mod heatmap;
mod markup;
mod plot;
mod raster;
mod scene;
mod size;
mod svg;
mod terminal;

pub use axis::{Axis, Scale};
pub use bars::{Bar, Bars};
pub use chart::{Chart, Marker, Series, Style};
pub use color::ColorMap;
pub use error::PlotError;
pub use gallery::{Caption, Gallery, Picture};
pub use grid::{Grid, Panel};
pub use heatmap::Heatmap;
pub use markup::escape_markup;
pub use plot::Plot;
pub use size::Size;
pub use terminal::TextOptions;

/// The result of this crate's functions.
pub type Result<T, E = PlotError> = std::result::Result<T, E>;
