//! RMSprop.

use brigade_torch::Result;
use brigade_torch::flat::{self, RmsPropStep};

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::check;
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, Step};

builder! {
    /// RMSprop (Hinton, 2012), with the defaults and the arithmetic of `torch.optim.RMSprop`.
    ///
    /// The learning rate is 0.01 unless set, the weight decay 0 and added to the gradient.
    ///
    /// ```
    /// use brigade_optim::RmsProp;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = RmsProp::default().alpha(0.95).momentum(0.9).centered(true).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[doc(alias = "RMSprop")]
    pub struct RmsProp {
        options: Options::new(1e-2),
        /// Sets the decay rate of the squared gradient's running mean.
        alpha: f64 = 0.99,
        eps: f64 = 1e-8,
        momentum: f64 = 0.0,
        /// Divides by the root of the gradient's variance instead of its mean square.
        centered: bool = false,
        maximize: bool = false,
        /// Adds gradients to the momentum before they are divided, as fastai's RMSProp does, instead of after it.
        momentum_of_gradient: bool = false,
    }
}

impl RmsProp {
    fn rule(&self) -> Result<(RmsPropRule, f64)> {
        check("alpha", self.alpha, 0.0..1.0)?;
        check("eps", self.eps, 0.0..f64::INFINITY)?;
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        let rule = RmsPropRule {
            alpha: self.alpha,
            eps: self.eps,
            centered: self.centered,
            maximize: self.maximize,
            momentum_of_gradient: self.momentum_of_gradient,
            decay: self.options.decay,
        };
        Ok((rule, self.momentum))
    }
}

decoupled_weight_decay!(RmsProp);

#[derive(Debug)]
struct RmsPropRule {
    alpha: f64,
    eps: f64,
    centered: bool,
    maximize: bool,
    momentum_of_gradient: bool,
    decay: WeightDecay,
}

const SQUARE_AVG: usize = 0;
const GRAD_AVG: usize = 1;
const MOMENTUM_BUFFER: usize = 2;

impl Rule for RmsPropRule {
    fn name(&self) -> &'static str {
        "RMSprop"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["square_avg", "grad_avg", "momentum_buffer"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("momentum")
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("alpha", self.alpha),
            ("eps", self.eps),
            ("centered", self.centered.into()),
            ("maximize", self.maximize.into()),
            ("momentum_of_gradient", self.momentum_of_gradient.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn slot_shape(&self, slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        (slot != GRAD_AVG || self.centered).then(|| size.to_vec())
    }

    fn is_optional(&self, slot: usize) -> bool {
        slot == MOMENTUM_BUFFER
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(SQUARE_AVG)?;
        if self.centered {
            step.fill_missing(GRAD_AVG)?;
        }
        if step.momentum != 0.0 {
            step.fill_missing(MOMENTUM_BUFFER)?;
        }
        let buffers = if step.momentum == 0.0 { Vec::new() } else { step.list(MOMENTUM_BUFFER) };
        flat::rmsprop(
            step.parameters,
            step.gradients,
            &step.list(SQUARE_AVG),
            &if self.centered { step.list(GRAD_AVG) } else { Vec::new() },
            &buffers,
            &RmsPropStep {
                lr: step.lr,
                alpha: self.alpha,
                eps: self.eps,
                momentum: step.momentum,
                momentum_of_gradient: self.momentum_of_gradient,
                weight_decay: step.weight_decay,
                decoupled: self.decay == WeightDecay::Decoupled,
                maximize: self.maximize,
            },
            &step.device,
        )?;
        Ok(())
    }
}
