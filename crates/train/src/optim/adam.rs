//! Adam and AdamW.

use brigade_torch::fused::{self, AdamStep};
use brigade_torch::{Kind, Tensor};

use super::{Optimizer, Rule, Trainable, check};
use crate::error::Result;

/// Adam (Kingma and Ba, 2015), or with [`Adam::decoupled`] AdamW (Loshchilov and Hutter, 2019), with the
/// defaults and the arithmetic of `torch.optim`.
///
/// ```no_run
/// # use brigade_models::{Cnn, Model};
/// # use brigade_train::{Adam, Result};
/// # fn f(model: &Model<Cnn>) -> Result<()> {
/// let optimizer = Adam::default().lr(5e-3).build(model)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Adam {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    decoupled: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            decoupled: false,
        }
    }
}

impl Adam {
    /// AdamW: decoupled weight decay, 0.01 unless set.
    pub fn decoupled() -> Self {
        Self { weight_decay: 1e-2, decoupled: true, ..Self::default() }
    }

    /// The learning rate; 0.001 unless set.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
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

    /// The weight decay; 0 unless set.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Divides by the maximum of all second moments so far (Reddi et al., 2018).
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.amsgrad = amsgrad;
        self
    }

    /// The optimizer of a model's trained parameters.
    ///
    /// # Errors
    /// [`crate::Error::Misuse`] for a number out of range, or a model without a trained parameter.
    pub fn build(self, model: &impl Trainable) -> Result<Optimizer> {
        check("the learning rate", self.lr, 0.0..f64::INFINITY)?;
        check("the first beta", self.betas.0, 0.0..1.0)?;
        check("the second beta", self.betas.1, 0.0..1.0)?;
        check("eps", self.eps, 0.0..f64::INFINITY)?;
        check("the weight decay", self.weight_decay, 0.0..f64::INFINITY)?;
        let parameters = model.trainable_parameters();
        let state = parameters.iter().map(|_| None).collect();
        Optimizer::new(AdamRule { options: self, state }, parameters, self.lr, self.betas.0)
    }
}

#[derive(Debug)]
struct AdamRule {
    options: Adam,
    /// By place; made at a parameter's first step, so that memory follows what is trained.
    state: Vec<Option<Moments>>,
}

#[derive(Debug)]
struct Moments {
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Option<Tensor>,
    /// A scalar tensor, as the fused kernel wants it.
    step: Tensor,
}

impl Rule for AdamRule {
    fn step(
        &mut self,
        places: &[usize],
        parameters: &[&Tensor],
        gradients: &[&Tensor],
        lr: f64,
        momentum: f64,
    ) -> Result<()> {
        let options = self.options;
        for (&place, parameter) in places.iter().zip(parameters) {
            if self.state[place].is_none() {
                self.state[place] = Some(Moments::zero(parameter, options.amsgrad)?);
            }
        }
        let state: Vec<&Moments> =
            places.iter().filter_map(|&place| self.state[place].as_ref()).collect();
        for moments in &state {
            let _ = moments.step.shallow_clone().f_add_scalar_(1.0)?;
        }
        let of = |pick: fn(&Moments) -> &Tensor| -> Vec<&Tensor> {
            state.iter().map(|moments| pick(moments)).collect()
        };
        let maxima: Vec<&Tensor> =
            state.iter().filter_map(|moments| moments.max_exp_avg_sq.as_ref()).collect();
        fused::adam(
            parameters,
            gradients,
            &of(|moments| &moments.exp_avg),
            &of(|moments| &moments.exp_avg_sq),
            &maxima,
            &of(|moments| &moments.step),
            &AdamStep {
                lr,
                beta1: momentum,
                beta2: options.betas.1,
                eps: options.eps,
                weight_decay: options.weight_decay,
                amsgrad: options.amsgrad,
                maximize: false,
                decoupled: options.decoupled,
            },
        )?;
        Ok(())
    }
}

impl Moments {
    fn zero(parameter: &Tensor, amsgrad: bool) -> Result<Self> {
        let zeros = || parameter.f_detach()?.f_zeros_like();
        Ok(Self {
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            max_exp_avg_sq: if amsgrad { Some(zeros()?) } else { None },
            step: Tensor::f_zeros([0i64; 0], (Kind::Float, parameter.device()))?,
        })
    }
}
