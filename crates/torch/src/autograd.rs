//! Functions of autograd that tch does not have.

use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi, own};
use crate::error::Error;

/// Returns `true` if operations record the autograd graph that `backward` needs: `false` inside of [`tch::no_grad`].
#[must_use]
pub fn grad_enabled() -> bool {
    ffi::grad_enabled()
}

/// Options of a backward pass: keeping the graph, and recording the backward itself.
///
/// ```
/// use brigade_torch::{BackwardOptions, backward, backward_with, gradient};
/// use tch::Tensor;
///
/// let weight = Tensor::from(3.0).set_requires_grad(true);
/// let loss = &weight * &weight;
/// backward_with(&loss, BackwardOptions { retain_graph: true, ..Default::default() })?;
/// backward(&loss)?; // adds to the first
/// assert_eq!(gradient(&weight)?.unwrap().double_value(&[]), 12.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BackwardOptions {
    /// `true` if the graph and its saved tensors are kept for a further backward through it. Defaults to `false`.
    /// `create_graph` also keeps the graph.
    pub retain_graph: bool,
    /// `true` if the backward itself is recorded, so that gradients can be differentiated. Defaults to `false`.
    pub create_graph: bool,
}

impl BackwardOptions {
    pub(crate) fn retains(self) -> bool {
        self.retain_graph || self.create_graph
    }
}

/// Computes the gradients of a scalar with respect to the leaves of its graph, and adds them to the leaves' gradients,
/// like [`Tensor::backward`] but with an [`Error`]. With a [`crate::Reducer`] use [`crate::ProcessGroup::backward`]
/// instead.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] when the loss is not a scalar or has no graph.
///
/// ```
/// use brigade_torch::{backward, gradient};
/// use tch::Tensor;
/// let weight = Tensor::from(3.0).set_requires_grad(true);
/// backward(&(&weight * &weight))?;
/// assert_eq!(gradient(&weight)?.unwrap().double_value(&[]), 6.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn backward(loss: &Tensor) -> Result<(), Error> {
    backward_with(loss, BackwardOptions::default())
}

/// Computes gradients like [`backward`], with options to keep the graph or to record the backward
/// ([torch.Tensor.backward](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html)).
///
/// # Errors
/// Returns the same errors as [`backward`].
pub fn backward_with(loss: &Tensor, options: BackwardOptions) -> Result<(), Error> {
    if loss.defined() && !loss.requires_grad() {
        return Err(Error::invalid_argument(
            "backward: the loss depends on nothing that is trained: all parameters are frozen, it was computed under `no_grad`, \
             or a device map has the model's weights, which is for inference (to train a model that does not fit a device, use \
             sharding with offload)",
        ));
    }
    ffi::backward(borrow(loss), options.retains(), options.create_graph)
        .map_err(|error| Error::libtorch("backward", &error))
}

/// Computes gradients from the gradients of the outputs, one per output, and adds them to the gradients of all leaves,
/// or only of `leaves` if it is not empty. Leaves that the outputs do not depend on keep their gradients.
///
/// ```
/// use brigade_torch::{BackwardOptions, backward_from, gradient};
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[2.0, 3.0]).set_requires_grad(true);
/// let input = Tensor::from_slice(&[5.0, 7.0]).set_requires_grad(true);
/// let output = &weight * &input;
/// let from_next = Tensor::from_slice(&[1.0, 10.0]);
/// let retain = BackwardOptions { retain_graph: true, ..Default::default() };
/// backward_from(&[&output], &[&from_next], &[&input], retain)?;
/// assert_eq!(Vec::<f64>::try_from(gradient(&input)?.unwrap())?, [2.0, 30.0]);
/// assert!(gradient(&weight)?.is_none());
/// backward_from(&[&output], &[&from_next], &[&weight], BackwardOptions::default())?;
/// assert_eq!(Vec::<f64>::try_from(gradient(&weight)?.unwrap())?, [5.0, 70.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if an output has no graph, or if its shape differs from that of its
/// gradient.
pub fn backward_from(
    outputs: &[&Tensor],
    output_gradients: &[&Tensor],
    leaves: &[&Tensor],
    options: BackwardOptions,
) -> Result<(), Error> {
    ffi::backward_from(
        &borrow_all(outputs),
        &borrow_all(output_gradients),
        &borrow_all(leaves),
        options.retains(),
        options.create_graph,
    )
    .map_err(|error| Error::libtorch("backward_from", &error))
}

/// Options of [`grad`]: the graph, the output gradients, and unused inputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// Options of the backward pass.
    pub backward: BackwardOptions,
    /// Gradients of the outputs, one per output. If empty, each output must have one element, and its gradient is 1.
    pub output_gradients: &'a [&'a Tensor],
    /// `true` if the result is `None` for an input that the outputs do not depend on; `false` if such an input is an
    /// error. Defaults to `false`.
    pub allow_unused: bool,
}

/// Computes and returns the gradients of outputs with respect to chosen tensors, without changing any tensor's own
/// gradient ([torch.autograd.grad](https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html)). With
/// `create_graph` the gradients can be part of a loss. With `allow_unused` the result is `None` for an input that the
/// outputs do not depend on.
///
/// Nothing is reduced over ranks; the backward of a loss made from these gradients is reduced as any
/// other.
///
/// ```
/// use brigade_torch::{BackwardOptions, GradOptions, backward, grad, gradient};
/// use tch::Tensor;
///
/// let weight = Tensor::from(2.0).set_requires_grad(true);
/// let input = Tensor::from(3.0).set_requires_grad(true);
/// let output = &weight * &weight * &input;
/// let create_graph = BackwardOptions { create_graph: true, ..Default::default() };
/// let options = GradOptions { backward: create_graph, ..Default::default() };
/// let slope = grad(&[&output], &[&input], options)?.remove(0).unwrap();
/// assert_eq!(slope.double_value(&[]), 4.0); // weight²
/// backward(&(&slope * &slope))?;
/// assert_eq!(gradient(&weight)?.unwrap().double_value(&[]), 32.0); // 4 · weight³
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if an output has no graph, if an output without a gradient has more than
/// one element, or, unless `allow_unused` is set, if the outputs do not depend on an input.
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    options: GradOptions<'_>,
) -> Result<Vec<Option<Tensor>>, Error> {
    let BackwardOptions { create_graph, .. } = options.backward;
    let gradients = ffi::gradients_of(
        &borrow_all(outputs),
        &borrow_all(inputs),
        &borrow_all(options.output_gradients),
        options.backward.retains(),
        create_graph,
        options.allow_unused,
    )
    .map_err(|error| Error::libtorch("grad", &error))?;
    let gradients = gradients.iter().map(|gradient| own(ffi::copy_handle(gradient)));
    Ok(gradients.map(|gradient| gradient.defined().then_some(gradient)).collect())
}

/// Sets a parameter's gradient to undefined, as PyTorch's `zero_grad(set_to_none=True)` does.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the tensor cannot have a gradient.
///
/// ```
/// use brigade_torch::{clear_gradient, gradient};
/// use tch::{Kind, Tensor};
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// weight.sum(Kind::Double).backward();
/// assert!(gradient(&weight)?.is_some());
/// clear_gradient(&weight)?;
/// assert!(gradient(&weight)?.is_none());
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn clear_gradient(parameter: &Tensor) -> Result<(), Error> {
    ffi::clear_gradient(borrow(parameter))
        .map_err(|error| Error::libtorch("clear_gradient", &error))
}

/// Returns a parameter's gradient, or `None` before the first backward pass and after [`clear_gradient`].
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the tensor cannot have a gradient.
pub fn gradient(parameter: &Tensor) -> Result<Option<Tensor>, Error> {
    let gradient =
        ffi::gradient(borrow(parameter)).map_err(|error| Error::libtorch("gradient", &error))?;
    Ok((!gradient.is_null()).then(|| own(gradient)))
}

/// Sets a parameter's gradient, replacing the previous one: for a checkpoint within an accumulation window.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the parameter cannot have a gradient;
/// [`crate::ErrorKind::InvalidArgument`] if shape, kind or device of the gradient differ from the parameter's.
pub fn set_gradient(parameter: &Tensor, gradient: &Tensor) -> Result<(), Error> {
    let (expected, found) = (parameter.size(), gradient.size());
    let alike = parameter.f_kind()? == gradient.f_kind()?
        && parameter.device() == gradient.device()
        && expected == found;
    if !alike {
        return Err(Error::invalid_argument(format!(
            "a gradient has its parameter's shape, kind and device: expected {expected:?} of {:?}, \
             found {found:?} of {:?}",
            parameter.f_kind()?,
            gradient.f_kind()?
        )));
    }
    ffi::set_gradient(borrow(parameter), borrow(gradient))
        .map_err(|error| Error::libtorch("set_gradient", &error))
}
