//! Whole weights of models of which ranks have parts, to and from files, one tensor at a time.

use std::collections::HashMap;
use std::path::Path;

use brigade_checkpoint::{TensorInfo, TensorReader, WeightsReader};
use brigade_nn::{LoadReport, Model, part_reads, weights};
use brigade_torch::{Error, Result, TensorId, TensorRead, dtype_of};
use tch::{Device, Tensor};

use super::PreparedModel;
use crate::processes::Processes;
use crate::registry::Checkpointed;
use crate::sharding::{Part, PartRegions, ShardedModel};
use crate::weights_file::{TargetWriter, WeightsTarget};

/// A model of which this rank has rows, parts of divided layers, or rows of such parts.
pub(crate) struct Spread<'a, M> {
    model: &'a Model<M>,
    sharded: Option<&'a ShardedModel>,
    /// Parts by all names of the parameters.
    parts: HashMap<String, Part>,
    regions: PartRegions,
    /// All ranks that have a part of the model.
    everyone: Processes,
}

/// A tensor of a state dictionary, as this rank has it.
struct Saved {
    own: Tensor,
    part: Option<Part>,
}

impl<M> PreparedModel<M> {
    /// Returns the model as one that is divided among ranks. `None` if every rank has the whole model.
    pub(crate) fn spread(&self) -> Option<Spread<'_, M>> {
        // Must be called on the value: every `Arc` of a `Stateful` is `Checkpointed` as well, but without parts.
        let parts = Checkpointed::parts(&*self.inner);
        if self.sharded.is_none() && parts.is_empty() {
            return None;
        }
        Some(self.spread_or_whole())
    }

    /// Returns the model as one that may be divided among ranks.
    pub(super) fn spread_or_whole(&self) -> Spread<'_, M> {
        Spread {
            model: &self.model,
            sharded: self.sharded.as_deref(),
            // Must be called on the value, as in `spread`.
            parts: Checkpointed::parts(&*self.inner),
            regions: self.regions(),
            everyone: self.everyone(),
        }
    }

    /// Returns the ranks that have the other parts of this rank's tensors.
    pub(crate) fn regions(&self) -> PartRegions {
        self.context.tensor.as_ref().map(|it| it.regions()).unwrap_or_default()
    }
}

impl<M> Spread<'_, M> {
    /// Writes whole weights from rank 0, in the types of the tensors that optimizers step. At most one whole tensor is
    /// in a rank's memory in addition to its own.
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
        // The order is the same on all ranks, since all take part in each gather.
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

    /// Reads weights on rank 0, and sends each rank its part. Returns the report on rank 0. At most one whole tensor is
    /// in a rank's memory in addition to its own.
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
        // Looked up again, since the names of the first lookup borrow the reader.
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

    /// Replaces parameters and buffers by rank 0's, one tensor at a time. `read` writes the whole values of one of the
    /// model's tensors into another one on the CPU; it is called on rank 0 alone, until its first error.
    pub(crate) fn take_values(
        &self,
        mut read: impl FnMut(&Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let processes = &self.everyone;
        let mut outcome = Ok(());
        let mut receive = |tensor: &Tensor, values: &Tensor| {
            // After an error, the other ranks still wait for this one in the calls that follow.
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
                Some(part) => part.whole_shape().iter().map(|size| size.cast_signed()).collect(),
                None => parameter.tensor.size(),
            };
            let values = Tensor::f_zeros(&size, (saved.own.f_kind()?, Device::Cpu))?;
            receive(&parameter.tensor, &values)?;
            let own = match &saved.part {
                Some(part) => part.take(&values)?,
                None => values,
            };
            tch::no_grad(|| saved.own.f_detach()?.f_copy_(&own))?;
        }
        for buffer in self.model.buffers() {
            let (size, kind) = (buffer.tensor.size(), buffer.tensor.f_kind()?);
            let values = Tensor::f_empty(size, (kind, Device::Cpu))?;
            tch::no_grad(|| values.shallow_clone().f_copy_(&buffer.tensor))?;
            receive(&buffer.tensor, &values)?;
            tch::no_grad(|| buffer.tensor.f_detach()?.f_copy_(&values))?;
        }
        self.changed()?;
        processes.on_main_process(|| outcome).map(drop)
    }

    /// Returns a whole tensor of the state dictionary. All ranks take part.
    pub(crate) fn whole_value(&self, name: &str, tensor: &Tensor) -> Result<Tensor> {
        self.whole(&self.saved(name, tensor))
    }

    /// Returns the type and shape of a whole tensor of the state dictionary.
    pub(super) fn info(&self, name: &str, tensor: &Tensor) -> Result<TensorInfo> {
        self.saved(name, tensor).info()
    }

    /// Writes this rank's part of a whole tensor into a tensor of the state dictionary. See [`Spread::changed`].
    pub(super) fn put(&self, name: &str, tensor: &Tensor, whole: &Tensor) -> Result<()> {
        let Saved { own, part } = self.saved(name, tensor);
        let values = match &part {
            Some(part) => part.take(whole)?,
            None => whole.shallow_clone(),
        };
        Ok(tch::no_grad(|| own.f_detach()?.f_copy_(&values).map(drop))?)
    }

    /// Updates the model after its tensors were written to.
    pub(super) fn changed(&self) -> Result<()> {
        self.sharded.map_or(Ok(()), |sharded| sharded.sharder().shards_changed())
    }

    /// Reads this rank's parts from open weights.
    pub(super) fn read_own(&self, weights: &WeightsReader) -> Result<LoadReport> {
        let (matched, report) = self.model.matched(weights)?;
        let named: HashMap<TensorId, String> = self
            .model
            .parameters()
            .into_iter()
            .map(|parameter| (TensorId::of(&parameter.tensor), parameter.name))
            .collect();
        let mut reads = Vec::new();
        for (from, into) in matched {
            let name = named.get(&TensorId::of(&into)).map_or("", String::as_str);
            let Saved { own, part } = self.saved(name, &into);
            let rows = part.as_ref().filter(|_| self.sharded.is_some()).map(Part::own);
            let part = part.as_ref().and_then(|part| part.tensor.as_ref());
            reads.extend(part_reads(from, &own.f_detach()?, rows, part)?);
        }
        weights::read(weights, reads)?;
        self.changed()?;
        Ok(report)
    }

    fn saved(&self, name: &str, tensor: &Tensor) -> Saved {
        let shard = self.sharded.and_then(|sharded| sharded.shard(name));
        Saved {
            own: shard.unwrap_or_else(|| tensor.shallow_clone()),
            part: self.parts.get(name).cloned(),
        }
    }

    /// Returns the whole tensor. All ranks take part.
    fn whole(&self, saved: &Saved) -> Result<Tensor> {
        match &saved.part {
            Some(part) => {
                let rows = self.sharded.map(ShardedModel::gather_group);
                part.gather(&saved.own, rows, &self.regions)
            }
            None => Ok(saved.own.f_detach()?),
        }
    }
}

impl Saved {
    fn info(&self) -> Result<TensorInfo> {
        let shape = match &self.part {
            Some(part) => part.whole_shape().to_vec(),
            None => self.own.size().iter().map(|size| size.unsigned_abs()).collect(),
        };
        let kind = self.own.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| {
            Error::invalid_argument(format!("a file of weights cannot hold a tensor of {kind:?}"))
        })?;
        Ok(TensorInfo { dtype, shape })
    }
}
