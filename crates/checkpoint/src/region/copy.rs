//! Intersections of regions, and copies between them.

use super::Region;

impl Region {
    /// Returns the intersection of two regions. `None` if it is empty, or if the numbers of dimensions differ.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.shape.len() != other.shape.len() {
            return None;
        }
        let mut common = Self { offset: Vec::new(), shape: Vec::new() };
        for dim in 0..self.shape.len() {
            let begin = self.offset[dim].max(other.offset[dim]);
            let end = |region: &Self| region.offset[dim].saturating_add(region.shape[dim]);
            let end = end(self).min(end(other));
            if begin >= end {
                return None;
            }
            common.offset.push(begin);
            common.shape.push(end - begin);
        }
        Some(common)
    }

    /// Returns the copy of the intersection from this region to `target`, both stored contiguously. `None` if the
    /// intersection is empty.
    #[must_use]
    pub fn copy_to(&self, target: &Self) -> Option<RegionCopy> {
        let common = self.intersection(target)?;
        let dims = common.shape.len();
        // All dimensions from here on are whole on both sides: one run covers them.
        let is_whole = |dim: usize| {
            common.shape[dim] == self.shape[dim] && common.shape[dim] == target.shape[dim]
        };
        let whole_from = (0..dims).rev().take_while(|dim| is_whole(*dim)).last().unwrap_or(dims);
        let outer = whole_from.saturating_sub(1);
        Some(RegionCopy {
            run: common.shape[outer..].iter().product(),
            outer: common.shape[..outer].to_vec(),
            source: Side::new(self, &common),
            target: Side::new(target, &common),
        })
    }
}

/// A copy from one region to another: runs of equal length that are contiguous on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionCopy {
    run: u64,
    /// Sizes of the outer dimensions, over which runs are repeated.
    outer: Vec<u64>,
    source: Side,
    target: Side,
}

/// A run of elements of a [`RegionCopy`] that is contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Index of the first element in the source region.
    pub source: u64,
    /// Index of the first element in the target region.
    pub target: u64,
    /// Number of elements in the run.
    pub len: u64,
}

impl RegionCopy {
    /// Returns the number of elements to copy.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.run * self.outer.iter().product::<u64>()
    }

    /// Iterates over the runs, in ascending order on both sides.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        (0..self.outer.iter().product()).map(|number| {
            let mut rest: u64 = number;
            let (mut source, mut target) = (self.source.first, self.target.first);
            for dim in (0..self.outer.len()).rev() {
                let index = rest % self.outer[dim];
                rest /= self.outer[dim];
                source += index * self.source.strides[dim];
                target += index * self.target.strides[dim];
            }
            Run { source, target, len: self.run }
        })
    }
}

/// Position and strides of a box in a region that is stored contiguously.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Side {
    first: u64,
    strides: Vec<u64>,
}

impl Side {
    fn new(region: &Region, common: &Region) -> Self {
        let mut strides = vec![1; region.shape.len()];
        for dim in (1..region.shape.len()).rev() {
            strides[dim - 1] = strides[dim] * region.shape[dim];
        }
        let dims = 0..region.shape.len();
        let first = dims.map(|dim| (common.offset[dim] - region.offset[dim]) * strides[dim]).sum();
        Self { first, strides }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns all parts of a tensor after cuts along dimensions, one after the other.
    fn parts(shape: &[u64], cuts: &[(usize, u64)]) -> Vec<Region> {
        cuts.iter().fold(vec![Region::whole(shape)], |parts, (dim, ranks)| {
            let dim = dim % shape.len();
            let cut = |part: Region| (0..*ranks).map(move |place| part.chunk(dim, *ranks, place));
            parts.into_iter().flat_map(cut).collect()
        })
    }

    /// Returns the index of an element in the whole tensor.
    fn number(region: &Region, shape: &[u64], element: u64) -> u64 {
        let (mut rest, mut number, mut stride) = (element, 0, 1);
        for dim in (0..shape.len()).rev() {
            number += (region.offset[dim] + rest % region.shape[dim]) * stride;
            rest /= region.shape[dim];
            stride *= shape[dim];
        }
        number
    }

    #[test]
    fn rows_are_one_run() {
        let whole = Region::whole(&[6, 4, 3]);
        let copy = whole.chunk(0, 2, 1).copy_to(&whole).unwrap();
        assert_eq!(copy.runs().collect::<Vec<_>>(), [Run { source: 0, target: 36, len: 36 }]);
        let copy = whole.copy_to(&whole.chunk(1, 2, 1)).unwrap();
        let runs: Vec<_> = copy.runs().collect();
        assert_eq!(
            runs[..2],
            [Run { source: 6, target: 0, len: 6 }, Run { source: 18, target: 6, len: 6 }]
        );
        assert_eq!(runs.len(), 6);
    }

    #[test]
    fn scalars_and_empty_parts() {
        let scalar = Region::whole(&[]);
        let copy = scalar.copy_to(&scalar).unwrap();
        assert_eq!(copy.runs().collect::<Vec<_>>(), [Run { source: 0, target: 0, len: 1 }]);
        let whole = Region::whole(&[2, 3]);
        assert_eq!(whole.chunk(0, 4, 3).elements(), 0);
        assert_eq!(whole.copy_to(&whole.chunk(0, 4, 3)), None);
        assert_eq!(whole.copy_to(&scalar), None);
    }

    proptest! {
        #[test]
        fn any_sharding_is_copied_to_any_other_one_element_once(
            shape in proptest::collection::vec(0u64..8, 1..4),
            from in proptest::collection::vec((0usize..4, 1u64..5), 0..3),
            to in proptest::collection::vec((0usize..4, 1u64..5), 0..3),
        ) {
            let (from, to) = (parts(&shape, &from), parts(&shape, &to));
            let elements: u64 = shape.iter().product();
            prop_assert_eq!(from.iter().map(Region::elements).sum::<u64>(), elements);
            let mut copied = vec![0; elements as usize];
            for (source, target) in from.iter().flat_map(|source| to.iter().map(move |target| (source, target))) {
                let Some(copy) = source.copy_to(target) else { continue };
                let mut count = 0;
                for run in copy.runs() {
                    for place in 0..run.len {
                        let element = number(source, &shape, run.source + place);
                        prop_assert_eq!(element, number(target, &shape, run.target + place));
                        copied[element as usize] += 1;
                        count += 1;
                    }
                }
                prop_assert_eq!(count, copy.elements());
            }
            prop_assert!(copied.iter().all(|times| *times == 1), "{:?}", copied);
        }
    }
}
