//! Objects of the user's own in a checkpoint.

use std::sync::{Arc, Mutex, PoisonError};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::HookError;
use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::registry::{Kind, Restoring, Stateful};

/// An object of the user's own whose state goes into checkpoints. Rank 0's is saved; all ranks load it.
///
/// For plain data, [`Accelerator::register_value_for_checkpointing`] needs no such implementation.
pub trait Checkpointed: Send {
    /// Its state: plain values and tensors.
    ///
    /// # Errors
    /// What stops the save, on all ranks.
    fn state_dict(&self) -> Result<Value<Tensor>, HookError>;

    /// Takes a state.
    ///
    /// # Errors
    /// Where it does not fit; nothing is changed then, here and in all other objects.
    fn load_state_dict(&mut self, state: &Value<Tensor>) -> Result<(), HookError>;
}

impl Accelerator {
    /// Makes an object's state part of all checkpoints. Every rank registers the same objects in the same
    /// order. The Accelerator keeps the object.
    ///
    /// ```no_run
    /// use std::sync::{Arc, Mutex};
    /// use brigade_checkpoint::Value;
    /// use brigade_train::{Accelerator, Checkpointed, HookError, Tensor};
    ///
    /// struct Average(Tensor);
    ///
    /// impl Checkpointed for Average {
    ///     fn state_dict(&self) -> Result<Value<Tensor>, HookError> {
    ///         Ok(Value::dict([("mean", Value::Tensor(self.0.shallow_clone()))]))
    ///     }
    ///
    ///     fn load_state_dict(&mut self, state: &Value<Tensor>) -> Result<(), HookError> {
    ///         let mean = state.get("mean").and_then(Value::as_tensor).ok_or("there is no `mean`")?;
    ///         self.0 = mean.shallow_clone();
    ///         Ok(())
    ///     }
    /// }
    /// # fn f(accelerator: &Accelerator, mean: Tensor) {
    /// let average = Arc::new(Mutex::new(Average(mean)));
    /// accelerator.register_for_checkpointing(&average);
    /// # }
    /// ```
    pub fn register_for_checkpointing<T: Checkpointed + 'static>(&self, object: &Arc<Mutex<T>>) {
        self.registry.keep(Arc::new(Custom(Arc::clone(object))));
    }

    /// As [`Accelerator::register_for_checkpointing`], for data that serde can write and read.
    ///
    /// ```no_run
    /// # use std::sync::{Arc, Mutex};
    /// # fn f(accelerator: &brigade_train::Accelerator) {
    /// let best = Arc::new(Mutex::new(0.0f64));
    /// accelerator.register_value_for_checkpointing(&best);
    /// # }
    /// ```
    pub fn register_value_for_checkpointing<T>(&self, value: &Arc<Mutex<T>>)
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        self.registry.keep(Arc::new(Plain(Arc::clone(value))));
    }
}

struct Custom<T>(Arc<Mutex<T>>);

impl<T: Checkpointed> Stateful for Custom<T> {
    fn kind(&self) -> Kind {
        Kind::Custom
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let object = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        object.state_dict().map_err(Error::User)
    }

    /// Only the object knows, and says so when it takes the state: before anything else is changed.
    fn check(&self, _: &Value<TensorInfo>) -> Result<(), String> {
        Ok(())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        let mut object = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        object.load_state_dict(&state).map_err(Error::User)
    }
}

/// As MessagePack: it keeps every number exactly, and infinities.
struct Plain<T>(Arc<Mutex<T>>);

impl<T: Serialize + DeserializeOwned + Send> Stateful for Plain<T> {
    fn kind(&self) -> Kind {
        Kind::Custom
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let value = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rmp_serde::to_vec_named(&*value).map_err(|error| Error::User(error.into()))?;
        Ok(Value::dict([(MESSAGE_PACK, Value::Bytes(bytes))]))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        parse::<T, _>(state).map(drop)
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        let parsed = parse(&state).map_err(Error::Misuse)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = parsed;
        Ok(())
    }
}

fn parse<T: DeserializeOwned, U>(state: &Value<U>) -> Result<T, String> {
    let Some(Value::Bytes(bytes)) = state.get(MESSAGE_PACK) else {
        return Err("the checkpoint's is not a value that serde wrote".into());
    };
    rmp_serde::from_slice(bytes)
        .map_err(|error| format!("the checkpoint's value is of another type: {error}"))
}

const MESSAGE_PACK: &str = "message_pack";
