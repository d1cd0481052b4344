//! Averages of weights: exponential (EMA) and stochastic (SWA).

use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::{Error, Result};
use brigade_train::{Stateful, WeightAverage};
use parking_lot::Mutex;
use tch::Tensor;

use crate::callback::{Callback, Phases, Step};
use crate::state::LearnerState;

/// An average of a model's weights that begins with each fit, saved in checkpoints.
#[derive(Debug, Default)]
struct FitAverage(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// `None` before the first fit.
    average: Option<Arc<WeightAverage>>,
    registered: bool,
}

impl FitAverage {
    /// Begins with the model's current values.
    fn begin(self: &Arc<Self>, learner: &LearnerState) -> Result<()> {
        let average = learner.weight_average()?;
        let mut inner = self.0.lock();
        inner.average = Some(Arc::new(average));
        // Must happen only once: checkpoints identify an object by its position among all objects.
        if !std::mem::replace(&mut inner.registered, true) {
            drop(inner);
            learner.accelerator().checkpoints().register(self);
        }
        Ok(())
    }

    /// Returns the average of the current or last fit.
    fn average(&self) -> Result<Arc<WeightAverage>> {
        let average = self.0.lock().average.clone();
        average.ok_or_else(|| Error::invalid_argument("no fit has begun, so there is no average"))
    }
}

impl Stateful for FitAverage {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        self.average()?.state_dict()
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        self.average().map_err(|error| error.to_string())?.check_state_dict(state)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.average()?.load_state_dict(state)
    }

    fn shards(&self) -> Vec<(String, Tensor)> {
        self.average().map(|average| average.shards()).unwrap_or_default()
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
    average: Arc<FitAverage>,
    swapped: bool,
}

impl Ema {
    /// Makes an average in which the past has this weight, such as 0.999.
    #[must_use]
    pub fn new(decay: f64) -> Self {
        Self { decay, validate: true, keep: true, average: Arc::default(), swapped: false }
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

    fn swap(&mut self) -> Result<()> {
        self.average.average()?.swap()?;
        self.swapped = !self.swapped;
        Ok(())
    }
}

impl Callback for Ema {
    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "swapped": self.swapped })))
    }

    fn load_state(&mut self, _learner: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        // The checkpoint that is saved after a validation has the average in the model, and the weights in the copies.
        self.swapped = state.get("swapped").and_then(serde_json::Value::as_bool).unwrap_or(false);
        if self.swapped { self.swap() } else { Ok(()) }
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
        Ok(self.average.begin(learner)?)
    }

    fn after_step(&mut self, _learner: &mut LearnerState) -> Step {
        Ok(self.average.average()?.update(self.decay)?)
    }

    fn before_validate(&mut self, _learner: &mut LearnerState) -> Step {
        if self.validate && !self.swapped {
            self.swap()?;
        }
        Ok(())
    }

    fn before_epoch(&mut self, _learner: &mut LearnerState) -> Step {
        if self.swapped {
            self.swap()?;
        }
        Ok(())
    }

    fn after_fit(&mut self, _learner: &mut LearnerState) -> Step {
        if self.swapped != self.keep {
            self.swap()?;
        }
        self.swapped = false;
        Ok(())
    }

    fn ended(&mut self, _learner: &mut LearnerState) {
        if self.swapped
            && let Err(error) = self.swap()
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
    average: Arc<FitAverage>,
}

impl Swa {
    /// Makes an average over the ends of epochs from epoch `from` on, counted from 0.
    #[must_use]
    pub fn new(from: usize) -> Self {
        Self { from, average: Arc::default() }
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
        Ok(self.average.begin(learner)?)
    }

    fn after_train(&mut self, learner: &mut LearnerState) -> Step {
        if learner.epoch() >= self.from {
            // The first average replaces the weights with which the fit began.
            self.average.average()?.update_mean()?;
        }
        Ok(())
    }

    fn after_fit(&mut self, _learner: &mut LearnerState) -> Step {
        if self.average.average()?.updates() > 0 {
            self.average.average()?.swap()?;
        }
        Ok(())
    }
}
