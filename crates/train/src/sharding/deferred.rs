//! Values for the shards of a model that was built without memory.

use std::collections::HashMap;

use brigade_nn::{DeferredValue, Model, part_reads};
use brigade_torch::{Error, Result, TensorId, TensorRead};
use tch::Tensor;

use super::ShardedModel;
use super::narrow_to;
use crate::processes::Processes;

impl ShardedModel {
    /// Initializes the shards of a deferred model: each rank takes its rows of the values that rank 0 draws, one
    /// parameter at a time, and its rows of files. Does nothing for other models. All ranks take part.
    pub(crate) fn set_deferred_values<M>(
        &self,
        model: &mut Model<M>,
        processes: &Processes,
    ) -> Result<()> {
        let Some(values) = model.take_deferred_values() else { return Ok(()) };
        let buffers = model.buffers();
        let buffers: HashMap<TensorId, Tensor> =
            buffers.into_iter().map(|it| (TensorId::of(&it.tensor), it.tensor)).collect();
        let parameters = self.parameters.lock();
        let places: HashMap<TensorId, usize> = parameters
            .iter()
            .enumerate()
            .map(|(place, it)| (TensorId::of(&it.whole), place))
            .collect();
        let mut read = Ok(());
        values.for_each(|id, value| {
            let parameter = places.get(&id).map(|&place| &parameters[place]);
            match (parameter, value) {
                (Some(it), DeferredValue::Drawn(mut values)) => {
                    // Rank 0 has other experts than some of the ranks.
                    let group = if it.is_expert {
                        self.sharder().groups().experts.as_ref().map(|it| it.same.clone())
                    } else {
                        processes.group()
                    };
                    if let Some(group) = group {
                        values = values.f_to_device(processes.device())?;
                        group.broadcast(&mut values, 0)?;
                    }
                    let rows = match &it.part {
                        Some(part) => narrow_to(&values, part)?,
                        None => values,
                    };
                    tch::no_grad(|| it.shard.f_detach()?.f_copy_(&rows))?;
                }
                (Some(it), DeferredValue::File(from, part)) if read.is_ok() => {
                    let rows = it.part.as_ref().map(|rows| rows.own());
                    read = part_reads(from, &it.shard.f_detach()?, rows, part.as_ref())
                        .and_then(|reads| reads.into_iter().try_for_each(TensorRead::read));
                }
                (None, DeferredValue::Drawn(values)) => {
                    if let Some(buffer) = buffers.get(&id) {
                        tch::no_grad(|| buffer.f_detach()?.f_copy_(&values))?;
                    }
                }
                (_, DeferredValue::File(..)) => {}
            }
            Ok::<(), Error>(())
        })?;
        drop(parameters);
        // Without this, other ranks would wait for one that could not read its file.
        processes.agree("prepare of a deferred model", read)?;
        self.sharder().shards_changed()
    }
}
