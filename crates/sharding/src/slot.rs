//! Slots: places of parameters in the storage of their unit, and the rows of each rank.

use std::ops::Range;

/// Location of a parameter in the storage of its unit's whole parameters.
///
/// The slot of a parameter with `rows` rows has room for [`chunk`](Self::chunk) rows of each rank, `ceil(rows /
/// ranks)`. The rows of all ranks, one after the other, are the parameter with padding behind it, so that they are
/// gathered in place. The last ranks may have fewer rows, or none.
///
/// ```
/// use brigade_sharding::Slot;
///
/// let slot = Slot {
///     offset: 0, rows: 5, row_elements: 8, element_bytes: 4, ranks: 4, dim: 0, is_whole: false, keeps_memory: false,
/// };
/// assert_eq!(slot.chunk(), 2);
/// let rows: Vec<_> = (0..4).map(|rank| slot.rows_of(rank)).collect();
/// assert_eq!(rows, [0..2, 2..4, 4..5, 5..5]);
/// assert_eq!(slot.padded_elements(), 2 * 4 * 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Offset in the storage, in bytes: a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Size of the dimension along which ranks have rows. 1 for a parameter without dimensions.
    pub rows: u64,
    /// Number of elements of a row: the product of all other dimensions.
    pub row_elements: u64,
    /// Size of an element in the storage, in bytes.
    pub element_bytes: u64,
    /// Number of ranks that share one copy of the parameter.
    pub ranks: u64,
    /// Dimension along which ranks have rows: 0, or 1 for experts whose number the ranks do not divide.
    pub dim: usize,
    /// `true` if each rank holds the whole parameter: one without dimensions, or experts that no other rank shares.
    pub is_whole: bool,
    /// `true` if the parameter has memory of its own, outside of the storage.
    pub keeps_memory: bool,
}

/// Alignment of slots in bytes: a cache line, which is also sufficient for vector instructions.
pub const ALIGNMENT: u64 = 64;

impl Slot {
    /// Returns the number of rows for which each rank has room.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        if self.is_whole { self.rows } else { self.rows.div_ceil(self.ranks) }
    }

    /// Returns the rows of a rank, without padding. `place` is the rank's index among those that share one copy.
    /// Returns all rows if each rank holds the whole parameter.
    #[must_use]
    pub fn rows_of(&self, place: u64) -> Range<u64> {
        if self.is_whole {
            return 0..self.rows;
        }
        let begin = (place * self.chunk()).min(self.rows);
        begin..(begin + self.chunk()).min(self.rows)
    }

    /// Returns the number of elements of a rank, without padding. `place` is the rank's index among those that share
    /// one copy.
    #[must_use]
    pub fn elements_of(&self, place: u64) -> u64 {
        let rows = self.rows_of(place);
        (rows.end - rows.start) * self.row_elements
    }

    /// Returns the number of elements of the parameter, without padding.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.rows * self.row_elements
    }

    /// Returns the number of elements of one rank, with padding.
    #[must_use]
    pub fn chunk_elements(&self) -> u64 {
        self.chunk() * self.row_elements
    }

    /// Returns the number of elements of all ranks, with padding.
    #[must_use]
    pub fn padded_elements(&self) -> u64 {
        if self.is_whole { self.elements() } else { self.chunk_elements() * self.ranks }
    }

    /// Returns the bytes that the parameter takes in the storage, with padding of rows. 0 if it has memory of its own.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        if self.keeps_memory { 0 } else { self.padded_elements() * self.element_bytes }
    }
}
