//! Layers one after another, named by their index.

use std::fmt;

use brigade_torch::{Error, Result};
use tch::Tensor;

use crate::module::Layer;
use crate::{Module, Stages};

/// A sequence of layers from tensor to tensor. As in PyTorch, layers are named by their index: `path / 0`, `path / 1`,
/// …, where layers without parameters count.
///
/// ```
/// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential};
///
/// let model = Model::new(|p: &ParamPath| {
///     Sequential::new().add(Linear::new(p / 0, 784, 64)).add(Relu).add(Linear::new(p / 2, 64, 10))
/// })?;
/// assert_eq!(model.parameters()[2].name, "2.weight");
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Layer>>,
    stages: Option<Stages>,
}

impl Sequential {
    /// Returns an empty sequence of layers, whose output is its input.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer at the end.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "tch's name; `+` would read as arithmetic")]
    pub fn add(mut self, layer: impl Layer + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Adds a function of tensor operators at the end. For a function that calls layers, implement [`Module`] instead.
    ///
    /// ```
    /// use brigade_nn::Sequential;
    /// let squared = Sequential::new().add_fn(|x| x * x);
    /// assert_eq!(squared.len(), 1);
    /// ```
    #[must_use]
    pub fn add_fn(self, function: impl Fn(&Tensor) -> Tensor + Send + 'static) -> Self {
        self.add(Function(function))
    }

    /// Allows a pipeline to cut the model between these layers. `stages` is the result of [`crate::ParamPath::stages`]
    /// for the names of all layers.
    #[must_use]
    pub fn in_stages(self, stages: Stages) -> Self {
        Self { stages: Some(stages), ..self }
    }

    /// Returns the number of layers, functions included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns `true` if there are no layers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl Module<&Tensor> for Sequential {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if let Some(stages) = &self.stages {
            let layer = |index: usize, hidden: &Tensor| match self.layers.get(index) {
                Some(layer) if self.layers.len() == stages.len() => layer.forward(hidden),
                _ => Err(Error::invalid_argument(format!(
                    "the row of stages has {} blocks, and the Sequential {} layers",
                    stages.len(),
                    self.layers.len()
                ))),
            };
            return stages.run(|| Ok(input.shallow_clone()), layer);
        }
        let Some((first, rest)) = self.layers.split_first() else {
            return Ok(input.shallow_clone());
        };
        rest.iter().try_fold(first.forward(input)?, |output, layer| layer.forward(&output))
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequential").field("len", &self.len()).finish()
    }
}

struct Function<F>(F);

impl<F> Module<&Tensor> for Function<F>
where
    F: Fn(&Tensor) -> Tensor,
{
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok((self.0)(input))
    }
}
