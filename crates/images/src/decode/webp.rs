//! WebP decoding with the crate image-webp.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::{Found, Orientation, Problem};
use crate::image::{Image, Size};

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let mut decoder = decoder(bytes)?;
    let (width, height) = decoder.dimensions();
    let exif = decoder.exif_metadata().ok().flatten();
    let orientation = exif.as_deref().and_then(Orientation::in_exif);
    let orientation = orientation.unwrap_or(Orientation::Normal);
    Ok(Found { size: Size::new(width, height), orientation })
}

pub(super) fn decode(bytes: &[u8], size: Size, target: &mut Image) -> Result<(), Problem> {
    let mut decoder = decoder(bytes)?;
    if !decoder.has_alpha() {
        return decoder.read_image(target.reset(size)?).map_err(Problem::new);
    }
    let length = decoder.output_buffer_size().unwrap_or(usize::MAX);
    let mut pixels = Vec::new();
    let memory = pixels.try_reserve_exact(length);
    memory.map_err(|_| Problem(format!("there is no memory for {size} pixels")))?;
    pixels.resize(length, 0);
    decoder.read_image(&mut pixels).map_err(Problem::new)?;
    for (rgba, rgb) in pixels.chunks_exact(4).zip(target.reset(size)?.chunks_exact_mut(3)) {
        rgb.copy_from_slice(rgba.get(..3).unwrap_or(&[0; 3]));
    }
    Ok(())
}

fn decoder(bytes: &[u8]) -> Result<WebPDecoder<Cursor<&[u8]>>, Problem> {
    WebPDecoder::new(Cursor::new(bytes)).map_err(Problem::new)
}
