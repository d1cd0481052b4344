//! Device maps: which weights of a model are on which GPU, in the host's memory, or on disk.
//!
//! A [`DeviceMap`] is what a user writes: a rule and limits. [`DeviceMap::resolve`] applies it to the modules of a
//! model ([`ModuleTree`]) and gives a [`Placement`]. The rules are those of Accelerate 1.15 (`infer_auto_device_map`,
//! `get_balanced_memory`), as functions of names and sizes.

mod balance;
mod by_hand;
mod clean;
mod error;
mod fill;
mod infer;
mod limits;
mod place;
mod placement;
mod sizes;
#[cfg(test)]
mod tests;
mod tree;

use brigade_checkpoint::Dtype;

pub use error::DeviceMapError;
pub use limits::FreeMemory;
pub use place::Place;
pub use placement::{LayerRun, PlacedLayer, Placement};
pub use tree::{MappedTensor, ModuleTree, TensorKind};

use crate::WeightFormat;
use infer::Inferred;
use limits::{Limits, MovedCaches};
use sizes::Sizes;

/// Device map: a rule that assigns the weights of a model to devices, with memory limits.
///
/// ```
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::device_map::{DeviceMap, FreeMemory, MappedTensor, ModuleTree, Place};
///
/// let tensor = |name: &str| MappedTensor::parameter(name, &[256], Dtype::F32);
/// let tensors = ["embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight"].map(tensor);
/// let tree = ModuleTree::new(tensors, ["layers.0", "layers.1"])?;
///
/// // The first GPU keeps room for the largest layer that is not on it.
/// let map = DeviceMap::auto().max_memory([("cuda:0", "3K"), ("cpu", "60G")]);
/// let placement = map.resolve(&tree, &FreeMemory::unknown())?;
/// assert_eq!(placement.place_of("layers.0.weight"), Some(Place::Cuda(0)));
/// assert_eq!(placement.place_of("layers.1.weight"), Some(Place::Cpu));
///
/// let map = DeviceMap::by_hand([("layers.*", "disk"), ("", "cpu")]);
/// let placement = map.resolve(&tree, &FreeMemory::unknown())?;
/// assert_eq!(placement.place_of("layers.1.weight"), Some(Place::Disk));
/// assert_eq!(placement.place_of("norm.weight"), Some(Place::Cpu));
/// # Ok::<(), brigade_sharding::device_map::DeviceMapError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMap {
    rule: Rule,
    /// Devices and limits as they were written.
    max_memory: Vec<(String, String)>,
    dtype: Option<Dtype>,
    special_dtypes: Vec<(String, Dtype)>,
    format: Option<WeightFormat>,
    fallback: bool,
    offload_buffers: bool,
    offload_caches: bool,
    reserve: Reserve,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Balanced { low_zero: bool },
    Sequential,
    Fill,
    ByHand(Vec<(String, String)>),
}

/// Memory that is reserved beside the weights, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reserve {
    /// Bytes reserved for activations on each device that computes: on each GPU, or in the host's memory without GPUs.
    pub device: u64,
    /// Bytes reserved for the key-value cache of each unit, on the device that computes the unit, or in the host's memory
    /// for the units that [`DeviceMap::offload_caches`] chooses. The rules also count them where the weights of an
    /// offloaded unit are.
    pub unit: u64,
}

impl DeviceMap {
    /// Places layers as [`balanced`](Self::balanced) does, which is what `device_map="auto"` means in Accelerate.
    #[must_use]
    pub fn auto() -> Self {
        Self::balanced()
    }

    /// Places layers in their order, on GPUs with about the same number of bytes, then on the CPU, then on disk.
    ///
    /// Each GPU but the last is limited to the bytes of the model divided by the number of GPUs, plus 1.25 times the
    /// larger of the largest unit and the mean of the innermost modules. Without limits a single GPU is limited to 90 %
    /// of what is free.
    #[must_use]
    pub fn balanced() -> Self {
        Self::of(Rule::Balanced { low_zero: false })
    }

    /// Places layers as [`balanced`](Self::balanced) does, with as little as possible on the first of several GPUs,
    /// which is left for other work, such as generation.
    #[must_use]
    pub fn balanced_low_0() -> Self {
        Self::of(Rule::Balanced { low_zero: true })
    }

    /// Places layers in their order: each device is filled up to its limit before the next one is used.
    #[must_use]
    pub fn sequential() -> Self {
        Self::of(Rule::Sequential)
    }

    /// Places layers so that each device in turn has as many bytes as its limit allows, whatever their order: a layer
    /// that does not fit is left for a later device, and the layers after it are tried. Accelerate's rules go on to the
    /// next device at the first layer that does not fit, and may leave a device empty.
    #[must_use]
    pub fn fill() -> Self {
        Self::of(Rule::Fill)
    }

    /// Places modules and tensors by name. The longest matching name decides, and the empty name matches the rest; `*`
    /// and `?` stand for any characters of one component of a name (`model.layers.*`). Places are written as for
    /// [`Place`].
    #[must_use]
    pub fn by_hand<N: Into<String>, P: Into<String>>(
        places: impl IntoIterator<Item = (N, P)>,
    ) -> Self {
        Self::of(Rule::ByHand(owned(places)))
    }

    /// Reads Accelerate's form of a map in JSON: `{"model.embed_tokens": 0, "model.layers": "cpu", "lm_head": "disk"}`.
    ///
    /// # Errors
    /// [`DeviceMapError::Json`] for other JSON. Names and places are checked by [`resolve`](Self::resolve).
    pub fn from_json(text: &str) -> Result<Self, DeviceMapError> {
        by_hand::from_json(text).map(|places| Self::of(Rule::ByHand(places)))
    }

    fn of(rule: Rule) -> Self {
        Self {
            rule,
            max_memory: Vec::new(),
            dtype: None,
            special_dtypes: Vec::new(),
            format: None,
            fallback: false,
            offload_buffers: false,
            offload_caches: false,
            reserve: Reserve::default(),
        }
    }

    /// Sets the devices to use, and the bytes of weights on each: `20G`, `20GiB` (of 1024), `20GB` (of 1000). An empty
    /// limit means all free memory, and for the disk no limit. Order does not matter: GPUs are first, by number, then
    /// the CPU and the disk, which is always available. Defaults to all that is free on each GPU and in the host's
    /// memory.
    #[must_use]
    pub fn max_memory<D: Into<String>, B: Into<String>>(
        self,
        limits: impl IntoIterator<Item = (D, B)>,
    ) -> Self {
        Self { max_memory: owned(limits), ..self }
    }

    /// Sets the type in which weights are held. Floats with more bits than this type are converted to it; other floats
    /// and integers keep their type. Defaults to the type of each tensor.
    #[must_use]
    pub fn dtype(self, dtype: Dtype) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Sets the type of one tensor, which takes precedence over [`dtype`](Self::dtype).
    #[must_use]
    pub fn special_dtype(mut self, name: impl Into<String>, dtype: Dtype) -> Self {
        self.special_dtypes.push((name.into(), dtype));
        self
    }

    /// Sets the format of the weights, instead of [`dtype`](Self::dtype). Quantised formats apply only to the weight
    /// matrices within units; the other weights have the format's floating-point type.
    #[must_use]
    pub fn format(self, format: impl Into<WeightFormat>) -> Self {
        Self { format: Some(format.into()), ..self }
    }

    /// Sets whether a device that would be left empty, because the next layer does not fit on it, gets the first later
    /// module that fits (Accelerate's `fallback_allocation`). Defaults to `false`.
    #[must_use]
    pub fn fallback(self, is_on: bool) -> Self {
        Self { fallback: is_on, ..self }
    }

    /// Sets whether buffers of offloaded layers are offloaded, too. Otherwise they stay on a GPU, and a note is added
    /// if no GPU has room for them. Defaults to `false`.
    #[must_use]
    pub fn offload_buffers(self, is_on: bool) -> Self {
        Self { offload_buffers: is_on, ..self }
    }

    /// Sets whether the key-value caches of units whose weights are offloaded from a GPU are offloaded, too: they are in
    /// the host's memory, also for weights on the disk, and are copied to the GPU for each forward of their unit
    /// (transformers' `cache_implementation="offloaded"`, for these layers only). The GPU then keeps room for the caches
    /// of two units in place of all. Defaults to `false`: caches stay on the devices that compute.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::device_map::{DeviceMap, FreeMemory, MappedTensor, ModuleTree, Place, Reserve};
    ///
    /// let layers = ["h.0", "h.1", "h.2", "h.3"];
    /// let tensors = layers.map(|name| MappedTensor::parameter(format!("{name}.weight"), &[256], Dtype::F32));
    /// let tree = ModuleTree::new(tensors, layers)?;
    /// let map = DeviceMap::by_hand([("", "cuda:0"), ("h.0", "cpu"), ("h.1", "cpu"), ("h.2", "disk")]);
    /// let map = map.reserve(Reserve { device: 0, unit: 1000 });
    /// let reserved = |map: &DeviceMap, place| map.resolve(&tree, &FreeMemory::unknown()).map(|it| it.reserved(place));
    /// assert_eq!((reserved(&map, Place::Cuda(0))?, reserved(&map, Place::Cpu)?), (4000, 0));
    /// let map = map.offload_caches(true);
    /// assert_eq!((reserved(&map, Place::Cuda(0))?, reserved(&map, Place::Cpu)?), (3000, 3000));
    /// # Ok::<(), brigade_sharding::device_map::DeviceMapError>(())
    /// ```
    #[must_use]
    pub fn offload_caches(self, is_on: bool) -> Self {
        Self { offload_caches: is_on, ..self }
    }

    /// Sets the bytes that are kept for caches and activations on the devices that compute. Defaults to none, as in
    /// Accelerate.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::Inference;
    /// use brigade_sharding::device_map::{DeviceMap, FreeMemory, MappedTensor, ModuleTree, Place, Reserve};
    ///
    /// let layers = ["h.0", "h.1", "h.2", "h.3"];
    /// let tensors = layers.map(|name| MappedTensor::parameter(format!("{name}.weight"), &[256, 256], Dtype::F32));
    /// let tree = ModuleTree::new(tensors, layers)?;
    /// // Room for all weights of 256 KiB, and for those of two blocks beside the caches of all four.
    /// let map = DeviceMap::sequential().max_memory([("cuda:0", "1M"), ("cpu", "1G")]);
    /// let on_gpu = |map: &DeviceMap| -> Result<usize, Box<dyn std::error::Error>> {
    ///     let placement = map.resolve(&tree, &FreeMemory::unknown())?;
    ///     Ok(placement.layers().iter().filter(|layer| layer.place == Place::Cuda(0)).count())
    /// };
    /// assert_eq!(on_gpu(&map)?, 4);
    /// let cache = Inference { layers: 4, key_width: 64, vocabulary: 0, samples: 1, tokens: 64, dtype: Dtype::BF16 };
    /// assert_eq!(cache.reserve(), Reserve { device: 0, unit: 16 << 10 });
    /// assert_eq!(on_gpu(&map.reserve(cache.reserve()))?, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn reserve(self, reserve: Reserve) -> Self {
        Self { reserve, ..self }
    }

    /// Returns the placement of each weight of a model. The result depends only on the arguments: nothing is measured.
    ///
    /// # Errors
    /// - [`DeviceMapError::UnknownPlace`], [`NoSuchDevice`](DeviceMapError::NoSuchDevice) and
    ///   [`Limit`](DeviceMapError::Limit) for devices that do not exist, for limits that are not a number of bytes, and
    ///   for empty limits of devices whose free memory is not known.
    /// - [`NoLimits`](DeviceMapError::NoLimits) if no limits are given and free memory is not known, and
    ///   [`TwoLimits`](DeviceMapError::TwoLimits) for a device with two limits.
    /// - [`NoSuchTensor`](DeviceMapError::NoSuchTensor) if a type is set for a tensor that does not exist, and
    ///   [`TooLarge`](DeviceMapError::TooLarge) for a model whose bytes cannot be counted.
    /// - [`UnknownName`](DeviceMapError::UnknownName), [`Uncovered`](DeviceMapError::Uncovered),
    ///   [`Overlap`](DeviceMapError::Overlap) and [`TiedApart`](DeviceMapError::TiedApart) for a manual map that does
    ///   not fit the model.
    /// - [`UnitTooLarge`](DeviceMapError::UnitTooLarge) if the device that computes has no room for the largest
    ///   offloaded layer, and [`OverLimit`](DeviceMapError::OverLimit) if a manual map exceeds a limit.
    pub fn resolve(
        &self,
        tree: &ModuleTree,
        free: &FreeMemory,
    ) -> Result<Placement, DeviceMapError> {
        let sizes = Sizes::of(tree, self)?;
        // The caches of offloaded units are elsewhere than their weights, which leaves less room for weights there: more
        // units may be offloaded then.
        let mut moved_caches = MovedCaches::default();
        let mut placement = loop {
            let placement = self.place(tree, free, &sizes, moved_caches)?;
            let caches = placement.moved_caches();
            if caches.fits_in(moved_caches) {
                break placement;
            }
            moved_caches = caches.max(moved_caches);
        };
        let is_by_hand = matches!(self.rule, Rule::ByHand(_));
        if is_by_hand {
            placement.check_limits()?;
        }
        placement.check_room()?;
        if !is_by_hand && !self.offload_buffers {
            placement.note_buffers(tree, &sizes);
        }
        Ok(placement)
    }
}

impl DeviceMap {
    /// Places weights, with some bytes of devices kept for the caches of offloaded units.
    fn place(
        &self,
        tree: &ModuleTree,
        free: &FreeMemory,
        sizes: &Sizes,
        moved_caches: MovedCaches,
    ) -> Result<Placement, DeviceMapError> {
        if let Rule::ByHand(places) = &self.rule {
            let entries = by_hand::entries(tree, places, free)?;
            let mut limits = Limits::by_hand(&self.max_memory, free, &entries)?;
            limits.reserve(self.reserve.device, moved_caches);
            return Placement::new(tree, sizes, entries, limits);
        }
        let mut limits = Limits::new(&self.max_memory, free)?;
        limits.reserve(self.reserve.device, moved_caches);
        let entries = if self.rule == Rule::Fill {
            fill::fill(tree, sizes, &limits)
        } else {
            let inferred = self.infer(tree, sizes, &limits);
            limits.notes.extend(inferred.notes());
            inferred.entries
        };
        Placement::new(tree, sizes, clean::clean(tree, entries), limits)
    }

    /// Places layers by Accelerate's rules, `balanced` or `sequential`.
    fn infer(&self, tree: &ModuleTree, sizes: &Sizes, limits: &Limits) -> Inferred {
        let Rule::Balanced { low_zero } = self.rule else {
            return infer::infer(tree, sizes, &limits.devices, self.fallback);
        };
        let mut devices = limits.devices.clone();
        if self.max_memory.is_empty() {
            balance::keep_tenth(&mut devices);
        }
        balance::balance(tree, sizes, &mut devices, low_zero);
        infer::infer(tree, sizes, &devices, self.fallback)
    }
}

fn owned<A: Into<String>, B: Into<String>>(
    pairs: impl IntoIterator<Item = (A, B)>,
) -> Vec<(String, String)> {
    pairs.into_iter().map(|(first, second)| (first.into(), second.into())).collect()
}
