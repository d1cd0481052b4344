//! What callbacks see and change.

/// The state of a fit.
#[derive(Debug)]
pub struct LearnerState {}

impl LearnerState {
    /// Whether the current batch is one of training.
    #[must_use]
    pub fn is_training(&self) -> bool {
        false
    }

    /// Batches trained since the fit began.
    #[must_use]
    pub fn train_iter(&self) -> usize {
        0
    }
}
