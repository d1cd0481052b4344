//! Decoding of the first image of a TIFF file, by Pillow's rules.
//!
//! The crate tiff is not used: it rejects palettes, and decodes JPEG by zune-jpeg, whose pixels differ from libjpeg's.
//! The decompressors themselves are those of established crates.

mod compression;
mod directory;

use brigade_rank_env::text::counted;

use self::compression::Compression;
use self::directory::{Directory, tag};
use super::jpeg;
use super::{Found, Orientation, Problem};
use crate::image::{Image, NoMemory, Size};

/// Returns `true` if a file begins as TIFF or BigTIFF.
pub(super) fn is_magic(bytes: &[u8]) -> bool {
    matches!(bytes, [b'I', b'I', 42 | 43, 0, ..] | [b'M', b'M', 0, 42 | 43, ..])
}

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let picture = Picture::parse(bytes)?;
    let size = picture.size;
    let most = picture.compression.most_pixels(bytes.len() as u64, picture.bits_per_pixel());
    if size.pixels() > most {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    Ok(Found { size, orientation: picture.orientation })
}

/// Meaning of the samples of a pixel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Colours {
    /// Grey values: the largest is white and 0 is black, or the reverse if `inverted`.
    Grey {
        inverted: bool,
    },
    Signed,
    Float,
    Rgb {
        premultiplied: bool,
    },
    Palette,
    Cmyk,
    /// Converted to RGB by the JPEG decoder.
    YCbCr,
}

/// The position, size and format of the pixels.
struct Picture<'a> {
    bytes: &'a [u8],
    size: Size,
    orientation: Orientation,
    big_endian: bool,
    colours: Colours,
    bits: u32,
    /// Number of samples of a pixel, including those that are not used.
    samples: usize,
    /// `true` if each sample of the pixels is stored separately.
    planar: bool,
    compression: Compression,
    /// `true` if differences of samples to the pixel before are stored.
    differences: bool,
    /// `true` if the first pixel is in the lowest bits of a byte.
    reversed: bool,
    palette: Vec<[u8; 3]>,
    tables: &'a [u8],
    /// Size of a strip or a tile.
    chunk: Size,
    tiled: bool,
    offsets: Vec<u64>,
    lengths: Vec<u64>,
}

impl<'a> Picture<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, Problem> {
        let directory = Directory::first(bytes)?;
        let one = |tag, default: u64| directory.first_value(tag).unwrap_or(default);
        let side = |tag, what: &str| {
            let value = directory.first_value(tag).and_then(|it| u32::try_from(it).ok());
            value.ok_or_else(|| Problem(format!("it has no {what}")))
        };
        let size = Size::new(side(tag::WIDTH, "width")?, side(tag::HEIGHT, "height")?);
        let compression = Compression::of(one(tag::COMPRESSION, 1), one(tag::FAX_OPTIONS, 0))?;
        let planar = one(tag::PLANAR, 1) == 2;

        let photometric = one(tag::PHOTOMETRIC, 0);
        let mut bits = directory.values(tag::BITS);
        if bits.is_empty() {
            bits.push(1);
        }
        let mut samples = usize::try_from(one(tag::SAMPLES, 1)).unwrap_or(usize::MAX);
        let mut extra = directory.values(tag::EXTRA_SAMPLES);
        if planar && !extra.is_empty() && extra.iter().all(|kind| *kind == 0) {
            // Unknown samples come last, each stored separately.
            bits.truncate(bits.len().saturating_sub(extra.len()));
            samples = samples.saturating_sub(extra.len());
            extra.clear();
        }
        if samples == 0 || samples > 6 {
            return Err(Problem(format!("it has {samples} samples a pixel, expected 1 to 6")));
        }
        match bits.as_slice() {
            [bits_of_all] => bits = vec![*bits_of_all; samples],
            more => bits = more.get(..samples).unwrap_or_default().to_vec(),
        }
        let formats = directory.values(tag::FORMAT);
        let format = formats.first().copied().unwrap_or(1);
        let uniform = bits.first().filter(|first| bits.iter().all(|it| it == *first));
        let depth = uniform.copied().filter(|_| formats.iter().all(|it| *it == format));
        let depth = depth.and_then(|bits| u32::try_from(bits).ok());
        let premultiplied = extra.first() == Some(&1);
        let kind = (photometric, format, samples - extra.len().min(samples - 1), depth);
        let colours = match kind {
            (0 | 1, 1, 1, Some(1 | 2 | 4 | 8)) | (1, 2, 1, Some(8)) if !premultiplied => {
                Some(Colours::Grey { inverted: photometric == 0 })
            }
            (6, 1, 1, Some(8)) => Some(Colours::Grey { inverted: false }),
            // Pillow does not invert these.
            (1, 1, 1, Some(12)) | (0 | 1, 1, 1, Some(16)) if extra.is_empty() => {
                Some(Colours::Grey { inverted: false })
            }
            (1, 2, 1, Some(16 | 32)) | (1, 1, 1, Some(32)) if extra.is_empty() => {
                Some(Colours::Signed)
            }
            (0 | 1, 3, 1, Some(32)) if extra.is_empty() => Some(Colours::Float),
            (2, 1, 3, Some(8 | 16)) => Some(Colours::Rgb { premultiplied }),
            // Some writers do not declare that the fourth sample is alpha.
            (2, 1, 4, Some(8 | 16)) if extra.is_empty() => {
                Some(Colours::Rgb { premultiplied: false })
            }
            (3, 1, 1, Some(1 | 2 | 4 | 8)) if !premultiplied => Some(Colours::Palette),
            (5, 1, 4, Some(8 | 16)) => Some(Colours::Cmyk),
            (6, 1, 3, Some(8)) if matches!(compression, Compression::Jpeg) && !planar => {
                Some(Colours::YCbCr)
            }
            _ => None,
        };
        let (Some(colours), Some(bits)) = (colours, depth) else {
            return Err(Problem(format!(
                "its pixels (photometric interpretation {photometric}, sample format {format}, \
                 bits {bits:?}, extra samples {extra:?}) are not read; convert it to RGB: \
                 `tiff2rgba` or `magick FILE FILE.png`"
            )));
        };
        let differences = match one(tag::PREDICTOR, 1) {
            2 if compression.has_predictor() && bits >= 8 && bits != 12 => true,
            1 | 2 => false,
            _ if !compression.has_predictor() => false,
            other => return Err(Problem(format!("its predictor {other} is not read"))),
        };

        let tiled = !directory.values(tag::STRIP_OFFSETS).is_empty();
        let tiled = !tiled && !directory.values(tag::TILE_OFFSETS).is_empty();
        let (chunk, offsets, lengths) = if tiled {
            let chunk = Size::new(
                side(tag::TILE_WIDTH, "tiles' width")?,
                side(tag::TILE_HEIGHT, "tiles' height")?,
            );
            (chunk, tag::TILE_OFFSETS, tag::TILE_LENGTHS)
        } else {
            let rows = one(tag::ROWS_PER_STRIP, u64::MAX).min(size.height.into()) as u32;
            (Size::new(size.width, rows), tag::STRIP_OFFSETS, tag::STRIP_LENGTHS)
        };
        let most = Size::new(size.width.max(LARGEST_TILE), size.height.max(LARGEST_TILE));
        if tiled && (chunk.width > most.width || chunk.height > most.height) {
            return Err(Problem(format!(
                "its tiles have {chunk} pixels, more than the {most} that are read of a picture of {size}"
            )));
        }
        if chunk.width == 0 || chunk.height == 0 {
            return Err(Problem(format!("its strips or tiles are {chunk} pixels")));
        }
        let mut offsets = directory.values(offsets);
        if compression == Compression::None && !planar && chunk == size {
            // Each of them is the whole image, and Pillow takes the last.
            offsets.drain(..offsets.len().saturating_sub(1));
        }
        let palette = directory.values(tag::COLOUR_MAP);
        if colours == Colours::Palette && palette.len() < 3 {
            return Err(Problem("its palette does not lie in the file".to_owned()));
        }
        let third = palette.len() / 3;
        let high = |place: usize| palette.get(place).map_or(0, |value| (value / 256) as u8);
        let palette = (0..third).map(|it| [high(it), high(it + third), high(it + 2 * third)]);
        let orientation = u8::try_from(one(tag::ORIENTATION, 1)).ok();
        Ok(Self {
            bytes,
            size,
            orientation: orientation.and_then(Orientation::of_exif).unwrap_or_default(),
            big_endian: directory.big_endian,
            colours,
            bits,
            samples,
            planar: planar && samples > 1,
            compression,
            differences,
            reversed: one(tag::FILL_ORDER, 1) == 2,
            palette: palette.collect(),
            tables: directory.bytes_of(tag::JPEG_TABLES).unwrap_or_default(),
            chunk,
            tiled,
            lengths: directory.values(lengths),
            offsets,
        })
    }

    fn bits_per_pixel(&self) -> u64 {
        u64::from(self.bits) * if self.planar { 1 } else { self.samples as u64 }
    }

    /// Returns the number of bytes of a row of a strip or tile.
    fn line(&self) -> Result<usize, Problem> {
        let line = (u64::from(self.chunk.width) * self.bits_per_pixel()).div_ceil(8);
        usize::try_from(line).map_err(|_| NoMemory(self.chunk).into())
    }

    /// Returns the number of bytes of a compressed strip or tile in the file.
    fn stored(&self, number: usize) -> u64 {
        let start = self.offsets.get(number).copied().unwrap_or_default();
        let rest = (self.bytes.len() as u64).saturating_sub(start);
        self.lengths.get(number).copied().unwrap_or(rest)
    }

    /// Returns the uncompressed rows of a strip or tile, of which `rows` are in the image.
    fn chunk(&self, number: usize, rows: u32) -> Result<Vec<u8>, Problem> {
        let short = || Problem(format!("its strip or tile {number} does not lie in the file"));
        let start = self.offsets.get(number).and_then(|it| usize::try_from(*it).ok());
        let data = start.and_then(|start| self.bytes.get(start..)).ok_or_else(short)?;
        let line = self.line()?;
        let length = line.checked_mul(rows as usize).ok_or(NoMemory(self.chunk))?;
        // Without compression the lengths are redundant, and often wrong.
        let stored = match self.compression {
            Compression::None => length,
            _ => usize::try_from(self.stored(number)).unwrap_or(usize::MAX),
        };
        let data = data.get(..stored).ok_or_else(short)?;
        // A tile may be wider than the image.
        if length as u64 > self.compression.most_pixels(data.len() as u64, 8) {
            return Err(Problem::too_few_bytes(self.chunk, data.len()));
        }
        let turned: Vec<u8>;
        let data = if self.reversed && self.compression != Compression::Jpeg {
            turned = data.iter().map(|byte| byte.reverse_bits()).collect();
            &turned
        } else {
            data
        };
        if self.compression == Compression::Jpeg {
            let samples = if self.planar { 1 } else { self.samples };
            let ycbcr = self.colours == Colours::YCbCr;
            return jpeg::decode_samples(self.tables, data, self.chunk, rows, samples, ycbcr);
        }
        let mut unpacked =
            self.compression.unpack(data, length, Size::new(self.chunk.width, rows))?;
        if self.differences {
            let stride = if self.planar { 1 } else { self.samples };
            for row in unpacked.chunks_mut(line) {
                sum_up(row, stride, self.bits, self.big_endian);
            }
        }
        Ok(unpacked)
    }

    /// Reads one sample of a row.
    fn sample(&self, row: &[u8], place: usize) -> u32 {
        let byte = |at: usize| u32::from(row.get(at).copied().unwrap_or_default());
        let pair = |at: usize| {
            if self.big_endian {
                byte(at) << 8 | byte(at + 1)
            } else {
                byte(at + 1) << 8 | byte(at)
            }
        };
        match self.bits {
            8 => byte(place),
            16 => pair(2 * place),
            32 if self.big_endian => pair(4 * place) << 16 | pair(4 * place + 2),
            32 => pair(4 * place + 2) << 16 | pair(4 * place),
            12 => {
                let at = place / 2 * 3;
                match place % 2 {
                    0 => byte(at) << 4 | byte(at + 1) >> 4,
                    _ => (byte(at + 1) & 15) << 8 | byte(at + 2),
                }
            }
            bits => {
                let bit = place * bits as usize;
                byte(bit / 8) >> (8 - bits as usize - bit % 8) & ((1 << bits) - 1)
            }
        }
    }

    /// Returns the upper eight bits of a sample.
    fn high(&self, sample: u32) -> u8 {
        (if self.bits == 16 { sample >> 8 } else { sample }) as u8
    }

    /// Converts the samples of a pixel to its colour.
    fn colour(&self, samples: &[u32; 6]) -> [u8; 3] {
        let first = samples[0];
        match self.colours {
            Colours::Grey { inverted } => {
                let grey = match self.bits {
                    1 | 2 | 4 => (first * (255 / ((1 << self.bits) - 1))) as u8,
                    _ => first.min(255) as u8,
                };
                [if inverted { 255 - grey } else { grey }; 3]
            }
            Colours::Signed => {
                let value = if self.bits == 16 { first as u16 as i16 as i32 } else { first as i32 };
                [value.clamp(0, 255) as u8; 3]
            }
            // A cast of a float saturates at 0 and 255.
            Colours::Float => [f32::from_bits(first) as u8; 3],
            Colours::Palette => self.palette.get(first as usize).copied().unwrap_or_default(),
            Colours::Rgb { premultiplied } => {
                let rgb = [samples[0], samples[1], samples[2]].map(|it| self.high(it));
                match u32::from(self.high(samples[3])) {
                    0 if premultiplied => [0; 3],
                    alpha @ 1..255 if premultiplied => {
                        rgb.map(|it| (u32::from(it) * 255 / alpha).min(255) as u8)
                    }
                    _ => rgb,
                }
            }
            Colours::Cmyk => {
                let inverted = [samples[0], samples[1], samples[2], samples[3]];
                jpeg::of_cmyk(&inverted.map(|it| 255 - self.high(it)))
            }
            Colours::YCbCr => [samples[0], samples[1], samples[2]].map(|it| it as u8),
        }
    }
}

/// Maximum number of columns and rows of a tile in a smaller image. Writers make tiles of 256 or 512.
const LARGEST_TILE: u32 = 4096;
/// All tables that JPEG defines have less than 4 KiB.
const MAX_JPEG_TABLES: usize = 64 << 10;

/// Adds to each sample that of the pixel before.
fn sum_up(row: &mut [u8], stride: usize, bits: u32, big_endian: bool) {
    let width = bits as usize / 8;
    for at in (stride * width..(row.len() + 1).saturating_sub(width)).step_by(width) {
        let read = |row: &[u8], at: usize| {
            let mut bytes = [0; 4];
            for (place, byte) in bytes.iter_mut().take(width).enumerate() {
                let place = if big_endian { width - 1 - place } else { place };
                *byte = row.get(at + place).copied().unwrap_or_default();
            }
            u32::from_le_bytes(bytes)
        };
        let sum = read(row, at).wrapping_add(read(row, at - stride * width));
        for (place, byte) in sum.to_le_bytes().into_iter().take(width).enumerate() {
            let place = if big_endian { width - 1 - place } else { place };
            if let Some(to) = row.get_mut(at + place) {
                *to = byte;
            }
        }
    }
}

/// Decodes colours, or with `numbers` grey values and palette indices as they are stored, three times each. Returns
/// `false` if `numbers` is set and the pixels are colours.
pub(super) fn decode(bytes: &[u8], target: &mut Image, numbers: bool) -> Result<bool, Problem> {
    let picture = Picture::parse(bytes)?;
    let size = picture.size;
    if numbers {
        match picture.colours {
            Colours::Grey { .. } | Colours::Palette if picture.bits <= 8 => {}
            Colours::Grey { .. } | Colours::Signed | Colours::Float => {
                let bits = picture.bits;
                return Err(Problem(format!(
                    "it has {bits} bits a pixel, a mask of classes 8 at most"
                )));
            }
            _ => return Ok(false),
        }
    }
    let out = target.reset(size)?;
    let (chunk, columns) = (picture.chunk, size.columns());
    let across = if picture.tiled { columns.div_ceil(chunk.columns()) } else { 1 };
    let down = size.rows().div_ceil(chunk.rows());
    let line = picture.line()?.max(1);
    let planes = if picture.planar { picture.samples } else { 1 };
    // Each strip or tile is read once; if they could overlap, a small file could cause any amount of work.
    let stored = match picture.compression {
        Compression::None => [size.rows(), across, planes, line]
            .into_iter()
            .fold(1_u64, |product, factor| product.saturating_mul(factor as u64)),
        _ => {
            let stored = (0..picture.offsets.len()).map(|number| picture.stored(number));
            stored.fold(0, u64::saturating_add)
        }
    };
    if stored > 4 * bytes.len() as u64 {
        return Err(Problem("its strips or tiles overlap".to_owned()));
    }
    // The tables are read again for each strip or tile.
    let (tables, pieces) = (picture.tables.len(), across * down * planes);
    if picture.compression == Compression::Jpeg
        && (tables > MAX_JPEG_TABLES || tables.saturating_mul(pieces) > 64 * bytes.len())
    {
        return Err(Problem(format!(
            "its JPEG tables have {}, too many for a picture in {}",
            counted(tables, "byte"),
            counted(pieces, "piece")
        )));
    }
    let largest = (1_u32 << picture.bits.min(8)) - 1;
    for number in 0..across * down {
        let (left, top) = (number % across * chunk.columns(), number / across * chunk.rows());
        // The rows of a strip end with the image.
        let rows = chunk.rows().min(size.rows() - top);
        let planes: Vec<Vec<u8>> = (0..planes)
            .map(|plane| picture.chunk(plane * across * down + number, rows as u32))
            .collect::<Result<_, _>>()?;
        let width = chunk.columns().min(columns - left);
        for y in 0..rows {
            let start = 3 * ((top + y) * columns + left);
            let Some(out) = out.get_mut(start..start + 3 * width) else { continue };
            let row = |plane: &'_ Vec<u8>| plane.get(y * line..(y + 1) * line).map(<[u8]>::to_vec);
            let rows: Vec<Vec<u8>> = planes.iter().filter_map(row).collect();
            for (x, pixel) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
                let mut samples = [0; 6];
                for (number, sample) in samples.iter_mut().take(picture.samples).enumerate() {
                    let (row, place) = if picture.planar {
                        (rows.get(number), x)
                    } else {
                        (rows.first(), x * picture.samples + number)
                    };
                    *sample = row.map_or(0, |row| picture.sample(row, place));
                }
                *pixel = match picture.colours {
                    Colours::Grey { inverted: true } if numbers => {
                        [(largest - samples[0].min(largest)) as u8; 3]
                    }
                    _ if numbers => [samples[0] as u8; 3],
                    _ => picture.colour(&samples),
                };
            }
        }
    }
    Ok(true)
}
