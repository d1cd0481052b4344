//! Whole weights of models of which ranks have parts, to and from files, one tensor at a time.

use std::collections::HashMap;
use std::path::Path;

use brigade_checkpoint::{TensorInfo, TensorReader, WeightsReader};
use brigade_nn::{LoadReport, Model, TensorRegion, take_part};
use brigade_sharding::TensorPart;
use brigade_torch::{Error, Result, TensorId, TensorRead, dtype_of};
use tch::{Device, Tensor};

use super::PreparedModel;
use crate::processes::Processes;
use crate::sharding::{Part, ShardedModel, ShardedParameter, gather_rows, narrow_to};
use crate::tensor_parallel::{TensorModel, TensorModels};
use crate::weights_file::{TargetWriter, WeightsTarget};

/// A model of which this rank has rows, parts of divided layers, or rows of such parts.
pub(crate) struct Spread<'a, M> {
    model: &'a Model<M>,
    sharded: Option<&'a ShardedModel>,
    tensor: Option<(TensorRegion, &'a TensorModel)>,
    /// All ranks that have something of it.
    everyone: Processes,
}

/// A tensor of a state dictionary.
struct Saved {
    /// What this rank has of it.
    own: Tensor,
    rows: Option<Part>,
    part: Option<TensorPart>,
}

impl<M> PreparedModel<M> {
    /// Returns the model as one of which ranks have parts; `None` where every rank has all of it.
    pub(crate) fn spread(&self) -> Option<Spread<'_, M>> {
        let tensor = self.tensor.as_deref().zip(self.context.tensor.as_deref());
        if self.sharded.is_none() && tensor.is_none() {
            return None;
        }
        let region = |(of_model, models): (_, &TensorModels)| {
            (TensorRegion::new(models.group().clone()), of_model)
        };
        Some(Spread {
            model: &self.model,
            sharded: self.sharded.as_deref(),
            tensor: tensor.map(region),
            everyone: self.everyone(),
        })
    }
}

impl<M> Spread<'_, M> {
    /// Writes whole weights from rank 0, in the types of what optimizers step. Beside its own a rank has one tensor in memory.
    pub(crate) fn save_weights(
        &self,
        state: &[(String, Tensor)],
        to: &WeightsTarget,
    ) -> Result<()> {
        let processes = &self.everyone;
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
            let whole = self.whole(&tensors[place])?;
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

    /// Reads weights on rank 0, and sends each rank what it has of them. Returns the report, on rank 0. Beside its own a rank
    /// has one tensor in memory.
    pub(crate) fn load_weights(
        &self,
        path: &Path,
        key: Option<&str>,
    ) -> Result<Option<LoadReport>> {
        let reader = self.everyone.on_main_process(|| -> Result<_> {
            let reader = WeightsReader::open_entry(path, key)?;
            self.model.matched(&reader)?;
            reader.verify()?;
            Ok(reader)
        })?;
        // A second look, since the names of the first borrow the reader.
        let (matched, report) = match &reader {
            Some(reader) => {
                self.model.matched(reader).map(|(values, report)| (values, Some(report)))?
            }
            None => (Vec::new(), None),
        };
        let mut from: HashMap<TensorId, TensorReader<'_>> = HashMap::new();
        for (reader, into) in matched {
            from.entry(TensorId::of(&into)).or_insert(reader);
        }
        self.take_values(|tensor, values| {
            let reader = from.get(&TensorId::of(tensor));
            reader.map_or(Ok(()), |it| TensorRead::whole(*it, values.shallow_clone()).read())
        })?;
        Ok(report)
    }

    /// Replaces parameters and buffers by what rank 0 has of them, one tensor at a time. `read` puts the whole values of one of
    /// the model's tensors into another, on the CPU; it is called on rank 0 alone, until its first error.
    pub(crate) fn take_values(
        &self,
        mut read: impl FnMut(&Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let processes = &self.everyone;
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
        for parameter in self.model.parameters() {
            let saved = self.saved(&parameter.name, &parameter.tensor);
            let size = match &saved.part {
                Some(part) => signed(part.shape()),
                None => parameter.tensor.size(),
            };
            let values = Tensor::f_zeros(&size, (saved.own.f_kind()?, Device::Cpu))?;
            receive(&parameter.tensor, &values)?;
            let own = saved.taken(&values)?;
            tch::no_grad(|| saved.own.f_detach()?.f_copy_(&own))?;
        }
        for buffer in self.model.buffers() {
            let (size, kind) = (buffer.tensor.size(), buffer.tensor.f_kind()?);
            let values = Tensor::f_empty(size, (kind, Device::Cpu))?;
            tch::no_grad(|| values.shallow_clone().f_copy_(&buffer.tensor))?;
            receive(&buffer.tensor, &values)?;
            tch::no_grad(|| buffer.tensor.f_detach()?.f_copy_(&values))?;
        }
        if let Some(sharded) = self.sharded {
            sharded.sharder().shards_changed()?;
        }
        processes.on_main_process(|| outcome).map(drop)
    }

    /// Returns a tensor of the state dictionary whole. All ranks take part.
    pub(crate) fn whole_value(&self, name: &str, tensor: &Tensor) -> Result<Tensor> {
        self.whole(&self.saved(name, tensor))
    }

    fn saved(&self, name: &str, tensor: &Tensor) -> Saved {
        let of = |it: &ShardedParameter| (it.shard.shallow_clone(), it.part.clone());
        let shard = self.sharded.and_then(|sharded| {
            sharded.with_parameters(|parameters| {
                parameters.iter().find(|it| it.names.iter().any(|known| known == name)).map(of)
            })
        });
        let (own, rows) = shard.unwrap_or_else(|| (tensor.shallow_clone(), None));
        let part = self.tensor.as_ref().and_then(|(_, model)| model.part(name).cloned());
        Saved { own, rows, part }
    }

    /// Returns the whole tensor. All ranks take part.
    fn whole(&self, saved: &Saved) -> Result<Tensor> {
        let rows = match (&saved.rows, self.sharded) {
            (Some(rows), Some(sharded)) => gather_rows(&saved.own, rows, sharded.gather_group())?,
            _ => saved.own.f_detach()?,
        };
        match (&saved.part, &self.tensor) {
            (Some(part), Some((region, _))) => {
                // The group sends from its device, where an offloaded shard is not.
                region.whole(&rows.f_to_device(self.everyone.device())?, part)
            }
            _ => Ok(rows),
        }
    }
}

impl Saved {
    fn info(&self) -> Result<TensorInfo> {
        let shape = match (&self.part, &self.rows) {
            (Some(part), _) => part.shape().to_vec(),
            (None, Some(rows)) => rows.shape.clone(),
            (None, None) => self.own.size().iter().map(|size| size.unsigned_abs()).collect(),
        };
        let kind = self.own.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| {
            Error::invalid_argument(format!("a file of weights cannot hold a tensor of {kind:?}"))
        })?;
        Ok(TensorInfo { dtype, shape })
    }

    /// Returns what this rank has of whole values.
    fn taken(&self, values: &Tensor) -> Result<Tensor> {
        let part = match &self.part {
            Some(part) => take_part(values, part)?,
            None => values.shallow_clone(),
        };
        self.rows.as_ref().map_or(Ok(part.shallow_clone()), |rows| narrow_to(&part, rows))
    }
}

fn signed(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|size| size.cast_signed()).collect()
}
