//! Cross-entropy over many classes, in less memory.
//!
//! The loss of a language model is computed together with its head, some rows of logits at a time
//! (`cpp/cross_entropy.cpp`). The gradients are computed in the forward, so that the logits need not be kept. On a CPU,
//! rows whose label is ignored are left out of the products. A GPU computes and masks them, because the host would have
//! to wait for their number; BERT's head, where most rows are ignored, selects its rows first, and waits.

use tch::{Reduction, Tensor};

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Options of [`cross_entropy`] and [`linear_cross_entropy`]: ignored targets, smoothing, and the reduction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// Target of ignored rows, which do not contribute to the loss and have no gradient. Defaults to -100.
    pub ignore_index: i64,
    /// Label smoothing: the share of a target that is spread over all classes, from 0 to 1. Defaults to 0.
    pub label_smoothing: f64,
    /// Factor of the z-loss, which adds the square of the logarithm of the sum of exponentials to each row's loss and
    /// so keeps logits from drifting ([PaLM](https://arxiv.org/abs/2204.02311), section 5). Defaults to 0.
    pub z_loss: f64,
    /// Reduction of the rows' losses: `Sum`, or `Mean`, which divides by the number of rows that are not ignored.
    /// Defaults to `Mean`.
    pub reduction: Reduction,
    /// Maximum size in bytes of the logits that [`linear_cross_entropy`] has in memory at a time, for at least 128 rows.
    /// Defaults to 512 MiB on a GPU and 128 MiB on a CPU.
    pub logit_bytes: Option<u64>,
}

impl Default for CrossEntropyOptions {
    /// Returns PyTorch's defaults: −100, 0, and the mean, without a z-loss.
    fn default() -> Self {
        Self {
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            reduction: Reduction::Mean,
            logit_bytes: None,
        }
    }
}

impl CrossEntropyOptions {
    pub(crate) fn for_libtorch(&self, operation: &str) -> Result<ffi::CrossEntropyOptions, Error> {
        let Self { ignore_index, label_smoothing, z_loss, reduction, logit_bytes } = *self;
        let mean = match reduction {
            Reduction::Mean => true,
            Reduction::Sum => false,
            other => {
                return Err(Error::invalid_argument(format!(
                    "{operation}: expected the reduction Mean or Sum, found {other:?}"
                )));
            }
        };
        // The C++ function takes 0 for the default, and no bound lies below one row.
        let logit_bytes =
            logit_bytes.map_or(0, |bytes| i64::try_from(bytes.max(1)).unwrap_or(i64::MAX));
        Ok(ffi::CrossEntropyOptions { ignore_index, label_smoothing, z_loss, mean, logit_bytes })
    }
}

/// Result of a cross-entropy: the loss, and the number of targets.
#[derive(Debug)]
pub struct CrossEntropyLoss {
    /// Value of the loss: float64 for rows of float64, else float32.
    pub loss: Tensor,
    /// Number of targets other than `ignore_index`, which is the weight of this batch: an int64 on the rows' device.
    pub count: Tensor,
}

impl From<ffi::CrossEntropyLoss> for CrossEntropyLoss {
    fn from(found: ffi::CrossEntropyLoss) -> Self {
        Self { loss: own(found.loss), count: own(found.count) }
    }
}

/// Computes the cross-entropy of logits `[…, classes]` and targets `[…]` of int64, as
/// [torch.nn.functional.cross_entropy](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html)
/// with classes last.
///
/// The gradient is computed in the forward, only for rows that are not ignored, so that only one more tensor of the
/// logits' size is in memory, where libtorch has three. The backward consumes this tensor: a loss can have only one
/// backward, even with `retain_graph`, and no second derivatives. Sums are computed in float64, and results do not
/// depend on the number of threads.
///
/// If all targets are ignored, the sum is 0, the mean NaN, and the gradients are 0.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] if the reduction is neither `Sum` nor `Mean`; [`crate::TorchError::Libtorch`]
/// with [`crate::Fault::Invalid`] for a target that is not a class, and for invalid shapes, kinds and options. On a GPU
/// such a target makes the kernel fail: a later call returns the error, and CUDA cannot be used in this process any
/// more.
///
/// ```
/// use brigade_torch::{CrossEntropyOptions, cross_entropy};
/// use tch::{Device, Kind, Tensor};
/// let logits = Tensor::zeros([2, 3, 8], (Kind::Float, Device::Cpu));
/// let targets = Tensor::from_slice(&[0_i64, 1, 7, -100, 2, -100]).view([2, 3]);
/// let found = cross_entropy(&logits, &targets, &CrossEntropyOptions::default())?;
/// assert_eq!(found.count.int64_value(&[]), 4);
/// assert!((found.loss.double_value(&[]) - 8_f64.ln()).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyLoss, Error> {
    let options = options.for_libtorch("cross_entropy")?;
    ffi::cross_entropy(borrow(logits), borrow(targets), &options)
        .map(Into::into)
        .map_err(|error| Error::libtorch("cross_entropy", &error))
}

/// Computes [`cross_entropy`] of the logits `hidden · weightᵀ + bias` without holding all of them in memory: for the
/// head of a language model.
///
/// `hidden` is `[…, width]`, `weight` `[classes, width]`, `bias` `[classes]`, `targets` `[…]` of int64. It processes
/// chunks of rows with at most [`CrossEntropyOptions::logit_bytes`] of logits, and computes in the forward the gradients of
/// `hidden`, `weight` and `bias`, as far as they require one. Rows whose target is `ignore_index` are left out of the
/// products on a CPU: with 15 % of the tokens masked, the head takes 15 % of the time. On a GPU they are computed and
/// masked, because the host would have to wait for their number.
///
/// Under autocast the products are computed in its type, like those of a linear layer, and everything else in float32.
/// Gradients have the kinds of their tensors, and that of a float32 weight is accumulated in float32. On a GPU the
/// products have a vocabulary that is rounded up to a multiple of 64, for which they are several times faster. Outside of
/// autocast `hidden`, `weight` and `bias` must have the same kind. On processors without instructions for 16-bit
/// products these are computed in float32, several times faster and more exactly.
///
/// # Errors
/// Returns the same errors as [`cross_entropy`].
///
/// ```
/// use brigade_torch::{CrossEntropyOptions, linear_cross_entropy};
/// use tch::{Device, Kind, Tensor};
/// let hidden = Tensor::randn([2, 5, 16], (Kind::Float, Device::Cpu));
/// let weight = Tensor::randn([100, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let targets = Tensor::randint(100, [2, 5], (Kind::Int64, Device::Cpu));
/// let found =
///     linear_cross_entropy(&hidden, &weight, None, &targets, &CrossEntropyOptions::default())?;
/// found.loss.backward();
/// assert_eq!(weight.grad().size(), [100, 16]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyLoss, Error> {
    let options = options.for_libtorch("linear_cross_entropy")?;
    let (hidden, weight, targets) = (borrow(hidden), borrow(weight), borrow(targets));
    ffi::linear_cross_entropy(hidden, weight, &borrow_optional(bias), targets, &options)
        .map(Into::into)
        .map_err(|error| Error::libtorch("linear_cross_entropy", &error))
}
