//! The largest batch size that fits into memory.

mod agreement;
mod outcome;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use brigade_torch::{DeviceExt, Error, Result, release_memory};

use crate::error::TrainError;
use crate::job::Job;
use agreement::Attempt;
use outcome::{End, Outcome, SCOPE};

/// Batch sizes that [`find_executable_batch_size`](crate::Accelerator::find_executable_batch_size) tries, the largest
/// first. A number converts to the sequence of itself, its half, and so on.
pub struct BatchSizes<'a> {
    start: usize,
    next: Box<dyn Fn(usize) -> usize + 'a>,
}

impl<'a> BatchSizes<'a> {
    /// Returns the batch sizes that begin with `start`. `next` gets a size that did not fit into memory, and returns
    /// the size to try next, which must be smaller, or 0 to end the search.
    ///
    /// ```
    /// use brigade_train::{Accelerator, BatchSizes};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let sizes = BatchSizes::new(100, |size| size - 10);
    /// let size = accelerator.find_executable_batch_size(sizes, |size| Ok::<_, brigade_torch::Error>(size))?;
    /// assert_eq!(size, 100); // its memory sufficed
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn new(start: usize, next: impl Fn(usize) -> usize + 'a) -> Self {
        Self { start, next: Box::new(next) }
    }
}

impl fmt::Debug for BatchSizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchSizes").field("start", &self.start).finish_non_exhaustive()
    }
}

impl From<usize> for BatchSizes<'_> {
    fn from(start: usize) -> Self {
        Self::new(start, |size| size / 2)
    }
}

/// Runs the body with smaller and smaller batch sizes until one fits into memory. After each failed attempt, `clean_up`
/// discards its remains.
pub(crate) fn find<R, E: Into<Error>>(
    job: &Arc<Job>,
    BatchSizes { start, next }: BatchSizes<'_>,
    clean_up: impl Fn(),
    mut body: impl FnMut(usize) -> Result<R, E>,
) -> Result<R> {
    if start == 0 {
        return Err(Error::invalid_argument(
            "find_executable_batch_size: the first batch size is 0, expected at least 1",
        ));
    }
    let mut size = start;
    let mut smallest = start;
    while size > 0 {
        smallest = size;
        // tch's operators without the prefix `f_` panic with libtorch's error.
        let mut attempt = || catch_unwind(AssertUnwindSafe(|| body(size).map_err(Into::into)));
        let fits = match Attempt::begin(job) {
            Some(together) => together.decide(attempt())?,
            None => alone(attempt())?,
        };
        if let Some(result) = fits {
            return Ok(result);
        }
        clean_up();
        release_memory(job.device.has_streams())?;
        let smaller = next(size);
        if smaller >= size {
            return Err(Error::invalid_argument(format!(
                "{SCOPE}: after {size} the next batch size is {smaller}, expected a smaller one"
            )));
        }
        tracing::info!("batch size {size} does not fit into memory, next is {smaller}");
        size = smaller;
    }
    Err(TrainError::NoBatchSize { start, smallest }.into())
}

/// Returns the result of the only rank. `None` if memory ran out.
fn alone<R>(outcome: Outcome<R>) -> Result<Option<R>> {
    match (End::of(&outcome), outcome) {
        (End::OutOfMemory, _) => Ok(None),
        (_, Ok(result)) => result.map(Some),
        (_, Err(panic)) => resume_unwind(panic),
    }
}
