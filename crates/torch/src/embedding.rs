//! Embeddings: one whose weight is also that of a head, and sums of several.

use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi, own};
use crate::error::Error;

/// Looks up the rows of `weight` `[rows, width]` for integer ids `[…]`, and returns them, `[…, width]`, with an alias of
/// the weight for a head that is tied to the embedding.
///
/// If the head uses the alias, its dense gradient and those of the rows meet in one operation of the backward, which
/// adds the rows to the dense gradient in place. With the weight itself, the backward makes a second dense gradient, of
/// zeros and the rows, and adds the two. On the CPU values are the same: the gradients of a token that occurs several
/// times are summed in the order of its places, and the sum is added once. Sums of 16-bit gradients are in float32, and
/// no sum depends on the number of threads. On a GPU the ids are sorted on the device, and the gradients of a token are
/// added to the dense one, so that sums differ in their rounding.
///
/// Both results equal those of separate uses of the weight, and either may be left unused. If no gradient of the weight
/// is recorded, the second result is the weight itself. The row `padding` gets no gradient from the lookup.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for an id without a row (on a GPU a later call fails), and for invalid shapes, kinds
/// and devices.
///
/// ```
/// use brigade_torch::tied_embedding;
/// use tch::{Device, Kind, Tensor};
/// let weight = Tensor::randn([50, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let ids = Tensor::from_slice(&[3_i64, 7, 3]);
/// let (rows, tied) = tied_embedding(&weight, &ids, None)?;
/// let logits = rows.linear::<Tensor>(&tied, None);
/// logits.logsumexp([-1], false).sum(Kind::Float).backward();
/// assert_eq!(weight.grad().size(), [50, 8]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn tied_embedding(
    weight: &Tensor,
    ids: &Tensor,
    padding: Option<i64>,
) -> Result<(Tensor, Tensor), Error> {
    ffi::tied_embedding(borrow(weight), borrow(ids), padding.unwrap_or(-1))
        .map(|found| (own(found.rows), own(found.weight)))
        .map_err(|error| Error::libtorch("tied_embedding", &error))
}

/// Table of embeddings and the ids whose rows [`embedding_sum`] adds up.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingRows<'a> {
    /// Table `[rows, width]`.
    pub weight: &'a Tensor,
    /// Integer ids `[…]`.
    pub ids: &'a Tensor,
    /// Row that gets no gradient. Defaults to `None`.
    pub padding: Option<i64>,
}

impl<'a> EmbeddingRows<'a> {
    /// Returns the rows without a padding row.
    #[must_use]
    pub fn new(weight: &'a Tensor, ids: &'a Tensor) -> Self {
        Self { weight, ids, padding: None }
    }
}

/// Looks up rows of an embedding `first` and adds those of `others`, such as the positions of a transformer, with
/// [`dropout`](crate::dropout()) of the sum. Returns the sum, `[…, width]`, and an alias of the first weight for a head
/// that is tied to the embedding, as [`tied_embedding`] does. The ids of `others` are broadcast to those of `first`.
///
/// On an NVIDIA GPU of compute capability 8.0 or newer, up to three float32 tables are one kernel, which keeps no mask
/// of dropout: one number from the device's generator and a counter-based generator determine the dropped values, as
/// in `dropout` on the CPU. In the backward, the dropout and the gradient of one small table of `others` are one
/// kernel, which adds up the gradients of a row in the order of its places. The gradient of the first weight is that
/// of [`tied_embedding`].
///
/// Otherwise it calls [`tied_embedding`], libtorch's lookups and additions, and `dropout`. The row of a single id is
/// added to the rows in front of it in `others`.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for an id without a row (on a GPU a later call fails), for a probability that is not
/// in `[0, 1]`, and for invalid shapes, kinds and devices.
///
/// ```
/// use brigade_torch::{EmbeddingRows, embedding_sum};
/// use tch::{Device, Kind, Tensor};
/// let [words, positions] =
///     [50, 4].map(|rows| Tensor::randn([rows, 8], (Kind::Float, Device::Cpu)));
/// let ids = Tensor::from_slice(&[3_i64, 7, 3]);
/// let places = Tensor::arange(3, (Kind::Int64, Device::Cpu));
/// let others = [EmbeddingRows::new(&positions, &places)];
/// let (sum, _) = embedding_sum(EmbeddingRows::new(&words, &ids), &others, 0.0)?;
/// assert_eq!(sum, words.index_select(0, &ids) + positions.narrow(0, 0, 3));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn embedding_sum(
    first: EmbeddingRows<'_>,
    others: &[EmbeddingRows<'_>],
    dropout: f64,
) -> Result<(Tensor, Tensor), Error> {
    let all = || [first].into_iter().chain(others.iter().copied());
    let weights: Vec<&Tensor> = all().map(|it| it.weight).collect();
    let ids: Vec<&Tensor> = all().map(|it| it.ids).collect();
    let paddings: Vec<i64> = all().map(|it| it.padding.unwrap_or(-1)).collect();
    ffi::embedding_sum(&borrow_all(&weights), &borrow_all(&ids), &paddings, dropout)
        .map(|found| (own(found.rows), own(found.weight)))
        .map_err(|error| Error::libtorch("embedding_sum", &error))
}
