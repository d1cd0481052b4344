//! A schedule's place in a checkpoint.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_plan::PlateauState;
use brigade_torch::Tensor;

use crate::error::{Error, Result};
use crate::registry::{Kind, Restoring, Stateful};
use crate::scheduler::{Course, SchedulerState};

impl Stateful for Course {
    fn kind(&self) -> Kind {
        Kind::Scheduler
    }

    fn state(&self) -> Result<Value<Tensor>> {
        let SchedulerState { position, plateau } = Self::state(self);
        let number = |number: u64| Value::Int(number.cast_signed());
        let plateau = plateau.map(|plateau| {
            Value::dict([
                ("lr", Value::Float(plateau.lr)),
                ("best", plateau.best.map_or(Value::None, Value::Float)),
                ("bad", number(plateau.bad)),
                ("cooling", number(plateau.cooling)),
                ("seen", number(plateau.seen)),
            ])
        });
        Ok(Value::dict([
            ("position", number(position)),
            ("lr", Value::Float(self.lr())),
            ("plateau", plateau.unwrap_or(Value::None)),
        ]))
    }

    fn check(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.fits(&read(state)?).map_err(|error| error.to_string())
    }

    fn restore(&self, state: Value<Tensor>, _: &Restoring) -> Result<()> {
        self.load(&read(&state).map_err(Error::Misuse)?)
    }
}

fn read<T>(state: &Value<T>) -> Result<SchedulerState, String> {
    let count = |of: &Value<T>, key: &str| {
        let number = of.get(key).and_then(Value::as_int).map(i64::cast_unsigned);
        number.ok_or_else(|| format!("a scheduler's state needs the integer `{key}`"))
    };
    let plateau = match state.get("plateau") {
        None | Some(Value::None) => None,
        Some(plateau) => {
            let lr = plateau.get("lr").and_then(Value::as_float);
            Some(PlateauState {
                lr: lr.ok_or("a scheduler's state needs the number `lr`")?,
                best: plateau.get("best").and_then(Value::as_float),
                bad: count(plateau, "bad")?,
                cooling: count(plateau, "cooling")?,
                seen: count(plateau, "seen")?,
            })
        }
    };
    Ok(SchedulerState { position: count(state, "position")?, plateau })
}
