//! The callback that fills the recorder: losses and metrics of all ranks, in the order of the data.

use std::sync::Arc;
use std::time::Instant;

use brigade_metrics::{Metric, MetricState};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::callback::{Callback, Step};
use crate::recorder::{EpochRow, Recorder};
use crate::state::LearnerState;

/// Options of the recording besides the losses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecorderOptions {
    /// `true` if metrics of the training batches are recorded as well.
    pub(crate) train_metrics: bool,
    /// `true` if loss and metrics of the validation are recorded.
    pub(crate) valid_metrics: bool,
    /// `true` if losses are read after each batch, also on several ranks and on a GPU.
    pub(crate) at_once: bool,
}

/// The callback that fills the recorder, with fastai's order 50.
#[derive(Debug)]
pub(crate) struct Recording {
    options: RecorderOptions,
    /// Training losses that have not been read yet: the device may still be computing them.
    pending: Vec<(Tensor, usize)>,
    train: Meters,
    valid: Meters,
    row: Vec<Option<f64>>,
    began: Instant,
}

impl Recording {
    pub(crate) fn new(options: RecorderOptions) -> Self {
        Self {
            options,
            pending: Vec::new(),
            train: Meters::default(),
            valid: Meters::default(),
            row: Vec::new(),
            began: Instant::now(),
        }
    }

    fn names(&self, metrics: &[Arc<dyn Metric<Value = f64>>], validates: bool) -> Vec<String> {
        let metrics: Vec<String> = metrics.iter().map(|metric| metric.name()).collect();
        let valid = self.options.valid_metrics && validates;
        let prefixed = |phase: &str| -> Vec<String> {
            std::iter::once("loss")
                .chain(metrics.iter().map(String::as_str))
                .map(|name| format!("{phase}_{name}"))
                .collect()
        };
        match (self.options.train_metrics, valid) {
            (true, true) => [prefixed("train"), prefixed("valid")].concat(),
            (true, false) => std::iter::once("train_loss".to_owned()).chain(metrics).collect(),
            (false, true) => ["train_loss".to_owned(), "valid_loss".to_owned()]
                .into_iter()
                .chain(metrics)
                .collect(),
            (false, false) => vec!["train_loss".to_owned()],
        }
    }

    /// Reads the pending losses of all ranks. Every rank takes part.
    fn read_losses(&mut self, learner: &mut LearnerState) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        for loss in global_losses(&learner.accelerator, &pending)? {
            learner.recorder.record(loss);
        }
        Ok(())
    }

    /// Writes values into the row, at the columns from `at` on.
    fn fill(&mut self, at: usize, values: impl IntoIterator<Item = f64>) {
        for (place, value) in self.row.iter_mut().skip(at).zip(values) {
            *place = Some(value);
        }
    }

    fn train_columns(&self, metrics: usize) -> usize {
        1 + if self.options.train_metrics { metrics } else { 0 }
    }
}

impl Callback for Recording {
    fn name(&self) -> String {
        "Recorder".to_owned()
    }

    fn order(&self) -> i32 {
        50
    }

    /// Reads pending losses, so that the recorder of a checkpoint is complete.
    fn state(&mut self, learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        self.read_losses(learner)?;
        Ok(None)
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        if !learner.is_evaluation() {
            let names = self.names(&learner.metrics, learner.has_validation());
            unique(&names)?;
            learner.recorder = Recorder { names, ..Recorder::default() };
        }
        self.pending.clear();
        Ok(())
    }

    fn before_epoch(&mut self, learner: &mut LearnerState) -> Step {
        self.began = Instant::now();
        self.row = vec![None; learner.recorder.names.len()];
        Ok(())
    }

    fn before_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.train = Meters::default();
        Ok(())
    }

    fn before_validate(&mut self, _learner: &mut LearnerState) -> Step {
        self.valid = Meters::default();
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        let Some(loss) = learner.batch.loss.as_ref().map(Tensor::shallow_clone) else {
            return Ok(());
        };
        if !learner.is_training() {
            if self.options.valid_metrics {
                self.valid.add(learner)?;
            }
            return Ok(());
        }
        if self.options.train_metrics {
            self.train.add_metrics(learner)?;
        }
        if let Some(hypers) = learner.hypers().last().copied() {
            learner.recorder.lrs.push(hypers.lr);
            learner.recorder.momenta.push(hypers.momentum);
        }
        self.pending.push((loss, learner.batch_rows()));
        // A tensor on the CPU is read without waiting, and callbacks get it immediately.
        let is_free = learner.device() == Device::Cpu
            && !learner.accelerator.data_processes().use_distributed();
        if is_free || self.options.at_once {
            self.read_losses(learner)?;
        }
        Ok(())
    }

    fn after_train(&mut self, learner: &mut LearnerState) -> Step {
        self.read_losses(learner)?;
        if learner.recorder.losses.is_empty() {
            return Ok(());
        }
        let smooth = learner.recorder.smooth.value();
        let mut values = vec![smooth];
        if self.options.train_metrics {
            values.extend(self.train.metrics(learner)?);
        }
        if !learner.train_was_cancelled() {
            self.fill(0, values);
        }
        Ok(())
    }

    fn after_validate(&mut self, learner: &mut LearnerState) -> Step {
        if !self.options.valid_metrics || !learner.has_validation() {
            return Ok(());
        }
        let values = self.valid.values(learner)?;
        let losses = self.valid.read_losses();
        // A validation without a batch that has a loss records nothing.
        if !learner.validation_was_cancelled() && !losses.is_empty() {
            let at = self.train_columns(learner.metrics.len());
            self.fill(at, values);
            learner.recorder.valid_losses.extend(losses);
        }
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        // The epoch was cancelled during its training.
        self.read_losses(learner)?;
        // An epoch that was cancelled before this callback was called has no row yet.
        self.row.resize(learner.recorder.names.len(), None);
        learner.recorder.rows.push(EpochRow {
            epoch: learner.epoch(),
            values: std::mem::take(&mut self.row),
            time: self.began.elapsed(),
        });
        let count = learner.recorder.losses.len();
        learner.recorder.iters.push(count);
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        // The fit was cancelled within an epoch.
        Ok(self.read_losses(learner)?)
    }
}

/// Loss and metrics of a pass over data.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    /// Index of each batch among those of all ranks.
    places: Vec<usize>,
    losses: Vec<Tensor>,
    samples: Vec<usize>,
    metrics: Vec<MetricState<Arc<dyn Metric<Value = f64>>>>,
    read: Vec<f64>,
}

impl Meters {
    /// Adds the current batch.
    pub(crate) fn add(&mut self, learner: &LearnerState) -> Result<()> {
        let Some(loss) = &learner.batch.loss else { return Ok(()) };
        if learner.batch.valid == 0 {
            return Ok(());
        }
        self.losses.push(loss.shallow_clone());
        self.add_metrics(learner)
    }

    fn add_metrics(&mut self, learner: &LearnerState) -> Result<()> {
        let batch = &learner.batch;
        let (Some(predictions), Some(target)) = (&batch.predictions, &batch.target) else {
            return Ok(());
        };
        self.places.push(batch.place);
        self.samples.push(batch.valid);
        let valid = batch.valid as i64;
        let real = |tensor: &Tensor| {
            if batch.rows == batch.valid {
                Ok(tensor.shallow_clone())
            } else {
                tensor.f_narrow(0, 0, valid)
            }
        };
        let (predictions, target) = (real(predictions)?, real(target)?);
        if self.metrics.is_empty() {
            self.metrics = states(learner);
        }
        for metric in &mut self.metrics {
            metric.update_at(batch.place, &predictions, &target)?;
        }
        Ok(())
    }

    /// Returns the mean loss and the metrics, of all ranks. Every rank takes part.
    pub(crate) fn values(&mut self, learner: &LearnerState) -> Result<Vec<f64>> {
        let losses = read(&self.losses)?;
        let products: Vec<f64> =
            losses.iter().zip(&self.samples).map(|(loss, n)| loss * *n as f64).collect();
        let all: Vec<Vec<(usize, f64, usize)>> =
            learner.accelerator.data_processes().gather_object(
                self.places
                    .iter()
                    .zip(products)
                    .zip(&self.samples)
                    .map(|((place, product), samples)| (*place, product, *samples))
                    .collect(),
            )?;
        let mut all: Vec<(usize, f64, usize)> = all.into_iter().flatten().collect();
        all.sort_by_key(|(place, ..)| *place);
        let samples: usize = all.iter().map(|(_, _, samples)| samples).sum();
        let sum: f64 = all.iter().map(|(_, product, _)| product).sum();
        self.read = all.iter().map(|(_, product, samples)| product / *samples as f64).collect();
        let mut values = vec![sum / samples as f64];
        values.extend(self.metrics(learner)?);
        Ok(values)
    }

    /// Removes and returns the losses of the batches of all ranks, in their order.
    fn read_losses(&mut self) -> Vec<f64> {
        std::mem::take(&mut self.read)
    }

    /// Returns the metrics, of all ranks. Every rank takes part.
    fn metrics(&mut self, learner: &LearnerState) -> Result<Vec<f64>> {
        let mut metrics = std::mem::take(&mut self.metrics);
        // A rank without a batch takes part, too.
        if metrics.is_empty() {
            metrics = states(learner);
        }
        let group = learner.accelerator.data_processes().group();
        let value = |metric: &MetricState<_>| match metric.folded(group.as_ref())? {
            // No batch of any rank has a target.
            None => Ok(f64::NAN),
            Some(folded) => Ok(metric.value(&folded)?),
        };
        metrics.iter().map(value).collect()
    }
}

fn states(learner: &LearnerState) -> Vec<MetricState<Arc<dyn Metric<Value = f64>>>> {
    learner.metrics.iter().cloned().map(MetricState::new).collect()
}

/// Checks that names are unique, because callbacks find a column by its name.
pub(crate) fn unique(names: &[String]) -> Result<()> {
    let repeated = names.iter().enumerate().find(|(place, name)| names[..*place].contains(name));
    match repeated {
        None => Ok(()),
        Some((_, name)) => Err(Error::invalid_argument(format!(
            "two columns of the recorder are named `{name}`; give a metric another name with `named`"
        ))),
    }
}

/// Reads losses of one value each, waiting for the device once.
pub(crate) fn read(losses: &[Tensor]) -> Result<Vec<f64>> {
    match losses {
        [] => Ok(Vec::new()),
        [loss] => Ok(vec![loss.f_double_value(&[])?]),
        _ => {
            let losses: Vec<Tensor> = losses
                .iter()
                .map(|loss| Ok(loss.f_to_kind(Kind::Double)?.f_reshape([1])?))
                .collect::<Result<_>>()?;
            Ok(Vec::try_from(&Tensor::f_cat(&losses, 0)?.f_to_device(Device::Cpu)?)?)
        }
    }
}

/// Returns the losses of the batches of all ranks, weighted by their rows. Every rank takes part.
pub(crate) fn global_losses(
    accelerator: &Accelerator,
    pending: &[(Tensor, usize)],
) -> Result<Vec<f64>> {
    let losses: Vec<Tensor> = pending.iter().map(|(loss, _)| loss.shallow_clone()).collect();
    let mine = read(&losses)?;
    if !accelerator.data_processes().use_distributed() {
        return Ok(mine);
    }
    let weighted: Vec<(f64, f64)> = mine
        .iter()
        .zip(pending)
        .map(|(loss, (_, rows))| (loss * *rows as f64, *rows as f64))
        .collect();
    let all = accelerator.data_processes().gather_object(weighted)?;
    let batches = all.iter().map(Vec::len).max().unwrap_or(0);
    let mean = |batch: usize| {
        let of_ranks = all.iter().filter_map(|rank| rank.get(batch));
        let (sum, rows) = of_ranks.fold((0.0, 0.0), |(sum, rows), it| (sum + it.0, rows + it.1));
        sum / rows
    };
    Ok((0..batches).map(mean).collect())
}
