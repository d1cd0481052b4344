//! Weights of sharded models to and from files, one tensor at a time.

use std::collections::HashMap;
use std::path::Path;

use brigade_checkpoint::{TensorInfo, TensorReader, WeightsReader};
use brigade_nn::{LoadReport, Model};
use brigade_torch::{Error, ProcessGroup, Result, TensorId, TensorRead, dtype_of};
use tch::{Device, Tensor};

use super::{Part, ShardedModel, ShardedParameter};
use crate::processes::Processes;
use crate::weights_file::{TargetWriter, WeightsTarget};

impl ShardedModel {
    /// Writes whole weights from rank 0, in the types of the shards. Beside the shards a rank has one tensor in memory.
    pub(crate) fn save_weights(
        &self,
        state: &[(String, Tensor)],
        processes: &Processes,
        to: &WeightsTarget,
    ) -> Result<()> {
        let tensors: Vec<Saved> =
            state.iter().map(|(name, tensor)| self.saved(name, tensor)).collect();
        let infos: Vec<(&str, TensorInfo)> = state
            .iter()
            .zip(&tensors)
            .map(|((name, _), tensor)| Ok((name.as_str(), tensor.info()?)))
            .collect::<Result<_>>()?;
        let mut writer = processes.on_main_process(|| to.create(&infos))?;
        // All ranks know the order, since all take part in each gather.
        let mut outcome = Ok(());
        for place in to.order(&infos)? {
            let whole = tensors[place].whole(self)?;
            // After an error the other ranks still wait for this one in the gathers that follow.
            if let (Some(writer), Ok(())) = (&mut writer, &outcome) {
                outcome = writer.write(&whole);
            }
        }
        let finished = processes.on_main_process(|| {
            outcome?;
            writer.map_or(Ok(()), TargetWriter::finish)
        });
        finished.map(drop)
    }

    fn saved(&self, name: &str, tensor: &Tensor) -> Saved {
        let of = |it: &ShardedParameter| (it.shard.shallow_clone(), it.part.clone());
        let found = self.with_parameters(|parameters| {
            parameters.iter().find(|it| it.names.iter().any(|known| known == name)).map(of)
        });
        match found {
            Some((shard, Some(part))) => Saved::Rows(shard, part),
            Some((shard, None)) => Saved::Whole(shard),
            None => Saved::Whole(tensor.shallow_clone()),
        }
    }

    /// Reads weights on rank 0, and sends each rank what it has of them. Returns the report, on rank 0. Beside the shards
    /// a rank has one tensor in memory.
    pub(crate) fn load_weights<M>(
        &self,
        model: &Model<M>,
        processes: &Processes,
        path: &Path,
        key: Option<&str>,
    ) -> Result<Option<LoadReport>> {
        let reader = processes.on_main_process(|| -> Result<_> {
            let reader = WeightsReader::open_entry(path, key)?;
            model.matched(&reader)?;
            reader.verify()?;
            Ok(reader)
        })?;
        // A second look, since the names of the first borrow the reader.
        let (matched, report) = match &reader {
            Some(reader) => model.matched(reader).map(|(values, report)| (values, Some(report)))?,
            None => (Vec::new(), None),
        };
        let mut from: HashMap<TensorId, TensorReader<'_>> = HashMap::new();
        for (reader, into) in matched {
            from.entry(TensorId::of(&into)).or_insert(reader);
        }
        self.take_values(model, processes, |tensor, values| {
            let reader = from.get(&TensorId::of(tensor));
            reader.map_or(Ok(()), |it| TensorRead::whole(*it, values.shallow_clone()).read())
        })?;
        Ok(report)
    }

    /// Replaces parameters and buffers by what rank 0 has of them, one tensor at a time. `read` puts the values of one of the
    /// model's tensors into another, on the CPU; it is called on rank 0 alone, until its first error.
    pub(crate) fn take_values<M>(
        &self,
        model: &Model<M>,
        processes: &Processes,
        mut read: impl FnMut(&Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        let mut receive = |tensor: &Tensor, values: &Tensor| {
            // An error leaves the other ranks with their part in what follows.
            if processes.is_main_process() && outcome.is_ok() {
                outcome = tch::no_grad(|| read(tensor, values));
            }
            let Some(group) = processes.group() else { return Ok(()) };
            let mut sent = values.f_to_device(processes.device())?;
            group.broadcast(&mut sent, 0)?;
            Ok::<_, Error>(tch::no_grad(|| values.shallow_clone().f_copy_(&sent))?)
        };
        let parameters = self.parameters.lock();
        for ShardedParameter { whole, shard, part, .. } in &*parameters {
            let values = Tensor::f_zeros(whole.size(), (shard.f_kind()?, Device::Cpu))?;
            receive(whole, &values)?;
            let rows = match part {
                Some(part) => narrow_to(&values, part)?,
                None => values,
            };
            tch::no_grad(|| shard.f_detach()?.f_copy_(&rows))?;
        }
        drop(parameters);
        for buffer in model.buffers() {
            let (size, kind) = (buffer.tensor.size(), buffer.tensor.f_kind()?);
            let values = Tensor::f_empty(size, (kind, Device::Cpu))?;
            tch::no_grad(|| values.shallow_clone().f_copy_(&buffer.tensor))?;
            receive(&buffer.tensor, &values)?;
            tch::no_grad(|| buffer.tensor.f_detach()?.f_copy_(&values))?;
        }
        self.sharder.shards_changed()?;
        processes.on_main_process(|| outcome).map(drop)
    }

    /// Returns the ranks that share one copy of the parameters.
    pub(crate) fn gather_group(&self) -> &ProcessGroup {
        &self.sharder.groups().gather
    }

    /// Returns a tensor of the state dictionary whole. All ranks take part.
    pub(crate) fn whole_value(&self, name: &str, tensor: &Tensor) -> Result<Tensor> {
        self.saved(name, tensor).whole(self)
    }
}

/// A tensor of a state dictionary.
enum Saved {
    Whole(Tensor),
    /// This rank's rows.
    Rows(Tensor, Part),
}

impl Saved {
    fn info(&self) -> Result<TensorInfo> {
        let (tensor, shape) = match self {
            Self::Whole(tensor) => {
                (tensor, tensor.size().iter().map(|size| size.unsigned_abs()).collect())
            }
            Self::Rows(shard, part) => (shard, part.shape.clone()),
        };
        let kind = tensor.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| {
            Error::invalid_argument(format!("a file of weights cannot hold a tensor of {kind:?}"))
        })?;
        Ok(TensorInfo { dtype, shape })
    }

    /// Returns the whole tensor. All ranks take part.
    fn whole(&self, model: &ShardedModel) -> Result<Tensor> {
        let (shard, part) = match self {
            Self::Whole(tensor) => return Ok(tensor.f_detach()?),
            Self::Rows(shard, part) => (shard, part),
        };
        gather_rows(shard, part, model.gather_group())
    }
}

/// Returns the tensor of which `shard` is this rank's rows, on the group's device. All ranks take part.
pub(crate) fn gather_rows(shard: &Tensor, part: &Part, group: &ProcessGroup) -> Result<Tensor> {
    let shape: Vec<i64> = part.shape.iter().map(|size| size.cast_signed()).collect();
    let mut room = shape.clone();
    room[0] = part.of(0).shape[0].cast_signed();
    let padded = Tensor::f_zeros(&room, (shard.f_kind()?, group.device()))?;
    let own = padded.f_narrow(0, 0, shard.size()[0])?;
    tch::no_grad(|| own.shallow_clone().f_copy_(shard))?;
    let all = group.all_gather_flat(&padded)?;
    let mut rows = shape.clone();
    rows[0] = -1;
    if padded.numel() == 0 {
        return Ok(Tensor::f_empty(&shape, (shard.f_kind()?, Device::Cpu))?);
    }
    Ok(all.f_reshape(&rows)?.f_narrow(0, 0, shape[0])?)
}

pub(crate) fn narrow_to(values: &Tensor, part: &Part) -> Result<Tensor> {
    let own = part.own();
    Ok(values.f_narrow(0, own.offset[0].cast_signed(), own.shape[0].cast_signed())?)
}
