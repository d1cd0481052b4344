//! The device of a unit or layer, and the loading and unloading of its weights.

use std::sync::Arc;

use brigade_torch::{HeldWeights, Result, WeightRing};
use tch::{Device, Tensor};

/// The device on which a unit or a layer computes.
pub(crate) struct Placed {
    pub(crate) device: Device,
    /// Ring that loads its weights which are not resident on the device.
    pub(crate) ring: Option<Arc<WeightRing>>,
    /// Indices of its parts of the ring.
    pub(crate) parts: Vec<usize>,
    /// `true` if the key-value cache of the unit is in the host's memory, as its weights are.
    pub(crate) offloads_cache: bool,
}

impl Placed {
    /// Loads the weights into memory, until the returned value is dropped.
    pub(crate) fn hold(&self) -> Result<Option<HeldWeights<'_>>> {
        self.ring.as_ref().map(|ring| ring.hold(&self.parts)).transpose()
    }

    /// Returns a tensor on the device.
    pub(crate) fn moved(&self, input: &Tensor) -> Result<Tensor> {
        Ok(if input.device() == self.device {
            input.shallow_clone()
        } else {
            input.f_to_device(self.device)?
        })
    }
}
