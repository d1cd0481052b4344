//! Rectangular parts of tensors.

mod copy;
mod cover;

use std::fmt;

pub use copy::{RegionCopy, Run};
pub(crate) use cover::check_cover;

/// A rectangular part of a tensor: the index of its first element, and its shape.
///
/// ```
/// use brigade_checkpoint::Region;
///
/// let whole = Region::whole(&[10, 4]);
/// let rows = whole.narrow(0, 6, 3);
/// assert_eq!((rows.offset.as_slice(), rows.shape.as_slice()), (&[6, 0][..], &[3, 4][..]));
/// assert_eq!(rows.to_string(), "[3, 4] at [6, 0]");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// Index of the first element in the whole tensor, one number per dimension.
    pub offset: Vec<u64>,
    /// Shape of the region.
    pub shape: Vec<u64>,
}

impl Region {
    /// Returns the region of a whole tensor of this shape.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Returns the part of `length` elements from `start` on along one dimension, like PyTorch's `narrow`. For
    /// dimension 0, this is a range of rows.
    ///
    /// # Panics
    /// Panics if the region does not have the dimension.
    #[must_use]
    pub fn narrow(&self, dim: usize, start: u64, length: u64) -> Self {
        let mut part = self.clone();
        part.offset[dim] = part.offset[dim].saturating_add(start);
        part.shape[dim] = length;
        part
    }

    /// Returns the shard of the rank with index `place` of `ranks`, when this region is cut along a dimension into
    /// `ceil(size / ranks)` elements each. The last ranks have fewer, or none. Applied once per mesh axis, from the
    /// outermost to the innermost, it gives the shard of a rank in PyTorch's DTensor.
    ///
    /// ```
    /// use brigade_checkpoint::Region;
    ///
    /// // Rank 1 of 3 wants what ranks 0 and 1 of 2 have saved of a tensor of 5 rows.
    /// let whole = Region::whole(&[5, 8]);
    /// let wanted = whole.chunk(0, 3, 1);
    /// assert_eq!((wanted.offset[0], wanted.shape[0]), (2, 2));
    /// let [first, second] = [whole.chunk(0, 2, 0), whole.chunk(0, 2, 1)];
    /// let copied = |saved: &Region| saved.copy_to(&wanted).map_or(0, |copy| copy.elements());
    /// assert_eq!([copied(&first), copied(&second)], [8, 8]);
    /// ```
    ///
    /// # Panics
    /// Panics if the region does not have the dimension, or if `ranks` is 0.
    #[must_use]
    pub fn chunk(&self, dim: usize, ranks: u64, place: u64) -> Self {
        let size = self.shape[dim];
        let most = size.div_ceil(ranks);
        let begin = most.saturating_mul(place).min(size);
        self.narrow(dim, begin, most.min(size - begin))
    }

    /// Returns the number of elements. Saturates at `u64::MAX`, since a damaged file may claim more.
    #[must_use]
    pub fn elements(&self) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        self.shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size))
    }

    /// Returns `true` if the region is inside a tensor of this shape.
    #[must_use]
    pub fn is_within(&self, shape: &[u64]) -> bool {
        let fits = |dim: usize| {
            let end = self.offset[dim].checked_add(self.shape[dim]);
            end.is_some_and(|end| end <= shape[dim])
        };
        self.offset.len() == shape.len()
            && self.shape.len() == shape.len()
            && (0..shape.len()).all(fits)
    }

    /// Cuts the region into parts of at most `most` elements (at least 1), which follow each other in row-major order.
    /// Returns none for a region without elements.
    ///
    /// ```
    /// use brigade_checkpoint::Region;
    ///
    /// let parts: Vec<_> = Region::whole(&[5, 3]).parts(6).iter().map(ToString::to_string).collect();
    /// assert_eq!(parts, ["[2, 3] at [0, 0]", "[2, 3] at [2, 0]", "[1, 3] at [4, 0]"]);
    /// ```
    #[must_use]
    pub fn parts(&self, most: u64) -> Vec<Self> {
        if self.shape.contains(&0) {
            return Vec::new();
        }
        let most = most.max(1);
        let inner = |dim: usize| {
            self.shape[dim + 1..].iter().fold(1u64, |product, &size| product.saturating_mul(size))
        };
        // The outermost dimension whose rows fit.
        let Some(dim) = (0..self.shape.len()).find(|&dim| inner(dim) <= most) else {
            return vec![self.clone()];
        };
        let step = most / inner(dim);
        let mut parts = vec![self.clone()];
        for (outer, step) in (0..dim).map(|dim| (dim, 1)).chain([(dim, step)]) {
            let cut = |part: &Self| {
                let (part, size) = (part.clone(), self.shape[outer]);
                let starts = (0..size.div_ceil(step)).map(move |number| number * step);
                starts.map(move |start| part.narrow(outer, start, step.min(size - start)))
            };
            parts = parts.iter().flat_map(cut).collect();
        }
        parts
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.shape, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the indices of the region's elements in a tensor of this shape, in row-major order.
    fn places(region: &Region, shape: &[u64]) -> Vec<u64> {
        let dims = region.offset.iter().zip(&region.shape).zip(shape);
        dims.fold(vec![0], |places, ((&offset, &size), &whole)| {
            let along =
                |place: u64| (offset..offset + size).map(move |index| place * whole + index);
            places.into_iter().flat_map(along).collect()
        })
    }

    proptest! {
        #[test]
        fn parts_follow_each_other_and_keep_the_limit(
            shape in proptest::collection::vec(0u64..5, 0..5), most in 1u64..40
        ) {
            let whole = Region::whole(&shape);
            let parts = whole.parts(most);
            let placed: Vec<_> = parts.iter().map(|part| places(part, &shape)).collect();
            prop_assert!(placed.iter().all(|part| part.len() as u64 <= most));
            prop_assert!(parts.iter().all(|part| part.is_within(&shape)));
            prop_assert_eq!(placed.concat(), places(&whole, &shape));
        }
    }

    #[test]
    fn regions_beyond_a_tensor_are_told() {
        let region = |offset: &[u64], shape: &[u64]| Region {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        assert!(region(&[2, 0], &[1, 4]).is_within(&[3, 4]));
        assert!(region(&[], &[]).is_within(&[]));
        assert!(!region(&[2, 0], &[2, 4]).is_within(&[3, 4]));
        assert!(!region(&[u64::MAX], &[1]).is_within(&[3]));
        assert!(!region(&[0], &[3]).is_within(&[3, 4]));
        assert!(!region(&[0, 0], &[3]).is_within(&[3, 4]));
    }

    #[test]
    fn sizes_that_no_tensor_has_are_counted_without_overflow() {
        let large = 1 << 40;
        assert_eq!(Region::whole(&[large, large]).elements(), u64::MAX);
        assert_eq!(Region::whole(&[large, large, 0]).elements(), 0);
        assert_eq!(Region::whole(&[]).elements(), 1);
    }
}
