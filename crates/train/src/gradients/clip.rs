//! Clipping of gradients by norm and by value.

use brigade_nn::NamedTensor;
use brigade_optim::Optimizer;
use brigade_torch::{Tensor, gradient, gradients};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::model::PreparedModels;

/// Parameters whose gradients can be clipped or unscaled: those of a prepared model or several, of an
/// optimizer, or of a list.
pub trait Parameters {
    /// Calls `f` with each parameter that is trained.
    fn each(&self, f: &mut dyn FnMut(&Tensor));
}

impl<P: PreparedModels + ?Sized> Parameters for P {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.each_parameter(f);
    }
}

impl Parameters for [NamedTensor] {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|parameter| f(&parameter.tensor));
    }
}

impl Parameters for Vec<NamedTensor> {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.as_slice().each(f);
    }
}

/// The parameters that it steps.
impl Parameters for Optimizer {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.with_parameters(|parameters| parameters.iter().for_each(|parameter| f(parameter)));
    }
}

/// How gradients are clipped by their norm: by [`Accelerator::clip_grad_norm_with`], or by
/// [`ClipNorm::clip`] in a program without an Accelerator.
///
/// ```
/// use brigade_train::{Adam, ClipNorm, Kind, Tensor, clip_grad_value};
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
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipNorm {
    /// The largest norm that is left unchanged.
    pub max_norm: f64,
    /// The p of the norm; infinity is the largest absolute value.
    pub norm_type: f64,
    /// Whether a norm that is infinite or NaN is an error, which leaves the gradients unchanged. An overflow
    /// of fp16 is none: its step is skipped.
    pub error_if_nonfinite: bool,
}

impl Default for ClipNorm {
    /// The 2-norm, at most 1; a norm that is not finite is not an error.
    fn default() -> Self {
        Self { max_norm: 1.0, norm_type: 2.0, error_if_nonfinite: false }
    }
}

impl ClipNorm {
    /// Scales the gradients of all parameters together so that their norm is at most
    /// [`ClipNorm::max_norm`], and returns the norm before, a scalar on their device. The values are those
    /// of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or NaN option; [`Error::GradientNorm`] as
    /// [`ClipNorm::error_if_nonfinite`] says.
    pub fn clip(&self, parameters: &(impl Parameters + ?Sized)) -> Result<Tensor> {
        self.check()?;
        let gradients = gradients_of(parameters)?;
        let borrowed: Vec<&Tensor> = gradients.iter().collect();
        let norm = gradients::norm(&borrowed, self.norm_type)?;
        if self.error_if_nonfinite {
            let norm = norm.f_double_value(&[])?;
            if !norm.is_finite() {
                return Err(Error::GradientNorm { norm, norm_type: self.norm_type });
            }
        }
        // PyTorch's order, without waiting for the device.
        let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(self.max_norm)?;
        gradients::multiply(&borrowed, &factor.f_clamp_max(1.0)?)?;
        Ok(norm)
    }

    fn norm(&self, parameters: &(impl Parameters + ?Sized)) -> Result<Tensor> {
        let gradients = gradients_of(parameters)?;
        Ok(gradients::norm(&gradients.iter().collect::<Vec<_>>(), self.norm_type)?)
    }

    fn check(&self) -> Result<()> {
        not_negative("max_norm", self.max_norm)?;
        not_negative("norm_type", self.norm_type)
    }
}

/// Clamps every value of the gradients to `[-limit, limit]`, as `torch.nn.utils.clip_grad_value_`.
///
/// # Errors
/// [`Error::InvalidArgument`] when `limit` is negative or NaN.
pub fn clip_grad_value(parameters: &(impl Parameters + ?Sized), limit: f64) -> Result<()> {
    not_negative("the limit", limit)?;
    let gradients = gradients_of(parameters)?;
    Ok(gradients::clamp(&gradients.iter().collect::<Vec<_>>(), limit)?)
}

impl Accelerator {
    /// Scales the gradients of all parameters together so that their 2-norm is at most `max_norm`, and
    /// returns the norm before, a scalar on their device.
    ///
    /// While gradients are still being added up it does nothing and returns `None`. With fp16 the
    /// gradients are divided by the scale first.
    ///
    /// ```
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_train::{Accelerator, Tensor};
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 2))?)?;
    /// # let loss = model.forward(&Tensor::ones([1, 4], (tch::Kind::Float, tch::Device::Cpu)))?.sum(None);
    /// accelerator.backward(&loss)?;
    /// if let Some(norm) = accelerator.clip_grad_norm(&model, 1.0)? {
    ///     // What it was: each of 8 weights and 2 biases has a gradient of 1.
    ///     assert!((norm.double_value(&[]) - 10_f64.sqrt()).abs() < 1e-6);
    /// }
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `max_norm` is negative or NaN.
    pub fn clip_grad_norm(
        &self,
        parameters: &(impl Parameters + ?Sized),
        max_norm: f64,
    ) -> Result<Option<Tensor>> {
        let options = ClipNorm { max_norm, ..ClipNorm::default() };
        self.clip_grad_norm_with(parameters, options)
    }

    /// As [`Accelerator::clip_grad_norm`] with any p-norm, and with an error for gradients that are not
    /// finite. The values are those of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that make no sense; [`Error::GradientNorm`], on every rank, for a
    /// norm that is not finite.
    pub fn clip_grad_norm_with(
        &self,
        parameters: &(impl Parameters + ?Sized),
        options: ClipNorm,
    ) -> Result<Option<Tensor>> {
        options.check()?;
        if !self.sync_gradients() {
            return Ok(None);
        }
        if let Some(scaler) = self.grad_scaler().filter(|scaler| scaler.is_on_device()) {
            let found = scaler.unscale_later(parameters)?;
            // An overflow is not an error, and to tell it from one takes its value.
            let overflows = options.error_if_nonfinite && found.f_double_value(&[0])? != 0.0;
            // Else gradients that overflowed are multiplied by 0 or NaN, and the step that would use them is left
            // out on the device.
            let options = ClipNorm {
                error_if_nonfinite: options.error_if_nonfinite && !overflows,
                ..options
            };
            return options.clip(parameters).map(Some);
        }
        if self.unscale_gradients(parameters)? {
            // The step will be skipped, and scaling by 0 or NaN would hide why.
            return options.norm(parameters).map(Some);
        }
        options.clip(parameters).map(Some)
    }

    /// Clamps every value of the gradients to `[-limit, limit]`. Does nothing while gradients are still
    /// being added up; with fp16 the gradients are divided by the scale first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `limit` is negative or NaN.
    pub fn clip_grad_value(
        &self,
        parameters: &(impl Parameters + ?Sized),
        limit: f64,
    ) -> Result<()> {
        not_negative("the limit", limit)?;
        if !self.sync_gradients() {
            return Ok(());
        }
        match self.grad_scaler().filter(|scaler| scaler.is_on_device()) {
            Some(scaler) => drop(scaler.unscale_later(parameters)?),
            None => drop(self.unscale_gradients(parameters)?),
        }
        clip_grad_value(parameters, limit)
    }

    /// With fp16, divides the gradients by the scale now, to look at them or change them before the step;
    /// else they are what they are. Clipping does it by itself. Returns whether the gradients overflowed,
    /// so that the step will be left out; on a GPU it waits for that. Clipping does not.
    ///
    /// # Errors
    /// [`Error::Torch`] when a peer is gone.
    pub fn unscale_gradients(&self, parameters: &(impl Parameters + ?Sized)) -> Result<bool> {
        let Some(scaler) = self.grad_scaler().filter(|_| self.sync_gradients()) else {
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
        Some(error) => Err(error.into()),
        None => Ok(gradients),
    }
}

fn not_negative(name: &str, value: f64) -> Result<()> {
    // `value < 0.0` would let NaN through.
    if value >= 0.0 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("clipping: {name} is {value}, expected 0 or more")))
}
