//! Gradient checkpointing of a layer.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{Result, try_recomputed};
use parking_lot::Mutex;
use tch::Tensor;

use crate::Module;

/// A layer that keeps only its input and computes its activations again in the backward: gradient checkpointing.
/// [`brigade_torch::recomputed`] documents the guarantees, and takes parts with several inputs.
///
/// It has no parameters of its own, and the layer's names stay as they are. A failure of the second computation is an
/// error of the backward.
///
/// ```
/// use brigade_nn::{Linear, Model, ParamPath, Recompute, Relu, Sequential};
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|p: &ParamPath| {
///     let block = |p: ParamPath| Sequential::new().add(Linear::new(&p / 0, 64, 64)).add(Relu);
///     Sequential::new()
///         .add(Recompute::new(block(p / 0)))
///         .add(Recompute::new(block(p / 1)))
/// })?;
/// let output = model.forward(&Tensor::ones([8, 64], (Kind::Float, model.device())))?;
/// output.sum(Kind::Float).backward();
/// assert!(model.parameters()[0].tensor.grad().defined());
/// assert_eq!(model.parameters()[0].name, "0.0.weight");
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct Recompute<L> {
    layer: Arc<Mutex<L>>,
}

impl<L> Recompute<L> {
    /// Wraps a layer whose activations are computed again in the backward.
    pub fn new(layer: L) -> Self {
        Self { layer: Arc::new(Mutex::new(layer)) }
    }
}

impl<L> Module<&Tensor> for Recompute<L>
where
    L: for<'a> Module<&'a Tensor, Output = Tensor> + Send + 'static,
{
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let layer = Arc::clone(&self.layer);
        let output = try_recomputed(&[input], move |inputs| layer.lock().forward(&inputs[0]));
        output?
    }
}

impl<L> fmt::Debug for Recompute<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recompute").field("layer", &std::any::type_name::<L>()).finish()
    }
}
