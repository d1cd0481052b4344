//! A gradient scaler's state in a checkpoint.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::Tensor;

use crate::error::{Error, Result};
use crate::precision::scaler::{GradScaler, GradScalerState};
use crate::registry::{Kind, Restoring, Stateful};

impl Stateful for GradScaler {
    fn kind(&self) -> Kind {
        Kind::Scaler
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let (state, options) = (Self::state(self), self.options());
        Ok(Value::dict([
            ("scale", Value::Float(state.scale)),
            ("growth_tracker", Value::Int(state.growth_tracker.into())),
            // What PyTorch keeps as well, for conversions; here the program sets them.
            ("growth_factor", Value::Float(options.growth_factor)),
            ("backoff_factor", Value::Float(options.backoff_factor)),
            ("growth_interval", Value::Int(options.growth_interval.into())),
        ]))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        read(state).map(drop)
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        self.load_state(read(&state).map_err(Error::Misuse)?)
    }
}

fn read<T>(state: &Value<T>) -> Result<GradScalerState, String> {
    let scale = state.get("scale").and_then(Value::as_float);
    let scale = scale.filter(|scale| scale.is_finite() && *scale > 0.0);
    let tracker = state.get("growth_tracker").and_then(Value::as_int);
    let growth_tracker = tracker.and_then(|tracker| u32::try_from(tracker).ok());
    Ok(GradScalerState {
        scale: scale.ok_or("a scaler's state needs a `scale` above 0")?,
        growth_tracker: growth_tracker
            .ok_or("a scaler's state needs the count `growth_tracker`")?,
    })
}
