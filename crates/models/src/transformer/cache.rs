//! The key-value cache.
//!
//! Keys and values are on the device that computes their layer, or, for a unit whose weights a device map has offloaded
//! together with its cache, in pinned memory of the host. Its tokens are then adjacent in memory, so that those so far
//! are copied to the device in one piece.
//!
//! A step of a recorded graph ([`Step`]) reads the token's position from the device and attends to all of the cache's
//! room, under a mask.

use brigade_torch::{DeviceExt, Error, Result, begin_copy, pinned_like, unallocated};
use tch::{Device, Kind, Tensor};

/// Key-value cache of a causal transformer, so that a further token costs the work of one token.
///
/// It belongs to one batch. Its memory is allocated ahead: it is doubled when it is full, or allocated for a number of
/// tokens from the start. It is for inference: no gradients flow through it.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options, KeyValueCache};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// model.eval();
/// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
/// let mut cache = KeyValueCache::new();
/// model.module().forward_cached((&ids.narrow(1, 0, 2)).into(), &mut cache)?;
/// let last = model.module().forward_cached((&ids.narrow(1, 2, 1)).into(), &mut cache)?;
/// assert_eq!(cache.len(), 3);
/// assert!(last.allclose(&model.forward(&ids)?.narrow(1, 2, 1), 1e-5, 1e-6, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct KeyValueCache {
    layers: Vec<LayerCache>,
    room: i64,
    is_fixed: bool,
    kind: CacheKind,
    /// Set by [`Self::begin_steps`].
    step: Option<Step>,
}

/// The place of a token in a cache, for steps that are recorded as a graph.
#[derive(Debug)]
pub(super) struct Step {
    /// Index of the token among those of the cache, int64 `[1]` on the device.
    position: Tensor,
    /// The indices of all tokens that the cache has room for, int64 `[room]`.
    places: Tensor,
}

impl Step {
    /// Returns the mask `[batch or 1, 1, 1, room]` of the tokens so far, without padding: `mask` is `[batch, room]`, and
    /// 0 for padding.
    pub(super) fn mask(&self, mask: Option<&Tensor>) -> Result<Tensor> {
        let so_far = self.places.f_le_tensor(&self.position)?.f_view([1, 1, 1, -1])?;
        Ok(match mask {
            Some(mask) => mask.f_ne(0)?.f_unsqueeze(1)?.f_unsqueeze(1)?.f_logical_and(&so_far)?,
            None => so_far,
        })
    }

    /// Returns the mask `[room]` of the tokens less than `window` positions before the present one.
    pub(super) fn near(&self, window: i64) -> Result<Tensor> {
        Ok(self.places.f_gt_tensor(&self.position.f_sub_scalar(window)?)?)
    }
}

impl KeyValueCache {
    /// Creates an empty cache, which grows when it is full.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty cache that allocates memory for `tokens` tokens when the first are added, and grows beyond
    /// that.
    #[must_use]
    pub fn with_room(tokens: i64) -> Self {
        Self { room: tokens, ..Self::default() }
    }

    /// Creates an empty cache of fixed size: it allocates memory for `tokens` tokens when the first are added, and
    /// further tokens are an error.
    ///
    /// ```
    /// use brigade_models::{CacheKind, Gpt2LmHead, Gpt2Options, KeyValueCache};
    /// use brigade_nn::Model;
    /// use tch::Tensor;
    ///
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    /// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// let ids = Tensor::from_slice(&[7i64, 8, 9]).view([1, 3]);
    /// let mut cache = KeyValueCache::fixed(4).kind(CacheKind::Int8);
    /// model.module().forward_cached((&ids).into(), &mut cache)?;
    /// let error = model.module().forward_cached((&ids).into(), &mut cache).unwrap_err();
    /// assert!(error.to_string().contains("room for 4 tokens, found 6"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn fixed(tokens: i64) -> Self {
        Self { room: tokens, is_fixed: true, ..Self::default() }
    }

    /// Sets the storage format of keys and values. The cache must be empty. Defaults to [`CacheKind::Computed`].
    #[must_use]
    pub fn kind(mut self, kind: CacheKind) -> Self {
        self.kind = kind;
        self
    }

    /// Returns the number of tokens in the cache, padding included.
    #[must_use]
    pub fn len(&self) -> i64 {
        // In a stage of a pipeline, layers of other stages have no tokens.
        self.layers.iter().map(|layer| layer.length).max().unwrap_or(0)
    }

    /// Returns `true` if the cache holds no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all tokens and keeps the memory, for another batch of the same size.
    pub fn clear(&mut self) {
        self.step = None;
        for layer in &mut self.layers {
            (layer.length, layer.position) = (0, None);
        }
    }

    /// Replaces the keys and values of text `i` by those of text `rows[i]`, for beam search and for several
    /// continuations of one text. `rows` is int64 `[texts]`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] for an index that is out of range, or if memory runs out.
    pub fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        tch::no_grad(|| self.layers.iter_mut().try_for_each(|layer| layer.select_rows(rows)))
    }

    /// Joins caches of different texts with the same number of tokens, in their order.
    pub(super) fn joined(caches: &[&Self]) -> Result<Self> {
        let Some(first) = caches.first() else { return Ok(Self::default()) };
        let layers = (0..first.layers.len()).map(|index| {
            let parts: Vec<_> = caches.iter().filter_map(|it| it.layers.get(index)).collect();
            first.layers[index].with_each(|place, part| {
                let all = parts.iter().filter_map(|layer| layer.held.as_ref());
                let all: Option<Vec<_>> = all.map(|held| part(&held[place])).collect();
                let home = first.layers[index].held.as_ref().map(|held| held[place].home);
                let joined = |(all, home): (Vec<&Tensor>, Home)| home.joined(&all);
                all.zip(home).map(joined).transpose()
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, ..first.empty() })
    }

    /// Returns the cache of a range of texts. It shares the memory of this one if that is on the device.
    pub(super) fn rows(&self, first: i64, count: i64) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| {
            layer.with_each(|place, part| {
                let Some(held) = layer.held.as_ref().map(|held| &held[place]) else {
                    return Ok(None);
                };
                let of_rows = |all: &Tensor| held.home.owned(all.f_narrow(0, first, count)?);
                part(held).map(of_rows).transpose()
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, ..self.empty() })
    }

    fn empty(&self) -> Self {
        let Self { room, is_fixed, kind, .. } = *self;
        Self { layers: Vec::new(), room, is_fixed, kind, step: None }
    }

    /// Returns the cache of a layer. `is_offloaded` keeps it in the host's memory if the layer is computed on a GPU.
    pub(super) fn layer(&mut self, index: usize, is_offloaded: bool) -> &mut LayerCache {
        let Self { room, is_fixed, kind, .. } = *self;
        while self.layers.len() <= index {
            self.layers.push(LayerCache {
                held: None,
                length: 0,
                room,
                is_fixed,
                kind,
                is_offloaded: false,
                position: None,
            });
        }
        let layer = &mut self.layers[index];
        layer.is_offloaded = is_offloaded;
        layer
    }

    /// Makes further forwards of one token read its position among the cache's tokens from `position`, int64 `[1]` on
    /// the device, and attend to all of the cache's room under a mask, so that a forward can be recorded as a graph. The
    /// attention mask of such a forward is `[batch, room]`. Returns the reason if that is impossible, and changes
    /// nothing then.
    pub(super) fn begin_steps(&mut self, position: &Tensor) -> Result<(), String> {
        let Some(first) = self.layers.first() else {
            return Err("the cache has no tokens yet".to_owned());
        };
        let length = first.length;
        for layer in &self.layers {
            let Some([keys, _]) = &layer.held else {
                return Err("some layers have no cache: they are on other ranks".to_owned());
            };
            if !matches!(keys.home, Home::Device(device) if device == position.device()) {
                return Err("the keys and values of some layers are on another device".to_owned());
            }
            if keys.capacity() != self.room || layer.length != length || length >= self.room {
                return Err("the cache has no room for all tokens".to_owned());
            }
        }
        let places = Tensor::f_arange(self.room, (Kind::Int64, position.device()));
        let places = places.map_err(|error| error.to_string())?;
        for layer in &mut self.layers {
            layer.clear_rest().map_err(|error| error.to_string())?;
        }
        for layer in &mut self.layers {
            layer.position = Some(position.shallow_clone());
        }
        self.step = Some(Step { position: position.shallow_clone(), places });
        Ok(())
    }

    /// Returns the place of the next token if forwards are those of [`Self::begin_steps`].
    pub(super) fn step(&self) -> Option<&Step> {
        self.step.as_ref()
    }

    /// Returns the number of keys before those of the next tokens: of a recorded step, all that the cache has room for
    /// but one.
    pub(super) fn past(&self) -> i64 {
        if self.step.is_some() { self.room - 1 } else { self.len() }
    }
}

/// Storage format of the keys and values in a [`KeyValueCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheKind {
    /// Element type in which the model computes keys and values.
    #[default]
    Computed,
    /// Element type bfloat16: half of the memory of float32, with 8 bits of precision.
    Bf16,
    /// Integers of 8 bits with a float32 scale for each token and head: the error of a value is at most 1/254 of the
    /// largest one of its token and head.
    Int8,
}

/// The keys and values of one layer.
#[derive(Debug)]
pub(super) struct LayerCache {
    /// Keys and values of the tokens so far.
    held: Option<[Held; 2]>,
    length: i64,
    room: i64,
    is_fixed: bool,
    kind: CacheKind,
    /// `true` if the first keys and values go to the host's memory where a GPU computes the layer.
    is_offloaded: bool,
    /// Position of the next token in recorded steps.
    position: Option<Tensor>,
}

/// Tensor of keys or values, or of their scales if they have some.
type Part = fn(&Held) -> Option<&Tensor>;

impl LayerCache {
    /// Returns a layer of the same format whose tensors are results of `f` for the keys (0) and the values (1).
    fn with_each(&self, f: impl Fn(usize, Part) -> Result<Option<Tensor>>) -> Result<Self> {
        let new = |place, home| -> Result<Option<Held>> {
            let values = f(place, |held| Some(&held.values))?;
            let scales = f(place, |held| held.scales.as_ref())?;
            Ok(values.map(|values| Held { values, scales, home }))
        };
        let held = match &self.held {
            Some([keys, values]) => {
                new(0, keys.home)?.zip(new(1, values.home)?).map(|(keys, values)| [keys, values])
            }
            None => None,
        };
        let Self { length, room, is_fixed, kind, is_offloaded, .. } = *self;
        Ok(Self { held, length, room, is_fixed, kind, is_offloaded, position: None })
    }

    /// Sets the keys and values of tokens that are still to come to 0. Those that a mask hides are multiplied by 0, which
    /// leaves a NaN of memory that was never written.
    fn clear_rest(&mut self) -> Result<()> {
        for held in self.held.iter().flatten() {
            for all in held.parts() {
                let rest = all.f_narrow(2, self.length, held.capacity() - self.length);
                let _ = tch::no_grad(|| rest?.f_zero_())?;
            }
        }
        Ok(())
    }

    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        let batch = rows.size().first().copied().unwrap_or(0);
        for held in self.held.iter_mut().flatten() {
            if self.position.is_some() && held.values.size()[0] == batch {
                held.reorder(rows)?;
                continue;
            }
            let length = if self.position.is_some() { held.capacity() } else { self.length };
            held.replace(batch, None, |all| {
                let rows = rows.f_to_device(all.device())?;
                Ok(all.f_narrow(2, 0, length)?.f_index_select(0, &rows)?)
            })?;
        }
        Ok(())
    }

    /// Appends the keys and values of new tokens, `[batch, heads, tokens, width]`, and returns all.
    pub(super) fn extend(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        tch::no_grad(|| {
            if let (Some(position), Some([all_keys, all_values])) = (&self.position, &self.held) {
                return Ok((
                    all_keys.append_at(position, keys)?,
                    all_values.append_at(position, values)?,
                ));
            }
            let (batch, before) = (keys.size()[0], self.length);
            let length = before + keys.size().get(2).copied().unwrap_or(0);
            if self.is_fixed && length > self.room {
                return Err(Error::invalid_argument(format!(
                    "the cache has room for {} tokens, found {length}: make it with more, or write fewer",
                    self.room
                )));
            }
            let capacity = length.max(2 * before).max(self.room);
            let held = match &mut self.held {
                Some(held) => held,
                none => {
                    let device = keys.device();
                    let home = if self.is_offloaded && device.has_streams() {
                        Home::Host { computed_on: device }
                    } else {
                        Home::Device(device)
                    };
                    none.insert([
                        Held::new(keys, capacity, self.kind, home)?,
                        Held::new(values, capacity, self.kind, home)?,
                    ])
                }
            };
            for held in held.iter_mut().filter(|held| held.capacity() < length) {
                held.replace(batch, Some(capacity), |all| Ok(all.f_narrow(2, 0, before)?))?;
            }
            let [all_keys, all_values] = &*held;
            let all = (all_keys.append(before, keys)?, all_values.append(before, values)?);
            self.length = length;
            Ok(all)
        })
    }
}

/// The memory that has keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// The device that computes the layer.
    Device(Device),
    /// Pinned memory of the host, with the tokens adjacent.
    Host { computed_on: Device },
}

impl Home {
    /// Allocates `[batch, heads, capacity, width or 1]`.
    fn empty(self, size: &[i64], kind: Kind) -> Result<Tensor> {
        match self {
            Self::Device(device) => Ok(Tensor::f_empty(size, (kind, device))?),
            Self::Host { .. } => {
                let form = (kind, Device::Cpu);
                let strides = tokens_adjacent(size);
                pinned_like(&unallocated(size, Some(&strides), form, "it is a cache's shape")?)
            }
        }
    }

    /// Waits for copies into the host's memory.
    fn synchronize(self) -> Result<()> {
        match self {
            Self::Device(_) => Ok(()),
            Self::Host { computed_on } => computed_on.synchronize(),
        }
    }

    /// Joins tensors of such memory along their batch.
    fn joined(self, parts: &[&Tensor]) -> Result<Tensor> {
        self.synchronize()?;
        self.owned(Tensor::f_cat(parts, 0)?)
    }

    /// Returns the tensor on the device, or a copy of it in the host's memory in the order of such memory.
    fn owned(self, values: Tensor) -> Result<Tensor> {
        if matches!(self, Self::Device(_)) {
            return Ok(values);
        }
        self.synchronize()?;
        let mut own = self.empty(&values.size(), values.kind())?;
        own.f_copy_(&values)?;
        Ok(own)
    }
}

/// Returns the strides of `[batch, heads, tokens, width]` in memory ordered as `[tokens, batch, heads, width]`.
fn tokens_adjacent(size: &[i64]) -> Vec<i64> {
    match *size {
        [batch, heads, _, width] => vec![heads * width, width, batch * heads * width, 1],
        _ => Vec::new(),
    }
}

/// Keys or values, with spare capacity.
#[derive(Debug)]
struct Held {
    /// Values `[batch, heads, capacity, width]`.
    values: Tensor,
    /// Scales `[batch, heads, capacity, 1]` of 8-bit values.
    scales: Option<Tensor>,
    home: Home,
}

/// Values of new tokens in the format of a cache.
struct Stored {
    values: Tensor,
    scales: Option<Tensor>,
}

impl Held {
    fn new(like: &Tensor, capacity: i64, kind: CacheKind, home: Home) -> Result<Self> {
        let mut size = like.size();
        size[2] = capacity;
        let values = match kind {
            CacheKind::Computed => home.empty(&size, like.kind())?,
            CacheKind::Bf16 => home.empty(&size, Kind::BFloat16)?,
            CacheKind::Int8 => home.empty(&size, Kind::Int8)?,
        };
        size[3] = 1;
        let scales =
            (kind == CacheKind::Int8).then(|| home.empty(&size, Kind::Float)).transpose()?;
        Ok(Self { values, scales, home })
    }

    fn capacity(&self) -> i64 {
        self.values.size()[2]
    }

    /// Allocates new memory for a batch, and copies the function's result for the old memory into its first tokens.
    fn replace(
        &mut self,
        batch: i64,
        capacity: Option<i64>,
        kept: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        self.home.synchronize()?;
        for tensor in std::iter::once(&mut self.values).chain(&mut self.scales) {
            let mut size = tensor.size();
            (size[0], size[2]) = (batch, capacity.unwrap_or(size[2]));
            let new = self.home.empty(&size, tensor.kind())?;
            let kept = kept(tensor)?;
            new.f_narrow(2, 0, kept.size()[2])?.f_copy_(&kept)?;
            *tensor = new;
        }
        Ok(())
    }

    /// Reorders the texts in the same memory, which a recorded step reads.
    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        for tensor in std::iter::once(&mut self.values).chain(&mut self.scales) {
            let reordered = tensor.f_index_select(0, rows)?;
            tensor.f_copy_(&reordered)?;
        }
        Ok(())
    }

    /// Appends new tokens behind the first `before`, and returns all.
    fn append(&self, before: i64, new: &Tensor) -> Result<Tensor> {
        let stored = self.stored(new)?;
        let count = new.size()[2];
        match self.home {
            Home::Device(_) => {
                self.write(before, &stored)?;
                self.read(before + count, new.kind())
            }
            Home::Host { computed_on } => {
                let loaded = self.loaded(before, computed_on)?;
                loaded.write(before, &stored)?;
                for (all, own) in self.parts().zip(stored.parts()) {
                    let place = all.f_narrow(2, before, count)?;
                    let form = (place.kind(), computed_on);
                    let mut ordered = Tensor::f_empty_strided(place.size(), place.stride(), form)?;
                    ordered.f_copy_(own)?;
                    begin_copy(&ordered, &place)?;
                }
                loaded.read(before + count, new.kind())
            }
        }
    }

    /// Writes one new token at a position of the device, and returns all for which there is room.
    fn append_at(&self, position: &Tensor, new: &Tensor) -> Result<Tensor> {
        let stored = self.stored(new)?;
        for (all, own) in self.parts().zip(stored.parts()) {
            let _ = all.shallow_clone().f_index_copy_(2, position, own)?;
        }
        self.read(self.capacity(), new.kind())
    }

    /// Copies the first tokens to the device that computes the layer, into memory of the same layout as that of a cache
    /// on the device.
    fn loaded(&self, tokens: i64, device: Device) -> Result<Self> {
        let home = Home::Device(device);
        let load = |all: &Tensor| -> Result<Tensor> {
            let loaded = home.empty(&all.size(), all.kind())?;
            let from = all.f_narrow(2, 0, tokens)?;
            let form = (from.kind(), device);
            let ordered = Tensor::f_empty_strided(from.size(), from.stride(), form)?;
            begin_copy(&from, &ordered)?;
            loaded.f_narrow(2, 0, tokens)?.f_copy_(&ordered)?;
            Ok(loaded)
        };
        let scales = self.scales.as_ref().map(load).transpose()?;
        Ok(Self { values: load(&self.values)?, scales, home })
    }

    fn parts(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.values).chain(&self.scales)
    }

    /// Converts new values to the format of the cache.
    fn stored(&self, new: &Tensor) -> Result<Stored> {
        if self.scales.is_none() {
            return Ok(Stored { values: new.f_to_kind(self.values.kind())?, scales: None });
        }
        let new = new.f_to_kind(Kind::Float)?;
        // The lower bound gives a row of zeros a scale, too.
        let scale = new.f_abs()?.f_amax([-1], true)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
        let scale = scale.f_div_scalar(127.0)?;
        let values = new.f_div(&scale)?.f_round()?.f_clamp(-127.0, 127.0)?.f_to_kind(Kind::Int8)?;
        Ok(Stored { values, scales: Some(scale) })
    }

    fn write(&self, at: i64, stored: &Stored) -> Result<()> {
        for (all, own) in self.parts().zip(stored.parts()) {
            all.f_narrow(2, at, own.size()[2])?.f_copy_(own)?;
        }
        Ok(())
    }

    fn read(&self, length: i64, kind: Kind) -> Result<Tensor> {
        let values = self.values.f_narrow(2, 0, length)?;
        match &self.scales {
            None => Ok(values.f_to_kind(kind)?),
            Some(scales) => {
                let scaled =
                    values.f_to_kind(Kind::Float)?.f_mul(&scales.f_narrow(2, 0, length)?)?;
                Ok(scaled.f_to_kind(kind)?)
            }
        }
    }
}

impl Stored {
    fn parts(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.values).chain(&self.scales)
    }
}
