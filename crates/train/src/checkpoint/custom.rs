//! Objects of the program's own in a checkpoint.

use std::sync::{Arc, Mutex, PoisonError};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{HookError, Stateful};
use crate::accelerator::Accelerator;
use crate::registry::{Kind, Registered};

impl Accelerator {
    /// Makes an object's state part of all checkpoints; see [`Stateful`]. Rank 0's is saved, all ranks
    /// load it. Every rank registers the same objects in the same order. The Accelerator keeps the object.
    ///
    /// For plain data, [`Accelerator::register_value_for_checkpointing`] needs no implementation.
    pub fn register_for_checkpointing<T>(&self, object: &Arc<T>)
    where
        T: Stateful + Send + Sync + 'static,
    {
        self.registry.keep(Arc::new(Custom(Arc::clone(object))));
    }

    /// As [`Accelerator::register_for_checkpointing`], for data that serde can write and read.
    ///
    /// ```
    /// # use std::sync::{Arc, Mutex};
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// let best = Arc::new(Mutex::new(0.0f64));
    /// accelerator.register_value_for_checkpointing(&best);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn register_value_for_checkpointing<T>(&self, value: &Arc<Mutex<T>>)
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        self.registry.keep(Arc::new(Custom(Arc::new(Plain(Arc::clone(value))))));
    }
}

struct Custom<T>(Arc<T>);

impl<T: Stateful> Stateful for Custom<T> {
    fn state_dict(&self) -> Result<Value<Tensor>, HookError> {
        self.0.state_dict()
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.0.check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<(), HookError> {
        self.0.load_state_dict(state)
    }
}

impl<T: Stateful + Send + Sync> Registered for Custom<T> {
    fn kind(&self) -> Kind {
        Kind::Custom
    }
}

/// As MessagePack: it keeps every number exactly, and infinities.
struct Plain<T>(Arc<Mutex<T>>);

impl<T: Serialize + DeserializeOwned> Stateful for Plain<T> {
    fn state_dict(&self) -> Result<Value<Tensor>, HookError> {
        let value = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rmp_serde::to_vec_named(&*value)?;
        Ok(Value::dict([(MESSAGE_PACK, Value::Bytes(bytes))]))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        parse::<T, _>(state).map(drop)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<(), HookError> {
        let parsed = parse(state)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = parsed;
        Ok(())
    }
}

fn parse<T: DeserializeOwned, U>(state: &Value<U>) -> Result<T, String> {
    let Some(Value::Bytes(bytes)) = state.get(MESSAGE_PACK) else {
        return Err("the checkpoint's state is not a value that serde wrote".into());
    };
    rmp_serde::from_slice(bytes)
        .map_err(|error| format!("the checkpoint's value is of another type: {error}"))
}

const MESSAGE_PACK: &str = "message_pack";
