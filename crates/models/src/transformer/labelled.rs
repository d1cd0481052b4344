//! Language models whose forward returns the loss.

use brigade_nn::Module;
use brigade_torch::{Error, Result, TensorTree, TreeSpec};
use tch::Tensor;

use super::bert::BertForMaskedLm;
use super::causal_lm::{CausalBody, CausalLm};
use super::loss::TokenLoss;
use super::tokens::Tokens;

/// Tokens with their labels: the input of a language model whose forward returns the loss, like that of transformers
/// with `labels=`. The logits of all tokens are never in memory together.
///
/// A prepared model averages only the gradients of its own forward over the ranks. [`CausalLm::loss`] and similar
/// methods of the inner module bypass that forward, so that each rank would keep its own gradients.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options, Labelled};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_positions: 8, n_embd: 16, n_layer: 1, n_head: 2, ..Default::default() };
/// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// let ids = Tensor::from_slice(&[7i64, 3, 9, 4]).view([1, 4]);
/// let loss = model.forward(Labelled::new(&ids, &ids))?;
/// assert_eq!(loss.count.int64_value(&[]), 3);
/// loss.mean()?.backward();
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Labelled<'a> {
    /// Input tokens of the model.
    pub tokens: Tokens<'a>,
    /// Labels `[batch, tokens]` of int64, with [`crate::IGNORED_LABEL`] for positions without a label. For a causal
    /// model usually the ids themselves: each position predicts the label of the next.
    pub labels: &'a Tensor,
    /// Label smoothing: the share of each label that is spread over all tokens. Defaults to 0.
    pub smoothing: f64,
}

impl<'a> Labelled<'a> {
    /// Creates an input from tokens and labels, without label smoothing.
    pub fn new(tokens: impl Into<Tokens<'a>>, labels: &'a Tensor) -> Self {
        Self { tokens: tokens.into(), labels, smoothing: 0.0 }
    }
}

impl<B: CausalBody> Module<Labelled<'_>> for CausalLm<B> {
    type Output = TokenLoss;

    fn forward(&self, labelled: Labelled<'_>) -> Result<TokenLoss> {
        self.loss(labelled.tokens, labelled.labels, labelled.smoothing)
    }
}

impl Module<Labelled<'_>> for BertForMaskedLm {
    type Output = TokenLoss;

    fn forward(&self, labelled: Labelled<'_>) -> Result<TokenLoss> {
        self.loss(labelled.tokens, labelled.labels, labelled.smoothing)
    }
}

impl TensorTree for TokenLoss {
    type Owned = Self;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.sum.visit(f);
        self.count.visit(f);
    }

    fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self { sum: self.sum.try_map(f)?, count: self.count.try_map(f)? })
    }

    fn spec(&self) -> TreeSpec {
        TreeSpec::Tuple(vec![self.sum.spec(), self.count.spec()])
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self, Error> {
        let parts = spec.tuple(2)?;
        let sum = Tensor::from_spec(&parts[0], tensors)?;
        Ok(Self { sum, count: Tensor::from_spec(&parts[1], tensors)? })
    }
}
