//! LayerNorm and RMSNorm of a residual stream, with the addition of a branch and its dropout.

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;

/// Branch that [`norm_residual`] adds to the stream: the output of attention or of a feed-forward layer.
#[derive(Debug, Clone, Copy)]
pub struct ResidualBranch<'a> {
    /// Values, of the stream's shape.
    pub values: &'a Tensor,
    /// Bias `[width]` that is added to the values before dropout, if their layer has not added it. Defaults to `None`.
    pub bias: Option<&'a Tensor>,
    /// Dropout probability. Defaults to 0.
    pub dropout: f64,
    /// Seed of dropout, int64 `[1]` on the stream's device: one of [`norm_residual_seeds`]. Only the kernels of a GPU
    /// read it. Defaults to `None`: they draw a seed.
    pub seed: Option<&'a Tensor>,
}

impl<'a> ResidualBranch<'a> {
    /// Returns the branch without bias and dropout.
    #[must_use]
    pub fn new(values: &'a Tensor) -> Self {
        Self { values, bias: None, dropout: 0.0, seed: None }
    }
}

/// Options of [`norm_residual`]: the normalisation and its parameters.
#[derive(Debug, Clone, Copy)]
pub struct NormResidualOptions<'a> {
    /// Last dimensions of the stream, over which mean and variance are computed.
    pub shape: &'a [i64],
    /// Scale of the normalised values. Defaults to `None`, which stands for 1.
    pub weight: Option<&'a Tensor>,
    /// Bias added to the scaled values. Defaults to `None`, which stands for 0. RMSNorm has none.
    pub bias: Option<&'a Tensor>,
    /// Value added to the variance, or to the mean square. Defaults to 1e-5.
    pub eps: f64,
    /// `true` for RMSNorm, `false` for LayerNorm. Defaults to `false`.
    pub rms: bool,
    /// `true` if the normalised values are the next stream (post-norm), `false` if the sum is (pre-norm). Defaults to
    /// `false`.
    pub post: bool,
}

impl<'a> NormResidualOptions<'a> {
    /// Returns the options of a LayerNorm without parameters.
    #[must_use]
    pub fn new(shape: &'a [i64]) -> Self {
        Self { shape, weight: None, bias: None, eps: 1e-5, rms: false, post: false }
    }
}

/// Result of [`norm_residual`].
#[derive(Debug)]
pub struct ResidualNorm {
    /// The next stream, in the type of the sum.
    pub stream: Tensor,
    /// The normalised values: input of the next linear layer.
    pub normed: Tensor,
}

/// Adds `dropout(branch + bias)` to a residual stream, and normalises the sum by LayerNorm or RMSNorm, as the separate
/// operations of PyTorch do.
///
/// On an NVIDIA GPU of compute capability 8.0 or newer, under autocast to bfloat16 or float16, it is one kernel if the
/// stream and the parameters are float32, the branch has autocast's type, and the normalisation is over the last
/// dimension, a multiple of 8. The sum and the statistics are then float32, and `normed` has autocast's type, so that no
/// cast is left before a product. The backward is one kernel and a small one for the parameters' gradients, whose sums
/// are the same bits in each run. Dropout keeps no mask: one number from the device's generator and a counter-based
/// generator determine the dropped values, as in [`dropout`](crate::dropout) on the CPU.
///
/// Otherwise it calls [`dropout`](crate::dropout) and libtorch's operations, with the types that these return.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if shapes or devices do not match, and for a probability that is not in `[0, 1]`.
///
/// ```
/// use brigade_torch::{NormResidualOptions, ResidualBranch, norm_residual};
/// use tch::{Device, Kind, Tensor};
///
/// let [stream, branch] = [1f64, 2.0].map(|it| Tensor::full([2, 8], it, (Kind::Float, Device::Cpu)));
/// let branch = ResidualBranch { dropout: 0.1, ..ResidualBranch::new(&branch) };
/// let output = norm_residual(&stream, Some(branch), &NormResidualOptions::new(&[8]))?;
/// assert_eq!(output.normed.size(), [2, 8]);
/// // Dropped, or 1 + 2 / 0.9.
/// let stream = &output.stream;
/// assert!(stream.eq(1.0).logical_or(&stream.gt(3.2)).all().int64_value(&[]) == 1);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn norm_residual(
    stream: &Tensor,
    branch: Option<ResidualBranch<'_>>,
    options: &NormResidualOptions<'_>,
) -> Result<ResidualNorm, Error> {
    let NormResidualOptions { shape, weight, bias, eps, rms, post } = *options;
    let dropout = branch.map_or(0.0, |it| it.dropout);
    ffi::norm_residual(
        borrow(stream),
        &borrow_optional(branch.map(|it| it.values)),
        &borrow_optional(branch.and_then(|it| it.bias)),
        &borrow_optional(branch.and_then(|it| it.seed)),
        &borrow_optional(weight),
        &borrow_optional(bias),
        shape,
        &ffi::NormResidualOptions { rms, post, eps, dropout },
    )
    .map(|ffi::ResidualNorm { stream, normed }| ResidualNorm {
        stream: own(stream),
        normed: own(normed),
    })
    .map_err(|error| Error::libtorch("norm_residual", &error))
}

/// Draws seeds for the dropout of `count` branches of a stream, int64 `[count]`, in one launch instead of one for each
/// branch. `None` if no kernels of a GPU would read them.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if CUDA fails.
///
/// ```
/// use brigade_torch::norm_residual_seeds;
/// use tch::{Device, Kind, Tensor};
/// let stream = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
/// assert!(norm_residual_seeds(&stream, 24)?.is_none());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn norm_residual_seeds(stream: &Tensor, count: i64) -> Result<Option<Tensor>, Error> {
    let seeds = ffi::norm_residual_seeds(borrow(stream), count)
        .map_err(|error| Error::libtorch("norm_residual_seeds", &error))?;
    Ok((!seeds.is_null()).then(|| own(seeds)))
}

/// Returns `true` if the device of a linear layer's input has kernels that add the layer's bias `[width]` in the pass
/// of [`norm_residual`] behind it, whose branch is the layer's output. Its gradient then needs no pass over the
/// output's gradient.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if CUDA fails.
///
/// ```
/// use brigade_torch::norm_residual_adds_bias;
/// use tch::{Device, Kind, Tensor};
/// let [input, bias] = [[2, 8].as_slice(), &[8]].map(|size| Tensor::ones(size, (Kind::Float, Device::Cpu)));
/// assert!(!norm_residual_adds_bias(&input, &bias)?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn norm_residual_adds_bias(input: &Tensor, bias: &Tensor) -> Result<bool, Error> {
    ffi::norm_residual_adds_bias(borrow(input), borrow(bias))
        .map_err(|error| Error::libtorch("norm_residual_adds_bias", &error))
}
