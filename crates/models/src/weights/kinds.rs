//! libtorch's kinds and the files' types of elements.

use brigade_checkpoint::Dtype;
use tch::Kind;

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
    fn every_type_has_its_kind_of_the_same_width() {
        for (kind, dtype) in KINDS {
            assert_eq!((kind_of(dtype), dtype_of(kind)), (kind, Some(dtype)));
            assert_eq!(kind.elt_size_in_bytes() as u64, dtype.bytes());
        }
    }
}
