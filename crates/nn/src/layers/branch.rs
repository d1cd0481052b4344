//! Branches of residual connections.

use brigade_torch::{ResidualBranch, ResidualNorm, Result, dropout};
use tch::Tensor;

use crate::Module;
use crate::layer_context::{LayerContext, on};

/// A branch of a residual connection, such as the output of an attention layer, that is still to be added to the stream:
/// by the next normalisation in the same pass ([`crate::LayerNorm::forward_residual`],
/// [`crate::RmsNorm::forward_residual`]), or by [`Branch::add_to`]. Created by [`crate::Dropout::branch`] and
/// [`crate::Linear::forward_branch`], or by [`Branch::new`] without dropout.
#[derive(Debug)]
pub struct Branch {
    /// Values, of the stream's shape.
    pub values: Tensor,
    /// Bias `[width]` that is still to be added to the values, in front of dropout.
    pub bias: Option<Tensor>,
    /// Probability of the dropout that is still to be applied to the values, as [`brigade_torch::dropout`] does.
    pub dropout: f64,
    /// Seed of the dropout, if the model draws the seeds of all layers at once
    /// ([`brigade_torch::norm_residual_seeds`]).
    pub seed: Option<Tensor>,
}

impl Branch {
    /// Creates a branch without dropout.
    #[must_use]
    pub fn new(values: Tensor) -> Self {
        Self { values, bias: None, dropout: 0.0, seed: None }
    }

    /// Returns the stream with the branch added to it.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if shapes do not match.
    pub fn add_to(&self, stream: &Tensor) -> Result<Tensor> {
        let mut values = on(&self.values, stream.device())?;
        if let Some(bias) = &self.bias {
            let bias = on(bias, stream.device())?.f_to_kind(values.f_kind()?)?;
            values = values.f_add(&bias)?;
        }
        if self.dropout == 0.0 {
            return Ok(values.f_add(stream)?);
        }
        Ok(dropout(&values, self.dropout, None)?.f_add(stream)?)
    }
}

/// Adds the branch and normalises by `fused`, unless layers have hooks, which change outputs: then by the layer's forward.
pub(super) fn add_and_normalize(
    context: &LayerContext,
    norm: &impl for<'a> Module<&'a Tensor, Output = Tensor>,
    stream: &Tensor,
    branch: Option<&Branch>,
    post: bool,
    fused: impl FnOnce(&Tensor, Option<ResidualBranch<'_>>) -> Result<ResidualNorm>,
) -> Result<ResidualNorm> {
    if !context.hooks.is_empty() {
        let sum = branch.map_or_else(|| Ok(stream.shallow_clone()), |it| it.add_to(stream))?;
        let normed = norm.forward(&sum)?;
        let stream = if post { normed.shallow_clone() } else { sum };
        return Ok(ResidualNorm { stream, normed });
    }
    context.weights.run(stream, |stream| {
        let values = branch.map(|it| on(&it.values, stream.device())).transpose()?;
        let bias = branch.and_then(|it| it.bias.as_ref());
        let bias = bias.map(|it| on(it, stream.device())).transpose()?;
        let branch = branch.zip(values.as_ref()).map(|(branch, values)| ResidualBranch {
            bias: bias.as_ref(),
            dropout: branch.dropout,
            // Of another device, it is not worth a copy.
            seed: branch.seed.as_ref().filter(|seed| seed.device() == stream.device()),
            ..ResidualBranch::new(values)
        });
        context.check_border(fused(stream, branch), stream)
    })
}
