//! A row of equal blocks, kept for the backward or computed again.

use std::sync::Arc;

use brigade_nn::{ParamPath, Unit};
use brigade_torch::{Result, grad_enabled, try_recomputed};
use parking_lot::Mutex;
use tch::Tensor;

use super::KeyValueCache;
use super::attention::AttentionMask;
use super::cache::LayerCache;
use super::rotary::Rotation;

/// A layer of a transformer.
pub(super) trait Block: Send + 'static {
    /// From hidden numbers `[batch, tokens, width]` to the next ones.
    fn forward(
        &self,
        hidden: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor>;
}

/// What all blocks of a forward have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mask: AttentionMask,
    pub(super) rotation: Option<Rotation>,
}

impl Shared {
    fn shallow_clone(&self) -> Self {
        Self {
            mask: self.mask.shallow_clone(),
            rotation: self.rotation.as_ref().map(Rotation::shallow_clone),
        }
    }
}

/// Blocks in a row.
#[derive(Debug)]
pub(super) struct Blocks<B> {
    blocks: Vec<Arc<Mutex<B>>>,
    units: Vec<Unit>,
    /// Keeps only each block's input, and computes what the backward needs again.
    recompute: bool,
}

impl<B: Block> Blocks<B> {
    /// `path` has the blocks, each below its number.
    pub(super) fn new(path: &ParamPath<'_>, blocks: Vec<B>, recompute: bool) -> Self {
        let units = (0..blocks.len()).map(|index| (path / index).unit()).collect();
        let blocks = blocks.into_iter().map(|block| Arc::new(Mutex::new(block))).collect();
        Self { blocks, units, recompute }
    }

    /// The last block's output. `seen` gets the input of each block.
    pub(super) fn forward(
        &self,
        mut hidden: Tensor,
        shared: &Shared,
        mut cache: Option<&mut KeyValueCache>,
        mut seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        for (index, (block, unit)) in self.blocks.iter().zip(&self.units).enumerate() {
            if let Some(seen) = &mut seen {
                seen.push(hidden.shallow_clone());
            }
            let layer = cache.as_deref_mut().map(|cache| cache.layer(index));
            hidden = unit.run(|| {
                if self.recompute && layer.is_none() && grad_enabled() {
                    let (block, shared) = (Arc::clone(block), shared.shallow_clone());
                    try_recomputed(&[&hidden], move |inputs| {
                        let block = block.lock();
                        block.forward(&inputs[0], &shared, None)
                    })?
                } else {
                    block.lock().forward(&hidden, shared, layer)
                }
            })?;
        }
        Ok(hidden)
    }
}
