//! Font with which plots are measured and drawn, so that they are the same on every machine.

use std::sync::OnceLock;

use ttf_parser::{Face, GlyphId, OutlineBuilder};

/// DejaVu Sans, reduced to European letters and some symbols: 64 kB.
static FONT: &[u8] = include_bytes!("../assets/DejaVuSans.ttf");

/// Returns the width of a line of text in pixels.
pub(crate) fn width(text: &str, size: f64) -> f64 {
    let units: f64 = text.chars().map(|letter| advance(glyph(letter))).sum();
    units * size / units_per_em()
}

/// Shortens a line of text to a width in pixels, with an ellipsis at the cut.
pub(crate) fn fit(text: &str, size: f64, most: f64) -> String {
    if width(text, size) <= most {
        return text.to_owned();
    }
    let room = most - width("…", size);
    let mut used = 0.0;
    let fits = |letter: &char| {
        used += width(letter.encode_utf8(&mut [0; 4]), size);
        used <= room
    };
    let kept: String = text.chars().take_while(fits).collect();
    format!("{}…", kept.trim_end())
}

/// Draws the outlines of a line of text from `x` on its baseline `y`.
pub(crate) fn outline(text: &str, size: f64, x: f64, y: f64, builder: &mut impl Pen) {
    let scale = size / units_per_em();
    let mut at = x;
    for letter in text.chars() {
        let id = glyph(letter);
        if let Some(face) = face() {
            face.outline_glyph(id, &mut Placed { x: at, y, scale, pen: builder });
        }
        at += advance(id) * scale;
    }
}

/// Receiver of outlines in pixels.
pub(crate) trait Pen {
    fn move_to(&mut self, to: (f32, f32));
    fn line_to(&mut self, to: (f32, f32));
    fn quad_to(&mut self, by: (f32, f32), to: (f32, f32));
    fn close(&mut self);
}

struct Placed<'a, P> {
    x: f64,
    y: f64,
    scale: f64,
    pen: &'a mut P,
}

impl<P> Placed<'_, P> {
    fn place(&self, x: f32, y: f32) -> (f32, f32) {
        let (x, y) = (f64::from(x) * self.scale, f64::from(y) * self.scale);
        ((self.x + x) as f32, (self.y - y) as f32)
    }
}

impl<P: Pen> OutlineBuilder for Placed<'_, P> {
    fn move_to(&mut self, x: f32, y: f32) {
        self.pen.move_to(self.place(x, y));
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.pen.line_to(self.place(x, y));
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.pen.quad_to(self.place(x1, y1), self.place(x, y));
    }

    /// Not called: a TrueType font has no cubic curves.
    fn curve_to(&mut self, _x1: f32, _y1: f32, _x2: f32, _y2: f32, x: f32, y: f32) {
        self.line_to(x, y);
    }

    fn close(&mut self) {
        self.pen.close();
    }
}

fn face() -> Option<&'static Face<'static>> {
    static FACE: OnceLock<Option<Face<'static>>> = OnceLock::new();
    FACE.get_or_init(|| Face::parse(FONT, 0).ok()).as_ref()
}

/// Returns the glyph of a letter; a box for a letter that the font lacks.
fn glyph(letter: char) -> GlyphId {
    face().and_then(|face| face.glyph_index(letter)).unwrap_or(GlyphId(0))
}

fn advance(glyph: GlyphId) -> f64 {
    face().and_then(|face| face.glyph_hor_advance(glyph)).map_or(0.0, f64::from)
}

fn units_per_em() -> f64 {
    face().map_or(1.0, |face| f64::from(face.units_per_em()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_widths_and_are_shortened() {
        assert!(face().is_some());
        assert_eq!(width("", 12.0), 0.0);
        // DejaVu Sans' digits have an advance of 1303 of 2048 units.
        assert!((width("00", 20.48) - 26.06).abs() < 1e-9, "{}", width("00", 20.48));
        assert_eq!(fit("short", 12.0, 100.0), "short");
        let long = fit("a label that is too long", 12.0, 60.0);
        assert!(long.ends_with('…') && width(&long, 12.0) <= 60.0, "{long}");
        assert_eq!(fit("abc", 12.0, 0.0), "…");
        for letter in "aZ09.,-+()[]{}%<>=_/äßéłÖαβµσΔжЯ…−×≤²³⁻⁷→".chars()
        {
            assert_ne!(glyph(letter), GlyphId(0), "{letter}");
        }
        assert_eq!(glyph('漢'), GlyphId(0));
    }
}
