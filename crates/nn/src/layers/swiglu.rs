//! Gated feed-forward layer.

use std::borrow::Borrow;

use brigade_torch::{Activation, Result};
use tch::Tensor;

use crate::{Linear, LinearOptions, Module, ParamPath};

/// Gated feed-forward layer ([Shazeer, 2020](https://arxiv.org/abs/2002.05202)), that of Llama: `down(silu(gate(x)) ·
/// up(x))`, from `[…, hidden]` to `[…, hidden]`.
///
/// Parameters, with the names of transformers: `gate_proj.weight` and `up_proj.weight` `[intermediate, hidden]`,
/// `down_proj.weight` `[hidden, intermediate]`, with the initial values of [`Linear`], and their biases if
/// [`SwiGluOptions::bias`] is set. [`SwiGluOptions::activation`] makes GEGLU or another gated layer of it.
///
/// On a CPU, and on GPUs with Brigade's kernels, the activation and its product are computed in one pass, on GPUs with the
/// biases, and so are their gradients; for the backward only `gate(x)` and `up(x)` are kept ([`Linear::forward_gated`]).
///
/// ```
/// use brigade_nn::{Model, Module, SwiGlu};
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|path| SwiGlu::new(path, 8, 24))?;
/// let input = Tensor::randn([2, 5, 8], (Kind::Float, model.device()));
/// let output = model.forward(&input)?;
/// assert_eq!(output.size(), [2, 5, 8]);
///
/// let [gate, up, down] = model.module().linear();
/// let inner = gate.forward(&input)?.silu() * up.forward(&input)?;
/// assert!(output.allclose(&down.forward(&inner)?, 1e-5, 1e-6, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// With tensor parallelism ([`crate::ModelBuilder::tensor_parallel`]) `gate_proj` and `up_proj` may be divided by output
/// features, and `down_proj` by input features: a forward then has one sum over the ranks.
#[derive(Debug)]
pub struct SwiGlu {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

/// Options of [`SwiGlu`].
#[derive(Debug, Clone, Copy)]
pub struct SwiGluOptions {
    /// Adds a bias in each of the linear layers. Defaults to `false`.
    pub bias: bool,
    /// Activation of the gate: [`Activation::Gelu`] for GEGLU. Defaults to [`Activation::Silu`].
    pub activation: Activation,
}

impl Default for SwiGluOptions {
    fn default() -> Self {
        Self { bias: false, activation: Activation::Silu }
    }
}

impl SwiGlu {
    /// Registers the weights at the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, hidden: i64, intermediate: i64) -> Self {
        Self::with_options(path, hidden, intermediate, SwiGluOptions::default())
    }

    /// Registers the parameters at the path.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        hidden: i64,
        intermediate: i64,
        options: SwiGluOptions,
    ) -> Self {
        let path = path.borrow();
        let SwiGluOptions { bias, activation } = options;
        let linear = |name: &str, inputs, outputs| {
            Linear::with_options(path / name, inputs, outputs, LinearOptions { bias })
        };
        Self {
            gate_proj: linear("gate_proj", hidden, intermediate),
            up_proj: linear("up_proj", hidden, intermediate),
            down_proj: linear("down_proj", intermediate, hidden),
            activation,
        }
    }

    /// Returns the linear layers: `gate_proj`, `up_proj` and `down_proj`.
    #[must_use]
    pub fn linear(&self) -> [&Linear; 3] {
        [&self.gate_proj, &self.up_proj, &self.down_proj]
    }
}

impl Module<&Tensor> for SwiGlu {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        // Once for both projections, which send one message for its gradient.
        let input = match self.gate_proj.divided() {
            Some(divided) => divided.region.enter(input)?,
            None => input.shallow_clone(),
        };
        let gate = self.gate_proj.forward_entered_pre_activation(&input)?;
        let up = self.up_proj.forward_entered_pre_activation(&input)?;
        self.down_proj.forward_gated(&gate, &up, self.activation)
    }
}
