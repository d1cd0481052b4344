//! Forward hooks by layer name.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tch::Tensor;

type Run = dyn Fn(&str, &Tensor) -> Option<Tensor> + Send;

/// Hooks of one model's layers. Clones share the hooks.
#[derive(Clone, Default)]
pub(crate) struct Hooks(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// `true` if there is a hook: the only value that a forward without hooks reads.
    any: AtomicBool,
    next: AtomicU64,
    list: Mutex<Vec<Hook>>,
}

#[derive(Clone)]
struct Hook {
    id: u64,
    layer: String,
    run: Arc<Mutex<Box<Run>>>,
}

impl Hooks {
    /// Returns `true` if no layer of the model has a hook.
    pub(crate) fn is_empty(&self) -> bool {
        // Relaxed: code that adds a hook has exclusive access to the model.
        !self.0.any.load(Ordering::Relaxed)
    }

    /// Applies the layer's hooks to its output.
    pub(crate) fn apply(&self, layer: &str, mut output: Tensor) -> Tensor {
        if self.is_empty() {
            return output;
        }
        // A copy: a hook may add or remove hooks.
        let mut hooks = self.0.list.lock().clone();
        hooks.retain(|hook| hook.layer == layer);
        for hook in hooks {
            let run = hook.run.lock();
            if let Some(changed) = run(layer, &output) {
                output = changed;
            }
        }
        output
    }

    pub(crate) fn add(&self, layer: &str, run: Box<Run>) -> ForwardHook {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let hook = Hook { id, layer: layer.to_owned(), run: Arc::new(Mutex::new(run)) };
        self.0.list.lock().push(hook);
        self.0.any.store(true, Ordering::Relaxed);
        ForwardHook { id, shared: Arc::downgrade(&self.0) }
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").field("len", &self.0.list.lock().len()).finish()
    }
}

/// Handle of a forward hook of [`Model::forward_hook`](crate::Model::forward_hook). Dropping it removes the hook.
#[must_use = "the hook is removed where this is dropped"]
pub struct ForwardHook {
    id: u64,
    shared: Weak<Shared>,
}

impl Drop for ForwardHook {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let mut list = shared.list.lock();
            list.retain(|hook| hook.id != self.id);
            shared.any.store(!list.is_empty(), Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for ForwardHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForwardHook").field("id", &self.id).finish_non_exhaustive()
    }
}
