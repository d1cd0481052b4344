//! Scans of progressive files, each of which contains a band of coefficients or one more bit of them, read by the rules
//! of `jdphuff.c`.

use super::{File, NATURAL};

/// The coefficients and bits that a scan contains.
pub(super) struct Pass {
    /// First and last coefficient of the band, in coding order: the DC coefficient alone, or some AC coefficients.
    first: usize,
    last: usize,
    /// The lowest bit of earlier scans, if this scan refines it.
    before: Option<u8>,
    /// The lowest bit that this scan contains.
    low: u8,
}

impl Pass {
    /// Parses the end of a scan's header. Returns `None` for parameters that libjpeg rejects.
    pub(super) fn new(parameters: &[u8], components: usize) -> Option<Self> {
        let &[first, last, bits] = parameters else { return None };
        let (high, low) = (bits >> 4, bits & 15);
        let is_band =
            if first == 0 { last == 0 } else { first <= last && last < 64 && components == 1 };
        let before = (high > 0).then_some(high);
        let is_next = before.is_none_or(|before| before == low + 1);
        (is_band && is_next && low <= 13).then(|| Self {
            first: first.into(),
            last: last.into(),
            before,
            low,
        })
    }

    /// Records which bits this scan contains. Returns `true` if they follow those of the scans before.
    pub(super) fn follows(&self, unknown: &mut [i8; 64]) -> Option<bool> {
        let mut follows = self.first == 0 || unknown[0] >= 0;
        let before = self.before.unwrap_or_default().cast_signed();
        for bits in unknown.get_mut(self.first..=self.last)? {
            follows &= (*bits).max(0) == before;
            *bits = self.low.cast_signed();
        }
        Some(follows)
    }
}

impl File<'_> {
    /// Reads the bits of a block that this scan contains.
    pub(super) fn band(
        &mut self,
        pass: &Pass,
        block: &mut [i16; 64],
        direct: usize,
        alternating: usize,
        before: &mut i32,
    ) -> Option<()> {
        match (pass.first, pass.before) {
            (0, None) => {
                let category = self.symbol(direct, false)?;
                *before = before.checked_add(self.value(category.into())?)?;
                block[0] = (*before << pass.low) as i16;
                Some(())
            }
            (0, Some(_)) => {
                if self.bits(1)? == 1 {
                    block[0] |= 1 << pass.low;
                }
                Some(())
            }
            (_, None) => self.first_bits(pass, block, alternating),
            (_, Some(_)) => self.next_bit(pass, block, alternating),
        }
    }

    fn first_bits(&mut self, pass: &Pass, block: &mut [i16; 64], table: usize) -> Option<()> {
        if self.ended_blocks > 0 {
            self.ended_blocks -= 1;
            return Some(());
        }
        let mut at = pass.first;
        while at <= pass.last {
            let symbol = self.symbol(table, true)?;
            let (run, category) = (symbol >> 4, symbol & 15);
            if category > 0 {
                at += usize::from(run);
                let value = self.value(category.into())?;
                *block.get_mut(*NATURAL.get(at)?)? = (value << pass.low) as i16;
            } else if run == 15 {
                at += 15;
            } else {
                self.ended_blocks = self.run_of_blocks(run)? - 1;
                break;
            }
            at += 1;
        }
        Some(())
    }

    /// Refines the nonzero coefficients, and reads which others become nonzero.
    fn next_bit(&mut self, pass: &Pass, block: &mut [i16; 64], table: usize) -> Option<()> {
        let bit = 1 << pass.low;
        let mut at = pass.first;
        while self.ended_blocks == 0 && at <= pass.last {
            let symbol = self.symbol(table, true)?;
            let (mut run, category) = (symbol >> 4, symbol & 15);
            let mut new = 0;
            if category > 0 {
                if category > 1 {
                    self.warn("a wrong Huffman code");
                }
                new = if self.bits(1)? == 1 { bit } else { -bit };
            } else if run < 15 {
                self.ended_blocks = self.run_of_blocks(run)?;
                break;
            }
            // Skips zeros up to the new coefficient, and refines the nonzero ones between.
            while at <= pass.last {
                if *block.get(*NATURAL.get(at)?)? != 0 {
                    self.correct(block, at, bit)?;
                } else if run == 0 {
                    break;
                } else {
                    run -= 1;
                }
                at += 1;
            }
            if new != 0 {
                *block.get_mut(*NATURAL.get(at)?)? = new;
            }
            at += 1;
        }
        if self.ended_blocks > 0 {
            for at in at..=pass.last {
                self.correct(block, at, bit)?;
            }
            self.ended_blocks -= 1;
        }
        Some(())
    }

    /// Reads one more bit of a nonzero coefficient.
    fn correct(&mut self, block: &mut [i16; 64], at: usize, bit: i16) -> Option<()> {
        let coefficient = block.get_mut(*NATURAL.get(at)?)?;
        if *coefficient != 0 && self.bits(1)? == 1 && *coefficient & bit == 0 {
            *coefficient = coefficient.wrapping_add(if *coefficient > 0 { bit } else { -bit });
        }
        Some(())
    }

    /// Returns the number of blocks for which nothing more is coded, including this one.
    fn run_of_blocks(&mut self, bits: u8) -> Option<u32> {
        let more = if bits > 0 { self.bits(bits.into())? } else { 0 };
        Some((1 << bits) + more)
    }
}
