//! What a rank does.

use std::fmt;

/// What an [`Action`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActionKind {
    /// Gathers a stage's sharded parameters, before its first micro-batch.
    Unshard,
    /// Computes a stage's forward pass.
    Forward,
    /// Computes the gradients of a stage's inputs and weights.
    Backward,
    /// Computes the gradients of a stage's inputs alone.
    BackwardInput,
    /// Computes the gradients of a stage's weights, after those of its inputs.
    BackwardWeight,
    /// Sends a stage's output to the rank of the next stage.
    SendActivation,
    /// Receives a stage's input from the rank of the stage before.
    ReceiveActivation,
    /// Sends the gradient of a stage's input to the rank of the stage before.
    SendGradient,
    /// Receives the gradient of a stage's output from the rank of the next stage.
    ReceiveGradient,
    /// Reduces a stage's gradients among the ranks that have the same stage, after its last micro-batch.
    ReduceGradients,
    /// Frees a stage's gathered parameters, after its last micro-batch.
    Reshard,
}

impl ActionKind {
    /// Returns its name: `backward_input`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unshard => "unshard",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BackwardInput => "backward_input",
            Self::BackwardWeight => "backward_weight",
            Self::SendActivation => "send_activation",
            Self::ReceiveActivation => "receive_activation",
            Self::SendGradient => "send_gradient",
            Self::ReceiveGradient => "receive_gradient",
            Self::ReduceGradients => "reduce_gradients",
            Self::Reshard => "reshard",
        }
    }

    /// Tells whether it computes, rather than sends, receives, gathers or frees.
    #[must_use]
    pub fn computes(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::BackwardInput | Self::BackwardWeight)
    }

    /// Tells whether it is of one micro-batch, rather than of a whole step.
    #[must_use]
    pub fn has_micro_batch(self) -> bool {
        !matches!(self, Self::Unshard | Self::ReduceGradients | Self::Reshard)
    }

    /// The letter of the text form, for what computes.
    pub(super) fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
            _ => '?',
        }
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a rank does with one of its stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What it does.
    pub kind: ActionKind,
    /// The stage, which the rank has.
    pub stage: usize,
    /// The micro-batch; `None` for [`ActionKind::Unshard`], [`ActionKind::ReduceGradients`] and
    /// [`ActionKind::Reshard`].
    pub micro_batch: Option<usize>,
}

impl Action {
    /// Returns an action of one micro-batch.
    ///
    /// ```
    /// use brigade_sharding::pipeline::{Action, ActionKind};
    ///
    /// let action = Action::new(ActionKind::SendActivation, 1, 3);
    /// assert_eq!(action.to_string(), "send_activation of stage 1, micro-batch 3");
    /// let action = Action::of_step(ActionKind::ReduceGradients, 1);
    /// assert_eq!(action.to_string(), "reduce_gradients of stage 1");
    /// ```
    #[must_use]
    pub fn new(kind: ActionKind, stage: usize, micro_batch: usize) -> Self {
        Self { kind, stage, micro_batch: Some(micro_batch) }
    }

    /// Returns an action of a whole step.
    #[must_use]
    pub fn of_step(kind: ActionKind, stage: usize) -> Self {
        Self { kind, stage, micro_batch: None }
    }

    /// Returns the other half of a message: the receive of a send, at the neighbouring stage. `None` for what is not
    /// a message, and for a message to a stage before the first.
    #[must_use]
    pub fn counterpart(self) -> Option<Self> {
        let (kind, stage) = match self.kind {
            ActionKind::SendActivation => {
                (ActionKind::ReceiveActivation, self.stage.checked_add(1)?)
            }
            ActionKind::ReceiveGradient => (ActionKind::SendGradient, self.stage.checked_add(1)?),
            ActionKind::ReceiveActivation => {
                (ActionKind::SendActivation, self.stage.checked_sub(1)?)
            }
            ActionKind::SendGradient => (ActionKind::ReceiveGradient, self.stage.checked_sub(1)?),
            _ => return None,
        };
        Some(Self { kind, stage, ..self })
    }

    /// The same stage and micro-batch with another kind.
    pub(super) fn as_kind(self, kind: ActionKind) -> Self {
        Self { kind, ..self }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of stage {}", self.kind, self.stage)?;
        match self.micro_batch {
            Some(micro_batch) => write!(f, ", micro-batch {micro_batch}"),
            None => Ok(()),
        }
    }
}
