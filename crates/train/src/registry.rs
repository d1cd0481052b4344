//! What was prepared, in order, so that a checkpoint needs no list.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::Optimizer;
use brigade_torch::Tensor;

use crate::error::Result;

/// The objects of an Accelerator that a checkpoint holds. They are held weakly: what the program drops
/// is not saved any more.
#[derive(Default)]
pub(crate) struct Registry {
    prepared: Mutex<Vec<Weak<dyn Stateful>>>,
    /// The user's own, which the user gave to be kept.
    custom: Mutex<Vec<Arc<dyn Stateful>>>,
}

/// Something whose state goes into a checkpoint.
pub(crate) trait Stateful: Send + Sync {
    /// What it is.
    fn kind(&self) -> Kind;

    /// Its state. The tensors share memory with it.
    fn state(&self) -> Result<Value<Tensor>>;

    /// Says why a state does not fit, and changes nothing.
    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String>;

    /// Takes a state that was checked.
    fn restore(&self, state: Value<Tensor>, place: &Restoring) -> Result<()>;

    /// What this rank has of it for itself.
    fn own(&self) -> Result<Option<Value<Tensor>>> {
        Ok(None)
    }

    /// Says why such a state does not fit, and changes nothing.
    fn check_own(&self, _state: &Value<TensorInfo>) -> Result<(), String> {
        Ok(())
    }

    /// Takes this rank's own, or those of all ranks of a run that had another number of them; none of a
    /// checkpoint that has none.
    fn restore_own(&self, _states: &[&Value<Tensor>]) -> Result<()> {
        Ok(())
    }

    /// A model's tensors: a checkpoint reads straight into them, and `restore` is not called.
    fn tensors(&self) -> Option<Vec<ModelTensor>> {
        None
    }

    /// The optimizer that it is.
    fn optimizer(&self) -> Option<Optimizer> {
        None
    }

    /// Optimizer steps that it has counted.
    fn steps(&self) -> Option<u64> {
        None
    }

    /// Samples of all ranks that it has counted.
    fn samples(&self) -> Option<u64> {
        None
    }
}

/// One of a model's.
pub(crate) struct ModelTensor {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Trained: then it has a gradient.
    pub(crate) trained: bool,
    /// Not a parameter: then only rank 0's counts.
    pub(crate) buffer: bool,
}

/// Where a state came from and goes to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Restoring {
    /// Ranks of the run that wrote it.
    pub(crate) saved_world: usize,
    /// Ranks of this one.
    pub(crate) world: usize,
}

/// The kinds of objects, in the order in which their files are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Model,
    Optimizer,
    Scheduler,
    Scaler,
    Loader,
    Custom,
}

impl Kind {
    /// Its name in manifests and files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
            Self::Scheduler => "scheduler",
            Self::Scaler => "scaler",
            Self::Loader => "loader",
            Self::Custom => "custom",
        }
    }
}

impl Registry {
    /// Adds what `prepare` has made. Every rank prepares the same things in the same order.
    pub(crate) fn register<S: Stateful + 'static>(&self, object: &Arc<S>) {
        let object: Arc<dyn Stateful> = Arc::<S>::clone(object);
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        prepared.retain(|known| known.strong_count() > 0);
        prepared.push(Arc::downgrade(&object));
    }

    /// Adds an object of the user's, and keeps it.
    pub(crate) fn keep(&self, object: Arc<dyn Stateful>) {
        self.custom.lock().unwrap_or_else(PoisonError::into_inner).push(object);
    }

    /// The optimizers that are still there.
    pub(crate) fn optimizers(&self) -> Vec<Optimizer> {
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        prepared.iter().filter_map(|object| object.upgrade()?.optimizer()).collect()
    }

    /// All that are still there, with their names: `model`, `model_1`, …, by kind and in order.
    pub(crate) fn named(&self) -> Vec<(String, Arc<dyn Stateful>)> {
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let mut objects: Vec<_> = prepared.iter().filter_map(Weak::upgrade).collect();
        drop(prepared);
        objects.extend(self.custom.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
        objects.sort_by_key(|object| object.kind());
        let mut named: Vec<(String, Arc<dyn Stateful>)> = Vec::with_capacity(objects.len());
        for object in objects {
            let same = named.iter().filter(|(_, known)| known.kind() == object.kind()).count();
            let kind = object.kind().name();
            let name = if same == 0 { kind.to_owned() } else { format!("{kind}_{same}") };
            named.push((name, object));
        }
        named
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.named().into_iter().map(|(name, _)| name).collect();
        f.debug_tuple("Registry").field(&names).finish()
    }
}
