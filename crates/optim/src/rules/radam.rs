//! RAdam, and Ranger, which is based on it.

use brigade_torch::Result;
use brigade_torch::flat::{self, RectifiedStep};

use crate::builder::{builder, decoupled_weight_decay};
use crate::check::{check, check_betas};
use crate::lookahead::Lookahead;
use crate::options::{Options, WeightDecay};
use crate::rule::{Rule, Step};

builder! {
    /// Rectified Adam (Liu et al., 2020): Adam, but with a plain momentum step as long as too few steps have
    /// contributed to the mean of the squared gradients.
    ///
    /// [`RAdam::default`] has the defaults and the arithmetic of `torch.optim.RAdam`, [`RAdam::fastai`] those of
    /// fastai, and [`RAdam::ranger`] is fastai's Ranger. The learning rate defaults to 0.001.
    ///
    /// ```
    /// use brigade_optim::RAdam;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let optimizer = RAdam::ranger().lr(8e-3).build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct RAdam {
        options: Options::new(1e-3),
        betas: (f64, f64) = (0.9, 0.999),
        eps: f64 = 1e-8,
        maximize: bool = false,
    }
    private {
        eps_of: EpsOf = EpsOf::Mean,
    }
}

/// The root to which `eps` is added.
#[derive(Debug, Clone, Copy, PartialEq)]
enum EpsOf {
    /// Epsilon is added to the root of the running mean (PyTorch).
    Mean,
    /// Epsilon is added to the root of the bias-corrected mean (fastai).
    Unbiased,
}

impl RAdam {
    /// Returns the settings of fastai's RAdam: betas (0.9, 0.99), eps 1e-5 added to the root of the bias-corrected
    /// mean, and decoupled weight decay.
    pub fn fastai() -> Self {
        Self { betas: (0.9, 0.99), eps: 1e-5, eps_of: EpsOf::Unbiased, ..Self::default() }
            .decoupled_weight_decay(true)
    }

    /// Returns the settings of fastai's Ranger: RAdam with betas (0.95, 0.99), eps 1e-6, weight decay 0.01, and
    /// [`Lookahead`] every 6 steps with alpha 0.5.
    #[doc(alias = "Ranger")]
    pub fn ranger() -> Self {
        Self { betas: (0.95, 0.99), eps: 1e-6, ..Self::fastai() }
            .weight_decay(0.01)
            .lookahead(Lookahead::default())
    }

    fn rule(&self) -> Result<(RAdamRule, f64)> {
        let Self { betas: (beta1, beta2), eps, eps_of, maximize, .. } = *self;
        check_betas(self.betas)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        Ok((RAdamRule { beta2, eps, eps_of, maximize, decay: self.options.decay }, beta1))
    }
}

decoupled_weight_decay!(RAdam);

#[derive(Debug)]
struct RAdamRule {
    beta2: f64,
    eps: f64,
    eps_of: EpsOf,
    maximize: bool,
    decay: WeightDecay,
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;

impl Rule for RAdamRule {
    fn name(&self) -> &'static str {
        "RAdam"
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
            ("eps_of_unbiased", f64::from(u8::from(self.eps_of == EpsOf::Unbiased))),
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
            flat::rectified(
                &alike.parameters,
                &alike.gradients,
                &alike.list(EXP_AVG),
                &alike.list(EXP_AVG_SQ),
                &RectifiedStep {
                    lr: step.lr,
                    steps: alike.steps,
                    beta1: step.momentum,
                    beta2: self.beta2,
                    eps: self.eps,
                    eps_of_unbiased: self.eps_of == EpsOf::Unbiased,
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
