//! Objects whose state checkpoints hold, in the order of their registration.
//!
//! Everything in a checkpoint implements [`Stateful`](crate::Stateful). `Checkpointed` adds what files need: the
//! kind, counts, and the tensors of a model, into which a load reads directly.
//!
//! `prepare` returns handles: an `Arc` of what the object shares with checkpoints (`OptimizerInner`,
//! `SchedulerInner`, `LoaderInner`; `ModelInner` has all of a model but its layers, which no two threads may share).
//! The registry has a `Weak` of each, in the order of their preparation, so `save_state` needs no list.
//!
//! The program owns what was prepared: an object that it drops is not saved any more. Accelerate keeps such objects
//! in lists until `free_memory`. With such lists a dropped model would keep its GPU memory, and each try of
//! `find_executable_batch_size` would leave a model, an optimizer and a loader in all later checkpoints.
//! `Checkpoints::register`, by contrast, keeps its object.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use brigade_checkpoint::Value;
use brigade_optim::{Optimizer, Scheduler};
use brigade_torch::{Result, TensorId};
use parking_lot::Mutex;
use tch::Tensor;

use crate::gradients::hook::StatefulHook;
use crate::precision::scaler::GradScaler;
use crate::sharding::Part;
use crate::stateful::Stateful;

/// The objects that a checkpoint holds.
///
/// Prepared objects belong to the program: the registry holds them weakly, and an object that the program has dropped
/// is no longer saved. Accelerate keeps prepared objects until `free_memory`; here the memory of a dropped model is
/// freed, and a body that prepares its objects again, such as that of `find_executable_batch_size`, does not save those
/// of its last attempt as well. Objects that a program registers by a call are kept, as that call documents.
#[derive(Default)]
pub(crate) struct Registry {
    prepared: Mutex<Vec<Weak<dyn Checkpointed>>>,
    /// Objects that the program registered by a call.
    kept: Mutex<Vec<Arc<dyn Checkpointed>>>,
}

/// An object of the registry: its state, and how a checkpoint stores it.
pub(crate) trait Checkpointed: Stateful + Send + Sync {
    /// Returns the kind of the object, which determines the names of its files.
    fn kind(&self) -> Kind;

    /// Restores a validated state, which may come from a run with another number of ranks.
    fn restore(&self, state: &Value<Tensor>, _worlds: &Worlds) -> Result<()> {
        self.load_state_dict(state)
    }

    /// Returns the communication hook, if it has a state, which differs between ranks.
    fn hook(&self) -> Option<Arc<dyn StatefulHook>> {
        None
    }

    /// Returns the tensors of a model, into which a checkpoint reads directly; `restore` is then not called.
    fn tensors(&self) -> Option<Vec<ModelTensor>> {
        None
    }

    /// Returns the optimizer, if the object is one.
    fn optimizer(&self) -> Option<Optimizer> {
        None
    }

    /// Returns this rank's parts of tensors that are spread over ranks. For a model they are keyed by the tensor's
    /// name, for an optimizer by the name of the parameter, whose states are spread in the same way.
    fn parts(&self) -> HashMap<String, Part> {
        HashMap::new()
    }

    /// Updates the object after its tensors were read from a checkpoint.
    ///
    /// # Errors
    /// Fails when a message that follows cannot be sent.
    fn loaded(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the number of samples of all ranks that the object has counted.
    fn samples(&self) -> Option<u64> {
        None
    }
}

/// An object whose state checkpoints hold: the argument of [`Checkpoints::register`](crate::Checkpoints::register). It
/// is made from a reference to a [`brigade_nn::Model`], an [`Optimizer`], a [`Scheduler`], a [`GradScaler`], a
/// [`PreparedLoader`](crate::PreparedLoader), or an [`Arc`] of a [`Stateful`] object of the program's own.
pub struct CheckpointObject(pub(crate) Arc<dyn Checkpointed>);

impl fmt::Debug for CheckpointObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CheckpointObject").field(&self.0.kind()).finish()
    }
}

impl Checkpointed for Optimizer {
    fn kind(&self) -> Kind {
        Kind::Optimizer
    }

    fn optimizer(&self) -> Option<Optimizer> {
        Some(self.clone())
    }
}

impl Checkpointed for Scheduler {
    fn kind(&self) -> Kind {
        Kind::Scheduler
    }
}

impl Checkpointed for GradScaler {
    fn kind(&self) -> Kind {
        Kind::Scaler
    }
}

/// Stores a custom object.
impl<T: Stateful + Send + Sync> Checkpointed for Arc<T> {
    fn kind(&self) -> Kind {
        Kind::Custom
    }
}

impl From<&Optimizer> for CheckpointObject {
    fn from(optimizer: &Optimizer) -> Self {
        Self(Arc::new(optimizer.clone()))
    }
}

impl From<&Scheduler> for CheckpointObject {
    fn from(scheduler: &Scheduler) -> Self {
        Self(Arc::new(scheduler.clone()))
    }
}

impl From<&GradScaler> for CheckpointObject {
    fn from(scaler: &GradScaler) -> Self {
        Self(Arc::new(scaler.clone()))
    }
}

impl<T: Stateful + Send + Sync + 'static> From<&Arc<T>> for CheckpointObject {
    fn from(object: &Arc<T>) -> Self {
        Self(Arc::new(Arc::clone(object)))
    }
}

/// A tensor of a model, with the properties that determine how it is saved.
pub(crate) struct ModelTensor {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// `true` if it is a trained parameter, which has a gradient.
    pub(crate) trained: bool,
    /// `true` if it is a buffer, of which only rank 0's values are saved.
    pub(crate) buffer: bool,
}

/// The numbers of ranks of the run that wrote a checkpoint, and of the one that reads it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Worlds {
    pub(crate) saved: usize,
    pub(crate) current: usize,
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
    /// Returns the name of the kind in manifests and files.
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
    /// Adds a prepared object, and holds it weakly. Every rank prepares the same objects in the same order.
    pub(crate) fn register<S: Checkpointed + 'static>(&self, object: &Arc<S>) {
        let object: Arc<dyn Checkpointed> = Arc::<S>::clone(object);
        let mut prepared = self.prepared.lock();
        prepared.retain(|known| known.strong_count() > 0);
        prepared.push(Arc::downgrade(&object));
    }

    /// Adds an object, and keeps it alive.
    pub(crate) fn keep(&self, object: Arc<dyn Checkpointed>) {
        self.kept.lock().push(object);
    }

    /// Returns the registered optimizers that still exist.
    pub(crate) fn optimizers(&self) -> Vec<Optimizer> {
        let prepared = self.prepared.lock();
        prepared.iter().filter_map(|object| object.upgrade()?.optimizer()).collect()
    }

    /// Returns this rank's parts of an object's tensors that are spread over ranks, by their places in its state.
    pub(crate) fn parts_of(&self, object: &dyn Checkpointed) -> HashMap<String, Part> {
        let shards = object.shards();
        if shards.is_empty() {
            return object.parts();
        }
        let mut of_shards: HashMap<TensorId, Part> = HashMap::new();
        let prepared: Vec<_> = self.prepared.lock().iter().filter_map(Weak::upgrade).collect();
        for model in prepared {
            let mut parts = model.parts();
            let tensors = model.tensors().unwrap_or_default().into_iter();
            of_shards.extend(tensors.filter_map(|saved| {
                Some((TensorId::of(&saved.tensor), parts.remove(&saved.name)?))
            }));
        }
        let part = |(place, shard): (String, Tensor)| {
            Some((place, of_shards.get(&TensorId::of(&shard))?.clone()))
        };
        shards.into_iter().filter_map(part).collect()
    }

    /// Returns all registered objects that still exist, with their names: `model`, `model_1`, …, by kind and in order.
    pub(crate) fn named(&self) -> Vec<(String, Arc<dyn Checkpointed>)> {
        let prepared = self.prepared.lock();
        let mut objects: Vec<_> = prepared.iter().filter_map(Weak::upgrade).collect();
        drop(prepared);
        objects.extend(self.kept.lock().iter().cloned());
        objects.sort_by_key(|object| object.kind());
        let mut named: Vec<(String, Arc<dyn Checkpointed>)> = Vec::with_capacity(objects.len());
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
