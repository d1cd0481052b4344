//! Keys and values of the tokens so far.

use brigade_torch::Result;
use tch::Tensor;

/// The keys and values that a causal transformer has computed, so that a further token costs one token's work.
///
/// It belongs to one batch, and holds its memory ahead: it doubles when it is full, or has room for a number of
/// tokens from the start. It is for inference: no gradient goes into it.
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
}

impl KeyValueCache {
    /// Returns an empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty one that takes memory for this many tokens when the first come.
    #[must_use]
    pub fn with_room(tokens: i64) -> Self {
        Self { layers: Vec::new(), room: tokens }
    }

    /// The number of tokens in it, padding included.
    #[must_use]
    pub fn len(&self) -> i64 {
        self.layers.first().map_or(0, |layer| layer.length)
    }

    /// Whether nothing is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all tokens and keeps the memory: for another batch of the same size.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            layer.length = 0;
        }
    }

    /// Replaces the keys and values of each text by those of the text of a number in `rows`, int64 `[texts]`: for beams, and
    /// for several continuations of one text.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] for a number that no text has, or when memory runs out.
    pub fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        tch::no_grad(|| self.layers.iter_mut().try_for_each(|layer| layer.select_rows(rows)))
    }

    pub(super) fn layer(&mut self, index: usize) -> &mut LayerCache {
        let room = self.room;
        while self.layers.len() <= index {
            self.layers.push(LayerCache { held: None, length: 0, room });
        }
        &mut self.layers[index]
    }
}

/// Of one layer.
#[derive(Debug)]
pub(super) struct LayerCache {
    /// Keys and values, `[batch, heads, capacity, width]`.
    held: Option<(Tensor, Tensor)>,
    length: i64,
    room: i64,
}

impl LayerCache {
    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        let length = self.length;
        let selected = |all: &Tensor| -> Result<Tensor> {
            let mut size = all.size();
            size[0] = rows.size().first().copied().unwrap_or(0);
            let selected = Tensor::f_empty(&size, (all.kind(), all.device()))?;
            let filled = all.f_narrow(2, 0, length)?.f_index_select(0, rows)?;
            selected.f_narrow(2, 0, length)?.f_copy_(&filled)?;
            Ok(selected)
        };
        if let Some((keys, values)) = &self.held {
            self.held = Some((selected(keys)?, selected(values)?));
        }
        Ok(())
    }

    /// Adds those of new tokens, `[batch, heads, tokens, width]`, and gives all.
    pub(super) fn extend(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        tch::no_grad(|| {
            let new = keys.size().get(2).copied().unwrap_or(0);
            let length = self.length + new;
            let held = match self.held.take() {
                Some((old_keys, old_values)) if old_keys.size()[2] >= length => {
                    (old_keys, old_values)
                }
                old => {
                    let capacity = length.max(2 * self.length).max(self.room);
                    let grown = |like: &Tensor, old: Option<&Tensor>| -> Result<Tensor> {
                        let mut size = like.size();
                        size[2] = capacity;
                        let grown = Tensor::f_empty(&size, (like.kind(), like.device()))?;
                        if let Some(old) = old.filter(|_| self.length > 0) {
                            let filled = old.f_narrow(2, 0, self.length)?;
                            grown.f_narrow(2, 0, self.length)?.f_copy_(&filled)?;
                        }
                        Ok(grown)
                    };
                    let (old_keys, old_values) = old.unzip();
                    (grown(keys, old_keys.as_ref())?, grown(values, old_values.as_ref())?)
                }
            };
            held.0.f_narrow(2, self.length, new)?.f_copy_(keys)?;
            held.1.f_narrow(2, self.length, new)?.f_copy_(values)?;
            self.length = length;
            let all = (held.0.f_narrow(2, 0, length)?, held.1.f_narrow(2, 0, length)?);
            self.held = Some(held);
            Ok(all)
        })
    }
}
