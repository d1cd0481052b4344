//! Stochastic gradient descent.

use brigade_torch::fused::{self, SgdStep};
use brigade_torch::{Error, Result};
use tch::Tensor;

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::check;
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, Step};

builder! {
    /// Stochastic gradient descent with momentum, with the arithmetic of `torch.optim.SGD(fused=True)`.
    /// The weight decay is 0 unless set, and added to the gradient.
    ///
    /// ```
    /// use brigade_optim::Sgd;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = Sgd::new(0.1).momentum(0.9).nesterov(true).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct Sgd {
        options(lr): Options::new(lr),
        momentum: f64 = 0.0,
        /// Sets the damping of the momentum.
        dampening: f64 = 0.0,
        /// Switches Nesterov momentum on or off. Nesterov momentum needs a momentum and no dampening.
        nesterov: bool = false,
        maximize: bool = false,
    }
}

impl Sgd {
    fn rule(&self) -> Result<(SgdRule, f64)> {
        let Self { momentum, dampening, nesterov, maximize, .. } = *self;
        check("the momentum", momentum, 0.0..f64::INFINITY)?;
        check("the dampening", dampening, f64::MIN..f64::INFINITY)?;
        if nesterov && (momentum == 0.0 || dampening != 0.0) {
            return Err(Error::invalid_argument(format!(
                "Nesterov's momentum needs a momentum and no dampening, found momentum {momentum} and \
                 dampening {dampening}"
            )));
        }
        Ok((SgdRule { dampening, nesterov, maximize, decay: self.options.decay }, momentum))
    }
}

decoupled_weight_decay!(Sgd);

#[derive(Debug)]
struct SgdRule {
    dampening: f64,
    nesterov: bool,
    maximize: bool,
    decay: WeightDecay,
}

const MOMENTUM_BUFFER: usize = 0;

impl Rule for SgdRule {
    fn name(&self) -> &'static str {
        "SGD"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["momentum_buffer"]
    }

    fn counts_steps(&self) -> bool {
        false
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("momentum")
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("dampening", self.dampening),
            ("nesterov", self.nesterov.into()),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn is_optional(&self, _slot: usize) -> bool {
        true
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        let Step { chosen, parameters, gradients, lr, momentum, weight_decay, device, .. } = *step;
        let kernel = |first: bool| SgdStep {
            lr,
            momentum,
            dampening: self.dampening,
            weight_decay,
            decoupled: self.decay == WeightDecay::Decoupled,
            nesterov: self.nesterov,
            maximize: self.maximize,
            first,
        };
        if momentum == 0.0 {
            return fused::sgd(parameters, gradients, &[], &kernel(false), &device);
        }
        if step.on_device {
            // Only the device has the information whether a buffer is new, because a first step may have been skipped.
            // With a buffer of zeros the result is the gradient; with dampening the step count shows whether it is new.
            step.fill_missing(MOMENTUM_BUFFER)?;
            for alike in step.by_count() {
                let buffers = alike.list(MOMENTUM_BUFFER);
                fused::sgd(
                    &alike.parameters,
                    &alike.gradients,
                    &buffers,
                    &kernel(false),
                    &alike.device,
                )?;
            }
            return Ok(());
        }
        // The kernel treats all buffers of a call as new or none: a parameter whose first gradient comes late is
        // stepped in a separate call.
        let (old, new): (Vec<usize>, Vec<usize>) = (0..chosen.len()).partition(|&index| {
            step.states.has(chosen[index], MOMENTUM_BUFFER) && step.states.steps(chosen[index]) > 1
        });
        step.fill_missing(MOMENTUM_BUFFER)?;
        for (indices, first) in [(old, false), (new, true)] {
            if indices.is_empty() {
                continue;
            }
            let chosen: Vec<usize> = indices.iter().map(|&index| chosen[index]).collect();
            let parameters: Vec<&Tensor> = indices.iter().map(|&index| parameters[index]).collect();
            let gradients: Vec<&Tensor> = indices.iter().map(|&index| gradients[index]).collect();
            let buffers = step.states.list(&chosen, MOMENTUM_BUFFER);
            fused::sgd(&parameters, &gradients, &buffers, &kernel(first), &device)?;
        }
        Ok(())
    }
}
