//! Several plots in one image.

use serde::Serialize;

use crate::plot::Draw;
use crate::scene::{Anchor, Place, Scene};
use crate::size::Size;
use crate::terminal::TextOptions;
use crate::{Chart, Gallery, Heatmap};

/// Grid of several plots in one image.
///
/// ```
/// use brigade_plot::{Chart, Grid, Plot};
///
/// let rate = Chart::new("Learning rate").line("lr", [(0.0, 1e-3), (1.0, 1e-2)]);
/// let momentum = Chart::new("Momentum").line("momentum", [(0.0, 0.95), (1.0, 0.85)]);
/// let grid = Grid::new("One cycle").panel(rate).panel(momentum);
/// assert!(grid.to_svg().contains("Momentum"));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Grid {
    /// Title above the grid.
    pub title: String,
    /// Plots, row by row.
    pub panels: Vec<Panel>,
    /// Number of plots per row. 0 puts up to three plots in one row, and more of them in rows of two.
    pub columns: usize,
}

/// Plot in a [`Grid`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Panel {
    /// A line or scatter chart.
    Chart(Chart),
    /// A matrix as coloured cells.
    Heatmap(Heatmap),
    /// A gallery of images.
    Gallery(Gallery),
}

impl Grid {
    /// Creates an empty grid.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), panels: Vec::new(), columns: 0 }
    }

    /// Adds a plot, which keeps its size.
    #[must_use]
    pub fn panel(mut self, panel: impl Into<Panel>) -> Self {
        self.panels.push(panel.into());
        self
    }

    /// Sets the number of plots per row.
    #[must_use]
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns;
        self
    }

    fn plots(&self) -> impl Iterator<Item = &dyn Draw> {
        self.panels.iter().map(|panel| match panel {
            Panel::Chart(plot) => plot as &dyn Draw,
            Panel::Heatmap(plot) => plot,
            Panel::Gallery(plot) => plot,
        })
    }
}

impl Draw for Grid {
    fn scene(&self) -> Scene {
        let scenes: Vec<Scene> = self.plots().map(Draw::scene).collect();
        let columns = match (self.columns, scenes.len()) {
            (0, count @ 0..=3) => count.max(1),
            (0, _) => 2,
            (columns, _) => columns,
        };
        // A column is as wide as its widest plot, a row as high as its highest.
        let greatest = |sides: &mut dyn Iterator<Item = f64>| sides.fold(0.0, f64::max);
        let widths: Vec<f64> = (0..columns.min(scenes.len()))
            .map(|at| {
                greatest(&mut scenes.iter().skip(at).step_by(columns).map(|scene| scene.width))
            })
            .collect();
        let heights: Vec<f64> = scenes
            .chunks(columns)
            .map(|row| greatest(&mut row.iter().map(|scene| scene.height)))
            .collect();
        let title = if self.title.is_empty() { 0.0 } else { 30.0 };
        let width = widths.iter().sum::<f64>().max(160.0);
        let height = (title + heights.iter().sum::<f64>()).max(40.0);
        let mut all = Scene::new(Size::new(width as u32, height as u32));
        all.text(
            Place::new(width / 2.0, 21.0, 15.0).anchor(Anchor::Middle),
            &self.title,
            width - 20.0,
        );
        let mut scenes = scenes.into_iter();
        let mut y = title;
        for height in &heights {
            let mut x = 0.0;
            for (scene, width) in scenes.by_ref().take(columns).zip(&widths) {
                let beside = ((width - scene.width) / 2.0).floor();
                all.put(scene, x + beside, y);
                x += width;
            }
            y += height;
        }
        all
    }

    fn text(&self, options: &TextOptions) -> String {
        let texts: Vec<String> = self.plots().map(|plot| plot.text(options)).collect();
        let title = crate::terminal::fit(&self.title, options.width);
        let title = if title.is_empty() { title } else { title + "\n\n" };
        title + &texts.join("\n")
    }
}

impl From<Chart> for Panel {
    fn from(plot: Chart) -> Self {
        Self::Chart(plot)
    }
}

impl From<Heatmap> for Panel {
    fn from(plot: Heatmap) -> Self {
        Self::Heatmap(plot)
    }
}

impl From<Gallery> for Panel {
    fn from(plot: Gallery) -> Self {
        Self::Gallery(plot)
    }
}
