//! The sample order of an epoch, as a plan stores it.

use std::sync::Arc;

/// The sample indices of an epoch: a range, or a list that is shared without a copy.
///
/// A range takes no memory, so that a plan for an unshuffled dataset of any size is free.
///
/// ```
/// use brigade_sampling::Order;
///
/// let listed = Order::from(vec![3, 1, 2]);
/// assert_eq!((listed.len(), listed.at(1)), (3, 1));
/// assert_eq!(Order::Sequential(1_000_000).at(999_999), 999_999);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// The indices `0..n`, where `n` is the value.
    Sequential(usize),
    /// Listed indices, in this order.
    Listed(Arc<[usize]>),
}

impl Order {
    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Sequential(len) => *len,
            Self::Listed(indices) => indices.len(),
        }
    }

    /// Returns `true` if the order has no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sample index at position `place`.
    ///
    /// # Panics
    /// Panics if `place` is not below [`len`](Self::len), as indexing a slice does.
    #[must_use]
    pub fn at(&self, place: usize) -> usize {
        match self {
            Self::Sequential(len) => {
                assert!(place < *len, "place {place} of an order of {len}");
                place
            }
            Self::Listed(indices) => indices[place],
        }
    }
}

impl From<Vec<usize>> for Order {
    fn from(indices: Vec<usize>) -> Self {
        Self::Listed(indices.into())
    }
}

impl From<&[usize]> for Order {
    fn from(indices: &[usize]) -> Self {
        Self::Listed(indices.into())
    }
}

impl From<Arc<[usize]>> for Order {
    fn from(indices: Arc<[usize]>) -> Self {
        Self::Listed(indices)
    }
}
