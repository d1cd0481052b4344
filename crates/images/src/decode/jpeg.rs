//! JPEG decoding with libjpeg-turbo-rs, a port of libjpeg-turbo with the same output, which needs no C compiler, cmake
//! or assembler to build. It can skip blocks and decode at a fraction of the size, which zune-jpeg cannot, and
//! zune-jpeg's pixels differ from Pillow's by some grey levels.

mod four;
mod repair;

use libjpeg_turbo_rs::{ColorSpace, DecodeLimits, DecodeWarning, PixelFormat, ScalingFactor};

use super::{Found, Orientation, Problem};
use crate::image::{CropBox, Image, Region, Size};

/// Maximum number of scans of a progressive file: libjpeg's own limit for fuzzers is 500, common encoders write 10.
const MAX_SCANS: usize = 1_000;

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let repaired;
    let decoder = match decoder(bytes) {
        Ok(decoder) => decoder,
        // In a progressive file, the decoder checks all scans.
        Err(refused) => {
            repaired = repair::repair(bytes).ok_or(refused)?.jpeg;
            decoder(&repaired)?
        }
    };
    let size = size(&decoder)?;
    let orientation = decoder.exif_orientation().and_then(Orientation::of_exif);
    // Without arithmetic coding, each block takes at least one bit in the first scan.
    let blocks = size.pixels() / 64;
    if !decoder.is_arithmetic() && blocks > 8 * bytes.len() as u64 {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    Ok(Found { size, orientation: orientation.unwrap_or(Orientation::Normal) })
}

/// The position of a region in the decoded image, and the warning of a damaged file that was read nevertheless.
pub(super) type Decoded = (CropBox, Option<String>);

/// Decodes a region, which must be inside of the image of the size `whole`, at the scale that `at_least` allows, with
/// its surroundings up to the edges of blocks. Damaged files that libjpeg reads with a warning are read in the same
/// way.
pub(super) fn decode_region(
    bytes: &[u8],
    whole: Size,
    region: Region,
    at_least: Option<Size>,
    target: &mut Image,
) -> Result<Decoded, Problem> {
    if !repair::is_whole(bytes) {
        return Err(Problem("it ends before its end marker (EOI): it was cut short".to_owned()));
    }
    let refused = match decode_sound(bytes, whole, region, at_least, false, target) {
        Ok(decoded) => return Ok(decoded),
        Err(refused) => refused,
    };
    if let Some(repair::Repaired { jpeg, warning }) = repair::repair(bytes) {
        let (place, _) = decode_sound(&jpeg, whole, region, at_least, false, target)?;
        return Ok((place, warning));
    }
    // A progressive file whose coded data end early, but which has its end marker: the decoder then does the same as
    // libjpeg if blocks are smoothed.
    if bytes.ends_with(&[0xFF, 0xD9])
        && repair::is_progressive_with_known_markers(bytes)
        && let Ok(decoded @ (_, Some(_))) =
            decode_sound(bytes, whole, region, at_least, true, target)
    {
        return Ok(decoded);
    }
    Err(refused)
}

fn decode_sound(
    bytes: &[u8],
    whole: Size,
    region: Region,
    at_least: Option<Size>,
    lenient: bool,
    target: &mut Image,
) -> Result<Decoded, Problem> {
    let scale = at_least.map_or(1, |least| scale(region, least));
    let (_, last) = around(region.top, region.height, scale, whole.height.div_ceil(scale));
    let shorter = shortened(bytes, whole.height, last.saturating_mul(scale));
    let bytes = shorter.as_deref().unwrap_or(bytes);
    let mut decoder = decoder(bytes)?;
    decoder.set_lenient(lenient);
    let whole = size(&decoder)?;
    let is_cmyk = is_cmyk(&decoder);
    let is_subsampled = is_cmyk && four::is_subsampled(&decoder);
    let scale = if is_subsampled { 1 } else { scale };
    decoder.set_scale(ScalingFactor::try_new(1, scale).map_err(Problem::new)?);
    let format = if is_cmyk { PixelFormat::Cmyk } else { PixelFormat::Rgb };
    decoder.set_output_format(format);

    let scaled = Size::new(whole.width.div_ceil(scale), whole.height.div_ceil(scale));
    // Four colours are rare, and the decoder's output for a region of them differs from that for the whole image.
    let (columns, rows) = if is_cmyk {
        ((0, scaled.width), (0, scaled.height))
    } else {
        (
            around(region.left, region.width, scale, scaled.width),
            around(region.top, region.height, scale, scaled.height),
        )
    };
    let size = Size::new(columns.1 - columns.0, rows.1 - rows.0);
    if size.width < scaled.width {
        decoder.set_crop(columns.0 as usize, size.columns());
    }
    if size.height < scaled.height {
        decoder.set_crop_y(rows.0 as usize, size.rows());
    }
    let warnings = if is_cmyk {
        let pixels = target.reset(size)?;
        let (data, warnings) = if is_subsampled {
            four::decode(decoder, size)?
        } else {
            let image = decoder.decode_image().map_err(Problem::new)?;
            expect(image.width, image.height, size)?;
            (image.data, image.warnings)
        };
        for (cmyk, rgb) in data.chunks_exact(4).zip(pixels.chunks_exact_mut(3)) {
            rgb.copy_from_slice(&of_cmyk(cmyk));
        }
        warnings
    } else if size.height < scaled.height {
        // With a crop of rows, the decoder writes into memory of its own first.
        let image = decoder.decode_image().map_err(Problem::new)?;
        expect(image.width, image.height, size)?;
        target.replace(size, image.data).ok_or_else(|| missing(size))?;
        image.warnings
    } else {
        let info = decoder.decode_image_into(target.reset(size)?).map_err(Problem::new)?;
        expect(info.width, info.height, size)?;
        info.warnings
    };
    let other = |warning: &DecodeWarning| {
        !matches!(
            warning,
            DecodeWarning::TruncatedData { .. } | DecodeWarning::ExtraneousData { .. }
        )
    };
    if let Some(warning) = warnings.iter().find(|warning| other(warning)) {
        return Err(Problem::new(warning));
    }
    let warning = warnings.first().map(ToString::to_string);
    let scale = f64::from(scale);
    let place = CropBox {
        left: f64::from(region.left) / scale - f64::from(columns.0),
        top: f64::from(region.top) / scale - f64::from(rows.0),
        width: f64::from(region.width) / scale,
        height: f64::from(region.height) / scale,
    };
    Ok((place, warning))
}

/// Copies a file and changes the height in its header to `rows`, so that the decoder ends there instead of reading the
/// rows below: their entropy decoding is half the cost of a small crop. Returns `None` if the whole file must be read:
/// if it has more than one scan, if this saves nothing, and if the file has no end marker, so that a file that was cut
/// short is not accepted as complete.
fn shortened(bytes: &[u8], height: u32, rows: u32) -> Option<Vec<u8>> {
    let rows = u16::try_from(rows).ok().filter(|rows| u32::from(*rows) < height)?;
    if !bytes.ends_with(&[0xFF, 0xD9]) {
        return None;
    }
    // Markers follow each other up to the scan: FF, the kind, and the length of the rest.
    let mut place = 2;
    let mut frame = None;
    loop {
        let &[0xFF, kind, high, low, ..] = bytes.get(place..)? else { return None };
        let length = usize::from(u16::from_be_bytes([high, low]));
        let body = bytes.get(place + 4..place + 2 + length)?;
        match kind {
            // Baseline and extended sequential coding: precision, height, width, number of components.
            0xC0 | 0xC1 => frame = Some((place + 5, *body.get(5)?)),
            // Other codings have several passes over the image, or code it arithmetically.
            0xC2..=0xCF if !matches!(kind, 0xC4 | 0xC8 | 0xCC) => return None,
            0xDA => break,
            _ => {}
        }
        place += 2 + length;
    }
    let (height_at, components) = frame?;
    if bytes.get(place + 4) != Some(&components) {
        return None;
    }
    let mut shorter = bytes.to_vec();
    shorter.get_mut(height_at..height_at + 2)?.copy_from_slice(&rows.to_be_bytes());
    Some(shorter)
}

/// Decodes a strip or tile of a TIFF file, whose tables may be elsewhere, to bytes with `samples` per pixel: the first
/// `rows` rows of a `chunk`. Three samples are converted to RGB if they are YCbCr; others are not changed.
pub(super) fn decode_samples(
    tables: &[u8],
    data: &[u8],
    chunk: Size,
    rows: u32,
    samples: usize,
    ycbcr: bool,
) -> Result<Vec<u8>, Problem> {
    let format = match samples {
        1 => PixelFormat::Grayscale,
        3 => PixelFormat::Rgb,
        4 => PixelFormat::Cmyk,
        _ => return Err(Problem(format!("JPEG of {samples} samples a pixel is not read"))),
    };
    // Adobe's marker contains the colour space: the directory of the TIFF file has it, the strip does not.
    let adobe = *b"\xff\xd8\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00";
    let tables = tables.get(2..tables.len().saturating_sub(2)).unwrap_or_default();
    let data = data.strip_prefix(b"\xff\xd8").unwrap_or(data);
    let stream = [&adobe[..], &[u8::from(ycbcr)], tables, data].concat();
    let found = header(&stream)?.size;
    if found.width != chunk.width || !(rows..=chunk.height).contains(&found.height) {
        let visible = Size::new(chunk.width, rows);
        return Err(Problem(format!("a strip or tile of {visible} pixels has {found} as JPEG")));
    }
    let mut decoder = decoder(&stream)?;
    let mut pixels = if is_cmyk(&decoder) && four::is_subsampled(&decoder) {
        four::decode(decoder, found)?.0
    } else {
        decoder.set_output_format(format);
        decoder.decode_image().map_err(Problem::new)?.data
    };
    pixels.truncate(samples * chunk.columns() * rows as usize);
    Ok(pixels)
}

fn decoder(bytes: &[u8]) -> Result<libjpeg_turbo_rs::Decoder<'_>, Problem> {
    let limits = DecodeLimits { max_scans: MAX_SCANS, ..DecodeLimits::default() };
    let mut decoder =
        libjpeg_turbo_rs::Decoder::new_with_limits(bytes, limits).map_err(Problem::new)?;
    // The default of libjpeg; it only affects progressive files whose last scans are missing.
    decoder.set_block_smoothing(true);
    Ok(decoder)
}

fn is_cmyk(decoder: &libjpeg_turbo_rs::Decoder<'_>) -> bool {
    matches!(decoder.jpeg_color_space(), ColorSpace::Cmyk | ColorSpace::Ycck)
}

fn size(decoder: &libjpeg_turbo_rs::Decoder<'_>) -> Result<Size, Problem> {
    let header = decoder.header();
    if header.precision != 8 || header.is_lossless {
        return Err(Problem(format!(
            "it has {} bits a colour{}, which Pillow does not read either",
            header.precision,
            if header.is_lossless { " without loss" } else { "" }
        )));
    }
    Ok(Size::new(header.width.into(), header.height.into()))
}

/// Returns the largest of 1, 2, 4 and 8 by which the region may be divided.
fn scale(region: Region, least: Size) -> u32 {
    let fits =
        |scale: u32| region.width / scale >= least.width && region.height / scale >= least.height;
    [8, 4, 2].into_iter().find(|scale| fits(*scale)).unwrap_or(1)
}

/// Returns the first column or row of a region at a scale and the end, with one iMCU (at most 32 pixels) added on each
/// side: the filter that doubles the chroma reads the neighbours of a pixel, which would be missing at the edge of the
/// decoded area. The start is that of an iMCU for any subsampling.
fn around(start: u32, length: u32, scale: u32, limit: u32) -> (u32, u32) {
    let unit = 32 / scale;
    let first = (start / scale / unit).saturating_sub(1) * unit;
    let end = (start + length).div_ceil(scale).saturating_add(unit).min(limit);
    (first, end)
}

fn expect(width: usize, height: usize, size: Size) -> Result<(), Problem> {
    if (width, height) == (size.columns(), size.rows()) { Ok(()) } else { Err(missing(size)) }
}

fn missing(size: Size) -> Problem {
    Problem(format!("the decoder has not made {size} pixels"))
}

/// Converts CMYK to RGB. Pillow treats all files with four colours as Adobe's, which are inverted.
pub(super) fn of_cmyk(pixel: &[u8]) -> [u8; 3] {
    let &[cyan, magenta, yellow, black] = pixel else { return [0; 3] };
    let rest = u32::from(black);
    let colour = |inverted: u8| {
        let product = u32::from(255 - inverted) * rest + 128;
        rest.saturating_sub((product + (product >> 8)) >> 8) as u8
    };
    [colour(cyan), colour(magenta), colour(yellow)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &[u8] = include_bytes!("../../tests/golden/decode/420.jpg");

    #[test]
    fn only_whole_sequential_files_are_shortened() {
        let height = header(WHOLE).unwrap().size.height;
        let shorter = shortened(WHOLE, height, 8).unwrap();
        let size = header(&shorter).unwrap().size;
        assert_eq!((size.height, size.width), (8, header(WHOLE).unwrap().size.width));
        assert!(shortened(WHOLE, height, height).is_none());
        assert!(shortened(WHOLE, height, height + 1).is_none());
        assert!(shortened(&WHOLE[..WHOLE.len() - 1], height, 8).is_none());
        let progressive = include_bytes!("../../tests/golden/decode/progressive.jpg");
        assert!(header(progressive).is_ok());
        assert!(shortened(progressive, height, 8).is_none());
        for end in 0..WHOLE.len().min(700) {
            let cut = [&WHOLE[..end], &[0xFF, 0xD9]].concat();
            let _ = shortened(&cut, height, 8);
        }
    }

    #[test]
    fn rows_below_a_crop_do_not_matter() {
        let size = header(WHOLE).unwrap().size;
        let region = Region { left: 0, top: 0, width: size.width, height: 4 };
        let (mut expected, mut found) = (Image::scratch(), Image::scratch());
        decode_region(WHOLE, size, region, None, &mut expected).unwrap();
        let mut damaged = WHOLE.to_vec();
        let end = damaged.len() - 2;
        damaged[end - 8..end].fill(0x55);
        decode_region(&damaged, size, region, None, &mut found).unwrap();
        assert_eq!(found, expected);
    }
}
