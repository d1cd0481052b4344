//! Muon.

use brigade_torch::matrix_step::{self, MuonStep};

use crate::error::{Error, Result};
use crate::options::{Options, WeightDecay, builder, check};
use crate::rule::{Rule, Step};

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
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct Muon {
    options: Options,
    momentum: f64,
    nesterov: bool,
    coefficients: (f64, f64, f64),
    iterations: u32,
    eps: f64,
    rate: MuonRate,
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

impl Default for Muon {
    fn default() -> Self {
        Self {
            options: Options {
                decay: WeightDecay::Decoupled,
                weight_decay: 0.1,
                ..Options::new(1e-3)
            },
            momentum: 0.95,
            nesterov: true,
            coefficients: (3.4445, -4.775, 2.0315),
            iterations: 5,
            eps: 1e-7,
            rate: MuonRate::default(),
        }
    }
}

impl Muon {
    /// The momentum; 0.95 unless set.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Nesterov's momentum; on unless set.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// The polynomial a x + b x^3 + c x^5 that the singular values go through;
    /// (3.4445, -4.775, 2.0315) unless set.
    pub fn coefficients(mut self, a: f64, b: f64, c: f64) -> Self {
        self.coefficients = (a, b, c);
        self
    }

    /// How often they go through it; 5 unless set.
    #[doc(alias = "ns_steps")]
    pub fn iterations(mut self, iterations: u32) -> Self {
        self.iterations = iterations;
        self
    }

    /// Lower bound of the momentum's norm; 1e-7 unless set.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// How a parameter's shape changes its learning rate; [`MuonRate::Original`] unless set.
    #[doc(alias = "adjust_lr_fn")]
    pub fn rate(mut self, rate: MuonRate) -> Self {
        self.rate = rate;
        self
    }

    fn rule(&self) -> Result<(MuonRule, f64)> {
        let Self { momentum, nesterov, coefficients, iterations, eps, rate, .. } = *self;
        check("the momentum", momentum, 0.0..f64::INFINITY)?;
        check("eps", eps, 0.0..f64::INFINITY)?;
        check("the number of iterations", iterations.into(), 0.0..100.0)?;
        Ok((MuonRule { nesterov, coefficients, iterations, eps, rate }, momentum))
    }
}

builder!(Muon);

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
        Err(Error::InvalidArgument(format!(
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
