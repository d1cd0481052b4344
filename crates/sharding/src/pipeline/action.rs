//! Actions of a pipeline's ranks: passes, messages, and operations on sharded parameters.

use std::fmt;

/// Kind of an [`Action`]: a pass, one half of a message, or an operation on a stage's sharded parameters.
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
    /// Returns the name in snake case: `backward_input`.
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

    /// Returns `true` for forward and backward passes, and `false` for messages and operations on sharded parameters.
    #[must_use]
    pub fn computes(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::BackwardInput | Self::BackwardWeight)
    }

    /// Returns `true` if an action of this kind belongs to one micro-batch, and `false` if it belongs to a whole step.
    #[must_use]
    pub fn has_micro_batch(self) -> bool {
        !matches!(self, Self::Unshard | Self::ReduceGradients | Self::Reshard)
    }

    /// Returns the letter of a pass in the text form of a table. `?` for other kinds.
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

/// Action of a rank on one of its stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// Kind of the action.
    pub kind: ActionKind,
    /// Index of the stage, from 0. The rank that executes the action has this stage.
    pub stage: usize,
    /// Index of the micro-batch, from 0. `None` for [`ActionKind::Unshard`], [`ActionKind::ReduceGradients`] and
    /// [`ActionKind::Reshard`], which are done once per step.
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

    /// Returns the other half of a message: for a send the receive at the neighbouring stage, for a receive the send.
    /// `None` for actions that are not messages, and for a message to a stage before the first.
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

    /// Returns an action of another kind for the same stage and micro-batch.
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
