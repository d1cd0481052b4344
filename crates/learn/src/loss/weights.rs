//! Weights of classes or labels: numbers, and a tensor of them on the device of the predictions.

use std::fmt;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

/// Optional weights. A copy on the device is kept, so that a step does not have to send them.
#[derive(Default)]
pub(super) struct Weights {
    values: Option<Vec<f64>>,
    placed: Mutex<Option<Tensor>>,
}

impl Weights {
    pub(super) fn new(values: &[f64]) -> Self {
        Self { values: Some(values.to_vec()), placed: Mutex::default() }
    }

    pub(super) fn is_some(&self) -> bool {
        self.values.is_some()
    }

    /// Returns the weights on the predictions' device. `expected` is the number of classes or labels.
    pub(super) fn beside(
        &self,
        loss: &str,
        expected: i64,
        options: (Kind, Device),
    ) -> Result<Option<Tensor>> {
        let Some(values) = &self.values else { return Ok(None) };
        if values.len() as i64 != expected {
            return Err(Error::invalid_argument(format!(
                "{loss}: {} for {expected} classes or labels; give one for each",
                counted(values.len(), "weight")
            )));
        }
        let mut placed = self.placed.lock();
        if let Some(tensor) = placed.as_ref().filter(|it| (it.kind(), it.device()) == options) {
            return Ok(Some(tensor.shallow_clone()));
        }
        let tensor = Tensor::from_slice(values).f_to_kind(options.0)?.f_to_device(options.1)?;
        *placed = Some(tensor.shallow_clone());
        Ok(Some(tensor))
    }
}

impl Clone for Weights {
    fn clone(&self) -> Self {
        Self { values: self.values.clone(), placed: Mutex::default() }
    }
}

impl PartialEq for Weights {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.fmt(f)
    }
}
