//! Adagrad.

use brigade_torch::Result;
use brigade_torch::fused::{self, AdagradStep};
use tch::Tensor;

use crate::builder::builder;
use crate::check::check;
use crate::options::Options;
use crate::rule::{Rule, Step};

builder! {
    /// Adagrad (Duchi, Hazan and Singer, 2011), with the defaults and the arithmetic of
    /// `torch.optim.Adagrad(fused=True)`.
    ///
    /// The learning rate is 0.01 unless set, the weight decay 0 and added to the gradient.
    ///
    /// ```
    /// use brigade_optim::Adagrad;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = Adagrad::default().lr(0.05).lr_decay(0.01).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct Adagrad {
        options: Options::new(1e-2),
        /// Sets the decay of the learning rate: a parameter's rate is divided by 1 + this times its steps so far.
        lr_decay: f64 = 0.0,
        eps: f64 = 1e-10,
        /// Sets the value that the sums of squares start from.
        initial_accumulator_value: f64 = 0.0,
        maximize: bool = false,
    }
}

impl Adagrad {
    fn rule(&self) -> Result<(AdagradRule, f64)> {
        let Self { lr_decay, eps, initial_accumulator_value: initial, maximize, .. } = *self;
        check("the decay of the learning rate", lr_decay, 0.0..f64::INFINITY)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the initial accumulator value", initial, 0.0..f64::INFINITY)?;
        Ok((AdagradRule { lr_decay, eps, initial, maximize }, 0.0))
    }
}

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

    fn is_elementwise(&self) -> bool {
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
