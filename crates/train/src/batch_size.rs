//! The largest batch size that fits into memory.

mod agreement;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use brigade_torch::{DeviceExt, Fault, release_memory, says_out_of_memory};
use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use agreement::Attempt;

impl Accelerator {
    /// Runs the body with a batch size, and again with half of it as long as memory runs out. The body
    /// makes everything whose size depends on it: loaders, usually model and optimizer too, since a try
    /// that failed may have changed them.
    ///
    /// All ranks go on with the same size: when memory ran out on one of them, all try again. Where one
    /// rank alone runs out, the others' collectives end at once with an error that the body hands back,
    /// and the ranks meet anew: a model that was prepared outside of the body cannot be used any more
    /// then.
    ///
    /// ```
    /// # use brigade_train::{Accelerator, Result};
    /// # fn train(accelerator: &Accelerator, batch_size: usize) -> Result<usize> { Ok(batch_size) }
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let size = accelerator.find_executable_batch_size(1024, |batch_size| {
    ///     train(&accelerator, batch_size)
    /// })?;
    /// assert_eq!(size, 1024); // its memory sufficed
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// The body's, when it is not about memory; [`Error::Leader`] when it was another rank's;
    /// [`Error::NoBatchSize`] when a single sample does not fit; [`Error::InvalidArgument`] for a start at 0.
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
    /// As there; [`Error::InvalidArgument`] when the next size is not smaller.
    pub fn find_executable_batch_size_by<R, E: Into<Error>>(
        &self,
        start: usize,
        next: impl Fn(usize) -> usize,
        mut body: impl FnMut(usize) -> Result<R, E>,
    ) -> Result<R> {
        if start == 0 {
            return Err(Error::InvalidArgument(
                "find_executable_batch_size: the first batch size is 0, expected at least 1".into(),
            ));
        }
        let mut size = start;
        let mut smallest = start;
        while size > 0 {
            smallest = size;
            // tch's operators without `f_` panic with libtorch's error.
            let mut attempt = || catch_unwind(AssertUnwindSafe(|| body(size).map_err(Into::into)));
            let fits = match Attempt::begin(&self.processes.job) {
                Some(together) => together.decide(attempt())?,
                None => alone(attempt())?,
            };
            if let Some(result) = fits {
                return Ok(result);
            }
            self.checkpoints.reset_window();
            if let Some(scaler) = self.grad_scaler() {
                scaler.reset();
            }
            self.release_save_memory();
            release_memory(self.device().device_kind().is_some())?;
            let smaller = next(size);
            if smaller >= size {
                return Err(Error::InvalidArgument(format!(
                    "{SCOPE}: after {size} the next batch size is {smaller}, expected a smaller one"
                )));
            }
            tracing::info!("batch size {size} does not fit into memory, next is {smaller}");
            size = smaller;
        }
        Err(Error::NoBatchSize { start, smallest })
    }
}

/// What a body gave, or panicked with.
type Outcome<R> = std::thread::Result<Result<R>>;

/// The result; `None` when memory ran out.
fn alone<R>(outcome: Outcome<R>) -> Result<Option<R>> {
    match (End::of(&outcome), outcome) {
        (End::OutOfMemory, _) => Ok(None),
        (_, Ok(result)) => result.map(Some),
        (_, Err(panic)) => resume_unwind(panic),
    }
}

/// How one rank's try ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum End {
    Fits,
    OutOfMemory,
    /// It ended because another rank had given up.
    Cut,
    Failed(String),
}

impl End {
    fn of<R>(outcome: &Outcome<R>) -> Self {
        match outcome {
            Ok(Ok(_)) => Self::Fits,
            Ok(Err(error)) if error.is_out_of_memory() => Self::OutOfMemory,
            Ok(Err(error)) => Self::Failed(error.to_string()),
            Err(panic) => match text_of(panic.as_ref()) {
                text if says_out_of_memory(&text) => Self::OutOfMemory,
                text => Self::Failed(format!("panic: {text}")),
            },
        }
    }
}

impl Error {
    /// Whether memory ran out, on the host or on the device.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Torch(error) => error.fault() == Some(Fault::OutOfMemory),
            Self::Tensor(error) => says_out_of_memory(&error.to_string()),
            Self::User(error) => says_out_of_memory(&error.to_string()),
            // Its text has the cause's, and its source is empty.
            Self::Data(error) => says_out_of_memory(&error.to_string()),
            Self::Model(error) => says_out_of_memory(&error.to_string()),
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

const SCOPE: &str = "find_executable_batch_size";
