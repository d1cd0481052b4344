//! Decoding of the first frame of a GIF with the crate gif.

use std::io::Cursor;

use gif::{ColorOutput, Decoder};

use super::{Found, Orientation, Problem};
use crate::image::{Image, Size};

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let decoder = decoder(bytes)?;
    let size = Size::new(decoder.width().into(), decoder.height().into());
    Ok(Found { size, orientation: Orientation::Normal })
}

/// Decodes the first frame. Pixels outside of the frame have the transparent colour or, if there is none, the first one
/// of the palette.
pub(super) fn decode(bytes: &[u8], size: Size, target: &mut Image) -> Result<(), Problem> {
    let mut decoder = decoder(bytes)?;
    let global = decoder.global_palette().map(<[u8]>::to_vec);
    let frame = decoder.next_frame_info().map_err(Problem::new)?;
    let frame = frame.ok_or_else(|| Problem("it has no frame".to_owned()))?;
    let palette = frame.palette.clone().or(global);
    let colour = |index: u8| -> [u8; 3] {
        let Some(palette) = &palette else { return [index; 3] };
        let start = 3 * usize::from(index);
        palette.get(start..start + 3).and_then(|it| it.try_into().ok()).unwrap_or_default()
    };
    let (left, top) = (usize::from(frame.left), usize::from(frame.top));
    let (width, height) = (usize::from(frame.width), usize::from(frame.height));
    let background = colour(frame.transparent.unwrap_or(0));
    // LZW expands one byte to some thousand at most.
    if width * height > 4_096 * bytes.len() {
        let size = Size::new(frame.width.into(), frame.height.into());
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    let mut indices = vec![0; width * height];
    decoder.read_into_buffer(&mut indices).map_err(Problem::new)?;

    let out = target.reset(size)?;
    for pixel in out.chunks_exact_mut(3) {
        pixel.copy_from_slice(&background);
    }
    let rows = out.chunks_exact_mut(3 * size.columns()).skip(top);
    for (row, indices) in rows.zip(indices.chunks_exact(width.max(1))) {
        for (pixel, index) in row.chunks_exact_mut(3).skip(left).zip(indices) {
            pixel.copy_from_slice(&colour(*index));
        }
    }
    Ok(())
}

fn decoder(bytes: &[u8]) -> Result<Decoder<Cursor<&[u8]>>, Problem> {
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    options.read_info(Cursor::new(bytes)).map_err(Problem::new)
}
