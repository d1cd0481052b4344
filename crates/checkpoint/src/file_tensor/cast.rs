//! Conversion between floating-point types.

use std::io::{self, Write};

use half::{bf16, f16};

use crate::dtype::Dtype;

/// Returns `true` if the type can be converted to and from other floats.
pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// A writer that converts elements, bit by bit like PyTorch's `Tensor.to`.
pub(super) struct Cast<'o> {
    from: Dtype,
    to: Dtype,
    out: &'o mut dyn Write,
    /// Beginning of an element whose end has not been written yet.
    begun: Vec<u8>,
    converted: Vec<u8>,
    /// Number of finite values that became infinite.
    pub(super) overflowed: u64,
}

impl<'o> Cast<'o> {
    /// Converts between two of the types of [`is_float`].
    pub(super) fn new(from: Dtype, to: Dtype, out: &'o mut dyn Write) -> Self {
        Self { from, to, out, begun: Vec::new(), converted: Vec::new(), overflowed: 0 }
    }

    fn element(&mut self, bytes: &[u8]) {
        let value = match *bytes {
            [a, b] if self.from == Dtype::BF16 => bf16::from_le_bytes([a, b]).to_f64(),
            [a, b] => f16::from_le_bytes([a, b]).to_f64(),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]).into(),
            [a, b, c, d, e, f, g, h] => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => f64::NAN,
        };
        // Rounded twice for 16 bits, as PyTorch does.
        let narrow = value as f32;
        let is_infinite = match self.to {
            Dtype::F64 => {
                self.converted.extend(value.to_le_bytes());
                value.is_infinite()
            }
            Dtype::F16 => {
                let narrow = f16::from_f32(narrow);
                self.converted.extend(narrow.to_le_bytes());
                narrow.is_infinite()
            }
            Dtype::BF16 => {
                let narrow = bf16::from_f32(narrow);
                self.converted.extend(narrow.to_le_bytes());
                narrow.is_infinite()
            }
            _ => {
                self.converted.extend(narrow.to_le_bytes());
                narrow.is_infinite()
            }
        };
        self.overflowed += u64::from(is_infinite && value.is_finite());
    }
}

impl Write for Cast<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let width = self.from.bytes() as usize;
        let mut rest = bytes;
        if !self.begun.is_empty() {
            let (more, after) = rest.split_at(rest.len().min(width - self.begun.len()));
            self.begun.extend(more);
            rest = after;
            if self.begun.len() == width {
                let whole = std::mem::take(&mut self.begun);
                self.element(&whole);
            }
        }
        let elements = rest.chunks_exact(width);
        self.begun.extend(elements.remainder());
        for element in elements {
            self.element(element);
        }
        let converted = std::mem::take(&mut self.converted);
        self.out.write_all(&converted)?;
        self.converted = converted;
        self.converted.clear();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(from: Dtype, to: Dtype, bytes: &[u8], piece: usize) -> (Vec<u8>, u64) {
        let mut out = Vec::new();
        let mut cast = Cast::new(from, to, &mut out);
        bytes.chunks(piece).for_each(|piece| cast.write_all(piece).unwrap());
        let overflowed = cast.overflowed;
        (out, overflowed)
    }

    /// Expected values are from PyTorch 2.13: `torch.tensor([...],
    /// dtype=torch.float64).to(torch.float16).view(torch.int16)`, and the same for bfloat16 and float32.
    #[test]
    fn values_are_pytorchs() {
        let values = [1.0, -0.1, 65504.0, 65520.0, 1e-8, 2049.0, 1.0009765625, 3.5e38, 1e300];
        let bytes: Vec<u8> = values.iter().flat_map(|value: &f64| value.to_le_bytes()).collect();
        let half: [u16; 9] = [15360, 44646, 31743, 31744, 0, 26624, 15361, 31744, 31744];
        let brain: [u16; 9] = [16256, 48589, 18304, 18304, 12844, 17664, 16256, 32640, 32640];
        for piece in [1, 3, 8, 72] {
            let (out, overflowed) = cast(Dtype::F64, Dtype::F16, &bytes, piece);
            assert_eq!(out, half.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>());
            assert_eq!(overflowed, 3);
            let (out, overflowed) = cast(Dtype::F64, Dtype::BF16, &bytes, piece);
            assert_eq!(out, brain.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>());
            assert_eq!(overflowed, 2);
        }
        let (back, _) = cast(Dtype::F16, Dtype::F64, &half[1].to_le_bytes(), 1);
        assert_eq!(f64::from_le_bytes(back.try_into().unwrap()), -0.0999755859375);
        let (wide, _) = cast(Dtype::BF16, Dtype::F32, &brain[1].to_le_bytes(), 2);
        assert_eq!(f32::from_le_bytes(wide.try_into().unwrap()), -0.100_097_656);
    }
}
