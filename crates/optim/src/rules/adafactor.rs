//! Adafactor.

use brigade_torch::Result;
use brigade_torch::matrix_step::{self, AdafactorStep, Variances};
use tch::{Kind, Tensor};

use crate::builder::builder;
use crate::check::check;
use crate::options::Options;
use crate::rule::{Rule, ShardedStep, Slots, Step};
use crate::shards::{Shards, wide};

builder! {
    /// Adafactor (Shazeer and Stern, 2018), with the defaults and the arithmetic of `torch.optim.Adafactor`: for a
    /// matrix it stores only the mean squares of its rows and of its columns.
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
    /// Sets the square root of the lower bound of the variance estimate. Defaults to the machine epsilon of the dtype.
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

impl AdafactorRule {
    /// Computes the step before its length is limited, from the variance of rows and columns, or of elements if these
    /// are kept. For a matrix, the mean of the rows' means over all ranks is given.
    fn update(
        &self,
        parameter: &Tensor,
        gradient: &Tensor,
        slots: &Slots<'_>,
        mean_of_rows: Option<&Tensor>,
    ) -> Result<Tensor> {
        let eps = match self.eps1 {
            Some(eps1) => eps1,
            None => machine_epsilon(parameter.f_kind()?),
        };
        let variance = if parameter.dim() > 1 {
            let rows = wide(slots.require(ROW_VAR)?)?;
            let mean = match mean_of_rows {
                Some(mean) => mean.f_to_kind(rows.f_kind()?)?,
                None => rows.f_mean_dim([-2i64].as_slice(), true, None::<Kind>)?,
            };
            let product = rows.f_mul(&wide(slots.require(COL_VAR)?)?)?;
            product.f_div(&mean.f_clamp_min(eps)?)?
        } else {
            wide(slots.require(VARIANCE)?)?
        };
        let slope = if self.maximize { gradient.f_neg()? } else { gradient.shallow_clone() };
        Ok(variance.f_clamp_min(eps * eps)?.f_rsqrt()?.f_mul(&wide(&slope)?)?)
    }
}

fn machine_epsilon(kind: Kind) -> f64 {
    match kind {
        Kind::Double => f64::EPSILON,
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        _ => f32::EPSILON.into(),
    }
}

/// Returns the sum of squares as a scalar in double precision.
fn square_sum(tensor: &Tensor) -> Result<Tensor> {
    let norm = tensor.f_norm_scalaropt_dtype(2, Kind::Double)?;
    Ok(norm.f_square()?)
}

/// Writes values into a parameter or a state, in its own type.
fn write(into: &Tensor, values: &Tensor) -> Result<()> {
    into.shallow_clone().f_copy_(values)?;
    Ok(())
}

/// Returns the number of elements of the whole parameter.
fn elements(shards: &Shards, shard: &Tensor) -> f64 {
    let whole = |shape: &[i64]| shape.iter().map(|&size| size as f64).product();
    shards.whole_shape(shard).map_or_else(|| shard.numel() as f64, whole)
}

/// Returns the number of rows of a matrix whose rows are divided: means over them are sums over ranks.
fn spread_rows(shards: &Shards, shard: &Tensor) -> Option<i64> {
    shards.whole_shape(shard).filter(|shape| shape.len() == 2).map(|shape| shape[0])
}

/// Updates a running mean. `part` is the weight of the newest values.
fn move_mean(mean: &Tensor, values: &Tensor, part: f64) -> Result<()> {
    write(mean, &wide(mean)?.f_lerp(&values.f_to_kind(wide(mean)?.f_kind()?)?, part)?)
}

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

    fn steps_shards(&self) -> bool {
        true
    }

    fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
        let shards = step.shards();
        let part = |slots: &Slots<'_>| (slots.steps() as f64).powf(self.beta2_decay);
        // The squares of each weight; for a matrix also those of each column's gradients, and the rows' means.
        let mut sums = shards.sums();
        step.each_group(|step| {
            for slot in [ROW_VAR, COL_VAR, VARIANCE] {
                step.fill_missing_shaped(slot, |size| self.slot_shape(slot, size))?;
            }
            step.each(|parameter, gradient, slots| {
                let part = part(slots);
                sums.add(parameter, square_sum(&wide(parameter)?)?);
                let squares = wide(gradient)?.f_square()?;
                if parameter.dim() < 2 {
                    return move_mean(slots.require(VARIANCE)?, &squares, part);
                }
                let mean = |dim: i64| squares.f_mean_dim([dim].as_slice(), true, None::<Kind>);
                let rows = slots.require(ROW_VAR)?;
                move_mean(rows, &mean(-1)?, part)?;
                if spread_rows(shards, parameter).is_none() {
                    return move_mean(slots.require(COL_VAR)?, &mean(-2)?, part);
                }
                sums.add(
                    parameter,
                    squares.f_sum_dim_intlist([0i64].as_slice(), true, Kind::Double)?,
                );
                sums.add(parameter, rows.f_sum(Kind::Double)?);
                Ok(())
            })
        })?;
        let mut sums = sums.reduce()?;
        // Inputs of the second pass for each parameter: its mean square, and the mean of its rows' means.
        let mut means = Vec::new();
        let mut squares = shards.sums();
        step.each_group(|step| {
            step.each(|parameter, gradient, slots| {
                let size = sums.next()?.f_div_scalar(elements(shards, parameter))?;
                let mut mean_of_rows = None;
                if let Some(rows) = spread_rows(shards, parameter) {
                    let columns = sums.next()?.f_div_scalar(rows)?;
                    move_mean(slots.require(COL_VAR)?, &columns, part(slots))?;
                    mean_of_rows = Some(sums.next()?.f_div_scalar(rows)?);
                }
                let update = self.update(parameter, gradient, slots, mean_of_rows.as_ref())?;
                squares.add(parameter, square_sum(&update)?);
                means.push((size, mean_of_rows));
                Ok(())
            })
        })?;
        let (mut squares, mut means) = (squares.reduce()?, means.into_iter());
        step.each_group(|step| {
            let (lr, keep) = (step.lr(), 1.0 - step.lr() * step.weight_decay());
            step.each(|parameter, gradient, slots| {
                let Some((size, mean_of_rows)) = means.next() else { return Ok(()) };
                let square = squares.next()?.f_div_scalar(elements(shards, parameter))?;
                let excess = square.f_sqrt()?.f_div_scalar(self.threshold)?.f_clamp_min(1)?;
                let rho = lr.min(1.0 / (slots.steps() as f64).sqrt());
                let size = size.f_sqrt()?.f_clamp_min(self.eps2)?;
                let rate = size.f_mul_scalar(rho)?.f_div(&excess)?;
                let update = self.update(parameter, gradient, slots, mean_of_rows.as_ref())?;
                let weight = wide(parameter)?.f_mul_scalar(keep)?;
                write(parameter, &weight.f_sub(&update.f_mul(&rate)?)?)
            })
        })
    }
}
