//! Affine transforms, with the arithmetic of Pillow.

use serde::{Deserialize, Serialize};

use crate::ImageView;

/// Interpolation of an affine transform between pixels: Pillow's filters of `Image.transform`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Interpolation {
    /// Nearest pixel, without interpolation.
    #[default]
    Nearest,
    /// Bilinear interpolation of 2 x 2 pixels.
    Bilinear,
    /// Bicubic interpolation of 4 x 4 pixels.
    Bicubic,
}

/// Returns the matrix of torchvision's `affine` with only a shear about the corner: `x` is the number of columns by
/// which a row is shifted against the one above, `y` the same for columns.
pub(super) fn shear(x: f64, y: f64) -> [f64; 6] {
    // torchvision computes in degrees, which determines the last bits.
    let angle = |slope: f64| slope.atan().to_degrees().to_radians();
    inverse(angle(x), angle(y), (0.0, 0.0), (0.0, 0.0))
}

/// Returns the matrix of torchvision's `affine` with only a translation.
pub(super) fn translate(x: f64, y: f64, centre: (f64, f64)) -> [f64; 6] {
    inverse(0.0, 0.0, (x, y), centre)
}

/// Returns the matrix of Pillow's `rotate`, by degrees counterclockwise.
pub(super) fn rotate(degrees: f64, (x, y): (f64, f64)) -> [f64; 6] {
    // Python's `%` and `round(value, 15)`, which rounds the decimal number: a product of 1e15 is already rounded.
    let angle = -degrees.rem_euclid(360.0).to_radians();
    let round = |value: f64| format!("{value:.15}").parse().unwrap_or(value);
    let (cos, sin) = (round(angle.cos()), round(angle.sin()));
    let sine = round(-angle.sin());
    [cos, sin, cos * -x + sin * -y + x, sine, cos, sine * -x + cos * -y + y]
}

/// Computes torchvision's `_get_inverse_affine_matrix` without rotation and scale.
fn inverse(x: f64, y: f64, shift: (f64, f64), centre: (f64, f64)) -> [f64; 6] {
    let a = (-y).cos() / y.cos();
    let b = -(-y).cos() * x.tan() / y.cos();
    let c = (-y).sin() / y.cos();
    let d = -(-y).sin() * x.tan() / y.cos() + 1.0;
    let mut matrix = [d, -b, 0.0, -c, a, 0.0];
    let (along, down) = (-centre.0 - shift.0, -centre.1 - shift.1);
    matrix[2] = matrix[0] * along + matrix[1] * down + centre.0;
    matrix[5] = matrix[3] * along + matrix[4] * down + centre.1;
    matrix
}

/// Writes the transformed image to `out`, which has the same number of pixels.
pub(super) fn transform(
    image: ImageView<'_>,
    matrix: &[f64; 6],
    interpolation: Interpolation,
    fill: [u8; 3],
    out: &mut [u8],
) {
    match interpolation {
        Interpolation::Nearest => nearest(image, matrix, fill, out),
        Interpolation::Bilinear => interpolated(image, matrix, fill, out, [0, 1], |values, at| {
            let [left, right] = values;
            left + (right - left) * at
        }),
        Interpolation::Bicubic => {
            interpolated(image, matrix, fill, out, [-1, 0, 1, 2], |values, at| {
                let [before, left, right, after] = values;
                let linear = right - before;
                let square = 2.0 * (before - left) + right - after;
                let cube = left - before - right + after;
                left + at * (linear + at * (square + at * cube))
            });
        }
    }
}

/// Writes the transformed image, each value interpolated from `N` by `N` pixels: those at `offsets` from the pixel
/// whose centre is before the position, along rows and then across them. Pixels beyond the edge are those at the edge;
/// positions outside of the image are `fill`.
fn interpolated<const N: usize>(
    image: ImageView<'_>,
    [a, b, c, d, e, f]: &[f64; 6],
    fill: [u8; 3],
    out: &mut [u8],
    offsets: [i64; N],
    between: impl Fn([f64; N], f64) -> f64,
) {
    let size = image.size();
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let pixels = image.pixels().as_chunks::<3>().0;
    let near = |place: i64, side: u32| place.clamp(0, i64::from(side) - 1) as usize;
    let rows = out.chunks_exact_mut(3 * size.columns().max(1));
    for (row, y) in rows.zip(0_u32..) {
        let y = f64::from(y) + 0.5;
        for (out, x) in row.as_chunks_mut::<3>().0.iter_mut().zip(0_u32..) {
            let x = f64::from(x) + 0.5;
            let (from_x, from_y) = (a * x + b * y + c, d * x + e * y + f);
            if !(0.0..width).contains(&from_x) || !(0.0..height).contains(&from_y) {
                *out = fill;
                continue;
            }
            let (from_x, from_y) = (from_x - 0.5, from_y - 0.5);
            let (left, top) = (from_x.floor(), from_y.floor());
            let columns = offsets.map(|offset| near(left as i64 + offset, size.width));
            let lines = offsets.map(|offset| near(top as i64 + offset, size.height));
            *out = std::array::from_fn(|channel| {
                let value = |line: usize, column: usize| {
                    let pixel = pixels.get(line * size.columns() + column);
                    f64::from(pixel.map_or(0, |pixel| pixel[channel]))
                };
                let along = lines
                    .map(|line| between(columns.map(|column| value(line, column)), from_x - left));
                // A cast truncates the fraction and clamps to 0..=255.
                between(along, from_y - top) as u8
            });
        }
    }
}

/// Writes the transformed image with the nearest pixel of each position, with Pillow's arithmetic: in 16.16 fixed point
/// if all positions fit.
fn nearest(image: ImageView<'_>, matrix: &[f64; 6], fill: [u8; 3], out: &mut [u8]) {
    let [a, b, c, d, e, f] = *matrix;
    let size = image.size();
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let start = (c + a * 0.5 + b * 0.5, f + d * 0.5 + e * 0.5);
    let corners = [(0.0, 0.0), (width, height), (0.0, height), (width, 0.0)];
    let fits = corners
        .iter()
        .all(|(x, y)| (x * a + y * b + c).abs() < 32_768.0 && (x * d + y * e + f).abs() < 32_768.0);
    let pixels = image.pixels().as_chunks::<3>().0;
    let pixel = |x: i64, y: i64| {
        let inside =
            |place: i64, side: u32| usize::try_from(place).ok().filter(|p| *p < side as usize);
        let (x, y) = (inside(x, size.width)?, inside(y, size.height)?);
        pixels.get(y * size.columns() + x).copied()
    };
    let rows = out.chunks_exact_mut(3 * size.columns().max(1));
    if fits && (b != 0.0 || d != 0.0) {
        let fixed = |value: f64| (value * 65_536.0 + 0.5).floor() as i64;
        let [a, b, d, e] = [a, b, d, e].map(fixed);
        let (mut row_x, mut row_y) = (fixed(start.0), fixed(start.1));
        for row in rows {
            let (mut x, mut y) = (row_x, row_y);
            for out in row.as_chunks_mut::<3>().0 {
                *out = pixel(x >> 16, y >> 16).unwrap_or(fill);
                x += a;
                y += d;
            }
            row_x += b;
            row_y += e;
        }
        return;
    }
    let whole = |place: f64| if place < 0.0 { -1 } else { place as i64 };
    let (mut row_x, mut row_y) = start;
    for row in rows {
        let (mut x, mut y) = (row_x, row_y);
        for out in row.as_chunks_mut::<3>().0 {
            *out = pixel(whole(x), whole(y)).unwrap_or(fill);
            x += a;
            y += d;
        }
        row_x += b;
        row_y += e;
    }
}
