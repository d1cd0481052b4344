//! The events of a fit, in their order.

use std::fmt;

/// Events of a fit at which callbacks are called, in the order of fastai's training loop.
///
/// Order of the events of a fit without a cancellation:
///
/// ```text
/// before_fit
///   before_epoch
///     before_train
///       before_batch, after_pred, after_loss, before_backward, after_backward,
///       before_step, after_step, after_batch           for each batch
///     after_train
///     before_validate
///       before_batch, after_pred, after_loss, after_batch
///     after_validate
///   after_epoch                                        for each epoch
/// after_fit
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names say it, and the list above where each is
pub enum Event {
    BeforeFit,
    BeforeEpoch,
    BeforeTrain,
    BeforeBatch,
    AfterPred,
    AfterLoss,
    BeforeBackward,
    AfterCancelBackward,
    AfterBackward,
    BeforeStep,
    AfterCancelStep,
    AfterStep,
    AfterCancelBatch,
    AfterBatch,
    AfterCancelTrain,
    AfterTrain,
    BeforeValidate,
    AfterCancelValidate,
    AfterValidate,
    AfterCancelEpoch,
    AfterEpoch,
    AfterCancelFit,
    AfterFit,
}

impl Event {
    /// Returns the name of the event as fastai spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BeforeFit => "before_fit",
            Self::BeforeEpoch => "before_epoch",
            Self::BeforeTrain => "before_train",
            Self::BeforeBatch => "before_batch",
            Self::AfterPred => "after_pred",
            Self::AfterLoss => "after_loss",
            Self::BeforeBackward => "before_backward",
            Self::AfterCancelBackward => "after_cancel_backward",
            Self::AfterBackward => "after_backward",
            Self::BeforeStep => "before_step",
            Self::AfterCancelStep => "after_cancel_step",
            Self::AfterStep => "after_step",
            Self::AfterCancelBatch => "after_cancel_batch",
            Self::AfterBatch => "after_batch",
            Self::AfterCancelTrain => "after_cancel_train",
            Self::AfterTrain => "after_train",
            Self::BeforeValidate => "before_validate",
            Self::AfterCancelValidate => "after_cancel_validate",
            Self::AfterValidate => "after_validate",
            Self::AfterCancelEpoch => "after_cancel_epoch",
            Self::AfterEpoch => "after_epoch",
            Self::AfterCancelFit => "after_cancel_fit",
            Self::AfterFit => "after_fit",
        }
    }

    /// Returns `true` if the event happens within a batch, in training and in validation.
    #[must_use]
    pub fn is_inner(self) -> bool {
        matches!(
            self,
            Self::BeforeBatch
                | Self::AfterPred
                | Self::AfterLoss
                | Self::BeforeBackward
                | Self::AfterCancelBackward
                | Self::AfterBackward
                | Self::BeforeStep
                | Self::AfterCancelStep
                | Self::AfterStep
                | Self::AfterCancelBatch
                | Self::AfterBatch
        )
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
