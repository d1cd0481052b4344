//! Inputs of transformers.

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use tch::Tensor;

/// Input of a transformer: a batch of token ids with optional attention mask, token type ids and position ids.
///
/// The batches of loaders and of the Learner can be converted to it: `&ids`, `(&ids, &attention_mask)` and `(&ids,
/// &attention_mask, &token_type_ids)`.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options, Tokens};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 8, 9, 7, 8, 0]).view([2, 3]);
/// let mask = Tensor::from_slice(&[1i64, 1, 1, 1, 1, 0]).view([2, 3]);
/// assert_eq!(model.forward((&ids, &mask))?.size(), [2, 3, 50]);
/// let positions = Tensor::from_slice(&[4i64, 5, 6]).view([1, 3]);
/// let tokens = Tokens { position_ids: Some(&positions), ..Tokens::from(&ids) };
/// assert_eq!(model.forward(tokens)?.size(), [2, 3, 50]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Token ids `[batch, tokens]` of int64.
    pub ids: &'a Tensor,
    /// Attention mask `[batch, tokens]` of any kind, with 0 for padding, or `None` without padding. With a cache it
    /// also covers the tokens in the cache. Alternatively, for packed texts, `[batch, 1, tokens, tokens]` of bool:
    /// `true` where a token of the third dimension attends to one of the last. Such a mask must also exclude later
    /// tokens if the model is causal.
    pub attention_mask: Option<&'a Tensor>,
    /// Token type ids `[batch, tokens]` of int64: for a pair of texts, 0 for each token of the first text and 1 for
    /// each token of the second. Defaults to 0 for all tokens.
    pub token_type_ids: Option<&'a Tensor>,
    /// Position ids `[batch, tokens]` or `[1, tokens]` of int64. By default positions count from 0, or from the length
    /// of the cache, including padding, as in transformers.
    pub position_ids: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Tokens<'a> {
    fn from(ids: &'a Tensor) -> Self {
        Self { ids, attention_mask: None, token_type_ids: None, position_ids: None }
    }
}

impl<'a> From<(&'a Tensor, &'a Tensor)> for Tokens<'a> {
    fn from((ids, mask): (&'a Tensor, &'a Tensor)) -> Self {
        Self { attention_mask: Some(mask), ..Self::from(ids) }
    }
}

impl<'a> From<(&'a Tensor, &'a Tensor, &'a Tensor)> for Tokens<'a> {
    fn from((ids, mask, types): (&'a Tensor, &'a Tensor, &'a Tensor)) -> Self {
        Self { token_type_ids: Some(types), ..Self::from((ids, mask)) }
    }
}

impl Tokens<'_> {
    /// Returns the numbers of texts and tokens, after checking that all shapes match and that the model has enough
    /// positions.
    pub(super) fn checked_size(&self, past: i64, positions: i64) -> Result<(i64, i64)> {
        let &[batch, tokens] = self.ids.size().as_slice() else {
            return Err(Error::invalid_argument(format!(
                "a transformer takes ids [batch, tokens], found {:?}",
                self.ids.size()
            )));
        };
        let pairs = self.attention_mask.filter(|mask| mask.dim() == 4);
        if let Some(pairs) = pairs.filter(|pairs| pairs.kind() != tch::Kind::Bool) {
            return Err(Error::invalid_argument(format!(
                "an attention mask of four dimensions is of bool, found {:?}",
                pairs.kind()
            )));
        }
        let fits = |what: &str, tensor: Option<&Tensor>, expected: &[i64], broadcast: bool| {
            let Some(found) = tensor.map(Tensor::size) else { return Ok(()) };
            if found == expected || (broadcast && found == [1, tokens]) {
                return Ok(());
            }
            if pairs.is_some() && found == [batch, 1, tokens, past + tokens] {
                return Ok(());
            }
            Err(Error::invalid_argument(format!(
                "for ids [{batch}, {tokens}] after {past} cached ones the {what} is {expected:?}, found \
                 {found:?}"
            )))
        };
        fits("attention mask", self.attention_mask, &[batch, past + tokens], false)?;
        fits("shape of token types", self.token_type_ids, &[batch, tokens], false)?;
        fits("shape of position ids", self.position_ids, &[batch, tokens], true)?;
        if self.position_ids.is_none() && past + tokens > positions {
            return Err(Error::invalid_argument(format!(
                "the model has {}, found {}: cut the texts into shorter pieces",
                counted(positions, "position"),
                counted(past + tokens, "token")
            )));
        }
        Ok((batch, tokens))
    }

    /// Returns the given positions, or those that follow the cache's.
    pub(super) fn positions(&self, past: i64, tokens: i64) -> Result<Tensor> {
        match self.position_ids {
            Some(positions) => Ok(positions.shallow_clone()),
            None => {
                let form = (tch::Kind::Int64, self.ids.device());
                Ok(Tensor::f_arange_start(past, past + tokens, form)?.f_unsqueeze(0)?)
            }
        }
    }
}
