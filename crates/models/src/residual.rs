//! Hidden states between blocks.

use brigade_nn::{Branch, LayerNorm, RmsNorm};
use brigade_torch::{ResidualNorm, Result};
use tch::Tensor;

/// Hidden states `[batch, tokens, width]` between blocks: a residual stream, and what the last block has left to the next
/// one, whose first normalisation adds it in the same pass.
#[derive(Debug)]
pub(crate) struct Residual {
    pub(crate) stream: Tensor,
    /// Branch that is still to be added to the stream.
    pub(crate) branch: Option<Branch>,
    /// Another form of the stream, of which the next layer computes products: on a GPU under autocast in 16 bits.
    pub(crate) normed: Option<Tensor>,
}

impl Residual {
    pub(crate) fn new(stream: Tensor) -> Self {
        Self { stream, branch: None, normed: None }
    }

    /// Creates hidden states to which a branch is still to be added.
    pub(crate) fn with_branch(stream: Tensor, branch: Branch) -> Self {
        Self { stream, branch: Some(branch), normed: None }
    }

    /// Returns the hidden states as one tensor.
    pub(crate) fn join(self) -> Result<Tensor> {
        self.branch.map_or(Ok(self.stream.shallow_clone()), |branch| branch.add_to(&self.stream))
    }

    /// Returns the input of the next layer.
    pub(crate) fn input(&self) -> &Tensor {
        self.normed.as_ref().unwrap_or(&self.stream)
    }

    /// Adds the branch and normalises.
    pub(crate) fn layer_norm(&self, norm: &LayerNorm) -> Result<ResidualNorm> {
        norm.forward_residual(&self.stream, self.branch.as_ref())
    }

    /// Adds the branch and normalises by RMSNorm.
    pub(crate) fn rms_norm(&self, norm: &RmsNorm) -> Result<ResidualNorm> {
        norm.forward_residual(&self.stream, self.branch.as_ref())
    }
}
