//! Optimizers on libtorch's fused kernels.

mod adam;
mod sgd;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use brigade_models::{Model, NamedTensor};
use brigade_torch::{Tensor, clear_gradient, gradient};

pub use adam::Adam;
pub use sgd::Sgd;

use crate::accelerator::Accelerator;
use crate::accumulate::Accumulation;
use crate::error::{Error, Result};
use crate::model::PreparedModel;
use crate::prepare::Prepare;
use crate::scaler::GradScaler;

/// Steps a model's parameters along their gradients. Made by [`Adam::build`] or [`Sgd::build`].
///
/// It holds the parameters themselves and follows them to another device. After
/// [`Accelerator::prepare`] its `step` and `zero_grad` do nothing while gradients are still being
/// added up.
pub struct Optimizer {
    rule: Box<dyn Rule>,
    parameters: Vec<NamedTensor>,
    numbers: Arc<Numbers>,
    accumulation: Option<Arc<Accumulation>>,
    /// With fp16.
    scaler: Option<GradScaler>,
    steps: u64,
}

/// The numbers that a schedule changes.
pub(crate) struct Numbers {
    lr: AtomicU64,
    momentum: AtomicU64,
}

/// One optimizer's arithmetic and state. Parameters are known by their place in the list.
trait Rule: fmt::Debug + Send {
    /// Steps the parameters at `places`, whose gradients are there.
    fn step(
        &mut self,
        places: &[usize],
        parameters: &[&Tensor],
        gradients: &[&Tensor],
        lr: f64,
        momentum: f64,
    ) -> Result<()>;
}

impl Optimizer {
    fn new(
        rule: impl Rule + 'static,
        parameters: Vec<NamedTensor>,
        lr: f64,
        momentum: f64,
    ) -> Result<Self> {
        if parameters.is_empty() {
            return Err(Error::Misuse(
                "an optimizer needs a parameter that is trained; this model has none".into(),
            ));
        }
        let numbers = Numbers {
            lr: AtomicU64::new(lr.to_bits()),
            momentum: AtomicU64::new(momentum.to_bits()),
        };
        Ok(Self {
            rule: Box::new(rule),
            parameters,
            numbers: Arc::new(numbers),
            accumulation: None,
            scaler: None,
            steps: 0,
        })
    }

    /// Changes every parameter that has a gradient; one without is left as it is, its state too. With
    /// fp16 a prepared optimizer leaves a step out whose gradients overflowed.
    ///
    /// # Errors
    /// [`Error::Torch`] when the kernels refuse.
    pub fn step(&mut self) -> Result<()> {
        if self.adding_up() || !self.scaler_admits()? {
            return Ok(());
        }
        let mut places = Vec::with_capacity(self.parameters.len());
        let mut gradients = Vec::with_capacity(self.parameters.len());
        for (place, parameter) in self.parameters.iter().enumerate() {
            if let Some(gradient) = gradient(&parameter.tensor)? {
                places.push(place);
                gradients.push(gradient);
            }
        }
        let parameters: Vec<&Tensor> =
            places.iter().map(|&place| &self.parameters[place].tensor).collect();
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        if !places.is_empty() {
            let Numbers { lr, momentum, .. } = &*self.numbers;
            let (lr, momentum) = (number(lr), number(momentum));
            self.rule.step(&places, &parameters, &gradients, lr, momentum)?;
        }
        self.steps += 1;
        Ok(())
    }

    /// Makes all gradients undefined, as PyTorch's `zero_grad(set_to_none=True)`.
    ///
    /// # Errors
    /// [`Error::Torch`] when libtorch refuses.
    pub fn zero_grad(&mut self) -> Result<()> {
        if self.adding_up() {
            return Ok(());
        }
        for parameter in &self.parameters {
            clear_gradient(&parameter.tensor)?;
        }
        if let Some(scaler) = &self.scaler {
            scaler.forget(&self.tensors());
        }
        Ok(())
    }

    /// The learning rate of the next step.
    #[must_use]
    pub fn lr(&self) -> f64 {
        number(&self.numbers.lr)
    }

    /// Sets the learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        self.numbers.lr.store(lr.to_bits(), Ordering::Relaxed);
    }

    /// Steps taken so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    pub(crate) fn numbers(&self) -> Arc<Numbers> {
        Arc::clone(&self.numbers)
    }

    /// Divides the gradients by the loss scale; false when they have overflowed.
    fn scaler_admits(&self) -> Result<bool> {
        let Some(scaler) = &self.scaler else {
            return Ok(true);
        };
        let admits = scaler.admits(&self.tensors())?;
        if let Some(accumulation) = &self.accumulation {
            accumulation.set_skipped(scaler.skipped());
        }
        Ok(admits)
    }

    fn tensors(&self) -> Vec<&Tensor> {
        self.parameters.iter().map(|parameter| &parameter.tensor).collect()
    }

    fn adding_up(&self) -> bool {
        self.accumulation.as_ref().is_some_and(|accumulation| !accumulation.sync())
    }
}

impl Numbers {
    pub(crate) fn set(&self, lr: f64, momentum: Option<f64>) {
        self.lr.store(lr.to_bits(), Ordering::Relaxed);
        if let Some(momentum) = momentum {
            self.momentum.store(momentum.to_bits(), Ordering::Relaxed);
        }
    }

    pub(crate) fn lr(&self) -> f64 {
        number(&self.lr)
    }
}

fn number(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}

impl Prepare for Optimizer {
    type Prepared = Self;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<Self> {
        self.accumulation = Some(Arc::clone(&accelerator.accumulation));
        self.scaler = accelerator.grad_scaler().cloned();
        Ok(self)
    }
}

/// Something with parameters to train: what an optimizer is built on.
pub trait Trainable {
    /// Every parameter that is not frozen, once, in the order of registration.
    fn trainable_parameters(&self) -> Vec<NamedTensor>;
}

impl<M> Trainable for Model<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        Self::trainable_parameters(self)
    }
}

impl<M> Trainable for PreparedModel<M> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        self.inner().trainable_parameters()
    }
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer")
            .field("rule", &self.rule)
            .field("parameters", &self.parameters.len())
            .field("lr", &self.lr())
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

/// Refuses learning rates and the like that can only be slips.
fn check(name: &str, value: f64, allowed: std::ops::Range<f64>) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(Error::Misuse(format!(
        "{name} is {value}, but must be at least {} and below {}",
        allowed.start, allowed.end
    )))
}
