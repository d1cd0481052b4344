//! Context of a layer within its model: its name for errors, the forward hooks of its output, and the location of its
//! weights.

use brigade_torch::{Error, Result, TorchError};
use tch::{Device, TchError, Tensor};

use crate::error::ModelError;
use crate::hooks::Hooks;
use crate::layer_weights::LayerWeights;

/// A layer's full name and its model's hooks.
#[derive(Debug, Clone)]
pub(crate) struct LayerContext {
    /// Full name with dots. Empty at the root.
    pub(crate) name: String,
    pub(crate) hooks: Hooks,
    /// Loader of the layer's weights for its forward.
    pub(crate) weights: LayerWeights,
}

impl LayerContext {
    /// Returns the name for messages.
    pub(crate) fn shown_name(&self) -> String {
        shown(&self.name).to_owned()
    }

    /// Returns the layer's output after its hooks, or an error with the layer's name and the shape of its input.
    pub(crate) fn finish(
        &self,
        result: std::result::Result<Tensor, TchError>,
        input: &Tensor,
    ) -> Result<Tensor> {
        Ok(self.output(self.check(result, input)?))
    }

    /// Does the same as [`Self::finish`], for an operation of `brigade_torch`.
    pub(crate) fn finish_border(&self, result: Result<Tensor>, input: &Tensor) -> Result<Tensor> {
        Ok(self.output(self.check_border(result, input)?))
    }

    /// Does the same as [`Self::check`], for an operation of `brigade_torch`.
    pub(crate) fn check_border<T>(&self, result: Result<T>, input: &Tensor) -> Result<T> {
        let result = result.map_err(|error| match error.downcast() {
            // The layer's name replaces that of the operation.
            Ok(TorchError::Libtorch { detail, .. }) => TchError::Torch(detail),
            Ok(other) => TchError::Torch(other.to_string()),
            Err(other) => TchError::Torch(other.to_string()),
        });
        self.check(result, input)
    }

    /// Applies the layer's hooks to its output.
    pub(crate) fn output(&self, output: Tensor) -> Tensor {
        self.hooks.apply(&self.name, output)
    }

    /// Returns the result of an intermediate operation, or an error with the layer's name and the shape of its input.
    pub(crate) fn check<T>(
        &self,
        result: std::result::Result<T, TchError>,
        input: &Tensor,
    ) -> Result<T> {
        Ok(result.map_err(|source| ModelError::layer(self.shown_name(), input, source))?)
    }

    /// Returns the error for an input of an unsupported shape.
    pub(crate) fn refuse(&self, input: &Tensor, expected: &'static str) -> Error {
        ModelError::Input { layer: self.shown_name(), expected, input: input.size() }.into()
    }
}

/// Returns a tensor on a device: a device map may put neighbouring layers on different ones.
pub(crate) fn on(tensor: &Tensor, device: Device) -> Result<Tensor> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_to_device(device)?)
}

/// Returns a dotted name for messages: the root has none.
pub(crate) fn shown(name: &str) -> &str {
    if name.is_empty() { "the model" } else { name }
}
