//! Values of the program in a checkpoint, by serde.

use std::sync::{Arc, Mutex, PoisonError};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::stateful::{Stateful, mismatch};

/// A program's value, serialized as MessagePack, which keeps every number exactly, including infinities.
pub(super) struct MessagePack<T>(pub(super) Arc<Mutex<T>>);

impl<T: Serialize + DeserializeOwned> Stateful for MessagePack<T> {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let value = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rmp_serde::to_vec_named(&*value).map_err(Error::custom)?;
        Ok(Value::dict([(MESSAGE_PACK, Value::Bytes(bytes))]))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        parse::<T, _>(state).map(drop)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        let parsed = parse(state).map_err(mismatch)?;
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
