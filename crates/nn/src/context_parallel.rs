//! Context parallelism: each rank of a group has a part of every sequence.
//!
//! A `SequencePart` (`crates/sharding`) describes the tokens of a rank. A `ContextPart`, which a model's body gets from
//! its path, selects them and computes attention to the tokens of all ranks. `crates/torch/cpp/context_attention.cpp`
//! attends to the keys of one rank after the other and merges the results by their sums of exponentials. Under a causal
//! mask each rank has an early and a late chunk, so that each pair of ranks takes one call of libtorch's kernel.
//!
//! The backward of each collective is its exact adjoint, so that the gradient is the average over the ranks, which have
//! different tokens, without a further factor. A sequence region is a scope of the thread
//! (`TensorRegion::in_sequence_region`) that layers query: at its edges they gather and scatter instead of summing, and
//! whole parameters get the sum of their gradients.

use brigade_sharding::{ContextMethod, SequencePart};
use brigade_torch::regions::{
    all_to_all, copy_to_region, gather_from_sequence_region, reduce_from_region,
};
use brigade_torch::{AttentionOptions, Error, ProcessGroup, Result, attention, context_attention};
use tch::{Device, Kind, Tensor};

use crate::tensor_parallel::with_own_random_numbers;

/// Options of context parallelism: the ranks that divide each sequence, and the method by which attention gets the keys
/// of the other ranks. Passed to [`ModelBuilder::context_parallel`](crate::ModelBuilder::context_parallel).
#[derive(Debug, Clone)]
pub struct ContextParallel {
    /// Process group of the ranks that divide each sequence. `None` for a single rank.
    pub group: Option<ProcessGroup>,
    /// Method by which attention gets the keys and values of the other ranks.
    pub method: ContextMethod,
}

/// The ranks that divide each sequence, as a module gets them from [`ParamPath::context`](crate::ParamPath::context).
///
/// A module gets whole sequences of ids, masks and labels, the same on all ranks of the group. It selects its part of
/// them, computes layers that treat each token separately, and calls [`ContextPart::attention`] instead of attention.
/// Its loss is a sum over its tokens, which [`ContextPart::sum`] adds up over the ranks; or its outputs are gathered.
/// The gradients are those of the mean of the ranks' losses, so that averaging over the ranks gives the gradients of
/// parameters, as in data parallelism.
///
/// ```
/// use brigade_nn::{Linear, Model, ParamPath};
/// use brigade_torch::AttentionOptions;
/// use tch::{Device, Kind, Tensor};
///
/// let model = Model::new(|path| (Linear::new(path / "qkv", 8, 24), path.context()))?;
/// let (qkv, context) = model.module();
/// let input = Tensor::randn([2, 10, 8], (Kind::Float, Device::Cpu));
///
/// let part = context.part(10, true);
/// let own = part.take(&input, 1)?;
/// let heads = qkv.forward(&own)?.view([2, own.size()[1], 3, 2, 4]).permute([2, 0, 3, 1, 4]);
/// let [queries, keys, values] = [0, 1, 2].map(|place| heads.get(place));
/// let options = AttentionOptions { causal: true, ..Default::default() };
/// let attended = part.attention(&queries, &keys, &values, None, &options)?;
/// assert_eq!(part.gather(&attended, 2)?.size(), [2, 2, 10, 4]);
/// # use brigade_nn::Module;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ContextRegion {
    group: Option<ProcessGroup>,
    method: ContextMethod,
}

impl ContextRegion {
    /// Returns the region of the ranks that divide each sequence.
    #[must_use]
    pub fn new(context: &ContextParallel) -> Self {
        let group = context.group.clone().filter(|group| group.size() > 1);
        Self { group, method: context.method }
    }

    /// Returns the process group of the ranks that divide each sequence. `None` for a single rank.
    #[must_use]
    pub fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_ref()
    }

    /// Returns the method by which attention gets the keys and values of the other ranks.
    #[must_use]
    pub fn method(&self) -> ContextMethod {
        self.method
    }

    /// Returns this rank's part of sequences of `length` tokens. `is_causal` declares that each token attends to itself
    /// and the tokens before it and nothing else is masked: the part then has early and late tokens, except under
    /// Ulysses, so that all ranks have the same work.
    #[must_use]
    pub fn part(&self, length: i64, is_causal: bool) -> ContextPart {
        let (rank, ranks) = self.group.as_ref().map_or((0, 1), |it| (it.rank(), it.size()));
        let is_balanced = is_causal && self.method != ContextMethod::Ulysses;
        let length = u64::try_from(length).unwrap_or(0);
        ContextPart {
            group: self.group.clone(),
            method: self.method,
            part: SequencePart::new(length, rank, ranks, is_balanced),
        }
    }

    /// Runs `f` with random numbers that differ between ranks and are the same in each run with the same seed, for
    /// dropout of parts of a sequence. Numbers that are drawn outside of `f` stay equal on all ranks.
    ///
    /// # Errors
    /// Returns the errors of `f`; [`brigade_torch::ErrorKind::Tensor`] for a generator that cannot be set.
    pub fn with_own_random_numbers<T>(
        &self,
        device: Device,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        with_own_random_numbers(self.group.as_ref(), device, f)
    }
}

/// A rank's part of sequences of one length, from [`ContextRegion::part`]. Without a group the part is the whole
/// sequence, and nothing is sent.
#[derive(Debug, Clone)]
pub struct ContextPart {
    group: Option<ProcessGroup>,
    method: ContextMethod,
    part: SequencePart,
}

impl ContextPart {
    /// Returns `true` if the sequence is divided over several ranks.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.group.is_some()
    }

    /// Returns the positions of this rank's tokens.
    #[must_use]
    pub fn tokens(&self) -> SequencePart {
        self.part
    }

    /// Returns `true` if attention on this rank covers the tokens of all ranks for some of the heads, so that it takes
    /// masks of the whole sequence (Ulysses).
    #[must_use]
    pub fn attends_by_heads(&self) -> bool {
        self.is_divided() && self.method == ContextMethod::Ulysses
    }

    /// Returns this rank's part, along `dim`, of a tensor that is equal on all ranks, with zeros for tokens that pad
    /// the sequence.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if the dimension does not have the length of the sequence.
    pub fn take(&self, whole: &Tensor, dim: i64) -> Result<Tensor> {
        self.take_or(whole, dim, 0)
    }

    /// Returns this rank's part of a tensor as [`ContextPart::take`] does, with `padding` instead of zero at the tokens
    /// that pad the sequence.
    ///
    /// # Errors
    /// Returns the same errors as [`ContextPart::take`].
    pub fn take_or(&self, whole: &Tensor, dim: i64, padding: i64) -> Result<Tensor> {
        if !self.is_divided() {
            return Ok(whole.shallow_clone());
        }
        let length = self.part.length();
        let pieces = self.part.ranges().into_iter().map(|range| {
            let end = range.end.min(length).max(range.start.min(length));
            let start = range.start.min(length);
            let known = whole.f_narrow(dim, start.cast_signed(), (end - start).cast_signed())?;
            let missing = (range.end - range.start) - (end - start);
            if missing == 0 {
                return Ok(known);
            }
            let mut shape = known.size();
            let place = usize::try_from(if dim < 0 { dim + shape.len() as i64 } else { dim });
            if let Some(size) = place.ok().and_then(|place| shape.get_mut(place)) {
                *size = missing.cast_signed();
            }
            let fill = Tensor::f_full(shape, padding, (whole.f_kind()?, whole.device()))?;
            Ok(Tensor::f_cat(&[known, fill], dim)?)
        });
        Ok(Tensor::f_cat(&pieces.collect::<Result<Vec<_>>>()?, dim)?)
    }

    /// Returns the positions, `[own tokens]` of int64, of this rank's tokens in the padded sequence.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if memory runs out.
    pub fn places(&self, device: Device) -> Result<Tensor> {
        let form = (Kind::Int64, device);
        let ranges = self.part.ranges().into_iter();
        let ranges = ranges.map(|range| {
            Tensor::f_arange_start(range.start.cast_signed(), range.end.cast_signed(), form)
        });
        Ok(Tensor::f_cat(&ranges.collect::<Result<Vec<_>, _>>()?, 0)?)
    }

    /// Gathers the parts of all ranks along `dim`, and returns the whole sequence, in order and without padding, on
    /// every rank.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] if a peer was lost; [`brigade_torch::ErrorKind::Tensor`] if memory
    /// runs out.
    pub fn gather(&self, own: &Tensor, dim: i64) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own.shallow_clone()) };
        let whole = self.in_order(&gather_from_sequence_region(group, own, dim)?, dim)?;
        Ok(whole.f_narrow(dim, 0, self.part.length().cast_signed())?)
    }

    /// Returns the sum over the ranks, equal on all of them, for example of the losses of their tokens.
    ///
    /// # Errors
    /// Returns the same errors as [`ContextPart::gather`].
    pub fn sum(&self, own: &Tensor) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own.shallow_clone()) };
        if !own.requires_grad() {
            return reduce_from_region(group, own);
        }
        // Each rank's loss includes the results of every rank: the gradient is the sum of those of all losses.
        copy_to_region(group, &reduce_from_region(group, own)?)
    }

    /// Computes [`brigade_torch::attention`] of this rank's queries `[batch, heads, own tokens, head size]` to the keys
    /// and values of all ranks' tokens. This rank passes the keys and values of its own tokens: `[batch, heads or a
    /// divisor, own tokens, head size]`. Returns the outputs for its own tokens.
    ///
    /// A mask has one row for each of this rank's tokens and one column for each token of the padded sequence, `[batch
    /// or 1, 1, own tokens, padded length]`; under [Ulysses](Self::attends_by_heads) one row for each token of the
    /// padded sequence. Without a mask, `causal` hides later tokens; without `causal` every token attends to all
    /// tokens, including padding, so pass a mask if there is padding.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a number of heads that is not divisible by the number of ranks
    /// (Ulysses), for a mask or dropout with a ring, and for a mask together with `causal`. Also returns the errors of
    /// [`ContextPart::gather`] and of [`brigade_torch::attention`].
    pub fn attention(
        &self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        mask: Option<&Tensor>,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let Some(group) = &self.group else {
            return attention(queries, keys, values, mask, options);
        };
        if self.method == ContextMethod::Ulysses {
            return by_heads(group, [queries, keys, values], mask, options);
        }
        if mask.is_none() && options.dropout == 0.0 && options.causal == self.part.is_balanced() {
            let ring = self.method == ContextMethod::Ring;
            return context_attention(group, queries, keys, values, ring, options);
        }
        if self.method == ContextMethod::Ring {
            let found = if mask.is_some() { "a mask" } else { "dropout of scores" };
            return Err(Error::invalid_argument(format!(
                "ring attention works without masks and without dropout of scores, and there is {found}: use the method \
                 `gather` or `ulysses`, texts without padding on the left, and an attention dropout of 0"
            )));
        }
        let all = |own: &Tensor| -> Result<Tensor> {
            self.in_order(&gather_from_sequence_region(group, own, 2)?, 2)
        };
        let (keys, values) = (all(keys)?, all(values)?);
        if !options.causal {
            return attention(queries, &keys, &values, mask, options);
        }
        if mask.is_some() {
            return Err(Error::invalid_argument(
                "attention: a mask beside `causal`: put causality into the mask",
            ));
        }
        let rows = self.places(queries.device())?.f_unsqueeze(1)?;
        let form = (Kind::Int64, queries.device());
        let columns = Tensor::f_arange(self.part.padded_length().cast_signed(), form)?;
        let seen = columns.f_unsqueeze(0)?.f_le_tensor(&rows)?.f_unsqueeze(0)?.f_unsqueeze(0)?;
        let options = AttentionOptions { causal: false, ..*options };
        attention(queries, &keys, &values, Some(&seen), &options)
    }

    /// Reorders a tensor that was gathered by ranks to the order of the sequence.
    fn in_order(&self, by_ranks: &Tensor, dim: i64) -> Result<Tensor> {
        if !self.part.is_balanced() {
            return Ok(by_ranks.shallow_clone());
        }
        let chunk = (self.part.own_length() / 2).cast_signed();
        let ranks = self.part.ranks() as i64;
        let early = (0..ranks).map(|rank| 2 * rank);
        let late = (0..ranks).rev().map(|rank| 2 * rank + 1);
        let pieces = early.chain(late).map(|piece| by_ranks.f_narrow(dim, piece * chunk, chunk));
        Ok(Tensor::f_cat(&pieces.collect::<Result<Vec<_>, _>>()?, dim)?)
    }
}

/// Exchanges tokens for heads, computes attention, and exchanges back.
fn by_heads(
    group: &ProcessGroup,
    [queries, keys, values]: [&Tensor; 3],
    mask: Option<&Tensor>,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let ranks = group.size() as i64;
    let heads_of = |tensor: &Tensor| tensor.size().get(1).copied().unwrap_or(0);
    let (heads, shared) = (heads_of(queries), heads_of(keys));
    let refused = |heads: i64, what: &str| {
        let (less, more) = (heads / ranks * ranks, (heads / ranks + 1) * ranks);
        let nearest = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
        Error::invalid_argument(format!(
            "{ranks} ranks of Ulysses do not divide {heads} {what}: take {nearest}, other ranks, or the method `gather`"
        ))
    };
    if heads % ranks != 0 {
        return Err(refused(heads, "heads"));
    }
    // With fewer key-value heads than ranks, several ranks get the same head.
    let repeats = if shared > 0 && ranks % shared == 0 { ranks / shared } else { 1 };
    if (shared * repeats) % ranks != 0 {
        return Err(refused(shared, "heads of keys and values"));
    }
    let spread = |own: &Tensor| -> Result<Tensor> {
        if repeats == 1 {
            return all_to_all(group, own, 1, 2);
        }
        all_to_all(group, &own.f_repeat_interleave_self_int(repeats, 1, None)?, 1, 2)
    };
    let (queries, keys, values) =
        (all_to_all(group, queries, 1, 2)?, spread(keys)?, spread(values)?);
    // The ranks have other heads, and drop other scores.
    let compute = || attention(&queries, &keys, &values, mask, options);
    let attended = if options.dropout > 0.0 {
        with_own_random_numbers(Some(group), queries.device(), compute)?
    } else {
        compute()?
    };
    all_to_all(group, &attended, 2, 1)
}
