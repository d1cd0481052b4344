//! Constraints on the tokens that may be generated.

use brigade_torch::Result;
use tch::{Kind, Tensor};

use super::{GenerationOptions, refused};

/// A text before a token that is to be chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before<'a> {
    /// `[batch, tokens]`
    pub(super) ids: &'a Tensor,
    /// `[batch, tokens]`, where there is padding.
    pub(super) mask: Option<&'a Tensor>,
    /// Each text's tokens, without padding.
    pub(super) rows: &'a [Vec<i64>],
    /// The number of tokens that were written.
    pub(super) written: i64,
    /// The number of tokens that may be written.
    pub(super) left: i64,
}

/// Returns `true` if one of the rules of this file can change scores.
pub(super) fn are_given(options: &GenerationOptions) -> bool {
    let GenerationOptions {
        min_new_tokens,
        no_repeat_ngram_size,
        bad_words_ids,
        suppress_tokens,
        begin_suppress_tokens,
        forced_eos_token_id,
        ..
    } = options;
    *min_new_tokens > 0
        || *no_repeat_ngram_size > 0
        || !bad_words_ids.is_empty()
        || !suppress_tokens.is_empty()
        || !begin_suppress_tokens.is_empty()
        || !forced_eos_token_id.is_empty()
}

/// Scores `[batch, vocabulary]` with −∞ for tokens that the rules exclude, in transformers' order.
pub(super) fn applied(
    scores: &Tensor,
    before: Before<'_>,
    options: &GenerationOptions,
) -> Result<Tensor> {
    let rows = || before.rows.iter().enumerate();
    let everywhere = |tokens: &[i64]| -> Vec<(usize, i64)> {
        rows().flat_map(|(row, _)| tokens.iter().map(move |&token| (row, token))).collect()
    };
    let mut out = Vec::new();
    for (row, text) in rows() {
        out.extend(ngram_ends(text, options.no_repeat_ngram_size).map(|token| (row, token)));
        let ends = bad_ends(text, options);
        out.extend(ends.map(|token| (row, token)));
    }
    if before.written < options.min_new_tokens {
        out.extend(everywhere(&options.eos_token_id));
    }
    let mut scores = without(scores, &out)?;
    if before.left == 1 && !options.forced_eos_token_id.is_empty() {
        let ends = checked(&scores, &everywhere(&options.forced_eos_token_id))?;
        scores = scores.f_full_like(f64::NEG_INFINITY)?;
        let _ = scores.f_view(-1)?.f_index_fill_(0, &ends, 0.0)?;
    }
    out = everywhere(&options.suppress_tokens);
    if before.written == 0 {
        out.extend(everywhere(&options.begin_suppress_tokens));
    }
    without(&scores, &out)
}

/// The tokens that would complete a sequence of `size` tokens that the text has.
fn ngram_ends(text: &[i64], size: usize) -> impl Iterator<Item = i64> {
    let begin = size.checked_sub(1).and_then(|kept| text.len().checked_sub(kept));
    let tail = begin.map_or(&[][..], |begin| &text[begin..]);
    let windows = begin.map(|_| text.windows(size)).into_iter().flatten();
    windows
        .filter(move |window| window.starts_with(tail))
        .filter_map(|window| window.last().copied())
}

/// The tokens that would complete a sequence of bad words.
fn bad_ends(text: &[i64], options: &GenerationOptions) -> impl Iterator<Item = i64> {
    let words = options.bad_words_ids.iter().filter_map(|word| word.split_last());
    words.filter_map(move |(last, before)| {
        let is_end = before.is_empty() && options.eos_token_id.contains(last);
        (!is_end && text.ends_with(before)).then_some(*last)
    })
}

/// The places of tokens of rows in the flattened scores.
fn checked(scores: &Tensor, tokens: &[(usize, i64)]) -> Result<Tensor> {
    let vocabulary = scores.size().last().copied().unwrap_or(0);
    if let Some((_, wrong)) = tokens.iter().find(|(_, token)| !(0..vocabulary).contains(token)) {
        return Err(refused(format!(
            "a rule names token {wrong}, and the model has {vocabulary}: take one below that"
        )));
    }
    let places: Vec<i64> =
        tokens.iter().map(|&(row, token)| row as i64 * vocabulary + token).collect();
    Ok(Tensor::f_from_slice(&places)?.f_to_kind(Kind::Int64)?.f_to_device(scores.device())?)
}

fn without(scores: &Tensor, tokens: &[(usize, i64)]) -> Result<Tensor> {
    if tokens.is_empty() {
        return Ok(scores.shallow_clone());
    }
    let places = checked(scores, tokens)?;
    let flat = scores.f_contiguous()?.f_view(-1)?.f_index_fill(0, &places, f64::NEG_INFINITY)?;
    Ok(flat.f_view_as(scores)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_a_text_has_are_not_completed_again() {
        let ends = |text: &[i64], size| ngram_ends(text, size).collect::<Vec<_>>();
        assert_eq!(ends(&[1, 2, 3, 1, 2], 3), [3]);
        assert_eq!(ends(&[4, 5, 4], 1), [4, 5, 4]);
        assert_eq!(ends(&[4, 4, 4], 2), [4, 4]);
        assert_eq!(ends(&[1], 3), [0i64; 0]);
        assert_eq!(ends(&[1, 2], 0), [0i64; 0]);
    }

    #[test]
    fn a_bad_word_that_is_an_end_is_left_to_min_new_tokens() {
        let options = GenerationOptions {
            bad_words_ids: vec![vec![7], vec![8], vec![1, 2, 9], vec![2, 2, 3]],
            eos_token_id: vec![8],
            ..GenerationOptions::default()
        };
        assert_eq!(bad_ends(&[1, 2], &options).collect::<Vec<_>>(), [7, 9]);
    }
}
