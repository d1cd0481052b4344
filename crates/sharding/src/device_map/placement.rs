//! Placement of the weights of a model.

use std::collections::HashMap;
use std::fmt;

use brigade_rank_env::text::escaped;
use serde::{Serialize, Serializer};

use super::limits::{Device, Limits, MovedCaches};
use super::sizes::Sizes;
use super::tree::{Item, ModuleTree};
use super::{DeviceMapError, Place};
use crate::byte_size::in_bytes;

/// Placement of each weight of a model. Its JSON form is Accelerate's device map, which
/// [`DeviceMap::from_json`](super::DeviceMap::from_json) reads; its text form is a table of layers, places and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    entries: Vec<(String, Place)>,
    place_of: HashMap<String, Place>,
    layers: Vec<PlacedLayer>,
    devices: Vec<Device>,
    /// Bytes of the cache of a unit.
    unit_cache: u64,
    /// `true` if the caches of units that are offloaded from a GPU are in the host's memory.
    offloads_caches: bool,
    notes: Vec<String>,
}

/// A layer, or a tensor of a layer that has several places.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlacedLayer {
    /// Name of the layer or tensor in the model.
    pub name: String,
    /// Place of the layer's weights.
    pub place: Place,
    /// Size of the weights in bytes. A tied weight is counted where its first name is.
    pub bytes: u64,
    /// `true` if the layer is a unit, which is computed as a whole.
    pub is_unit: bool,
}

/// Run of layers with consecutive numbers, equal sizes and the same place, or a single layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerRun {
    /// Name of the range of layers: `model.layers.0-11`.
    pub name: String,
    /// Place of the weights of these layers.
    pub place: Place,
    /// Number of layers in the run.
    pub count: u64,
    /// Size of the weights of each layer, in bytes.
    pub bytes: u64,
}

impl Placement {
    pub(super) fn new(
        tree: &ModuleTree,
        sizes: &Sizes,
        entries: Vec<(Item, Place)>,
        limits: Limits,
    ) -> Result<Self, DeviceMapError> {
        let mut chosen: HashMap<Item, Place> = entries.iter().copied().collect();
        let mut entries: Vec<_> =
            entries.into_iter().map(|(item, place)| (tree.name(item).to_owned(), place)).collect();
        let mut notes = limits.notes;
        let of = |chosen: &HashMap<Item, Place>, tensor: usize| {
            let own = chosen.get(&Item::Tensor(tensor));
            let mut outer = tree.around(tensor).map(Item::Module);
            own.copied().or_else(|| outer.find_map(|module| chosen.get(&module).copied()))
        };
        for tensor in 0..tree.tensors.len() {
            if of(&chosen, tensor).is_some() {
                continue;
            }
            // A buffer of a module that was split, for which the rules have no entry.
            let module = tree.module_of[tensor];
            let mut beside = tree.tensors_in(module);
            let Some(place) = beside.find_map(|other| of(&chosen, other)) else {
                let names = vec![tree.tensors[tensor].name.clone()];
                return Err(DeviceMapError::Uncovered { names });
            };
            let (name, of) = (&tree.tensors[tensor].name, &tree.modules[module].name);
            notes.push(format!("{name} is on {place}, with the first layer of {of}"));
            entries.push((name.clone(), place));
            chosen.insert(Item::Tensor(tensor), place);
        }
        let place = |tensor: usize| of(&chosen, tensor).unwrap_or(Place::Cpu);
        let mut layers = Vec::new();
        for layer in tree.layer_items() {
            let tensors = tree.tensors_of(layer);
            let first = tensors.first().map_or(Place::Cpu, |tensor| place(*tensor));
            let parts = if tensors.iter().all(|tensor| place(*tensor) == first) {
                vec![(layer, first)]
            } else {
                tensors.iter().map(|tensor| (Item::Tensor(*tensor), place(*tensor))).collect()
            };
            for (item, place) in parts {
                let tensors = tree.tensors_of(item);
                layers.push(PlacedLayer {
                    name: tree.name(item).to_owned(),
                    place,
                    bytes: tensors.iter().map(|tensor| sizes.tensors[*tensor]).sum(),
                    is_unit: tree.is_unit(item),
                });
            }
        }
        let place_of = entries.iter().cloned().collect();
        let (devices, unit_cache) = (limits.devices, sizes.unit_reserve);
        let offloads_caches = sizes.offloads_caches;
        Ok(Self { entries, place_of, layers, devices, unit_cache, offloads_caches, notes })
    }

    /// Returns names of modules and tensors with their places. The longest name around a tensor decides.
    #[must_use]
    pub fn entries(&self) -> &[(String, Place)] {
        &self.entries
    }

    /// Returns the place of a tensor or a module, which is that of the module with the longest name around it. `None`
    /// for a module that is in several places, and for names outside of the map.
    #[must_use]
    pub fn place_of(&self, name: &str) -> Option<Place> {
        let mut prefix = name;
        loop {
            if let Some(place) = self.place_of.get(prefix) {
                return Some(*place);
            }
            if prefix.is_empty() {
                return None;
            }
            prefix = prefix.rsplit_once('.').map_or("", |(outer, _)| outer);
        }
    }

    /// Returns the layers of the model in their order.
    #[must_use]
    pub fn layers(&self) -> &[PlacedLayer] {
        &self.layers
    }

    /// Returns the bytes of the weights in each place, in the order in which places are filled. Devices that are left
    /// empty have 0.
    #[must_use]
    pub fn bytes(&self) -> Vec<(Place, u64)> {
        self.devices.iter().map(|device| (device.place, self.bytes_in(device.place))).collect()
    }

    /// Returns the memory limit of a device in bytes, or `None` if the device has no limit.
    #[must_use]
    pub fn limit(&self, place: Place) -> Option<u64> {
        self.devices.iter().find(|device| device.place == place)?.limit
    }

    /// Returns the bytes of a device that are reserved for activations, and for the caches of the units that it computes
    /// ([`DeviceMap::reserve`](super::DeviceMap::reserve)) or whose offloaded caches it has
    /// ([`DeviceMap::offload_caches`](super::DeviceMap::offload_caches)).
    #[must_use]
    pub fn reserved(&self, place: Place) -> u64 {
        let device = self.devices.iter().find(|device| device.place == place);
        let has_caches = place == Place::Cpu && self.offloads_caches;
        let caches =
            if self.is_offloaded(place) && !has_caches { 0 } else { self.caches_in(place) };
        device.map_or(0, |device| device.reserve.saturating_add(caches))
    }

    /// Returns `true` if the key-value caches of units whose weights are offloaded from a GPU are in the host's memory
    /// ([`DeviceMap::offload_caches`](super::DeviceMap::offload_caches)).
    #[must_use]
    pub fn offloads_caches(&self) -> bool {
        self.offloads_caches
    }

    /// Returns the device that computes layers whose weights are not on a GPU: the first GPU of the map, otherwise the
    /// CPU.
    #[must_use]
    pub fn compute_place(&self) -> Place {
        let mut places = self.devices.iter().map(|device| device.place);
        places.find(|place| place.is_gpu()).unwrap_or(Place::Cpu)
    }

    /// Returns the bytes that each forward pass copies from a place: the weights of layers that are computed elsewhere.
    #[must_use]
    pub fn bytes_moved_from(&self, place: Place) -> u64 {
        if self.is_offloaded(place) { self.bytes_in(place) } else { 0 }
    }

    /// Returns notes for the user: limits that were taken from what is free, devices that are left empty, and buffers
    /// that are with the first layer of their module.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the layers, with each run of equal layers joined into one entry.
    #[must_use]
    pub fn runs(&self) -> Vec<LayerRun> {
        let mut runs: Vec<LayerRun> = Vec::new();
        // The last number of the run's first name, the next expected number, and the texts around them.
        let mut open: Option<(&str, u64, u64, &str)> = None;
        for layer in &self.layers {
            let numbered = around_number(&layer.name);
            let run =
                runs.last_mut().filter(|run| (run.place, run.bytes) == (layer.place, layer.bytes));
            if let (Some(run), Some((before, number, behind)), Some(last)) = (run, numbered, open) {
                let (first_before, first, next, first_behind) = last;
                if (before, number, behind) == (first_before, next, first_behind) {
                    run.count += 1;
                    run.name = format!("{before}{first}-{number}{behind}");
                    open = Some((before, first, number.saturating_add(1), behind));
                    continue;
                }
            }
            open = numbered
                .map(|(before, number, behind)| (before, number, number.saturating_add(1), behind));
            let PlacedLayer { name, place, bytes, .. } = layer.clone();
            runs.push(LayerRun { name, place, bytes, count: 1 });
        }
        runs
    }

    fn bytes_in(&self, place: Place) -> u64 {
        let here = self.layers.iter().filter(|layer| layer.place == place);
        here.map(|layer| layer.bytes).sum()
    }

    /// Returns the bytes of the caches of the units whose weights are in a place.
    fn caches_in(&self, place: Place) -> u64 {
        let units = self.layers.iter().filter(|layer| layer.is_unit && layer.place == place);
        (units.count() as u64).saturating_mul(self.unit_cache)
    }

    /// Returns the bytes of the caches of offloaded units, on the devices that have them.
    pub(super) fn moved_caches(&self) -> MovedCaches {
        let offloaded = [Place::Cpu, Place::Disk].into_iter().filter(|it| self.is_offloaded(*it));
        let all = offloaded.map(|place| self.caches_in(place)).fold(0, u64::saturating_add);
        if !self.offloads_caches || !self.compute_place().is_gpu() {
            return MovedCaches { main: all, host: 0 };
        }
        // A unit's cache, and its copy in the order of the host's memory. The rules count the caches of units whose
        // weights are in the host's memory with these.
        let main = all.min(self.unit_cache.saturating_mul(2));
        MovedCaches { main, host: self.caches_in(Place::Disk) }
    }

    fn is_offloaded(&self, place: Place) -> bool {
        !place.is_gpu() && place != self.compute_place()
    }

    /// Checks that the device that computes has room for the largest offloaded layer.
    pub(super) fn check_room(&self) -> Result<(), DeviceMapError> {
        let place = self.compute_place();
        let Some(device) = self.devices.iter().find(|device| device.place == place) else {
            return Ok(());
        };
        let offloaded = self.layers.iter().filter(|layer| self.is_offloaded(layer.place));
        let Some(largest) = offloaded.rev().max_by_key(|layer| layer.bytes) else {
            return Ok(());
        };
        let (bytes, needed) = (largest.bytes, largest.bytes.saturating_add(device.reserve));
        match device.limit {
            Some(limit) if limit < needed => Err(DeviceMapError::UnitTooLarge {
                place,
                limit,
                unit: largest.name.clone(),
                bytes,
                needed,
            }),
            _ => Ok(()),
        }
    }

    /// Checks that no place has more bytes, with those that are reserved, than its limit.
    pub(super) fn check_limits(&self) -> Result<(), DeviceMapError> {
        for (place, bytes) in self.bytes() {
            let bytes = bytes.saturating_add(self.reserved(place));
            if let Some(limit) = self.limit(place).filter(|limit| *limit < bytes) {
                return Err(DeviceMapError::OverLimit { place, bytes, limit });
            }
        }
        Ok(())
    }

    /// Adds a note if the buffers of offloaded layers, which stay on a GPU, do not fit on any GPU.
    pub(super) fn note_buffers(&mut self, tree: &ModuleTree, sizes: &Sizes) {
        let tensors = tree.tensors.iter().zip(&sizes.tensors);
        let buffers = tensors.filter(|(tensor, _)| {
            let place = self.place_of(&tensor.name);
            !tensor.is_parameter() && place.is_some_and(|place| self.is_offloaded(place))
        });
        let bytes: u64 = buffers.map(|(_, bytes)| *bytes).sum();
        let mut gpus = self.devices.iter().filter(|device| device.place.is_gpu()).peekable();
        let has_room = |gpu: &Device| {
            let used = self.bytes_in(gpu.place).saturating_add(bytes);
            gpu.budget().is_none_or(|budget| budget >= used)
        };
        if bytes > 0 && gpus.peek().is_some() && !gpus.any(has_room) {
            let bytes = in_bytes(bytes);
            self.notes.push(format!(
                "buffers of offloaded layers take {bytes}, for which no GPU has room: offload buffers, too"
            ));
        }
    }
}

/// Returns the last component of a name that is a number, between the texts before and behind it.
fn around_number(name: &str) -> Option<(&str, u64, &str)> {
    let mut end = name.len();
    for component in name.rsplit('.') {
        let start = end - component.len();
        // A name with leading zeros is not a number: `01` is another name than `1`.
        let number = component.parse::<u64>().ok().filter(|it| it.to_string() == component);
        if let Some(number) = number {
            return Some((&name[..start], number, &name[end..]));
        }
        end = start.saturating_sub(1);
    }
    None
}

impl Serialize for Placement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.entries.iter().map(|(name, place)| (name, place)))
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.runs();
        let names = runs.iter().map(|run| run.name.chars().count());
        let width = names.chain([24]).max().unwrap_or(0);
        writeln!(f, "{:<width$}  {:<8}{:>10}", "layer", "place", "bytes")?;
        for run in &runs {
            let name = escaped(&run.name).to_string();
            write!(f, "{name:<width$}  {:<8}{:>10}", run.place, in_bytes(run.bytes))?;
            if run.count > 1 {
                write!(f, " each, {} in all", in_bytes(run.bytes.saturating_mul(run.count)))?;
            }
            writeln!(f)?;
        }
        writeln!(f)?;
        for device in &self.devices {
            let bytes = in_bytes(self.bytes_in(device.place));
            write!(f, "{:<8}{bytes:>10}", device.place)?;
            match device.limit {
                Some(limit) => writeln!(f, " of {}", in_bytes(limit))?,
                None => writeln!(f)?,
            }
        }
        for note in &self.notes {
            writeln!(f, "note: {}", escaped(note))?;
        }
        let moved = self.devices.iter().map(|device| device.place);
        let moved = moved.map(|place| (place, self.bytes_moved_from(place)));
        let moved: Vec<String> = moved
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(place, bytes)| format!("{} from {place}", in_bytes(bytes)))
            .collect();
        if moved.is_empty() {
            return writeln!(f, "no weights are moved for a token");
        }
        writeln!(f, "for each token {} come to {}", moved.join(" and "), self.compute_place())
    }
}
