//! Layer of BERT.

use brigade_nn::{Dropout, LayerNorm, Linear, ParamPath, Training};
use brigade_torch::{Activation, ResidualNorm, Result};
use tch::Tensor;

use super::super::attention::{OwnHeads, Shared, attend, split_heads};
use super::super::blocks::Block;
use super::super::cache::LayerCache;
use super::{BertOptions, norm};
use crate::residual::Residual;

/// Attention and a feed-forward layer, each with a residual connection and followed by a normalisation.
#[derive(Debug)]
pub(super) struct BertLayer {
    query: Linear,
    key: Linear,
    value: Linear,
    training: Training,
    attention_dense: Linear,
    attention_norm: LayerNorm,
    attention_dropout: Dropout,
    intermediate: Linear,
    output_dense: Linear,
    output_norm: LayerNorm,
    output_dropout: Dropout,
    activation: Activation,
    heads: OwnHeads,
    dropout: f64,
}

impl BertLayer {
    pub(super) fn new(path: &ParamPath<'_>, options: &BertOptions) -> Self {
        let BertOptions { hidden_size: width, intermediate_size: inner, .. } = *options;
        let dropout = options.attention_probs_dropout_prob;
        if !(0.0..1.0).contains(&dropout) {
            path.reject(format_args!("attention_probs_dropout_prob {dropout} is not in [0, 1)"));
        }
        let attention = path / "attention";
        let (own, attention_output) = (&attention / "self", &attention / "output");
        let output = path / "output";
        let square = |name: &str| Linear::new(&own / name, width, width);
        let [query, key, value] = ["query", "key", "value"].map(square);
        let others = [key.divided(), value.divided()];
        let heads = OwnHeads::new(&own, options.num_attention_heads, query.divided(), &others);
        Self {
            query,
            key,
            value,
            training: (&own / "dropout").training(),
            attention_dense: Linear::new(&attention_output / "dense", width, width),
            attention_norm: norm(&attention_output / "LayerNorm", options),
            attention_dropout: Dropout::maskless(
                &attention_output / "dropout",
                options.hidden_dropout_prob,
            ),
            intermediate: Linear::new(path / "intermediate" / "dense", width, inner),
            output_dense: Linear::new(&output / "dense", inner, width),
            output_norm: norm(&output / "LayerNorm", options),
            output_dropout: Dropout::maskless(&output / "dropout", options.hidden_dropout_prob),
            activation: options.hidden_act,
            heads,
            dropout,
        }
    }

    /// Returns the linear layers, in the order in which their initial values are drawn.
    pub(super) fn linear(&self) -> [&Linear; 6] {
        let Self { query, key, value, attention_dense, intermediate, output_dense, .. } = self;
        [query, key, value, attention_dense, intermediate, output_dense]
    }

    fn attend(&self, input: &Tensor, shared: &Shared) -> Result<Tensor> {
        let OwnHeads { count, region } = &self.heads;
        let input = region.enter(input)?;
        let heads = |layer: &Linear| split_heads(&layer.forward_entered(&input)?, *count);
        let (queries, keys) = (heads(&self.query)?, heads(&self.key)?);
        let values = heads(&self.value)?;
        let dropout = if self.training.is_on() { self.dropout } else { 0.0 };
        attend([&queries, &keys, &values], shared, dropout, None, region)
    }
}

impl Block for BertLayer {
    fn forward(
        &self,
        hidden: &Residual,
        shared: &Shared,
        _cache: Option<&mut LayerCache>,
    ) -> Result<Residual> {
        let attended = self.attend(hidden.input(), shared)?;
        let attended = self.attention_dense.forward_branch(&attended, &self.attention_dropout)?;
        let attended = shared.seeded(attended, 0)?;
        let ResidualNorm { stream, normed } =
            self.attention_norm.forward_post_residual(&hidden.stream, Some(&attended))?;
        let (first, second, dropout) =
            (&self.intermediate, &self.output_dense, &self.output_dropout);
        let added = first.forward_feed_forward_branch(&normed, self.activation, second, dropout)?;
        let added = shared.seeded(added, 1)?;
        let ResidualNorm { stream, normed } =
            self.output_norm.forward_post_residual(&stream, Some(&added))?;
        Ok(Residual { normed: Some(normed), ..Residual::new(stream) })
    }
}
