//! The recorder: rates and losses of every batch, and a row of numbers for every epoch.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The recording of a fit, equal on every rank: losses are those of the batches of all ranks together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recorder {
    pub(crate) lrs: Vec<f64>,
    pub(crate) momenta: Vec<f64>,
    pub(crate) losses: Vec<f64>,
    pub(crate) smooth_losses: Vec<f64>,
    pub(crate) valid_losses: Vec<f64>,
    pub(crate) iters: Vec<usize>,
    pub(crate) names: Vec<String>,
    pub(crate) rows: Vec<EpochRow>,
    pub(crate) smooth: Smooth,
}

/// The values of an epoch, in the order of [`Recorder::names`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochRow {
    /// Number of the epoch, from 0.
    pub epoch: usize,
    /// Value of each name. `None` for a part of the epoch that was cancelled or did not take place.
    pub values: Vec<Option<f64>>,
    /// Duration of the epoch.
    pub time: Duration,
}

/// Exponentially weighted mean, corrected for the bias of its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Smooth {
    mean: f64,
    count: u32,
}

/// Weight of the past in smoothed losses, the same as fastai's.
const BETA: f64 = 0.98;

impl Smooth {
    fn add(&mut self, value: f64) -> f64 {
        self.count += 1;
        self.mean = value + BETA * (self.mean - value);
        self.value()
    }

    pub(crate) fn value(&self) -> f64 {
        self.mean / (1.0 - BETA.powi(self.count.cast_signed()))
    }
}

impl Recorder {
    /// Returns the learning rate of the last parameter group for each training batch.
    #[must_use]
    pub fn lrs(&self) -> &[f64] {
        &self.lrs
    }

    /// Returns the momentum of the last parameter group for each training batch.
    #[must_use]
    pub fn momenta(&self) -> &[f64] {
        &self.momenta
    }

    /// Returns the loss of each training batch, over the batches of all ranks together. Complete after each epoch.
    #[must_use]
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Returns the smoothed loss after each training batch (fastai's `recorder.losses`).
    #[must_use]
    pub fn smooth_losses(&self) -> &[f64] {
        &self.smooth_losses
    }

    /// Returns the number of training batches so far at the end of each epoch.
    #[must_use]
    pub fn iters(&self) -> &[usize] {
        &self.iters
    }

    /// Returns the names of the columns: `train_loss`, `valid_loss`, and the metrics.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the rows of the epochs.
    #[must_use]
    pub fn rows(&self) -> &[EpochRow] {
        &self.rows
    }

    /// Returns a column's value in the last epoch. `None` if there is no such column, or if it has no value in that
    /// epoch.
    #[must_use]
    pub fn last(&self, name: &str) -> Option<f64> {
        self.value(self.rows.last()?, name)
    }

    /// Returns the values of a column in all epochs.
    #[must_use]
    pub fn column(&self, name: &str) -> Vec<Option<f64>> {
        self.rows.iter().map(|row| self.value(row, name)).collect()
    }

    fn value(&self, row: &EpochRow, name: &str) -> Option<f64> {
        let index = self.names.iter().position(|known| known == name)?;
        row.values.get(index).copied().flatten()
    }

    pub(crate) fn record(&mut self, loss: f64) {
        self.losses.push(loss);
        let smooth = self.smooth.add(loss);
        self.smooth_losses.push(smooth);
    }
}
