//! Scaling of the loss, so that gradients of 16 bits do not vanish.

mod device;

use std::collections::HashMap;
use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_optim::{DeviceScalars, Optimizer};
use brigade_torch::{Error, ReduceOp, Result, TensorId, gradient, gradients};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use device::DeviceScale;

use crate::error::TrainError;
use crate::job::Job;
use crate::parameters::Parameters;
use crate::stateful::Stateful;

/// Options of the dynamic loss scale. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScalerOptions {
    /// Initial scale. Defaults to 65536.
    pub init_scale: f64,
    /// Factor of the scale after `growth_interval` consecutive steps without overflow. Defaults to 2.
    pub growth_factor: f64,
    /// Factor of the scale after a step whose gradients overflowed. Defaults to 0.5.
    pub backoff_factor: f64,
    /// Number of consecutive steps without overflow before the scale grows. Defaults to 2000.
    pub growth_interval: u32,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

/// The state of a [`GradScaler`] in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GradScalerState {
    /// Factor of the next loss.
    pub scale: f64,
    /// Number of steps without overflow since the scale last changed.
    pub growth_tracker: u32,
}

/// Dynamic loss scaling: multiplies the loss before the backward pass and divides the gradients after it, skips steps
/// whose gradients overflowed, and adapts the scale (Micikevicius et al., 2018; the rules of `torch.amp.GradScaler`).
///
/// With fp16 the Accelerator has a scaler, and calls it in `backward`, in clipping and in a prepared optimizer's
/// `step`. All ranks agree on whether a step is skipped. Gradients are divided once, at their first use. The scale is
/// updated at the next backward pass, so that several optimizers that step between two backward passes use the same
/// scale.
///
/// Clones are handles of the same scaler.
///
/// A loop without an Accelerator, in fp16:
///
/// ```
/// use brigade_optim::Sgd;
/// use brigade_train::{AutocastOptions, ClipNorm, GradScaler, GradScalerOptions, Precision};
/// use tch::{Device, Kind, Tensor};
/// # use tch::nn::{self, Module};
/// # let store = nn::VarStore::new(tch::Device::Cpu);
/// # let layer = nn::linear(store.root(), 4, 1, Default::default());
/// let mut optimizer = Sgd::new(0.1).build(&store)?;
/// let scaler = GradScaler::new(GradScalerOptions { init_scale: 1024.0, ..Default::default() })?;
/// let fp16 = AutocastOptions { precision: Precision::Fp16, cache: true };
/// let inputs = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
/// let mut steps = 0;
/// for scale in [1.0, f64::INFINITY, 1.0] {
///     let outputs = fp16.run(Device::Cpu, || layer.forward(&inputs))?;
///     let loss = outputs.to_kind(Kind::Float).square().mean(Kind::Float) * scale;
///     optimizer.zero_grad()?;
///     scaler.scale_loss(&loss)?.backward();
///     if !scaler.unscale(&optimizer)? {
///         ClipNorm::default().clip(&optimizer)?;
///     }
///     steps += i32::from(scaler.step(&mut optimizer)?);
/// }
/// assert_eq!((steps, scaler.scale()), (2, 512.0)); // the second step was skipped
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradScaler {
    inner: Arc<Mutex<ScalerInner>>,
}

#[derive(Debug)]
struct ScalerInner {
    options: GradScalerOptions,
    state: GradScalerState,
    job: Option<Arc<Job>>,
    /// `true` while ranks may step unequally often, so that steps send no messages.
    alone: bool,
    /// Parameters whose gradients have been divided since the last backward pass, each with the result of the check for
    /// non-finite values.
    unscaled: HashMap<TensorId, FoundInf>,
    /// `true` if an optimizer step since the last backward pass was skipped. `None` before the first.
    stepped: Option<bool>,
    skipped: bool,
    /// Scale on a GPU.
    device: Option<DeviceScale>,
    /// Iteration to which `stepped` belongs, if overflows are found on a GPU.
    settled: u64,
}

/// Smallest positive number of float16: at such a scale no finite loss overflows, so the loss itself is infinite or
/// NaN.
const SMALLEST_SCALE: f64 = 1.0 / 16_777_216.0;

impl GradScaler {
    /// Makes a scaler for one process: for a loop without an Accelerator.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a scale, a factor or an interval out of its range.
    pub fn new(options: GradScalerOptions) -> Result<Self> {
        Self::for_ranks(options, None)
    }

    /// Makes a scaler whose ranks agree on overflows.
    pub(crate) fn for_ranks(options: GradScalerOptions, job: Option<Arc<Job>>) -> Result<Self> {
        let GradScalerOptions { init_scale, growth_factor, backoff_factor, growth_interval } =
            options;
        let valid = init_scale.is_finite()
            && init_scale > 0.0
            && growth_factor.is_finite()
            && growth_factor >= 1.0
            && backoff_factor > 0.0
            && backoff_factor < 1.0
            && growth_interval > 0;
        if !valid {
            return Err(Error::invalid_argument(format!(
                "{options:?}: expected a scale above 0, a growth factor of at least 1, a backoff \
                 factor between 0 and 1, and an interval above 0"
            )));
        }
        let inner = ScalerInner {
            options,
            state: GradScalerState { scale: init_scale, growth_tracker: 0 },
            job,
            alone: false,
            unscaled: HashMap::new(),
            stepped: None,
            skipped: false,
            device: None,
            settled: 0,
        };
        Ok(Self { inner: Arc::new(Mutex::new(inner)) })
    }

    /// Returns the scale and its growth tracker as the next backward pass will use them, for a checkpoint.
    #[must_use]
    pub fn state(&self) -> GradScalerState {
        let mut inner = self.inner.lock();
        // A failed device returns an error in the next operation.
        let _ = inner.settle(0);
        match inner.stepped {
            Some(found) => inner.options.moved(inner.state, found),
            None => inner.state,
        }
    }

    /// Loads the state of a checkpoint. Must not be called between a backward pass and its step, because that loss was
    /// multiplied by the former scale.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when the scale is not a number above 0.
    pub fn load_state(&self, state: GradScalerState) -> Result<()> {
        if !(state.scale.is_finite() && state.scale > 0.0) {
            return Err(Error::invalid_argument(format!(
                "the scaler's state has the scale {}, expected a number above 0",
                state.scale
            )));
        }
        let mut inner = self.inner.lock();
        inner.state = state;
        inner.stepped = None;
        inner.unscaled.clear();
        inner.settled = 0;
        if let Some(before) = inner.device.take() {
            inner.device = Some(DeviceScale::new(state, before.scale.device())?);
        }
        Ok(())
    }

    /// Returns the options of the scaler.
    #[must_use]
    pub fn options(&self) -> GradScalerOptions {
        self.inner.lock().options
    }

    /// Returns the factor of the next loss.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state().scale
    }

    /// Multiplies the loss by the scale, in 32 bits. Call it before the backward pass. If an optimizer has stepped
    /// since the last call, the scale is updated first.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] after gradients were unscaled and before the optimizer's step;
    /// [`crate::TrainError::NotFinite`] when the scale has fallen so low that the loss itself must be infinite or
    /// NaN.
    pub fn scale_loss(&self, loss: &Tensor) -> Result<Tensor> {
        if let Some(device) = self.device(loss.device()) {
            self.before_backward_on_device(device)?;
            let scale = self.inner.lock().device.as_ref().map(|it| it.scale.shallow_clone());
            if let Some(scale) = scale {
                return Ok(loss.f_to_kind(Kind::Float)?.f_mul(&scale.f_reshape([0i64; 0])?)?);
            }
        }
        // The scale itself may be too large for a 16-bit float.
        Ok(loss.f_to_kind(Kind::Float)?.f_mul_scalar(self.before_backward()?)?)
    }

    /// Divides the gradients by the scale, to clip or read them before the step. Gradients are divided once, however
    /// often this is called. Returns `true` if one of their values, on any rank, is not finite: the step will be
    /// skipped.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn unscale(&self, parameters: &(impl Parameters + ?Sized)) -> Result<bool> {
        let mut handles = Vec::new();
        parameters.each(&mut |parameter| handles.push(parameter.shallow_clone()));
        self.unscale_tensors(&handles.iter().collect::<Vec<_>>())
    }

    /// Divides the gradients by the scale unless that was done already, and steps the optimizer unless one of its
    /// gradients has overflowed. Returns `true` if the step was made.
    ///
    /// # Errors
    /// Returns the same errors as [`Optimizer::step`], and [`brigade_torch::ErrorKind::Communication`] when a peer is
    /// gone.
    pub fn step(&self, optimizer: &mut Optimizer) -> Result<bool> {
        if self.inner.lock().device.is_some() {
            let found = optimizer.with_parameters(|parameters| self.found_on_device(parameters))?;
            let on_device = optimizer.takes_device_scalars();
            if on_device {
                let found_inf = Some(&found);
                optimizer.step_with(&DeviceScalars { found_inf, ..DeviceScalars::default() })?;
            }
            let admits = found.f_double_value(&[0])? == 0.0;
            if admits && !on_device {
                optimizer.step()?;
            }
            return Ok(admits);
        }
        let admits = optimizer.with_parameters(|parameters| self.admits(parameters))?;
        if admits {
            optimizer.step()?;
        }
        Ok(admits)
    }

    /// Returns the factor of the loss of this backward pass.
    fn before_backward(&self) -> Result<f64> {
        let mut inner = self.inner.lock();
        if let Some(found) = inner.stepped.take() {
            inner.state = inner.options.moved(inner.state, found);
            inner.unscaled.clear();
        }
        if !inner.unscaled.is_empty() {
            return Err(mixed_gradients());
        }
        if inner.state.scale < SMALLEST_SCALE {
            return Err(TrainError::NotFinite { scale: inner.state.scale }.into());
        }
        Ok(inner.state.scale)
    }

    /// Divides the gradients of those parameters that have not been divided yet. Returns `true` if one of their values,
    /// on any rank, was not finite.
    fn unscale_tensors(&self, parameters: &[&Tensor]) -> Result<bool> {
        if self.inner.lock().device.is_some() {
            return Ok(self.unscale_on_device(parameters)?.f_double_value(&[0])? != 0.0);
        }
        let mut inner = self.inner.lock();
        let waiting: Vec<&&Tensor> =
            parameters.iter().filter(|p| !inner.unscaled.contains_key(&TensorId::of(p))).collect();
        if !waiting.is_empty() {
            let gradients: Vec<Tensor> = waiting
                .iter()
                .map(|parameter| gradient(parameter))
                .filter_map(std::result::Result::transpose)
                .collect::<Result<_, _>>()?;
            let mut found = if gradients.is_empty() {
                Tensor::f_zeros([1], (Kind::Float, parameters[0].device()))?
            } else {
                let borrowed: Vec<&Tensor> = gradients.iter().collect();
                gradients::unscale(&borrowed, 1.0 / inner.state.scale)?
            };
            // Averaged gradients are equal on all ranks. Those of a model that was not prepared, or under LocalSGD, are
            // not.
            if let Some(group) =
                inner.job.as_ref().filter(|_| !inner.alone).and_then(|job| job.group())
            {
                // The gradients may be in the host's memory, while the group sends from the device.
                if let Some(job) = &inner.job {
                    found = found.f_to_device(job.device)?;
                }
                group.all_reduce(&mut found, ReduceOp::Max)?;
            }
            let found = found.f_double_value(&[0])? != 0.0;
            for parameter in
                waiting.into_iter().map(|parameter| TensorId::of(parameter)).collect::<Vec<_>>()
            {
                inner.unscaled.insert(parameter, FoundInf::Known(found));
            }
        }
        let known = |p: &&Tensor| {
            matches!(inner.unscaled.get(&TensorId::of(p)), Some(FoundInf::Known(true)))
        };
        Ok(parameters.iter().any(known))
    }

    /// Returns `true` if an optimizer's step on these parameters may be made. Called before the step.
    pub(crate) fn admits(&self, parameters: &[&Tensor]) -> Result<bool> {
        let found = self.unscale_tensors(parameters)?;
        let mut inner = self.inner.lock();
        let any = inner.stepped.unwrap_or(false) || found;
        inner.stepped = Some(any);
        inner.skipped = any;
        Ok(!found)
    }

    /// Forgets that the gradients of these parameters were divided, since they have been cleared.
    pub(crate) fn forget(&self, parameters: &[&Tensor]) {
        let mut inner = self.inner.lock();
        if inner.stepped.is_none() && !inner.device.as_ref().is_some_and(|device| device.stepped) {
            for parameter in parameters {
                inner.unscaled.remove(&TensorId::of(parameter));
            }
        }
    }

    /// Sends no messages until the guard is dropped: averaged gradients overflow on all ranks that step.
    pub(crate) fn alone(&self) -> Alone<'_> {
        self.inner.lock().alone = true;
        Alone(self)
    }

    /// Sets the scale of all ranks to the lowest one, after ranks have stepped unequally often. Every rank calls it.
    pub(crate) fn agree(&self) -> Result<()> {
        let mine = self.state();
        let job = self.inner.lock().job.clone();
        let Some(group) = job.as_ref().and_then(|job| job.group()) else {
            return Ok(());
        };
        let states: Vec<GradScalerState> = group.all_gather_object(&mine)?;
        let lowest = states.into_iter().fold(mine, |lowest, state| GradScalerState {
            scale: lowest.scale.min(state.scale),
            growth_tracker: lowest.growth_tracker.min(state.growth_tracker),
        });
        self.load_state(lowest)
    }

    /// Discards an interrupted step.
    pub(crate) fn reset(&self) {
        let mut inner = self.inner.lock();
        let _ = inner.settle(0);
        inner.unscaled.clear();
        inner.stepped = None;
        if let Some(device) = &mut inner.device {
            device.stepped = false;
        }
    }
}

/// Result of the check for non-finite gradients, made when they are divided.
#[derive(Debug)]
enum FoundInf {
    Known(bool),
    /// A float32 tensor `[1]`, non-zero if a value was not finite.
    OnDevice(Tensor),
}

impl FoundInf {
    fn on_device(&self) -> Option<Tensor> {
        match self {
            Self::OnDevice(found) => Some(found.shallow_clone()),
            Self::Known(_) => None,
        }
    }
}

fn mixed_gradients() -> Error {
    Error::invalid_argument(
        "backward after gradients were clipped or unscaled, before the optimizer's step: with fp16 that would \
         mix scaled and unscaled gradients; clip after the last backward of the step, or call zero_grad",
    )
}

/// Guard during which a scaler sends no messages.
#[derive(Debug)]
pub(crate) struct Alone<'a>(&'a GradScaler);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.inner.lock().alone = false;
    }
}

impl GradScalerOptions {
    /// Returns the state after a step, by PyTorch's rule.
    fn moved(&self, state: GradScalerState, found_inf: bool) -> GradScalerState {
        if found_inf {
            let scale = state.scale * self.backoff_factor;
            return GradScalerState { scale, growth_tracker: 0 };
        }
        let growth_tracker = state.growth_tracker + 1;
        if growth_tracker < self.growth_interval {
            return GradScalerState { growth_tracker, ..state };
        }
        let grown = state.scale * self.growth_factor;
        // PyTorch stores the scale in float32.
        let scale = if (grown as f32).is_finite() { grown } else { state.scale };
        GradScalerState { scale, growth_tracker: 0 }
    }
}

impl Stateful for GradScaler {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let (state, options) = (self.state(), self.options());
        Ok(Value::dict([
            ("scale", Value::Float(state.scale)),
            ("growth_tracker", Value::Int(state.growth_tracker.into())),
            // PyTorch's state has these fields as well. A load keeps the program's values.
            ("growth_factor", Value::Float(options.growth_factor)),
            ("backoff_factor", Value::Float(options.backoff_factor)),
            ("growth_interval", Value::Int(options.growth_interval.into())),
        ]))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        scaler_state(state).map(drop)
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.load_state(scaler_state(state).map_err(Error::invalid_argument)?)
    }
}

fn scaler_state<T>(state: &Value<T>) -> Result<GradScalerState, String> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_scale_follows_pytorchs_rule(founds in proptest::collection::vec(any::<bool>(), 0..60)) {
            let options = GradScalerOptions { growth_interval: 3, ..GradScalerOptions::default() };
            let mut state = GradScalerState { scale: 1024.0, growth_tracker: 0 };
            let (mut scale, mut good) = (1024.0f64, 0);
            for found in founds {
                state = options.moved(state, found);
                if found {
                    scale /= 2.0;
                    good = 0;
                } else {
                    good += 1;
                    if good == 3 {
                        scale *= 2.0;
                        good = 0;
                    }
                }
                prop_assert_eq!((state.scale, state.growth_tracker), (scale, good));
            }
        }
    }

    #[test]
    fn the_scale_stays_a_float32() {
        let options = GradScalerOptions { growth_interval: 1, ..GradScalerOptions::default() };
        let state = GradScalerState { scale: 2f64.powi(127), growth_tracker: 0 };
        assert_eq!(options.moved(state, false).scale, 2f64.powi(127));
    }

    #[test]
    fn invalid_options_are_refused() {
        for options in [
            GradScalerOptions { init_scale: 0.0, ..GradScalerOptions::default() },
            GradScalerOptions { backoff_factor: 1.0, ..GradScalerOptions::default() },
            GradScalerOptions { growth_factor: f64::NAN, ..GradScalerOptions::default() },
            GradScalerOptions { growth_interval: 0, ..GradScalerOptions::default() },
        ] {
            assert!(GradScaler::new(options).is_err(), "{options:?}");
        }
    }
}
