//! PNG decoding with the crate png.

use std::io::Cursor;

use png::{BitDepth, ColorType, Decoder, Reader, Transformations};

use super::{Found, Orientation, Problem};
use crate::image::{Image, Size};

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let reader = reader(bytes, Transformations::IDENTITY)?;
    let info = reader.info();
    let size = Size::new(info.width, info.height);
    let exif = info.exif_metadata.as_deref().and_then(Orientation::in_exif);
    // Deflate expands one byte to 1032 at most.
    let raw = info.raw_bytes() as u64;
    if raw > 1_040 * bytes.len() as u64 {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    // The decoder does not check either, and panics if they do not match.
    let colours = info.palette.as_deref().unwrap_or_default().len();
    let transparent = match info.color_type {
        ColorType::Indexed => info.trns.as_deref().unwrap_or_default().len(),
        _ => 0,
    };
    if colours % 3 != 0 || transparent > colours / 3 {
        return Err(Problem(format!(
            "its palette of {colours} bytes is not of whole colours, or has fewer than the \
             {transparent} with a transparency"
        )));
    }
    Ok(Found { size, orientation: exif.unwrap_or(Orientation::Normal) })
}

pub(super) fn decode(bytes: &[u8], size: Size, target: &mut Image) -> Result<(), Problem> {
    let reader = reader(bytes, Transformations::EXPAND)?;
    let (colour, depth) = reader.output_color_type();
    let wide = depth == BitDepth::Sixteen;
    // EXPAND turns a transparent grey into an alpha behind each pixel, which Pillow does not have.
    let plain = reader.info().color_type == ColorType::Grayscale;
    read(reader, size, target, |from, to| convert(from, to, colour, wide, plain))
}

/// Decodes grey values and palette indices as they are stored, three times each. Returns `false` if the pixels are
/// colours.
pub(super) fn decode_numbers(
    bytes: &[u8],
    size: Size,
    target: &mut Image,
) -> Result<bool, Problem> {
    let reader = reader(bytes, Transformations::IDENTITY)?;
    let (colour, depth) = reader.output_color_type();
    if !matches!(colour, ColorType::Grayscale | ColorType::Indexed) {
        return Ok(false);
    }
    let bits = match depth {
        BitDepth::One => 1,
        BitDepth::Two => 2,
        BitDepth::Four => 4,
        BitDepth::Eight => 8,
        BitDepth::Sixteen => {
            return Err(Problem("it has 16 bits a pixel, a mask of classes 8 at most".to_owned()));
        }
    };
    // The first pixel is in the highest bits of a byte.
    let unpack = |from: &[u8], to: &mut [u8]| {
        let places = (0..8 / bits).map(|place| 8 - bits * (place + 1));
        let mask = u8::MAX >> (8 - bits);
        let numbers =
            from.iter().flat_map(|byte| places.clone().map(move |shift| (byte >> shift) & mask));
        for (number, to) in numbers.zip(to.as_chunks_mut::<3>().0) {
            to.fill(number);
        }
    };
    read(reader, size, target, unpack)?;
    Ok(true)
}

/// Reads all rows, and converts each to pixels with `convert`.
fn read(
    mut reader: Reader<Cursor<&[u8]>>,
    size: Size,
    target: &mut Image,
    convert: impl Fn(&[u8], &mut [u8]),
) -> Result<(), Problem> {
    let line = reader.output_line_size(size.width).ok_or_else(|| no_rows(size))?;
    let out = target.reset(size)?;
    let rows = |from: &[u8], to: &mut [u8]| {
        for (from, to) in from.chunks_exact(line).zip(to.chunks_exact_mut(3 * size.columns())) {
            convert(from, to);
        }
    };
    if reader.info().interlaced {
        // The image is stored in several passes.
        let mut all = Vec::new();
        let bytes = reader.output_buffer_size().ok_or_else(|| no_rows(size))?;
        all.try_reserve_exact(bytes).map_err(|_| no_rows(size))?;
        all.resize(bytes, 0);
        reader.next_frame(&mut all).map_err(Problem::new)?;
        rows(&all, out);
        return Ok(());
    }
    for to in out.chunks_exact_mut(3 * size.columns()) {
        let row = reader.next_row().map_err(Problem::new)?;
        let row = row.ok_or_else(|| Problem("it has too few rows".to_owned()))?;
        rows(row.data(), to);
    }
    Ok(())
}

fn reader(bytes: &[u8], changes: Transformations) -> Result<Reader<Cursor<&[u8]>>, Problem> {
    let mut decoder = Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(changes);
    decoder.read_info().map_err(Problem::new)
}

fn no_rows(size: Size) -> Problem {
    Problem(format!("there is no memory for {size} pixels"))
}

/// Converts a row to RGB. Of 16 bits, Pillow takes the upper eight of colours and of grey with alpha, but clamps plain
/// grey to 255.
fn convert(from: &[u8], to: &mut [u8], colour: ColorType, wide: bool, plain: bool) {
    let bytes = if wide { 2 } else { 1 };
    let samples = colour.samples() * bytes;
    for (from, to) in from.chunks_exact(samples).zip(to.chunks_exact_mut(3)) {
        match (colour, from) {
            (_, [high, low, ..]) if wide && plain => {
                to.fill(if *high == 0 { *low } else { 255 });
            }
            (ColorType::Grayscale | ColorType::GrayscaleAlpha, [grey, ..]) => to.fill(*grey),
            (_, from) => {
                for (to, from) in to.iter_mut().zip(from.iter().step_by(bytes)) {
                    *to = *from;
                }
            }
        }
    }
}
