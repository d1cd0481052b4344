//! The state of a metric in a loop: the folds of the batches, and the value over all ranks.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use brigade_torch::{Error, ProcessGroup, Result};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::data_order::gather_in_data_order;
use crate::error::MetricError;
use crate::{Fold, Folded, Metric};

/// A metric with the contributions of the batches so far.
///
/// Each rank updates its own state with its batches. Sums stay on the device of the predictions, so that updates do not
/// wait for the device, and nothing is sent until [`MetricState::compute`], which adds the sums of all ranks in the
/// order of the data, or concatenates their rows in that order. So the value is the same to the last digit on any
/// number of ranks. The memory of a state grows with the number of batches until [`MetricState::reset`].
///
/// In a loop, `Accelerator::update_metric` and `compute_metric` of `brigade-train` leave out the duplicates that
/// complete uneven batches, and compute the value over all ranks.
///
/// ```
/// use brigade_metrics::{Accuracy, MetricState};
/// use tch::Tensor;
///
/// let mut accuracy = MetricState::new(Accuracy);
/// let scores = Tensor::from_slice2(&[[0.3, 2.0], [1.5, -1.0], [0.0, 0.1]]);
/// accuracy.update(&scores, &Tensor::from_slice(&[1i64, 0, 0]))?;
/// assert_eq!(accuracy.compute(None)?, 2.0 / 3.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct MetricState<M> {
    metric: M,
    updates: usize,
    /// Contributions of the batches, with their numbers.
    kept: Vec<(usize, Fold)>,
}

/// Message of a rank to the others about its batches.
#[derive(Serialize, Deserialize)]
enum Kept {
    Nothing,
    Sums(Vec<(usize, Vec<f64>)>),
    Rows,
    /// Failure of a rank, which the other ranks must return too.
    Failed(String),
}

impl<M: Metric> MetricState<M> {
    /// Creates a state without batches.
    #[must_use]
    pub fn new(metric: M) -> Self {
        Self { metric, updates: 0, kept: Vec::new() }
    }

    /// Returns the metric of the state.
    #[must_use]
    pub fn metric(&self) -> &M {
        &self.metric
    }

    /// Adds the next batch: a row of predictions and of targets for each of its samples. The call does not communicate.
    ///
    /// # Errors
    /// [`crate::MetricError`] if the metric rejects the batch or panics.
    pub fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        self.update_at(self.updates, predictions, targets)
    }

    /// Adds the batch with number `number` in the order of the data. Batches of the same number are ordered by rank, as
    /// a sharded loader distributes them.
    ///
    /// # Errors
    /// Returns the same errors as [`MetricState::update`].
    pub fn update_at(
        &mut self,
        number: usize,
        predictions: &Tensor,
        targets: &Tensor,
    ) -> Result<()> {
        let (predictions, targets) = (predictions.f_detach()?, targets.f_detach()?);
        let fold = named(&self.metric, || self.metric.fold(&predictions, &targets))?;
        self.updates += 1;
        self.kept.push((number, fold));
        Ok(())
    }

    /// Removes all batches from the state.
    pub fn reset(&mut self) {
        self.updates = 0;
        self.kept.clear();
    }

    /// Computes the value over all ranks of a group, the same on each; without a group, over this rank's batches. The
    /// state is not changed and can be updated further. Every rank calls it. It waits for the device.
    ///
    /// # Errors
    /// [`crate::MetricError`] if the value is not defined for these data, or the metric panics;
    /// [`brigade_torch::ErrorKind::InvalidArgument`], on every rank, if the ranks have different metrics;
    /// [`brigade_torch::ErrorKind::Communication`] if another rank has failed.
    #[track_caller]
    pub fn compute(&self, group: Option<&ProcessGroup>) -> Result<M::Value> {
        let folded = self.folded(group)?.unwrap_or(Folded::Sums(Vec::new()));
        self.value(&folded)
    }

    /// Returns the combined contributions of the batches of all ranks. `None` if no rank has a batch. Every rank calls
    /// it.
    ///
    /// # Errors
    /// Returns the same errors as [`MetricState::compute`], except those of computing the value.
    #[track_caller]
    pub fn folded(&self, group: Option<&ProcessGroup>) -> Result<Option<Folded>> {
        let mine = self.mine();
        let all = match group {
            Some(group) => group.all_gather_object(&mine)?,
            None => vec![mine],
        };
        let failure = all.iter().find_map(|kept| match kept {
            Kept::Failed(reason) => Some(reason.clone()),
            _ => None,
        });
        if let Some(reason) = failure {
            return Err(MetricError { metric: self.metric.name(), reason }.into());
        }
        if !all.iter().any(|kept| matches!(kept, Kept::Rows)) {
            return added(all);
        }
        if let Some(rank) = all.iter().position(|kept| matches!(kept, Kept::Sums(_))) {
            return Err(Error::invalid_argument(format!(
                "compute_metric: rank {rank} keeps sums of its batches and another rank rows; make the same metric \
                 on every rank"
            )));
        }
        self.joined(group).map(Some)
    }

    /// Computes the value from combined contributions.
    ///
    /// # Errors
    /// [`crate::MetricError`] if the value is not defined for these data, or the metric panics.
    pub fn value(&self, folded: &Folded) -> Result<M::Value> {
        named(&self.metric, || self.metric.value(folded))
    }

    /// Reads what this rank has kept. Sums wait for the device once.
    fn mine(&self) -> Kept {
        match self.kept.first() {
            None => Kept::Nothing,
            Some((_, Fold::Rows(..)))
                if self.kept.iter().all(|it| matches!(it.1, Fold::Rows(..))) =>
            {
                Kept::Rows
            }
            Some(_) => match self.sums() {
                Ok(sums) => Kept::Sums(sums),
                Err(error) => Kept::Failed(error.to_string()),
            },
        }
    }

    fn sums(&self) -> Result<Vec<(usize, Vec<f64>)>> {
        let flat = |(_, fold): &(usize, Fold)| match fold {
            Fold::Sums(sums) => Ok(sums.f_to_kind(Kind::Double)?.f_flatten(0, -1)?),
            Fold::Rows(..) => Err(mixed()),
        };
        let tensors = self.kept.iter().map(flat).collect::<Result<Vec<_>>>()?;
        let stacked = Tensor::f_stack(&tensors, 0)?.f_to_device(Device::Cpu)?;
        let numbers = Vec::<f64>::try_from(&stacked.f_flatten(0, -1)?)?;
        let width = numbers.len() / self.kept.len();
        let of_batches = numbers.chunks(width.max(1)).map(<[f64]>::to_vec);
        Ok(self.kept.iter().map(|(number, _)| *number).zip(of_batches).collect())
    }

    /// Joins the rows of all ranks in the order of the data, on the CPU.
    fn joined(&self, group: Option<&ProcessGroup>) -> Result<Folded> {
        let mut numbers = Vec::new();
        let (mut predictions, mut targets) = (Vec::new(), Vec::new());
        for (number, fold) in &self.kept {
            let Fold::Rows(first, second) = fold else { return Err(mixed()) };
            numbers.push(*number);
            predictions.push(first.shallow_clone());
            targets.push(second.shallow_clone());
        }
        let predictions = gather_in_data_order(group, &numbers, predictions)?;
        let targets = gather_in_data_order(group, &numbers, targets)?;
        match (predictions, targets) {
            (Some(predictions), Some(targets)) => Ok(Folded::Rows(predictions, targets)),
            _ => Err(Error::invalid_argument("no rank has a batch")),
        }
    }
}

fn mixed() -> Error {
    Error::invalid_argument("it keeps sums of some batches and rows of others")
}

/// Adds the sums of all batches up in the order of the data.
fn added(all: Vec<Kept>) -> Result<Option<Folded>> {
    let mut batches: Vec<(usize, usize, Vec<f64>)> = Vec::new();
    for (rank, kept) in all.into_iter().enumerate() {
        if let Kept::Sums(sums) = kept {
            batches.extend(sums.into_iter().map(|(number, sums)| (number, rank, sums)));
        }
    }
    let Some((_, first, width)) = batches.first().map(|it| (it.0, it.1, it.2.len())) else {
        return Ok(None);
    };
    if let Some((_, rank, sums)) = batches.iter().find(|(.., sums)| sums.len() != width) {
        return Err(Error::invalid_argument(format!(
            "compute_metric: rank {first}'s metric has {width} sums, rank {rank}'s {}; make the same metric on \
             every rank",
            sums.len()
        )));
    }
    // Stable: batches of one number stay in the order of their ranks.
    batches.sort_by_key(|(number, ..)| *number);
    let mut total = vec![0.0; width];
    for (.., sums) in &batches {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    Ok(Some(Folded::Sums(total)))
}

/// Gives an error of a program's own metric, and its panic, the name of the metric.
fn named<R>(metric: &impl Metric, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let reason = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) if error.downcast_ref::<MetricError>().is_some() => return Err(error),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("it panicked: {}", message(&*panic)),
    };
    Err(MetricError { metric: metric.name(), reason }.into())
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
