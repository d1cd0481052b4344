//! Allocation and loading of the weights of a model with a device map.

use std::sync::Arc;

use brigade_checkpoint::PackedWeight;
use brigade_sharding::device_map::{Place, Placement};
use brigade_torch::{
    Error, QuantizedWeight, Result, TensorId, WeightSource, has_memory, pinned_like, unallocated,
};
use indexmap::IndexMap;
use parking_lot::Mutex;
use tch::{Device, Tensor};

use super::{Model, place_of};
use crate::deferred::{FileValues, ValueSource};
use crate::error::ModelError;
use crate::model::materialize::{Filling, allocated};
use crate::param_registry::Entry;
use crate::quantized::{QuantizedSlot, Weights};

/// Destinations of a model's tensors, by their indices among its entries.
pub(super) struct Homes<'p> {
    pub(super) placement: &'p Placement,
    /// Tensors that stay on the device that computes with them.
    pub(super) resident: Vec<usize>,
    /// Tensors that are loaded for each use.
    pub(super) moving: Vec<usize>,
    pub(super) weights: &'p Weights,
}

/// Tensors of each entry that is loaded for each use, several for a quantised weight, with the sources of their values.
pub(super) type Sources = IndexMap<usize, Vec<(Tensor, WeightSource)>>;

/// Location of an entry's values.
#[derive(Clone, Copy)]
struct Home {
    index: usize,
    /// Device that computes with the entry.
    device: Device,
    /// `true` if it stays there; otherwise its values stay in the host's memory.
    stays: bool,
}

impl<M> Model<M> {
    /// Allocates and fills resident tensors, and returns the sources of the others' values.
    pub(super) fn give_memory(
        &mut self,
        homes: &Homes<'_>,
        device_of: impl Fn(usize) -> Device,
    ) -> Result<Sources> {
        let mut sources = Sources::new();
        let mut values = self.take_deferred_values();
        let mut to_fill: IndexMap<TensorId, Home> = IndexMap::new();
        for &index in &homes.moving {
            let entry = &self.entries()[index];
            let id = TensorId::of(&entry.tensor);
            if place_of(homes.placement, &entry.name)? != Place::Disk {
                if has_memory(&entry.tensor) {
                    sources.insert(index, vec![from_memory(&entry.tensor)?]);
                }
                to_fill.insert(id, Home { index, device: device_of(index), stays: false });
                continue;
            }
            let file = values.as_mut().and_then(|values| values.take_file(id)).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "the device map has `{}` on the disk, and its values are in no file: load weights before, or save them",
                    entry.name
                ))
            })?;
            sources.insert(index, self.on_disk(entry, file, device_of(index), homes.weights)?);
        }
        for &index in &homes.resident {
            let Entry { name, tensor, .. } = &self.entries()[index];
            let device = device_of(index);
            // Buffers have their memory, and so have parameters that had it before.
            if has_memory(tensor) && tensor.device() != device {
                let mut tensor = tensor.shallow_clone();
                tch::no_grad(|| tensor.f_set_data(&tensor.f_detach()?.f_to_device(device)?))
                    .map_err(ModelError::torch(format!("move {name} to {device:?}")))?;
            }
            to_fill.insert(TensorId::of(tensor), Home { index, device, stays: true });
        }
        let Some(values) = values else { return Ok(sources) };
        let mut filling = Filling::default();
        values.for_each_source(|id, source| {
            let Some(&home) = to_fill.get(&id) else { return Ok(()) };
            if let Some(moving) = self.fill(home, source, homes.weights, &mut filling)? {
                sources.insert(home.index, moving);
            }
            Ok(())
        })?;
        filling.finish()?;
        Ok(sources)
    }

    /// Fills one tensor, and returns its source if it is loaded for each use.
    fn fill(
        &self,
        home: Home,
        source: ValueSource,
        weights: &Weights,
        filling: &mut Filling,
    ) -> Result<Option<Vec<(Tensor, WeightSource)>>> {
        let Home { index, device, stays } = home;
        let entry = &self.entries()[index];
        if let Some((slot, weight)) = self.quantized_value(entry, &source, device, weights)? {
            let moving = if stays { None } else { Some(in_host_memory(&weight)?) };
            filling.packed(&weight)?;
            self.set_quantized(&entry.name, slot, weight)?;
            return Ok(moving);
        }
        if stays {
            filling.set(&entry.name, allocated(entry, device)?, source)?;
            return Ok(None);
        }
        // The values are loaded from there to a GPU: on the CPU nothing needs to be loaded from the host's memory.
        let host = pinned_like(&entry.tensor)?;
        filling.set(&entry.name, host.shallow_clone(), source)?;
        Ok(Some(vec![(entry.tensor.shallow_clone(), WeightSource::Host(host))]))
    }

    /// Returns the tensors of a parameter that stays in its file, and how they are read.
    fn on_disk(
        &self,
        entry: &Entry,
        file: FileValues,
        device: Device,
        weights: &Weights,
    ) -> Result<Vec<(Tensor, WeightSource)>> {
        let own = || entry.tensor.shallow_clone();
        let Some((layer, slot)) = self.quantizable(entry) else {
            return Ok(vec![(own(), file.into_source())]);
        };
        let from = file.reader()?;
        let is_taken = file.part.is_none()
            && weights.kind().is_none()
            && from.is_transposed() == slot.is_transposed;
        let packed = if is_taken { from.read_packed()? } else { None };
        let Some(packed) = packed else {
            if weights.chooses(layer) {
                return Err(Error::invalid_argument(format!(
                    "the device map has `{}` on the disk, where it is not quantised: write quantised files by `brigade \
                     checkpoint convert FOLDER OUT --weights {}`, and load those",
                    entry.name,
                    weights.format().map_or_else(String::new, |format| format.to_string())
                )));
            }
            return Ok(vec![(own(), file.into_source())]);
        };
        let weight = QuantizedSlot::weight(&packed, &entry.tensor.size(), device)?;
        drop(packed);
        let tensors = read_again(&weight, file, device);
        tensors.iter().try_for_each(|(tensor, _)| give_back(tensor))?;
        self.set_quantized(&entry.name, slot, weight)?;
        Ok(tensors)
    }
}

/// Releases the memory of a tensor that gets other memory when it is used: the model need not fit into memory while it
/// is loaded.
fn give_back(tensor: &Tensor) -> Result<()> {
    let form = (tensor.f_kind()?, tensor.device());
    let empty =
        unallocated(&tensor.size(), Some(&tensor.stride()), form, "its weights come later")?;
    tch::no_grad(|| tensor.shallow_clone().f_set_data(&empty))?;
    Ok(())
}

/// Returns a tensor that has its values, with a copy of them in the host's memory as their source.
fn from_memory(tensor: &Tensor) -> Result<(Tensor, WeightSource)> {
    let mut host = pinned_like(tensor)?;
    tch::no_grad(|| host.f_copy_(tensor))?;
    give_back(tensor)?;
    Ok((tensor.shallow_clone(), WeightSource::Host(host)))
}

/// Returns the tensors of a quantised weight on a GPU, with copies of their values in the host's memory as their
/// sources.
fn in_host_memory(weight: &QuantizedWeight) -> Result<Vec<(Tensor, WeightSource)>> {
    weight.tensors().into_iter().map(|(_, tensor)| from_memory(tensor)).collect()
}

/// Returns the tensors of a quantised weight, which are read from its file together, by the first one that is wanted:
/// the ring reads tensors in any order, in several threads.
fn read_again(
    weight: &QuantizedWeight,
    file: FileValues,
    device: Device,
) -> Vec<(Tensor, WeightSource)> {
    let matrices = weight.num_matrices();
    // The tensors that were read and are still wanted.
    let shared = Arc::new(Mutex::new((file.into_packed_source(), Vec::new())));
    let sources = weight.tensors().into_iter().map(|(name, tensor)| {
        let shared = Arc::clone(&shared);
        let read = move |into: &Tensor| {
            let (read, left) = &mut *shared.lock();
            let is_it = |(known, _): &(&str, Tensor)| *known == name;
            // After a read of the part that failed, some tensors may be left that were wanted then.
            if !left.iter().any(is_it) {
                let packed: PackedWeight = read()?;
                let weight = QuantizedWeight::from_packed_stack(&packed, matrices, device)?;
                let tensors = weight.tensors().into_iter();
                *left = tensors.map(|(known, tensor)| (known, tensor.shallow_clone())).collect();
            }
            let at = left.iter().position(is_it);
            let (_, values) = at
                .map(|at| left.swap_remove(at))
                .ok_or_else(|| Error::custom(format!("a quantised weight has lost its {name}")))?;
            tch::no_grad(|| into.shallow_clone().f_copy_(&values).map(drop))?;
            Ok(())
        };
        (tensor.shallow_clone(), WeightSource::Read(Arc::new(read)))
    });
    sources.collect()
}
