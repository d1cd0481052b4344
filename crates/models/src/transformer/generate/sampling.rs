//! Choice of a token from logits, in transformers' steps.

use brigade_torch::{ReduceOp, Result};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::Rng;
use tch::{Device, Kind, Tensor};

use super::GenerationOptions;
use super::rules::{self, Before};
use crate::VocabularyLogits;

/// Returns a token for each row of the logits `[batch, vocabulary]`. If ranks divide the vocabulary, they send a few
/// numbers for each row. Only with `top_p` without `top_k`, and with rules on tokens, they gather all logits.
pub(super) fn choose(
    logits: &VocabularyLogits,
    before: Before<'_>,
    options: &GenerationOptions,
    rng: &mut Pcg64,
) -> Result<Vec<i64>> {
    let has_rules = rules::are_given(options);
    let is_greedy = !options.do_sample && options.repetition_penalty == 1.0;
    let chosen = if logits.is_divided() && !has_rules {
        among_parts(logits, before, options, rng)?
    } else if is_greedy && !has_rules {
        logits.argmax()?
    } else {
        among_all(&logits.whole()?, before, options, rng)?
    };
    Ok(Vec::try_from(chosen.f_to_device(Device::Cpu)?)?)
}

/// Chooses tokens from logits of which each rank has a part, without the rules on tokens.
fn among_parts(
    logits: &VocabularyLogits,
    before: Before<'_>,
    options: &GenerationOptions,
    rng: &mut Pcg64,
) -> Result<Tensor> {
    let scores = logits.map_own(|own, start| {
        penalized(&as_float(own)?, before, options.repetition_penalty, start)
    })?;
    if !options.do_sample {
        return scores.argmax();
    }
    match options.top_k {
        Some(k) if k < scores.vocabulary() => {
            if let Some((best, ids)) = best(&scores, k)? {
                let place = drawn(&filtered(&best, options, 1)?, rng)?;
                let places = place.f_unsqueeze(1)?.f_to_device(ids.device())?;
                return Ok(ids.f_gather(1, &places, false)?.f_squeeze_dim(1)?);
            }
        }
        _ if options.top_p >= 1.0 => return drawn_of_parts(&scores, options, rng),
        _ => {}
    }
    drawn(&filtered(&scores.whole()?, options, 1)?, rng)
}

/// Draws from scores of which each rank has a part, like [`drawn`] from all of them. The ranks exchange the largest
/// score, the sum of the exponentials and the number of earlier tokens of each row and part.
fn drawn_of_parts(
    scores: &VocabularyLogits,
    options: &GenerationOptions,
    rng: &mut Pcg64,
) -> Result<Tensor> {
    let (own, group) = scores.own();
    let own = own.f_div_scalar(options.temperature)?.f_to_kind(Kind::Double)?;
    let gathered = |tensor: &Tensor| match group {
        Some(group) => Ok(Tensor::f_cat(&group.all_gather(&tensor.f_contiguous()?)?, 1)?),
        None => Ok::<_, brigade_torch::Error>(tensor.shallow_clone()),
    };
    let tokens = own.size().last().copied().unwrap_or(0);
    // A part may have no tokens.
    let largest = own.f_pad([0, 1], "constant", f64::NEG_INFINITY)?.f_amax([1], true)?;
    let largest = gathered(&largest)?.f_amax([1], true)?;
    let mut shares = own.f_sub(&largest)?.f_exp()?;
    if let Some(least) = options.min_p {
        // The share of the most probable token is 1 here.
        shares = shares.f_masked_fill(&shares.f_lt(least)?, 0.0)?;
    }
    let sums = shares.f_cumsum(1, Kind::Double)?;
    let sum = sums.f_constant_pad_nd([1, 0])?.f_narrow(1, tokens, 1)?;
    // The sums of all parts, after a column of zeros, in the order of the vocabulary.
    let ends = gathered(&sum)?.f_cumsum(1, Kind::Double)?.f_constant_pad_nd([1, 0])?;
    let (rank, ranks) = group.map_or((0, 1), |group| (group.rank() as i64, group.size() as i64));
    let rows = own.size().first().copied().unwrap_or(0);
    let places = units(rows, rng)?.f_to_device(own.device())?;
    let places = places.f_mul(&ends.f_narrow(1, ranks, 1)?)?;
    let is_before = sums.f_add(&ends.f_narrow(1, rank, 1)?)?.f_le_tensor(&places)?;
    let mut found = is_before.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Int64)?;
    if let Some(group) = group {
        group.all_reduce(&mut found, ReduceOp::Sum)?;
    }
    Ok(found.f_clamp_max(scores.vocabulary() - 1)?)
}

fn among_all(
    logits: &Tensor,
    before: Before<'_>,
    options: &GenerationOptions,
    rng: &mut Pcg64,
) -> Result<Tensor> {
    let scores = processed(&as_float(logits)?, before, options)?;
    if options.do_sample {
        return drawn(&filtered(&scores, options, 1)?, rng);
    }
    Ok(scores.f_argmax(-1, false)?)
}

/// Returns the scores after the repetition penalty and the rules on tokens.
pub(super) fn processed(
    scores: &Tensor,
    before: Before<'_>,
    options: &GenerationOptions,
) -> Result<Tensor> {
    let scores = penalized(scores, before, options.repetition_penalty, 0)?;
    if rules::are_given(options) { rules::applied(&scores, before, options) } else { Ok(scores) }
}

/// Returns the `k` largest logits of each row and their tokens, in the order of the tokens, as if drawn from all.
/// Returns `None` if further logits are equal to the smallest of them, which `top_k` keeps as well.
fn best(logits: &VocabularyLogits, k: i64) -> Result<Option<(Tensor, Tensor)>> {
    let (values, ids) = logits.top_k(k + 1)?;
    let at = |place: i64| values.f_narrow(1, place, 1);
    if at(k - 1)?.f_eq_tensor(&at(k)?)?.f_any()?.f_int64_value(&[])? != 0 {
        return Ok(None);
    }
    let (ids, order) = ids.f_narrow(1, 0, k)?.f_sort(1, false)?;
    Ok(Some((values.f_gather(1, &order, false)?, ids)))
}

pub(super) fn as_float(logits: &Tensor) -> Result<Tensor> {
    let kind = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(logits.f_to_kind(kind)?)
}

/// Applies the repetition penalty to tokens of the text, but not to those that only pad it. The first column of the
/// scores is that of the token `start`.
fn penalized(scores: &Tensor, before: Before<'_>, penalty: f64, start: i64) -> Result<Tensor> {
    if penalty == 1.0 {
        return Ok(scores.shallow_clone());
    }
    let tokens = scores.size().last().copied().unwrap_or(0);
    // Padding, and tokens of other ranks, are written into an additional column, which is removed.
    let ids = before.ids.f_sub_scalar(start)?;
    let mut outside = ids.f_lt(0)?.f_logical_or(&ids.f_ge(tokens)?)?;
    if let Some(mask) = before.mask {
        outside = outside.f_logical_or(&mask.f_eq(0)?)?;
    }
    let ids = ids.f_masked_fill(&outside, tokens)?;
    let scores = scores.f_constant_pad_nd([0, 1])?;
    let found = scores.f_gather(1, &ids, false)?;
    let (divided, multiplied) = (found.f_div_scalar(penalty)?, found.f_mul_scalar(penalty)?);
    let found = multiplied.f_where_self(&found.f_lt(0.0)?, &divided)?;
    Ok(scores.f_scatter(1, &ids, &found)?.f_narrow(1, 0, tokens)?)
}

/// Returns scores with −∞ for excluded tokens. The `kept` most probable ones are never excluded.
pub(super) fn filtered(scores: &Tensor, options: &GenerationOptions, kept: i64) -> Result<Tensor> {
    let mut scores = match options.temperature {
        1.0 => scores.shallow_clone(),
        temperature => scores.f_div_scalar(temperature)?,
    };
    let tokens = scores.size().last().copied().unwrap_or(0);
    let without = |scores: &Tensor, out: &Tensor| scores.f_masked_fill(out, f64::NEG_INFINITY);
    if let Some(k) = options.top_k {
        let k = k.max(kept).min(tokens);
        let (best, _) = scores.f_topk(k, -1, true, true)?;
        let worst = best.f_narrow(-1, k - 1, 1)?;
        scores = without(&scores, &scores.f_lt_tensor(&worst)?)?;
    }
    if options.top_p < 1.0 {
        let (sorted, order) = scores.f_sort(-1, false)?;
        let below = sorted.f_softmax(-1, sorted.kind())?.f_cumsum(-1, sorted.kind())?;
        let out = below.f_le(1.0 - options.top_p)?;
        let kept = kept.min(tokens);
        let _ = out.f_narrow(-1, tokens - kept, kept)?.f_fill_(0)?;
        scores = without(&scores, &out.f_scatter(1, &order, &out)?)?;
    }
    if let Some(least) = options.min_p {
        let shares = scores.f_softmax(-1, scores.kind())?;
        let highest = shares.f_amax([-1], true)?;
        let out = shares.f_lt_tensor(&highest.f_mul_scalar(least)?)?;
        let (_, best) = shares.f_topk(kept.min(tokens), -1, true, true)?;
        let stay = best.f_zeros_like()?.f_to_kind(Kind::Bool)?;
        scores = without(&scores, &out.f_scatter(-1, &best, &stay)?)?;
    }
    Ok(scores)
}

/// Returns the keys by whose order `k` tokens are drawn without replacement from each row: log probabilities with
/// Gumbel noise (Kool et al., 2019).
pub(super) fn noisy(scores: &Tensor, rng: &mut Pcg64) -> Result<Tensor> {
    let noise: Vec<f64> = (0..scores.numel())
        // In (0, 1), so that both logarithms are finite.
        .map(|_| ((rng.next_u64() >> 11) as f64 + 0.5) * 2f64.powi(-53))
        .map(|unit| -(-unit.ln()).ln())
        .collect();
    let noise = Tensor::f_from_slice(&noise)?.f_view_as(scores)?.f_to_device(scores.device())?;
    Ok(scores.f_to_kind(Kind::Double)?.f_add(&noise)?)
}

/// Draws by the inverse of the distribution function, so that the result does not depend on the device or libtorch's
/// generators.
fn drawn(scores: &Tensor, rng: &mut Pcg64) -> Result<Tensor> {
    let shares = scores.f_to_kind(Kind::Double)?.f_softmax(-1, Kind::Double)?;
    let sums = shares.f_to_device(Device::Cpu)?.f_cumsum(-1, Kind::Double)?;
    let tokens = sums.size().last().copied().unwrap_or(0);
    let rows = sums.size().first().copied().unwrap_or(0);
    let whole = sums.f_narrow(-1, tokens - 1, 1)?;
    let places = units(rows, rng)?.f_mul(&whole)?;
    // The first token whose cumulative sum exceeds the number: never one of probability 0.
    let found =
        sums.f_le_tensor(&places)?.f_sum_dim_intlist([-1].as_slice(), false, Kind::Int64)?;
    Ok(found.f_clamp_max(tokens - 1)?)
}

/// Returns random numbers `[rows, 1]` of 53 bits in [0, 1).
fn units(rows: i64, rng: &mut Pcg64) -> Result<Tensor> {
    let units: Vec<f64> =
        (0..rows).map(|_| (rng.next_u64() >> 11) as f64 * 2f64.powi(-53)).collect();
    Ok(Tensor::f_from_slice(&units)?.f_unsqueeze(1)?)
}

#[cfg(test)]
mod tests {
    use rand_pcg::rand_core::SeedableRng;

    use super::*;

    fn scores() -> Tensor {
        Tensor::from_slice(&[2.0f32, 1.0, 0.0, -1.0, 3.0]).view([1, 5])
    }

    fn kept(options: &GenerationOptions) -> Vec<bool> {
        let found = filtered(&scores(), options, 1).unwrap().view([-1]).isfinite();
        Vec::<bool>::try_from(found).unwrap()
    }

    #[test]
    fn filters_keep_what_transformers_keeps() {
        let none = GenerationOptions::default();
        assert_eq!(kept(&none), [true; 5]);
        let top_k = GenerationOptions { top_k: Some(2), ..none.clone() };
        assert_eq!(kept(&top_k), [true, false, false, false, true]);
        // Probabilities: 0.234, 0.086, 0.032, 0.012, 0.636.
        let top_p = GenerationOptions { top_p: 0.9, ..none.clone() };
        assert_eq!(kept(&top_p), [true, true, false, false, true]);
        let one = GenerationOptions { top_p: 0.0, ..none.clone() };
        assert_eq!(kept(&one), [false, false, false, false, true]);
        let min_p = GenerationOptions { min_p: Some(0.1), ..none };
        assert_eq!(kept(&min_p), [true, true, false, false, true]);
    }

    #[test]
    fn repeated_tokens_lose_whatever_their_sign() {
        let ids = Tensor::from_slice(&[4i64, 0, 3, 3]).view([1, 4]);
        let mask = Tensor::from_slice(&[0i64, 1, 1, 1]).view([1, 4]);
        let found = |mask| {
            let before = Before { ids: &ids, mask, rows: &[], written: 0, left: 1 };
            let found = penalized(&scores(), before, 2.0, 0).unwrap();
            Vec::<f32>::try_from(found.contiguous().view([-1])).unwrap()
        };
        assert_eq!(found(Some(&mask)), [1.0, 1.0, 0.0, -2.0, 3.0]);
        assert_eq!(found(None), [1.0, 1.0, 0.0, -2.0, 1.5]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let mut rng = Pcg64::seed_from_u64(1);
        let options =
            GenerationOptions { do_sample: true, top_k: Some(2), ..GenerationOptions::default() };
        let many = scores().repeat([4000, 1]);
        let ids = Tensor::zeros([4000, 1], (Kind::Int64, Device::Cpu));
        let before = Before { ids: &ids, mask: None, rows: &[], written: 0, left: 1 };
        let chosen = choose(&many.into(), before, &options, &mut rng).unwrap();
        let count = |token: i64| chosen.iter().filter(|&&it| it == token).count() as f64;
        assert_eq!(count(0) + count(4), 4000.0);
        // e² / (e² + e³) = 0.269; 5 standard deviations are 0.035.
        assert!((count(0) / 4000.0 - 0.269).abs() < 0.035, "{}", count(0));
    }
}
