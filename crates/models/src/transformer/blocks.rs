//! Sequences of equal blocks, with or without gradient checkpointing.

use std::ops::Range;
use std::sync::Arc;

use brigade_nn::{Branch, ParamPath, Stages, TensorRegion, Training, Unit};
use brigade_torch::{Result, grad_enabled, norm_residual_seeds, try_recomputed};
use parking_lot::Mutex;
use tch::Tensor;

use super::KeyValueCache;
use super::attention::Shared;
use super::cache::LayerCache;
use crate::residual::Residual;

/// Number of branches with dropout that a block adds to its stream.
const BRANCHES: i64 = 2;

/// Layer of a transformer.
pub(super) trait Block: Send + 'static {
    /// Computes the next hidden states.
    fn forward(
        &self,
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Residual>;

    /// Does the same as [`Self::forward`]. Also returns the logits of the layer's router, if it has one: those of the
    /// whole sequence, on every rank of a tensor group.
    fn forward_routed(
        &self,
        hidden: &Residual,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<(Residual, Option<Tensor>)> {
        Ok((self.forward(hidden, shared, cache)?, None))
    }
}

/// Sequence of blocks.
#[derive(Debug)]
pub(super) struct Blocks<B> {
    blocks: Vec<Arc<Mutex<B>>>,
    units: Vec<Unit>,
    /// The blocks at which a pipeline cuts the model.
    row: Stages,
    /// `true` to keep only each block's input, and compute the rest again in the backward.
    recompute: bool,
    /// Ranks that divide the blocks' layers, and between the layers possibly the sequence.
    region: TensorRegion,
    /// `true` if the blocks have dropout.
    draws: bool,
    training: Training,
}

impl<B: Block> Blocks<B> {
    /// Creates the sequence. `path` has the blocks, each below its number; `dropout` are the dropout probabilities of
    /// the blocks.
    pub(super) fn new(
        path: &ParamPath<'_>,
        blocks: Vec<B>,
        recompute: bool,
        dropout: &[f64],
    ) -> Self {
        let draws = dropout.iter().any(|probability| *probability > 0.0);
        let units = (0..blocks.len()).map(|index| (path / index).unit()).collect();
        let row = path.stages(0..blocks.len());
        let blocks = blocks.into_iter().map(|block| Arc::new(Mutex::new(block))).collect();
        let (region, training) = (path.tensor_region(), path.training());
        Self { blocks, units, row, recompute, region, draws, training }
    }

    /// Returns the last block's output. `first` computes the input of the first block; the input of each block, for all
    /// tokens, is appended to `seen`.
    pub(super) fn forward(
        &self,
        first: impl FnOnce() -> Result<Tensor>,
        shared: &Shared,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        self.forward_routed(first, shared, cache, seen)?.0.join()
    }

    /// Does the same as [`Self::forward`], but leaves the last branch to the normalisation behind the blocks. Also
    /// returns the logits of the blocks' routers, if they have one.
    pub(super) fn forward_routed(
        &self,
        first: impl FnOnce() -> Result<Tensor>,
        shared: &Shared,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<(Residual, Vec<Tensor>)> {
        let (mut routers, mut branch) = (Vec::new(), None);
        let stream = self.row.run_blocks(first, |blocks, hidden| {
            let mut hidden = self.run_range(blocks, hidden, shared, cache, seen, &mut routers)?;
            if !self.is_cut() {
                branch = hidden.branch.take();
            }
            hidden.join()
        })?;
        Ok((Residual { branch, ..Residual::new(stream) }, routers))
    }

    /// Does the same as [`Self::forward_routed`] for blocks that have routers, but returns sums of their logits instead,
    /// to which each stage of a pipeline adds those of its blocks. `none` are the sums of no blocks, of floating-point
    /// numbers; `sums_of` makes those of one block.
    pub(super) fn forward_summed(
        &self,
        first: impl FnOnce() -> Result<Tensor>,
        shared: &Shared,
        none: &Tensor,
        sums_of: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<(Residual, Tensor)> {
        let mut branch = None;
        let [stream, sums] = self.row.run_blocks_with(
            || Ok([first()?, none.shallow_clone()]),
            |blocks, [hidden, earlier]| {
                let mut routers = Vec::new();
                let mut hidden =
                    self.run_range(blocks, hidden, shared, None, None, &mut routers)?;
                if !self.is_cut() {
                    branch = hidden.branch.take();
                }
                // One block after the other, so that the bits do not depend on the stages.
                let mut sums = earlier;
                for router in &routers {
                    sums = sums.f_add(&sums_of(router)?)?;
                }
                Ok([hidden.join()?, sums])
            },
        )?;
        Ok((Residual { branch, ..Residual::new(stream) }, sums))
    }

    /// Runs a range of the blocks on the whole sequence, or between sequence regions on this rank's part of it.
    fn run_range(
        &self,
        blocks: Range<usize>,
        hidden: Tensor,
        shared: &Shared,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
        routers: &mut Vec<Tensor>,
    ) -> Result<Residual> {
        if !self.in_parts(cache.as_deref()) {
            return self.run(blocks, hidden, shared, cache, seen, routers);
        }
        let stream = self.region.over_sequence(hidden, |part| {
            let device = part.device();
            let run = || self.run(blocks, part, shared, None, seen, routers)?.join();
            if self.draws && self.training.is_on() {
                self.region.with_own_random_numbers(device, run)
            } else {
                run()
            }
        })?;
        Ok(Residual::new(stream))
    }

    /// Returns `true` if each rank of a tensor group has a part of the sequence: not of tokens that follow cached ones,
    /// which come one at a time.
    fn in_parts(&self, cache: Option<&KeyValueCache>) -> bool {
        self.region.has_sequence_regions() && cache.is_none()
    }

    /// Runs a range of the blocks: those of a pipeline's stage, or all.
    fn run(
        &self,
        blocks: Range<usize>,
        hidden: Tensor,
        shared: &Shared,
        mut cache: Option<&mut KeyValueCache>,
        mut seen: Option<&mut Vec<Tensor>>,
        routers: &mut Vec<Tensor>,
    ) -> Result<Residual> {
        let in_parts = self.in_parts(cache.as_deref());
        let mut hidden = Residual::new(hidden);
        let mut shared = shared.shallow_clone();
        let seeds = if self.draws && self.training.is_on() {
            let branches = BRANCHES * blocks.len() as i64;
            norm_residual_seeds(&hidden.stream, branches)?
        } else {
            None
        };
        for (place, index) in blocks.enumerate() {
            let (block, unit) = (&self.blocks[index], &self.units[index]);
            let device = unit.device().filter(|&device| device != hidden.stream.device());
            if let Some(device) = device {
                hidden = Residual::new(hidden.join()?.f_to_device(device)?);
            }
            shared.move_to(hidden.stream.device())?;
            shared.leaves_biases = unit.keeps_parameters() && !self.recompute;
            let own = |all: &Tensor| all.f_narrow(0, BRANCHES * place as i64, BRANCHES);
            shared.seeds = seeds.as_ref().map(own).transpose()?;
            let shared = &shared;
            if let Some(seen) = &mut seen {
                if hidden.branch.is_some() {
                    hidden = Residual::new(hidden.join()?);
                }
                let own = || self.region.whole_sequence(&hidden.stream);
                let own = if in_parts { self.region.in_sequence_region(own)? } else { own()? };
                seen.push(shared.part.gather(&own, 1)?);
            }
            let layer = cache.as_deref_mut();
            let layer = layer.map(|cache| cache.layer(index, unit.offloads_cache()));
            let recompute = self.recompute && layer.is_none() && grad_enabled();
            if recompute {
                // One tensor is kept for each block.
                hidden = Residual::new(hidden.join()?);
            }
            // What the unit's outputs are not made of.
            let (mut dropout, mut bias, mut seed) = (0.0, None, None);
            let (stream, branch, normed, router) = unit.run(|| {
                let (next, router) = if recompute {
                    let (block, shared) = (Arc::clone(block), shared.shallow_clone());
                    let region = self.region.clone();
                    try_recomputed(&[&hidden.stream], move |inputs| {
                        let input = Residual::new(inputs[0].shallow_clone());
                        let compute = || {
                            let (next, router) =
                                block.lock().forward_routed(&input, &shared, None)?;
                            Ok((Residual::new(next.join()?), router))
                        };
                        if in_parts { region.in_sequence_region(compute) } else { compute() }
                    })?
                } else {
                    let compute = || block.lock().forward_routed(&hidden, shared, layer);
                    if in_parts { self.region.in_sequence_region(compute) } else { compute() }
                }?;
                let Residual { stream, branch, normed } = next;
                let branch = branch.map(|branch| {
                    (dropout, bias, seed) = (branch.dropout, branch.bias, branch.seed);
                    branch.values
                });
                Ok((stream, branch, normed, router))
            })?;
            let branch = branch.map(|values| Branch { values, bias, dropout, seed });
            hidden = Residual { stream, branch, normed };
            routers.extend(router);
        }
        Ok(hidden)
    }

    /// Returns `true` if this rank has some of the blocks alone, as a stage of a pipeline.
    pub(super) fn is_cut(&self) -> bool {
        self.row.is_cut()
    }

    /// Returns the results of a function for each block.
    pub(super) fn map<T>(&self, f: impl Fn(&B) -> T) -> Vec<T> {
        self.blocks.iter().map(|block| f(&block.lock())).collect()
    }
}
