//! Gradient checkpointing.

use std::convert::Infallible;
use std::fmt;

use parking_lot::Mutex;
use tch::Tensor;

use crate::autograd::grad_enabled;
use crate::bridge::{Recompute, borrow_all, ffi};
use crate::error::Error;

/// Runs a part of a forward without saving its activations for the backward, which computes the part again: gradient
/// checkpointing, which takes less memory and more time
/// ([torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html), without reentrant autograd).
///
/// `part` gets the inputs, and must own everything else that it needs: layers in an `Arc<Mutex<…>>`
/// (`brigade_nn::Recompute` does that for a layer), shallow clones of tensors. It runs a second time with the same
/// inputs, the states of the random number generators and of autocast that it had, so that dropout has the same mask,
/// and all gradients are those of a plain forward, bit for bit. Parts can be nested; reducers, [`crate::grad`] and
/// `create_graph` are supported. Without gradients (`no_grad`) it only calls `part`.
///
/// Side effects of the part happen twice. [`is_recomputing`] is `true` the second time; the batch normalisations of
/// `brigade_nn` then do not update their running statistics.
///
/// ```
/// use brigade_torch::{backward, gradient, recomputed};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let own = weight.shallow_clone();
/// let output = recomputed(&[&weight], |inputs| (&inputs[0] * &inputs[0]).exp())?;
/// backward(&output.sum(Kind::Double))?;
/// let expected = 2.0 * &own * (&own * &own).exp();
/// assert_eq!(gradient(&weight)?.unwrap(), expected);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when a device's random state cannot be read. The backward fails if an input was
/// changed in place meanwhile, or the second run differs from the first.
///
/// # Panics
/// Panics if the part panics in its first run.
pub fn recomputed<R>(
    inputs: &[&Tensor],
    part: impl Fn(&[Tensor]) -> R + Send + 'static,
) -> Result<R, Error> {
    match try_recomputed(inputs, move |inputs| Ok::<R, Infallible>(part(inputs)))? {
        Ok(output) => Ok(output),
    }
}

/// Runs a part like [`recomputed`], for a part that can fail: an error of the first run is returned, and one of the
/// second run is part of the backward's error.
///
/// ```
/// use brigade_torch::try_recomputed;
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let output = try_recomputed(&[&weight], |inputs| inputs[0].f_matmul(&inputs[0]))?;
/// assert_eq!(output.unwrap().double_value(&[]), 5.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`recomputed`]. The inner result contains the error of the part.
///
/// # Panics
/// Panics if the part panics in its first run.
pub fn try_recomputed<R, E: fmt::Display>(
    inputs: &[&Tensor],
    part: impl Fn(&[Tensor]) -> Result<R, E> + Send + 'static,
) -> Result<Result<R, E>, Error> {
    let owned: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
    if !grad_enabled() {
        return Ok(part(&owned));
    }
    let failed = |error: cxx::Exception| Error::libtorch("recomputed", &error);
    let frame = ffi::recompute_begin(&borrow_all(inputs)).map_err(failed)?;
    ffi::recompute_enter(&frame).map_err(failed)?;
    let entered = Entered;
    let output = part(&owned);
    drop(entered);
    if output.is_err() {
        // Without an output there is no backward that needs the part.
        return Ok(output);
    }
    let again = move |inputs: &[Tensor]| match part(inputs) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    ffi::recompute_finish(&frame, Box::new(Recompute { run: Mutex::new(Box::new(again)) }))
        .map_err(failed)?;
    Ok(output)
}

/// Returns `true` if this thread runs a [`recomputed`] part for the second time: counters and running statistics of a
/// layer have been updated for this batch already.
#[must_use]
pub fn is_recomputing() -> bool {
    ffi::is_recomputing()
}

/// Disables saving of tensors by this thread's operations until it is dropped.
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        ffi::recompute_leave();
    }
}

impl fmt::Debug for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recompute")
    }
}
