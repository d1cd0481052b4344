//! Muon.

use std::ops::Range;

use brigade_torch::matrix_step::{self, MuonStep};
use brigade_torch::{DeviceNumbers, Error, Result};
use tch::{Device, Kind, Tensor};

use crate::builder::builder;
use crate::check::check;
use crate::options::Options;
use crate::rule::{Rule, ShardedStep, Step};
use crate::shards::{Shards, wide};

builder! {
    /// Muon (Jordan et al., 2024), with the defaults and the arithmetic of `torch.optim.Muon`: SGD with momentum whose
    /// update is orthogonalised, so that all its singular values are nearly 1. For the matrices of hidden layers.
    ///
    /// It updates matrices only. Biases, norms, embeddings and the last layer need another optimizer: choose parameters
    /// with [`Muon::only`] and [`Muon::except`]; a model may have two optimizers.
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
        /// Sets the coefficients (a, b, c) of the polynomial a x + b x^3 + c x^5 that is applied to the singular
        /// values.
        coefficients: (f64, f64, f64) = (3.4445, -4.775, 2.0315),
        /// Sets the number of times that the polynomial is applied.
        #[doc(alias = "ns_steps")]
        iterations: u32 = 5,
        /// Sets the lower bound of the momentum's norm.
        eps: f64 = 1e-7,
        /// Sets the rule by which a parameter's shape scales its learning rate.
        #[doc(alias = "adjust_lr_fn")]
        rate: MuonRate = MuonRate::Original,
    }
}

/// Rule by which a parameter's shape scales its learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonRate {
    /// Scale by the square root of rows over columns, if there are more rows (`original`).
    #[default]
    Original,
    /// Scale by 0.2 times the square root of the longer side, so that the update's root mean square is about that of
    /// AdamW (`match_rms_adamw`).
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
             give the others a separate optimizer"
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
                momentum: step.momentum,
                weight_decay: step.weight_decay,
                ..self.numbers()
            },
            &step.device,
        )?;
        Ok(())
    }

    fn steps_shards(&self) -> bool {
        true
    }

    /// Steps matrices whose rows are divided over ranks: each matrix has an owner among the ranks, which receives its
    /// rows, orthogonalises it, and sends the rows back.
    fn step_shards(&self, step: &mut ShardedStep<'_>) -> Result<()> {
        let shards = step.shards();
        let mut directions = Vec::new();
        step.each_group(|step| {
            step.fill_missing(MOMENTUM_BUFFER)?;
            let momentum = step.momentum();
            step.each(|parameter, gradient, slots| {
                let mut buffer = slots.require(MOMENTUM_BUFFER)?.shallow_clone();
                let _ = buffer.f_lerp_(gradient, 1.0 - momentum)?;
                let rows = if self.nesterov { gradient.f_lerp(&buffer, momentum)? } else { buffer };
                let whole = shards.whole_shape(parameter).and_then(|shape| shape.try_into().ok());
                directions.push(Direction { rows, whole });
                Ok(())
            })
        })?;
        let mut updates = self.updates(shards, &directions)?.into_iter();
        step.each_group(|step| {
            let (lr, keep) = (step.lr(), 1.0 - step.lr() * step.weight_decay());
            step.each(|parameter, _, _| {
                let mut parameter = parameter.shallow_clone();
                let Some(update) = updates.next() else { return Ok(()) };
                if keep != 1.0 {
                    let _ = parameter.f_mul_scalar_(keep)?;
                }
                let _ = parameter.f_add_(&update.f_mul_scalar(lr)?)?;
                Ok(())
            })
        })
    }
}

/// This rank's rows of the direction of a matrix's step.
#[derive(Debug)]
struct Direction {
    rows: Tensor,
    /// Shape of the whole matrix if its rows are divided, or `None` if every rank has all of it.
    whole: Option<[i64; 2]>,
}

impl MuonRule {
    /// Returns the hyperparameters of a step, without those of the groups.
    fn numbers(&self) -> MuonStep {
        MuonStep {
            lr: 1.0,
            match_rms_adamw: self.rate == MuonRate::MatchRmsAdamw,
            momentum: 0.0,
            nesterov: self.nesterov,
            coefficients: self.coefficients,
            iterations: self.iterations,
            eps: self.eps,
            weight_decay: 0.0,
        }
    }

    /// Returns the steps of this rank's rows at a learning rate of 1. All ranks take part.
    fn updates(&self, shards: &Shards, directions: &[Direction]) -> Result<Vec<Tensor>> {
        let spread = directions.iter().filter_map(|it| Some((&it.rows, it.whole?)));
        let owners = Owners::new(shards, spread.collect())?;
        let mut matrices = owners.gather()?;
        let owned = matrices.len();
        let whole_here = directions.iter().filter(|it| it.whole.is_none());
        let whole_here = whole_here.map(|it| wide(&it.rows)).collect::<Result<Vec<_>>>()?;
        matrices.extend(whole_here);
        let zeros = || matrices.iter().map(Tensor::f_zeros_like).collect::<Result<Vec<_>, _>>();
        // With zeros as the weight, and without a momentum, the weight becomes the step.
        let (mut steps, buffers) = (zeros()?, zeros()?);
        matrix_step::muon(
            &steps.iter().collect::<Vec<_>>(),
            &matrices.iter().collect::<Vec<_>>(),
            &buffers.iter().collect::<Vec<_>>(),
            &MuonStep { nesterov: false, ..self.numbers() },
            &DeviceNumbers::default(),
        )?;
        let mut whole_here = steps.split_off(owned).into_iter();
        let mut spread = owners.scatter(&steps)?.into_iter();
        let each = directions.iter();
        let each =
            each.map(|it| if it.whole.is_some() { spread.next() } else { whole_here.next() });
        Ok(each.flatten().collect())
    }
}

/// Assignment of each matrix to a rank, which has all of its rows during a step.
struct Owners<'a> {
    shards: &'a Shards,
    /// This rank's rows of each matrix, and the whole shape.
    spread: Vec<(&'a Tensor, [i64; 2])>,
    owners: Vec<usize>,
    /// Type and device of messages: float32, or float64 if a matrix has it.
    options: (Kind, Device),
}

impl<'a> Owners<'a> {
    fn new(shards: &'a Shards, spread: Vec<(&'a Tensor, [i64; 2])>) -> Result<Self> {
        let cost = |[rows, columns]: [i64; 2]| (rows * columns) as f64 * rows.min(columns) as f64;
        let costs: Vec<f64> = spread.iter().map(|(_, shape)| cost(*shape)).collect();
        let mut options = (Kind::Float, shards.group().device());
        for (rows, _) in &spread {
            options.1 = rows.device();
            if rows.f_kind()? == Kind::Double {
                options.0 = Kind::Double;
            }
        }
        Ok(Self { shards, spread, owners: share_out(&costs, shards.group().size()), options })
    }

    /// Returns the indices of the matrices that a rank owns.
    fn of(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.spread.len()).filter(move |&place| self.owners[place] == rank)
    }

    /// Returns the range of a matrix's rows that a rank has.
    fn rows(&self, place: usize, rank: usize) -> Range<i64> {
        self.shards.rows_of(rank, self.spread[place].1[0])
    }

    /// Returns the shape of a rank's rows of a matrix.
    fn shape(&self, place: usize, rank: usize) -> [i64; 2] {
        let rows = self.rows(place, rank);
        [rows.end - rows.start, self.spread[place].1[1]]
    }

    /// Returns the whole matrices that this rank owns.
    fn gather(&self) -> Result<Vec<Tensor>> {
        let own: Vec<usize> = self.of(self.shards.group().rank()).collect();
        let blocks = self.exchange(
            |rank| self.of(rank).map(|place| Ok(self.spread[place].0.shallow_clone())).collect(),
            |rank| own.iter().map(|&place| self.shape(place, rank)).collect(),
        )?;
        let whole = (0..own.len()).map(|number| {
            let rows: Vec<&Tensor> = blocks.iter().map(|of_rank| &of_rank[number]).collect();
            Ok(Tensor::f_cat(&rows, 0)?)
        });
        whole.collect()
    }

    /// Returns this rank's rows of all matrices, which their owners send. `own` are the whole matrices of this rank.
    fn scatter(&self, own: &[Tensor]) -> Result<Vec<Tensor>> {
        let this = self.shards.group().rank();
        let blocks = self.exchange(
            |rank| {
                let rows = |(place, matrix): (usize, &Tensor)| {
                    let rows = self.rows(place, rank);
                    Ok(matrix.f_narrow(0, rows.start, rows.end - rows.start)?)
                };
                self.of(this).zip(own).map(rows).collect()
            },
            |rank| self.of(rank).map(|place| self.shape(place, this)).collect(),
        )?;
        let mut blocks: Vec<_> = blocks.into_iter().map(Vec::into_iter).collect();
        Ok(self.owners.iter().filter_map(|&owner| blocks[owner].next()).collect())
    }

    /// Sends blocks to each rank, and returns those received from each, in the given shapes. Takes one message.
    fn exchange(
        &self,
        sent: impl Fn(usize) -> Result<Vec<Tensor>>,
        shapes: impl Fn(usize) -> Vec<[i64; 2]>,
    ) -> Result<Vec<Vec<Tensor>>> {
        let ranks = self.shards.group().size();
        if self.spread.is_empty() {
            return Ok((0..ranks).map(|_| Vec::new()).collect());
        }
        let empty = |size: i64| Tensor::f_empty([size], self.options);
        let inputs = (0..ranks).map(|rank| {
            let mut flat = vec![empty(0)?];
            for block in sent(rank)? {
                flat.push(block.f_to_kind(self.options.0)?.f_reshape([-1])?);
            }
            // Offloaded shards are in the host's memory, which the group's messages may not use.
            Ok(Tensor::f_cat(&flat, 0)?.f_to_device(self.shards.group().device())?)
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let shapes: Vec<Vec<[i64; 2]>> = (0..ranks).map(shapes).collect();
        let sizes = |shapes: &Vec<[i64; 2]>| shapes.iter().map(|[r, c]| r * c).collect::<Vec<_>>();
        let of_group = (self.options.0, self.shards.group().device());
        let size = |shapes: &Vec<[i64; 2]>| sizes(shapes).iter().sum::<i64>();
        let outputs = shapes.iter().map(|shapes| Tensor::f_empty([size(shapes)], of_group));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = self.shards.group().all_to_all(&inputs, Some(outputs))?;
        let blocks = outputs.iter().zip(&shapes).map(|(flat, shapes)| {
            let flat = flat.f_to_device(self.options.1)?;
            let blocks = flat.f_split_with_sizes(sizes(shapes), 0)?.into_iter().zip(shapes);
            blocks.map(|(block, shape)| Ok(block.f_reshape(shape)?)).collect()
        });
        blocks.collect()
    }
}

/// Assigns each piece of work to a rank: the largest first, always to the rank with the least work so far.
fn share_out(costs: &[f64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
    let mut loads = vec![0f64; ranks];
    let mut owners = vec![0; costs.len()];
    for place in order {
        let least = (0..ranks).min_by(|&a, &b| loads[a].total_cmp(&loads[b])).unwrap_or(0);
        owners[place] = least;
        // Matrices without elements are distributed as well.
        loads[least] += costs[place].max(1.0);
    }
    owners
}

#[cfg(test)]
mod tests {
    #[test]
    fn work_is_shared_out_from_the_largest() {
        let owners = super::share_out(&[1.0, 8.0, 3.0, 4.0, 0.0, 3.0], 3);
        assert_eq!(owners, [1, 0, 2, 1, 1, 2]);
        assert_eq!(super::share_out(&[2.0, 2.0, 2.0], 1), [0, 0, 0]);
    }
}
