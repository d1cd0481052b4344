//! Conversion between libtorch's kinds and the element types of files.

use brigade_checkpoint::Dtype;
use tch::{Kind, TchError, Tensor};

/// Returns the type of a tensor kind in files. `None` for kinds that Brigade's files cannot hold.
#[must_use]
pub fn dtype_of(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

/// Returns the tensor kind of a file's type. `None` for types that only files can hold: floats of 8 bits and fewer,
/// unsigned integers of more than 8 bits, quantized integers.
#[must_use]
pub fn kind_of(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(_, known)| *known == dtype).map(|(kind, _)| *kind)
}

/// Returns the tensor kind of a file's type, or a message why the tensor of that name cannot be loaded and what to do
/// about it.
///
/// # Errors
/// Returns the message for types of which [`kind_of`] is `None`.
pub fn loaded_kind(name: &str, dtype: Dtype) -> Result<Kind, String> {
    kind_of(dtype).ok_or_else(|| {
        let remedy = match dtype {
            Dtype::U16 | Dtype::U32 | Dtype::U64 => "`tensor.to(torch.int64)`",
            Dtype::C32 => "`tensor.to(torch.complex64)`",
            Dtype::QInt8
            | Dtype::QUInt8
            | Dtype::QInt32
            | Dtype::QUInt4x2
            | Dtype::QUInt2x4 => "`tensor.dequantize()`",
            _ => "`tensor.to(torch.float32)`, times its scale where the file has one",
        };
        format!(
            "`{name}` is {dtype}, which tensors of a model cannot be; save it in another dtype in PyTorch: {remedy}"
        )
    })
}

/// Creates a tensor from a copy of a file's bytes, whose number must match shape and type.
///
/// For Booleans, bytes other than 0 and 1 are replaced by 1, also in `bytes`, because any other byte is undefined
/// behaviour in C++.
///
/// # Errors
/// Returns libtorch's error for an invalid shape, and for a type of which [`kind_of`] is `None`.
pub fn tensor_from_bytes(
    bytes: &mut [u8],
    shape: &[i64],
    dtype: Dtype,
) -> Result<Tensor, TchError> {
    if dtype == Dtype::Bool {
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    let kind = kind_of(dtype)
        .ok_or_else(|| TchError::Kind(format!("tensors of a program cannot be {dtype}")))?;
    Tensor::f_from_data_size(bytes, shape, kind)
}

const KINDS: [(Kind, Dtype); 12] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::Bool),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::ComplexDouble, Dtype::C128),
];

/// Returns PyTorch's name of the type, without `torch.`.
pub(crate) fn type_name(kind: Kind) -> String {
    let name = match kind {
        Kind::Uint8 => "uint8",
        Kind::Int8 => "int8",
        Kind::Int16 => "int16",
        Kind::Int => "int32",
        Kind::Int64 => "int64",
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::ComplexHalf => "complex32",
        Kind::ComplexFloat => "complex64",
        Kind::ComplexDouble => "complex128",
        Kind::Bool => "bool",
        // Kinds without arithmetic (quantised, 8-bit floats) have the same names on all of Brigade's ranks.
        other => return format!("{other:?}").to_ascii_lowercase(),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truth_values_have_two_bytes() {
        let mut bytes = [0, 1, 2, 255];
        let tensor = tensor_from_bytes(&mut bytes, &[4], Dtype::Bool).unwrap();
        let bytes = tensor.f_view_dtype(Kind::Uint8).unwrap();
        assert_eq!(Vec::<u8>::try_from(&bytes).unwrap(), [0, 1, 1, 1]);
    }

    #[test]
    fn types_have_kinds_of_the_same_width() {
        for (kind, dtype) in KINDS {
            assert_eq!((kind_of(dtype), dtype_of(kind)), (Some(kind), Some(dtype)));
            assert_eq!(kind.elt_size_in_bytes() as u64, dtype.bytes());
        }
    }

    #[test]
    fn types_that_only_files_can_hold_are_named_with_a_remedy() {
        for (dtype, remedy) in [
            (Dtype::F8E4M3, "torch.float32"),
            (Dtype::U32, "torch.int64"),
            (Dtype::QInt8, "dequantize()"),
        ] {
            assert_eq!(kind_of(dtype), None);
            let sentence = loaded_kind("layer.weight", dtype).unwrap_err();
            assert!(sentence.contains(&format!("`layer.weight` is {dtype}")), "{sentence}");
            assert!(sentence.contains(remedy), "{sentence}");
            assert!(tensor_from_bytes(&mut [0; 8], &[1], dtype).is_err());
        }
    }
}
