//! Element types under the names of the three formats.

use std::fmt;

use safetensors::Dtype as Safe;
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Dtype {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// 16-bit float with the exponent of a 32-bit one.
    BF16,
    /// 64-bit integer.
    I64,
    /// 32-bit integer.
    I32,
    /// 16-bit integer.
    I16,
    /// 8-bit integer.
    I8,
    /// Byte.
    U8,
    /// One byte, 0 or 1.
    #[serde(rename = "BOOL")]
    Bool,
    /// Two 32-bit floats.
    C64,
    /// Two 64-bit floats; safetensors lacks it.
    C128,
}

struct Row {
    dtype: Dtype,
    name: &'static str,
    bytes: u64,
    /// PyTorch's type of storage.
    storage: &'static str,
    safe: Option<Safe>,
}

const fn row(
    dtype: Dtype,
    name: &'static str,
    bytes: u64,
    storage: &'static str,
    safe: Option<Safe>,
) -> Row {
    Row { dtype, name, bytes, storage, safe }
}

/// In the order of the enum.
const ROWS: [Row; 12] = [
    row(Dtype::F64, "F64", 8, "DoubleStorage", Some(Safe::F64)),
    row(Dtype::F32, "F32", 4, "FloatStorage", Some(Safe::F32)),
    row(Dtype::F16, "F16", 2, "HalfStorage", Some(Safe::F16)),
    row(Dtype::BF16, "BF16", 2, "BFloat16Storage", Some(Safe::BF16)),
    row(Dtype::I64, "I64", 8, "LongStorage", Some(Safe::I64)),
    row(Dtype::I32, "I32", 4, "IntStorage", Some(Safe::I32)),
    row(Dtype::I16, "I16", 2, "ShortStorage", Some(Safe::I16)),
    row(Dtype::I8, "I8", 1, "CharStorage", Some(Safe::I8)),
    row(Dtype::U8, "U8", 1, "ByteStorage", Some(Safe::U8)),
    row(Dtype::Bool, "BOOL", 1, "BoolStorage", Some(Safe::BOOL)),
    row(Dtype::C64, "C64", 8, "ComplexFloatStorage", Some(Safe::C64)),
    row(Dtype::C128, "C128", 16, "ComplexDoubleStorage", None),
];

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.row().bytes
    }

    /// The name in safetensors files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// PyTorch's type of storage, `FloatStorage`.
    pub(crate) fn storage(self) -> &'static str {
        self.row().storage
    }

    pub(crate) fn from_storage(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.storage == name).map(|row| row.dtype)
    }

    pub(crate) fn to_safetensors(self) -> Option<Safe> {
        self.row().safe
    }

    pub(crate) fn from_safetensors(dtype: Safe) -> Option<Self> {
        ROWS.iter().find(|row| row.safe == Some(dtype)).map(|row| row.dtype)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is known of a tensor without its values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// The number of elements; `None` when it has no place in 64 bits.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        // A zero anywhere makes the whole empty, whatever the others are.
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))
    }

    /// The number of bytes; `None` when it has no place in 64 bits.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.elements()?.checked_mul(self.dtype.bytes())
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.shape, self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (place, row) in ROWS.iter().enumerate() {
            assert_eq!(row.dtype as usize, place);
            assert_eq!(row.dtype.row().name, row.name);
        }
    }

    #[test]
    fn bytes_are_counted_without_overflow() {
        let of = |shape: &[u64]| TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() };
        assert_eq!(of(&[2, 3]).bytes(), Some(24));
        assert_eq!(of(&[]).bytes(), Some(4));
        assert_eq!(of(&[u64::MAX, 0]).bytes(), Some(0));
        assert_eq!(of(&[u64::MAX, 2]).bytes(), None);
    }
}
