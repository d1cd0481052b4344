//! Drawing: shapes in the order in which they are drawn. SVG and PNG are both rendered from it.

use std::sync::Arc;

use brigade_rank_env::text::escaped;

use crate::color::Color;
use crate::font;
use crate::size::Size;

/// Shapes on a white background, in pixels from the top left.
#[derive(Debug, Clone)]
pub struct Scene {
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) shapes: Vec<Shape>,
}

#[derive(Debug, Clone)]
pub(crate) enum Shape {
    Rect { area: Area, color: Color },
    Line { points: Vec<(f64, f64)>, color: Color, width: f64, dashed: bool },
    Dot { at: (f64, f64), radius: f64, color: Color },
    Text(Text),
    Image { area: Area, image: Arc<Pixels> },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Area {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

/// Line of text. `at` is on its baseline.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub(crate) at: (f64, f64),
    pub(crate) text: String,
    pub(crate) size: f64,
    pub(crate) color: Color,
    pub(crate) anchor: Anchor,
    /// `true` if the text runs upwards.
    pub(crate) upwards: bool,
}

/// Horizontal alignment of a text at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// RGB pixels in rows from the top. Enlarged images keep hard edges.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pixels {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Area {
    pub(crate) const fn new(x: f64, y: f64, width: f64, height: f64) -> Self {
        Self { x, y, width, height }
    }

    pub(crate) fn right(&self) -> f64 {
        self.x + self.width
    }

    pub(crate) fn bottom(&self) -> f64 {
        self.y + self.height
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.x < other.right()
            && other.x < self.right()
            && self.y < other.bottom()
            && other.y < self.bottom()
    }
}

impl Scene {
    pub(crate) fn new(size: Size) -> Self {
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        Self { width, height, shapes: Vec::new() }
    }

    pub(crate) fn rect(&mut self, area: Area, color: Color) {
        self.shapes.push(Shape::Rect { area, color });
    }

    /// Draws a line from point to point.
    pub(crate) fn line(&mut self, points: Vec<(f64, f64)>, color: Color, width: f64) {
        self.shapes.push(Shape::Line { points, color, width, dashed: false });
    }

    /// Draws a line of one pixel, without blurred edges.
    pub(crate) fn rule(&mut self, from: (f64, f64), to: (f64, f64), color: Color) {
        let middle = |(x, y): (f64, f64)| (x.floor() + 0.5, y.floor() + 0.5);
        self.line(vec![middle(from), middle(to)], color, 1.0);
    }

    pub(crate) fn frame(&mut self, area: Area, color: Color) {
        let (left, top, right, bottom) = (area.x, area.y, area.right(), area.bottom());
        for (from, to) in [
            ((left, top), (right, top)),
            ((right, top), (right, bottom)),
            ((right, bottom), (left, bottom)),
            ((left, bottom), (left, top)),
        ] {
            self.rule(from, to, color);
        }
    }

    pub(crate) fn dashed(&mut self, points: Vec<(f64, f64)>, color: Color, width: f64) {
        self.shapes.push(Shape::Line { points, color, width, dashed: true });
    }

    pub(crate) fn dot(&mut self, at: (f64, f64), radius: f64, color: Color) {
        self.shapes.push(Shape::Dot { at, radius, color });
    }

    pub(crate) fn image(&mut self, area: Area, image: Arc<Pixels>) {
        self.shapes.push(Shape::Image { area, image });
    }

    /// Draws a line of text, which is shortened to `most` pixels.
    pub(crate) fn text(&mut self, place: Place, text: &str, most: f64) {
        let text = font::fit(&printable(text), place.size, most);
        let Place { at, size, color, anchor, upwards } = place;
        self.shapes.push(Shape::Text(Text { at, text, size, color, anchor, upwards }));
    }

    /// Draws another scene into this one, with its corner at this position.
    pub(crate) fn put(&mut self, other: Self, x: f64, y: f64) {
        let moved = |(left, top): (f64, f64)| (left + x, top + y);
        for mut shape in other.shapes {
            match &mut shape {
                Shape::Rect { area, .. } | Shape::Image { area, .. } => {
                    (area.x, area.y) = moved((area.x, area.y));
                }
                Shape::Line { points, .. } => {
                    for point in points {
                        *point = moved(*point);
                    }
                }
                Shape::Dot { at, .. } | Shape::Text(Text { at, .. }) => *at = moved(*at),
            }
            self.shapes.push(shape);
        }
    }
}

/// Position and style of a text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    at: (f64, f64),
    size: f64,
    color: Color,
    anchor: Anchor,
    upwards: bool,
}

impl Place {
    pub(crate) const fn new(x: f64, y: f64, size: f64) -> Self {
        let color = Color::TEXT;
        Self { at: (x, y), size, color, anchor: Anchor::Start, upwards: false }
    }

    pub(crate) const fn anchor(mut self, anchor: Anchor) -> Self {
        self.anchor = anchor;
        self
    }

    pub(crate) const fn color(mut self, color: Color) -> Self {
        self.color = color;
        self
    }

    pub(crate) const fn upwards(mut self) -> Self {
        self.upwards = true;
        self
    }
}

/// Returns the text in one line, with every character escaped that XML or terminals do not allow.
pub(crate) fn printable(text: &str) -> String {
    escaped(text.replace(['\n', '\r', '\t'], " ")).to_string()
}
