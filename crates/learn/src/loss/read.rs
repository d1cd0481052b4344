//! Checks of the shapes and dtypes of a loss's arguments.

use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

fn unfit(loss: &str, predictions: &Tensor, targets: &Tensor, expected: &str) -> Error {
    Error::invalid_argument(format!(
        "{loss}: predictions have shape {:?} and targets {:?}; expected {expected}",
        predictions.size(),
        targets.size()
    ))
}

/// Returns numbers in the type in which a loss computes: half precision as `f32`, also under autocast, as in PyTorch.
pub(super) fn full(predictions: &Tensor) -> Result<Tensor> {
    Ok(match predictions.kind() {
        Kind::Half | Kind::BFloat16 => predictions.f_to_kind(Kind::Float)?,
        _ => predictions.shallow_clone(),
    })
}

/// Returns scores `[n, classes, …]` and class numbers `[n, …]` in `i64`; of masks `[n, 1, …]` without the channel.
pub(super) fn classes(
    loss: &str,
    predictions: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (shape, found) = (predictions.size(), targets.size());
    let expected = "[n, classes, …] and [n, …]; `ClassesLast` reads classes in the last dimension";
    let [n, _, rest @ ..] = &shape[..] else {
        return Err(unfit(loss, predictions, targets, expected));
    };
    let targets = if found == [&[*n], rest].concat() {
        targets.shallow_clone()
    } else if found == [&[*n, 1], rest].concat() {
        targets.f_squeeze_dim(1)?
    } else {
        return Err(unfit(loss, predictions, targets, expected));
    };
    if targets.f_is_floating_point()? {
        return Err(Error::invalid_argument(format!(
            "{loss}: targets are {:?}; expected class numbers",
            targets.kind()
        )));
    }
    Ok((full(predictions)?, targets.f_to_kind(Kind::Int64)?))
}

/// Returns predictions and targets of one shape, the targets in the predictions' dtype; `[n, 1]` and `[n]` fit, too.
pub(super) fn numbers(
    loss: &str,
    predictions: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (shape, found) = (predictions.size(), targets.size());
    if predictions.numel() != targets.numel() || shape.first() != found.first() {
        return Err(unfit(loss, predictions, targets, "one shape"));
    }
    let predictions = full(predictions)?;
    let targets = targets.f_to_kind(predictions.kind())?.f_reshape(shape)?;
    Ok((predictions, targets))
}

/// Returns the softmax over dimension 1.
pub(super) fn softmax(predictions: &Tensor) -> Result<Tensor> {
    let predictions = full(predictions)?;
    Ok(predictions.f_softmax(1, predictions.kind())?)
}
