//! Muon.

use brigade_torch::matrix_step::{self, MuonStep};
use brigade_torch::{Error, Result};

use crate::builder::builder;
use crate::options::{Options, check};
use crate::rule::{Rule, Step};

builder! {
    /// Muon (Jordan et al., 2024), with the defaults and the arithmetic of `torch.optim.Muon`: momentum whose
    /// singular values are all made nearly 1. For the matrices of hidden layers.
    ///
    /// It steps matrices only. Biases, norms, embeddings and the last layer want another optimizer:
    /// [`Muon::only`] and its like choose parameters, and a model may have two optimizers.
    ///
    /// The learning rate is 0.001 unless set; the weight decay is 0.1 unless set, and decoupled.
    ///
    /// ```
    /// use brigade_optim::{AdamW, Muon};
    /// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
    /// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
    /// let matrices = Muon::default().lr(0.02).only("*hidden*.weight").build(&model)?;
    /// let others = AdamW::default().except("*hidden*.weight").build(&model)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct Muon {
        options: Options { weight_decay: 0.1, ..Options::decoupled(1e-3) },
        momentum: f64 = 0.95,
        nesterov: bool = true,
        /// Sets the polynomial a x + b x^3 + c x^5 that the singular values go through.
        coefficients: (f64, f64, f64) = (3.4445, -4.775, 2.0315),
        /// Sets the number of times that the singular values go through the polynomial.
        #[doc(alias = "ns_steps")]
        iterations: u32 = 5,
        /// Sets the lower bound of the momentum's norm.
        eps: f64 = 1e-7,
        /// Sets how a parameter's shape changes its learning rate.
        #[doc(alias = "adjust_lr_fn")]
        rate: MuonRate = MuonRate::Original,
    }
}

/// How a parameter's shape changes its learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonRate {
    /// By the root of rows over columns, where there are more rows (`original`).
    #[default]
    Original,
    /// So that the update's root mean square is about AdamW's: by 0.2 times the root of the longer side
    /// (`match_rms_adamw`).
    MatchRmsAdamw,
}

impl Muon {
    fn rule(&self) -> Result<(MuonRule, f64)> {
        let Self { momentum, nesterov, coefficients, iterations, eps, rate, .. } = *self;
        check("the momentum", momentum, 0.0..f64::INFINITY)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the number of iterations", iterations.into(), 0.0..100.0)?;
        Ok((MuonRule { nesterov, coefficients, iterations, eps, rate }, momentum))
    }
}

#[derive(Debug)]
struct MuonRule {
    nesterov: bool,
    coefficients: (f64, f64, f64),
    iterations: u32,
    eps: f64,
    rate: MuonRate,
}

const MOMENTUM_BUFFER: usize = 0;

impl Rule for MuonRule {
    fn name(&self) -> &'static str {
        "Muon"
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
        let (a, b, c) = self.coefficients;
        vec![
            ("nesterov", self.nesterov.into()),
            ("ns_coefficients_a", a),
            ("ns_coefficients_b", b),
            ("ns_coefficients_c", c),
            ("ns_steps", self.iterations.into()),
            ("eps", self.eps),
            ("match_rms_adamw", (self.rate == MuonRate::MatchRmsAdamw).into()),
        ]
    }

    fn check_parameter(&self, name: &str, size: &[i64]) -> Result<()> {
        if size.len() == 2 {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "Muon steps matrices only, but `{name}` has shape {size:?}: choose matrices with `only`, and \
             give the others an optimizer of their own"
        )))
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(MOMENTUM_BUFFER)?;
        matrix_step::muon(
            step.parameters,
            step.gradients,
            &step.list(MOMENTUM_BUFFER),
            &MuonStep {
                lr: step.lr,
                match_rms_adamw: self.rate == MuonRate::MatchRmsAdamw,
                momentum: step.momentum,
                nesterov: self.nesterov,
                coefficients: self.coefficients,
                iterations: self.iterations,
                eps: self.eps,
                weight_decay: step.weight_decay,
            },
            &step.device,
        )?;
        Ok(())
    }
}
