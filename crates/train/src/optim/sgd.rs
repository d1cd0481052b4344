//! Stochastic gradient descent.

use brigade_torch::Tensor;
use brigade_torch::fused::{self, SgdStep};

use super::{Optimizer, Rule, Trainable, check};
use crate::error::{Error, Result};

/// Stochastic gradient descent with momentum, with the arithmetic of `torch.optim.SGD`.
///
/// ```no_run
/// # use brigade_models::{Cnn, Model};
/// # use brigade_train::{Result, Sgd};
/// # fn f(model: &Model<Cnn>) -> Result<()> {
/// let optimizer = Sgd::new(0.1).momentum(0.9).nesterov(true).build(model)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Sgd {
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
}

impl Sgd {
    /// With a learning rate and nothing else.
    pub fn new(lr: f64) -> Self {
        Self { lr, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }

    /// The momentum; 0 unless set.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// The damping of the momentum; 0 unless set.
    pub fn dampening(mut self, dampening: f64) -> Self {
        self.dampening = dampening;
        self
    }

    /// The weight decay, added to the gradient; 0 unless set.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Nesterov's momentum, which needs a momentum and no dampening.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// The optimizer of a model's trained parameters.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a number out of range, or a model without a trained parameter.
    pub fn build(self, model: &impl Trainable) -> Result<Optimizer> {
        check("the learning rate", self.lr, 0.0..f64::INFINITY)?;
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        check("the weight decay", self.weight_decay, 0.0..f64::INFINITY)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::Misuse(format!(
                "Nesterov's momentum needs a momentum and no dampening, found momentum {} and \
                 dampening {}",
                self.momentum, self.dampening
            )));
        }
        let parameters = model.trainable_parameters();
        let buffers = parameters.iter().map(|_| None).collect();
        Optimizer::new(SgdRule { options: self, buffers }, parameters, self.lr, self.momentum)
    }
}

#[derive(Debug)]
struct SgdRule {
    options: Sgd,
    /// By place; made at a parameter's first step with momentum.
    buffers: Vec<Option<Tensor>>,
}

impl Rule for SgdRule {
    fn step(
        &mut self,
        places: &[usize],
        parameters: &[&Tensor],
        gradients: &[&Tensor],
        lr: f64,
        momentum: f64,
    ) -> Result<()> {
        let step = |first: bool| SgdStep {
            lr,
            momentum,
            dampening: self.options.dampening,
            weight_decay: self.options.weight_decay,
            nesterov: self.options.nesterov,
            maximize: false,
            first,
        };
        if momentum == 0.0 {
            return Ok(fused::sgd(parameters, gradients, &[], &step(false))?);
        }
        // The kernel takes all buffers of a call as new or none: a parameter whose first gradient comes
        // late is stepped in a call of its own.
        let (old, new): (Vec<usize>, Vec<usize>) =
            (0..places.len()).partition(|&index| self.buffers[places[index]].is_some());
        for &index in &new {
            self.buffers[places[index]] = Some(parameters[index].f_detach()?.f_zeros_like()?);
        }
        for (chosen, first) in [(old, false), (new, true)] {
            if chosen.is_empty() {
                continue;
            }
            let pick = |from: &[&'_ Tensor]| -> Vec<Tensor> {
                chosen.iter().map(|&index| from[index].shallow_clone()).collect()
            };
            let (parameters, gradients) = (pick(parameters), pick(gradients));
            let buffers: Vec<&Tensor> =
                chosen.iter().filter_map(|&index| self.buffers[places[index]].as_ref()).collect();
            fused::sgd(
                &parameters.iter().collect::<Vec<_>>(),
                &gradients.iter().collect::<Vec<_>>(),
                &buffers,
                &step(first),
            )?;
        }
        Ok(())
    }
}
