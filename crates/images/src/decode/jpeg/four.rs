//! JPEG of four colours of which some have fewer samples than others.
//!
//! libjpeg-turbo-rs 0.9 decodes their planes, but panics where it enlarges them if black has fewer samples than cyan, as
//! in Pillow's files with `subsampling=2`, and takes padding for samples at the right edge of the others.

use libjpeg_turbo_rs::decode::color;
use libjpeg_turbo_rs::{ColorSpace, DecodeWarning, Decoder};

use super::{Problem, expect};
use crate::image::Size;

/// Horizontal and vertical sampling factors of a colour.
type Sampling = (usize, usize);

fn samplings(decoder: &Decoder<'_>) -> impl Iterator<Item = Sampling> {
    decoder
        .header()
        .components
        .iter()
        .map(|it| (it.horizontal_sampling.into(), it.vertical_sampling.into()))
}

/// Returns `true` if the colours differ in their numbers of samples.
pub(super) fn is_subsampled(decoder: &Decoder<'_>) -> bool {
    let mut samplings = samplings(decoder);
    let first = samplings.next();
    samplings.any(|it| Some(it) != first)
}

/// Decodes an image of four colours to CMYK of the size `size`, four bytes a pixel.
pub(super) fn decode(
    decoder: Decoder<'_>,
    size: Size,
) -> Result<(Vec<u8>, Vec<DecodeWarning>), Problem> {
    let samplings: Vec<Sampling> = samplings(&decoder).collect();
    let across = samplings.iter().map(|it| it.0).max().unwrap_or(1);
    let down = samplings.iter().map(|it| it.1).max().unwrap_or(1);
    let is_ycck = decoder.jpeg_color_space() == ColorSpace::Ycck;
    let (raw, warnings) = decoder.decode_raw_with_warnings().map_err(Problem::new)?;
    expect(raw.width, raw.height, size)?;
    let mut planes = Vec::new();
    for ((plane, &stride), (h, v)) in raw.planes.iter().zip(&raw.plane_widths).zip(samplings) {
        if across % h != 0 || down % v != 0 {
            return Err(Problem(format!(
                "a colour has {h}x{v} samples where another has {across}x{down}: libjpeg does not \
                 read this either"
            )));
        }
        let (width, height) = ((raw.width * h).div_ceil(across), (raw.height * v).div_ceil(down));
        let rows: Vec<&[u8]> =
            plane.chunks(stride.max(1)).take(height).filter_map(|row| row.get(..width)).collect();
        planes.push((enlarge(&rows, across / h, down / v), width * (across / h)));
    }
    let mut cmyk = vec![0; 4 * raw.width * raw.height];
    for (y, out) in cmyk.chunks_exact_mut(4 * raw.width.max(1)).enumerate() {
        let rows: Vec<&[u8]> =
            planes.iter().filter_map(|(plane, width)| plane.get(y * width..)).collect();
        let &[first, second, third, black] = rows.as_slice() else {
            return Err(Problem("the decoder has not made four colours".to_owned()));
        };
        let convert = if is_ycck { color::ycck_to_cmyk_row } else { color::cmyk_passthrough_row };
        convert(first, second, third, black, out, raw.width);
    }
    Ok((cmyk, warnings))
}

/// Enlarges a plane as libjpeg does (`jdsample.c`): a factor of 2 by a triangle filter, whose rounding alternates
/// between neighbours; others, and planes of one or two columns, by repetition.
fn enlarge(rows: &[&[u8]], across: usize, down: usize) -> Vec<u8> {
    let width = rows.first().map_or(0, |row| row.len());
    let is_smooth = match (across, down) {
        (2, 1 | 2) => width > 2,
        (1, 2) => true,
        _ => false,
    };
    let row = |y: usize| rows.get(y).copied().unwrap_or_default();
    let mut out = Vec::with_capacity(width * across * rows.len() * down);
    for y in 0..rows.len() * down {
        let this = row(y / down);
        if !is_smooth {
            out.extend(this.iter().flat_map(|sample| std::iter::repeat_n(*sample, across)));
            continue;
        }
        let beside = |at: usize, length: usize| match at % 2 {
            0 => (at / 2).saturating_sub(1),
            _ => (at / 2 + 1).min(length - 1),
        };
        let sums: Vec<u32> = if down == 2 {
            let other = row(beside(y, rows.len()));
            this.iter().zip(other).map(|(&a, &b)| 3 * u32::from(a) + u32::from(b)).collect()
        } else {
            this.iter().map(|&it| it.into()).collect()
        };
        let sum = |x: usize| sums.get(x).copied().unwrap_or_default();
        out.extend((0..width * across).map(|x| {
            let (odd_x, odd_y) = ((x % 2) as u32, (y % 2) as u32);
            let value = match (across, down) {
                (1, _) => (sum(x) + 1 + odd_y) >> 2,
                (_, 1) => (3 * sum(x / 2) + sum(beside(x, width)) + 1 + odd_x) >> 2,
                _ => (3 * sum(x / 2) + sum(beside(x, width)) + 8 - odd_x) >> 4,
            };
            value as u8
        }));
    }
    out
}
