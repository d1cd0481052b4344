//! Samplers: the order in which an epoch visits the samples.

use std::fmt;

use crate::stream::{SHUFFLE, below, stream};

/// The sample order of each epoch. It depends on the sampler and the epoch only, so that every rank computes the same
/// order without communication.
///
/// An order consists of indices into the dataset. It may leave some out and repeat others
/// ([`Weighted`](crate::Weighted)); its length is [`len`](Self::len) in every epoch.
pub trait Sampler: fmt::Debug + Send + Sync {
    /// Returns the number of samples in an epoch.
    fn len(&self) -> usize;

    /// Returns `true` if an epoch has no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the [`len`](Self::len) sample indices of epoch `epoch`.
    fn order(&self, epoch: u64) -> Vec<usize>;
}

/// Visits every sample in the order of the dataset.
///
/// ```
/// use brigade_sampling::{Sampler, Sequential};
///
/// assert_eq!(Sequential::new(4).order(9), [0, 1, 2, 3]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequential {
    len: usize,
}

impl Sequential {
    /// Creates a sampler of the samples `0..len`, in that order.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { len }
    }
}

impl Sampler for Sequential {
    fn len(&self) -> usize {
        self.len
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        (0..self.len).collect()
    }
}

/// Visits every sample once, in an order that is new in each epoch and the same for the same seed.
///
/// The order is a Fisher-Yates shuffle of `0..len` with the random numbers of [`stream`]`(seed, [1, epoch])`: for `i`
/// from the last position down to 1, position `i` is exchanged with a uniformly drawn position in `0..=i`. It is fixed
/// across versions and machines.
///
/// ```
/// use brigade_sampling::{Sampler, Shuffle};
///
/// let sampler = Shuffle::new(8, 42);
/// assert_eq!(sampler.order(0), sampler.order(0));
/// assert_ne!(sampler.order(0), sampler.order(1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shuffle {
    len: usize,
    seed: u64,
}

impl Shuffle {
    /// Creates a sampler of the samples `0..len`, shuffled by `seed` and the epoch.
    #[must_use]
    pub fn new(len: usize, seed: u64) -> Self {
        Self { len, seed }
    }
}

impl Sampler for Shuffle {
    fn len(&self) -> usize {
        self.len
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len).collect();
        let mut rng = stream(self.seed, &[SHUFFLE, epoch]);
        for i in (1..order.len()).rev() {
            order.swap(i, below(&mut rng, i as u64 + 1) as usize);
        }
        order
    }
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        (**self).order(epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Checkpoints rely on these orders: a change here breaks them. The numbers were made by a second implementation of
    // the documented stream, in Python.
    #[test]
    fn the_shuffle_is_pinned() {
        assert_eq!(Shuffle::new(12, 42).order(0), [4, 9, 8, 3, 2, 0, 1, 6, 5, 7, 10, 11]);
        assert_eq!(Shuffle::new(12, 42).order(1), [5, 10, 7, 3, 2, 1, 8, 9, 6, 11, 0, 4]);
        assert_eq!(Shuffle::new(12, 0).order(0), [10, 5, 1, 0, 4, 2, 8, 7, 3, 11, 9, 6]);
    }

    #[test]
    fn each_place_is_as_likely_as_the_others() {
        let mut first = [0u32; 6];
        for epoch in 0..12_000 {
            first[Shuffle::new(6, 3).order(epoch)[0]] += 1;
        }
        // Five standard deviations of a binomial with p = 1/6.
        assert!(first.iter().all(|&c| (c as i32 - 2_000).abs() < 205), "{first:?}");
    }
}
