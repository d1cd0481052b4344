//! RAdam, and Ranger made of it.

use brigade_torch::flat::{self, RectifiedStep};

use crate::error::Result;
use crate::lookahead::Lookahead;
use crate::options::{Options, WeightDecay, builder, check};
use crate::rule::{Rule, Step};

/// Rectified Adam (Liu et al., 2020): Adam, but a plain step with momentum as long as the mean of the
/// squared gradients rests on too few of them.
///
/// [`RAdam::default`] has the defaults and the arithmetic of `torch.optim.RAdam`, [`RAdam::fastai`] those
/// of fastai, and [`RAdam::ranger`] is fastai's Ranger. The learning rate is 0.001 unless set.
///
/// ```
/// use brigade_optim::RAdam;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = RAdam::ranger().lr(8e-3).build(&model)?;
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct RAdam {
    options: Options,
    betas: (f64, f64),
    eps: f64,
    eps_of: EpsOf,
    maximize: bool,
}

/// Which root `eps` is added to.
#[derive(Debug, Clone, Copy, PartialEq)]
enum EpsOf {
    /// That of the running mean (PyTorch).
    Mean,
    /// That of the mean without its bias (fastai).
    Unbiased,
}

impl Default for RAdam {
    fn default() -> Self {
        Self {
            options: Options::new(1e-3),
            betas: (0.9, 0.999),
            eps: 1e-8,
            eps_of: EpsOf::Mean,
            maximize: false,
        }
    }
}

impl RAdam {
    /// fastai's RAdam: betas of (0.9, 0.99), eps of 1e-5 beside the root of the unbiased mean, and
    /// decoupled weight decay.
    pub fn fastai() -> Self {
        Self { betas: (0.9, 0.99), eps: 1e-5, eps_of: EpsOf::Unbiased, ..Self::default() }
            .decoupled_weight_decay(true)
    }

    /// Ranger as in fastai: its RAdam with betas of (0.95, 0.99), eps of 1e-6, weight decay of 0.01, and
    /// [`Lookahead`] every 6 steps, half of the way.
    #[doc(alias = "Ranger")]
    pub fn ranger() -> Self {
        Self { betas: (0.95, 0.99), eps: 1e-6, ..Self::fastai() }
            .weight_decay(0.01)
            .lookahead(Lookahead::default())
    }

    /// The decay of the running means of the gradient and of its square; (0.9, 0.999) unless set.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = (first, second);
        self
    }

    /// Added to the denominator; 1e-8 unless set.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Climbs instead of descending.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }

    fn rule(&self) -> Result<(RAdamRule, f64)> {
        let Self { betas: (beta1, beta2), eps, eps_of, maximize, .. } = *self;
        check("the first beta", beta1, 0.0..1.0)?;
        check("the second beta", beta2, 0.0..1.0)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        Ok((RAdamRule { beta2, eps, eps_of, maximize, decay: self.options.decay }, beta1))
    }
}

builder!(RAdam, decoupled);

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

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(EXP_AVG)?;
        step.fill_missing(EXP_AVG_SQ)?;
        let (l2, keep) = self.decay.split(step.lr, step.weight_decay);
        let (lr, beta1, beta2) = (step.lr, step.momentum, self.beta2);
        step.each(|parameter, gradient, slots| {
            let steps = slots.steps() as f64;
            let bias1 = 1.0 - beta1.powf(steps);
            let bias2 = 1.0 - beta2.powf(steps);
            let rectification = rectification(beta2, steps);
            let size = lr / bias1 * rectification.unwrap_or(1.0);
            // The same quotient, but for where eps stands in it.
            let (size, root_scale) = match (rectification, self.eps_of) {
                (Some(_), EpsOf::Mean) => (size * bias2.sqrt(), 1.0),
                (Some(_), EpsOf::Unbiased) => (size, 1.0 / bias2.sqrt()),
                (None, _) => (size, 1.0),
            };
            let kernel = RectifiedStep {
                size,
                adaptive: rectification.is_some(),
                root_scale,
                eps: self.eps,
                beta1,
                beta2,
                l2,
                keep,
                maximize: self.maximize,
            };
            let (mean, square) = (slots.require(EXP_AVG)?, slots.require(EXP_AVG_SQ)?);
            flat::rectified(parameter, gradient, mean, square, &kernel)?;
            Ok(())
        })
    }
}

/// The factor that makes the step's variance constant; None while the approximated length of the
/// average is 5 or less.
fn rectification(beta2: f64, steps: f64) -> Option<f64> {
    let longest = 2.0 / (1.0 - beta2) - 1.0;
    let power = beta2.powf(steps);
    let length = longest - 2.0 * steps * power / (1.0 - power);
    (length > 5.0).then(|| {
        ((length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length))
            .sqrt()
    })
}
