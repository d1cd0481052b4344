//! What the programs with a loop of their own share: its options, its losses, and their picture.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use brigade::data::Batch;
use brigade::models::{IGNORED_LABEL, TokenLoss};
use brigade::prelude::{
    Accelerator, Kind, Mean, MetricState, ProjectConfiguration, Schedule, Tensor,
};
use brigade::sharding::{Sharding, ShardingError, Strategy};
use brigade::text::SequenceBatch;
use brigade::torch::TensorTree;
use brigade::train::ModelSetting;
use brigade_plot::{Chart, Plot};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::{Common, positive};

/// Options of a training whose loop is in the program.
#[derive(Debug, Args, Serialize)]
pub struct Training {
    /// Number of epochs.
    #[arg(long, default_value_t = 3, value_parser = positive())]
    pub epochs: u64,
    /// Batch size of each process, in sequences.
    #[arg(long, default_value_t = 16, value_parser = positive())]
    pub batch_size: u64,
    /// Gradient accumulation steps; each token or pair has the same weight.
    #[arg(long, default_value_t = 1, value_parser = positive())]
    pub accumulate: u64,
    /// Number of warm-up steps, in which the learning rate rises from 0.
    #[arg(long, default_value_t = 100, value_name = "STEPS")]
    pub warmup: u64,
    /// Weight decay, of all parameters but biases and those of norms.
    #[arg(long, default_value_t = 0.01)]
    pub weight_decay: f64,
    /// Norm to which gradients are clipped.
    #[arg(long, default_value_t = 1.0, value_name = "NORM")]
    pub clip: f64,
    /// Save a picture of the losses, `loss.png`, into this folder.
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,
    /// Save the model and its tokenizer here, as `from_pretrained` of Hugging Face's transformers reads them.
    #[arg(long, value_name = "FOLDER")]
    pub save: Option<PathBuf>,
    /// What the processes divide between them: none, zero1, zero2, zero3 or hybrid=N [default: as the launcher says].
    #[arg(long, value_name = "STRATEGY", value_parser = ShardingChoice::parse)]
    pub sharding: Option<ShardingChoice>,
    /// Number of processes that divide each layer between them, and read the same samples [default: as the launcher says].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub tensor: Option<u64>,
    /// Number of processes that have parts of each sequence, and read the same samples [default: as the launcher says].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub context: Option<u64>,
    /// Number of processes that have stages of the model, and read the same samples [default: as the launcher says].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub pipeline: Option<u64>,
}

/// A strategy of sharding, or none.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ShardingChoice(Option<Strategy>);

impl ShardingChoice {
    fn parse(text: &str) -> Result<Self, ShardingError> {
        Strategy::parse_setting(text).map(Self)
    }
}

impl Training {
    /// Makes the Accelerator of these options. Each process draws its own dropout.
    ///
    /// # Errors
    /// When the launcher's variables contradict each other, a rank is gone, or the device cannot compute in the
    /// precision.
    pub fn accelerator(&self, common: &Common) -> anyhow::Result<Accelerator> {
        let mut builder =
            Accelerator::builder().gradient_accumulation_steps(self.accumulate as usize);
        if let Some(folder) = &common.checkpoint {
            builder = builder.project(ProjectConfiguration::new(folder).total_limit(2));
        }
        if let Some(ShardingChoice(strategy)) = self.sharding {
            builder = builder.sharding(strategy.map(Sharding::from));
        }
        if let Some(ranks) = self.tensor {
            builder = builder.tensor_parallel(ranks as usize);
        }
        if let Some(ranks) = self.context {
            builder = builder.context_parallel(ranks as usize);
        }
        if let Some(ranks) = self.pipeline {
            builder = builder.pipeline_parallel(ranks as usize);
        }
        let accelerator = common.accelerator(builder)?;
        // Processes that divide layers drop the same hidden numbers.
        accelerator.data_processes().set_seed_per_process(common.seed.into());
        let precision = ModelSetting::MixedPrecision(common.precision(&accelerator));
        Ok(accelerator.with_model_setting(precision)?)
    }

    /// Returns the number of optimizer steps, of epochs with so many batches of each process.
    #[must_use]
    pub fn steps(&self, batches: usize) -> u64 {
        (batches as u64).div_ceil(self.accumulate) * self.epochs
    }

    /// Lets the learning rate rise from 0 and then follow a schedule, which is asked for with the number of steps that
    /// are left to it. A training of fewer steps than the rise has rises for half of them.
    ///
    /// # Errors
    /// Those of the schedule.
    pub fn warmed_up(
        &self,
        steps: u64,
        then: impl FnOnce(u64) -> brigade::Result<Schedule>,
    ) -> anyhow::Result<Schedule> {
        let rise = if self.warmup < steps { self.warmup } else { steps / 2 };
        let schedule = then(steps - rise)?;
        Ok(if rise == 0 { schedule } else { schedule.warmup(rise, 0.0)? })
    }

    /// Starts the trackers where that was asked for, and goes on from the newest checkpoint where there is one, after
    /// everything was prepared.
    ///
    /// # Errors
    /// When a tracker cannot write, or the checkpoint does not fit.
    pub fn begin(&self, common: &Common, accelerator: &Accelerator) -> anyhow::Result<()> {
        if let Some(project) = &common.log {
            accelerator.trackers().start(project, self)?;
        }
        if common.checkpoint.is_some() && accelerator.checkpoints().latest()?.is_some() {
            let loaded = accelerator.checkpoints().load_latest()?;
            accelerator.println(format!("Going on after step {}", loaded.step));
        }
        Ok(())
    }
}

/// The losses of a training. Clones are the same list.
#[derive(Debug, Clone, Default)]
pub struct Losses(Arc<Mutex<Curves>>);

#[derive(Debug, Default, Serialize, Deserialize)]
struct Curves {
    /// Of each optimizer step.
    train: Vec<f64>,
    /// With the number of steps before.
    valid: Vec<(u64, f64)>,
}

impl Losses {
    /// Makes a list that is a part of the Accelerator's checkpoints.
    #[must_use]
    pub fn new(accelerator: &Accelerator) -> Self {
        let losses = Self::default();
        accelerator.checkpoints().register_value(&losses.0);
        losses
    }

    /// Adds the loss of a step.
    pub fn push(&self, loss: f64) {
        self.curves().train.push(loss);
    }

    /// Adds the validation loss after so many steps.
    pub fn push_valid(&self, steps: u64, loss: f64) {
        self.curves().valid.push((steps, loss));
    }

    /// Does what was asked for when the training is over: prints the losses, and draws them.
    ///
    /// # Errors
    /// When the picture cannot be written.
    pub fn finish(
        &self,
        accelerator: &Accelerator,
        common: &Common,
        training: &Training,
    ) -> anyhow::Result<()> {
        let curves = self.curves();
        if common.log_losses {
            accelerator.println(format!("losses {:?}", curves.train));
        }
        if let Some(folder) = training.plots.as_ref().filter(|_| accelerator.is_main_process()) {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
            let points = |steps: &mut dyn Iterator<Item = (u64, f64)>| -> Vec<(f64, f64)> {
                steps.map(|(step, loss)| (step as f64, loss)).collect()
            };
            let train = points(&mut (1..).zip(curves.train.iter().copied()));
            let valid = points(&mut curves.valid.iter().copied());
            let chart = Chart::new("Loss").x("step").y("loss").line("train", train);
            chart.line("valid", valid).save(folder.join("loss.png"))?;
        }
        Ok(())
    }

    fn curves(&self) -> MutexGuard<'_, Curves> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a batch without the labels of the duplicates that complete the last batch of an epoch: losses then count every
/// sequence once, on any number of processes. It has at least so many rows, as a pipeline has micro-batches: the last row
/// stands for those that are missing, without labels as well.
///
/// # Errors
/// When the batch has no labels.
pub fn counted_once(batch: &Batch<SequenceBatch>, least: usize) -> anyhow::Result<SequenceBatch> {
    let [valid, rows] = [batch.valid(), batch.rows()].map(|rows| rows as i64);
    let all = rows.max(least as i64);
    let sequences: &SequenceBatch = batch;
    let mut whole = sequences.try_map(&mut |tensor: &Tensor| {
        if all == rows {
            return Ok::<_, brigade::Error>(tensor.shallow_clone());
        }
        let places = Tensor::f_arange(all, (Kind::Int64, tensor.device()))?;
        Ok(tensor.f_index_select(0, &places.f_clamp_max(rows - 1)?)?)
    })?;
    let labels = whole.labels.as_ref().context("the batch has no labels")?;
    if valid < all {
        let copies = Tensor::f_arange_start(valid, all, (Kind::Int64, labels.device()))?;
        whole.labels = Some(labels.f_index_fill(0, &copies, IGNORED_LABEL)?);
    }
    Ok(whole)
}

/// Returns the labels of a batch that [`counted_once`] has made.
///
/// # Errors
/// When the batch has no labels.
pub fn labels_of(batch: &SequenceBatch) -> brigade::Result<&Tensor> {
    let labels = batch.labels.as_ref();
    labels.ok_or_else(|| brigade::Error::invalid_argument("the batch has no labels"))
}

/// Adds a loss to a mean over all labels.
///
/// # Errors
/// libtorch's.
pub fn add_loss(mean: &mut MetricState<Mean>, loss: &TokenLoss) -> brigade::Result<()> {
    let count = loss.count.f_int64_value(&[])?;
    if count > 0 {
        mean.add(loss.mean()?.f_double_value(&[])?, count as f64)?;
    }
    Ok(())
}
