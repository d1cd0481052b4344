//! Description of a tensor in a manifest: its global shape, its placements, and the stored chunks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::{Dtype, TensorInfo};
use crate::file_name::FileName;
use crate::region::check_cover;

/// An axis of the device mesh, such as `data` of size 4.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeshAxis {
    /// Name of the axis, unique in the mesh.
    pub name: String,
    /// Number of ranks along the axis.
    pub size: usize,
}

/// Placement of a tensor along one axis of the mesh, as in PyTorch's DTensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Each rank holds the whole tensor.
    Replicate,
    /// Each rank holds a shard along this dimension of the tensor.
    Shard(usize),
}

impl fmt::Display for Placement {
    /// Writes `R` or `S(0)`, as PyTorch's DTensor does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("R"),
            Self::Shard(dim) => write!(f, "S({dim})"),
        }
    }
}

/// A tensor of an object in a manifest. The chunks cover the global shape exactly once.
///
/// ```
/// use brigade_checkpoint::layout::{Chunk, Placement, TensorEntry};
/// use brigade_checkpoint::{Dtype, FileName};
///
/// // Rows 0 to 1 and 2 to 3 of a weight, from two ranks.
/// let chunk = |row: u64, file: &str| Chunk {
///     file: FileName::new(file).unwrap(),
///     key: None,
///     offset: vec![row, 0],
///     shape: vec![2, 8],
/// };
/// let weight = TensorEntry {
///     dtype: Dtype::F32,
///     shape: vec![4, 8],
///     placements: vec![Placement::Shard(0)],
///     chunks: vec![chunk(0, "shard-0.safetensors"), chunk(2, "shard-1.safetensors")],
/// };
/// weight.check().unwrap();
/// let gap = TensorEntry { chunks: weight.chunks[..1].to_vec(), ..weight };
/// assert!(gap.check().unwrap_err().contains("gap"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Data type of the elements.
    pub dtype: Dtype,
    /// Global shape: that of the whole tensor, without padding.
    pub shape: Vec<u64>,
    /// Placements, one per mesh axis. Empty for a tensor that belongs to a single rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<Placement>,
    /// Stored chunks. A replicated tensor has one.
    pub chunks: Vec<Chunk>,
}

/// A stored part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Safetensors file that contains the chunk.
    pub file: FileName,
    /// Name of the chunk in the file. `None` if it is the tensor's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Index of the chunk's first element in the whole tensor, one number per dimension.
    pub offset: Vec<u64>,
    /// Shape of the chunk.
    pub shape: Vec<u64>,
}

impl TensorEntry {
    /// Creates an entry for a tensor that is stored whole in `file`, under its own name.
    #[must_use]
    pub fn whole(info: TensorInfo, file: FileName, placements: Vec<Placement>) -> Self {
        let TensorInfo { dtype, shape } = info;
        let chunk = Chunk { file, key: None, offset: vec![0; shape.len()], shape: shape.clone() };
        Self { dtype, shape, placements, chunks: vec![chunk] }
    }

    /// Returns data type and global shape.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        TensorInfo { dtype: self.dtype, shape: self.shape.clone() }
    }

    /// Checks that the chunks lie within the global shape and cover it exactly once, and that each sharded dimension
    /// exists.
    ///
    /// # Errors
    /// Returns the first contradiction: an overlap, a gap, a chunk out of range, or a size that does not fit into 64
    /// bits.
    pub fn check(&self) -> Result<(), String> {
        let dims = self.shape.len();
        let info = self.info();
        if dims > MAX_DIMS {
            return Err(format!("it has {dims} dimensions, at most {MAX_DIMS} are supported"));
        }
        if info.bytes().is_none() {
            return Err(format!("the size of {info} does not fit 64 bits"));
        }
        for placement in &self.placements {
            if let Placement::Shard(dim) = *placement
                && dim >= dims
            {
                return Err(format!("it is sharded along dimension {dim}, but has {dims}"));
            }
        }
        if self.chunks.is_empty() {
            return Err("it has no chunks".into());
        }
        for chunk in &self.chunks {
            let Chunk { offset, shape, .. } = chunk;
            if offset.len() != dims || shape.len() != dims {
                return Err(format!(
                    "the chunk of shape {shape:?} at {offset:?} has other dimensions than {:?}",
                    self.shape
                ));
            }
            let fits = |dim: usize| {
                offset[dim].checked_add(shape[dim]).is_some_and(|end| end <= self.shape[dim])
            };
            if !(0..dims).all(fits) {
                return Err(format!(
                    "the chunk of shape {shape:?} at {offset:?} is out of range of {:?}",
                    self.shape
                ));
            }
        }
        let chunks = self.chunks.iter().map(|it| (it.offset.as_slice(), it.shape.as_slice()));
        check_cover(&self.shape, chunks)
    }
}

impl Chunk {
    /// Returns the name of the chunk in its file, given the tensor's name.
    #[must_use]
    pub fn key<'a>(&'a self, tensor: &'a str) -> &'a str {
        self.key.as_deref().unwrap_or(tensor)
    }
}

/// Maximum number of dimensions, as in PyTorch.
const MAX_DIMS: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(shape: &[u64], chunks: &[(&[u64], &[u64])]) -> TensorEntry {
        let file = FileName::new("t.safetensors").unwrap();
        let chunks = chunks.iter().enumerate().map(|(number, (offset, shape))| Chunk {
            file: file.clone(),
            key: Some(number.to_string()),
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        });
        let chunks = chunks.collect();
        TensorEntry { dtype: Dtype::F32, shape: shape.to_vec(), placements: Vec::new(), chunks }
    }

    #[test]
    fn exact_covers_are_accepted() {
        entry(&[], &[(&[], &[])]).check().unwrap();
        entry(&[0, 4], &[(&[0, 0], &[0, 4])]).check().unwrap();
        entry(&[5, 4], &[(&[3, 0], &[2, 4]), (&[0, 0], &[3, 4])]).check().unwrap();
        // Five boxes around a center: no single cut divides the whole.
        let pinwheel: [(&[u64], &[u64]); 5] = [
            (&[0, 0], &[1, 2]),
            (&[0, 2], &[2, 1]),
            (&[2, 1], &[1, 2]),
            (&[1, 0], &[2, 1]),
            (&[1, 1], &[1, 1]),
        ];
        entry(&[3, 3], &pinwheel).check().unwrap();
    }

    #[test]
    fn contradictions_are_named() {
        let fault =
            |shape: &[u64], chunks: &[(&[u64], &[u64])]| entry(shape, chunks).check().unwrap_err();
        assert!(fault(&[4], &[(&[0], &[3])]).contains("leave a gap"));
        assert!(fault(&[4], &[(&[0], &[3]), (&[2], &[2])]).contains("chunks overlap:"));
        assert!(fault(&[4], &[(&[0], &[2]), (&[0], &[2])]).contains("overlap and leave a gap"));
        assert!(fault(&[], &[(&[], &[]), (&[], &[])]).contains("overlap"));
        assert!(fault(&[4], &[(&[2], &[3])]).contains("out of range"));
        assert!(fault(&[4], &[(&[u64::MAX], &[2])]).contains("out of range"));
        assert!(fault(&[4], &[(&[0, 0], &[4, 1])]).contains("other dimensions"));
        assert!(fault(&[u64::MAX, 2], &[(&[0, 0], &[1, 1])]).contains("64 bits"));
        assert!(fault(&[4], &[]).contains("no chunks"));
        let sharded =
            TensorEntry { placements: vec![Placement::Shard(1)], ..entry(&[4], &[(&[0], &[4])]) };
        assert!(sharded.check().unwrap_err().contains("dimension 1"));
    }

    proptest! {
        /// Compares with a count of how often each element is covered.
        #[test]
        fn a_cover_is_what_counting_says(
            boxes in proptest::collection::vec(((0u64..3, 1u64..4), (0u64..3, 1u64..4)), 1..6)
        ) {
            let boxes: Vec<_> = boxes.into_iter().map(|((x, w), (y, h))| ([x, y], [w.min(3 - x), h.min(3 - y)])).collect();
            let chunks: Vec<(&[u64], &[u64])> = boxes.iter().map(|(o, s)| (o.as_slice(), s.as_slice())).collect();
            let covered = |x: u64, y: u64| boxes.iter().filter(|(o, s)| (o[0]..o[0] + s[0]).contains(&x) && (o[1]..o[1] + s[1]).contains(&y)).count();
            let exact = (0..9).all(|place| covered(place / 3, place % 3) == 1);
            prop_assert_eq!(entry(&[3, 3], &chunks).check().is_ok(), exact);
        }
    }
}
