//! Statistics that batch norms share between ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use brigade_torch::ProcessGroup;
use parking_lot::Mutex;

/// Ranks whose batches a model's batch norms use for their statistics. Clones share one value.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedStatistics(Arc<Sharing>);

#[derive(Debug, Default)]
struct Sharing {
    layers: AtomicUsize,
    is_shared: AtomicBool,
    group: Mutex<Option<ProcessGroup>>,
}

impl SharedStatistics {
    /// Returns a handle for one more layer.
    pub(crate) fn for_a_layer(self) -> Self {
        self.0.layers.fetch_add(1, Ordering::Relaxed);
        self
    }

    pub(crate) fn share(&self, group: &ProcessGroup) -> usize {
        // For a single rank the plain kernel is faster.
        self.0.is_shared.store(true, Ordering::Relaxed);
        *self.0.group.lock() = (group.size() > 1).then(|| group.clone());
        self.0.layers.load(Ordering::Relaxed)
    }

    /// Returns `true` if ranks share the statistics, even if the group has a single rank.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.is_shared.load(Ordering::Relaxed)
    }

    pub(crate) fn group(&self) -> Option<ProcessGroup> {
        self.0.group.lock().clone()
    }
}
