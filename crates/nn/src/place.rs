//! Where in a model a layer stands: what becomes of a forward that fails there, and of its output.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{TchError, Tensor};

use crate::Error;
use crate::hooks::Hooks;

/// A layer's full name, and its model's place for failures.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// The name without words for the root: what hooks know.
    pub(crate) layer: String,
    pub(crate) failures: Failures,
    pub(crate) hooks: Hooks,
}

impl Place {
    /// The layer's output, with what its hooks made of it, or the end of the forward with an error that
    /// names the layer.
    pub(crate) fn take(&self, result: Result<Tensor, TchError>, input: &Tensor) -> Tensor {
        self.output(self.step(result, input))
    }

    /// What the layer's hooks make of its output.
    pub(crate) fn output(&self, output: Tensor) -> Tensor {
        self.hooks.apply(&self.layer, output)
    }

    /// The result of an operation on the way to the output.
    pub(crate) fn step(&self, result: Result<Tensor, TchError>, input: &Tensor) -> Tensor {
        result.unwrap_or_else(|source| {
            let input = input.size();
            self.fail(Error::Layer { layer: self.name.clone(), input, source: first_line(source) })
        })
    }

    /// Ends the forward.
    pub(crate) fn fail(&self, error: Error) -> ! {
        let mut state = self.failures.state();
        if !state.awaited {
            drop(state);
            panic!("{error}");
        }
        state.failure.get_or_insert(error);
        drop(state);
        // Not `panic!`, which would write to standard error what the caller gets as a value.
        resume_unwind(Box::new(Failed))
    }
}

/// Passes through the forwards of a model's layers, which return tensors and no results.
struct Failed;

/// The failures of one model's forward. Clones are one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failures(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether [`Failures::catch`] runs.
    awaited: bool,
    failure: Option<Error>,
}

impl Failures {
    /// Runs a forward. An operator of tch that panics with libtorch's message is an error, too; any
    /// other panic goes on.
    pub(crate) fn catch<R>(&self, forward: impl FnOnce() -> R) -> Result<R, Error> {
        self.state().awaited = true;
        let output = catch_unwind(AssertUnwindSafe(forward));
        let mut state = self.state();
        state.awaited = false;
        let failure = state.failure.take();
        drop(state);
        match (output, failure) {
            (Ok(output), _) => Ok(output),
            (Err(_), Some(failure)) => Err(failure),
            (Err(panic), None) => match message_of_libtorch(panic.as_ref()) {
                Some(message) => {
                    let source = TchError::Torch(message);
                    Err(Error::Torch { doing: "run the model's forward".into(), source })
                }
                None => resume_unwind(panic),
            },
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rest is a list of C++ functions.
pub(crate) fn first_line(error: TchError) -> TchError {
    match error {
        TchError::Torch(text) => {
            TchError::Torch(text.lines().next().unwrap_or_default().to_owned())
        }
        other => other,
    }
}

/// What tch's operators panic with: `Result::unwrap` of libtorch's error, as Rust's debug text.
fn message_of_libtorch(panic: &(dyn Any + Send)) -> Option<String> {
    const UNWRAPPED: &str = "called `Result::unwrap()` on an `Err` value: Torch(\"";
    let text = panic.downcast_ref::<String>()?.strip_prefix(UNWRAPPED)?;
    let first = text.trim_end_matches("\")").split("\\n").next().unwrap_or_default();
    Some(first.replace("\\\"", "\"").replace("\\'", "'"))
}
