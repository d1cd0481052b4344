//! Interpolation between two values.

use std::f64::consts::PI;

/// Interpolates linearly between two values, at `part` from 0 to 1.
pub(super) fn line(start: f64, end: f64, part: f64) -> f64 {
    start + (end - start) * part
}

/// Interpolates between two values along half a period of a cosine, at `part` from 0 to 1.
pub(super) fn half_cosine(start: f64, end: f64, part: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + (PI * part).cos())
}

/// fastai's `combined_cos`: from the first value to the second in `pct` of the way, then to the third.
pub(super) fn two_cosines([start, middle, end]: [f64; 3], pct: f64, position: f64) -> f64 {
    if position < pct {
        half_cosine(start, middle, position / pct)
    } else if pct < 1.0 {
        half_cosine(middle, end, (position - pct) / (1.0 - pct))
    } else {
        middle
    }
}
