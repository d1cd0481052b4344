//! Context of a layer within its model: its name for errors, the forward hooks of its output, and the location of its
//! weights.

use brigade_torch::{Error, Result, TorchError};
use tch::{TchError, Tensor};

use crate::error::ModelError;
use crate::hooks::Hooks;
use crate::layer_weights::LayerWeights;

/// A layer's full name and its model's hooks.
#[derive(Debug, Clone)]
pub(crate) struct LayerContext {
    /// Dotted, empty at the root.
    pub(crate) name: String,
    pub(crate) hooks: Hooks,
    /// Has the layer's weights in memory for its forward.
    pub(crate) weights: LayerWeights,
}

impl LayerContext {
    /// The name for messages.
    pub(crate) fn shown_name(&self) -> String {
        shown(&self.name).to_owned()
    }

    /// The layer's output with what its hooks made of it, or an error that names the layer and the shape of
    /// its input.
    pub(crate) fn finish(
        &self,
        result: std::result::Result<Tensor, TchError>,
        input: &Tensor,
    ) -> Result<Tensor> {
        Ok(self.output(self.check(result, input)?))
    }

    /// As [`Self::finish`], for an operation of the border.
    pub(crate) fn finish_border(&self, result: Result<Tensor>, input: &Tensor) -> Result<Tensor> {
        Ok(self.output(self.check_border(result, input)?))
    }

    /// As [`Self::check`], for an operation of the border.
    pub(crate) fn check_border(&self, result: Result<Tensor>, input: &Tensor) -> Result<Tensor> {
        let result = result.map_err(|error| match error.downcast() {
            // The layer's name stands for the operation's.
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

    /// The result of an operation on the way to the output.
    pub(crate) fn check<T>(
        &self,
        result: std::result::Result<T, TchError>,
        input: &Tensor,
    ) -> Result<T> {
        Ok(result.map_err(|source| ModelError::layer(self.shown_name(), input, source))?)
    }

    /// The error for an input of a shape that the layer does not take.
    pub(crate) fn refuse(&self, input: &Tensor, expected: &'static str) -> Error {
        ModelError::Input { layer: self.shown_name(), expected, input: input.size() }.into()
    }
}

/// A dotted name for messages: the root has none.
pub(crate) fn shown(name: &str) -> &str {
    if name.is_empty() { "the model" } else { name }
}
