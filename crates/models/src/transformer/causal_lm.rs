//! Causal language models: a body with a head to its vocabulary.

use std::borrow::Borrow;

use brigade_checkpoint::WeightsReader;
use brigade_nn::{
    ContextPart, ContextRegion, Embedding, LayerGroups, Module, ParamPath, TensorParallelPlan,
};
use brigade_sharding::TensorPlan;
use brigade_torch::Result;
use tch::Tensor;

use super::head::LanguageHead;
use super::loss::{IGNORED_LABEL, TokenLoss, shifted};
use super::{
    CacheKind, CausalModel, KeyValueCache, RecordedStep, Tokens, Transformer, VocabularyLogits,
};

/// A transformer whose last hidden states are the input of a language model's head: [`Gpt2`](crate::Gpt2),
/// [`Llama`](crate::Llama), or a user-defined one.
pub trait CausalBody: Transformer + LayerGroups {
    /// Name of the model with its head in transformers.
    const LANGUAGE_MODEL: &'static str;

    /// Computes the normalised output of the last layer for the tokens that follow those in the cache. `seen` is called
    /// with the input of each layer.
    ///
    /// # Errors
    /// Fails if the shapes of ids and masks do not fit, and for more tokens than positions. Also returns errors of
    /// libtorch.
    fn run(
        &self,
        tokens: Tokens<'_>,
        cache: Option<&mut KeyValueCache>,
        seen: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor>;

    /// Computes the normalised output of the last layer for this rank's tokens, and returns it with their positions.
    /// Defaults to all tokens, on every rank.
    ///
    /// # Errors
    /// Returns the errors of [`CausalBody::run`].
    fn run_part(&self, tokens: Tokens<'_>) -> Result<(Tensor, ContextPart)> {
        let hidden = self.run(tokens, None, None)?;
        let length = hidden.size().get(1).copied().unwrap_or(0);
        Ok((hidden, ContextRegion::default().part(length, true)))
    }

    /// Runs a part of the body like [`CausalBody::run_part`], and returns all that the head takes from it. Defaults to the
    /// result of [`CausalBody::run_part`], without an auxiliary loss or a tied weight.
    ///
    /// # Errors
    /// Returns the errors of [`CausalBody::run_part`].
    fn run_for_head(&self, tokens: Tokens<'_>) -> Result<HeadInput> {
        let (hidden, part) = self.run_part(tokens)?;
        Ok(HeadInput { hidden, part, loss: None, tied_weight: None })
    }

    /// Returns the maximum number of positions, if the body has weights for each position. Defaults to `None`.
    fn max_tokens(&self) -> Option<i64> {
        None
    }

    /// Returns the shape `[vocabulary, width]` of the head's weight.
    fn head_shape(&self) -> [i64; 2];

    /// Returns the standard deviation of the head's initial weights.
    fn initializer_range(&self) -> f64;

    /// Returns the embedding to which the head's weight is tied, or `None` if it is not tied.
    fn tied_embedding(&self) -> Option<&Embedding>;
}

/// Input of a language model's head: the output of its body.
#[derive(Debug)]
pub struct HeadInput {
    /// Normalised output of the last layer for this rank's tokens, `[batch, tokens, width]`.
    pub hidden: Tensor,
    /// Positions of this rank's tokens.
    pub part: ContextPart,
    /// Auxiliary loss that is added to the mean loss of labels, such as that of routers.
    pub loss: Option<Tensor>,
    /// Weight of a head that is tied to the embedding, as [`Embedding::forward_tied`] returned it. `None` makes the head
    /// use the weight itself: the same gradient, in one more pass over it.
    pub tied_weight: Option<Tensor>,
}

/// A language model: from [`Tokens`] to logits `[batch, tokens, vocabulary]` of the next token.
///
/// Its aliases are [`Gpt2LmHead`](crate::Gpt2LmHead), [`LlamaForCausalLm`](crate::LlamaForCausalLm) and
/// [`MixtralForCausalLm`](crate::MixtralForCausalLm). Names, initial values (for a seed) and outputs are those of
/// transformers.
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

    /// Returns the transformer body, without its head.
    #[must_use]
    pub fn body(&self) -> &B {
        &self.body
    }

    /// Computes the hidden states `[batch, tokens, width]` that are the head's input.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn hidden<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<Tensor> {
        self.body.run(tokens.into(), None, None)
    }

    /// Computes logits `[batch, tokens, vocabulary]`. If the vocabulary is divided over ranks, they are those of this
    /// rank's part, for predictions and metrics without the logits of the whole vocabulary.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn vocabulary_logits<'t>(&self, tokens: impl Into<Tokens<'t>>) -> Result<VocabularyLogits> {
        let HeadInput { hidden, part, tied_weight, .. } = self.body.run_for_head(tokens.into())?;
        self.lm_head.logits(&part.gather(&hidden, 1)?, tied_weight.as_ref())
    }

    /// Computes the loss for labels `[batch, tokens]`, usually the ids with [`crate::IGNORED_LABEL`] at padding. It is
    /// that of [`crate::causal_lm_loss`], without storing all logits. An auxiliary loss of the body
    /// ([`HeadInput::loss`]) is multiplied by the number of labels and added to the sum, so that it is
    /// added to the mean.
    ///
    /// # Errors
    /// Returns the errors of the forward, and fails for labels that are not in the vocabulary.
    pub fn loss<'t>(
        &self,
        tokens: impl Into<Tokens<'t>>,
        labels: &Tensor,
        smoothing: f64,
    ) -> Result<TokenLoss> {
        let HeadInput { hidden, part, loss: own, tied_weight } =
            self.body.run_for_head(tokens.into())?;
        let labels = part.take_or(&shifted(labels)?, 1, IGNORED_LABEL)?;
        let mut loss = self.lm_head.loss(&hidden, tied_weight.as_ref(), &labels, smoothing)?;
        if let Some(own) = own {
            loss.sum = loss.sum.f_add(&own.f_mul(&loss.count)?.f_to_kind(loss.sum.f_kind()?)?)?;
        }
        loss.over(&part)
    }

    /// Computes the logits of tokens that follow those in the cache, and adds their keys and values to the cache.
    ///
    /// # Errors
    /// Returns the errors of the forward; for GPT-2 also an error for more tokens than positions.
    pub fn forward_cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.lm_head.forward(&self.body.run(tokens, Some(cache), None)?, None)
    }
}

impl<'t, I: Into<Tokens<'t>>, B: CausalBody> Module<I> for CausalLm<B> {
    type Output = Tensor;

    fn forward(&self, tokens: I) -> Result<Tensor> {
        let HeadInput { hidden, part, tied_weight, .. } = self.body.run_for_head(tokens.into())?;
        part.gather(&self.lm_head.forward(&hidden, tied_weight.as_ref())?, 1)
    }
}

impl<B: CausalBody> CausalModel for CausalLm<B> {
    type State = KeyValueCache;

    fn start(&self, tokens: i64) -> KeyValueCache {
        KeyValueCache::with_room(tokens)
    }

    fn start_as(&self, tokens: i64, kind: CacheKind) -> Result<KeyValueCache> {
        Ok(KeyValueCache::with_room(tokens).kind(kind))
    }

    fn max_tokens(&self) -> Option<i64> {
        self.body.max_tokens()
    }

    fn next_logits(&self, tokens: Tokens<'_>, state: &mut KeyValueCache) -> Result<Tensor> {
        self.next_vocabulary_logits(tokens, state)?.whole()
    }

    fn next_vocabulary_logits(
        &self,
        tokens: Tokens<'_>,
        state: &mut KeyValueCache,
    ) -> Result<VocabularyLogits> {
        self.lm_head.last(&self.body.run(tokens, Some(state), None)?)
    }

    fn begin_steps(
        &self,
        state: &mut KeyValueCache,
        step: &RecordedStep<'_>,
    ) -> std::result::Result<(), String> {
        if !step.is_checked() {
            return Err(
                "its weights may move: generate with the `Model`, not its module".to_owned()
            );
        }
        state.begin_steps(step.position())
    }

    fn select_rows(&self, state: &mut KeyValueCache, rows: &Tensor) -> Result<()> {
        state.select_rows(rows)
    }
}

impl<B: CausalBody> LayerGroups for CausalLm<B> {
    /// Groups the parameters: the embeddings, to which the head may be tied, each layer, and the last normalisation
    /// with the head.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        self.lm_head.with_groups(self.body.layer_groups())
    }
}

impl<B: CausalBody + TensorParallelPlan> TensorParallelPlan for CausalLm<B> {
    /// Returns the body's plan, with the head divided by its vocabulary.
    fn tensor_plan() -> TensorPlan {
        B::tensor_plan().and(TensorPlan::new().vocabulary("*lm_head.weight").optional())
    }
}

impl<B: CausalBody> Transformer for CausalLm<B> {
    type Options = B::Options;

    fn adapt_weights(weights: &mut WeightsReader) -> Result<()> {
        B::adapt_weights(weights)
    }

    fn saved_tensors(name: &str, tensor: &Tensor) -> Result<Vec<(String, Tensor)>> {
        B::saved_tensors(name, tensor)
    }

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
