//! The state of a model's communication hook.

use brigade_checkpoint::Value;
use brigade_torch::{Error, Result};
use tch::Tensor;

use super::PreparedModel;
use crate::stateful::infos;

impl<M> PreparedModel<M> {
    /// Returns a copy of this rank's state of the communication hook (PowerSGD: `iteration`, and under `error` and
    /// `factor` tensors by the parameter's name). `None` for a hook without a state. Checkpoints
    /// ([`crate::Accelerator::save_state`]) hold this state anyway.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when memory runs out.
    pub fn comm_hook_state(&self) -> Result<Option<Value<Tensor>>> {
        let Some(hook) = self.hook_state() else { return Ok(None) };
        let state = hook.state_dict()?;
        Ok(Some(state.try_map(&mut |_, tensor| tensor.f_detach_copy())?))
    }

    /// Loads a state that [`PreparedModel::comm_hook_state`] returned on this rank.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when this model's hook has no state, or the state does not fit it.
    pub fn load_comm_hook_state(&self, state: &Value<Tensor>) -> Result<()> {
        let Some(hook) = self.hook_state() else {
            return Err(Error::invalid_argument(
                "load_comm_hook_state: this model's communication hook has no state; build the \
                 Accelerator with CommHook::PowerSgd or CommHook::stateful",
            ));
        };
        hook.check_state_dict(&infos(state)?)
            .map_err(|reason| Error::invalid_argument(format!("load_comm_hook_state: {reason}")))?;
        hook.load_state_dict(state)
    }
}
