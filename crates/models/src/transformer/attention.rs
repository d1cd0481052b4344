//! Scaled dot products, and which keys a query sees.

use brigade_nn::{Divided, ParamPath, TensorRegion};
use brigade_torch::{AttentionOptions, Result, attention};
use tch::{Kind, Tensor};

use super::Tokens;

/// Which keys each query sees.
#[derive(Debug)]
pub(super) enum AttentionMask {
    /// All of them: libtorch gets no mask.
    Full,
    /// Those at its own place and before; as many keys as queries. libtorch's kernels leave out half of the
    /// products.
    Causal,
    /// Those where this is true, `[batch or 1, 1, queries, keys]`.
    Given(Tensor),
}

impl AttentionMask {
    /// For a model whose tokens see those before them, `past` of which are in a cache.
    ///
    /// Where all padding is on the right and nothing is cached, causality alone hides it from every token, so
    /// no mask is built; what padding itself computes differs from transformers' then, and is not used.
    pub(super) fn causal(tokens: &Tokens<'_>, past: i64, queries: i64) -> Result<Self> {
        if let Some(pairs) = pairs(tokens) {
            return Ok(pairs);
        }
        let mask = tokens.attention_mask.map(|mask| mask.f_ne(0)).transpose()?;
        if let Some(mask) = mask {
            let keys = past + queries;
            if past == 0 {
                let (later, earlier) =
                    (mask.f_narrow(1, 1, keys - 1)?, mask.f_narrow(1, 0, keys - 1)?);
                if is_all(&later.f_le_tensor(&earlier)?)? {
                    return Ok(Self::Causal);
                }
            }
            if past == 0 || !is_all(&mask)? {
                let places = Tensor::f_ones([queries, keys], (Kind::Bool, mask.device()))?;
                let seen = mask.f_unsqueeze(1)?.f_logical_and(&places.f_tril(past)?)?;
                // Padding sees itself: a query without a key has no softmax.
                let own = places.f_tril(past)?.f_triu(past)?;
                return Ok(Self::Given(seen.f_logical_or(&own)?.f_unsqueeze(1)?));
            }
        }
        if past == 0 {
            return Ok(Self::Causal);
        }
        if queries == 1 {
            return Ok(Self::Full);
        }
        let form = (Kind::Bool, tokens.ids.device());
        let places = Tensor::f_ones([1, 1, queries, past + queries], form)?;
        Ok(Self::Given(places.f_tril(past)?))
    }

    /// For a model whose tokens see all that is not padding.
    pub(super) fn bidirectional(tokens: &Tokens<'_>) -> Result<Self> {
        if let Some(pairs) = pairs(tokens) {
            return Ok(pairs);
        }
        let Some(mask) = tokens.attention_mask else { return Ok(Self::Full) };
        let mask = mask.f_ne(0)?;
        if is_all(&mask)? {
            return Ok(Self::Full);
        }
        let keys = mask.size()[1];
        let seen = mask.f_unsqueeze(1)?.f_unsqueeze(1)?;
        Ok(Self::Given(seen.f_expand([-1, 1, keys, keys], false)?))
    }

    pub(super) fn shallow_clone(&self) -> Self {
        match self {
            Self::Full => Self::Full,
            Self::Causal => Self::Causal,
            Self::Given(mask) => Self::Given(mask.shallow_clone()),
        }
    }
}

/// A mask that has been made for each query.
fn pairs(tokens: &Tokens<'_>) -> Option<AttentionMask> {
    let mask = tokens.attention_mask.filter(|mask| mask.dim() == 4)?;
    Some(AttentionMask::Given(mask.shallow_clone()))
}

/// On a GPU this waits for it, as transformers does before it leaves out a mask.
fn is_all(mask: &Tensor) -> Result<bool> {
    Ok(mask.f_all()?.f_int64_value(&[])? != 0)
}

/// Attention of queries `[batch, heads, queries, width]` to keys and values `[batch, heads or a divisor, keys,
/// width]`, as `[batch, queries, heads · width]`. `scale` multiplies the scores, by 1/√width where there is none. The ranks of
/// the region have other heads, and drop other scores.
pub(super) fn attend(
    [queries, keys, values]: [&Tensor; 3],
    mask: &AttentionMask,
    dropout: f64,
    scale: Option<f64>,
    region: &TensorRegion,
) -> Result<Tensor> {
    let given = match mask {
        AttentionMask::Given(mask) => Some(mask),
        AttentionMask::Full | AttentionMask::Causal => None,
    };
    let causal = matches!(mask, AttentionMask::Causal);
    let options = AttentionOptions { dropout, causal, scale };
    let compute = || attention(queries, keys, values, given, &options);
    let attended = if dropout > 0.0 {
        region.with_own_random_numbers(queries.device(), compute)?
    } else {
        compute()?
    };
    // All heads of a token lie beside each other already.
    Ok(attended.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// How attention's heads are divided over the ranks of a tensor group.
#[derive(Debug)]
pub(super) struct OwnHeads {
    /// This rank's heads of queries; all of them where nothing is divided.
    pub(super) count: i64,
    /// The edges of the divided projections.
    pub(super) region: TensorRegion,
}

impl OwnHeads {
    /// `queries` is how the projection to queries is divided, `others` those that have to be divided alike. What does not fit
    /// is noted at the path.
    pub(super) fn new(
        path: &ParamPath<'_>,
        heads: i64,
        queries: Option<&Divided>,
        others: &[Option<&Divided>],
    ) -> Self {
        if others.iter().any(|other| other.is_some() != queries.is_some()) {
            path.reject(
                "the tensor plan divides some of the projections to queries, keys and values: divide all of them, or none",
            );
        }
        let Some(divided) = queries else {
            return Self { count: heads, region: TensorRegion::default() };
        };
        let ranks = divided.part.ranks() as i64;
        check_heads(path, heads, "heads", ranks);
        Self { count: heads / ranks, region: divided.region.clone() }
    }
}

/// Notes heads that the ranks do not divide, with the nearest numbers that they do.
pub(super) fn check_heads(path: &ParamPath<'_>, heads: i64, what: &str, ranks: i64) {
    if heads % ranks != 0 {
        let (less, more) = (heads / ranks * ranks, (heads / ranks + 1) * ranks);
        let nearest = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
        path.reject(format_args!(
            "{ranks} tensor ranks do not divide {heads} {what}: take {nearest}, or other ranks"
        ));
    }
}

/// `[batch, tokens, heads · width]` as `[batch, heads, tokens, width]`, without a copy.
pub(super) fn split_heads(tensor: &Tensor, heads: i64) -> Result<Tensor> {
    let (batch, tokens, width) = tensor.size3()?;
    Ok(tensor.f_view([batch, tokens, heads, width / heads.max(1)])?.f_transpose(1, 2)?)
}
