//! What is called at the events of a fit, and how it cancels.

use std::any::Any;
use std::fmt;

use brigade_torch::{Error, Result};

use crate::event::Event;
use crate::state::LearnerState;

/// A part of a fit that a callback can cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// The rest of the batch: backward and step, as far as they have not been made. Gradients stay.
    Batch,
    /// The backward pass; the step is made.
    Backward,
    /// The optimizer's step; gradients are cleared.
    Step,
    /// The rest of the epoch's training; validation follows.
    Train,
    /// The rest of the validation.
    Validate,
    /// The rest of the epoch.
    Epoch,
    /// The rest of the fit.
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

/// Why a callback does not let the fit go on: it cancels a part of it, or it failed.
///
/// `?` makes one of an error, and `Level::Fit.cancel()` cancels.
#[derive(Debug)]
pub enum Interrupt {
    /// A part of the fit ends here, with its `after_cancel_…` and `after_…` events.
    Cancel(Level),
    /// The fit ends with this error; no further event is sent.
    Failed(Error),
}

impl Level {
    /// Cancels this part of the fit: `return Level::Epoch.cancel();`
    ///
    /// # Errors
    /// Always: that is the cancellation.
    pub fn cancel(self) -> Step {
        Err(Interrupt::Cancel(self))
    }
}

impl<E: Into<Error>> From<E> for Interrupt {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What a callback returns at an event: go on, or not.
pub type Step = std::result::Result<(), Interrupt>;

/// On which ranks a callback is called, and how ranks agree on what it cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// On every rank. What it cancels, it must cancel on each: it decides by what is equal on all ranks, such
    /// as metrics, the epoch or the learning rate.
    All,
    /// On rank 0 alone: it writes files or lines. A cancellation is an error.
    Main,
    /// On every rank, each of which decides by its own values at these events; a cancellation of one rank is one
    /// of all. Costs a small all-gather at each of them.
    Any(&'static [Event]),
}

/// In which part of an epoch a callback hears of a batch's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    /// In training and in validation.
    Both,
    /// In training alone.
    Train,
    /// In validation alone.
    Validate,
}

macro_rules! events {
    ($($(#[$doc:meta])* $method:ident $event:ident),+ $(,)?) => {
        /// Something that is called at the events of a fit ([`Event`] lists them in order) and may read and change
        /// the Learner's state.
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
            /// Returns its name in messages: the type's, unless implemented.
            fn name(&self) -> String {
                let full = std::any::type_name::<Self>();
                let full = full.split('<').next().unwrap_or(full);
                full.rsplit("::").next().unwrap_or(full).to_owned()
            }

            /// Returns its place among the callbacks of an event: smaller numbers come first, equal ones in the order
            /// in which they were added. Those of this crate have fastai's.
            fn order(&self) -> i32 {
                0
            }

            /// Returns on which ranks it is called: on all, unless implemented.
            fn ranks(&self) -> Ranks {
                Ranks::All
            }

            /// Returns in which part of an epoch it hears of a batch's events: in both, unless implemented.
            fn phases(&self) -> Phases {
                Phases::Both
            }

            /// Whether it takes part in passes that are no fit: `validate`, `predictions` and the learning-rate
            /// finder. What writes, saves or stops does not.
            fn in_evaluation(&self) -> bool {
                true
            }

            /// Undoes what it has changed for the time of the fit. Called once when the fit has ended, however it
            /// ended: after `after_fit`, and after an error, which sends no further event.
            fn ended(&mut self, _learner: &mut LearnerState) {}

            /// Returns what it needs to go on from a checkpoint: nothing, unless implemented. Called on every rank
            /// before a checkpoint is saved; rank 0's is kept.
            ///
            /// # Errors
            /// What stops the save.
            fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
                Ok(None)
            }

            /// Goes on from what [`Callback::state`] has returned. Called on every rank, after `before_fit`,
            /// `before_epoch` and `before_train` of the epoch that goes on, with the model as it was.
            ///
            /// # Errors
            /// When the state is not such a one.
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
            /// The cancellation of a part of the fit, or what went wrong.
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
    /// Called before the backward pass, in training alone.
    before_backward BeforeBackward,
    /// Called where the backward pass was cancelled.
    after_cancel_backward AfterCancelBackward,
    /// Called after the backward pass: gradients are there, averaged over the ranks where the batch ends a window.
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
    /// Called before validation.
    before_validate BeforeValidate,
    /// Called where validation was cancelled.
    after_cancel_validate AfterCancelValidate,
    /// Called after validation: the epoch's metrics are known to callbacks that come after the recorder (order 50).
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

/// What a fit takes for its callbacks: nothing (`()`), one, a tuple of up to six, or a list.
pub trait IntoCallbacks {
    /// Makes a list of it, in order.
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
