//! Batch normalisation: with the statistics of all ranks, and as one operation with ReLU.

use std::time::Instant;

use tch::Tensor;

use crate::bridge::{borrow, borrow_optional, ffi, own};
use crate::error::Error;
use crate::group::{ProcessGroup, Started};

/// Parameters and state of a normalisation, each `[channels]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchNormState<'a> {
    /// Scale of the normalised values. `None` for 1.
    pub weight: Option<&'a Tensor>,
    /// Bias added to the scaled values. `None` for 0.
    pub bias: Option<&'a Tensor>,
    /// Running mean, which moves by `momentum` towards the mean of the batch, in place.
    pub running_mean: Option<&'a Tensor>,
    /// Running variance, which moves by `momentum` towards the unbiased variance of the batch, in place.
    pub running_var: Option<&'a Tensor>,
}

/// Computes [batch normalisation in
/// training](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html) of `[n, channels, …]` over the
/// batches of all ranks, which may be unequal: the result is that of one process with the whole batch, and so is the
/// gradient of the input. The gradients of weight and bias are this rank's part of the sum over ranks, like those of
/// every parameter.
///
/// Every rank calls it; its backward is a collective, too. Each rank sends one message of `2 * channels + 1` float64 in
/// forward, and one of `2 * channels` in backward.
///
/// # Errors
/// [`crate::TorchError::Collective`] if a peer was lost; with [`crate::Fault::Invalid`] if there is at most one value
/// per channel over all ranks, or shapes do not match.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{BatchNormState, sync_batch_norm};
/// use tch::{Device, Kind, Tensor};
/// let input = Tensor::randn([4, 3, 8, 8], (Kind::Float, Device::Cpu));
/// let output = sync_batch_norm(group, &input, BatchNormState::default(), 0.1, 1e-5)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn sync_batch_norm(
    group: &ProcessGroup,
    input: &Tensor,
    state: BatchNormState<'_>,
    momentum: f64,
    eps: f64,
) -> Result<Tensor, Error> {
    if input.dim() < 2 {
        return Err(Error::invalid_argument(format!(
            "sync_batch_norm: expected [n, channels, …], found a tensor of shape {:?}",
            input.size()
        )));
    }
    let BatchNormState { weight, bias, running_mean, running_var } = state;
    let begun = Instant::now();
    let output = group.exclusively(|handle| {
        ffi::sync_batch_norm(
            handle,
            borrow(input),
            &borrow_optional(weight),
            &borrow_optional(bias),
            &borrow_optional(running_mean),
            &borrow_optional(running_var),
            momentum,
            eps,
        )
    });
    match output {
        Ok(output) => Ok(own(output)),
        Err(error) => {
            Err(group.failure(Started::unnumbered("sync_batch_norm"), begun, &error).into())
        }
    }
}

/// Normalises `[n, channels, …]` over the batch, like PyTorch's
/// [`batch_norm`](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.batch_norm.html): with the
/// statistics of this batch in training, with the running ones otherwise.
///
/// In training, on an NVIDIA GPU of compute capability 8.0 or newer, with an input of bfloat16 or float16 in
/// channels_last, a multiple of eight channels, and all parameters and running statistics in float32, it runs kernels
/// of this crate, which read the input twice and write the output once. All other cases call libtorch.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices do not match.
///
/// ```
/// use brigade_torch::{BatchNormState, batch_norm};
/// use tch::{Device, Kind, Tensor};
/// let input = Tensor::randn([4, 32, 8, 8], (Kind::Float, Device::Cpu));
/// let output = batch_norm(&input, BatchNormState::default(), true, 0.1, 1e-5)?;
/// assert!(output.mean(Kind::Float).abs().double_value(&[]) < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn batch_norm(
    input: &Tensor,
    state: BatchNormState<'_>,
    training: bool,
    momentum: f64,
    eps: f64,
) -> Result<Tensor, Error> {
    normalize(input, None, state, training, momentum, eps, false)
}

/// Computes `relu(batch_norm(input) + shortcut)`, for convolutional networks in which these follow each other.
///
/// It is one fused operation in training, if all parameters and running statistics are in float32 and the input is
/// channels-last, in float32 or bfloat16 on the CPU, in bfloat16 or float16 on a GPU for which [`batch_norm`] has
/// kernels. The fused operation reads the input twice and writes the output once (separate operations with a shortcut
/// read five times and write three times), and its backward has no pass for ReLU; on a GPU, one bit for each value
/// behind a shortcut tells it what ReLU lets through. Results equal those of the separate operations up to rounding, and
/// do not depend on the number of threads. Otherwise it calls the separate operations.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices do not match.
///
/// ```
/// use brigade_torch::{BatchNormState, batch_norm_relu};
/// use tch::{Device, Kind, Tensor};
/// let input = Tensor::randn([4, 32, 8, 8], (Kind::Float, Device::Cpu));
/// let output = batch_norm_relu(&input, None, BatchNormState::default(), true, 0.1, 1e-5)?;
/// assert!(output.min().double_value(&[]) >= 0.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn batch_norm_relu(
    input: &Tensor,
    shortcut: Option<&Tensor>,
    state: BatchNormState<'_>,
    training: bool,
    momentum: f64,
    eps: f64,
) -> Result<Tensor, Error> {
    normalize(input, shortcut, state, training, momentum, eps, true)
}

/// Computes `max_pool2d(relu(batch_norm(input)))` with windows of 3 × 3, a stride of 2 and a padding of 1, which end the
/// stem of residual networks: from `[n, channels, h, w]` to `[n, channels, ⌊(h + 1) / 2⌋, ⌊(w + 1) / 2⌋]`.
///
/// In training on a GPU with kernels for [`batch_norm`], it is one fused operation, which writes neither the values
/// before pooling nor their gradient, and stores the position of each maximum in one byte. Ties and NaN are treated as
/// libtorch's `max_pool2d` does. Otherwise it calls [`batch_norm_relu`] and [`max_pool2d`](crate::max_pool2d).
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when shapes, kinds or devices do not match.
///
/// ```
/// use brigade_torch::{BatchNormState, batch_norm_relu, batch_norm_relu_max_pool, max_pool2d};
/// use tch::{Device, Kind, Tensor};
/// let input = Tensor::randn([4, 32, 9, 8], (Kind::Float, Device::Cpu));
/// let state = BatchNormState::default();
/// let output = batch_norm_relu_max_pool(&input, state, true, 0.1, 1e-5)?;
/// assert_eq!(output.size(), [4, 32, 5, 4]);
/// let maps = batch_norm_relu(&input, None, state, true, 0.1, 1e-5)?;
/// assert_eq!(output, max_pool2d(&maps, [3, 3], [2, 2], [1, 1])?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn batch_norm_relu_max_pool(
    input: &Tensor,
    state: BatchNormState<'_>,
    training: bool,
    momentum: f64,
    eps: f64,
) -> Result<Tensor, Error> {
    let BatchNormState { weight, bias, running_mean, running_var } = state;
    ffi::batch_norm_relu_max_pool(
        borrow(input),
        &borrow_optional(weight),
        &borrow_optional(bias),
        &borrow_optional(running_mean),
        &borrow_optional(running_var),
        training,
        momentum,
        eps,
    )
    .map(own)
    .map_err(|error| Error::libtorch("batch_norm_relu_max_pool", &error))
}

/// Returns the input of a residual block twice: for its branch and for its shortcut.
///
/// If the input is the output of a [`batch_norm_relu`] with a shortcut that ran as one fused operation on a GPU, the
/// backward of that operation adds the gradients of both uses as it reads them. The sum then has the same bits as that
/// of two uses of the input itself, but is not computed by a pass of its own. The two tensors are views, which cannot be
/// changed in place where a gradient is recorded. Hooks of the input, and uses of it elsewhere, are as usual. In all
/// other cases both are the input itself.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if libtorch fails.
///
/// ```
/// use brigade_torch::residual_inputs;
/// use tch::{Device, Kind, Tensor};
/// let maps = Tensor::randn([2, 8, 4, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (branch, shortcut) = residual_inputs(&maps)?;
/// (branch * 2.0 + shortcut).sum(Kind::Float).backward();
/// assert_eq!(maps.grad(), maps.full_like(3.0));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn residual_inputs(input: &Tensor) -> Result<(Tensor, Tensor), Error> {
    ffi::residual_inputs(borrow(input))
        .map(|ffi::ResidualInputs { branch, shortcut }| (own(branch), own(shortcut)))
        .map_err(|error| Error::libtorch("residual_inputs", &error))
}

fn normalize(
    input: &Tensor,
    shortcut: Option<&Tensor>,
    state: BatchNormState<'_>,
    training: bool,
    momentum: f64,
    eps: f64,
    relu: bool,
) -> Result<Tensor, Error> {
    let BatchNormState { weight, bias, running_mean, running_var } = state;
    ffi::batch_norm_relu(
        borrow(input),
        &borrow_optional(shortcut),
        &borrow_optional(weight),
        &borrow_optional(bias),
        &borrow_optional(running_mean),
        &borrow_optional(running_var),
        training,
        momentum,
        eps,
        relu,
    )
    .map(own)
    .map_err(|error| Error::libtorch(if relu { "batch_norm_relu" } else { "batch_norm" }, &error))
}
