//! Training mode of a model and of its layers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Training mode of a layer. It follows the model ([`crate::Model::train`], [`crate::Model::eval`]), unless the layer
/// is kept in evaluation ([`crate::Model::hold_in_eval`]). Clones share their state.
#[derive(Debug, Clone)]
pub struct Training {
    model: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
}

impl Training {
    pub(crate) fn new() -> Self {
        Self { model: Arc::new(AtomicBool::new(true)), held: Arc::default() }
    }

    /// Returns the switch of one more layer of the same model.
    pub(crate) fn of_a_layer(&self) -> Self {
        Self { model: Arc::clone(&self.model), held: Arc::default() }
    }

    /// Returns `true` if the layer is in training mode: from the start and after `train()`, until `eval()`, unless the
    /// layer is kept in evaluation.
    #[must_use]
    pub fn is_on(&self) -> bool {
        // Relaxed: the flags order no other memory accesses, and only the model's owner sets them.
        self.model.load(Ordering::Relaxed) && !self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, on: bool) {
        self.model.store(on, Ordering::Relaxed);
    }

    pub(crate) fn hold(&self, on: bool) {
        self.held.store(on, Ordering::Relaxed);
    }
}
