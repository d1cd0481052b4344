//! Scaled dot-product attention and its masks.

use brigade_nn::{Branch, ContextPart, ContextRegion, Divided, ParamPath, TensorRegion};
use brigade_torch::{AttentionOptions, Result};
use tch::{Device, Kind, Tensor};

use super::Tokens;
use super::cache::Step;
use super::rotary::Rotation;

/// The keys to which each query attends.
#[derive(Debug)]
pub(super) enum AttentionMask {
    /// All keys: libtorch gets no mask.
    Full,
    /// The keys up to the query's own position, with as many keys as queries. libtorch's kernels leave out half of the
    /// products.
    Causal,
    /// The keys where this mask is `true`, `[batch or 1, 1, queries, keys]`.
    Given(Tensor),
}

impl AttentionMask {
    /// Returns the mask of a causal model, where `past` tokens are in a cache.
    ///
    /// If all padding is on the right and nothing is cached, causality alone hides the padding from every token, so no
    /// mask is built. The outputs of padding then differ from transformers', and are not used.
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
                // Padding attends to itself: the softmax of a query without keys is undefined.
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

    /// Returns the mask of a model whose tokens attend to all tokens that are not padding.
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

    /// Creates the same mask as [`Self::causal`] for a rank with a part of the tokens. Also returns the part.
    pub(super) fn causal_part(
        tokens: &Tokens<'_>,
        region: &ContextRegion,
    ) -> Result<(Self, ContextPart)> {
        let length = tokens.ids.size()[1];
        let whole = Self::causal(&Tokens { attention_mask: None, ..*tokens }, 0, length)?;
        let hides_more = match tokens.attention_mask {
            None => false,
            Some(mask) if mask.dim() == 4 => true,
            // Causality alone hides padding on the right.
            Some(mask) => {
                let mask = mask.f_ne(0)?;
                let later = mask.f_narrow(1, 1, (length - 1).max(0))?;
                let earlier = mask.f_narrow(1, 0, (length - 1).max(0))?;
                !is_all(&later.f_le_tensor(&earlier)?)?
            }
        };
        let part = region.part(length, !hides_more);
        match tokens.attention_mask.filter(|_| hides_more) {
            Some(mask) => Ok((Self::Given(rows_of(mask, &part, true)?), part)),
            None => Ok((whole, part)),
        }
    }

    /// Creates the same mask as [`Self::bidirectional`] for a rank with a part of the tokens. Also returns the part.
    pub(super) fn bidirectional_part(
        tokens: &Tokens<'_>,
        region: &ContextRegion,
    ) -> Result<(Self, ContextPart)> {
        let length = tokens.ids.size()[1];
        let part = region.part(length, false);
        let hides_any = match tokens.attention_mask {
            None => false,
            Some(mask) if mask.dim() == 4 => true,
            Some(mask) => !is_all(&mask.f_ne(0)?)?,
        };
        let is_padded = part.tokens().padded_length() != length.unsigned_abs();
        if !hides_any && !is_padded {
            return Ok((Self::Full, part));
        }
        let all;
        let mask = match tokens.attention_mask {
            Some(mask) => mask,
            None => {
                all = tokens.ids.f_ones_like()?;
                &all
            }
        };
        Ok((Self::Given(rows_of(mask, &part, false)?), part))
    }

    /// Hides keys that are `window` or more positions before a query (Mistral's sliding window). `past` tokens are in a
    /// cache. `step` is the place of a recorded step's token.
    pub(super) fn within_window(
        self,
        window: i64,
        past: i64,
        tokens: &Tokens<'_>,
        step: Option<&Step>,
    ) -> Result<Self> {
        let queries = tokens.ids.size()[1];
        let keys = past + queries;
        if let (Some(step), Self::Given(seen)) = (step, &self) {
            if keys <= window {
                return Ok(self);
            }
            return Ok(Self::Given(seen.f_logical_and(&step.near(window)?)?));
        }
        // A four-dimensional mask of the caller is used unchanged, as in transformers.
        if keys <= window || tokens.attention_mask.is_some_and(|mask| mask.dim() == 4) {
            return Ok(self);
        }
        let places = Tensor::f_ones([1, 1, queries, keys], (Kind::Bool, tokens.ids.device()))?;
        let near = places.f_triu(past - window + 1)?;
        Ok(Self::Given(match self {
            Self::Full => near,
            Self::Causal => near.f_tril(past)?,
            Self::Given(seen) => seen.f_logical_and(&near)?,
        }))
    }

    pub(super) fn shallow_clone(&self) -> Self {
        match self {
            Self::Full => Self::Full,
            Self::Causal => Self::Causal,
            Self::Given(mask) => Self::Given(mask.shallow_clone()),
        }
    }
}

/// Returns the mask `[batch or 1, 1, own tokens, padded length]` of this rank's queries, from the mask of all tokens:
/// `[batch, tokens]`, or `[batch, 1, tokens, tokens]`, which includes causality. The mask has the rows of all queries
/// if attention has all tokens.
fn rows_of(mask: &Tensor, part: &ContextPart, is_causal: bool) -> Result<Tensor> {
    let (length, padded) =
        (part.tokens().length().cast_signed(), part.tokens().padded_length().cast_signed());
    let columns = Tensor::f_arange(padded, (Kind::Int64, mask.device()))?;
    let rows =
        if part.attends_by_heads() { columns.shallow_clone() } else { part.places(mask.device())? };
    let rows_down = rows.f_unsqueeze(1)?;
    // Padding attends to itself: the softmax of a query without keys is undefined.
    let own = columns.f_unsqueeze(0)?.f_eq_tensor(&rows_down)?;
    let missing = padded - length;
    let mask = mask.f_ne(0)?.f_to_kind(Kind::Uint8)?;
    if mask.dim() == 4 {
        let whole = mask.f_constant_pad_nd([0, missing, 0, missing])?;
        let seen = whole.f_index_select(2, &rows)?.f_to_kind(Kind::Bool)?;
        let is_padding = rows_down.f_ge(length)?;
        return Ok(seen.f_logical_or(&own.f_logical_and(&is_padding)?)?);
    }
    let keys = mask.f_constant_pad_nd([0, missing])?.f_to_kind(Kind::Bool)?.f_unsqueeze(1)?;
    if !is_causal {
        return Ok(keys.f_expand([-1, rows.size()[0], -1], false)?.f_unsqueeze(1)?);
    }
    let seen = keys.f_logical_and(&columns.f_unsqueeze(0)?.f_le_tensor(&rows_down)?)?;
    Ok(seen.f_logical_or(&own)?.f_unsqueeze(1)?)
}

/// Returns the caller's mask if it has a value for each pair of query and key.
fn pairs(tokens: &Tokens<'_>) -> Option<AttentionMask> {
    let mask = tokens.attention_mask.filter(|mask| mask.dim() == 4)?;
    Some(AttentionMask::Given(mask.shallow_clone()))
}

/// Returns `true` if no value is 0. On a GPU this synchronises, as transformers does before it leaves out a mask.
fn is_all(mask: &Tensor) -> Result<bool> {
    Ok(mask.f_all()?.f_int64_value(&[])? != 0)
}

/// Arguments that all blocks of a forward share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mask: AttentionMask,
    pub(super) rotation: Option<Rotation>,
    /// Positions of this rank's tokens.
    pub(super) part: ContextPart,
    /// `true` if a block may leave the bias of its last layer to the next one: its parameters stay where they are.
    pub(super) leaves_biases: bool,
    /// Seeds of the dropout of the block's branches, if they were drawn at once.
    pub(super) seeds: Option<Tensor>,
}

impl Shared {
    pub(super) fn new(mask: AttentionMask, rotation: Option<Rotation>, part: ContextPart) -> Self {
        Self { mask, rotation, part, leaves_biases: false, seeds: None }
    }

    pub(super) fn shallow_clone(&self) -> Self {
        Self {
            mask: self.mask.shallow_clone(),
            rotation: self.rotation.as_ref().map(Rotation::shallow_clone),
            part: self.part.clone(),
            leaves_biases: self.leaves_biases,
            seeds: self.seeds.as_ref().map(Tensor::shallow_clone),
        }
    }

    /// Returns a branch of a block with its seed of dropout. `index` is the branch's number in the block.
    pub(super) fn seeded(&self, branch: Branch, index: i64) -> Result<Branch> {
        let seed = self.seeds.as_ref().filter(|_| branch.dropout > 0.0);
        let seed = seed.map(|seeds| seeds.f_narrow(0, index, 1)).transpose()?;
        Ok(Branch { seed, ..branch })
    }

    /// Moves the tensors to the device of the blocks that use them.
    pub(super) fn move_to(&mut self, device: Device) -> Result<()> {
        if let AttentionMask::Given(mask) = &mut self.mask
            && mask.device() != device
        {
            *mask = mask.f_to_device(device)?;
        }
        self.rotation.as_mut().map_or(Ok(()), |rotation| rotation.move_to(device))
    }
}

/// Computes attention of queries `[batch, heads, queries, width]` to keys and values `[batch, heads or a divisor, keys,
/// width]`. Returns `[batch, queries, heads · width]`. `scale` multiplies the scores and defaults to 1/√width. In a
/// tensor group, each rank has its own heads, and drops other scores; if ranks have parts of the sequence, the keys are
/// those of all ranks.
pub(super) fn attend(
    [queries, keys, values]: [&Tensor; 3],
    shared: &Shared,
    dropout: f64,
    scale: Option<f64>,
    region: &TensorRegion,
) -> Result<Tensor> {
    let given = match &shared.mask {
        AttentionMask::Given(mask) => Some(mask),
        AttentionMask::Full | AttentionMask::Causal => None,
    };
    let causal = matches!(shared.mask, AttentionMask::Causal);
    let options = AttentionOptions { dropout, causal, scale };
    let compute = || shared.part.attention(queries, keys, values, given, &options);
    let attended = if dropout > 0.0 {
        region.with_own_random_numbers(queries.device(), compute)?
    } else {
        compute()?
    };
    // All heads of a token are adjacent in memory already.
    Ok(attended.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Division of attention's heads over the ranks of a tensor group.
#[derive(Debug)]
pub(super) struct OwnHeads {
    /// Number of this rank's query heads. All heads if nothing is divided.
    pub(super) count: i64,
    /// Communication at the edges of the divided projections.
    pub(super) region: TensorRegion,
}

impl OwnHeads {
    /// Checks the division of the projections. `queries` is the division of the projection to queries; `others` have to
    /// be divided in the same way. Errors are recorded at the path.
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

/// Records an error if the number of heads is not divisible by the number of ranks, with the nearest numbers that are.
pub(super) fn check_heads(path: &ParamPath<'_>, heads: i64, what: &str, ranks: i64) {
    if heads % ranks != 0 {
        let (less, more) = (heads / ranks * ranks, (heads / ranks + 1) * ranks);
        let nearest = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
        path.reject(format_args!(
            "{ranks} tensor ranks do not divide {heads} {what}: take {nearest}, or other ranks"
        ));
    }
}

/// Reshapes `[batch, tokens, heads · width]` to `[batch, heads, tokens, width]`, without a copy.
pub(super) fn split_heads(tensor: &Tensor, heads: i64) -> Result<Tensor> {
    let (batch, tokens, width) = tensor.size3()?;
    Ok(tensor.f_view([batch, tokens, heads, width / heads.max(1)])?.f_transpose(1, 2)?)
}
