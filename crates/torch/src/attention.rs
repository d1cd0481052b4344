//! Attention.

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// How [`attention`] weighs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionOptions {
    /// The probability with which a weight is dropped, the others being scaled up: 0 outside of training.
    pub dropout: f64,
    /// Each query sees the keys up to its own place; not together with a mask.
    pub causal: bool,
    /// What the products of queries and keys are multiplied with; 1/√width by default.
    pub scale: Option<f64>,
}

/// Computes `softmax(queries · keysᵀ · scale + mask) · values`, as
/// [torch.nn.functional.scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html):
/// queries `[batch, heads, queries, width]`, keys and values `[batch, heads or a divisor, keys, width]`, a mask that
/// can be expanded to `[batch, heads, queries, keys]`, true where a query sees a key, or floats to add.
///
/// On the CPU, with dropout in float32, bfloat16 or float16, libtorch keeps several tensors of
/// `[batch, heads, queries, keys]`. Here at most 128 queries' weights exist at a time in each thread; the
/// backward computes them again, with the same places dropped, which are drawn as [`crate::dropout`]'s. Also
/// without dropout products in 16 bits are computed in float32 on processors that cannot multiply in 16 bits,
/// as in [`crate::linear`]. The result lies in memory as `[batch, queries, heads, width]`, so that
/// `transpose(1, 2)` and a view join the heads without a copy. A query that sees no key gets 0. There are no
/// gradients of gradients, and none of the mask. All else is libtorch's.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for shapes, kinds or devices that do not fit, a probability that is not in `[0,
/// 1]`, and a mask beside `causal`.
///
/// ```
/// use brigade_torch::{AttentionOptions, attention};
/// use tch::{Device, Kind, Tensor};
/// let random = || Tensor::randn([2, 4, 10, 8], (Kind::Float, Device::Cpu));
/// let (queries, keys, values) = (random(), random(), random());
/// let options = AttentionOptions { dropout: 0.1, causal: true, ..Default::default() };
/// let output = attention(&queries, &keys, &values, None, &options)?;
/// assert_eq!(output.transpose(1, 2).view([2, 10, 32]).size(), [2, 10, 32]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn attention(
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    mask: Option<&Tensor>,
    options: &AttentionOptions,
) -> Result<Tensor, Error> {
    let AttentionOptions { dropout, causal, scale } = *options;
    if scale.is_some_and(|scale| !(scale > 0.0 && scale.is_finite())) {
        return Err(Error::invalid_argument(format!(
            "attention: expected a scale above 0, found {scale:?}"
        )));
    }
    // 0 stands for the default.
    let options = ffi::AttentionOptions { dropout, causal, scale: scale.unwrap_or(0.0) };
    let (queries, keys, values) = (borrow(queries), borrow(keys), borrow(values));
    ffi::attention(queries, keys, values, &borrow_optional(mask), &options)
        .map(own)
        .map_err(|error| Error::libtorch("attention", &error))
}
