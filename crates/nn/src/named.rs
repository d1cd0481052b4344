//! Naming of a module's output, for forward hooks.

use brigade_torch::Result;
use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Module, ParamPath};

/// A module whose output has hooks under the path's name: for user-defined modules, such as a block.
///
/// ```
/// use brigade_nn::{Linear, Model, Named, ParamPath};
/// use tch::{Kind, Tensor};
/// let mut model = Model::new(|p: &ParamPath| Named::new(p / "block", Linear::new(p / "block" / 0, 4, 4)))?;
/// let _hook = model.forward_hook("block", |_, output| Some(output * 0.0))?;
/// let output = model.forward(&Tensor::ones([2, 4], (Kind::Float, model.device())))?;
/// assert_eq!(output.abs().sum(Kind::Float).double_value(&[]), 0.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Named<M> {
    module: M,
    context: LayerContext,
}

impl<M> Named<M> {
    /// Wraps a module under the name of a path.
    pub fn new<'a>(path: impl std::borrow::Borrow<ParamPath<'a>>, module: M) -> Self {
        Self { module, context: path.borrow().layer() }
    }
}

impl<M, Input> Module<Input> for Named<M>
where
    M: Module<Input, Output = Tensor>,
{
    type Output = Tensor;

    fn forward(&self, input: Input) -> Result<Tensor> {
        let output = self.context.weights.hold(|| self.module.forward(input))?;
        Ok(self.context.output(output))
    }
}
