//! State of objects in checkpoints: [`Stateful`], and its implementations for optimizers and schedulers.

use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::{Optimizer, OptimizerState, Scheduler, SchedulerState};
use brigade_torch::{Error, ErrorKind, Result, dtype_of};
use tch::Tensor;

/// An object whose state can be saved as a tree of values and tensors and loaded again: a model, an optimizer, a
/// scheduler, a loader, a gradient scaler, a communication hook, or an object of the program's own (PyTorch's protocol
/// of the same name).
///
/// Methods take `&self`, because the loop and the checkpoints share the object; an object of the program keeps its
/// state behind a `Mutex` or in atomics.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use brigade_torch::{Error, Result};
/// use brigade_checkpoint::Value;
/// use brigade_train::{Accelerator, Stateful};
/// use tch::Tensor;
///
/// struct Average(Mutex<Tensor>);
///
/// impl Stateful for Average {
///     fn state_dict(&self) -> Result<Value<Tensor>> {
///         Ok(Value::dict([("mean", Value::Tensor(self.0.lock().unwrap().shallow_clone()))]))
///     }
///
///     fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
///         let mean = state.get("mean").and_then(Value::as_tensor);
///         let mean = mean.ok_or_else(|| Error::custom("there is no `mean`"))?;
///         *self.0.lock().unwrap() = mean.shallow_clone();
///         Ok(())
///     }
/// }
///
/// let average = Arc::new(Average(Mutex::new(Tensor::from(0.5))));
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// accelerator.checkpoints().register(&average);
/// # let folder = std::env::temp_dir().join(format!("brigade-stateful-{}", std::process::id()));
/// accelerator.save_state(&folder)?;
/// accelerator.checkpoints().wait()?;
/// *average.0.lock().unwrap() = Tensor::from(0.0);
/// accelerator.load_state(&folder)?;
/// assert_eq!(average.0.lock().unwrap().double_value(&[]), 0.5);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Error>(())
/// ```
///
/// Example: the state of an optimizer, outside of a checkpoint folder.
///
/// ```
/// use brigade_optim::Adam;
/// use brigade_train::Stateful;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
/// let optimizer = Adam::default().lr(0.25).build(&model)?;
/// let other = Adam::default().build(&model)?;
/// other.load_state_dict(&Stateful::state_dict(&optimizer)?)?;
/// assert_eq!(other.lr(), 0.25);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait Stateful {
    /// Returns the state: plain values, and tensors that may share memory with the object's.
    ///
    /// # Errors
    /// Any error stops the save, on all ranks.
    fn state_dict(&self) -> Result<Value<Tensor>>;

    /// Checks shapes, types and names of a state without its tensors' values, and changes nothing. A load checks all
    /// objects before it changes the first. By default everything passes, and [`Stateful::load_state_dict`] has to
    /// refuse a state that does not fit.
    ///
    /// # Errors
    /// Returns the reason why the state does not fit.
    fn check_state_dict(&self, _state: &Value<TensorInfo>) -> Result<(), String> {
        Ok(())
    }

    /// Loads a state that [`Stateful::state_dict`] returned.
    ///
    /// # Errors
    /// Fails when it does not fit; the object keeps its state then, and so do all other objects of a load.
    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()>;

    /// Returns the tensors of the state that are sharded over the ranks as a prepared model's parameters are, such as
    /// averages of weights: each tensor's place in the state (`tensors.fc.weight`), and the shard. A checkpoint holds
    /// the rows of all ranks, and a load on another number of ranks gives each rank its own. By default there are none;
    /// then each rank's state is taken to be the same, and rank 0's is saved.
    fn shards(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

/// Implements [`Stateful`] for a handle by its shared state.
macro_rules! stateful_handle {
    ($(#[$doc:meta])* [$($generics:tt)*] $handle:ty, $shared:tt) => {
        $(#[$doc])*
        impl $($generics)* $crate::stateful::Stateful for $handle {
            fn state_dict(
                &self,
            ) -> Result<brigade_checkpoint::Value<tch::Tensor>>
            {
                self.$shared.state_dict()
            }

            fn check_state_dict(
                &self,
                state: &brigade_checkpoint::Value<brigade_checkpoint::TensorInfo>,
            ) -> Result<(), String> {
                self.$shared.check_state_dict(state)
            }

            fn load_state_dict(
                &self,
                state: &brigade_checkpoint::Value<tch::Tensor>,
            ) -> Result<()> {
                self.$shared.load_state_dict(state)
            }
        }
    };
}
pub(crate) use stateful_handle;

/// Returns the error for a state that does not fit.
pub(crate) fn mismatch(reason: String) -> Error {
    Error::new(ErrorKind::Checkpoint, reason)
}

/// Returns the error for a missing state of rank 0.
pub(crate) fn no_state() -> Error {
    Error::invalid_argument("rank 0 has given no state to load: `None` is for the other ranks")
}

/// Returns the types and shapes of a state's tensors.
pub(crate) fn infos(state: &Value<Tensor>) -> Result<Value<TensorInfo>, Error> {
    state.as_ref().try_map(&mut |name, tensor| {
        let dtype = dtype_of(tensor.kind()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "a state cannot hold `{name}`: its tensor is of {:?}",
                tensor.kind()
            ))
        })?;
        let shape = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        Ok(TensorInfo { dtype, shape })
    })
}

/// Checks that shape and kind are the same: a resumed run must not differ in one bit.
pub(crate) fn same_shape(name: &str, tensor: &Tensor, found: &TensorInfo) -> Result<(), String> {
    let dtype = tensor.f_kind().map_err(|error| error.to_string())?;
    let shape: Vec<u64> = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
    if dtype_of(dtype) == Some(found.dtype) && shape == found.shape {
        return Ok(());
    }
    Err(format!("`{name}` is {found} in the checkpoint, but {shape:?} of {dtype:?} here"))
}

impl<T: Stateful + ?Sized> Stateful for Arc<T> {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        (**self).state_dict()
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        (**self).check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        (**self).load_state_dict(state)
    }

    fn shards(&self) -> Vec<(String, Tensor)> {
        (**self).shards()
    }
}

impl Stateful for Optimizer {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let state = Self::state_dict(self)?;
        Ok(state.to_value())
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let shape = |tensor: &TensorInfo| -> Vec<i64> {
            tensor.shape.iter().map(|size| size.cast_signed()).collect()
        };
        let state = OptimizerState::from_value(state, TensorInfo::clone)?;
        self.check_state(&state, shape).map_err(|mismatch| mismatch.to_string())
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        let state = OptimizerState::from_value(state, Tensor::shallow_clone)
            .map_err(Error::invalid_argument)?;
        // Clones are handles of one optimizer.
        Self::load_state_dict(&mut self.clone(), &state)
    }
}

impl Stateful for Scheduler {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        Ok(self.to_value())
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let state = SchedulerState::from_value(state)?;
        self.check_state(&state).map_err(|error| error.to_string())
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        let state = SchedulerState::from_value(state).map_err(Error::invalid_argument)?;
        self.clone().load_state(&state)
    }
}
