//! Another sharding for the models that an Accelerator prepares.

use std::sync::Arc;

use brigade_sharding::Sharding;
use brigade_torch::{DeviceExt, Error, Result};
use tch::Device;

use super::Accelerator;
use crate::gradients::backward::Gradients;
use crate::gradients::hook::CommHook;
use crate::sharding::ShardedModels;

impl Accelerator {
    /// Returns this Accelerator with another sharding, or with whole models on each rank (`None`).
    pub(super) fn with_sharding(&self, sharding: Option<Sharding>) -> Result<Self> {
        let job = &self.gradients.processes.job;
        let mut options = self.numerics_options();
        options.output = None;
        let sharded = match sharding {
            Some(sharding) => {
                refuse_device(&sharding, job.device)?;
                let sharding = options.with_sharding(sharding)?;
                let experts = self.gradients.tensor.as_ref().map_or(1, |it| it.expert_ranks());
                Some(Arc::new(ShardedModels::new(sharding, job.size(), experts)?))
            }
            None => None,
        };
        if let Some(sharded) = &sharded {
            refuse_hook(sharded, &self.options.models.comm_hook)?;
        }
        let (numerics, scaler) = options.decide(&self.processes.job, self.numerics.tf32)?;
        let loss_check = self.gradients.loss_check.as_ref();
        let loss_check = loss_check.map(|it| Arc::new(it.with_sharding(job, sharded.clone())));
        let checkpoints = self.checkpoints.with_sharding(loss_check.clone(), sharded.clone());
        // An existing loss scale is kept.
        let scaler = match (&self.gradients.scaler, scaler) {
            (Some(before), Some(_)) => Some(before.clone()),
            (_, scaler) => {
                scaler.iter().for_each(|scaler| checkpoints.register(scaler));
                scaler
            }
        };
        let loss_check = loss_check.filter(|_| scaler.is_none());
        let gradients = Gradients { scaler, loss_check, sharded, ..self.gradients.clone() };
        Ok(Self { numerics: Arc::new(numerics), gradients, checkpoints, ..self.clone() })
    }
}

/// Fails for a device on which memory does not come and go while tensors stay, as that of sharded parameters does.
pub(super) fn refuse_device(sharding: &Sharding, device: Device) -> Result<()> {
    if device == Device::Cpu || device.has_streams() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "sharding ({}) is not supported on {}: leave it out, so that each rank has the whole model",
        sharding.strategy,
        device.label()
    )))
}

/// Fails if a communication hook is set: hooks take whole gradients, which sharded models do not have.
pub(super) fn refuse_hook(sharded: &ShardedModels, hook: &CommHook) -> Result<()> {
    if hook.is_none() {
        return Ok(());
    }
    Err(sharded.refuse(
        "a communication hook",
        "it gets buckets of whole gradients, and shards are reduced without buckets",
    ))
}
