//! Measurements of a fit: the time of its parts, and the outputs of layers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use brigade_nn::ForwardHook;
use brigade_torch::Result;
use parking_lot::Mutex;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::callback::{Callback, Step};
use crate::state::LearnerState;

/// Measures the time of the parts of a training batch: waiting for data, forward with loss, backward, and the step.
///
/// On a GPU work is queued: the measured times are those of the process, and waiting for the GPU is part of the
/// operation that waits.
#[derive(Debug)]
pub struct Timing {
    last: Instant,
    times: Times,
}

/// Total times of the parts of all training batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Time of waiting for the loader and of moving batches to the device.
    pub data: Duration,
    /// Time of the forward pass and the loss.
    pub forward: Duration,
    /// Time of the backward pass, with the reduction of gradients.
    pub backward: Duration,
    /// Time of the optimizer's step.
    pub step: Duration,
    /// Time of the validation.
    pub validation: Duration,
    /// Number of training batches.
    pub batches: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self::new()
    }
}

impl Timing {
    /// Makes the callback, which has no options.
    #[must_use]
    pub fn new() -> Self {
        Self { last: Instant::now(), times: Times::default() }
    }

    /// Returns the times of the last fit.
    #[must_use]
    pub fn times(&self) -> Times {
        self.times
    }

    fn lap(&mut self) -> Duration {
        let lap = self.last.elapsed();
        self.last = Instant::now();
        lap
    }
}

impl Callback for Timing {
    fn order(&self) -> i32 {
        // First of all callbacks, so that the time of the others counts to the part that follows.
        -100
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, _learner: &mut LearnerState) -> Step {
        self.times = Times::default();
        Ok(())
    }

    fn before_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.lap();
        Ok(())
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        if learner.is_training() {
            let lap = self.lap();
            self.times.data += lap;
        }
        Ok(())
    }

    fn before_backward(&mut self, _learner: &mut LearnerState) -> Step {
        let lap = self.lap();
        self.times.forward += lap;
        Ok(())
    }

    fn after_backward(&mut self, _learner: &mut LearnerState) -> Step {
        let lap = self.lap();
        self.times.backward += lap;
        Ok(())
    }

    fn after_step(&mut self, _learner: &mut LearnerState) -> Step {
        let lap = self.lap();
        self.times.step += lap;
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        if learner.is_training() {
            self.times.batches += 1;
            self.lap();
        }
        Ok(())
    }

    fn before_validate(&mut self, _learner: &mut LearnerState) -> Step {
        self.lap();
        Ok(())
    }

    fn after_validate(&mut self, _learner: &mut LearnerState) -> Step {
        let lap = self.lap();
        self.times.validation += lap;
        Ok(())
    }
}

/// Measures the outputs of layers in training: mean, standard deviation, the share near zero, and a histogram (fastai's
/// `ActivationStats`). They show layers whose outputs vanish or explode.
#[derive(Debug)]
pub struct ActivationStats {
    layers: Vec<String>,
    every: usize,
    hooks: Vec<ForwardHook>,
    seen: Arc<Mutex<Seen>>,
    stats: Vec<LayerStats>,
}

/// The measurements of a layer, one for each measured step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerStats {
    /// Name of the layer.
    pub layer: String,
    /// Numbers of the measured training batches.
    pub steps: Vec<usize>,
    /// Means of the layer's outputs.
    pub means: Vec<f64>,
    /// Standard deviations of the layer's outputs.
    pub deviations: Vec<f64>,
    /// Shares of outputs with an absolute value below 0.05.
    pub near_zero: Vec<f64>,
    /// Counts of absolute values in [`BINS`] equal bins from 0 to [`RANGE`].
    pub histograms: Vec<Vec<f64>>,
}

/// Number of bins of a histogram.
pub const BINS: i64 = 40;
/// Upper end of the last bin of a histogram, as an absolute value.
pub const RANGE: f64 = 10.0;

/// Measurements of hooks that have not been read yet.
#[derive(Debug, Default)]
struct Seen {
    on: bool,
    outputs: Vec<(usize, Tensor)>,
}

impl ActivationStats {
    /// Makes a callback that measures these layers in every batch.
    #[must_use]
    pub fn new<S: Into<String>>(layers: impl IntoIterator<Item = S>) -> Self {
        Self {
            layers: layers.into_iter().map(Into::into).collect(),
            every: 1,
            hooks: Vec::new(),
            seen: Arc::default(),
            stats: Vec::new(),
        }
    }

    /// Sets the interval of the measurements: every `batches`-th training batch is measured. Defaults to 1.
    #[must_use]
    pub fn every(mut self, batches: usize) -> Self {
        self.every = batches.max(1);
        self
    }

    /// Returns the measurements of the last fit, on this rank.
    #[must_use]
    pub fn stats(&self) -> &[LayerStats] {
        &self.stats
    }
}

/// Returns the statistics of an output, `[3 + BINS]` on its device: mean, standard deviation, share of values near
/// zero, and histogram.
fn measured(output: &Tensor) -> Result<Tensor> {
    let output = output.f_detach()?.f_to_kind(Kind::Float)?;
    let sizes = output.f_abs()?;
    let near = sizes.f_lt(0.05)?.f_mean(Kind::Float)?;
    // `histc` chooses the range of its bins from the values: both limits are added to the values, and not counted.
    let options = (Kind::Float, output.device());
    let ends = Tensor::f_arange(2, options)?.f_mul_scalar(RANGE)?;
    let sizes = sizes.f_flatten(0, -1)?.f_clamp(0.0, RANGE)?;
    let counts = Tensor::f_cat(&[sizes, ends], 0)?.f_histc(BINS)?;
    let mut outer = counts.f_slice(0, 0, None, BINS - 1)?;
    let _ = outer.f_sub_scalar_(1.0)?;
    let single = |value: Tensor| value.f_reshape([1]);
    let parts = [
        single(output.f_mean(Kind::Float)?)?,
        single(output.f_std(false)?)?,
        single(near)?,
        counts,
    ];
    Ok(Tensor::f_cat(&parts, 0)?)
}

impl Callback for ActivationStats {
    fn order(&self) -> i32 {
        -20
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.stats = self
            .layers
            .iter()
            .map(|layer| LayerStats { layer: layer.clone(), ..LayerStats::default() })
            .collect();
        self.hooks.clear();
        for (index, layer) in self.layers.iter().enumerate() {
            let seen = Arc::clone(&self.seen);
            let look = move |_: &str, output: &Tensor| {
                let mut seen = seen.lock();
                if seen.on {
                    seen.outputs.push((index, output.detach()));
                }
                None
            };
            self.hooks.push(learner.model.forward_hook(layer, Box::new(look))?);
        }
        Ok(())
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        self.seen.lock().on =
            learner.is_training() && learner.train_iter().is_multiple_of(self.every);
        Ok(())
    }

    fn after_pred(&mut self, learner: &mut LearnerState) -> Step {
        let outputs = {
            let mut seen = self.seen.lock();
            seen.on = false;
            std::mem::take(&mut seen.outputs)
        };
        let step = learner.train_iter();
        for (index, output) in outputs {
            let numbers = tch::no_grad(|| measured(&output))?.f_to_device(Device::Cpu)?;
            let numbers = Vec::<f64>::try_from(&numbers.f_to_kind(Kind::Double)?)?;
            let stats = &mut self.stats[index];
            // A layer that is used twice in a forward is measured twice.
            if let [mean, deviation, near, histogram @ ..] = numbers.as_slice() {
                stats.steps.push(step);
                stats.means.push(*mean);
                stats.deviations.push(*deviation);
                stats.near_zero.push(*near);
                stats.histograms.push(histogram.to_vec());
            }
        }
        Ok(())
    }

    fn ended(&mut self, _learner: &mut LearnerState) {
        self.hooks.clear();
    }
}
