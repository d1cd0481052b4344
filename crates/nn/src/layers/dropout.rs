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
        self.biased_branch(values, None)
    }

    /// Does the same as [`Dropout::branch`] for values to which a bias `[width]` is still to be added.
    ///
    /// # Errors
    /// Returns an error of libtorch with the layer's name.
    ///
    /// ```
    /// use brigade_nn::{Dropout, Model, Module, ParamPath};
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|path| Dropout::maskless(path, 0.5))?;
    /// let [stream, values, bias] =
    ///     [[2i64, 8].as_slice(), &[2, 8], &[8]].map(|size| Tensor::ones(size, (Kind::Float, model.device())));
    /// let sum = model.module().biased_branch(values, Some(bias))?.add_to(&stream)?;
    /// // Dropped, or 1 + (1 + 1) / 0.5.
    /// assert!(sum.eq(1.0).logical_or(&sum.eq(5.0)).all().int64_value(&[]) == 1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn biased_branch(&self, mut values: Tensor, mut bias: Option<Tensor>) -> Result<Branch> {
        let fused = self.fused_probability();
        if fused.is_none()
            && let Some(bias) = bias.take()
        {
            values = values.f_add(&bias.f_to_kind(values.f_kind()?)?)?;
        }
        match fused {
            Some(dropout) => Ok(Branch { values, bias, dropout, seed: None }),
            // In evaluation hooks still see the values.
            None if !self.training.is_on() => Ok(Branch::new(self.context.output(values))),
            None => Ok(Branch::new(self.forward(&values)?)),
        }
    }

    /// Returns the probability if [`brigade_torch::dropout`] may be left to an operation that computes its input: 0 in
    /// evaluation. `None` if the layer draws PyTorch's numbers, or if hooks see its output.
    pub(crate) fn fused_probability(&self) -> Option<f64> {
        if !self.context.hooks.is_empty() {
            None
        } else if !self.training.is_on() {
            Some(0.0)
        } else {
            self.maskless.then_some(self.probability)
        }
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
