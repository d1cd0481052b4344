//! Gradients brought within bounds.

use brigade_nn::NamedTensor;
use brigade_torch::{Tensor, gradient, gradients};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::model::PreparedModels;

/// Something with parameters whose gradients can be clipped: a prepared model, several, or a list of
/// tensors.
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

/// How [`Accelerator::clip_grad_norm_with`] clips.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipNorm {
    /// The largest norm that is left as it is.
    pub max_norm: f64,
    /// The p of the norm; infinity is the largest absolute value. 2 in [`Accelerator::clip_grad_norm`].
    pub norm_type: f64,
    /// An infinite norm, or one that is not a number, is an error and leaves the gradients as they are;
    /// but not an overflow of fp16, whose step will be left out. False there.
    pub error_if_nonfinite: bool,
}

impl Accelerator {
    /// Scales the gradients of all parameters together so that their 2-norm is at most `max_norm`, and
    /// returns the norm before, a scalar on their device.
    ///
    /// While gradients are still being added up it does nothing and returns `None`. With fp16 the
    /// gradients are divided by the scale first.
    ///
    /// ```no_run
    /// # use brigade_models::Cnn;
    /// # use brigade_nn::Model;
    /// # use brigade_train::{Accelerator, PreparedModel, Result};
    /// # fn f(accelerator: &Accelerator, model: &PreparedModel<Cnn>) -> Result<()> {
    /// // after backward, before the optimizer's step
    /// if let Some(norm) = accelerator.clip_grad_norm(model, 1.0)? {
    ///     accelerator.println(norm.double_value(&[]));
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Misuse`] when `max_norm` is negative or not a number.
    pub fn clip_grad_norm(
        &self,
        parameters: &(impl Parameters + ?Sized),
        max_norm: f64,
    ) -> Result<Option<Tensor>> {
        let options = ClipNorm { max_norm, norm_type: 2.0, error_if_nonfinite: false };
        self.clip_grad_norm_with(parameters, options)
    }

    /// As [`Accelerator::clip_grad_norm`] with any p-norm, and with an error for gradients that are not
    /// finite. The values are those of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options that make no sense; [`Error::GradientNorm`], on every rank, for a
    /// norm that is not finite.
    pub fn clip_grad_norm_with(
        &self,
        parameters: &(impl Parameters + ?Sized),
        options: ClipNorm,
    ) -> Result<Option<Tensor>> {
        let ClipNorm { max_norm, norm_type, error_if_nonfinite } = options;
        not_negative("max_norm", max_norm)?;
        not_negative("norm_type", norm_type)?;
        if !self.sync_gradients() {
            return Ok(None);
        }
        let overflow = self.unscale_gradients(parameters)?;
        let gradients = gradients_of(parameters)?;
        let borrowed: Vec<&Tensor> = gradients.iter().collect();
        let norm = gradients::norm(&borrowed, norm_type)?;
        if overflow {
            // The step will be left out, and scaling by 0 or NaN would hide why.
            return Ok(Some(norm));
        }
        if error_if_nonfinite {
            let norm = norm.f_double_value(&[])?;
            if !norm.is_finite() {
                return Err(Error::GradientNorm { norm, norm_type });
            }
        }
        // PyTorch's order, without waiting for the device.
        let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?;
        gradients::multiply(&borrowed, &factor.f_clamp_max(1.0)?)?;
        Ok(Some(norm))
    }

    /// Brings every value of the gradients into `[-limit, limit]`. Does nothing while gradients are still
    /// being added up; with fp16 the gradients are divided by the scale first.
    ///
    /// # Errors
    /// [`Error::Misuse`] when `limit` is negative or not a number.
    pub fn clip_grad_value(
        &self,
        parameters: &(impl Parameters + ?Sized),
        limit: f64,
    ) -> Result<()> {
        not_negative("the limit", limit)?;
        if !self.sync_gradients() {
            return Ok(());
        }
        self.unscale_gradients(parameters)?;
        let gradients = gradients_of(parameters)?;
        Ok(gradients::clamp(&gradients.iter().collect::<Vec<_>>(), limit)?)
    }

    /// With fp16, divides the gradients by the scale now, to look at them or change them before the step;
    /// else they are what they are. Clipping does it by itself. Returns whether the gradients overflowed,
    /// so that the step will be left out.
    ///
    /// # Errors
    /// [`Error::Torch`] when a peer is gone.
    pub fn unscale_gradients(&self, parameters: &(impl Parameters + ?Sized)) -> Result<bool> {
        let Some(scaler) = self.grad_scaler().filter(|_| self.sync_gradients()) else {
            return Ok(false);
        };
        let mut handles = Vec::new();
        parameters.each(&mut |parameter| handles.push(parameter.shallow_clone()));
        scaler.unscale(&handles.iter().collect::<Vec<_>>())
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
    // Not `value < 0.0`: that lets what is not a number through.
    if value >= 0.0 {
        return Ok(());
    }
    Err(Error::Misuse(format!("clipping: {name} is {value}, expected 0 or more")))
}
