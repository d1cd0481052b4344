//! Adam and AdamW.

use brigade_torch::Tensor;
use brigade_torch::fused::{self, AdamStep};

use crate::error::Result;
use crate::options::{Options, builder, check};
use crate::rule::{Rule, Step};

/// A builder of Adam's kin: `$decoupled` is its weight decay's kind, `$weight_decay` the default.
macro_rules! adam {
    ($(#[$doc:meta])* $builder:ident, $decoupled:literal, $weight_decay:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        #[must_use]
        pub struct $builder {
            options: Options,
            betas: (f64, f64),
            eps: f64,
            amsgrad: bool,
            maximize: bool,
        }

        impl Default for $builder {
            fn default() -> Self {
                Self {
                    options: Options { weight_decay: $weight_decay, ..Options::new(1e-3) },
                    betas: (0.9, 0.999),
                    eps: 1e-8,
                    amsgrad: false,
                    maximize: false,
                }
            }
        }

        impl $builder {
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

            /// Divides by the maximum of all second moments so far (Reddi et al., 2018).
            pub fn amsgrad(mut self, amsgrad: bool) -> Self {
                self.amsgrad = amsgrad;
                self
            }

            /// Maximises instead of minimising.
            pub fn maximize(mut self, maximize: bool) -> Self {
                self.maximize = maximize;
                self
            }

            fn rule(&self) -> Result<(AdamRule, f64)> {
                let Self { betas: (beta1, beta2), eps, amsgrad, maximize, .. } = *self;
                check("the first beta", beta1, 0.0..1.0)?;
                check("the second beta", beta2, 0.0..1.0)?;
                check("eps", eps, 0.0..f64::INFINITY)?;
                Ok((AdamRule { beta2, eps, amsgrad, maximize, decoupled: $decoupled }, beta1))
            }
        }

        builder!($builder);
    };
}

adam! {
    /// Adam (Kingma and Ba, 2015), with the defaults and the arithmetic of `torch.optim.Adam`, on libtorch's
    /// fused kernels.
    ///
    /// The learning rate is 0.001 unless set; the weight decay is 0 unless set, and added to the gradient.
    ///
    /// ```
    /// use brigade_optim::Adam;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = Adam::default().lr(5e-3).build(&model)?;
    /// assert_eq!(optimizer.lr(), 5e-3);
    /// # Ok::<(), brigade_optim::Error>(())
    /// ```
    Adam, false, 0.0
}

adam! {
    /// AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, with the defaults and the
    /// arithmetic of `torch.optim.AdamW`, on libtorch's fused kernels.
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
    /// # Ok::<(), brigade_optim::Error>(())
    /// ```
    AdamW, true, 0.01
}

impl AdamW {
    /// The defaults of fastai's `Adam`, which decays weights as AdamW does: betas (0.9, 0.99), eps 1e-5, weight decay
    /// 0.01 but none on norms and biases.
    ///
    /// ```
    /// use brigade_optim::AdamW;
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root(), 2, 2, Default::default());
    /// let optimizer = AdamW::fastai().build(&model)?;
    /// assert_eq!(optimizer.lr(), 1e-3);
    /// # Ok::<(), brigade_optim::Error>(())
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
