//! Dropout.

use std::borrow::Borrow;

use brigade_torch::{Result, dropout};
use tch::Tensor;

use super::branch::Branch;
use crate::layer_context::LayerContext;
use crate::{Module, ParamPath, Training};

/// Dropout: in training sets each value to 0 with probability `p` and divides the others by `1 − p`; in evaluation
/// returns its input. Accepts any shape
/// ([torch.nn.Dropout](https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html)).
///
/// For the same seed the dropped values are those of PyTorch, so that ranks in Python and in Rust can train one model.
/// [`Dropout::maskless`] is faster but does not have this property.
///
/// It has no parameters; the path is needed only for the training mode.
///
/// ```
/// use brigade_nn::{Dropout, Model};
/// use tch::{Kind, Tensor};
///
/// let mut model = Model::new(|p| Dropout::new(p, 0.5))?;
/// let ones = Tensor::ones([1000], (Kind::Float, model.device()));
/// assert!(model.forward(&ones)?.eq(0.0).any().double_value(&[]) == 1.0);
/// model.eval();
/// assert_eq!(model.forward(&ones)?, ones);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Dropout {
    probability: f64,
    maskless: bool,
    training: Training,
    context: LayerContext,
}

impl Dropout {
    /// Creates a dropout layer. A `probability` outside `[0, 1]` makes the model fail to build.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, probability: f64) -> Self {
        let path = path.borrow();
        if !(0.0..=1.0).contains(&probability) {
            path.reject(format_args!("the dropout probability {probability} is not in [0, 1]"));
        }
        Self { probability, maskless: false, training: path.training(), context: path.layer() }
    }

    /// Creates a dropout layer that draws with [`brigade_torch::dropout`]: it takes half the time on a CPU and keeps no
    /// mask for the backward, but drops other values than PyTorch for the same seed.
    pub fn maskless<'a>(path: impl Borrow<ParamPath<'a>>, probability: f64) -> Self {
        Self { maskless: true, ..Self::new(path, probability) }
    }
}

impl Dropout {
    /// Returns a branch of a residual connection after dropout. That of a [maskless](Dropout::maskless) layer is left to
    /// what adds the branch to the stream, which can do both in one pass.
    ///
    /// ```
    /// use brigade_nn::{Dropout, LayerNorm, Model, Module, ParamPath};
    /// use brigade_torch::Result;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Block { dropout: Dropout, norm: LayerNorm }
    /// impl Block {
    ///     fn new(path: &ParamPath<'_>) -> Self {
    ///         let dropout = Dropout::maskless(path / "dropout", 0.1);
    ///         Self { dropout, norm: LayerNorm::new(path / "norm", &[8]) }
    ///     }
    /// }
    /// impl Module<&Tensor> for Block {
    ///     type Output = Tensor;
    ///     fn forward(&self, stream: &Tensor) -> Result<Tensor> {
    ///         let branch = self.dropout.branch(stream.f_gelu("none")?)?;
    ///         Ok(self.norm.forward_residual(stream, Some(&branch))?.normed)
    ///     }
    /// }
    /// let model = Model::new(|path| Block::new(path))?;
    /// let stream = Tensor::randn([2, 8], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&stream)?.size(), [2, 8]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error of libtorch with the layer's name.
    pub fn branch(&self, values: Tensor) -> Result<Branch> {
        if !self.training.is_on() {
            // In evaluation hooks still see the values.
            return Ok(Branch::new(self.context.output(values)));
        }
        if self.maskless && self.context.hooks.is_empty() {
            return Ok(Branch { values, dropout: self.probability });
        }
        Ok(Branch::new(self.forward(&values)?))
    }
}

impl Module<&Tensor> for Dropout {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if self.maskless && self.training.is_on() {
            self.context.finish_border(dropout(input, self.probability, None), input)
        } else {
            self.context.finish(input.f_dropout(self.probability, self.training.is_on()), input)
        }
    }
}
