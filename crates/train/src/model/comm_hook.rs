//! The state of a model's communication hook.

use brigade_checkpoint::Value;
use brigade_torch::Tensor;

use super::PreparedModel;
use crate::error::{Error, Result};
use crate::stateful::{infos, unboxed};

impl<M> PreparedModel<M> {
    /// Returns this rank's state of a communication hook that has one, as a copy (PowerSGD: `iteration`, and
    /// under `error` and `factor` tensors by the parameter's name); `None` for the others. A checkpoint
    /// ([`crate::Accelerator::save_state`]) holds it anyway.
    ///
    /// # Errors
    /// [`Error::Tensor`] when memory runs out.
    pub fn comm_hook_state(&self) -> Result<Option<Value<Tensor>>> {
        let Some(hook) = self.hook_state() else { return Ok(None) };
        let state = hook.state_dict().map_err(unboxed)?;
        Ok(Some(state.try_map(&mut |_, tensor| tensor.f_detach_copy())?))
    }

    /// Continues from such a state, which this rank has saved.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when this model's hook has no state, or the state does not fit it.
    pub fn load_comm_hook_state(&self, state: &Value<Tensor>) -> Result<()> {
        let Some(hook) = self.hook_state() else {
            return Err(Error::InvalidArgument(
                "load_comm_hook_state: this model's communication hook has no state; build the \
                 Accelerator with CommHook::PowerSgd or CommHook::stateful"
                    .into(),
            ));
        };
        hook.check_state_dict(&infos(state)?)
            .map_err(|reason| Error::InvalidArgument(format!("load_comm_hook_state: {reason}")))?;
        hook.load_state_dict(state).map_err(unboxed)
    }
}
