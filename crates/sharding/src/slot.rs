//! Where a parameter lies in the storage of its unit, and which rows are whose.

use std::ops::Range;

/// The place of a parameter in the storage of its unit's whole parameters.
///
/// A parameter of `rows` rows has room for [`chunk`](Self::chunk) rows of each rank, `ceil(rows / ranks)`. The
/// ranks' rows, one after the other, are the parameter with padding behind it, so that they are gathered straight
/// into place. The last ranks may have fewer rows, or none.
///
/// ```
/// use brigade_sharding::Slot;
///
/// let slot = Slot { offset: 0, rows: 5, row_elements: 8, element_bytes: 4, ranks: 4, is_whole: false, keeps_memory: false };
/// assert_eq!(slot.chunk(), 2);
/// let rows: Vec<_> = (0..4).map(|rank| slot.rows_of(rank)).collect();
/// assert_eq!(rows, [0..2, 2..4, 4..5, 5..5]);
/// assert_eq!(slot.padded_elements(), 2 * 4 * 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Bytes before it in the storage: a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Size of the first dimension; 1 for a parameter without dimensions.
    pub rows: u64,
    /// Elements of a row: the product of all other dimensions.
    pub row_elements: u64,
    /// Bytes of an element in the storage.
    pub element_bytes: u64,
    /// Ranks that share one copy of the parameter.
    pub ranks: u64,
    /// Whether each rank holds all of it: a parameter without dimensions, or this rank's experts of a mixture.
    pub is_whole: bool,
    /// Whether it has memory of its own in the place of a slot.
    pub keeps_memory: bool,
}

/// Bytes to which slots are aligned: a cache line, and what vector instructions want.
pub const ALIGNMENT: u64 = 64;

impl Slot {
    /// Returns the rows for which each rank has room.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        if self.is_whole { self.rows } else { self.rows.div_ceil(self.ranks) }
    }

    /// Returns the rows of the rank at this place among those that share one copy, without padding. All rows of what
    /// each rank has whole.
    #[must_use]
    pub fn rows_of(&self, place: u64) -> Range<u64> {
        if self.is_whole {
            return 0..self.rows;
        }
        let begin = (place * self.chunk()).min(self.rows);
        begin..(begin + self.chunk()).min(self.rows)
    }

    /// Returns the number of elements of the rank at this place, without padding.
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

    /// Returns the number of elements of one rank, padding included.
    #[must_use]
    pub fn chunk_elements(&self) -> u64 {
        self.chunk() * self.row_elements
    }

    /// Returns the number of elements of all ranks, padding included.
    #[must_use]
    pub fn padded_elements(&self) -> u64 {
        if self.is_whole { self.elements() } else { self.chunk_elements() * self.ranks }
    }

    /// Returns the bytes that it takes in the storage, padding of rows included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        if self.keeps_memory { 0 } else { self.padded_elements() * self.element_bytes }
    }
}
