//! Operations on pixels with the arithmetic of Pillow.

use crate::ImageView;

/// Returns the grey of ITU-R 601-2, rounded as in Pillow.
fn grey([red, green, blue]: [u8; 3]) -> u8 {
    let weighted =
        u32::from(red) * 19_595 + u32::from(green) * 38_470 + u32::from(blue) * 7_471 + 0x8000;
    (weighted >> 16) as u8
}

/// Computes Pillow's `Image.blend`: `from` at factor 0, `to` at 1, extrapolated beyond.
fn blend(from: u8, to: u8, factor: f32) -> u8 {
    let difference = f32::from(i16::from(to) - i16::from(from));
    // A cast truncates the fraction and clamps to 0..=255.
    (f32::from(from) + factor * difference) as u8
}

/// Replaces each value by the entry of a table.
fn map(pixels: &mut [u8], table: impl Fn(u8) -> u8) {
    let table: [u8; 256] = std::array::from_fn(|value| table(value as u8));
    for value in pixels {
        *value = table[usize::from(*value)];
    }
}

/// Replaces each value by the entry of its channel's table.
fn map_channels(pixels: &mut [u8], tables: &[[u8; 256]; 3]) {
    for [red, green, blue] in pixels.as_chunks_mut::<3>().0 {
        *red = tables[0][usize::from(*red)];
        *green = tables[1][usize::from(*green)];
        *blue = tables[2][usize::from(*blue)];
    }
}

fn histograms(pixels: &[u8]) -> [[u64; 256]; 3] {
    let mut counts = [[0; 256]; 3];
    for [red, green, blue] in pixels.as_chunks::<3>().0 {
        counts[0][usize::from(*red)] += 1;
        counts[1][usize::from(*green)] += 1;
        counts[2][usize::from(*blue)] += 1;
    }
    counts
}

pub(super) fn brightness(pixels: &mut [u8], factor: f32) {
    map(pixels, |value| blend(0, value, factor));
}

pub(super) fn contrast(pixels: &mut [u8], factor: f32) {
    let all = pixels.as_chunks::<3>().0;
    let sum: u64 = all.iter().map(|pixel| u64::from(grey(*pixel))).sum();
    let mean = (sum as f64 / all.len().max(1) as f64 + 0.5) as u8;
    map(pixels, |value| blend(mean, value, factor));
}

pub(super) fn saturation(pixels: &mut [u8], factor: f32) {
    for pixel in pixels.as_chunks_mut::<3>().0 {
        let grey = grey(*pixel);
        *pixel = pixel.map(|value| blend(grey, value, factor));
    }
}

/// Blends with the image smoothed by Pillow's `SMOOTH`: the pixel itself has weight 5, its neighbours 1, and the
/// outermost pixels are not changed. `out` has as many pixels as the image.
pub(super) fn sharpness(image: ImageView<'_>, factor: f32, out: &mut [u8]) {
    let (width, height) = (3 * image.size().columns(), image.size().rows());
    out.copy_from_slice(image.pixels());
    if width < 9 || height < 3 {
        return;
    }
    let rows: Vec<&[u8]> = image.pixels().chunks_exact(width).collect();
    for (rows, out) in rows.windows(3).zip(out.chunks_exact_mut(width).skip(1)) {
        let [above, row, below] = rows else { continue };
        let inner = out.get_mut(3..width - 3).into_iter().flatten();
        let columns = above.windows(7).zip(row.windows(7)).zip(below.windows(7));
        for (out, ((above, row), below)) in inner.zip(columns) {
            let three =
                |values: &[u8]| u32::from(values[0]) + u32::from(values[3]) + u32::from(values[6]);
            let sum = three(above) + three(row) + three(below) + 4 * u32::from(row[3]);
            // No sum is half-way between two multiples of 13, so that rounding is unambiguous.
            let smooth = ((2 * sum + 13) / 26) as u8;
            *out = blend(smooth, row[3], factor);
        }
    }
    // The outermost pixels equal those of the smoothed image, and a blend of equals changes nothing.
}

pub(super) fn posterize(pixels: &mut [u8], bits: u8) {
    let mask = 0xFF_u8.checked_shl(u32::from(8 - bits.min(8))).unwrap_or(0);
    map(pixels, |value| value & mask);
}

pub(super) fn solarize(pixels: &mut [u8], threshold: f32) {
    map(pixels, |value| if f32::from(value) < threshold { value } else { 255 - value });
}

pub(super) fn auto_contrast(pixels: &mut [u8]) {
    let tables = histograms(pixels).map(|counts| {
        let low = counts.iter().position(|count| *count > 0).unwrap_or(0);
        let high = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        std::array::from_fn(|value| {
            if high <= low {
                return value as u8;
            }
            let scale = 255.0 / (high - low) as f64;
            let offset = -(low as f64) * scale;
            (value as f64 * scale + offset) as u8
        })
    });
    map_channels(pixels, &tables);
}

pub(super) fn equalize(pixels: &mut [u8]) {
    let tables = histograms(pixels).map(|counts| {
        let total: u64 = counts.iter().sum();
        let last = counts.iter().rev().find(|count| **count > 0).copied().unwrap_or(0);
        let step = (total - last) / 255;
        let mut sum = step / 2;
        let mut table: [u8; 256] = std::array::from_fn(|value| value as u8);
        for (entry, count) in table.iter_mut().zip(counts) {
            // With a step of 0 there are too few pixels to be spread.
            let Some(level) = sum.checked_div(step) else { break };
            *entry = u8::try_from(level).unwrap_or(u8::MAX);
            sum += count;
        }
        table
    });
    map_channels(pixels, &tables);
}

/// Computes torchvision's `adjust_hue`: Pillow's HSV with eight bits each, the hue modulo 256.
pub(super) fn hue(pixels: &mut [u8], turn: f64) {
    let shift = (turn * 255.0) as i32 as u8;
    for pixel in pixels.as_chunks_mut::<3>().0 {
        let [hue, saturation, value] = to_hsv(*pixel);
        *pixel = from_hsv([hue.wrapping_add(shift), saturation, value]);
    }
}

/// Converts like Pillow, in its precisions: a fraction that falls on the other side of a whole number would be another
/// grey level.
fn to_hsv([red, green, blue]: [u8; 3]) -> [u8; 3] {
    let (most, least) = (red.max(green).max(blue), red.min(green).min(blue));
    if most == least {
        return [0, 0, most];
    }
    let range = f32::from(most - least);
    let saturation = range / f32::from(most);
    let part = |value: u8| f32::from(most - value) / range;
    let sixth = if red == most {
        part(blue) - part(green)
    } else if green == most {
        (2.0 + f64::from(part(red)) - f64::from(part(blue))) as f32
    } else {
        (4.0 + f64::from(part(green)) - f64::from(part(red))) as f32
    };
    let hue = ((f64::from(sixth) / 6.0 + 1.0) % 1.0) as f32;
    [(f64::from(hue) * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, most]
}

fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    if saturation == 0 {
        return [value; 3];
    }
    let sixth = f64::from(hue) * 6.0 / 255.0;
    let whole = sixth.floor();
    let rest = (sixth - f64::from(whole as f32)) as f32;
    let saturation = (f64::from(saturation) / 255.0) as f32;
    let level = |part: f64| (f64::from(value) * (1.0 - part)).round() as u8;
    let p = level(f64::from(saturation));
    let q = level(f64::from(saturation * rest));
    let t = level(f64::from(saturation) * (1.0 - f64::from(rest)));
    match whole as u32 % 6 {
        0 => [value, t, p],
        1 => [q, value, p],
        2 => [p, value, t],
        3 => [p, q, value],
        4 => [t, p, value],
        _ => [value, p, q],
    }
}
