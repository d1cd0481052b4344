//! Writing of coefficients as an undamaged file.

use super::{EOI, Frame, NATURAL, SOI, SOS};

/// Writes coefficients as a file with a scan for each component, in codes that can represent any value. If libjpeg
/// smooths blocks, the file is progressive and leaves out the bits that the scans have left out.
pub(super) fn write(frame: &Frame, headers: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0xFF, SOI];
    out.extend(headers);
    let segment = |out: &mut Vec<u8>, kind: u8, body: &[u8]| -> Option<()> {
        out.extend([0xFF, kind]);
        out.extend(u16::try_from(body.len() + 2).ok()?.to_be_bytes());
        out.extend(body);
        Some(())
    };
    let mut head = vec![8];
    head.extend(frame.height.to_be_bytes());
    head.extend(frame.width.to_be_bytes());
    head.push(frame.components.len() as u8);
    for (number, component) in (0_u8..).zip(&frame.components) {
        // A component without a scan is grey, whatever its table.
        let table = component.quantization.unwrap_or([1; 64]);
        let mut body = vec![0x10 | number];
        body.extend(table.iter().flat_map(|value| value.to_be_bytes()));
        segment(&mut out, 0xDB, &body)?;
        let sampling = (component.horizontal << 4 | component.vertical) as u8;
        head.extend([component.id, sampling, number]);
    }
    let is_smoothed = frame.is_smoothed();
    segment(&mut out, if is_smoothed { 0xC2 } else { 0xC1 }, &head)?;
    // 16 categories of 5 bits; 128 symbols of 8 bits and 128 of 9 bits.
    let mut direct = vec![0; 17];
    direct[5] = 16;
    direct.extend(0..16);
    segment(&mut out, 0xC4, &direct)?;
    let mut alternating = vec![0; 17];
    alternating[0] = 0x10;
    (alternating[8], alternating[9]) = (128, 128);
    alternating.extend(0..=255);
    segment(&mut out, 0xC4, &alternating)?;
    for component in &frame.components {
        let bands = if is_smoothed {
            bands(&component.unknown)
        } else {
            vec![Band { first: 0, last: 63, low: 0 }]
        };
        for band in bands {
            let Band { first, last, low } = band;
            segment(&mut out, SOS, &[1, component.id, 0, first, last, low])?;
            let mut bits = BitWriter { out: &mut out, buffer: 0, count: 0 };
            let mut before = 0_i16;
            for row in component.blocks.chunks(component.stride.max(1)).take(component.down) {
                for block in row.iter().take(component.across) {
                    bits.block(block, &band, &mut before)?;
                }
            }
            bits.finish();
        }
    }
    out.extend([0xFF, EOI]);
    Some(out)
}

/// Coefficients of a scan, in coding order, and the lowest bit of them that the scan contains.
struct Band {
    first: u8,
    last: u8,
    low: u8,
}

/// Returns the bands of the scans: the DC coefficient, and each range of AC coefficients that are known to the same
/// bit.
fn bands(unknown: &[i8; 64]) -> Vec<Band> {
    let mut bands: Vec<Band> = Vec::new();
    for (place, low) in (0..).zip(unknown) {
        let Ok(low) = u8::try_from(*low) else { continue };
        match bands.last_mut() {
            Some(band) if band.first > 0 && band.last + 1 == place && band.low == low => {
                band.last = place;
            }
            _ => bands.push(Band { first: place, last: place, low }),
        }
    }
    bands
}

struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    buffer: u32,
    count: u32,
}

impl BitWriter<'_> {
    fn bits(&mut self, value: u32, count: u32) {
        self.buffer = self.buffer << count | value & ((1 << count) - 1);
        self.count += count;
        while self.count >= 8 {
            self.count -= 8;
            let byte = (self.buffer >> self.count) as u8;
            self.out.push(byte);
            if byte == 0xFF {
                self.out.push(0);
            }
        }
    }

    /// Returns the category and the bits of a number; `None` if the coding cannot represent it.
    fn value(value: i16) -> Option<(u32, u32)> {
        let category = 16 - value.checked_abs()?.leading_zeros();
        let bits = if value < 0 { value - 1 } else { value };
        Some((category, bits as u16 as u32))
    }

    fn block(&mut self, block: &[i16; 64], band: &Band, before: &mut i16) -> Option<()> {
        let Band { first, last, low } = *band;
        // Bits below `low` are from scans in the wrong order.
        let told = |place: usize| {
            let coefficient = *block.get(*NATURAL.get(place)?)?;
            (coefficient % (1 << low) == 0).then_some(coefficient >> low)
        };
        if first == 0 {
            let average = told(0)?;
            // The decoder's sum wraps in the same way as this difference.
            let (category, value) = Self::value(average.wrapping_sub(*before))?;
            *before = average;
            self.bits(category, 5);
            self.bits(value, category);
        }
        let mut run = 0;
        for place in usize::from(first.max(1))..=usize::from(last) {
            let coefficient = told(place)?;
            if coefficient == 0 {
                run += 1;
                continue;
            }
            while run > 15 {
                self.symbol(0xF0);
                run -= 16;
            }
            let (category, value) = Self::value(coefficient)?;
            self.symbol(run << 4 | category);
            self.bits(value, category);
            run = 0;
        }
        if run > 0 {
            self.symbol(0);
        }
        Some(())
    }

    fn symbol(&mut self, symbol: u32) {
        match symbol {
            0..128 => self.bits(symbol, 8),
            _ => self.bits(256 + symbol - 128, 9),
        }
    }

    /// Fills the last byte with ones.
    fn finish(&mut self) {
        self.bits(0x7F, (8 - self.count) % 8);
    }
}
