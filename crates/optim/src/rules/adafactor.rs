//! Adafactor.

use brigade_torch::matrix_step::{self, AdafactorStep, Variances};

use crate::error::Result;
use crate::options::{Options, WeightDecay, builder, check};
use crate::rule::{Rule, Step};

/// Adafactor (Shazeer and Stern, 2018), with the defaults and the arithmetic of `torch.optim.Adafactor`:
/// it keeps of a matrix only the means of squares of its rows and columns.
///
/// The learning rate is 0.01 unless set and is relative to the parameter's size; the weight decay is 0
/// unless set, and decoupled.
///
/// ```
/// use brigade_optim::Adafactor;
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = Adafactor::default().build(&model)?;
/// # Ok::<(), brigade_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct Adafactor {
    options: Options,
    beta2_decay: f64,
    eps1: Option<f64>,
    eps2: f64,
    threshold: f64,
    maximize: bool,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            options: Options { decay: WeightDecay::Decoupled, ..Options::new(1e-2) },
            beta2_decay: -0.8,
            eps1: None,
            eps2: 1e-3,
            threshold: 1.0,
            maximize: false,
        }
    }
}

impl Adafactor {
    /// The part of the newest squares in their mean is the count of steps to this power; -0.8 unless
    /// set.
    pub fn beta2_decay(mut self, beta2_decay: f64) -> Self {
        self.beta2_decay = beta2_decay;
        self
    }

    /// Sets the lower bound of the variance, as its square root; the kind's machine epsilon unless set.
    pub fn eps1(mut self, eps1: f64) -> Self {
        self.eps1 = Some(eps1);
        self
    }

    /// Sets the lower bound of a parameter's root mean square; 0.001 unless set.
    pub fn eps2(mut self, eps2: f64) -> Self {
        self.eps2 = eps2;
        self
    }

    /// The root mean square above which an update is shortened; 1 unless set.
    #[doc(alias = "d")]
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// Climbs instead of descending.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.maximize = maximize;
        self
    }

    fn rule(&self) -> Result<(AdafactorRule, f64)> {
        let Self { beta2_decay, eps1, eps2, threshold, maximize, .. } = *self;
        check("the decay of the second beta", -beta2_decay, 0.0..f64::INFINITY)?;
        check("the first eps", eps1.unwrap_or(0.0), 0.0..f64::INFINITY)?;
        check("the second eps", eps2, 0.0..f64::INFINITY)?;
        check("the threshold", threshold, 1.0..f64::INFINITY)?;
        Ok((AdafactorRule { beta2_decay, eps1, eps2, threshold, maximize }, 0.0))
    }
}

builder!(Adafactor);

#[derive(Debug)]
struct AdafactorRule {
    beta2_decay: f64,
    eps1: Option<f64>,
    eps2: f64,
    threshold: f64,
    maximize: bool,
}

const ROW_VAR: usize = 0;
const COL_VAR: usize = 1;
const VARIANCE: usize = 2;

impl Rule for AdafactorRule {
    fn name(&self) -> &'static str {
        "Adafactor"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["row_var", "col_var", "variance"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        None
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        let mut numbers = vec![
            ("beta2_decay", self.beta2_decay),
            ("eps2", self.eps2),
            ("d", self.threshold),
            ("maximize", self.maximize.into()),
        ];
        numbers.extend(self.eps1.map(|eps1| ("eps1", eps1)));
        numbers
    }

    fn slot_shape(&self, slot: usize, size: &[i64]) -> Option<Vec<i64>> {
        let mut shape = size.to_vec();
        match (slot, size.len()) {
            (VARIANCE, 0 | 1) => {}
            (ROW_VAR, dimensions @ 2..) => shape[dimensions - 1] = 1,
            (COL_VAR, dimensions @ 2..) => shape[dimensions - 2] = 1,
            _ => return None,
        }
        Some(shape)
    }

    fn takes_device_scalars(&self) -> bool {
        true
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        for slot in [ROW_VAR, COL_VAR, VARIANCE] {
            step.fill_missing_shaped(slot, |size| self.slot_shape(slot, size))?;
        }
        for alike in step.by_count() {
            let kernel = AdafactorStep {
                lr: step.lr,
                steps: alike.steps,
                beta2_decay: self.beta2_decay,
                eps1: self.eps1,
                eps2: self.eps2,
                threshold: self.threshold,
                weight_decay: step.weight_decay,
                maximize: self.maximize,
            };
            let [factored, whole] = alike.partition(|parameter| parameter.dim() > 1);
            let (rows, columns) = (factored.list(ROW_VAR), factored.list(COL_VAR));
            let squares = whole.list(VARIANCE);
            let factors = Variances::Factored { rows: &rows, columns: &columns };
            for (alike, variances) in [(factored, factors), (whole, Variances::Whole(&squares))] {
                matrix_step::adafactor(
                    &alike.parameters,
                    &alike.gradients,
                    variances,
                    &kernel,
                    &alike.device,
                )?;
            }
        }
        Ok(())
    }
}
