//! A language model's embedding, head and loss, where each rank of a group has a part of the vocabulary.
//!
//! This module also contains functions for metrics and sampling. Logits are never gathered. The loss is that of
//! `cpp/cross_entropy.cpp` with `Classes`: sums over a row (`RowSums`) are gathered, with one message for a chunk of
//! rows, and combined in the order of the ranks, so that all ranks have the same bits. Without a group the same
//! functions use the sums of one rank. The gradient of hidden states is summed by the edge before the head, because for
//! a divided sequence that is a reduce-scatter.

use std::ops::Range;
use std::time::Instant;

use tch::{Kind, Tensor};

use crate::bridge::{borrow, borrow_optional, ffi};
use crate::cross_entropy::{CrossEntropyLoss, CrossEntropyOptions};
use crate::error::{Error, Fault, Thrown};
use crate::group::ProcessGroup;
use crate::regions::reduce_from_region;

/// A rank's part of the vocabulary: its rows of an embedding's or a head's weight, one for each token.
///
/// The parts follow each other in the order of the ranks and cover the vocabulary once. The last parts may extend
/// beyond it: such rows are padding, which has no probability and gets no gradient.
///
/// ```
/// use brigade_torch::VocabularyPart;
/// // 50257 tokens on 4 ranks: 12565, 12564, 12564 and 12564.
/// let second = VocabularyPart::even(50257, 1, 4)?;
/// assert_eq!(second, VocabularyPart { start: 12565, size: 12564, vocabulary: 50257 });
/// // Parts of one size, a multiple of 128: the last has 175 rows of padding.
/// let last = VocabularyPart::padded(50257, 128, 3, 4)?;
/// assert_eq!(last, VocabularyPart { start: 38016, size: 12672, vocabulary: 50257 });
/// assert_eq!(last.tokens(), 38016..50257);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VocabularyPart {
    /// Id of the first token of the part.
    pub start: i64,
    /// Number of rows of the part, with padding.
    pub size: i64,
    /// Vocabulary size over all ranks, without padding.
    pub vocabulary: i64,
}

impl VocabularyPart {
    /// Returns the part of `rank` for a division without padding, where the sizes of the parts differ by at most one.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for more ranks than tokens, and for a rank that does not exist.
    pub fn even(vocabulary: i64, rank: usize, ranks: usize) -> Result<Self, Error> {
        let (rank, ranks) = checked(vocabulary, rank, ranks)?;
        let (size, more) = (vocabulary / ranks, vocabulary % ranks);
        let start = size * rank + more.min(rank);
        Ok(Self { start, size: size + i64::from(rank < more), vocabulary })
    }

    /// Returns the part of `rank` for a division with padding, where all ranks have the same number of rows, a multiple
    /// of `multiple`.
    ///
    /// # Errors
    /// Returns the same errors as [`VocabularyPart::even`], and [`crate::ErrorKind::InvalidArgument`] for a multiple
    /// below 1 or too large.
    pub fn padded(
        vocabulary: i64,
        multiple: i64,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, Error> {
        let (rank, ranks) = checked(vocabulary, rank, ranks)?;
        let rows = (vocabulary - 1) / ranks + 1;
        let size = (multiple > 0).then(|| ((rows - 1) / multiple + 1).checked_mul(multiple));
        match size.flatten() {
            Some(size) if size.checked_mul(ranks).is_some() => {
                Ok(Self { start: size * rank, size, vocabulary })
            }
            _ => Err(Error::invalid_argument(format!(
                "a vocabulary of {vocabulary} tokens cannot be padded to multiples of {multiple} on {ranks} ranks"
            ))),
        }
    }

    /// Returns the ids of the tokens, without padding. Empty if all rows are padding.
    #[must_use]
    pub fn tokens(&self) -> Range<i64> {
        let end = self.start.saturating_add(self.size).min(self.vocabulary);
        self.start.min(self.vocabulary)..end
    }

    fn check(&self, operation: &str) -> Result<(), Error> {
        let Self { start, size, vocabulary } = *self;
        if size > 0 && start >= 0 && vocabulary > 0 && start.checked_add(size).is_some() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{operation}: this rank's part of the vocabulary has {size} rows from {start} on, of {vocabulary} tokens; \
             give each rank at least one row"
        )))
    }

    fn check_size(&self, operation: &str, found: Option<i64>) -> Result<(), Error> {
        self.check(operation)?;
        if found == Some(self.size) {
            return Ok(());
        }
        let found = found.map_or_else(|| "no".to_owned(), |found| found.to_string());
        Err(Error::invalid_argument(format!(
            "{operation}: the tensor has {found} rows of the vocabulary, and the part of this rank {}",
            self.size
        )))
    }

    fn for_libtorch(self, operation: &str) -> Result<ffi::VocabularyPart, Error> {
        self.check(operation)?;
        let Self { start, size, vocabulary } = self;
        Ok(ffi::VocabularyPart { start, size, vocabulary })
    }
}

fn checked(vocabulary: i64, rank: usize, ranks: usize) -> Result<(i64, i64), Error> {
    match (i64::try_from(rank), i64::try_from(ranks)) {
        (Ok(rank), Ok(ranks)) if rank < ranks && ranks <= vocabulary => Ok((rank, ranks)),
        _ => Err(Error::invalid_argument(format!(
            "a vocabulary of {vocabulary} tokens has no part for rank {rank} of {ranks}; take at least one token \
             for each rank"
        ))),
    }
}

/// Computes [`crate::cross_entropy`] of logits of which each rank has the columns of its part of the vocabulary.
///
/// `logits` is `[…, size of the part]`, `targets` `[…]` of int64 with ids of the whole vocabulary. Targets and options
/// must be equal on all ranks. Loss and count are equal on all ranks, bit for bit, and each rank gets the gradient of
/// its own logits.
///
/// Logits are not gathered. The ranks gather 24 bytes for each row that is not ignored (on a GPU for each row), in one
/// message: the largest logit, the sum of exponentials and the target's logit; label smoothing needs 8 bytes more. The
/// backward sends nothing. With one rank the result is that of [`crate::cross_entropy`], bit for bit.
///
/// # Errors
/// Returns the errors of [`crate::cross_entropy`], on every rank: a target outside of the vocabulary is detected before
/// a message is sent. [`crate::ErrorKind::InvalidArgument`] if the part has no rows.
/// [`crate::ErrorKind::Communication`] if a peer was lost, or did not arrive within the time limit because its
/// arguments were invalid.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{CrossEntropyOptions, VocabularyPart, vocabulary_parallel_cross_entropy};
/// use tch::{Device, Kind, Tensor};
/// let part = VocabularyPart::even(1000, group.rank(), group.size())?;
/// let logits = Tensor::zeros([2, 3, part.size], (Kind::Float, Device::Cpu));
/// let targets = Tensor::from_slice(&[0_i64, 1, 999, -100, 2, -100]).view([2, 3]);
/// let options = CrossEntropyOptions { z_loss: 1e-4, ..Default::default() };
/// let found = vocabulary_parallel_cross_entropy(group, &logits, &targets, part, &options)?;
/// let log_sum = 1000_f64.ln();
/// assert!((found.loss.double_value(&[]) - log_sum - 1e-4 * log_sum.powi(2)).abs() < 1e-5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn vocabulary_parallel_cross_entropy(
    group: &ProcessGroup,
    logits: &Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyLoss, Error> {
    let operation = "vocabulary_parallel_cross_entropy";
    let options = options.for_libtorch(operation)?;
    let part = part.for_libtorch(operation)?;
    together(group, operation, |handle| {
        let (logits, targets) = (borrow(logits), borrow(targets));
        ffi::vocabulary_parallel_cross_entropy(handle, logits, targets, &part, &options)
    })
}

/// Computes [`vocabulary_parallel_cross_entropy`] of the logits `hidden · weightᵀ + bias` without holding all of them
/// in memory, as [`crate::linear_cross_entropy`] does: for the head of a language model whose weight is divided by
/// rows.
///
/// `weight` is `[size of the part, width]`, `bias` `[size of the part]`; `hidden` `[…, width]` and `targets` `[…]` are
/// equal on all ranks. The gradient of `hidden` is this rank's part of a sum over the ranks, so `hidden` must be the
/// result of an edge that computes the sum: [`copy_to_region`](crate::regions::copy_to_region), with one message of the
/// size of `hidden`, in the gradient's own memory; or
/// [`gather_from_sequence_region`](crate::regions::gather_from_sequence_region), if ranks have parts of the sequence
/// outside of the head. Without an edge the gradient would lack the parts of the other ranks.
///
/// The forward sends the message of [`vocabulary_parallel_cross_entropy`] once for each chunk of rows with at most 128
/// MiB of logits (at least 128 rows). A single message for all chunks would need the logits of all of them in memory,
/// or a third more products.
///
/// # Errors
/// Returns the same errors as [`crate::linear_cross_entropy`] and [`vocabulary_parallel_cross_entropy`].
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::regions::copy_to_region;
/// use brigade_torch::{
///     CrossEntropyOptions, VocabularyPart, linear_vocabulary_parallel_cross_entropy,
/// };
/// use tch::{Device, Kind, Tensor};
/// let part = VocabularyPart::padded(1000, 64, group.rank(), group.size())?;
/// let hidden = Tensor::randn([2, 5, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let weight = Tensor::randn([part.size, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let targets = Tensor::randint(1000, [2, 5], (Kind::Int64, Device::Cpu));
/// let found = linear_vocabulary_parallel_cross_entropy(
///     group,
///     &copy_to_region(group, &hidden)?,
///     &weight,
///     None,
///     &targets,
///     part,
///     &CrossEntropyOptions::default(),
/// )?;
/// found.loss.backward();
/// assert_eq!(weight.grad().size(), [part.size, 16]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn linear_vocabulary_parallel_cross_entropy(
    group: &ProcessGroup,
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    part: VocabularyPart,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyLoss, Error> {
    let operation = "linear_vocabulary_parallel_cross_entropy";
    let options = options.for_libtorch(operation)?;
    let part = part.for_libtorch(operation)?;
    let bias = borrow_optional(bias);
    together(group, operation, |handle| {
        let (hidden, weight, targets) = (borrow(hidden), borrow(weight), borrow(targets));
        ffi::linear_vocabulary_parallel_cross_entropy(
            handle, hidden, weight, &bias, targets, &part, &options,
        )
    })
}

/// Returns the rows of ids `[…]` in an embedding `[vocabulary, width]` that is divided by rows: `[…, width]`, equal on
/// all ranks.
///
/// `ids` are integers of the whole vocabulary, equal on all ranks. A rank looks up the ids of its part, and uses rows
/// of negative zeros for the others; the ranks' results are summed in one message. The result has the bits of a lookup
/// in the whole embedding. The backward sends nothing: the gradient of the result, which is equal on all ranks, is
/// added to this rank's rows. The row of `padding`, an id of the whole vocabulary, gets no gradient.
///
/// # Errors
/// [`crate::ErrorKind::Tensor`] on every rank for an id outside of the vocabulary, before a message is sent. On a GPU
/// the kernel detects it, and a later call returns the error. [`crate::ErrorKind::InvalidArgument`] if the part has no
/// rows, or if their number differs from that of the weight; [`crate::ErrorKind::Communication`] if a peer was lost.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{VocabularyPart, vocabulary_parallel_embedding};
/// use tch::{Device, Kind, Tensor};
/// let part = VocabularyPart::even(1000, group.rank(), group.size())?;
/// let weight = Tensor::randn([part.size, 16], (Kind::Float, Device::Cpu));
/// let ids = Tensor::from_slice(&[3_i64, 999]);
/// let rows = vocabulary_parallel_embedding(group, &ids, &weight, part, None)?;
/// assert_eq!(rows.size(), [2, 16]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn vocabulary_parallel_embedding(
    group: &ProcessGroup,
    ids: &Tensor,
    weight: &Tensor,
    part: VocabularyPart,
    padding: Option<i64>,
) -> Result<Tensor, Error> {
    part.check_size("vocabulary_parallel_embedding", weight.size().first().copied())?;
    let tokens = part.tokens();
    let among = |range: &Range<i64>| ids.f_ge(range.start)?.f_logical_and(&ids.f_lt(range.end)?);
    let is_own = among(&tokens)?;
    // The first row stands in for those of other ranks. Ids outside of the vocabulary become -1, which libtorch refuses
    // on every rank.
    let elsewhere = among(&(0..part.vocabulary))?.f_to_kind(Kind::Int64)?.f_sub_scalar(1)?;
    let places = ids.f_sub_scalar(part.start)?.f_to_kind(Kind::Int64)?;
    let places = places.f_where_self(&is_own, &elsewhere)?;
    let padding = padding.filter(|id| tokens.contains(id)).map_or(NO_PADDING, |id| id - part.start);
    let mut rows = Tensor::f_embedding(weight, &places, padding, false, false)?;
    if group.size() > 1 {
        // Adding -0, unlike adding 0, keeps the sign of a zero.
        let is_elsewhere = is_own.f_logical_not()?.f_unsqueeze(-1)?;
        rows = rows.f_masked_fill_(&is_elsewhere, -0.0)?;
    }
    reduce_from_region(group, &rows)
}

/// Returns the id of the largest logit of each row, `[…]` of int64, where each rank has the logits `[…, size of the
/// part]` of its part of the vocabulary. The result is equal on all ranks, and equals `argmax` of the whole logits:
/// among equal logits the lowest id, and NaN counts as the largest.
///
/// The ranks gather 16 bytes for each row.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] if the part has no rows, or if the size of the logits differs from that of the
/// part; [`crate::ErrorKind::Communication`] if a peer was lost.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{VocabularyPart, region_argmax};
/// use tch::Tensor;
/// let part = VocabularyPart::padded(3, 4, group.rank(), group.size())?;
/// let logits = Tensor::from_slice(&[0.5_f32, 2.0, 2.0, 9.0]).view([1, 4]);
/// assert_eq!(region_argmax(group, &logits, part)?, Tensor::from_slice(&[1_i64]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn region_argmax(
    group: &ProcessGroup,
    logits: &Tensor,
    part: VocabularyPart,
) -> Result<Tensor, Error> {
    let own = own_logits("region_argmax", logits, part)?;
    let places = match own.size().last() {
        Some(0) => None,
        _ => Some(own.f_argmax(-1, true)?),
    };
    let Candidates { values, ids } = Candidates::of_all(group, &own, part, places.as_ref(), 1)?;
    // The first of several equal values: that of the lowest rank, which has the lowest ids.
    let best = values.f_argmax(-1, true)?;
    Ok(ids.f_gather(-1, &best, false)?.f_squeeze_dim(-1)?)
}

/// Returns the `k` largest logits of each row and their ids, both `[…, k]` and in descending order of the logits, where
/// each rank has the logits `[…, size of the part]` of its part of the vocabulary. The result is equal on all ranks and
/// has no gradients.
///
/// The ranks gather `16 k` bytes for each row. Which of equal logits are among the `k` largest is not specified, as for
/// `topk` of whole logits.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for a `k` that is not between 1 and the vocabulary size. Also returns the
/// errors of [`region_argmax`].
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{VocabularyPart, region_top_k};
/// use tch::Tensor;
/// let part = VocabularyPart::even(4, group.rank(), group.size())?;
/// let logits = Tensor::from_slice(&[0.5_f32, 2.0, 3.0, -1.0]);
/// let (values, ids) = region_top_k(group, &logits, part, 2)?;
/// assert_eq!(values, Tensor::from_slice(&[3.0_f32, 2.0]));
/// assert_eq!(ids, Tensor::from_slice(&[2_i64, 1]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn region_top_k(
    group: &ProcessGroup,
    logits: &Tensor,
    part: VocabularyPart,
    k: i64,
) -> Result<(Tensor, Tensor), Error> {
    let own = own_logits("region_top_k", logits, part)?;
    if k < 1 || k > part.vocabulary {
        return Err(Error::invalid_argument(format!(
            "region_top_k: k is {k}, and the vocabulary has {} tokens",
            part.vocabulary
        )));
    }
    let columns = own.size().last().copied().unwrap_or_default();
    let places = own.f_topk(k.min(columns), -1, true, true)?.1;
    let Candidates { values, ids } = Candidates::of_all(group, &own, part, Some(&places), k)?;
    // Padding must not come before a logit of negative infinity.
    let (_, real_first) = ids.f_lt(0)?.f_to_kind(Kind::Uint8)?.f_sort_stable(true, -1, false)?;
    let values = values.f_gather(-1, &real_first, false)?;
    let ids = ids.f_gather(-1, &real_first, false)?;
    let (values, order) = values.f_sort_stable(true, -1, true)?;
    let ids = ids.f_gather(-1, &order, false)?;
    let kind = own.f_kind()?;
    Ok((values.f_narrow(-1, 0, k)?.f_to_kind(kind)?, ids.f_narrow(-1, 0, k)?.f_contiguous()?))
}

/// Logits that may be the largest of their row, `[…, candidates of all ranks]`.
struct Candidates {
    /// Logits as float64, which every kind of float fits into; minus infinity where a rank had fewer.
    values: Tensor,
    /// Ids of tokens. -1 where a rank had fewer.
    ids: Tensor,
}

impl Candidates {
    /// Gathers `k` candidates of each rank: the logits at `places`, and padding if there are fewer.
    fn of_all(
        group: &ProcessGroup,
        logits: &Tensor,
        part: VocabularyPart,
        places: Option<&Tensor>,
        k: i64,
    ) -> Result<Self, Error> {
        let mut sizes = logits.size();
        let rows = sizes.len() - 1;
        sizes[rows] = k;
        let doubles = (Kind::Double, logits.device());
        let values = Tensor::f_full(&sizes, f64::NEG_INFINITY, doubles)?;
        // An id is below 2^53, because memory is limited.
        let ids = Tensor::f_full(&sizes, -1.0, doubles)?;
        if let Some(places) = places {
            let count = places.size()[rows];
            let chosen = logits.f_gather(-1, places, false)?;
            values.f_narrow(-1, 0, count)?.f_copy_(&chosen)?;
            ids.f_narrow(-1, 0, count)?.f_copy_(&places.f_add_scalar(part.start)?)?;
        }
        let own = Tensor::f_stack(&[values, ids], 0)?.f_unsqueeze(0)?;
        let all = if group.size() == 1 { own } else { group.all_gather_flat(&own)? };
        // [ranks, 2, …, k] becomes [2, …, ranks * k].
        let all = all.f_movedim_int(0, -2)?.f_flatten(-2, -1)?;
        Ok(Self { values: all.f_get(0)?, ids: all.f_get(1)?.f_to_kind(Kind::Int64)? })
    }
}

/// Returns the logits without padding and without history.
fn own_logits(operation: &str, logits: &Tensor, part: VocabularyPart) -> Result<Tensor, Error> {
    part.check_size(operation, logits.size().last().copied())?;
    let tokens = part.tokens();
    Ok(logits.f_detach()?.f_narrow(-1, 0, tokens.end - tokens.start)?)
}

/// Runs a computation of all ranks. Invalid arguments do not count as a failure of the group.
fn together(
    group: &ProcessGroup,
    operation: &'static str,
    run: impl FnOnce(&ffi::Group) -> Result<ffi::CrossEntropyLoss, cxx::Exception>,
) -> Result<CrossEntropyLoss, Error> {
    let begun = Instant::now();
    let (started, found) =
        group.exclusively(|handle| (group.next_collective(operation), run(handle)));
    found.map(Into::into).map_err(|error| {
        match Thrown::read(&error).fault_after(begun.elapsed(), group.timeout()) {
            Fault::Invalid | Fault::Unsupported | Fault::OutOfMemory => {
                Error::libtorch(operation, &error)
            }
            _ => group.failure(started, begun, &error).into(),
        }
    })
}

/// Index that libtorch interprets as "no row".
const NO_PADDING: i64 = -1;
