//! BMP decoding by Pillow's rules. Libraries differ in the headers and masks that they support, in the handling of
//! palettes, and in run lengths that exceed the end of a row.

use super::{Found, Orientation, Problem};
use crate::image::{Image, NoMemory, Size};

/// Parsed header of a BMP file.
struct Header {
    size: Size,
    top_down: bool,
    bits: u32,
    pixels: Pixels,
    /// Position of the pixels in the file.
    start: usize,
}

enum Pixels {
    /// Indices into a palette of blue, green and red.
    Palette { colours: Vec<[u8; 3]>, run_lengths: bool },
    /// Packed blue, green and red of five bits, green of five or six.
    Packed { green_bits: u32 },
    /// Positions of red, green and blue in the bytes of a pixel.
    Bytes([usize; 3]),
}

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let header = parse(bytes)?;
    let Header { size, bits, start, .. } = header;
    let left = bytes.len().saturating_sub(start) as u64;
    let holds = match header.pixels {
        // A run length makes at most 255 pixels of two bytes, and a step down one row of four.
        Pixels::Palette { run_lengths: true, .. } => size.pixels() <= 255 * bytes.len() as u64,
        _ => {
            let line = (u64::from(size.width) * u64::from(bits)).div_ceil(8);
            let before = u64::from(size.height.saturating_sub(1)).checked_mul(stride(size, bits));
            before.and_then(|before| before.checked_add(line)).is_some_and(|all| all <= left)
        }
    };
    if !holds {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    Ok(Found { size, orientation: Orientation::Normal })
}

/// Decodes colours, or with `numbers` the palette indices, three times each. Returns `false` if indices are requested
/// and there is no palette.
pub(super) fn decode(bytes: &[u8], target: &mut Image, numbers: bool) -> Result<bool, Problem> {
    let Header { size, top_down, bits, pixels, start } = parse(bytes)?;
    let data = bytes.get(start..).unwrap_or_default();
    let unpacked;
    let (data, bits, stride) = match &pixels {
        Pixels::Palette { run_lengths: true, .. } => {
            unpacked = run_lengths(bytes, start, size, bits == 4)?;
            (unpacked.as_slice(), 8, u64::from(size.width))
        }
        _ if numbers && !matches!(pixels, Pixels::Palette { .. }) => return Ok(false),
        _ => (data, bits, stride(size, bits)),
    };
    let stride = usize::try_from(stride).map_err(|_| NoMemory(size))?;
    let out = target.reset(size)?;
    let mut rows = data.chunks(stride.max(1));
    for y in 0..size.rows() {
        let row = rows.next().ok_or_else(|| Problem("its pixels end too early".to_owned()))?;
        let y = if top_down { y } else { size.rows() - 1 - y };
        let line = 3 * size.columns();
        let Some(out) = out.get_mut(y * line..(y + 1) * line) else { break };
        for (x, pixel) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            let byte = |place: usize| row.get(place).copied().unwrap_or_default();
            *pixel = match &pixels {
                Pixels::Palette { colours, .. } => {
                    let bits = bits as usize;
                    let shift = 8 - bits - x * bits % 8;
                    let index = byte(x * bits / 8) >> shift & (u8::MAX >> (8 - bits));
                    if numbers {
                        [index; 3]
                    } else {
                        colours.get(usize::from(index)).copied().unwrap_or_default()
                    }
                }
                Pixels::Packed { green_bits } => {
                    let value = u32::from(byte(2 * x)) | u32::from(byte(2 * x + 1)) << 8;
                    let part = |shift: u32, bits: u32| {
                        let largest = (1 << bits) - 1;
                        ((value >> shift & largest) * 255 / largest) as u8
                    };
                    [part(5 + green_bits, 5), part(5, *green_bits), part(0, 5)]
                }
                Pixels::Bytes(places) => places.map(|place| byte(x * bits as usize / 8 + place)),
            };
        }
    }
    Ok(true)
}

/// Returns the number of bytes from one row to the next.
fn stride(size: Size, bits: u32) -> u64 {
    (u64::from(size.width) * u64::from(bits)).div_ceil(32) * 4
}

fn parse(bytes: &[u8]) -> Result<Header, Problem> {
    let short = || Problem("its header ends too early".to_owned());
    let word = |at: usize| -> Result<u32, Problem> {
        let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or_else(short)
    };
    let half = |at: usize| word(at).map(|word| word & 0xffff);
    let length = word(14)?;
    let (size, top_down, bits, compression, colours, entry) = match length {
        // The first header of OS/2.
        12 => {
            let size = Size::new(half(18)?, word(18)? >> 16);
            (size, false, word(22)? >> 16, 0, 0, 3)
        }
        40 | 52 | 56 | 64 | 108 | 124 => {
            let height = word(22)?;
            let top_down = height >> 24 == 0xff;
            let height = if top_down { height.wrapping_neg() } else { height };
            let size = Size::new(word(18)?, height);
            (size, top_down, half(28)?, word(30)?, word(46)?, 4)
        }
        _ => return Err(Problem(format!("its header of {length} bytes is of an unknown kind"))),
    };
    let mut after = 14 + length as usize;
    let refused = |what: String| Problem(format!("{what}, which Pillow does not read either"));
    let pixels = match (compression, bits) {
        (0, 1 | 4 | 8) | (1 | 2, 4 | 8) => {
            let count = if colours == 0 { 1 << bits } else { colours };
            if count > 65_536 {
                return Err(Problem(format!("its palette has {count} colours")));
            }
            if count > 256 {
                return Err(refused(format!("its palette has {count} colours")));
            }
            let table = bytes.get(after..).unwrap_or_default();
            let table = table.chunks_exact(entry).take(count as usize);
            let mut colours: Vec<[u8; 3]> = table
                .filter_map(|entry| Some([*entry.get(2)?, *entry.get(1)?, *entry.first()?]))
                .collect();
            // Pillow does not treat a ramp of greys as a palette, so that indices beyond its end have a colour too.
            let mut ramp = colours.iter().zip(0..=u8::MAX);
            if count as usize == colours.len()
                && count > 2
                && ramp.all(|(it, grey)| *it == [grey; 3])
            {
                colours = (0..=255).map(|grey| [grey; 3]).collect();
            }
            after += entry * count as usize;
            Pixels::Palette { colours, run_lengths: compression != 0 }
        }
        (0, 16) => Pixels::Packed { green_bits: 5 },
        (0, 24 | 32) => Pixels::Bytes([2, 1, 0]),
        (3, 16 | 24 | 32) => {
            let masks = [word(54)?, word(58)?, word(62)?];
            let alpha = if length >= 56 { word(66)? } else { 0 };
            if length == 40 {
                after += 12;
            }
            match (bits, masks, alpha) {
                (16, [0xf800, 0x7e0, 0x1f], _) => Pixels::Packed { green_bits: 6 },
                (16, [0x7c00, 0x3e0, 0x1f], _) => Pixels::Packed { green_bits: 5 },
                (24, [0xff_0000, 0xff00, 0xff], _)
                | (32, [0xff_0000, 0xff00, 0xff], 0 | 0xff00_0000)
                | (32, [0, 0, 0], 0) => Pixels::Bytes([2, 1, 0]),
                (32, [0xff00_0000, 0xff_0000, 0xff00], 0 | 0xff) => Pixels::Bytes([3, 2, 1]),
                (32, [0xff00_0000, 0xff00, 0xff], 0 | 0xff_0000) => Pixels::Bytes([3, 1, 0]),
                (32, [0xff, 0xff00, 0xff_0000], 0xff00_0000) => Pixels::Bytes([0, 1, 2]),
                _ => return Err(refused(format!("its colours have the masks {masks:x?}"))),
            }
        }
        (0..=3, _) => return Err(refused(format!("it has {bits} bits a pixel"))),
        _ => return Err(refused(format!("it is compressed by method {compression}"))),
    };
    // In a file without an offset, the pixels follow the header and the palette.
    let start = match word(10)? as usize {
        0 => after,
        // Some writers give an offset that leaves out the palette.
        start if start == 14 + length as usize && bits <= 8 => after,
        start => start,
    };
    Ok(Header { size, top_down, bits, pixels, start })
}

/// Decompresses run lengths into one byte per pixel.
fn run_lengths(bytes: &[u8], start: usize, size: Size, halves: bool) -> Result<Vec<u8>, Problem> {
    let (width, all) = (size.columns(), size.columns() * size.rows());
    let mut out: Vec<u8> = Vec::new();
    out.try_reserve_exact(all).map_err(|_| NoMemory(size))?;
    let (mut at, mut x) = (start, 0);
    let pair = |at: usize| Some([*bytes.get(at)?, *bytes.get(at + 1)?]);
    while out.len() < all
        && let Some([count, value]) = pair(at)
    {
        at += 2;
        let left = all - out.len();
        match (count, value) {
            // The end of a row.
            (0, 0) => {
                let rest = out.len().next_multiple_of(width) - out.len();
                out.resize(out.len() + rest, 0);
                x = 0;
            }
            (0, 1) => break,
            // A step to the right and up.
            (0, 2) => {
                let Some([right, up]) = pair(at) else { break };
                at += 2;
                let step = usize::from(right) + usize::from(up) * width;
                out.resize(out.len() + step.min(left), 0);
                x = out.len() % width;
            }
            // Pixels without run lengths, up to an even position.
            (0, count) => {
                let taken = usize::from(count).min(left);
                let length = if halves { taken.div_ceil(2) } else { taken };
                let Some(data) = bytes.get(at..at + length) else { break };
                if halves {
                    let nibbles = data.iter().flat_map(|byte| [byte >> 4, byte & 15]);
                    out.extend(nibbles.take(taken));
                } else {
                    out.extend(data);
                }
                at += length;
                at += at % 2;
                x += usize::from(count);
            }
            // Pixels beyond the end of the row are left out.
            (count, value) => {
                let count = usize::from(count).min(width.saturating_sub(x));
                let values = if halves { [value >> 4, value & 15] } else { [value; 2] };
                out.extend(values.iter().cycle().take(count.min(left)));
                x += count;
            }
        }
    }
    if out.len() < all {
        return Err(Problem("its pixels end too early".to_owned()));
    }
    Ok(out)
}
