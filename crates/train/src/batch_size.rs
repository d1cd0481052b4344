//! The largest batch size that fits into memory.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use brigade_torch::{Device, Fault, release_memory, says_out_of_memory};
use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};

impl Accelerator {
    /// Runs the body with a batch size, and again with half of it as long as memory runs out. The body
    /// makes everything whose size depends on it: loaders, usually model and optimizer too, since a try
    /// that failed may have changed them.
    ///
    /// All ranks go on with the same size: when memory ran out on one of them, all try again. That is
    /// agreed when the body has ended on all: where one rank alone runs out between two collectives,
    /// the others wait in theirs until the group's time limit.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, Result};
    /// # fn train(accelerator: &Accelerator, batch_size: usize) -> Result<f64> { Ok(0.0) }
    /// # fn f(accelerator: &Accelerator) -> Result<()> {
    /// let accuracy = accelerator.find_executable_batch_size(1024, |batch_size| {
    ///     train(accelerator, batch_size)
    /// })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The body's, when it is not about memory; [`Error::Leader`] when it was another rank's;
    /// [`Error::NoBatchSize`] when a single sample does not fit; [`Error::Misuse`] for a start at 0.
    pub fn find_executable_batch_size<R, E: Into<Error>>(
        &self,
        start: usize,
        body: impl FnMut(usize) -> Result<R, E>,
    ) -> Result<R> {
        self.find_executable_batch_size_by(start, |size| size / 2, body)
    }

    /// As [`Accelerator::find_executable_batch_size`], with the next size to try after one that did not
    /// fit.
    ///
    /// # Errors
    /// As there; [`Error::Misuse`] when the next size is no smaller one.
    pub fn find_executable_batch_size_by<R, E: Into<Error>>(
        &self,
        start: usize,
        next: impl Fn(usize) -> usize,
        mut body: impl FnMut(usize) -> Result<R, E>,
    ) -> Result<R> {
        if start == 0 {
            return Err(Error::Misuse(
                "find_executable_batch_size: the first batch size is 0, expected at least 1".into(),
            ));
        }
        let mut size = start;
        let mut smallest = start;
        while size > 0 {
            smallest = size;
            // tch's operators without `f_` panic with libtorch's error.
            let outcome = catch_unwind(AssertUnwindSafe(|| body(size).map_err(Into::into)));
            match self.agree_on_fit(outcome)? {
                Some(result) => return Ok(result),
                None => {
                    self.accumulation.reset();
                    if let Some(scaler) = self.grad_scaler() {
                        scaler.reset();
                    }
                    self.release_save_memory();
                    release_memory(matches!(self.device(), Device::Cuda(_)))?;
                }
            }
            let smaller = next(size);
            if smaller >= size {
                return Err(Error::Misuse(format!(
                    "find_executable_batch_size: after {size} the next batch size is {smaller}, \
                     expected a smaller one"
                )));
            }
            tracing::info!("batch size {size} does not fit into memory, next is {smaller}");
            size = smaller;
        }
        Err(Error::NoBatchSize { start, smallest })
    }

    /// This rank's result when all have one; `None` when memory ran out somewhere.
    fn agree_on_fit<R>(&self, outcome: std::thread::Result<Result<R>>) -> Result<Option<R>> {
        let mine = match &outcome {
            Ok(Ok(_)) => End::Fits,
            Ok(Err(error)) if error.is_out_of_memory() => End::OutOfMemory,
            Ok(Err(error)) => End::Failed(error.to_string()),
            Err(panic) => match text_of(panic.as_ref()) {
                text if says_out_of_memory(&text) => End::OutOfMemory,
                text => End::Failed(format!("panic: {text}")),
            },
        };
        let failed = matches!(mine, End::Failed(_));
        let ends = match self.group() {
            None => vec![mine],
            Some(group) => match group.all_gather_object(&mine) {
                Ok(ends) => ends,
                // This rank's own error says more than that the others could not be told.
                Err(_) if failed => Vec::new(),
                Err(error) => return Err(error.into()),
            },
        };
        match outcome {
            Err(panic) if failed => resume_unwind(panic),
            Ok(Err(error)) if failed => return Err(error),
            _ => {}
        }
        for (rank, end) in ends.iter().enumerate() {
            if let End::Failed(reason) = end {
                let (scope, reason) = ("find_executable_batch_size", reason.clone());
                return Err(Error::Leader { scope, rank, reason });
            }
        }
        Ok(match outcome {
            Ok(Ok(result)) if ends.iter().all(|end| matches!(end, End::Fits)) => Some(result),
            _ => None,
        })
    }
}

/// How one rank's try ended.
#[derive(Debug, Serialize, Deserialize)]
enum End {
    Fits,
    OutOfMemory,
    Failed(String),
}

impl Error {
    /// Whether memory ran out, on the host or on the device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Torch(error) => error.fault() == Some(Fault::OutOfMemory),
            Self::Tensor(error) => says_out_of_memory(&error.to_string()),
            Self::User(error) => says_out_of_memory(&error.to_string()),
            _ => {
                // Another crate's error, as a loader's, around libtorch's.
                let mut source = std::error::Error::source(self);
                while let Some(error) = source {
                    if says_out_of_memory(&error.to_string()) {
                        return true;
                    }
                    source = error.source();
                }
                false
            }
        }
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".to_owned())
}
