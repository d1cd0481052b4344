//! Clipping of gradients by norm and by value.

use brigade_torch::{Error, Result, gradient, gradients};
use tch::Tensor;

use crate::error::TrainError;
use crate::gradients::backward::Gradients;
use crate::gradients::norm::norm;
use crate::parameters::Parameters;

/// Options of gradient clipping by norm: for [`crate::Accelerator::clip_grad_norm`], or for [`ClipNorm::clip`] in a
/// program without an Accelerator.
///
/// ```
/// use brigade_optim::Adam;
/// use brigade_train::{ClipNorm, clip_grad_value};
/// use tch::{Kind, Tensor};
/// # use tch::nn::{self, Module};
/// # let store = nn::VarStore::new(tch::Device::Cpu);
/// let layer = nn::linear(store.root(), 4, 1, Default::default());
/// let mut optimizer = Adam::default().build(&store)?;
/// let inputs = Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu));
/// (layer.forward(&inputs) * 100.0).mean(Kind::Float).backward();
/// let before = ClipNorm { max_norm: 1.0, ..ClipNorm::default() }.clip(&optimizer)?;
/// assert!((before.double_value(&[]) - 100.0 * 5f64.sqrt()).abs() < 1e-3);
/// assert!((layer.ws.grad().square().sum(Kind::Float).double_value(&[]) - 0.8).abs() < 1e-4);
/// clip_grad_value(&optimizer, 0.1)?;
/// assert!((layer.ws.grad().max().double_value(&[]) - 0.1).abs() < 1e-6);
/// optimizer.step()?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipNorm {
    /// Maximum norm: gradients with a smaller one are left unchanged. Defaults to 1.
    pub max_norm: f64,
    /// Exponent p of the p-norm. Defaults to 2. Infinity means the largest absolute value.
    pub norm_type: f64,
    /// `true` if an infinite or NaN norm is an error, which leaves the gradients unchanged. Defaults to `false`. An
    /// overflow of fp16 is not an error: its step is skipped.
    pub error_if_nonfinite: bool,
}

impl Default for ClipNorm {
    /// Returns the limit 1 of the 2-norm. A norm that is not finite is not an error.
    fn default() -> Self {
        Self { max_norm: 1.0, norm_type: 2.0, error_if_nonfinite: false }
    }
}

/// Limits the 2-norm to this value.
impl From<f64> for ClipNorm {
    fn from(max_norm: f64) -> Self {
        Self { max_norm, ..Self::default() }
    }
}

impl ClipNorm {
    /// Scales the gradients of all parameters together so that their norm is at most
    /// [`ClipNorm::max_norm`], and returns the norm before, a scalar on their device. The values are those
    /// of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a negative or NaN option;
    /// [`crate::TrainError::GradientNorm`] if [`ClipNorm::error_if_nonfinite`] is set.
    pub fn clip(&self, parameters: &(impl Parameters + ?Sized)) -> Result<Tensor> {
        self.check()?;
        let gradients = gradients_of(parameters)?;
        let norm = gradients::norm(&gradients.iter().collect::<Vec<_>>(), self.norm_type)?;
        self.clip_to(&gradients, norm)
    }

    /// Scales gradients, given their norm, which may include those of other ranks.
    fn clip_to(&self, gradients: &[Tensor], norm: Tensor) -> Result<Tensor> {
        let borrowed: Vec<&Tensor> = gradients.iter().collect();
        if self.error_if_nonfinite {
            let norm = norm.f_double_value(&[])?;
            if !norm.is_finite() {
                return Err(TrainError::GradientNorm { norm, norm_type: self.norm_type }.into());
            }
        }
        // The same order of operations as PyTorch, without waiting for the device.
        let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(self.max_norm)?;
        gradients::multiply(&borrowed, &factor.f_clamp_max(1.0)?)?;
        Ok(norm)
    }

    fn check(&self) -> Result<()> {
        not_negative("max_norm", self.max_norm)?;
        not_negative("norm_type", self.norm_type)
    }
}

/// Clamps every value of the gradients to `[-limit, limit]`, as `torch.nn.utils.clip_grad_value_` does.
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] when `limit` is negative or NaN.
pub fn clip_grad_value(parameters: &(impl Parameters + ?Sized), limit: f64) -> Result<()> {
    not_negative("the limit", limit)?;
    let gradients = gradients_of(parameters)?;
    gradients::clamp(&gradients.iter().collect::<Vec<_>>(), limit)
}

impl Gradients {
    /// Clips the gradients by their norm once the window of accumulation ends, and returns the norm before clipping.
    /// With fp16 they are divided by the scale first.
    pub(crate) fn clip_norm(
        &self,
        parameters: &(impl Parameters + ?Sized),
        options: ClipNorm,
    ) -> Result<Option<Tensor>> {
        options.check()?;
        if !self.accumulator.sync_gradients() {
            return Ok(None);
        }
        if let Some(scaler) = self.scaler.as_ref().filter(|scaler| scaler.is_on_device()) {
            let found = scaler.unscale_later(parameters)?;
            // An overflow is not an error, and distinguishing the two needs the value.
            let overflows = options.error_if_nonfinite && found.f_double_value(&[0])? != 0.0;
            // Otherwise gradients that overflowed are multiplied by 0 or NaN, and the device skips the step that would
            // use them.
            let options = ClipNorm {
                error_if_nonfinite: options.error_if_nonfinite && !overflows,
                ..options
            };
            let norm = self.norm(parameters, options.norm_type)?;
            return options.clip_to(&gradients_of(parameters)?, norm).map(Some);
        }
        let overflowed = self.unscale(parameters)?;
        let norm = self.norm(parameters, options.norm_type)?;
        if overflowed {
            // The step will be skipped, and scaling by 0 or NaN would hide the cause.
            return Ok(Some(norm));
        }
        options.clip_to(&gradients_of(parameters)?, norm).map(Some)
    }

    /// Returns the norm of the gradients, including those of other ranks' shards.
    fn norm(&self, parameters: &(impl Parameters + ?Sized), norm_type: f64) -> Result<Tensor> {
        let (sharded, tensor) = (self.sharded.as_deref(), self.tensor.as_deref());
        let pipeline = self.pipeline.as_deref();
        if sharded.is_none() && tensor.is_none() && pipeline.is_none() {
            let gradients = gradients_of(parameters)?;
            return gradients::norm(&gradients.iter().collect::<Vec<_>>(), norm_type);
        }
        let mut handles = Vec::new();
        parameters.each(&mut |parameter| handles.push(parameter.shallow_clone()));
        norm(sharded, tensor, pipeline, &handles, norm_type)
    }

    /// Clamps the gradients once the window of accumulation ends.
    pub(crate) fn clip_value(
        &self,
        parameters: &(impl Parameters + ?Sized),
        limit: f64,
    ) -> Result<()> {
        not_negative("the limit", limit)?;
        if !self.accumulator.sync_gradients() {
            return Ok(());
        }
        match self.scaler.as_ref().filter(|scaler| scaler.is_on_device()) {
            Some(scaler) => drop(scaler.unscale_later(parameters)?),
            None => drop(self.unscale(parameters)?),
        }
        clip_grad_value(parameters, limit)
    }

    /// Divides the gradients by the scale with fp16. Returns `true` if they overflowed.
    pub(crate) fn unscale(&self, parameters: &(impl Parameters + ?Sized)) -> Result<bool> {
        let Some(scaler) = self.scaler.as_ref().filter(|_| self.accumulator.sync_gradients())
        else {
            return Ok(false);
        };
        scaler.unscale(parameters)
    }
}

fn gradients_of(parameters: &(impl Parameters + ?Sized)) -> Result<Vec<Tensor>> {
    let mut gradients = Vec::new();
    let mut failure = None;
    parameters.each(&mut |parameter| match gradient(parameter) {
        Ok(found) => gradients.extend(found),
        Err(error) => failure = Some(error),
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(gradients),
    }
}

fn not_negative(name: &str, value: f64) -> Result<()> {
    // `value < 0.0` would accept NaN.
    if value >= 0.0 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("clipping: {name} is {value}, expected 0 or more")))
}
