//! Grouped-query attention with rotary position embeddings, as in Llama and Mixtral.

use brigade_nn::{Linear, LinearOptions, Module, ParamPath, Training};
use brigade_torch::Result;
use tch::Tensor;

use super::attention::{OwnHeads, Shared, attend, check_heads, split_heads};
use super::cache::LayerCache;

/// Sizes of a [`RotatedAttention`].
#[derive(Debug, Clone, Copy)]
pub(super) struct RotatedAttentionOptions {
    /// Width of the input and the output.
    pub(super) width: i64,
    /// Number of query heads.
    pub(super) heads: i64,
    /// Number of key-value heads, a divisor of the number of query heads.
    pub(super) key_heads: i64,
    pub(super) head_width: i64,
    pub(super) bias: bool,
    pub(super) dropout: f64,
}

impl RotatedAttentionOptions {
    /// Records errors for sizes that cannot be built. `own_head_width` is `true` if the head size is set separately,
    /// and not the input's width divided by the number of heads.
    pub(super) fn check(&self, path: &ParamPath<'_>, own_head_width: bool) {
        let Self { width, heads, key_heads, head_width, dropout, .. } = *self;
        if !own_head_width && (heads < 1 || width % heads != 0) {
            path.reject(format_args!(
                "num_attention_heads {heads} does not divide hidden_size {width}"
            ));
        }
        if key_heads < 1 || heads % key_heads != 0 {
            path.reject(format_args!(
                "num_key_value_heads {key_heads} does not divide num_attention_heads {heads}"
            ));
        }
        if head_width < 2 || head_width % 2 != 0 {
            path.reject(format_args!("heads of width {head_width} are not pairs to rotate"));
        }
        if !(0.0..1.0).contains(&dropout) {
            path.reject(format_args!("attention_dropout {dropout} is not in [0, 1)"));
        }
    }
}

/// Projections to queries, keys and values, their rotations, and attention.
#[derive(Debug)]
pub(super) struct RotatedAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    training: Training,
    dropout: f64,
    heads: OwnHeads,
    /// Number of key-value heads of this rank. All heads if the projections are not divided.
    key_heads: i64,
    /// Index of the one key-value head that this rank's queries share, if every rank projects to all of them.
    shared_key_head: Option<i64>,
}

impl RotatedAttention {
    pub(super) fn new(path: &ParamPath<'_>, options: &RotatedAttentionOptions) -> Self {
        let RotatedAttentionOptions { width, heads, key_heads, head_width, bias, dropout } =
            *options;
        let (own, keys) = (heads * head_width, key_heads * head_width);
        let linear = |path: &ParamPath<'_>, name: &str, inputs, outputs| {
            Linear::with_options(path / name, inputs, outputs, LinearOptions { bias })
        };
        let q_proj = linear(path, "q_proj", width, own);
        let ranks = q_proj.divided().map_or(1, |divided| divided.part.ranks() as i64);
        // With fewer key-value heads than ranks, several ranks share one head: each projects to all of them.
        let is_shared = key_heads % ranks != 0 && key_heads > 0 && ranks % key_heads == 0;
        let path_of_keys = if is_shared { path.replicated() } else { path.clone() };
        let k_proj = linear(&path_of_keys, "k_proj", width, keys);
        let v_proj = linear(&path_of_keys, "v_proj", width, keys);
        let others = if is_shared { vec![] } else { vec![k_proj.divided(), v_proj.divided()] };
        let heads = OwnHeads::new(path, heads, q_proj.divided(), &others);
        if !is_shared {
            check_heads(path, key_heads, "heads of keys and values", ranks);
        }
        let rank = heads.region.group().map_or(0, |group| group.rank() as i64);
        let shared_key_head = is_shared.then(|| rank * key_heads / ranks);
        Self {
            q_proj,
            k_proj,
            v_proj,
            o_proj: linear(path, "o_proj", own, width),
            training: path.training(),
            dropout,
            heads,
            key_heads: if is_shared { key_heads } else { key_heads / ranks },
            shared_key_head,
        }
    }

    /// Returns the linear layers, in the order in which their initial values are drawn.
    pub(super) fn linear(&self) -> [&Linear; 4] {
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj]
    }

    pub(super) fn forward(
        &self,
        input: &Tensor,
        shared: &Shared,
        cache: Option<&mut LayerCache>,
    ) -> Result<Tensor> {
        let OwnHeads { count, region } = &self.heads;
        let entered = region.enter(input)?;
        let mut queries = split_heads(&self.q_proj.forward_entered(&entered)?, *count)?;
        let of_keys = |layer: &Linear| match self.shared_key_head {
            None => split_heads(&layer.forward_entered(&entered)?, self.key_heads),
            // The projection's weight is whole on every rank, and so is its gradient, which is summed after the
            // projection.
            Some(head) => {
                let whole = region.whole_sequence(input)?;
                let all = region.outside_sequence_region(|| layer.forward(&whole))?;
                let all = region.enter_whole(&all)?;
                Ok(split_heads(&all, self.key_heads)?.f_narrow(1, head, 1)?)
            }
        };
        let (mut keys, values) = (of_keys(&self.k_proj)?, of_keys(&self.v_proj)?);
        if let Some(rotation) = &shared.rotation {
            (queries, keys) = rotation.apply(&queries, &keys)?;
        }
        let (keys, values) = match cache {
            Some(cache) => cache.extend(&keys, &values)?,
            None => (keys, values),
        };
        let dropout = if self.training.is_on() { self.dropout } else { 0.0 };
        let attended = attend([&queries, &keys, &values], shared, dropout, None, region)?;
        self.o_proj.forward(&attended)
    }
}
