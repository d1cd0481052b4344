//! The largest batch size that fits into memory.

use brigade_torch::{Error, Result};

use super::Accelerator;
use crate::batch_size::{self, BatchSizes};
use crate::precision::scaler::GradScaler;

impl Accelerator {
    /// Runs the body with a batch size, and again with half of it whenever memory runs out ([`BatchSizes::new`] sets
    /// other steps). The body must create everything that depends on the batch size: loaders, and usually model and
    /// optimizer too, since a failed attempt may have changed them.
    ///
    /// All ranks continue with the same size: when memory ran out on one of them, all try again. If only one rank runs
    /// out of memory, the other ranks' collectives end at once with an error that the body must return, and the ranks
    /// connect again: a model that was prepared outside of the body cannot be used any more.
    ///
    /// ```
    /// # use brigade_train::Accelerator;
    /// # use brigade_torch::Result;
    /// # fn train(accelerator: &Accelerator, batch_size: usize) -> Result<usize> { Ok(batch_size) }
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let size = accelerator.find_executable_batch_size(1024, |batch_size| {
    ///     train(&accelerator, batch_size)
    /// })?;
    /// assert_eq!(size, 1024); // its memory sufficed
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the body's error, if it is not that memory ran out; [`crate::TrainError::Leader`] on the other ranks;
    /// [`crate::TrainError::NoBatchSize`] when a single sample does not fit;
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a start at 0, and when the next size is not smaller.
    pub fn find_executable_batch_size<'a, R, E: Into<Error>>(
        &self,
        sizes: impl Into<BatchSizes<'a>>,
        body: impl FnMut(usize) -> Result<R, E>,
    ) -> Result<R> {
        let clean_up = || {
            self.checkpoints.reset_window();
            self.gradients.scaler.iter().for_each(GradScaler::reset);
            self.checkpoints.release_memory();
        };
        if let Some(tensor) = &self.gradients.tensor {
            return Err(tensor.refuse("find_executable_batch_size", "choose a batch size"));
        }
        if let Some(pipeline) = &self.gradients.pipeline {
            return Err(pipeline.refuse("find_executable_batch_size", "choose a batch size"));
        }
        if let Some(context) = &self.gradients.context {
            return Err(context.refuse("find_executable_batch_size", "choose a batch size"));
        }
        batch_size::find(&self.processes.job, sizes.into(), clean_up, body)
    }
}
