//! Loading of a layer's weights into memory for its forward.

use std::fmt;
use std::sync::Arc;

use brigade_torch::Result;
use parking_lot::Mutex;
use tch::Tensor;

use crate::placed::Placed;

/// Loads the weights of a layer into memory for its forward if a device map keeps them elsewhere
/// ([`crate::Model::dispatch`]). Has no effect for other models, nor for layers in a [`crate::Unit`], whose weights are
/// loaded with those of the unit. Created by [`crate::ParamPath::layer_weights`]. Clones share their state.
///
/// ```
/// use brigade_nn::{Init, LayerWeights, Model, Module, ParamPath};
/// use brigade_torch::Result;
/// use tch::{Kind, Tensor};
///
/// struct Scale { scale: Tensor, weights: LayerWeights }
///
/// impl Scale {
///     fn new(path: &ParamPath<'_>) -> Self {
///         Self { scale: path.parameter("scale", &[4], Init::Ones), weights: path.layer_weights() }
///     }
/// }
///
/// impl Module<&Tensor> for Scale {
///     type Output = Tensor;
///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
///         self.weights.run(input, |input| Ok(input.f_mul(&self.scale)?))
///     }
/// }
///
/// let model = Model::new(|path| Scale::new(path))?;
/// let input = Tensor::ones([2, 4], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&input)?, input);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct LayerWeights {
    placed: Arc<Mutex<Option<Arc<Placed>>>>,
}

impl LayerWeights {
    /// Runs a layer's forward with its weights in memory, and with the input on their device.
    ///
    /// # Errors
    /// Returns the errors of `forward`; the errors of reading the weights; [`brigade_torch::ErrorKind::Tensor`] if the
    /// input cannot be moved.
    pub fn run<T>(&self, input: &Tensor, forward: impl FnOnce(&Tensor) -> Result<T>) -> Result<T> {
        let Some(placed) = self.placed.lock().clone() else { return forward(input) };
        let input = placed.moved(input)?;
        let _held = placed.hold()?;
        forward(&input)
    }

    /// Returns `true` if a device map keeps the weights elsewhere, so that they have other memory in each forward.
    pub(crate) fn is_placed(&self) -> bool {
        self.placed.lock().is_some()
    }

    /// Does the same as [`LayerWeights::run`], for a module whose input is more than a tensor, and which moves it
    /// itself.
    pub(crate) fn hold<T>(&self, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(placed) = self.placed.lock().clone() else { return forward() };
        let _held = placed.hold()?;
        forward()
    }

    /// Sets the device on which the layer computes, by a device map.
    pub(crate) fn set_placed(&self, placed: Arc<Placed>) {
        *self.placed.lock() = Some(placed);
    }
}

impl fmt::Debug for LayerWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_dispatched = self.placed.lock().is_some();
        f.debug_struct("LayerWeights").field("is_dispatched", &is_dispatched).finish()
    }
}
