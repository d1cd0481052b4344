//! Line and scatter charts.

mod draw;
mod legend;
mod text;
mod thin;

use serde::Serialize;

use crate::plot::Draw;
use crate::scene::Scene;
use crate::size::Size;
use crate::terminal::TextOptions;
use crate::{Axis, Scale};

/// Line or scatter chart with two axes.
///
/// ```
/// use brigade_plot::{Chart, Plot};
///
/// let chart = Chart::new("Loss")
///     .x("epoch")
///     .y("loss")
///     .line("train", [(1.0, 0.9), (2.0, 0.5), (3.0, 0.3)])
///     .line("valid", [(1.0, 0.8), (2.0, f64::NAN), (3.0, 0.4)])
///     .point(3.0, 0.4, "best");
/// assert_eq!(chart.series[0].points.len(), 3);
/// assert!(chart.to_svg().contains(">valid</text>"));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// Horizontal axis of the chart.
    pub x: Axis,
    /// Vertical axis of the chart.
    pub y: Axis,
    /// Series of points. Later ones are drawn above earlier ones.
    pub series: Vec<Series>,
    /// Marked points and positions.
    pub markers: Vec<Marker>,
    /// Size of the image in pixels. Fonts do not scale with it.
    pub size: Size,
}

/// Named series of points.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Series {
    /// Name of the series in the legend.
    pub name: String,
    /// Points as (x, y). A point with a coordinate that is not finite, or not above zero on a logarithmic axis, is left
    /// out, and a line has a gap at it.
    pub points: Vec<(f64, f64)>,
    /// Style of the series: a line, dots or steps.
    pub style: Style,
}

/// Drawing style of a [`Series`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Style {
    /// A line from point to point.
    #[default]
    Line,
    /// A dot for each point.
    Points,
    /// A line that keeps a point's value until the next point.
    Step,
}

/// Labelled mark at a point or position.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Marker {
    /// A dashed vertical line over the whole height.
    Vertical {
        /// Position on the horizontal axis.
        x: f64,
        /// Label beside the line.
        label: String,
    },
    /// A dot at a point.
    Point {
        /// Position on the horizontal axis.
        x: f64,
        /// Position on the vertical axis.
        y: f64,
        /// Label beside the dot.
        label: String,
    },
}

impl Chart {
    /// Creates an empty chart of 640 x 420 pixels with linear axes.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            x: Axis::default(),
            y: Axis::default(),
            series: Vec::new(),
            markers: Vec::new(),
            size: Size::new(640, 420),
        }
    }

    /// Sets the label of the horizontal axis.
    #[must_use]
    pub fn x(mut self, label: impl Into<String>) -> Self {
        self.x.label = label.into();
        self
    }

    /// Sets the label of the vertical axis.
    #[must_use]
    pub fn y(mut self, label: impl Into<String>) -> Self {
        self.y.label = label.into();
        self
    }

    /// Makes the horizontal axis logarithmic.
    #[must_use]
    pub fn log_x(mut self) -> Self {
        self.x.scale = Scale::Log10;
        self
    }

    /// Makes the vertical axis logarithmic.
    #[must_use]
    pub fn log_y(mut self) -> Self {
        self.y.scale = Scale::Log10;
        self
    }

    /// Sets the range of the horizontal axis.
    #[must_use]
    pub fn x_range(mut self, first: f64, last: f64) -> Self {
        self.x.range = Some((first, last));
        self
    }

    /// Sets the range of the vertical axis.
    #[must_use]
    pub fn y_range(mut self, first: f64, last: f64) -> Self {
        self.y.range = Some((first, last));
        self
    }

    /// Adds a line through these points.
    #[must_use]
    pub fn line(
        self,
        name: impl Into<String>,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        self.series(name, points, Style::Line)
    }

    /// Adds a dot for each of these points.
    #[must_use]
    pub fn points(
        self,
        name: impl Into<String>,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        self.series(name, points, Style::Points)
    }

    /// Adds a line that keeps each point's value until the next one.
    #[must_use]
    pub fn step(
        self,
        name: impl Into<String>,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        self.series(name, points, Style::Step)
    }

    /// Adds a series of points in this style.
    #[must_use]
    pub fn series(
        mut self,
        name: impl Into<String>,
        points: impl IntoIterator<Item = (f64, f64)>,
        style: Style,
    ) -> Self {
        let points = points.into_iter().collect();
        self.series.push(Series { name: name.into(), points, style });
        self
    }

    /// Marks a position on the horizontal axis with a dashed line over the whole height.
    #[must_use]
    pub fn vertical(mut self, x: f64, label: impl Into<String>) -> Self {
        self.markers.push(Marker::Vertical { x, label: label.into() });
        self
    }

    /// Marks a point with a labelled dot.
    #[must_use]
    pub fn point(mut self, x: f64, y: f64, label: impl Into<String>) -> Self {
        self.markers.push(Marker::Point { x, y, label: label.into() });
        self
    }

    /// Sets the size of the image in pixels, at least 160 x 120.
    #[must_use]
    pub fn size(mut self, width: u32, height: u32) -> Self {
        self.size = Size::new(width, height);
        self
    }

    /// Returns all x coordinates, or all y coordinates, from which the axis takes its range.
    fn coordinates(&self, of: fn((f64, f64)) -> f64) -> impl Iterator<Item = f64> {
        let usable = |value: f64, axis: &Axis| {
            value.is_finite() && (axis.scale == Scale::Linear || value > 0.0)
        };
        let points = self.series.iter().flat_map(|series| series.points.iter().copied());
        let marked = self.markers.iter().filter_map(|marker| match *marker {
            Marker::Point { x, y, .. } => Some((x, y)),
            Marker::Vertical { .. } => None,
        });
        // A point that one axis cannot show counts for neither.
        let shown = move |point: &(f64, f64)| usable(point.0, &self.x) && usable(point.1, &self.y);
        points.chain(marked).filter(shown).map(of)
    }

    /// Returns the ranges of both axes, including the positions of vertical lines.
    fn spans(&self) -> (crate::axis::Span, crate::axis::Span) {
        let verticals = self.markers.iter().filter_map(|marker| match *marker {
            Marker::Vertical { x, .. } => Some(x),
            Marker::Point { .. } => None,
        });
        let across = self.x.span(self.coordinates(|(x, _)| x).chain(verticals));
        (across, self.y.span(self.coordinates(|(_, y)| y)))
    }
}

impl Draw for Chart {
    fn scene(&self) -> Scene {
        draw::scene(self)
    }

    fn text(&self, options: &TextOptions) -> String {
        text::render(self, options)
    }
}
