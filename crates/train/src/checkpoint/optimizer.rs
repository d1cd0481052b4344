//! An optimizer's state in a checkpoint.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::{Optimizer, OptimizerState};
use brigade_torch::Tensor;

use crate::error::{Error, Result};
use crate::optimizer::SavedOptimizer;
use crate::registry::{Kind, Restoring, Stateful};

impl Stateful for SavedOptimizer {
    fn kind(&self) -> Kind {
        Kind::Optimizer
    }

    fn state(&self) -> Result<Value<Tensor>> {
        Ok(self.0.state_dict()?.to_value())
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let shape = |tensor: &TensorInfo| -> Vec<i64> {
            tensor.shape.iter().map(|size| size.cast_signed()).collect()
        };
        let state = OptimizerState::from_value(state, TensorInfo::clone)?;
        self.0.check_state(&state, shape).map_err(|mismatch| mismatch.to_string())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        let state =
            OptimizerState::from_value(&state, Tensor::shallow_clone).map_err(Error::Misuse)?;
        Ok(self.0.clone().load_state_dict(&state)?)
    }

    fn optimizer(&self) -> Option<Optimizer> {
        Some(self.0.clone())
    }

    fn steps(&self) -> Option<u64> {
        Some(self.0.steps())
    }
}
