//! An embedding whose weight is also that of a head.

use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
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
