//! The batch sampler: an order cut into batches.

use std::slice;

use crate::PlanError;

/// Cuts an order into batches of one size, like torch's `BatchSampler`. This is the plan of a process that runs alone;
/// [`Shards`](crate::Shards) distributes batches to several ranks.
///
/// ```
/// use brigade_sampling::BatchSampler;
///
/// let sampler = BatchSampler::new(4, false)?;
/// let order: Vec<usize> = (0..10).collect();
/// let batches: Vec<&[usize]> = sampler.batches(&order).collect();
/// assert_eq!(batches, [&[0, 1, 2, 3][..], &[4, 5, 6, 7], &[8, 9]]);
/// assert_eq!(sampler.num_batches(10), 3);
/// # Ok::<(), brigade_sampling::PlanError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSampler {
    batch_size: usize,
    drop_last: bool,
}

impl BatchSampler {
    /// Creates a sampler of batches of `batch_size` samples. With `drop_last`, a smaller last batch is left out.
    ///
    /// # Errors
    /// Fails if the batch size is 0.
    pub fn new(batch_size: usize, drop_last: bool) -> Result<Self, PlanError> {
        if batch_size == 0 {
            return Err(PlanError::Zero { what: "batch size" });
        }
        Ok(Self { batch_size, drop_last })
    }

    /// Returns the number of samples in a full batch.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Returns `true` if a smaller last batch is left out.
    #[must_use]
    pub fn drop_last(&self) -> bool {
        self.drop_last
    }

    /// Returns the number of batches that `samples` samples make.
    #[must_use]
    pub fn num_batches(&self, samples: usize) -> usize {
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    /// Returns an iterator over the batches of `order`, which are borrowed from it.
    pub fn batches<'a>(&self, order: &'a [usize]) -> slice::Chunks<'a, usize> {
        let kept = (self.num_batches(order.len()).saturating_mul(self.batch_size)).min(order.len());
        order[..kept].chunks(self.batch_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_last_leaves_out_the_smaller_batch_only() {
        let order: Vec<usize> = (0..8).collect();
        let sampler = BatchSampler::new(3, true).unwrap();
        assert_eq!(sampler.batches(&order).collect::<Vec<_>>(), [[0, 1, 2], [3, 4, 5]]);
        let sampler = BatchSampler::new(4, true).unwrap();
        assert_eq!(sampler.batches(&order).len(), 2);
        assert_eq!(sampler.batches(&[]).len(), 0);
        assert_eq!(BatchSampler::new(9, true).unwrap().batches(&order).len(), 0);
        assert_eq!(BatchSampler::new(usize::MAX, false).unwrap().batches(&order).len(), 1);
    }

    #[test]
    fn a_batch_of_nothing_is_an_error() {
        let error = BatchSampler::new(0, false).unwrap_err().to_string();
        assert_eq!(error, "the batch size is 0: it must be at least 1");
    }
}
