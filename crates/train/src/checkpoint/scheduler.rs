//! A schedule's position in a checkpoint.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::SchedulerState;
use brigade_torch::Tensor;

use crate::error::{Error, Result};
use crate::registry::{Kind, Restoring, Stateful};
use crate::scheduler::SavedScheduler;

impl Stateful for SavedScheduler {
    fn kind(&self) -> Kind {
        Kind::Scheduler
    }

    fn state(&self) -> Result<Value<Tensor>> {
        Ok(self.0.state().to_value(self.0.lr()))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let state = SchedulerState::from_value(state)?;
        self.0.check_state(&state).map_err(|error| error.to_string())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        let state = SchedulerState::from_value(&state).map_err(Error::Misuse)?;
        Ok(self.0.clone().load_state(&state)?)
    }
}
