//! The key-value cache.

use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

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
        for layer in &mut self.layers {
            layer.length = 0;
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
                all.map(|all| Ok(Tensor::f_cat(&all, 0)?)).transpose()
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, ..first.empty() })
    }

    /// Returns the cache of a range of texts, which shares the memory of this one.
    pub(super) fn rows(&self, first: i64, count: i64) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| {
            layer.with_each(|place, part| {
                let all = layer.held.as_ref().and_then(|held| part(&held[place]));
                all.map(|all| Ok(all.f_narrow(0, first, count)?)).transpose()
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, ..self.empty() })
    }

    fn empty(&self) -> Self {
        Self { layers: Vec::new(), ..*self }
    }

    pub(super) fn layer(&mut self, index: usize) -> &mut LayerCache {
        let Self { room, is_fixed, kind, .. } = *self;
        while self.layers.len() <= index {
            self.layers.push(LayerCache { held: None, length: 0, room, is_fixed, kind });
        }
        &mut self.layers[index]
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
}

/// Tensor of keys or values, or of their scales if they have some.
type Part = fn(&Held) -> Option<&Tensor>;

impl LayerCache {
    /// Returns a layer of the same format whose tensors are results of `f` for the keys (0) and the values (1).
    fn with_each(&self, f: impl Fn(usize, Part) -> Result<Option<Tensor>>) -> Result<Self> {
        let new = |place| -> Result<Option<Held>> {
            let values = f(place, |held| Some(&held.values))?;
            let scales = f(place, |held| held.scales.as_ref())?;
            Ok(values.map(|values| Held { values, scales }))
        };
        let held = match self.held {
            Some(_) => new(0)?.zip(new(1)?).map(|(keys, values)| [keys, values]),
            None => None,
        };
        Ok(Self { held, ..*self })
    }

    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        for held in self.held.iter_mut().flatten() {
            held.replace(rows.size().first().copied().unwrap_or(0), None, |all| {
                Ok(all.f_narrow(2, 0, self.length)?.f_index_select(0, rows)?)
            })?;
        }
        Ok(())
    }

    /// Appends the keys and values of new tokens, `[batch, heads, tokens, width]`, and returns all.
    pub(super) fn extend(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        tch::no_grad(|| {
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
                none => none.insert([
                    Held::new(keys, capacity, self.kind)?,
                    Held::new(values, capacity, self.kind)?,
                ]),
            };
            for (held, new) in held.iter_mut().zip([keys, values]) {
                if held.capacity() < length {
                    held.replace(batch, Some(capacity), |all| Ok(all.f_narrow(2, 0, before)?))?;
                }
                held.write(before, new)?;
            }
            self.length = length;
            let [all_keys, all_values] = &*held;
            Ok((all_keys.read(length, keys.kind())?, all_values.read(length, values.kind())?))
        })
    }
}

/// Keys or values, with spare capacity.
#[derive(Debug)]
struct Held {
    /// Values `[batch, heads, capacity, width]`.
    values: Tensor,
    /// Scales `[batch, heads, capacity, 1]` of 8-bit values.
    scales: Option<Tensor>,
}

impl Held {
    fn new(like: &Tensor, capacity: i64, kind: CacheKind) -> Result<Self> {
        let mut size = like.size();
        size[2] = capacity;
        let empty = |size: &[i64], kind| Tensor::f_empty(size, (kind, like.device()));
        let values = match kind {
            CacheKind::Computed => empty(&size, like.kind())?,
            CacheKind::Bf16 => empty(&size, Kind::BFloat16)?,
            CacheKind::Int8 => empty(&size, Kind::Int8)?,
        };
        size[3] = 1;
        let scales = (kind == CacheKind::Int8).then(|| empty(&size, Kind::Float)).transpose()?;
        Ok(Self { values, scales })
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
        for tensor in std::iter::once(&mut self.values).chain(&mut self.scales) {
            let mut size = tensor.size();
            (size[0], size[2]) = (batch, capacity.unwrap_or(size[2]));
            let new = Tensor::f_empty(&size, (tensor.kind(), tensor.device()))?;
            let kept = kept(tensor)?;
            new.f_narrow(2, 0, kept.size()[2])?.f_copy_(&kept)?;
            *tensor = new;
        }
        Ok(())
    }

    fn write(&mut self, at: i64, new: &Tensor) -> Result<()> {
        let count = new.size()[2];
        let mut place = self.values.f_narrow(2, at, count)?;
        let Some(scales) = &self.scales else {
            place.f_copy_(new)?;
            return Ok(());
        };
        let new = new.f_to_kind(Kind::Float)?;
        // The lower bound gives a row of zeros a scale, too.
        let scale = new.f_abs()?.f_amax([-1], true)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
        let scale = scale.f_div_scalar(127.0)?;
        scales.f_narrow(2, at, count)?.f_copy_(&scale)?;
        place.f_copy_(&new.f_div(&scale)?.f_round()?.f_clamp(-127.0, 127.0)?)?;
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
