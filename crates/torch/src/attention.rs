//! Scaled dot-product attention.

use std::time::Instant;

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;
use crate::group::ProcessGroup;

/// Options of [`attention`]: dropout, causal mask and scale.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionOptions {
    /// Dropout probability of the attention weights. Defaults to 0, and must be 0 outside of training.
    pub dropout: f64,
    /// `true` if each query attends only to keys up to its own position. Cannot be combined with a mask. Defaults to
    /// `false`.
    pub causal: bool,
    /// Factor of the products of queries and keys. Defaults to 1/√width.
    pub scale: Option<f64>,
}

/// Computes `softmax(queries · keysᵀ · scale + mask) · values`, as
/// [torch.nn.functional.scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html):
/// queries `[batch, heads, queries, width]`, keys and values `[batch, heads or a divisor, keys, width]`, a mask that
/// can be expanded to `[batch, heads, queries, keys]`: Booleans that are `true` where a query attends to a key, or
/// floats that are added to the scores.
///
/// On the CPU, with dropout in float32, bfloat16 or float16, libtorch keeps several tensors of `[batch, heads, queries,
/// keys]`. Here each thread stores the weights of at most 128 queries at a time; the backward computes them again, with
/// the same dropout mask, which is drawn as in [`crate::dropout`]. With and without dropout, products in 16 bits are
/// computed in float32 on processors without instructions for them, as in [`crate::linear`]. The result is stored in
/// memory as `[batch, queries, heads, width]`, so that `transpose(1, 2)` and a view join the heads without a copy. The
/// output of a query that attends to no key is 0. Second derivatives and gradients of the mask are not supported.
/// Everything else is computed by libtorch. On a GPU in 16 bits, a dropout probability that is not a multiple of 1/16 is
/// computed by its flash or memory-efficient kernel, since cuDNN's may round the probability to sixteenths.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for shapes, kinds or devices that do not match, a probability that is not in `[0,
/// 1]`, and a mask together with `causal`.
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
    let options = checked(options)?;
    let (queries, keys, values) = (borrow(queries), borrow(keys), borrow(values));
    ffi::attention(queries, keys, values, &borrow_optional(mask), &options)
        .map(own)
        .map_err(|error| Error::libtorch("attention", &error))
}

/// Computes attention over a sequence that is divided over the ranks of a group (context parallelism): `softmax(queries
/// · keysᵀ · scale) · values` for this rank's queries, with the keys and values of all ranks. All are `[batch, heads,
/// own tokens, size]` with the same number of tokens on every rank; the number of heads of keys and values may be a
/// divisor of that of queries.
///
/// Without `causal` every token attends to all tokens. With `causal`, rank `r` of `n` has the chunks `r` and `2 n - 1 -
/// r` of the `2 n` chunks of the sequence, concatenated, so that all ranks have the same work and half of the products
/// are not computed.
///
/// Keys and values of the other ranks are gathered, in forward and again in backward, and their gradients are summed by
/// a reduce-scatter. With `ring` they are passed from rank to rank instead, while attention to the preceding ones is
/// computed, so that each rank has the keys of two ranks at a time. Results for the keys of different ranks are
/// combined by their log-sum-exp, in float32 (float64 for float64). Gradients of keys are those of the sum of the
/// ranks' losses, and are sent in that type, too. With one rank it is [`attention`].
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{AttentionOptions, context_attention};
/// use tch::{Device, Kind, Tensor};
///
/// let own = || Tensor::randn([2, 4, 16, 8], (Kind::Float, Device::Cpu));
/// let options = AttentionOptions { causal: true, ..Default::default() };
/// let output = context_attention(group, &own(), &own(), &own(), true, &options)?;
/// assert_eq!(output.size(), [2, 4, 16, 8]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for dropout; [`crate::TorchError::Libtorch`] for shapes that do not match, and
/// an odd number of tokens with `causal`; [`crate::ErrorKind::Communication`], also in backward, if a peer was lost.
pub fn context_attention(
    group: &ProcessGroup,
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    ring: bool,
    options: &AttentionOptions,
) -> Result<Tensor, Error> {
    if options.dropout != 0.0 {
        return Err(Error::invalid_argument(format!(
            "context_attention: expected no dropout of scores, found {}",
            options.dropout
        )));
    }
    if group.size() == 1 {
        return attention(queries, keys, values, None, options);
    }
    let options = checked(options)?;
    let begun = Instant::now();
    let (started, output) = group.exclusively(|handle| {
        let (queries, keys, values) = (borrow(queries), borrow(keys), borrow(values));
        let started = group.next_collective("context_attention");
        (started, ffi::context_attention(handle, queries, keys, values, ring, &options))
    });
    match output {
        Ok(output) => Ok(own(output)),
        Err(error) => Err(group.failure(started, begun, &error).into()),
    }
}

fn checked(options: &AttentionOptions) -> Result<ffi::AttentionOptions, Error> {
    let AttentionOptions { dropout, causal, scale } = *options;
    if scale.is_some_and(|scale| !(scale > 0.0 && scale.is_finite())) {
        return Err(Error::invalid_argument(format!(
            "attention: expected a scale above 0, found {scale:?}"
        )));
    }
    // The C++ function takes 0 for the default.
    Ok(ffi::AttentionOptions { dropout, causal, scale: scale.unwrap_or(0.0) })
}

#[cfg(test)]
mod tests {
    use super::ffi::{AttentionCall, AttentionKernel, attention_kernel};

    #[test]
    fn cudnn_gets_no_dropout_that_it_would_round() {
        let usual = || AttentionCall {
            dropout: 0.1,
            sixteen_bits: true,
            head_size: 64,
            value_size: 64,
            masked: false,
            causal_rectangle: false,
            ampere: true,
        };
        let (libtorch, flash, efficient) =
            (AttentionKernel::Libtorch, AttentionKernel::Flash, AttentionKernel::Efficient);
        let table = [
            // Multiples of 1/16, which are exact.
            (AttentionCall { dropout: 0.0, ..usual() }, libtorch),
            (AttentionCall { dropout: 0.0625, ..usual() }, libtorch),
            (AttentionCall { dropout: 0.5, masked: true, ..usual() }, libtorch),
            (AttentionCall { dropout: 1.0, ..usual() }, libtorch),
            (usual(), flash),
            (AttentionCall { dropout: 0.05, head_size: 80, value_size: 80, ..usual() }, flash),
            (AttentionCall { dropout: 0.0626, head_size: 20, value_size: 20, ..usual() }, flash),
            (AttentionCall { head_size: 192, value_size: 192, ..usual() }, flash),
            (AttentionCall { head_size: 256, value_size: 256, ..usual() }, efficient),
            (AttentionCall { value_size: 128, ..usual() }, efficient),
            (AttentionCall { masked: true, ..usual() }, efficient),
            (AttentionCall { causal_rectangle: true, ..usual() }, efficient),
            // cuDNN has no such kernels: libtorch chooses among the others.
            (AttentionCall { sixteen_bits: false, ..usual() }, libtorch),
            (AttentionCall { ampere: false, ..usual() }, libtorch),
        ];
        for (call, expected) in table {
            let found = attention_kernel(&call);
            assert_eq!(
                found, expected,
                "dropout {}, head size {}, mask {}",
                call.dropout, call.head_size, call.masked
            );
        }
    }
}
