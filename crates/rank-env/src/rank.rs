//! Numbers that must not be mixed up: a rank, a rank on its host, and how many ranks there are.

use std::fmt;
use std::num::NonZeroUsize;

use crate::WorldError;

/// Number of ranks in a group: at least 1.
///
/// ```
/// use brigade_rank_env::WorldSize;
/// assert_eq!(WorldSize::new(4)?.as_usize(), 4);
/// assert!(WorldSize::new(0).is_err());
/// # Ok::<(), brigade_rank_env::WorldError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorldSize(NonZeroUsize);

impl WorldSize {
    /// World size of a program that runs alone: one rank.
    pub const ONE: Self = Self(NonZeroUsize::MIN);

    /// Creates a world size from a number of ranks.
    ///
    /// # Errors
    ///
    /// [`WorldError::WorldSizeOutOfRange`] unless `size` is between 1 and 2³¹ - 1: c10d counts ranks in a C `int`.
    pub fn new(size: usize) -> Result<Self, WorldError> {
        match NonZeroUsize::new(size) {
            Some(nonzero) if i32::try_from(size).is_ok() => Ok(Self(nonzero)),
            _ => Err(WorldError::WorldSizeOutOfRange { size }),
        }
    }

    /// Returns the size as a plain number.
    #[must_use]
    pub fn as_usize(self) -> usize {
        self.0.get()
    }

    /// Returns every rank of a group of this size, in order.
    ///
    /// ```
    /// use brigade_rank_env::WorldSize;
    /// let ranks: Vec<usize> = WorldSize::new(3)?.ranks().map(|rank| rank.as_usize()).collect();
    /// assert_eq!(ranks, [0, 1, 2]);
    /// # Ok::<(), brigade_rank_env::WorldError>(())
    /// ```
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> {
        (0..self.as_usize()).map(Rank)
    }
}

/// One line per newtype of a place in a group: they differ in meaning, not in code.
macro_rules! place {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(usize);

        impl $name {
            /// The first rank of a group.
            pub const ZERO: Self = Self(0);

            /// Creates a rank of a group.
            ///
            /// # Errors
            ///
            /// [`WorldError::RankOutOfRange`] if `index` is not below `size`.
            pub fn new(index: usize, size: WorldSize) -> Result<Self, WorldError> {
                if index < size.as_usize() {
                    Ok(Self(index))
                } else {
                    Err(WorldError::RankOutOfRange { kind: stringify!($name), index, size })
                }
            }

            /// Returns the rank as a plain number, to index with.
            #[must_use]
            pub fn as_usize(self) -> usize {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$name> for usize {
            fn from(place: $name) -> Self {
                place.0
            }
        }
    };
}

place! {
    /// A process's number in the whole job: `0 <= rank < world size`.
    ///
    /// ```
    /// use brigade_rank_env::{Rank, WorldSize};
    /// let two = WorldSize::new(2)?;
    /// assert_eq!(Rank::new(1, two)?.to_string(), "1");
    /// assert_eq!(Rank::new(2, two).unwrap_err().to_string(), "Rank 2 is out of range: expected less than the number of ranks, 2");
    /// # Ok::<(), brigade_rank_env::WorldError>(())
    /// ```
    Rank
}

place! {
    /// A process's number on its host: picks the GPU, decides which rank prints and which downloads.
    LocalRank
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<WorldSize> for usize {
    fn from(size: WorldSize) -> Self {
        size.as_usize()
    }
}
