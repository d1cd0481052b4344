//! QHAdam.

use brigade_torch::flat::{self, QhAdamStep};
use brigade_torch::{Error, Result};

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::{check, check_betas};
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, Step};

builder! {
    /// Quasi-hyperbolic Adam (Ma and Yarats, 2019) with the arithmetic and the defaults of fastai's `QHAdam`: Adam
    /// whose numerator and denominator are weighted averages of the running means and the current gradient.
    ///
    /// The learning rate is 0.001 unless set; the weight decay is 0 unless set, and decoupled (QHAdamW). With `nus` of
    /// (1, 1) it is Adam.
    ///
    /// ```
    /// use brigade_optim::QHAdam;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = QHAdam::default().lr(0.01).nus(0.8, 1.0).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[doc(alias = "QHAdamW")]
    pub struct QHAdam {
        options: Options::decoupled(1e-3),
        betas: (f64, f64) = (0.999, 0.999),
        /// Sets the shares of the two running means, 0 to 1: the rest is that of the gradient and of its square
        /// (fastai's `nu_1` and `nu_2`).
        nus: (f64, f64) = (0.7, 1.0),
        eps: f64 = 1e-8,
        maximize: bool = false,
    }
}

impl QHAdam {
    fn rule(&self) -> Result<(QHAdamRule, f64)> {
        let Self { betas: (beta1, beta2), nus, eps, maximize, .. } = *self;
        check_betas(self.betas)?;
        for (name, nu) in [("first", nus.0), ("second", nus.1)] {
            if !(0.0..=1.0).contains(&nu) {
                return Err(Error::invalid_argument(format!(
                    "the {name} nu is {nu}, but must be at least 0 and at most 1"
                )));
            }
        }
        check("eps", eps, 0.0..f64::INFINITY)?;
        Ok((QHAdamRule { beta2, nus, eps, maximize, decay: self.options.decay }, beta1))
    }
}

decoupled_weight_decay!(QHAdam);

#[derive(Debug)]
struct QHAdamRule {
    beta2: f64,
    nus: (f64, f64),
    eps: f64,
    maximize: bool,
    decay: WeightDecay,
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;

impl Rule for QHAdamRule {
    fn name(&self) -> &'static str {
        "QHAdam"
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
            ("nu1", self.nus.0),
            ("nu2", self.nus.1),
            ("eps", self.eps),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decay.as_number()),
        ]
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(EXP_AVG)?;
        step.fill_missing(EXP_AVG_SQ)?;
        for alike in step.by_count() {
            flat::qhadam(
                &alike.parameters,
                &alike.gradients,
                &alike.list(EXP_AVG),
                &alike.list(EXP_AVG_SQ),
                &QhAdamStep {
                    lr: step.lr,
                    steps: alike.steps,
                    beta1: step.momentum,
                    beta2: self.beta2,
                    nu1: self.nus.0,
                    nu2: self.nus.1,
                    eps: self.eps,
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
