//! Averages of weights: exponential (EMA) and stochastic (SWA).

use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_torch::{Error, ErrorKind, Result};
use brigade_train::Stateful;
use parking_lot::Mutex;
use tch::Tensor;

use crate::callback::{Callback, Phases, Step};
use crate::state::LearnerState;

/// Copies of a model's parameters and floating-point buffers, saved in checkpoints.
#[derive(Debug, Default)]
struct Copies(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    tensors: Vec<(String, Tensor)>,
    /// Tensors with copies, for a model that is divided among ranks.
    shards: Vec<(String, Tensor)>,
    count: i64,
    registered: bool,
}

impl Copies {
    /// Copies the model's current values.
    fn begin(self: &Arc<Self>, learner: &LearnerState) -> Result<()> {
        let copied = live(learner).into_iter().map(|(name, tensor)| {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(&tensor)?;
            Ok((name, copy))
        });
        let tensors = copied.collect::<Result<_>>()?;
        let mut shards = Vec::new();
        if learner.is_in_parts() {
            let parameters = learner.local_parameters().into_iter();
            shards.extend(parameters.map(|it| (it.name, it.tensor)));
        }
        let mut inner = self.0.lock();
        (inner.tensors, inner.shards, inner.count) = (tensors, shards, 0);
        // Must happen only once: checkpoints identify an object by its position among all objects.
        if !std::mem::replace(&mut inner.registered, true) {
            drop(inner);
            learner.accelerator().checkpoints().register(self);
        }
        Ok(())
    }

    /// Moves the copies towards the model's values: `copy + weight (value - copy)`.
    fn move_towards(&self, learner: &LearnerState, weight: impl Fn(i64) -> f64) -> Result<()> {
        let mut inner = self.0.lock();
        inner.count += 1;
        let weight = weight(inner.count);
        for ((_, copy), (_, value)) in inner.tensors.iter_mut().zip(live(learner)) {
            let _ = copy.f_lerp_(&value, weight)?;
        }
        Ok(())
    }

    /// Exchanges the copies and the model's values.
    fn swap(&self, learner: &LearnerState) -> Result<()> {
        for ((_, copy), (_, mut value)) in self.0.lock().tensors.iter_mut().zip(live(learner)) {
            let mut before = value.f_empty_like()?;
            before.f_copy_(&value)?;
            value.f_copy_(copy)?;
            copy.f_copy_(&before)?;
        }
        learner.local_parameters_changed()
    }
}

/// Returns parameters and floating-point buffers, without a graph.
fn live(learner: &LearnerState) -> Vec<(String, Tensor)> {
    let parameters = learner.local_parameters().into_iter();
    let buffers = learner.buffers().into_iter();
    let buffers = buffers.filter(|buffer| buffer.tensor.is_floating_point());
    parameters.chain(buffers).map(|value| (value.name, value.tensor.detach())).collect()
}

impl Stateful for Copies {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let inner = self.0.lock();
        let tensors = inner
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), Value::Tensor(tensor.shallow_clone())));
        Ok(Value::dict([("count", Value::Int(inner.count)), ("tensors", Value::dict(tensors))]))
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        let unfit = |reason: String| Error::new(ErrorKind::Checkpoint, reason);
        let mut inner = self.0.lock();
        let found = state.get("tensors");
        let found = found.ok_or_else(|| unfit("the state has no `tensors`".to_owned()))?;
        let mut values = Vec::new();
        for (name, copy) in &inner.tensors {
            let value = found.get(name).and_then(Value::as_tensor);
            let value = value.ok_or_else(|| unfit(format!("the state has no `{name}`")))?;
            if value.size() != copy.size() {
                return Err(unfit(format!(
                    "`{name}` has shape {:?}, expected {:?}",
                    value.size(),
                    copy.size()
                )));
            }
            values.push(value.shallow_clone());
        }
        for ((_, copy), value) in inner.tensors.iter_mut().zip(&values) {
            copy.f_copy_(value)?;
        }
        inner.count = state.get("count").and_then(Value::as_int).unwrap_or(0);
        Ok(())
    }

    fn shards(&self) -> Vec<(String, Tensor)> {
        let inner = self.0.lock();
        let place =
            |(name, shard): &(String, Tensor)| (format!("tensors.{name}"), shard.shallow_clone());
        inner.shards.iter().map(place).collect()
    }
}

/// Keeps an exponential moving average of the weights (Polyak averaging), validates with it, and copies it into the
/// model at the end of the fit.
///
/// BatchNorm's statistics are averaged as well. Every rank averages its own copy of the weights, or its shards. The
/// checkpoints of the [`Checkpoint`](super::Checkpoint) callback contain the average.
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    validate: bool,
    keep: bool,
    copies: Arc<Copies>,
    swapped: bool,
}

impl Ema {
    /// Makes an average in which the past has this weight, such as 0.999.
    #[must_use]
    pub fn new(decay: f64) -> Self {
        Self { decay, validate: true, keep: true, copies: Arc::default(), swapped: false }
    }

    /// Sets whether validation uses the averaged weights. Defaults to `true`.
    #[must_use]
    pub fn validate(mut self, on: bool) -> Self {
        self.validate = on;
        self
    }

    /// Sets whether the model keeps the averaged weights at the end of the fit. Defaults to `true`.
    #[must_use]
    pub fn keep(mut self, on: bool) -> Self {
        self.keep = on;
        self
    }

    fn swap(&mut self, learner: &LearnerState) -> Result<()> {
        self.copies.swap(learner)?;
        self.swapped = !self.swapped;
        Ok(())
    }
}

impl Callback for Ema {
    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "swapped": self.swapped })))
    }

    fn load_state(&mut self, learner: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        // The checkpoint that is saved after a validation has the average in the model, and the weights in the copies.
        self.swapped = state.get("swapped").and_then(serde_json::Value::as_bool).unwrap_or(false);
        if self.swapped { self.swap(learner) } else { Ok(()) }
    }

    fn order(&self) -> i32 {
        // After the step, before callbacks that save and record.
        40
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        if !(0.0..1.0).contains(&self.decay) {
            return Err(Error::invalid_argument(format!(
                "the decay of the average is {}, expected a number from 0 and below 1",
                self.decay
            ))
            .into());
        }
        self.swapped = false;
        Ok(self.copies.begin(learner)?)
    }

    fn after_step(&mut self, learner: &mut LearnerState) -> Step {
        let decay = self.decay;
        Ok(self.copies.move_towards(learner, |_| 1.0 - decay)?)
    }

    fn before_validate(&mut self, learner: &mut LearnerState) -> Step {
        if self.validate && !self.swapped {
            self.swap(learner)?;
        }
        Ok(())
    }

    fn before_epoch(&mut self, learner: &mut LearnerState) -> Step {
        if self.swapped {
            self.swap(learner)?;
        }
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        if self.swapped != self.keep {
            self.swap(learner)?;
        }
        self.swapped = false;
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        if self.swapped
            && let Err(error) = self.swap(learner)
        {
            tracing::error!("the weights before the average cannot be put back: {error}");
        }
    }
}

/// Averages the weights at the end of each epoch from a certain one on (stochastic weight averaging, Izmailov et al.,
/// 2018), and copies the average into the model at the end of the fit.
///
/// BatchNorm's statistics are averaged with the weights, as PyTorch's `AveragedModel(use_buffers=True)` does.
#[derive(Debug)]
pub struct Swa {
    from: usize,
    copies: Arc<Copies>,
}

impl Swa {
    /// Makes an average over the ends of epochs from epoch `from` on, counted from 0.
    #[must_use]
    pub fn new(from: usize) -> Self {
        Self { from, copies: Arc::default() }
    }
}

impl Callback for Swa {
    fn order(&self) -> i32 {
        40
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.copies.begin(learner)?)
    }

    fn after_train(&mut self, learner: &mut LearnerState) -> Step {
        if learner.epoch() >= self.from {
            // The first average replaces the weights with which the fit began.
            self.copies.move_towards(learner, |count| 1.0 / count as f64)?;
        }
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        if self.copies.0.lock().count > 0 {
            self.copies.swap(learner)?;
        }
        Ok(())
    }
}
