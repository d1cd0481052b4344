//! LARS and LARC.

use brigade_torch::flat::{self, LarcStep};

use crate::error::Result;
use crate::options::{Options, WeightDecay, builder, check};
use crate::rule::{Rule, Step};

/// LARS (You, Gitman and Ginsburg, 2017), and LARC, which clips its rate: SGD with momentum, each
/// parameter at a rate that follows the ratio of its norm to its gradient's. In fastai's form.
///
/// The weight decay is 0 unless set, and decoupled.
///
/// ```
/// use brigade_optim::Lars;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = Lars::larc(0.01).build(&model)?;
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[doc(alias = "LARS")]
#[must_use]
pub struct Lars {
    options: Options,
    momentum: f64,
    trust: f64,
    eps: f64,
    clip: bool,
    maximize: bool,
}

impl Lars {
    /// LARS with this learning rate, which the ratio may make larger or smaller.
    pub fn new(lr: f64) -> Self {
        Self {
            options: Options::new(lr),
            momentum: 0.9,
            trust: 0.02,
            eps: 1e-8,
            clip: false,
            maximize: false,
        }
        .decoupled_weight_decay(true)
    }

    /// LARC: the ratio makes the rate smaller, never larger.
    #[doc(alias = "LARC")]
    pub fn larc(lr: f64) -> Self {
        Self { clip: true, ..Self::new(lr) }
    }

    /// The momentum; 0.9 unless set.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// What the ratio of the norms is multiplied by; 0.02 unless set.
    #[doc(alias = "trust_coeff")]
    pub fn trust(mut self, trust: f64) -> Self {
        self.trust = trust;
        self
    }

    /// Added to the gradient's norm; 1e-8 unless set.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Climbs instead of descending.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }

    fn rule(&self) -> Result<(LarsRule, f64)> {
        check("the momentum", self.momentum, 0.0..f64::INFINITY)?;
        check("the trust", self.trust, 0.0..f64::INFINITY)?;
        check("eps", self.eps, 0.0..f64::INFINITY)?;
        let rule = LarsRule {
            trust: self.trust,
            eps: self.eps,
            clip: self.clip,
            maximize: self.maximize,
            decay: self.options.decay,
        };
        Ok((rule, self.momentum))
    }
}

builder!(Lars, decoupled);

#[derive(Debug)]
struct LarsRule {
    trust: f64,
    eps: f64,
    clip: bool,
    maximize: bool,
    decay: WeightDecay,
}

const MOMENTUM_BUFFER: usize = 0;

impl Rule for LarsRule {
    fn name(&self) -> &'static str {
        if self.clip { "LARC" } else { "LARS" }
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
            ("trust", self.trust),
            ("eps", self.eps),
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

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        let mut buffers = Vec::new();
        if step.momentum != 0.0 {
            step.fill_missing(MOMENTUM_BUFFER)?;
            buffers = step.list(MOMENTUM_BUFFER);
        }
        flat::larc(
            step.parameters,
            step.gradients,
            &buffers,
            &LarcStep {
                lr: step.lr,
                trust: self.trust,
                clip: self.clip,
                weight_decay: step.weight_decay,
                decoupled: self.decay == WeightDecay::Decoupled,
                eps: self.eps,
                momentum: step.momentum,
                maximize: self.maximize,
            },
            &step.device,
        )?;
        Ok(())
    }
}
