//! Adam and AdamW.

use brigade_torch::Result;
use brigade_torch::fused::{self, AdamStep};
use tch::Tensor;

use crate::builder::builder;
use crate::check::{check, check_betas};
use crate::options::Options;
use crate::rule::{Rule, Step};

builder! {
    /// Adam (Kingma and Ba, 2015), with the defaults and the arithmetic of
    /// `torch.optim.Adam(fused=True)`.
    ///
    /// The learning rate is 0.001 unless set; the weight decay is 0 unless set, and added to the gradient.
    ///
    /// ```
    /// use brigade_optim::Adam;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = Adam::default().lr(5e-3).build(&model)?;
    /// assert_eq!(optimizer.lr(), 5e-3);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct Adam {
        options: Options::new(1e-3),
        betas: (f64, f64) = (0.9, 0.999),
        eps: f64 = 1e-8,
        /// Divides by the maximum of all second moments so far (Reddi et al., 2018).
        amsgrad: bool = false,
        maximize: bool = false,
    }
}

impl Adam {
    fn rule(&self) -> Result<(AdamRule, f64)> {
        let Self { betas, eps, amsgrad, maximize, .. } = *self;
        AdamRule { beta2: betas.1, eps, amsgrad, maximize, decoupled: false }.checked(betas)
    }
}

builder! {
    /// AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, with the defaults and the
    /// arithmetic of `torch.optim.AdamW(fused=True)`.
    ///
    /// The learning rate is 0.001 unless set; the weight decay is 0.01 unless set, and shrinks the weight by
    /// the learning rate times itself before each step.
    ///
    /// ```
    /// use brigade_optim::AdamW;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer =
    ///     AdamW::default().weight_decay(0.1).no_decay_on_norms_and_biases(true).build(&model)?;
    /// let decays: Vec<f64> = optimizer.groups().iter().map(|group| group.weight_decay()).collect();
    /// assert_eq!(decays, [0.1, 0.0]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct AdamW {
        options: Options { weight_decay: 0.01, ..Options::new(1e-3) },
        betas: (f64, f64) = (0.9, 0.999),
        eps: f64 = 1e-8,
        /// Divides by the maximum of all second moments so far (Reddi et al., 2018).
        amsgrad: bool = false,
        maximize: bool = false,
    }
}

impl AdamW {
    fn rule(&self) -> Result<(AdamRule, f64)> {
        let Self { betas, eps, amsgrad, maximize, .. } = *self;
        AdamRule { beta2: betas.1, eps, amsgrad, maximize, decoupled: true }.checked(betas)
    }

    /// Returns the defaults of fastai's `Adam`, which has decoupled weight decay like AdamW: betas (0.9, 0.99), eps
    /// 1e-5, weight decay 0.01 but none on norms and biases.
    ///
    /// ```
    /// use brigade_optim::AdamW;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = AdamW::fastai().build(&model)?;
    /// assert_eq!(optimizer.lr(), 1e-3);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn fastai() -> Self {
        Self::default().betas(0.9, 0.99).eps(1e-5).no_decay_on_norms_and_biases(true)
    }
}

#[derive(Debug)]
struct AdamRule {
    beta2: f64,
    eps: f64,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
}

impl AdamRule {
    /// Returns the rule and its first beta, which groups and schedules may replace.
    fn checked(self, betas: (f64, f64)) -> Result<(Self, f64)> {
        check_betas(betas)?;
        check("eps", self.eps, 0.0..f64::INFINITY)?;
        Ok((self, betas.0))
    }
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;
const MAX_EXP_AVG_SQ: usize = 2;

impl Rule for AdamRule {
    fn name(&self) -> &'static str {
        if self.decoupled { "AdamW" } else { "Adam" }
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
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
            ("amsgrad", self.amsgrad.into()),
            ("maximize", self.maximize.into()),
            ("decoupled_weight_decay", self.decoupled.into()),
        ]
    }

    fn slot_shape(&self, slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        (slot != MAX_EXP_AVG_SQ || self.amsgrad).then(|| size.to_vec())
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
        if self.amsgrad {
            step.fill_missing(MAX_EXP_AVG_SQ)?;
        }
        let steps = step.step_tensors()?;
        fused::adam(
            step.parameters,
            step.gradients,
            &step.list(EXP_AVG),
            &step.list(EXP_AVG_SQ),
            &step.list(MAX_EXP_AVG_SQ),
            &steps.iter().collect::<Vec<&Tensor>>(),
            &AdamStep {
                lr: step.lr,
                beta1: step.momentum,
                beta2: self.beta2,
                eps: self.eps,
                weight_decay: step.weight_decay,
                amsgrad: self.amsgrad,
                maximize: self.maximize,
                decoupled: self.decoupled,
            },
            &step.device,
        )?;
        Ok(())
    }
}
