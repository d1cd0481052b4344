//! Callbacks: objects that are called at the events of a fit, and that can cancel parts of it.

use std::any::Any;
use std::fmt;

use brigade_torch::{Error, Result};

use crate::event::Event;
use crate::state::LearnerState;

/// A part of a fit that a callback can cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Cancels the rest of the batch: backward and step, as far as they have not been made. Gradients are kept.
    Batch,
    /// Cancels the backward pass. The step is still made.
    Backward,
    /// Cancels the optimizer's step. Gradients are cleared.
    Step,
    /// Cancels the rest of the epoch's training. Validation follows.
    Train,
    /// Cancels the rest of the validation.
    Validate,
    /// Cancels the rest of the epoch.
    Epoch,
    /// Cancels the rest of the fit.
    Fit,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Batch => "batch",
            Self::Backward => "backward",
            Self::Step => "step",
            Self::Train => "training",
            Self::Validate => "validation",
            Self::Epoch => "epoch",
            Self::Fit => "fit",
        })
    }
}

/// Reason why a callback interrupts the fit: it cancels a part of it, or it failed.
///
/// `?` converts an error to an interrupt, and `Level::Fit.cancel()` makes a cancellation.
#[derive(Debug)]
pub enum Interrupt {
    /// Cancels a part of the fit, with its `after_cancel_…` and `after_…` events.
    Cancel(Level),
    /// Ends the fit with this error. No further event is sent.
    Failed(Error),
}

impl Level {
    /// Returns the cancellation of this part of the fit: `return Level::Epoch.cancel();`
    ///
    /// # Errors
    /// Always returns an error, which is the cancellation.
    pub fn cancel(self) -> Step {
        Err(Interrupt::Cancel(self))
    }
}

impl<E: Into<Error>> From<E> for Interrupt {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Result of a callback at an event: continue, or interrupt the fit.
pub type Step = std::result::Result<(), Interrupt>;

/// Ranks on which a callback is called, and how they agree on a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// Calls the callback on every rank. If it cancels a part of the fit, it must do so on all ranks: it must decide by
    /// values that are equal on all of them, such as metrics, the epoch or the learning rate.
    All,
    /// Calls the callback only on rank 0, for callbacks that write files or output. Cancelling a part of the fit is an
    /// error.
    Main,
    /// Calls the callback on every rank. At these events each rank may decide by its own values: if one rank cancels,
    /// all ranks do. Costs a small all-gather at each of these events.
    Any(&'static [Event]),
}

/// Parts of an epoch in which a callback is called at the events of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    /// Events of batches in training and in validation.
    Both,
    /// Events of batches in training only.
    Train,
    /// Events of batches in validation only.
    Validate,
}

macro_rules! events {
    ($($(#[$doc:meta])* $method:ident $event:ident),+ $(,)?) => {
        /// An object that is called at the events of a fit ([`Event`] lists them in order) and may read and change the
        /// Learner's state.
        ///
        /// ```
        /// use brigade_learn::callback::{Callback, Level, Step};
        /// use brigade_learn::LearnerState;
        ///
        /// /// Ends the fit after a number of batches.
        /// #[derive(Debug)]
        /// struct StopAfter(usize);
        ///
        /// impl Callback for StopAfter {
        ///     fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        ///         if learner.is_training() && learner.train_iter() >= self.0 {
        ///             return Level::Fit.cancel();
        ///         }
        ///         Ok(())
        ///     }
        /// }
        /// ```
        pub trait Callback: Any + fmt::Debug {
            /// Returns the callback's name for messages. Defaults to the name of the type.
            fn name(&self) -> String {
                let full = std::any::type_name::<Self>();
                let full = full.split('<').next().unwrap_or(full);
                full.rsplit("::").next().unwrap_or(full).to_owned()
            }

            /// Returns the callback's position among the callbacks of an event: smaller numbers are called first, equal
            /// ones in the order in which they were added. Defaults to 0. The callbacks of this crate have fastai's
            /// numbers.
            fn order(&self) -> i32 {
                0
            }

            /// Returns the ranks on which the callback is called. Defaults to [`Ranks::All`].
            fn ranks(&self) -> Ranks {
                Ranks::All
            }

            /// Returns the parts of an epoch in which the callback is called at the events of batches. Defaults to
            /// [`Phases::Both`].
            fn phases(&self) -> Phases {
                Phases::Both
            }

            /// Returns `true` if the callback is also called in passes outside of a fit: `validate`, `predictions` and
            /// the learning-rate finder. Defaults to `true`. Callbacks that write, save or stop should return `false`.
            fn in_evaluation(&self) -> bool {
                true
            }

            /// Undoes the changes that the callback made for the duration of the fit. Called once at the end of every
            /// fit: after `after_fit`, or after an error, in which case no further event follows. Does nothing by
            /// default.
            fn ended(&mut self, _learner: &mut LearnerState) {}

            /// Returns the state from which the callback can continue when a fit resumes. Defaults to `None`. Called on
            /// every rank before a checkpoint is saved; the checkpoint contains rank 0's state.
            ///
            /// # Errors
            /// Any error makes the save fail.
            fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
                Ok(None)
            }

            /// Loads a state that [`Callback::state`] returned. Called on every rank when a fit resumes, after
            /// `before_fit`, `before_epoch` and `before_train` of the interrupted epoch, with the model of the
            /// checkpoint. Does nothing by default.
            ///
            /// # Errors
            /// Fails if the state does not have the expected form.
            fn load_state(
                &mut self,
                _learner: &mut LearnerState,
                _state: &serde_json::Value,
            ) -> Result<()> {
                Ok(())
            }

            $($(#[$doc])*
            ///
            /// # Errors
            /// Returns the cancellation of a part of the fit, or an error that ends it.
            fn $method(&mut self, _learner: &mut LearnerState) -> Step {
                Ok(())
            })+
        }

        /// Calls the method of an event.
        pub(crate) fn call(callback: &mut dyn Callback, event: Event, learner: &mut LearnerState) -> Step {
            match event {
                $(Event::$event => callback.$method(learner),)+
            }
        }
    };
}

events! {
    /// Called once before the first epoch.
    before_fit BeforeFit,
    /// Called before each epoch.
    before_epoch BeforeEpoch,
    /// Called before the epoch's training.
    before_train BeforeTrain,
    /// Called with a batch on its device, before the forward pass.
    before_batch BeforeBatch,
    /// Called after the forward pass.
    after_pred AfterPred,
    /// Called after the loss was computed.
    after_loss AfterLoss,
    /// Called before the backward pass, only in training.
    before_backward BeforeBackward,
    /// Called where the backward pass was cancelled.
    after_cancel_backward AfterCancelBackward,
    /// Called after the backward pass: gradients are computed, and averaged over the ranks if the batch ends a window.
    after_backward AfterBackward,
    /// Called before the optimizer's step.
    before_step BeforeStep,
    /// Called where the step was cancelled.
    after_cancel_step AfterCancelStep,
    /// Called after the step, before gradients are cleared.
    after_step AfterStep,
    /// Called where the batch was cancelled.
    after_cancel_batch AfterCancelBatch,
    /// Called after each batch.
    after_batch AfterBatch,
    /// Called where the epoch's training was cancelled.
    after_cancel_train AfterCancelTrain,
    /// Called after the epoch's training.
    after_train AfterTrain,
    /// Called before the validation of an epoch.
    before_validate BeforeValidate,
    /// Called where validation was cancelled.
    after_cancel_validate AfterCancelValidate,
    /// Called after validation: the epoch's metrics are available to callbacks that come after the recorder (order 50).
    after_validate AfterValidate,
    /// Called where the epoch was cancelled.
    after_cancel_epoch AfterCancelEpoch,
    /// Called after each epoch.
    after_epoch AfterEpoch,
    /// Called where the fit was cancelled.
    after_cancel_fit AfterCancelFit,
    /// Called after the last epoch.
    after_fit AfterFit,
}

/// The callbacks argument of a fit: none (`()`), one callback, a tuple of up to six, or a list.
pub trait IntoCallbacks {
    /// Converts the argument to a list of callbacks, in order.
    fn into_callbacks(self) -> Vec<Box<dyn Callback>>;
}

impl<C: Callback> IntoCallbacks for C {
    fn into_callbacks(self) -> Vec<Box<dyn Callback>> {
        vec![Box::new(self)]
    }
}

impl IntoCallbacks for () {
    fn into_callbacks(self) -> Vec<Box<dyn Callback>> {
        Vec::new()
    }
}

impl IntoCallbacks for Vec<Box<dyn Callback>> {
    fn into_callbacks(self) -> Self {
        self
    }
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Callback),+> IntoCallbacks for ($($name,)+) {
            fn into_callbacks(self) -> Vec<Box<dyn Callback>> {
                vec![$(Box::new(self.$index)),+]
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
