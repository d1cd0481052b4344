//! A causal language model: a body with a head to its vocabulary.

use std::borrow::Borrow;

use brigade_nn::{Embedding, LayerGroups, Module, ParamPath, TensorParallelPlan};
use brigade_sharding::TensorPlan;
use brigade_torch::Result;
use tch::Tensor;

use super::head::LanguageHead;
use super::loss::{TokenLoss, shifted};
use super::{CausalModel, KeyValueCache, Tokens, Transformer};

/// A transformer whose last hidden numbers a language head takes: [`Gpt2`](crate::Gpt2), [`Llama`](crate::Llama), or
/// one's own.
pub trait CausalBody: Transformer + LayerGroups {
    /// transformers' name of the model with its head.
    const LANGUAGE_MODEL: &'static str;

    /// Computes the normalised output of the last layer for the tokens that follow those in the cache; `seen` gets
    /// the input of each layer.
    ///
    /// # Errors
    /// libtorch's; ids and masks of other shapes; more tokens than positions.
    fn run(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor>;

    /// Returns the shape `[vocabulary, width]` of the head's weight.
    fn head_shape(&self) -> [i64; 2];

    /// Returns the standard deviation of the head's first weight.
    fn initializer_range(&self) -> f64;

    /// Returns the embedding where the head has its weight.
    fn tied_embedding(&self) -> Option<&Embedding>;
}

/// A language model: from [`Tokens`] to logits `[batch, tokens, vocabulary]` of the next token.
///
/// [`Gpt2LmHead`](crate::Gpt2LmHead) and [`LlamaForCausalLm`](crate::LlamaForCausalLm) are its kinds. Names, first
/// values (for a seed) and outputs are those of transformers.
#[derive(Debug)]
pub struct CausalLm<B> {
    body: B,
    lm_head: LanguageHead,
}

impl<B: CausalBody> CausalLm<B> {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: &B::Options) -> Self {
        let path = path.borrow();
        let body = B::build(&(path / B::BODY), options);
        let deviation = body.initializer_range();
        let lm_head = LanguageHead::new(
            &(path / "lm_head"),
            body.head_shape(),
            deviation,
            body.tied_embedding(),
        );
        Self { body, lm_head }
    }

    /// Returns the body.
    #[must_use]
    pub fn body(&self) -> &B {
        &self.body
    }

    /// Computes the hidden numbers `[batch, tokens, width]` that the head takes.
    ///
    /// # Errors
    /// Those of the forward.
    pub fn hidden<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<Tensor> {
        self.body.run(tokens.into(), None, None)
    }

    /// Computes the loss of labels `[batch, tokens]`, mostly the ids with [`crate::IGNORED_LABEL`] at padding:
    /// as [`crate::causal_lm_loss`] of the logits, without having all of them.
    ///
    /// # Errors
    /// Those of the forward; labels that are no tokens.
    pub fn loss<'t>(
        &self,
        tokens: impl Into<Tokens<'t>>,
        labels: &Tensor,
        smoothing: f64,
    ) -> Result<TokenLoss> {
        let hidden = self.hidden(tokens)?;
        self.lm_head.loss(&hidden, &shifted(labels)?, smoothing)
    }

    /// Computes the logits of tokens that follow those in the cache, and adds them to it.
    ///
    /// # Errors
    /// Those of the forward; of GPT-2 more tokens than positions.
    pub fn forward_cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.lm_head.forward(&self.body.run(tokens, Some(cache), None)?)
    }
}

impl<'t, I: Into<Tokens<'t>>, B: CausalBody> Module<I> for CausalLm<B> {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens)?)
    }
}

impl<B: CausalBody> CausalModel for CausalLm<B> {
    type State = KeyValueCache;

    fn start(&self, tokens: i64) -> KeyValueCache {
        KeyValueCache::with_room(tokens)
    }

    fn next_logits(&self, tokens: Tokens<'_>, state: &mut KeyValueCache) -> Result<Tensor> {
        self.lm_head.last(&self.body.run(tokens, Some(state), None)?)
    }
}

impl<B: CausalBody> LayerGroups for CausalLm<B> {
    /// The embeddings, which the head may share, each layer, and the last normalisation with the head.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        self.lm_head.with_groups(self.body.layer_groups())
    }
}

impl<B: CausalBody + TensorParallelPlan> TensorParallelPlan for CausalLm<B> {
    /// The body's, and the head by its vocabulary.
    fn tensor_plan() -> TensorPlan {
        B::tensor_plan().and(TensorPlan::new().vocabulary("*lm_head.weight").optional())
    }
}

impl<B: CausalBody> Transformer for CausalLm<B> {
    type Options = B::Options;

    const ARCHITECTURE: &'static str = B::LANGUAGE_MODEL;
    const BODY: &'static str = B::BODY;
    const EMBEDDING: &'static str = B::EMBEDDING;

    fn build(path: &ParamPath<'_>, options: &B::Options) -> Self {
        Self::new(path, options)
    }

    fn options(&self) -> &B::Options {
        self.body.options()
    }
}
