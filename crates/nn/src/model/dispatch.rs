//! Device maps: models whose weights are on several devices, in the host's memory and on the disk.
//!
//! `Model::place` applies a device map. `crates/sharding/src/device_map.rs` computes the placement from names, sizes
//! and limits alone, by the rules of Accelerate; `brigade-hardware` and the devices return the free memory.
//!
//! Each tensor has an owner: the unit that contains it, otherwise the layer (`LayerWeights`), otherwise the model. A
//! tied weight has several owners, which compute on one device. `Unit::run`, the forward of a layer and
//! `Model::forward` keep their parts of the weight ring in memory (`Placed`), and move inputs. For a model without a
//! map this costs a lock.
//!
//! A quantised weight consists of several tensors in the layout of the kernels. They are packed at each read from a
//! file (`dispatch/memory.rs`), because files do not depend on processors.

mod memory;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use brigade_hardware::Memory;
use brigade_sharding::device_map::{
    DeviceMap, FreeMemory, MappedTensor, ModuleTree, Place, Placement, TensorKind,
};
use brigade_torch::{
    DeviceExt, Error, HeldWeights, Result, RingPart, WeightRing, WeightRingMeter, cuda_devices,
    dtype_of,
};
use indexmap::IndexMap;
use tch::Device;

use super::{Model, is_under};
use crate::error::ModelError;
use crate::param_registry::Role;
use crate::placed::Placed;
use crate::quantized::Weights;
use memory::{Homes, Sources};

/// Placement of the weights of a model with a device map.
pub(crate) struct Dispatched {
    placement: Placement,
    /// Weights that are in no unit and in no layer; they are in memory for the whole forward.
    root: Arc<Placed>,
    /// Rings, one for each device to which weights are loaded on use.
    rings: Vec<Arc<WeightRing>>,
}

impl Dispatched {
    /// Returns the rings that load weights for each use.
    pub(super) fn rings(&self) -> &[Arc<WeightRing>] {
        &self.rings
    }
}

/// Number of places of a ring: one is filled while the other is used.
const PLACES: usize = 2;

/// Owner of a tensor, which computes with it: a unit, a layer outside of units, or the model itself, by their paths.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Owner {
    Root,
    Unit(String),
    Layer(String),
}

impl<M> Model<M> {
    /// Loads weights into a [deferred](Model::deferred) model, each tensor directly to its location in a device map,
    /// for inference with a model that does not fit on one device (Accelerate's `load_checkpoint_and_dispatch`).
    /// Tensors that the map puts on the disk stay in their file; no copy is written.
    ///
    /// Weights on the disk, and weights in the host's memory of a model that computes on a GPU, are loaded into the
    /// memory of the device before their [unit](crate::Unit) or layer runs, and released afterwards. Two buffers, each
    /// as large as the largest such unit, are used in turn, so that a thread loads the next unit while one computes. If
    /// a limit of the map leaves room for one buffer only, a unit is loaded when the preceding one is done. Inputs are
    /// moved to the device of a unit or layer. Outputs have the same bits with any map on the same kind of device.
    /// Parameters do not require gradients from then on.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential};
    /// use brigade_sharding::device_map::DeviceMap;
    /// use tch::{Kind, Tensor};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # std::env::set_current_dir(&folder)?;
    /// let layers = |path: &ParamPath<'_>| {
    ///     Sequential::new().add(Linear::new(path / 0, 64, 64)).add(Relu).add(Linear::new(path / 2, 64, 8))
    /// };
    /// let whole = Model::new(layers)?;
    /// whole.save_weights("model.safetensors")?;
    ///
    /// let map = DeviceMap::by_hand([("0", "disk"), ("2", "cpu")]);
    /// let model = Model::deferred(layers)?.dispatch("model.safetensors", &map)?;
    /// let input = Tensor::randn([4, 64], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&input)?, whole.forward(&input)?);
    /// println!("{}", model.device_map().expect("it has one"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Model::load_weights`] and of [`DeviceMap::resolve`];
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a model that is not deferred, is sharded or a stage of a
    /// pipeline, and for a unit or a tied weight that would be on several devices;
    /// [`brigade_torch::ErrorKind::OutOfMemory`] if the weights that the map puts in memory do not fit.
    pub fn dispatch(mut self, weights: impl AsRef<Path>, map: &DeviceMap) -> Result<Self> {
        if !self.is_deferred() {
            return Err(Error::invalid_argument(
                "`dispatch` needs a model whose parameters have no memory yet: build it by `Model::deferred`",
            ));
        }
        self.load_weights(weights)?;
        self.place(map)
    }

    /// Allocates the parameters of a [deferred](Model::deferred) model by a device map; see [`Model::dispatch`]. Their
    /// values are read from the weights that were loaded before ([`Model::load_weights`]), or are drawn. A model in
    /// memory is moved according to the map (Accelerate's `dispatch_model` and `cpu_offload`), which must not put
    /// anything on the disk.
    ///
    /// # Errors
    /// Returns the errors of [`Model::dispatch`]; [`brigade_torch::ErrorKind::InvalidArgument`] for a parameter on the
    /// disk whose values are not in a file.
    pub fn place(self, map: &DeviceMap) -> Result<Self> {
        self.place_as(map, &Weights::default())
    }

    /// Places a deferred model's weights like [`Model::place`], and quantises them to 8 or 4 bits
    /// ([`Model::quantize`]): each weight is read, quantised and freed. Weights that are quantised in their files stay
    /// as they are. Weights on the disk must be quantised in their files, because they are read in every forward.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential, Weights};
    /// use brigade_sharding::device_map::DeviceMap;
    ///
    /// let layers = |path: &ParamPath<'_>| {
    ///     Sequential::new().add(Linear::new(path / 0, 64, 64)).add(Relu).add(Linear::new(path / "head", 64, 8))
    /// };
    /// let model = Model::deferred(layers)?.place_as(&DeviceMap::by_hand([("", "cpu")]), &Weights::int8())?;
    /// assert!(model.quantized_weight("0.weight").is_some());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Model::place`] and of [`Model::quantize`]; [`brigade_torch::ErrorKind::InvalidArgument`]
    /// for a weight on the disk that is to be quantised and is not in its file.
    pub fn place_as(mut self, map: &DeviceMap, weights: &Weights) -> Result<Self> {
        self.check_quantizable(weights)?;
        if let Some(kind) = weights.kind() {
            self.to_kind(kind)?;
        }
        let sized = weights.format().map(|format| map.clone().format(format));
        let tree = self.module_tree()?;
        let placement = sized.as_ref().unwrap_or(map).resolve(&tree, &free_memory()?);
        self.place_by(placement.map_err(Error::custom)?, weights)
    }

    /// Returns the device map of a model that was [dispatched](Model::dispatch). `None` for other models.
    #[must_use]
    pub fn device_map(&self) -> Option<&Placement> {
        Some(&self.dispatched.as_ref()?.placement)
    }

    /// Returns the counters of the weight rings, one for each device that loads weights from elsewhere. Empty if all
    /// weights are on the devices that use them.
    #[must_use]
    pub fn weight_rings(&self) -> Vec<WeightRingMeter> {
        let rings = self.dispatched.iter().flat_map(|it| &it.rings);
        rings.map(|ring| ring.meter()).collect()
    }

    /// Returns the model's modules with their tensors, for [`DeviceMap::resolve`].
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath};
    /// use brigade_sharding::device_map::{DeviceMap, FreeMemory, Place};
    ///
    /// let model = Model::deferred(|path: &ParamPath<'_>| {
    ///     ["first", "second", "head"].map(|name| Linear::new(path / name, 1024, 1024))
    /// })?;
    /// // Room for a layer that stays, and for one that comes and goes.
    /// let free = FreeMemory::new([(Place::Cpu, 9 << 20), (Place::Disk, u64::MAX)]);
    /// let placement = DeviceMap::auto().resolve(&model.module_tree()?, &free)?;
    /// assert_eq!(placement.place_of("first.weight"), Some(Place::Cpu));
    /// assert_eq!(placement.place_of("head.weight"), Some(Place::Disk));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a tensor of a type that files do not have.
    pub fn module_tree(&self) -> Result<ModuleTree> {
        let tensors = self.entries().iter().map(|entry| {
            let kind = entry.tensor.f_kind()?;
            let dtype = dtype_of(kind).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "`{}` is {kind:?}, which weights files do not have",
                    entry.name
                ))
            })?;
            let shape = entry.tensor.size().iter().map(|size| size.unsigned_abs()).collect();
            let (role, tied_to) = match entry.role {
                Role::Parameter => (TensorKind::Parameter, None),
                Role::Buffer { persistent } => (TensorKind::Buffer { persistent }, None),
                Role::SameAs(first) => {
                    (TensorKind::Parameter, Some(self.entries()[first].name.clone()))
                }
            };
            Ok(MappedTensor { name: entry.name.clone(), shape, dtype, kind: role, tied_to })
        });
        let units: Vec<String> = self.units.iter().map(|(unit, _)| unit.clone()).collect();
        ModuleTree::new(tensors.collect::<Result<Vec<_>>>()?, units).map_err(Error::custom)
    }

    /// Loads the weights that belong to no unit and no layer, until the returned value is dropped.
    pub(crate) fn hold_root(&self) -> Result<Option<HeldWeights<'_>>> {
        self.dispatched.as_ref().map_or(Ok(None), |it| it.root.hold())
    }

    /// Runs a function of the module other than its forward, such as text generation. With a device map, the weights
    /// that belong to no unit or layer are in memory meanwhile.
    ///
    /// # Errors
    /// Returns the errors of `run`; the errors of reading the weights.
    pub fn run<T>(&self, run: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        self.check_values("run")?;
        let _held = self.hold_root()?;
        run(self.module())
    }

    /// Fails for a model with a device map.
    pub(crate) fn check_not_dispatched(&self, action: impl fmt::Display) -> Result<()> {
        if self.dispatched.is_none() {
            return Ok(());
        }
        Err(ModelError::Dispatched { action: action.to_string() }.into())
    }

    fn place_by(mut self, placement: Placement, weights: &Weights) -> Result<Self> {
        self.check_not_dispatched("give the model another device map")?;
        if self.is_sharded || self.stages.is_some() {
            return Err(Error::invalid_argument(
                "a model that is sharded or a stage of a pipeline cannot have a device map: each rank gives a whole model one",
            ));
        }
        let main = device_of(placement.compute_place());
        let owners = self.owners();
        // Tensors of one owner, and owners of one tensor, are on one device.
        let devices = self.devices(&owners, &placement, main)?;
        let mut comes_and_goes: IndexMap<BTreeSet<Owner>, Vec<usize>> = IndexMap::new();
        let mut resident: Vec<usize> = Vec::new();
        for (index, owners) in &owners {
            let entry = &self.entries()[*index];
            let place = place_of(&placement, &entry.name)?;
            let is_parameter = entry.role == Role::Parameter;
            let device = owners.first().map_or(main, |owner| devices[owner]);
            // Buffers are small, and stay where they are used.
            if is_parameter && (place == Place::Disk || device_of(place) != device) {
                comes_and_goes.entry(owners.clone()).or_default().push(*index);
            } else {
                resident.push(*index);
            }
        }
        let owner_device =
            |index: usize| owners[&index].first().map_or(main, |owner| devices[owner]);
        self.requires_grad(false)?;
        let moving: Vec<usize> = comes_and_goes.values().flatten().copied().collect();
        let homes = Homes { placement: &placement, resident, moving, weights };
        let sources = self.give_memory(&homes, owner_device)?;
        let (rings, held) = self.rings(&placement, &comes_and_goes, sources, &devices)?;
        let placed = |owner: &Owner| {
            let device = devices.get(owner).copied().unwrap_or(main);
            let parts = held.get(owner).cloned().unwrap_or_default();
            let ring = rings.iter().find(|(on, _)| *on == device && !parts.is_empty());
            let ring = ring.map(|(_, ring)| Arc::clone(ring));
            let offloads_cache = placement.offloads_caches() && ring.is_some();
            Arc::new(Placed { device, ring, parts, offloads_cache })
        };
        for (name, unit) in &self.units {
            unit.set_placed(placed(&Owner::Unit(name.clone())));
        }
        for (name, layer) in &self.layer_weights {
            if self.unit_of(name).is_none() {
                layer.set_placed(placed(&Owner::Layer(name.clone())));
            }
        }
        let root = placed(&Owner::Root);
        let rings = rings.into_iter().map(|(_, ring)| ring).collect();
        self.freeze_quantized()?;
        self.dispatched = Some(Dispatched { placement, root, rings });
        self.device = main;
        Ok(self)
    }

    /// Returns the innermost unit that contains a name.
    fn unit_of(&self, name: &str) -> Option<&str> {
        let units = self.units.iter().map(|(unit, _)| unit.as_str());
        units.filter(|unit| is_under(name, unit)).max_by_key(|unit| unit.len())
    }

    /// Returns the owners that compute with each tensor, by its index among the entries. A tied tensor may have
    /// several.
    fn owners(&self) -> IndexMap<usize, BTreeSet<Owner>> {
        let mut owners: IndexMap<usize, BTreeSet<Owner>> = IndexMap::new();
        for (index, entry) in self.entries().iter().enumerate() {
            let first = if let Role::SameAs(first) = entry.role { first } else { index };
            let layer = || {
                let layers = self.layer_weights.iter().map(|(name, _)| name.as_str());
                layers.filter(|layer| is_under(&entry.name, layer)).max_by_key(|layer| layer.len())
            };
            let owner = match self.unit_of(&entry.name) {
                Some(unit) => Owner::Unit(unit.to_owned()),
                None => layer().map_or(Owner::Root, |layer| Owner::Layer(layer.to_owned())),
            };
            owners.entry(first).or_default().insert(owner);
        }
        owners
    }

    /// Returns the device on which each owner computes: that of its weights which stay on a GPU, or else the main one.
    fn devices(
        &self,
        owners: &IndexMap<usize, BTreeSet<Owner>>,
        placement: &Placement,
        main: Device,
    ) -> Result<IndexMap<Owner, Device>> {
        let mut devices: IndexMap<Owner, (Device, String)> = IndexMap::new();
        for (index, owners) in owners {
            let entry = &self.entries()[*index];
            if entry.role != Role::Parameter {
                continue;
            }
            let place = place_of(placement, &entry.name)?;
            let Place::Cuda(_) = place else { continue };
            for owner in owners {
                let known = devices
                    .entry(owner.clone())
                    .or_insert_with(|| (device_of(place), entry.name.clone()));
                if known.0 != device_of(place) {
                    return Err(Error::invalid_argument(format!(
                        "{owner} computes on one device, and the device map has `{}` on {} and `{}` on {place}: give them \
                         one device",
                        known.1,
                        placement.place_of(&known.1).map_or_else(String::new, |it| it.to_string()),
                        entry.name
                    )));
                }
            }
        }
        let mut all: IndexMap<Owner, Device> =
            devices.into_iter().map(|(owner, (device, _))| (owner, device)).collect();
        for owner in owners.values().flatten() {
            all.entry(owner.clone()).or_insert(main);
        }
        // A ring loads a weight to one device.
        for (index, owners) in owners {
            let Some(first) = owners.first() else { continue };
            if let Some(other) = owners.iter().find(|owner| all[*owner] != all[first]) {
                return Err(Error::invalid_argument(format!(
                    "`{}` is a weight of {first}, which computes on {:?}, and of {other}, which computes on {:?}: give the two \
                     one device in the device map",
                    self.entries()[*index].name,
                    all[first],
                    all[other]
                )));
            }
        }
        Ok(all)
    }

    /// Creates a ring for each device to which weights are loaded on use, and assigns each owner its parts of it.
    #[expect(clippy::type_complexity, reason = "two lists that are taken apart at once")]
    fn rings(
        &self,
        placement: &Placement,
        comes_and_goes: &IndexMap<BTreeSet<Owner>, Vec<usize>>,
        mut sources: Sources,
        devices: &IndexMap<Owner, Device>,
    ) -> Result<(Vec<(Device, Arc<WeightRing>)>, IndexMap<Owner, Vec<usize>>)> {
        let mut parts: IndexMap<Device, Vec<RingPart>> = IndexMap::new();
        let mut held: IndexMap<Owner, Vec<usize>> = IndexMap::new();
        for (owners, indices) in comes_and_goes {
            let Some(first) = owners.first() else { continue };
            let on_device = parts.entry(devices[first]).or_default();
            for owner in owners {
                held.entry(owner.clone()).or_default().push(on_device.len());
            }
            let tensors = indices.iter().filter_map(|index| sources.swap_remove(index)).flatten();
            let name = match (owners.len(), first) {
                (1, Owner::Unit(name) | Owner::Layer(name)) if !name.is_empty() => name.clone(),
                (1, _) => "the model".to_owned(),
                _ => self.entries()[indices[0]].name.clone(),
            };
            on_device.push(RingPart { name, tensors: tensors.collect() });
        }
        let rings = parts.into_iter().map(|(device, parts)| {
            Ok((
                device,
                Arc::new(WeightRing::new(device, places(placement, device, &parts), parts)?),
            ))
        });
        Ok((rings.collect::<Result<_>>()?, held))
    }
}

fn place_of(placement: &Placement, name: &str) -> Result<Place> {
    placement
        .place_of(name)
        .ok_or_else(|| Error::invalid_argument(format!("the device map has no place for `{name}`")))
}

/// Returns the number of buffers for which a device's limit has room beside the resident weights and what is reserved:
/// at least one. With one, weights are not loaded ahead of their use.
fn places(placement: &Placement, device: Device, parts: &[RingPart]) -> usize {
    let of = |part: &RingPart| {
        let tensors = part.tensors.iter().map(|(tensor, _)| tensor);
        tensors.map(|it| (it.numel() * it.kind().elt_size_in_bytes()) as u64).sum::<u64>()
    };
    let largest = parts.iter().map(of).max().unwrap_or(0).max(1);
    let place = match device {
        Device::Cuda(index) => Place::Cuda(index),
        _ => Place::Cpu,
    };
    let stays = placement.bytes().into_iter().find(|(it, _)| *it == place).map_or(0, |it| it.1);
    let kept = stays.saturating_add(placement.reserved(place));
    match placement.limit(place) {
        Some(limit) if limit.saturating_sub(kept) < PLACES as u64 * largest => 1,
        _ => PLACES,
    }
}

/// Returns the device of a place's tensors when they are in memory.
fn device_of(place: Place) -> Device {
    match place {
        Place::Cuda(index) => Device::Cuda(index),
        Place::Cpu | Place::Disk => Device::Cpu,
    }
}

/// Returns the free memory on the devices of this machine.
fn free_memory() -> Result<FreeMemory> {
    let mut free = Vec::new();
    for index in 0..cuda_devices().unwrap_or(0) {
        let device = Device::Cuda(index);
        let memory = device.device_kind().map(|(kind, index)| kind.memory(index)).transpose()?;
        free.extend(memory.map(|memory| (Place::Cuda(index), memory.free)));
    }
    free.push((Place::Cpu, Memory::gather(&brigade_hardware::Sources::system()).free_bytes()));
    free.push((Place::Disk, u64::MAX));
    Ok(FreeMemory::new(free))
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("the model"),
            Self::Unit(name) => write!(f, "the unit `{name}`"),
            Self::Layer(name) => write!(f, "the layer `{name}`"),
        }
    }
}

impl fmt::Debug for Dispatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatched").field("rings", &self.rings).finish_non_exhaustive()
    }
}
