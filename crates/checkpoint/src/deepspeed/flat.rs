//! Flat vectors of elements, partitioned over ZeRO's ranks.

use std::path::PathBuf;

use crate::dtype::{Dtype, TensorInfo};
use crate::fault::Fault;
use crate::file_tensor::FileTensor;
use crate::layout::TensorLocation;
use crate::pth::{PthFile, StoredTensor};

/// Consecutive elements in a file.
#[derive(Debug, Clone)]
pub(super) struct Flat {
    path: PathBuf,
    offset: u64,
    pub(super) elements: u64,
    pub(super) dtype: Dtype,
}

impl Flat {
    /// Locates the elements of a tensor whose bounds were checked.
    pub(super) fn of(file: &PthFile, tensor: &StoredTensor) -> Result<Self, Fault> {
        let info = tensor.info();
        let elements = info.elements().unwrap_or_default();
        if !tensor.is_contiguous()
            || !info.dtype.bits().is_multiple_of(8)
            || info.dtype.is_quantized()
        {
            return Err(Fault::unsupported(format_args!(
                "a part of a parameter is {info} with the strides {:?}: only elements in order are read",
                tensor.stride
            )));
        }
        let storage = file.place(&tensor.storage.key)?;
        let offset = storage.begin + tensor.offset.unsigned_abs() * info.dtype.bytes();
        Ok(Self { path: file.path().to_owned(), offset, elements, dtype: info.dtype })
    }

    /// Returns the location of `count` elements from `first` on. The range must exist.
    pub(super) fn part(&self, first: u64, count: u64) -> TensorLocation {
        let info = TensorInfo { dtype: self.dtype, shape: vec![count] };
        let offset = self.offset + first * self.dtype.bytes();
        TensorLocation { path: self.path.clone(), offset, info }
    }

    /// Returns all elements as a tensor. The shape must have the same number of elements.
    pub(super) fn shaped(&self, shape: Vec<u64>) -> FileTensor {
        let info = TensorInfo { dtype: self.dtype, shape };
        FileTensor::placed(TensorLocation { path: self.path.clone(), offset: self.offset, info })
    }
}

/// A range of elements in one of several vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) rank: usize,
    /// Index of the vector among those of the rank.
    pub(super) vector: usize,
    pub(super) first: u64,
    pub(super) count: u64,
}

/// Joins pieces into a tensor, in their order. `vector` finds the vector of a piece, and fails with the reason if it is
/// missing.
pub(super) fn joined<'f>(
    shape: &[u64],
    pieces: &[Piece],
    mut vector: impl FnMut(&Piece) -> Result<&'f Flat, String>,
) -> Result<FileTensor, String> {
    let (mut places, mut dtype) = (Vec::with_capacity(pieces.len()), None);
    for piece in pieces {
        let flat = vector(piece)?;
        let end = piece.first.checked_add(piece.count);
        if end.is_none_or(|end| end > flat.elements) {
            return Err(format!(
                "rank {} has {} elements, but {} from {} on belong to it",
                piece.rank, flat.elements, piece.count, piece.first
            ));
        }
        let dtype = *dtype.get_or_insert(flat.dtype);
        if flat.dtype != dtype {
            return Err(format!("rank {} has {}, others {dtype}", piece.rank, flat.dtype));
        }
        places.push(flat.part(piece.first, piece.count));
    }
    let info = TensorInfo { dtype: dtype.unwrap_or(Dtype::F32), shape: shape.to_vec() };
    Ok(FileTensor::of_parts(info, places))
}

/// A concatenation of vectors.
#[derive(Debug)]
pub(super) struct Chain {
    /// End of each vector in the concatenation.
    ends: Vec<u64>,
}

impl Chain {
    pub(super) fn of(sizes: impl IntoIterator<Item = u64>) -> Self {
        let ends = sizes.into_iter().scan(0u64, |end, size| {
            *end = end.saturating_add(size);
            Some(*end)
        });
        Self { ends: ends.collect() }
    }

    pub(super) fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Splits the range of `count` elements from `first` on by vectors. Returns for each vector its index, its first
    /// element and the number of elements. `None` if the range exceeds the chain.
    pub(super) fn cut(&self, first: u64, count: u64) -> Option<Vec<(usize, u64, u64)>> {
        let end = first.checked_add(count).filter(|end| *end <= self.len())?;
        let (mut at, mut pieces) = (first, Vec::new());
        let mut vector = self.ends.partition_point(|end| *end <= first);
        while at < end {
            let begin = vector.checked_sub(1).map_or(0, |before| self.ends[before]);
            let now = end.min(self.ends[vector]) - at;
            if now > 0 {
                pieces.push((vector, at - begin, now));
            }
            at += now;
            vector += 1;
        }
        Some(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_cut_out_of_several_vectors() {
        let chain = Chain::of([3, 0, 4, 1]);
        assert_eq!(chain.len(), 8);
        assert_eq!(chain.cut(0, 3), Some(vec![(0, 0, 3)]));
        assert_eq!(chain.cut(2, 6), Some(vec![(0, 2, 1), (2, 0, 4), (3, 0, 1)]));
        assert_eq!(chain.cut(3, 1), Some(vec![(2, 0, 1)]));
        assert_eq!(chain.cut(8, 0), Some(vec![]));
        assert_eq!(chain.cut(8, 1), None);
        assert_eq!(chain.cut(u64::MAX, 2), None);
        assert_eq!(Chain::of([]).cut(0, 0), Some(vec![]));
    }
}
