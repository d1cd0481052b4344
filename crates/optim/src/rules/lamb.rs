//! LAMB.

use brigade_torch::Result;
use brigade_torch::flat::{self, LambStep};

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::{check, check_betas};
use crate::options::{Options, WeightDecay};
use crate::rule::{Alike, Rule, ShardedStep, Step};

builder! {
    /// LAMB (You et al., 2020) in fastai's form: Adam's step, scaled for each parameter by the ratio of the parameter's
    /// norm to the step's norm, at most `max_trust`.
    ///
    /// The learning rate is 0.001 unless set, the weight decay 0 and decoupled.
    ///
    /// ```
    /// use brigade_optim::Lamb;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = Lamb::default().lr(0.01).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[doc(alias = "LAMB")]
    pub struct Lamb {
        options: Options::decoupled(1e-3),
        betas: (f64, f64) = (0.9, 0.99),
        eps: f64 = 1e-5,
        /// Sets the highest ratio of a parameter's norm to its update's.
        max_trust: f64 = 10.0,
        maximize: bool = false,
    }
}

impl Lamb {
    fn rule(&self) -> Result<(LambRule, f64)> {
        let Self { betas: (beta1, beta2), eps, max_trust, maximize, .. } = *self;
        check_betas(self.betas)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the highest trust", max_trust, 0.0..f64::INFINITY)?;
        Ok((LambRule { beta2, eps, max_trust, maximize, decay: self.options.decay }, beta1))
    }
}

decoupled_weight_decay!(Lamb);

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

impl LambRule {
    fn numbers(&self, step: &Step<'_>, alike: &Alike<'_>) -> LambStep {
        LambStep {
            lr: step.lr,
            steps: alike.steps,
            eps: self.eps,
            max_trust: self.max_trust,
            beta1: step.momentum,
            beta2: self.beta2,
            weight_decay: step.weight_decay,
            decoupled: self.decay == WeightDecay::Decoupled,
            maximize: self.maximize,
        }
    }
}

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
                &self.numbers(step, &alike),
                &alike.device,
            )?;
        }
        Ok(())
    }

    fn steps_shards(&self) -> bool {
        true
    }

    fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
        let mut squares = step.shards().sums();
        step.each_group(|step| {
            step.fill_missing(EXP_AVG)?;
            step.fill_missing(EXP_AVG_SQ)?;
            for alike in step.by_count() {
                let own = flat::lamb_squares(
                    &alike.parameters,
                    &alike.gradients,
                    &alike.list(EXP_AVG),
                    &alike.list(EXP_AVG_SQ),
                    &self.numbers(step, &alike),
                    &alike.device,
                )?;
                squares.add_all(&alike.parameters, own);
            }
            Ok(())
        })?;
        let mut squares = squares.reduce()?;
        step.each_group(|step| {
            for alike in step.by_count() {
                flat::lamb_update(
                    &alike.parameters,
                    &alike.gradients,
                    &alike.list(EXP_AVG),
                    &alike.list(EXP_AVG_SQ),
                    &squares.take(alike.parameters.len())?,
                    &self.numbers(step, &alike),
                    &alike.device,
                )?;
            }
            Ok(())
        })
    }
}
