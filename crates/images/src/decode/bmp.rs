//! BMP by the crate image.

use std::io::Cursor;

use image::codecs::bmp::BmpDecoder;
use image::{ColorType, ImageDecoder};

use super::{Found, Orientation, Problem};
use crate::image::{Image, Size};

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let decoder = decoder(bytes)?;
    let (width, height) = decoder.dimensions();
    let size = Size::new(width, height);
    // Its run lengths make at most 255 pixels of two bytes, each of one byte or less.
    if size.pixels() > 255 * bytes.len() as u64 {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    Ok(Found { size, orientation: Orientation::Normal })
}

pub(super) fn decode(bytes: &[u8], size: Size, target: &mut Image) -> Result<(), Problem> {
    let decoder = decoder(bytes)?;
    let colour = decoder.color_type();
    if colour == ColorType::Rgb8 {
        return decoder.read_image(target.reset(size)?).map_err(Problem::new);
    }
    let samples = usize::from(colour.bytes_per_pixel());
    let mut pixels = Vec::new();
    let memory = size.bytes().and_then(|bytes| (bytes / 3).checked_mul(samples));
    let reserved = memory.filter(|bytes| pixels.try_reserve_exact(*bytes).is_ok());
    pixels.resize(reserved.ok_or(crate::image::NoMemory(size))?, 0);
    decoder.read_image(&mut pixels).map_err(Problem::new)?;
    for (from, to) in pixels.chunks_exact(samples).zip(target.reset(size)?.chunks_exact_mut(3)) {
        match from {
            [grey] | [grey, _] => to.fill(*grey),
            [red, green, blue, ..] => to.copy_from_slice(&[*red, *green, *blue]),
            [] => {}
        }
    }
    Ok(())
}

fn decoder(bytes: &[u8]) -> Result<BmpDecoder<Cursor<&[u8]>>, Problem> {
    BmpDecoder::new(Cursor::new(bytes)).map_err(Problem::new)
}
