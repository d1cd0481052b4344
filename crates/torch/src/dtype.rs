//! libtorch's kinds and the files' types of elements.

use brigade_checkpoint::Dtype;
use tch::{Kind, TchError, Tensor};

/// The type that files have for a kind; `None` for those that no file of ours can hold.
#[must_use]
pub fn dtype_of(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

/// libtorch's kind for a file's type.
#[must_use]
pub fn kind_of(dtype: Dtype) -> Kind {
    // The table holds every type: a test goes through them.
    KINDS.iter().find(|(_, known)| *known == dtype).map_or(Kind::Uint8, |(kind, _)| *kind)
}

/// Makes a tensor with a copy of the bytes of a file, of which there are as many as shape and type say.
///
/// Bytes of truth values other than 0 and 1 become 1, also in `bytes`: C++ knows only two, and any other
/// byte would be undefined behaviour there.
///
/// # Errors
/// libtorch's, for a shape that it does not take.
pub fn tensor_from_bytes(
    bytes: &mut [u8],
    shape: &[i64],
    dtype: Dtype,
) -> Result<Tensor, TchError> {
    if dtype == Dtype::Bool {
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    Tensor::f_from_data_size(bytes, shape, kind_of(dtype))
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
    fn every_type_has_its_kind_of_the_same_width() {
        for (kind, dtype) in KINDS {
            assert_eq!((kind_of(dtype), dtype_of(kind)), (kind, Some(dtype)));
            assert_eq!(kind.elt_size_in_bytes() as u64, dtype.bytes());
        }
    }
}
