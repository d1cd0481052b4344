//! Parts of parameters that the ranks of a tensor group have.

use std::ops::Range;

use brigade_checkpoint::Region;

use crate::{ShardingError, TensorStyle};

/// Part of a parameter that a rank of a tensor group has: a range of each block along one dimension, side by side.
///
/// ```
/// use brigade_sharding::{Heads, TensorPart, TensorStyle};
///
/// // Queries, keys and values of 4 features each in one weight: rank 1 of 2 has the second half of each.
/// let part = TensorPart::new("qkv", &[12, 4], 0, &TensorStyle::Heads(Heads::fused(3)), 1, 2)?;
/// assert_eq!(part.own_shape(), [6, 4]);
/// assert_eq!(part.ranges(), [2..4, 6..8, 10..12]);
///
/// let error = TensorPart::new("up", &[10, 4], 0, &TensorStyle::Column, 0, 4).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`up`: 4 tensor ranks do not divide 10 (shape [10, 4], dimension 0): take 8 or 12, or other ranks"
/// );
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorPart {
    shape: Vec<u64>,
    dim: usize,
    /// Sizes of the blocks along the dimension.
    blocks: Vec<u64>,
    rank: usize,
    ranks: usize,
}

impl TensorPart {
    /// Returns the part that `rank` of `ranks` ranks has of a parameter that is divided along `dim`. `shape` is the
    /// shape of the whole parameter.
    ///
    /// # Errors
    /// [`ShardingError::Indivisible`] if the ranks, or the blocks of fused heads, do not divide the dimension, and
    /// [`ShardingError::EmptyPart`] for a vocabulary with fewer entries than ranks.
    pub fn new(
        name: &str,
        shape: &[u64],
        dim: usize,
        style: &TensorStyle,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, ShardingError> {
        let ranks = ranks.max(1);
        let size = shape.get(dim).copied().unwrap_or_default();
        let indivisible = |unit: u64| {
            // The nearest sizes for which every block can be divided.
            let (less, more) = (size / unit * unit, (size / unit + 1).saturating_mul(unit));
            ShardingError::Indivisible {
                name: name.to_owned(),
                shape: shape.to_vec(),
                dim,
                size,
                ranks,
                nearest: [less, more].into_iter().filter(|&size| size > 0).collect(),
            }
        };
        let blocks = match style {
            TensorStyle::Vocabulary if size < ranks as u64 => {
                return Err(ShardingError::EmptyPart { name: name.to_owned(), size, ranks });
            }
            TensorStyle::Vocabulary => vec![size],
            TensorStyle::Column | TensorStyle::Row => {
                if size == 0 || !size.is_multiple_of(ranks as u64) {
                    return Err(indivisible(ranks as u64));
                }
                vec![size]
            }
            TensorStyle::Heads(heads) => {
                let sum: u64 = heads.blocks.iter().sum();
                // Each block is divided by itself: the ranks have to divide `n · block` for each of the blocks.
                let every = heads.blocks.iter().copied().map(|block| step(block, ranks as u64));
                let unit = every.fold(1, least_common_multiple).saturating_mul(sum).max(1);
                if size == 0 || sum == 0 || !size.is_multiple_of(unit) {
                    return Err(indivisible(unit));
                }
                heads.blocks.iter().map(|block| size / sum * block).collect()
            }
        };
        Ok(Self { shape: shape.to_vec(), dim, blocks, rank, ranks })
    }

    /// Returns the part that another rank has of the same parameter.
    #[must_use]
    pub fn of_rank(&self, rank: usize) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Returns the shape of the whole parameter.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the index of the dimension along which the parameter is divided.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the number of ranks over which the parameter is divided.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the ranges that this rank has along the divided dimension, one for each block.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        self.ranges_of(self.rank)
    }

    /// Returns the ranges that a rank has along the divided dimension, one for each block. Their sizes differ by one
    /// between ranks if the ranks do not divide a vocabulary.
    #[must_use]
    pub fn ranges_of(&self, rank: usize) -> Vec<Range<u64>> {
        let (rank, ranks) = (rank as u64, self.ranks as u64);
        let mut start = 0;
        let mut ranges = Vec::with_capacity(self.blocks.len());
        for size in &self.blocks {
            let (each, more) = (size / ranks, size % ranks);
            let first = start + each * rank + more.min(rank);
            ranges.push(first..first + each + u64::from(rank < more));
            start += size;
        }
        ranges
    }

    /// Returns the shape of this rank's part.
    #[must_use]
    pub fn own_shape(&self) -> Vec<u64> {
        self.shape_of(self.rank)
    }

    /// Returns the shape of the part of any rank.
    #[must_use]
    pub fn shape_of(&self, rank: usize) -> Vec<u64> {
        let mut shape = self.shape.clone();
        shape[self.dim] = self.ranges_of(rank).iter().map(|range| range.end - range.start).sum();
        shape
    }

    /// Returns the regions of the whole parameter that make up a region of this rank's part, each with its place in
    /// that region.
    #[must_use]
    pub fn sources(&self, region: &Region) -> Vec<(Region, Region)> {
        let dim = self.dim;
        let wanted = region.offset[dim]..region.offset[dim] + region.shape[dim];
        let mut sources = Vec::new();
        let mut local = 0;
        for range in self.ranges() {
            let size = range.end - range.start;
            let first = wanted.start.max(local);
            let end = wanted.end.min(local + size);
            if first < end {
                let mut whole = region.clone();
                whole.offset[dim] = range.start + (first - local);
                whole.shape[dim] = end - first;
                let place =
                    Region::whole(&region.shape).narrow(dim, first - wanted.start, end - first);
                sources.push((whole, place));
            }
            local += size;
        }
        sources
    }
}

/// Returns the smallest number whose product with `block` the ranks divide.
fn step(block: u64, ranks: u64) -> u64 {
    ranks / greatest_common_divisor(block, ranks).max(1)
}

fn greatest_common_divisor(left: u64, right: u64) -> u64 {
    if right == 0 { left } else { greatest_common_divisor(right, left % right) }
}

fn least_common_multiple(left: u64, right: u64) -> u64 {
    (left / greatest_common_divisor(left, right).max(1)).saturating_mul(right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heads;

    #[test]
    fn parts_cover_the_whole_once() {
        let fused = |blocks| TensorStyle::Heads(Heads::fused(blocks));
        for (size, style) in [
            (24, TensorStyle::Column),
            (24, fused(3)),
            (24, fused(2)),
            (48, TensorStyle::Heads(Heads::grouped(4, 2))),
            (7, TensorStyle::Vocabulary),
            (50257, TensorStyle::Vocabulary),
        ] {
            for ranks in [1, 2, 4] {
                let mut seen = vec![0; size as usize];
                for rank in 0..ranks {
                    let Ok(part) = TensorPart::new("w", &[3, size], 1, &style, rank, ranks) else {
                        panic!("{size} {style} {ranks}");
                    };
                    let ranges = part.ranges();
                    let count: u64 = ranges.iter().map(|range| range.end - range.start).sum();
                    assert_eq!(part.own_shape(), [3, count]);
                    ranges.into_iter().flatten().for_each(|index| seen[index as usize] += 1);
                }
                assert!(seen.iter().all(|&times| times == 1), "{size} {style} {ranks}");
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_refused_with_the_nearest() {
        let heads = TensorStyle::Heads(Heads::grouped(4, 2));
        let refused = |size, style: &TensorStyle, ranks| {
            TensorPart::new("w", &[size], 0, style, 0, ranks).unwrap_err().to_string()
        };
        // 4 : 2 : 2 of 40 are 20, 10 and 10, and 4 ranks do not divide 10.
        assert!(refused(40, &heads, 4).contains("take 32 or 48"), "{}", refused(40, &heads, 4));
        assert!(
            refused(3, &TensorStyle::Row, 4).contains("take 4,"),
            "{}",
            refused(3, &TensorStyle::Row, 4)
        );
        assert!(refused(3, &TensorStyle::Vocabulary, 4).contains("3 entries"));
        assert!(refused(0, &TensorStyle::Column, 2).contains("take 2"));
        assert!(TensorPart::new("w", &[6], 0, &TensorStyle::Heads(Heads::fused(0)), 0, 2).is_err());
    }

    #[test]
    fn regions_of_a_part_lie_in_the_whole() {
        let style = TensorStyle::Heads(Heads::fused(3));
        let part = TensorPart::new("w", &[12, 4], 0, &style, 1, 2).unwrap();
        // Rows 1, 2 and 3 of the part are rows 3, 6 and 7 of the whole.
        let sources = part.sources(&Region { offset: vec![1, 0], shape: vec![3, 4] });
        let shown: Vec<String> =
            sources.iter().map(|(whole, place)| format!("{whole} -> {place}")).collect();
        assert_eq!(
            shown,
            ["[1, 4] at [3, 0] -> [1, 4] at [0, 0]", "[2, 4] at [6, 0] -> [2, 4] at [1, 0]"]
        );
        // The rows of a part that is divided along columns.
        let part = TensorPart::new("w", &[4, 12], 1, &TensorStyle::Row, 1, 2).unwrap();
        let sources = part.sources(&Region { offset: vec![2, 0], shape: vec![2, 6] });
        assert_eq!(sources[0].0, Region { offset: vec![2, 6], shape: vec![2, 6] });
        assert_eq!(sources.len(), 1);
    }
}
