//! Affine maps with nearest interpolation.

use crate::ImageView;

/// Returns the map of torchvision's `affine` with a shear alone about the corner: `x` is how many
/// columns a row is shifted against the one above, `y` the same for columns.
pub(super) fn shear(x: f64, y: f64) -> [f64; 6] {
    // torchvision goes by degrees, and so do the last bits.
    let angle = |slope: f64| slope.atan().to_degrees().to_radians();
    inverse(angle(x), angle(y), (0.0, 0.0), (0.0, 0.0))
}

/// Returns the map of torchvision's `affine` with a translation alone.
pub(super) fn translate(x: f64, y: f64, centre: (f64, f64)) -> [f64; 6] {
    inverse(0.0, 0.0, (x, y), centre)
}

/// Returns the map of Pillow's `rotate`, by degrees counterclockwise.
pub(super) fn rotate(degrees: f64, (x, y): (f64, f64)) -> [f64; 6] {
    // Python's `%` and `round(value, 15)`.
    let angle = -degrees.rem_euclid(360.0).to_radians();
    let round = |value: f64| (value * 1e15).round_ties_even() / 1e15;
    let (cos, sin) = (round(angle.cos()), round(angle.sin()));
    let sine = round(-angle.sin());
    [cos, sin, cos * -x + sin * -y + x, sine, cos, sine * -x + cos * -y + y]
}

/// torchvision's `_get_inverse_affine_matrix` for no rotation and no scale.
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

/// Writes the image under the map to `out`, which has as many pixels, as Pillow: in 16.16 fixed
/// point where all of the map fits.
pub(super) fn nearest(image: ImageView<'_>, matrix: &[f64; 6], fill: [u8; 3], out: &mut [u8]) {
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
