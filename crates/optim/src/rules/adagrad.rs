//! Adagrad.

use brigade_torch::Tensor;
use brigade_torch::fused::{self, AdagradStep};

use crate::error::Result;
use crate::options::{Options, builder, check};
use crate::rule::{Rule, Step};

/// Adagrad (Duchi, Hazan and Singer, 2011), with the defaults and the arithmetic of
/// `torch.optim.Adagrad`, on libtorch's fused kernels.
///
/// The learning rate is 0.01 unless set, the weight decay 0 and added to the gradient.
///
/// ```
/// use brigade_optim::Adagrad;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = Adagrad::default().lr(0.05).lr_decay(0.01).build(&model)?;
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct Adagrad {
    options: Options,
    lr_decay: f64,
    eps: f64,
    initial_accumulator_value: f64,
    maximize: bool,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            options: Options::new(1e-2),
            lr_decay: 0.0,
            eps: 1e-10,
            initial_accumulator_value: 0.0,
            maximize: false,
        }
    }
}

impl Adagrad {
    /// A parameter's learning rate is divided by 1 + this times its steps so far; 0 unless set.
    pub fn lr_decay(mut self, lr_decay: f64) -> Self {
        self.lr_decay = lr_decay;
        self
    }

    /// Added to the denominator; 1e-10 unless set.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// What the sums of squares start from; 0 unless set.
    pub fn initial_accumulator_value(mut self, value: f64) -> Self {
        self.initial_accumulator_value = value;
        self
    }

    /// Climbs instead of descending.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }

    fn rule(&self) -> Result<(AdagradRule, f64)> {
        let Self { lr_decay, eps, initial_accumulator_value: initial, maximize, .. } = *self;
        check("the decay of the learning rate", lr_decay, 0.0..f64::INFINITY)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the initial accumulator value", initial, 0.0..f64::INFINITY)?;
        Ok((AdagradRule { lr_decay, eps, initial, maximize }, 0.0))
    }
}

builder!(Adagrad);

#[derive(Debug)]
struct AdagradRule {
    lr_decay: f64,
    eps: f64,
    initial: f64,
    maximize: bool,
}

const SUM: usize = 0;

impl Rule for AdagradRule {
    fn name(&self) -> &'static str {
        "Adagrad"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        None
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr_decay", self.lr_decay),
            ("eps", self.eps),
            ("initial_accumulator_value", self.initial),
            ("maximize", self.maximize.into()),
        ]
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing_with(SUM, self.initial)?;
        let steps = step.step_tensors()?;
        fused::adagrad(
            step.parameters,
            step.gradients,
            &step.list(SUM),
            &steps.iter().collect::<Vec<&Tensor>>(),
            &AdagradStep {
                lr: step.lr,
                lr_decay: self.lr_decay,
                weight_decay: step.weight_decay,
                eps: self.eps,
                maximize: self.maximize,
            },
            &step.device,
        )?;
        Ok(())
    }
}
