//! Decoding of PBM, PGM and PPM, plain and binary, by Pillow's rules.

use super::{Found, Orientation, Problem};
use crate::image::{Image, Size};

/// Returns `true` if a file begins with the magic number of one of the six kinds.
pub(super) fn is_magic(bytes: &[u8]) -> bool {
    matches!(bytes, [b'P', b'1'..=b'6', space, ..] if is_space(*space))
}

/// Parsed header of a file, and the position of the pixels.
struct Header {
    size: Size,
    kind: Kind,
    /// `true` if pixels are numbers in text.
    plain: bool,
    /// The value of white. Not used for bits.
    maximum: u32,
    start: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bits,
    Grey,
    Colour,
}

pub(super) fn header(bytes: &[u8]) -> Result<Found, Problem> {
    let Header { size, kind, plain, maximum, start } = parse(bytes)?;
    let left = bytes.len().saturating_sub(start) as u64;
    let samples = if kind == Kind::Colour { 3 } else { 1 };
    let needed = match (kind, plain) {
        (Kind::Bits, false) => u64::from(size.width.div_ceil(8)) * u64::from(size.height),
        (Kind::Bits, true) => size.pixels(),
        // A digit, and a space before the next.
        (_, true) => size.pixels().saturating_mul(2 * samples).saturating_sub(1),
        (_, false) => {
            size.pixels().saturating_mul(if maximum > 255 { 2 * samples } else { samples })
        }
    };
    if needed > left {
        return Err(Problem::too_few_bytes(size, bytes.len()));
    }
    Ok(Found { size, orientation: Orientation::Normal })
}

pub(super) fn decode(bytes: &[u8], target: &mut Image) -> Result<(), Problem> {
    let Header { size, kind, plain, maximum, start } = parse(bytes)?;
    let data = bytes.get(start..).unwrap_or_default();
    let out = target.reset(size)?;
    let short = || Problem("its pixels end too early".to_owned());
    if kind == Kind::Bits {
        let rows = out.chunks_exact_mut(3 * size.columns().max(1));
        if plain {
            let mut text = Text { bytes: data, at: 0 };
            for pixel in rows.flat_map(|row| row.as_chunks_mut::<3>().0) {
                pixel.fill(match text.character().ok_or_else(short)? {
                    b'0' => 255,
                    b'1' => 0,
                    other => return Err(Problem(format!("{:?} is not a bit", char::from(other)))),
                });
            }
            return Ok(());
        }
        let line = size.columns().div_ceil(8);
        for (row, bits) in rows.zip(data.chunks(line)) {
            for (x, pixel) in row.as_chunks_mut::<3>().0.iter_mut().enumerate() {
                let byte = bits.get(x / 8).ok_or_else(short)?;
                pixel.fill(if byte >> (7 - x % 8) & 1 == 1 { 0 } else { 255 });
            }
        }
        return Ok(());
    }
    // Pillow keeps grey of more than eight bits, up to 65535, and then takes values above 255 as white.
    let wide = kind == Kind::Grey && maximum > 255;
    let full = if wide { 65_535.0 } else { 255.0 };
    let scaled = |value: u32| {
        let value = (f64::from(value) / f64::from(maximum) * full).round_ties_even();
        value.min(255.0) as u8
    };
    let mut text = Text { bytes: data, at: 0 };
    let mut binary = data.iter();
    let mut next = || -> Result<u8, Problem> {
        let value = if plain {
            text.number("a colour")?
        } else {
            let byte = u32::from(*binary.next().ok_or_else(short)?);
            match maximum {
                ..=255 => byte,
                _ => byte << 8 | u32::from(*binary.next().ok_or_else(short)?),
            }
        };
        if plain && value > maximum {
            return Err(Problem(format!("a colour of {value} is above its maximum of {maximum}")));
        }
        Ok(scaled(value))
    };
    for pixel in out.as_chunks_mut::<3>().0 {
        match kind {
            Kind::Colour => *pixel = [next()?, next()?, next()?],
            _ => pixel.fill(next()?),
        }
    }
    Ok(())
}

/// Returns `true` if grey values have more bits than a class of a mask may have.
pub(super) fn is_wide(bytes: &[u8]) -> Result<bool, Problem> {
    Ok(parse(bytes)?.maximum > 255)
}

fn parse(bytes: &[u8]) -> Result<Header, Problem> {
    let (kind, plain) = match bytes.get(1) {
        Some(b'1') => (Kind::Bits, true),
        Some(b'2') => (Kind::Grey, true),
        Some(b'3') => (Kind::Colour, true),
        Some(b'4') => (Kind::Bits, false),
        Some(b'5') => (Kind::Grey, false),
        _ => (Kind::Colour, false),
    };
    let mut text = Text { bytes, at: 3 };
    let size = Size::new(text.number("the width")?, text.number("the height")?);
    let maximum = if kind == Kind::Bits { 1 } else { text.number("the maximum")? };
    if !(1..65_536).contains(&maximum) {
        return Err(Problem(format!("its maximum of {maximum} is not between 1 and 65535")));
    }
    Ok(Header { size, kind, plain, maximum, start: text.at })
}

/// Reader of numbers between spaces. A comment begins with `#` and ends with the line.
struct Text<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Text<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// Skips the rest of a comment.
    fn comment(&mut self) {
        while !matches!(self.byte(), None | Some(b'\n' | b'\r')) {}
    }

    /// Returns the next byte that is neither space nor comment.
    fn character(&mut self) -> Option<u8> {
        loop {
            match self.byte()? {
                b'#' => self.comment(),
                space if is_space(space) => {}
                other => return Some(other),
            }
        }
    }

    /// Reads a number and the space after it.
    fn number(&mut self, what: &str) -> Result<u32, Problem> {
        let mut number: Option<u32> = None;
        loop {
            match self.byte() {
                Some(b'#') => self.comment(),
                Some(digit @ b'0'..=b'9') => {
                    let next = number.unwrap_or(0).checked_mul(10);
                    let next = next.and_then(|number| number.checked_add(u32::from(digit - b'0')));
                    number = Some(next.ok_or_else(|| Problem(format!("{what} is too large")))?);
                }
                Some(space) if is_space(space) => match number {
                    None => {}
                    Some(number) => return Ok(number),
                },
                Some(_) => return Err(Problem(format!("{what} is not a number"))),
                None => return number.ok_or_else(|| Problem(format!("it ends before {what}"))),
            }
        }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}
