//! Horizontal bars with a label each.

use serde::Serialize;

use crate::plot::Draw;
use crate::scene::{Anchor, Area, Place, Scene};
use crate::size::Size;
use crate::terminal::{TextOptions, color_code, fit, left};
use crate::{Axis, color::Color, font};

/// Horizontal bars, one above the other, each with a label and its number.
///
/// ```
/// use brigade_plot::{Bars, Plot};
///
/// let bars = Bars::new("Images per second")
///     .bar("one process", 120.0, "120")
///     .bar("two processes", 231.0, "231");
/// assert!(bars.to_svg().contains(">two processes</text>"));
/// assert!(bars.to_text(40, 10).contains("231"));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Bars {
    /// Title above the bars.
    pub title: String,
    /// Label of the axis below the bars.
    pub x_label: String,
    /// Bars from the top.
    pub bars: Vec<Bar>,
    /// Value at which a dashed line crosses all bars.
    pub reference: Option<f64>,
    /// Width of the picture in pixels. The height follows from the number of bars.
    pub width: u32,
}

/// A bar of [`Bars`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Bar {
    /// Label to the left of the bar.
    pub label: String,
    /// Length of the bar. A value that is negative or not finite is drawn as 0.
    pub value: f64,
    /// Text behind the end of the bar.
    pub text: String,
    /// `true` to draw the bar in the second colour.
    pub muted: bool,
}

impl Bars {
    /// Creates a plot without bars, 720 pixels wide.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        let (x_label, bars) = (String::new(), Vec::new());
        Self { title: title.into(), x_label, bars, reference: None, width: 720 }
    }

    /// Sets the label of the axis below the bars.
    #[must_use]
    pub fn x(mut self, label: impl Into<String>) -> Self {
        self.x_label = label.into();
        self
    }

    /// Adds a bar with its label, its value, and the text behind its end.
    #[must_use]
    pub fn bar(self, label: impl Into<String>, value: f64, text: impl Into<String>) -> Self {
        self.with(label.into(), value, text.into(), false)
    }

    /// Adds a bar in the second colour.
    #[must_use]
    pub fn muted_bar(self, label: impl Into<String>, value: f64, text: impl Into<String>) -> Self {
        self.with(label.into(), value, text.into(), true)
    }

    /// Draws a dashed line across all bars at a value.
    #[must_use]
    pub fn reference(mut self, value: f64) -> Self {
        self.reference = Some(value);
        self
    }

    fn with(mut self, label: String, value: f64, text: String, muted: bool) -> Self {
        self.bars.push(Bar { label, value, text, muted });
        self
    }

    /// The value that the axis ends at.
    fn longest(&self) -> f64 {
        let values = self.bars.iter().map(Bar::length).chain(self.reference);
        let longest = values.filter(|it| it.is_finite()).fold(0.0, f64::max);
        if longest > 0.0 { longest } else { 1.0 }
    }
}

impl Bar {
    fn length(&self) -> f64 {
        if self.value.is_finite() { self.value.max(0.0) } else { 0.0 }
    }

    fn color(&self) -> Color {
        Color::of_series(usize::from(self.muted))
    }
}

impl Draw for Bars {
    fn scene(&self) -> Scene {
        let width = f64::from(self.width.max(200));
        let widest = |texts: &mut dyn Iterator<Item = &String>| {
            texts.map(|it| font::width(it, SIZE)).fold(0.0, f64::max)
        };
        let labels = widest(&mut self.bars.iter().map(|it| &it.label)).min(width / 2.0).ceil();
        let texts = widest(&mut self.bars.iter().map(|it| &it.text)).min(width / 4.0).ceil();
        let top = if self.title.is_empty() { EDGE } else { EDGE + 24.0 };
        let below = if self.x_label.is_empty() { 26.0 } else { 44.0 };
        let first = EDGE + labels + 6.0;
        let across = (width - first - texts - 6.0 - EDGE).max(20.0).floor();
        let area = Area::new(first.floor(), top, across, PITCH * self.bars.len() as f64 + GAP);
        let size = Size::new(width as u32, (area.bottom() + below) as u32);
        let mut scene = Scene::new(size);
        let title = Place::new(width / 2.0, EDGE + 13.0, 14.0).anchor(Anchor::Middle);
        scene.text(title, &self.title, width - 2.0 * EDGE);

        let axis = Axis { range: Some((0.0, self.longest())), ..Axis::default() };
        let span = axis.span([].into_iter());
        let place = |value: f64| area.x + span.place(value).unwrap_or(0.0) * area.width;
        for tick in span.ticks((area.width / 60.0) as usize) {
            let x = place(tick.value);
            scene.rule((x, area.y), (x, area.bottom()), Color::GRID);
            let label = Place::new(x, area.bottom() + 15.0, SIZE).anchor(Anchor::Middle);
            scene.text(label, &tick.label, f64::INFINITY);
        }
        for (index, bar) in self.bars.iter().enumerate() {
            let y = area.y + GAP + PITCH * index as f64;
            let end = place(bar.length());
            let thick = PITCH - GAP;
            scene.rect(Area::new(area.x, y, end - area.x, thick), bar.color());
            let baseline = y + thick / 2.0 + 4.0;
            let label = Place::new(area.x - 6.0, baseline, SIZE).anchor(Anchor::End);
            scene.text(label, &bar.label, labels);
            scene.text(Place::new(end + 6.0, baseline, SIZE), &bar.text, texts);
        }
        if let Some(value) = self.reference.filter(|it| it.is_finite() && *it >= 0.0) {
            let x = place(value).floor() + 0.5;
            scene.dashed(vec![(x, area.y), (x, area.bottom())], Color::TEXT, 1.0);
        }
        scene.rule((area.x, area.y), (area.x, area.bottom()), Color::FRAME);
        let label = Place::new(area.x + area.width / 2.0, area.bottom() + 34.0, SIZE);
        scene.text(label.anchor(Anchor::Middle), &self.x_label, width - 2.0 * EDGE);
        scene
    }

    fn text(&self, options: &TextOptions) -> String {
        let longest = self.longest();
        let columns = |of: &dyn Fn(&Bar) -> usize| self.bars.iter().map(of).max().unwrap_or(0);
        let labels = columns(&|bar| bar.label.chars().count()).min(options.width / 2);
        let texts = columns(&|bar| bar.text.chars().count());
        let across = options.width.saturating_sub(labels + texts + 2).max(1);
        let mut text = String::new();
        if !self.title.is_empty() {
            text += &fit(&self.title, options.width);
            text.push('\n');
        }
        for bar in &self.bars {
            let blocks = "█".repeat((bar.length() / longest * across as f64).round() as usize);
            let label = left(&fit(&bar.label, labels), labels);
            let line = if options.color {
                let (on, off) = (color_code(Some(bar.color())), color_code(None));
                format!("{label} {on}{blocks}{off} {}", fit(&bar.text, texts))
            } else {
                fit(&format!("{label} {blocks} {}", bar.text), options.width)
            };
            text += &line;
            text.push('\n');
        }
        text
    }
}

const SIZE: f64 = 11.0;
const EDGE: f64 = 10.0;
/// Distance between the starts of two bars.
const PITCH: f64 = 22.0;
/// Gap between two bars.
const GAP: f64 = 6.0;
