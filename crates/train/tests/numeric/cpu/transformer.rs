//! A layer of a transformer, for the test of reproducible steps and for the benchmarks.

use brigade_nn::{LayerNorm, Linear, Module, ParamPath};
use tch::{Kind, Tensor};

/// Causal attention and an MLP, each behind its normalisation (pre-norm), and the mean over the tokens.
pub(crate) struct Block {
    heads: i64,
    norms: [LayerNorm; 2],
    attention: Linear,
    projection: Linear,
    hidden: Linear,
    output: Linear,
}

impl Block {
    pub(crate) fn new(path: &ParamPath<'_>, width: i64, heads: i64) -> Self {
        Self {
            heads,
            norms: ["norm1", "norm2"].map(|name| LayerNorm::new(path / name, &[width])),
            attention: Linear::new(path / "attention", width, 3 * width),
            projection: Linear::new(path / "projection", width, width),
            hidden: Linear::new(path / "hidden", width, 4 * width),
            output: Linear::new(path / "output", 4 * width, width),
        }
    }
}

impl Module<&Tensor> for Block {
    type Output = Tensor;

    /// `[batch, tokens, width]` to `[batch, width]`.
    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        let projected = self.attention.forward(&self.norms[0].forward(input)?)?;
        let parts = projected.unflatten(-1, [3, self.heads, -1]).permute([2, 0, 3, 1, 4]);
        let mixed = Tensor::scaled_dot_product_attention(
            &parts.get(0),
            &parts.get(1),
            &parts.get(2),
            None::<Tensor>,
            0.0,
            true,
            None,
            false,
        );
        let middle = input + self.projection.forward(&mixed.transpose(1, 2).flatten(2, 3))?;
        let hidden = self.hidden.forward(&self.norms[1].forward(&middle)?)?.gelu("none");
        Ok((middle + self.output.forward(&hidden)?).mean_dim(1, false, None::<Kind>))
    }
}
