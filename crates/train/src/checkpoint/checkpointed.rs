//! What a program can register for checkpoints.

use std::sync::Arc;

use brigade_nn::Model;
use brigade_optim::{Optimizer, Scheduler};

use super::Checkpoints;
use super::custom::Custom;
use crate::loader::position::SavedLoader;
use crate::loader::{Loader, PreparedLoader};
use crate::model::SavedTensors;
use crate::precision::scaler::GradScaler;
use crate::registry::Saved;
use crate::stateful::Stateful;

/// What [`Checkpoints::register`] takes: a [`brigade_nn::Model`], an [`crate::Optimizer`], a
/// [`crate::Scheduler`], a [`crate::GradScaler`], a [`crate::PreparedLoader`], and an [`Arc`] of a
/// [`Stateful`] object of the program's own.
pub trait Checkpointed {
    /// Adds the object to what the checkpoints hold.
    fn register_in(&self, checkpoints: &Checkpoints);
}

impl<M> Checkpointed for Model<M> {
    fn register_in(&self, checkpoints: &Checkpoints) {
        checkpoints.registry().keep(Arc::new(SavedTensors::of(self, None)));
    }
}

impl Checkpointed for Optimizer {
    fn register_in(&self, checkpoints: &Checkpoints) {
        checkpoints.registry().keep(Arc::new(Saved(self.clone())));
    }
}

impl Checkpointed for Scheduler {
    fn register_in(&self, checkpoints: &Checkpoints) {
        checkpoints.registry().keep(Arc::new(Saved(self.clone())));
    }
}

impl Checkpointed for GradScaler {
    fn register_in(&self, checkpoints: &Checkpoints) {
        checkpoints.registry().keep(Arc::new(Saved(self.clone())));
    }
}

impl<L: Loader + 'static> Checkpointed for PreparedLoader<L> {
    fn register_in(&self, checkpoints: &Checkpoints) {
        let saved: Arc<SavedLoader<L>> = Arc::clone(&self.saved);
        checkpoints.registry().keep(saved);
    }
}

impl<T: Stateful + Send + Sync + 'static> Checkpointed for Arc<T> {
    fn register_in(&self, checkpoints: &Checkpoints) {
        checkpoints.registry().keep(Arc::new(Custom(Self::clone(self))));
    }
}
