//! Mixed precision.

use std::sync::Arc;

use brigade_torch::Result;

use super::Accelerator;
use crate::gradients::backward::Gradients;
use crate::gradients::loss_check::{LossCheck, LossCheckOptions};
use crate::precision::scaler::GradScaler;
use crate::precision::{MathOptions, Numerics, NumericsOptions, Precision};

impl Accelerator {
    /// Returns the floating-point type in which prepared models compute.
    #[must_use]
    pub fn mixed_precision(&self) -> Precision {
        self.numerics.autocast.precision
    }

    /// Returns this Accelerator with another precision. The loss scale of fp16 is reset.
    pub(super) fn with_mixed_precision(&self, precision: Precision) -> Result<Self> {
        let (before, scaler) = (*self.numerics, &self.gradients.scaler);
        let mut options = self.numerics_options();
        options.precision = Some(precision);
        let sharded = match &self.gradients.sharded {
            Some(sharded) => Some(Arc::new(sharded.with_precision(&mut options)?)),
            None => None,
        };
        let job = &self.processes.job;
        let had_scaler = scaler.is_some();
        let (numerics, scaler) = options.decide(job, before.tf32)?;
        let loss_check = match &scaler {
            Some(scaler) => {
                self.checkpoints.register(scaler);
                None
            }
            None if had_scaler => {
                let options = LossCheckOptions::default();
                let job = &self.gradients.processes.job;
                Some(Arc::new(LossCheck::new(job, options, sharded.clone())))
            }
            None => self.gradients.loss_check.clone(),
        };
        let gradients = Gradients { scaler, loss_check, sharded, ..self.gradients.clone() };
        Ok(Self { numerics: Arc::new(numerics), gradients, ..self.clone() })
    }

    /// Returns the options with which this Accelerator's precision was decided.
    pub(super) fn numerics_options(&self) -> NumericsOptions {
        let numerics = &*self.numerics;
        NumericsOptions {
            precision: Some(numerics.autocast.precision),
            cache: numerics.autocast.cache,
            float32_outputs: numerics.float32_outputs,
            output: numerics.output,
            channels_last: numerics.channels_last,
            math: MathOptions::default(),
            scaler: self.grad_scaler().map(GradScaler::options).unwrap_or_default(),
        }
    }

    /// Returns this Accelerator with another memory format of convolutional models.
    pub(super) fn with_channels_last(&self, on: bool) -> Self {
        let numerics = Numerics { channels_last: Some(on), ..*self.numerics };
        Self { numerics: Arc::new(numerics), ..self.clone() }
    }

    /// Runs the body with this Accelerator's autocast: for parts of a loss outside of a prepared model's forward, which
    /// uses autocast by itself.
    ///
    /// ```
    /// use brigade_train::{Accelerator, Precision};
    /// use tch::{Kind, Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).mixed_precision(Precision::Bf16).build()?;
    /// let a = Tensor::ones([4, 4], (Kind::Float, accelerator.device()));
    /// let product = accelerator.autocast(|| a.matmul(&a))?;
    /// assert_eq!(product.kind(), Kind::BFloat16);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when the device has no autocast.
    pub fn autocast<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        self.numerics.autocast.run(self.device(), body)
    }

    /// Returns the loss scaler. `None` unless the precision is fp16.
    #[must_use]
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        self.gradients.scaler.as_ref()
    }
}
