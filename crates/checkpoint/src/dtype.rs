//! Data types of tensors, with their names in safetensors and PyTorch files.

use std::fmt;

use safetensors::Dtype as Safe;
use serde::{Deserialize, Serialize};

/// Data type of a tensor's elements: those of safetensors and those of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    /// 64-bit float, PyTorch's `float64`.
    F64,
    /// 32-bit float, PyTorch's `float32`.
    F32,
    /// 16-bit float, PyTorch's `float16`.
    F16,
    /// 16-bit float with the exponent range of a 32-bit one, PyTorch's `bfloat16`.
    BF16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 16-bit signed integer.
    I16,
    /// 8-bit signed integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
    /// Boolean in one byte, 0 or 1.
    Bool,
    /// Complex number of two 32-bit floats.
    C64,
    /// Complex number of two 64-bit floats. Not in safetensors.
    C128,
    /// Complex number of two 16-bit floats. Not in safetensors.
    C32,
    /// 64-bit unsigned integer.
    U64,
    /// 32-bit unsigned integer.
    U32,
    /// 16-bit unsigned integer.
    U16,
    /// 8-bit float, PyTorch's `float8_e4m3fn`.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit float, PyTorch's `float8_e5m2`.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// 8-bit exponent, used as a scale of other values: PyTorch's `float8_e8m0fnu`.
    #[serde(rename = "F8_E8M0")]
    F8E8M0,
    /// 8-bit float without infinities and negative zero, PyTorch's `float8_e4m3fnuz`.
    #[serde(rename = "F8_E4M3FNUZ")]
    F8E4M3Fnuz,
    /// 8-bit float without infinities and negative zero, PyTorch's `float8_e5m2fnuz`.
    #[serde(rename = "F8_E5M2FNUZ")]
    F8E5M2Fnuz,
    /// 4-bit float. PyTorch's `float4_e2m1fn_x2` counts two of them as one element.
    F4,
    /// 6-bit float with 2 exponent and 3 mantissa bits. Not in PyTorch.
    #[serde(rename = "F6_E2M3")]
    F6E2M3,
    /// 6-bit float with 3 exponent and 2 mantissa bits. Not in PyTorch.
    #[serde(rename = "F6_E3M2")]
    F6E3M2,
    /// Quantized 8-bit signed integer. Not in safetensors.
    #[serde(rename = "qint8")]
    QInt8,
    /// Quantized 8-bit unsigned integer. Not in safetensors.
    #[serde(rename = "quint8")]
    QUInt8,
    /// Quantized 32-bit signed integer. Not in safetensors.
    #[serde(rename = "qint32")]
    QInt32,
    /// Quantized 4-bit unsigned integer. Every row begins at a byte. Not in safetensors.
    #[serde(rename = "quint4x2")]
    QUInt4x2,
    /// Quantized 2-bit unsigned integer. Every row begins at a byte. Not in safetensors.
    #[serde(rename = "quint2x4")]
    QUInt2x4,
    /// Uninterpreted byte, PyTorch's `bits8`. Not in safetensors.
    #[serde(rename = "bits8")]
    Bits8,
    /// Two uninterpreted bytes, PyTorch's `bits16`. Not in safetensors.
    #[serde(rename = "bits16")]
    Bits16,
    /// Byte with eight values of one bit, PyTorch's `bits1x8`. Not in safetensors.
    #[serde(rename = "bits1x8")]
    Bits1x8,
    /// Byte with four values of two bits, PyTorch's `bits2x4`. Not in safetensors.
    #[serde(rename = "bits2x4")]
    Bits2x4,
    /// Byte with two values of four bits, PyTorch's `bits4x2`. Not in safetensors.
    #[serde(rename = "bits4x2")]
    Bits4x2,
}

struct Row {
    dtype: Dtype,
    name: &'static str,
    bits: u64,
    torch: Option<TorchType>,
    safe: Option<Safe>,
}

/// Name of a data type in `torch.save` files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TorchType {
    /// Name of a storage class, such as `FloatStorage`, and of the type, such as `float32`.
    Storage(&'static str, &'static str),
    /// Name of a type without a storage class, stored with the tensor, such as `float8_e4m3fn`.
    Untyped(&'static str),
}

use TorchType::{Storage, Untyped};

const fn row(
    dtype: Dtype,
    name: &'static str,
    bits: u64,
    torch: Option<TorchType>,
    safe: Option<Safe>,
) -> Row {
    Row { dtype, name, bits, torch, safe }
}

/// One row per data type, in the order of the enum.
const ROWS: [Row; 34] = [
    row(Dtype::F64, "F64", 64, Some(Storage("DoubleStorage", "float64")), Some(Safe::F64)),
    row(Dtype::F32, "F32", 32, Some(Storage("FloatStorage", "float32")), Some(Safe::F32)),
    row(Dtype::F16, "F16", 16, Some(Storage("HalfStorage", "float16")), Some(Safe::F16)),
    row(Dtype::BF16, "BF16", 16, Some(Storage("BFloat16Storage", "bfloat16")), Some(Safe::BF16)),
    row(Dtype::I64, "I64", 64, Some(Storage("LongStorage", "int64")), Some(Safe::I64)),
    row(Dtype::I32, "I32", 32, Some(Storage("IntStorage", "int32")), Some(Safe::I32)),
    row(Dtype::I16, "I16", 16, Some(Storage("ShortStorage", "int16")), Some(Safe::I16)),
    row(Dtype::I8, "I8", 8, Some(Storage("CharStorage", "int8")), Some(Safe::I8)),
    row(Dtype::U8, "U8", 8, Some(Storage("ByteStorage", "uint8")), Some(Safe::U8)),
    row(Dtype::Bool, "BOOL", 8, Some(Storage("BoolStorage", "bool")), Some(Safe::BOOL)),
    row(Dtype::C64, "C64", 64, Some(Storage("ComplexFloatStorage", "complex64")), Some(Safe::C64)),
    row(Dtype::C128, "C128", 128, Some(Storage("ComplexDoubleStorage", "complex128")), None),
    row(Dtype::C32, "C32", 32, Some(Untyped("complex32")), None),
    row(Dtype::U64, "U64", 64, Some(Untyped("uint64")), Some(Safe::U64)),
    row(Dtype::U32, "U32", 32, Some(Untyped("uint32")), Some(Safe::U32)),
    row(Dtype::U16, "U16", 16, Some(Untyped("uint16")), Some(Safe::U16)),
    row(Dtype::F8E4M3, "F8_E4M3", 8, Some(Untyped("float8_e4m3fn")), Some(Safe::F8_E4M3)),
    row(Dtype::F8E5M2, "F8_E5M2", 8, Some(Untyped("float8_e5m2")), Some(Safe::F8_E5M2)),
    row(Dtype::F8E8M0, "F8_E8M0", 8, Some(Untyped("float8_e8m0fnu")), Some(Safe::F8_E8M0)),
    row(
        Dtype::F8E4M3Fnuz,
        "F8_E4M3FNUZ",
        8,
        Some(Untyped("float8_e4m3fnuz")),
        Some(Safe::F8_E4M3FNUZ),
    ),
    row(
        Dtype::F8E5M2Fnuz,
        "F8_E5M2FNUZ",
        8,
        Some(Untyped("float8_e5m2fnuz")),
        Some(Safe::F8_E5M2FNUZ),
    ),
    row(Dtype::F4, "F4", 4, Some(Untyped("float4_e2m1fn_x2")), Some(Safe::F4)),
    row(Dtype::F6E2M3, "F6_E2M3", 6, None, Some(Safe::F6_E2M3)),
    row(Dtype::F6E3M2, "F6_E3M2", 6, None, Some(Safe::F6_E3M2)),
    row(Dtype::QInt8, "qint8", 8, Some(Storage("QInt8Storage", "qint8")), None),
    row(Dtype::QUInt8, "quint8", 8, Some(Storage("QUInt8Storage", "quint8")), None),
    row(Dtype::QInt32, "qint32", 32, Some(Storage("QInt32Storage", "qint32")), None),
    row(Dtype::QUInt4x2, "quint4x2", 4, Some(Storage("QUInt4x2Storage", "quint4x2")), None),
    row(Dtype::QUInt2x4, "quint2x4", 2, Some(Storage("QUInt2x4Storage", "quint2x4")), None),
    row(Dtype::Bits8, "bits8", 8, Some(Untyped("bits8")), None),
    row(Dtype::Bits16, "bits16", 16, Some(Untyped("bits16")), None),
    row(Dtype::Bits1x8, "bits1x8", 8, Some(Untyped("bits1x8")), None),
    row(Dtype::Bits2x4, "bits2x4", 8, Some(Untyped("bits2x4")), None),
    row(Dtype::Bits4x2, "bits4x2", 8, Some(Untyped("bits4x2")), None),
];

impl Dtype {
    /// Returns the number of bits per element.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.row().bits
    }

    /// Returns the number of bytes per element. 1 for types smaller than a byte.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bits().div_ceil(8)
    }

    /// Returns the name in safetensors files, or PyTorch's for types that safetensors lacks.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the name in `torch.save` files. `None` for types that PyTorch lacks.
    pub(crate) fn torch(self) -> Option<TorchType> {
        self.row().torch
    }

    pub(crate) fn from_storage(name: &str) -> Option<Self> {
        let has = |row: &&Row| matches!(row.torch, Some(Storage(known, _)) if known == name);
        ROWS.iter().find(has).map(|row| row.dtype)
    }

    /// Returns the type with this name, among the types without a storage class.
    pub(crate) fn from_untyped(name: &str) -> Option<Self> {
        let has = |row: &&Row| matches!(row.torch, Some(Untyped(known)) if known == name);
        ROWS.iter().find(has).map(|row| row.dtype)
    }

    /// Returns the type with this name in PyTorch, such as `float32`, among those that have a [`Dtype::torch_name`].
    pub(crate) fn from_torch_name(name: &str) -> Option<Self> {
        ROWS.iter().map(|row| row.dtype).find(|dtype| dtype.torch_name() == Some(name))
    }

    /// Returns PyTorch's name of the type, such as `float32`. `None` for types that it lacks, packs into bytes or
    /// scales.
    pub(crate) fn torch_name(self) -> Option<&'static str> {
        if self.is_quantized() || self.bits() < 8 {
            return None;
        }
        self.torch().map(|(Storage(_, name) | Untyped(name))| name)
    }

    /// Returns `true` if elements are integers to be multiplied with a scale stored with the tensor.
    pub(crate) fn is_quantized(self) -> bool {
        matches!(self, Self::QInt8 | Self::QUInt8 | Self::QInt32 | Self::QUInt4x2 | Self::QUInt2x4)
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

/// Data type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Data type of the elements.
    pub dtype: Dtype,
    /// Shape of the tensor.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Returns the number of elements. `None` if it does not fit into 64 bits.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        // A zero anywhere makes the tensor empty, even if the other sizes overflow.
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))
    }

    /// Returns the size in bytes. `None` if it does not fit into 64 bits.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.elements()?;
        let bits = self.dtype.bits();
        if bits.is_multiple_of(8) {
            return elements.checked_mul(bits / 8);
        }
        match self.shape.last() {
            // Every row begins at a byte.
            Some(&row) if self.dtype.is_quantized() && row > 0 => {
                (elements / row).checked_mul(row.checked_mul(bits)?.div_ceil(8))
            }
            _ => Some(elements.checked_mul(bits)?.div_ceil(8)),
        }
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
    fn every_type_has_one_name_in_each_format() {
        for row in &ROWS {
            let json = serde_json::to_value(row.dtype).unwrap();
            assert_eq!(json, row.name);
            assert_eq!(serde_json::from_value::<Dtype>(json).unwrap(), row.dtype);
            let same = |other: &&Row| other.torch == row.torch && row.torch.is_some();
            assert_eq!(ROWS.iter().filter(same).count(), usize::from(row.torch.is_some()));
            if let Some(safe) = row.safe {
                assert_eq!(Dtype::from_safetensors(safe), Some(row.dtype));
                assert_eq!((safe.to_string(), safe.bitsize() as u64), (row.name.into(), row.bits));
            }
        }
    }

    #[test]
    fn elements_of_less_than_a_byte_are_packed() {
        let bytes = |dtype, shape: &[u64]| TensorInfo { dtype, shape: shape.to_vec() }.bytes();
        assert_eq!(bytes(Dtype::F4, &[3, 6]), Some(9));
        assert_eq!(bytes(Dtype::F6E2M3, &[2, 4]), Some(6));
        // Measured in PyTorch: rows of 5 take 3 bytes.
        assert_eq!(bytes(Dtype::QUInt4x2, &[3, 5]), Some(9));
        assert_eq!(bytes(Dtype::QUInt2x4, &[3, 5]), Some(6));
        assert_eq!(bytes(Dtype::QUInt4x2, &[0, 5]), Some(0));
        assert_eq!(bytes(Dtype::QUInt4x2, &[]), Some(1));
        assert_eq!(bytes(Dtype::F4, &[u64::MAX]), None);
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
