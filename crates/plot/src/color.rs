//! Colours and colour scales.

use serde::Serialize;

/// RGB colour with eight bits per channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Color(pub(crate) u8, pub(crate) u8, pub(crate) u8);

impl Color {
    pub(crate) const BLACK: Self = Self(0, 0, 0);
    pub(crate) const WHITE: Self = Self(255, 255, 255);
    pub(crate) const TEXT: Self = Self(38, 38, 38);
    pub(crate) const FRAME: Self = Self(110, 110, 110);
    pub(crate) const GRID: Self = Self(228, 228, 228);
    /// Colour of a cell without a finite number.
    pub(crate) const MISSING: Self = Self(190, 190, 190);
    /// Colour of what is marked as wrong.
    pub(crate) const WRONG: Self = Self(200, 20, 20);

    /// Returns the colour of a series by its index: Tableau's ten, as in matplotlib.
    pub(crate) fn of_series(index: usize) -> Self {
        SERIES[index % SERIES.len()]
    }

    /// Returns black or white, whichever has more contrast with this colour.
    pub(crate) fn readable(self) -> Self {
        let [red, green, blue] = [self.0, self.1, self.2].map(f64::from);
        let brightness = 0.299 * red + 0.587 * green + 0.114 * blue;
        if brightness > 140.0 { Self::BLACK } else { Self::WHITE }
    }
}

/// Colour scale of a [`Heatmap`](crate::Heatmap), from its least value to its greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ColorMap {
    /// White to dark blue.
    #[default]
    Blues,
    /// Dark violet by green to yellow.
    Viridis,
    /// Black by red to light yellow.
    Magma,
}

impl ColorMap {
    /// Returns the colour of a position on the scale, 0 to 1.
    pub(crate) fn color(self, part: f64) -> Color {
        let stops = match self {
            Self::Blues => &BLUES,
            Self::Viridis => &VIRIDIS,
            Self::Magma => &MAGMA,
        };
        let place = part.clamp(0.0, 1.0) * (stops.len() - 1) as f64;
        let low = (place as usize).min(stops.len() - 2);
        let between = place - low as f64;
        let mix = |at: u32| {
            let channel = |stop: u32| f64::from((stop >> at) & 255);
            (channel(stops[low]) * (1.0 - between) + channel(stops[low + 1]) * between).round()
        };
        Color(mix(16) as u8, mix(8) as u8, mix(0) as u8)
    }
}

const SERIES: [Color; 10] = [
    Color(0x1f, 0x77, 0xb4),
    Color(0xff, 0x7f, 0x0e),
    Color(0x2c, 0xa0, 0x2c),
    Color(0xd6, 0x27, 0x28),
    Color(0x94, 0x67, 0xbd),
    Color(0x8c, 0x56, 0x4b),
    Color(0xe3, 0x77, 0xc2),
    Color(0x7f, 0x7f, 0x7f),
    Color(0xbc, 0xbd, 0x22),
    Color(0x17, 0xbe, 0xcf),
];
const BLUES: [u32; 9] =
    [0xf7fbff, 0xdeebf7, 0xc6dbef, 0x9ecae1, 0x6baed6, 0x4292c6, 0x2171b5, 0x08519c, 0x08306b];
const VIRIDIS: [u32; 9] =
    [0x440154, 0x472d7b, 0x3b528b, 0x2c728e, 0x21918c, 0x28ae80, 0x5ec962, 0xaddc30, 0xfde725];
const MAGMA: [u32; 9] =
    [0x000004, 0x1c1044, 0x4f127b, 0x812581, 0xb5367a, 0xe55964, 0xfb8761, 0xfec287, 0xfcfdbf];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_begin_and_end_with_their_colours() {
        assert_eq!(ColorMap::Blues.color(0.0), Color(0xf7, 0xfb, 0xff));
        assert_eq!(ColorMap::Viridis.color(1.0), Color(0xfd, 0xe7, 0x25));
        assert_eq!(ColorMap::Magma.color(7.0), ColorMap::Magma.color(1.0));
        // Half way between the first two of nine.
        assert_eq!(ColorMap::Viridis.color(1.0 / 16.0), Color(0x46, 0x17, 0x68));
        assert_eq!(ColorMap::Blues.color(0.0).readable(), Color::BLACK);
        assert_eq!(ColorMap::Blues.color(1.0).readable(), Color::WHITE);
    }
}
