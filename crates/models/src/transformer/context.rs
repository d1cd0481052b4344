//! The tokens of a batch that a rank computes.

use brigade_nn::{ContextPart, ContextRegion, ParamPath, Training};
use brigade_torch::Result;
use tch::Tensor;

use super::attention::AttentionMask;
use super::{KeyValueCache, Tokens};

/// Selection of this rank's part of sequences with context parallelism.
#[derive(Debug)]
pub(super) struct Context {
    region: ContextRegion,
    training: Training,
    /// `true` if the body has dropout, so that each rank needs numbers of its own.
    draws: bool,
}

/// A rank's tokens, and their attention mask.
pub(super) struct OwnTokens {
    pub(super) ids: Tensor,
    pub(super) token_type_ids: Option<Tensor>,
    /// Positions `[batch or 1, own tokens]`.
    pub(super) positions: Tensor,
    pub(super) mask: AttentionMask,
    pub(super) part: ContextPart,
}

impl Context {
    /// Creates the context of the path. `dropout` are the dropout probabilities of the body.
    pub(super) fn new(path: &ParamPath<'_>, dropout: &[f64]) -> Self {
        let draws = dropout.iter().any(|probability| *probability > 0.0);
        Self { region: path.context(), training: path.training(), draws }
    }

    /// Returns this rank's part of the tokens of a causal model, or all tokens if there is a cache. `past` tokens are
    /// in the cache.
    pub(super) fn causal(
        &self,
        tokens: &Tokens<'_>,
        past: i64,
        cache: Option<&KeyValueCache>,
    ) -> Result<OwnTokens> {
        let length = tokens.ids.size()[1];
        if cache.is_some() || self.region.group().is_none() {
            let mask = match cache.and_then(KeyValueCache::step) {
                Some(step) => AttentionMask::Given(step.mask(tokens.attention_mask)?),
                None => AttentionMask::causal(tokens, past, length)?,
            };
            return OwnTokens::take(
                tokens,
                past,
                mask,
                ContextRegion::default().part(length, true),
            );
        }
        let (mask, part) = AttentionMask::causal_part(tokens, &self.region)?;
        OwnTokens::take(tokens, past, mask, part)
    }

    /// Returns this rank's part of the tokens of a model with bidirectional attention.
    pub(super) fn bidirectional(&self, tokens: &Tokens<'_>) -> Result<OwnTokens> {
        let (mask, part) = if self.region.group().is_none() {
            let part = self.region.part(tokens.ids.size()[1], false);
            (AttentionMask::bidirectional(tokens)?, part)
        } else {
            AttentionMask::bidirectional_part(tokens, &self.region)?
        };
        OwnTokens::take(tokens, 0, mask, part)
    }

    /// Runs a computation on this rank's part, with the rank's own random numbers in training.
    pub(super) fn run<T>(
        &self,
        part: &ContextPart,
        like: &Tensor,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if part.is_divided() && self.draws && self.training.is_on() {
            self.region.with_own_random_numbers(like.device(), f)
        } else {
            f()
        }
    }
}

impl OwnTokens {
    fn take(
        tokens: &Tokens<'_>,
        past: i64,
        mask: AttentionMask,
        part: ContextPart,
    ) -> Result<Self> {
        let own = |whole: &Tensor| part.take(whole, 1);
        Ok(Self {
            ids: own(tokens.ids)?,
            token_type_ids: tokens.token_type_ids.map(own).transpose()?,
            positions: own(&tokens.positions(past, tokens.ids.size()[1])?)?,
            mask,
            part,
        })
    }
}
