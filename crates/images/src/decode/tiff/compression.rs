//! Decompression of the strips and tiles of a TIFF file.

use std::convert::Infallible;
use std::io::Read;

use fax::decoder::{DecodeStatus, Group3Decoder};
use fax::maps::{black, white};
use fax::{BitReader as _, ByteReader, Color};
use flate2::read::ZlibDecoder;
use weezl::BitOrder;
use weezl::decode::Configuration;

use super::super::Problem;
use crate::image::{NoMemory, Size};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Compression {
    None,
    FaxRuns,
    Fax3,
    Fax4,
    Lzw,
    Jpeg,
    Deflate,
    PackBits,
}

impl Compression {
    /// Returns the compression with this number, given the options of fax.
    pub(super) fn of(number: u64, fax: u64) -> Result<Self, Problem> {
        let name = match number {
            1 => return Ok(Self::None),
            2 => return Ok(Self::FaxRuns),
            3 if fax & 1 == 0 => return Ok(Self::Fax3),
            4 => return Ok(Self::Fax4),
            5 => return Ok(Self::Lzw),
            7 => return Ok(Self::Jpeg),
            8 | 32_946 => return Ok(Self::Deflate),
            32_773 => return Ok(Self::PackBits),
            3 => "two-dimensional Group 3 fax",
            6 => "JPEG of the old kind",
            34_925 => "LZMA",
            50_000 => "zstd",
            50_001 => "WebP",
            _ => "another method",
        };
        Err(Problem(format!(
            "it is compressed by {name} (number {number}), which is not read; convert it: \
             `tiffcp -c lzw FILE NEW.tif`"
        )))
    }

    pub(super) fn has_predictor(self) -> bool {
        matches!(self, Self::Lzw | Self::Deflate)
    }

    /// Returns the maximum number of pixels of `bits` bits that a file of `bytes` can contain.
    pub(super) fn most_pixels(self, bytes: u64, bits: u64) -> u64 {
        let times = match self {
            Self::None => 1,
            // A row takes at least one bit.
            Self::FaxRuns | Self::Fax3 | Self::Fax4 => return bytes.saturating_mul(8 * 65_535),
            // A code of 12 bits stands for at most 4096 bytes.
            Self::Lzw => 4_096,
            // A block of 64 samples takes at least one bit.
            Self::Jpeg => return bytes.saturating_mul(8 * 64 * 4),
            Self::Deflate => 1_040,
            Self::PackBits => 64,
        };
        bytes.saturating_mul(8 * times) / bits.max(1)
    }

    /// Decompresses `length` bytes, the rows of a strip or tile; of fax, those of `size` pixels.
    pub(super) fn unpack(self, data: &[u8], length: usize, size: Size) -> Result<Vec<u8>, Problem> {
        let mut out = Vec::new();
        out.try_reserve_exact(length).map_err(|_| NoMemory(size))?;
        match self {
            Self::None | Self::Jpeg => out.extend(data.iter().take(length)),
            Self::Lzw => {
                // Before version 6 the codes began at the lowest bit, and their width grew later.
                let old = matches!(data, [0, second, ..] if second & 1 == 1);
                let decoder = if old {
                    Configuration::new(BitOrder::Lsb, 8)
                } else {
                    Configuration::with_tiff_size_switch(BitOrder::Msb, 8)
                };
                let mut decoder = decoder.with_yield_on_full_buffer(true).build();
                out.resize(length, 0);
                let (mut read, mut written) = (0, 0);
                while written < length {
                    let rest = data.get(read..).unwrap_or_default();
                    let result =
                        decoder.decode_bytes(rest, out.get_mut(written..).unwrap_or_default());
                    read += result.consumed_in;
                    written += result.consumed_out;
                    result.status.map_err(Problem::new)?;
                    if result.consumed_in == 0 && result.consumed_out == 0 {
                        break;
                    }
                }
                out.truncate(written);
            }
            Self::Deflate => {
                let reader = ZlibDecoder::new(data);
                reader.take(length as u64).read_to_end(&mut out).map_err(Problem::new)?;
            }
            Self::PackBits => pack_bits(data, length, &mut out),
            Self::FaxRuns | Self::Fax3 | Self::Fax4 => self.fax(data, size, &mut out)?,
        }
        if out.len() < length {
            return Err(Problem("its strips or tiles end too early".to_owned()));
        }
        out.truncate(length);
        Ok(out)
    }

    /// Decompresses fax. Black is 1, the first pixel in the highest bit.
    fn fax(self, data: &[u8], size: Size, out: &mut Vec<u8>) -> Result<(), Problem> {
        let sides = (u16::try_from(size.width), u16::try_from(size.height));
        let (Ok(width), Ok(height)) = sides else {
            return Err(Problem(format!("fax of {size} pixels is not read")));
        };
        let line = size.columns().div_ceil(8);
        let all = line * size.rows();
        let mut row = |changes: &[u16]| {
            if out.len() >= all {
                return;
            }
            let start = out.len();
            out.resize(start + line, 0);
            let row = out.get_mut(start..).unwrap_or_default();
            for (x, colour) in fax::decoder::pels(changes, width).enumerate() {
                if let (Color::Black, Some(byte)) = (colour, row.get_mut(x / 8)) {
                    *byte |= 128 >> (x % 8);
                }
            }
        };
        let decoded = match self {
            Self::Fax4 => {
                fax::decoder::decode_g4(data.iter().copied(), width, Some(height), &mut row)
            }
            Self::FaxRuns => fax_runs(data, width, height, &mut row),
            _ => group_3(data, width, &mut row),
        };
        decoded.ok_or_else(|| Problem("its fax codes are damaged".to_owned()))
    }
}

/// Decompresses the codes of Group 3 without marks (CCITT's run lengths): each row begins at a byte.
fn fax_runs(data: &[u8], width: u16, height: u16, row: &mut impl FnMut(&[u16])) -> Option<()> {
    let mut reader = ByteReader::new(data.iter().copied().map(Ok::<u8, Infallible>)).ok()?;
    let mut changes = Vec::new();
    for _ in 0..height {
        changes.clear();
        let (mut end, mut is_black) = (0_u16, false);
        loop {
            let run =
                if is_black { black::decode(&mut reader) } else { white::decode(&mut reader) }?;
            end = end.checked_add(run)?;
            // A longer run goes on with the next code.
            if run < 64 {
                changes.push(end);
                is_black = !is_black;
                if end >= width {
                    break;
                }
            }
        }
        row(&changes);
        reader.consume(reader.bits_to_byte_boundary()).ok()?;
    }
    Some(())
}

/// Decompresses Group 3 in the format of libtiff: with a mark at the beginning of each row, and none after the last.
fn group_3(data: &[u8], width: u16, row: &mut impl FnMut(&[u16])) -> Option<()> {
    let mut decoder = Group3Decoder::new(data.iter().copied().map(Ok::<u8, Infallible>)).ok()?;
    loop {
        let status = decoder.advance();
        let whole = decoder.transitions().last() == Some(&width);
        match status {
            Ok(DecodeStatus::Incomplete) => row(decoder.transitions()),
            // The caller checks that all rows exist.
            Ok(DecodeStatus::End) | Err(_) => {
                if whole {
                    row(decoder.transitions());
                }
                return Some(());
            }
        }
    }
}

fn pack_bits(data: &[u8], length: usize, out: &mut Vec<u8>) {
    let mut at = 0;
    while out.len() < length
        && let Some(&count) = data.get(at)
    {
        at += 1;
        match count {
            0..128 => {
                let end = (at + usize::from(count) + 1).min(data.len());
                out.extend(data.get(at..end).unwrap_or_default());
                at = end;
            }
            128 => {}
            129.. => {
                let Some(&byte) = data.get(at) else { return };
                at += 1;
                out.resize(out.len() + 257 - usize::from(count), byte);
            }
        }
    }
}
