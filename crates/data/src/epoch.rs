//! One pass over the data.

use std::fmt;
use std::iter;

use brigade_torch::{Error, Result};

use crate::Batch;

/// Iterator over the batches of one epoch of a loader. Dropping it stops the loader's threads.
pub struct Epoch<T> {
    number: u64,
    remaining: Option<usize>,
    batches: Box<dyn Iterator<Item = Result<Batch<T>>>>,
}

impl<T: 'static> Epoch<T> {
    pub(crate) fn new(
        number: u64,
        remaining: Option<usize>,
        batches: Box<dyn Iterator<Item = Result<Batch<T>>>>,
    ) -> Self {
        Self { number, remaining, batches }
    }

    /// Returns an epoch that could not begin, which consists of one error.
    pub(crate) fn failed(number: u64, error: Error) -> Self {
        Self::new(number, Some(1), Box::new(iter::once(Err(error))))
    }
}

impl<T> Epoch<T> {
    /// Returns the number of the epoch, from 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the number of remaining batches; `None` if the data have no known length.
    #[must_use]
    pub fn remaining(&self) -> Option<usize> {
        self.remaining
    }
}

impl<T> Iterator for Epoch<T> {
    type Item = Result<Batch<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next();
        self.remaining = self.remaining.map(|count| count.saturating_sub(1));
        batch
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining.unwrap_or_default(), self.remaining)
    }
}

impl<T> fmt::Debug for Epoch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch")
            .field("number", &self.number)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}
