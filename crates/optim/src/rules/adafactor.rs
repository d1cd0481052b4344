//! Adafactor.

use brigade_torch::Result;
use brigade_torch::matrix_step::{self, AdafactorStep, Variances};

use crate::builder::builder;
use crate::options::{Options, check};
use crate::rule::{Rule, Step};

builder! {
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
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub struct Adafactor {
        options: Options::decoupled(1e-2),
        /// Sets the exponent of the second moment's decay: the newest squares count as the number of steps to this
        /// power.
        beta2_decay: f64 = -0.8,
        /// Sets the lower bound of a parameter's root mean square.
        eps2: f64 = 1e-3,
        /// Sets the root mean square above which an update is shortened.
        #[doc(alias = "d")]
        threshold: f64 = 1.0,
        maximize: bool = false,
    }
    private {
        eps1: Option<f64> = None,
    }
}

impl Adafactor {
    /// Sets the lower bound of the variance, as its square root. Defaults to the machine epsilon of the dtype.
    pub fn eps1(mut self, eps1: f64) -> Self {
        self.eps1 = Some(eps1);
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
