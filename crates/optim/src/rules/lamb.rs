//! LAMB.

use brigade_torch::flat::{self, LambStep};

use crate::error::Result;
use crate::options::{Options, WeightDecay, builder, check};
use crate::rule::{Rule, Step};

/// LAMB (You et al., 2020) in fastai's form: Adam's step, whose length for each parameter follows the
/// parameter's norm, at most `max_trust` times.
///
/// The learning rate is 0.001 unless set, the weight decay 0 and decoupled.
///
/// ```
/// use brigade_optim::Lamb;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = Lamb::default().lr(0.01).build(&model)?;
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[doc(alias = "LAMB")]
#[must_use]
pub struct Lamb {
    options: Options,
    betas: (f64, f64),
    eps: f64,
    max_trust: f64,
    maximize: bool,
}

impl Default for Lamb {
    fn default() -> Self {
        Self {
            options: Options::new(1e-3),
            betas: (0.9, 0.99),
            eps: 1e-5,
            max_trust: 10.0,
            maximize: false,
        }
        .decoupled_weight_decay(true)
    }
}

impl Lamb {
    /// The decay of the running means of the gradient and of its square; (0.9, 0.99) unless set.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = (first, second);
        self
    }

    /// Added to the denominator; 1e-5 unless set.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// The highest ratio of a parameter's norm to its update's; 10 unless set.
    pub fn max_trust(mut self, max_trust: f64) -> Self {
        self.max_trust = max_trust;
        self
    }

    /// Climbs instead of descending.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }

    fn rule(&self) -> Result<(LambRule, f64)> {
        let Self { betas: (beta1, beta2), eps, max_trust, maximize, .. } = *self;
        check("the first beta", beta1, 0.0..1.0)?;
        check("the second beta", beta2, 0.0..1.0)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the highest trust", max_trust, 0.0..f64::INFINITY)?;
        Ok((LambRule { beta2, eps, max_trust, maximize, decay: self.options.decay }, beta1))
    }
}

builder!(Lamb, decoupled);

#[derive(Debug)]
struct LambRule {
    beta2: f64,
    eps: f64,
    max_trust: f64,
    maximize: bool,
    decay: WeightDecay,
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;

impl Rule for LambRule {
    fn name(&self) -> &'static str {
        "Lamb"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("beta1")
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("max_trust", self.max_trust),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(EXP_AVG)?;
        step.fill_missing(EXP_AVG_SQ)?;
        for alike in step.by_count() {
            flat::lamb(
                &alike.parameters,
                &alike.gradients,
                &alike.list(EXP_AVG),
                &alike.list(EXP_AVG_SQ),
                &LambStep {
                    lr: step.lr,
                    steps: alike.steps,
                    eps: self.eps,
                    max_trust: self.max_trust,
                    beta1: step.momentum,
                    beta2: self.beta2,
                    weight_decay: step.weight_decay,
                    decoupled: self.decay == WeightDecay::Decoupled,
                    maximize: self.maximize,
                },
                &alike.device,
            )?;
        }
        Ok(())
    }
}
