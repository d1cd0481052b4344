//! Texts that a causal model writes, token by token.

mod sampling;

use brigade_nn::Model;
use brigade_torch::{Error, Result};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;
use tch::{Kind, Tensor};

use super::{Tokens, VocabularyLogits};
use sampling::Before;

/// A model that tells the next token from those before it: what [`GenerationOptions`] generate with.
///
/// [`crate::Gpt2LmHead`] and [`crate::LlamaForCausalLm`] are such models. One's own keeps in its state what it needs
/// of the tokens so far: keys and values, a hidden state of an LSTM, or the tokens themselves.
///
/// ```
/// use brigade_models::{CausalModel, GenerationOptions, Tokens};
/// use tch::{Device, Kind, Tensor};
/// use brigade_torch::Result;
///
/// /// Counts upwards, modulo 10.
/// struct Counter;
///
/// impl CausalModel for Counter {
///     type State = ();
///
///     fn start(&self, _tokens: i64) {}
///
///     fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> Result<Tensor> {
///         let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
///         Ok(next.f_one_hot(10)?.f_to_kind(Kind::Float)?)
///     }
/// }
///
/// let options = GenerationOptions { max_new_tokens: 4, ..Default::default() };
/// let ids = Tensor::from_slice(&[7i64]).view([1, 1]);
/// let written = options.generate(&Counter, &ids, None)?;
/// assert_eq!(written, Tensor::from_slice(&[7i64, 8, 9, 0, 1]).view([1, 5]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait CausalModel {
    /// What it keeps of the tokens so far.
    type State;

    /// Returns the state before the first token, with room for this many tokens in all.
    fn start(&self, tokens: i64) -> Self::State;

    /// Computes the logits `[batch, vocabulary]` of the token after `tokens`, which follow those that the state
    /// knows. Where there is padding, the attention mask covers all tokens so far, and positions do not count
    /// padding.
    ///
    /// # Errors
    /// The model's own.
    fn next_logits(&self, tokens: Tokens<'_>, state: &mut Self::State) -> Result<Tensor>;

    /// Computes the same logits, of a vocabulary that ranks divide this rank's. Defaults to [`CausalModel::next_logits`].
    ///
    /// # Errors
    /// The model's own.
    fn next_vocabulary_logits(
        &self,
        tokens: Tokens<'_>,
        state: &mut Self::State,
    ) -> Result<VocabularyLogits> {
        Ok(self.next_logits(tokens, state)?.into())
    }
}

impl<M: CausalModel> CausalModel for Model<M> {
    type State = M::State;

    fn start(&self, tokens: i64) -> M::State {
        self.module().start(tokens)
    }

    fn next_logits(&self, tokens: Tokens<'_>, state: &mut M::State) -> Result<Tensor> {
        self.run(|module| module.next_logits(tokens, state))
    }

    fn next_vocabulary_logits(
        &self,
        tokens: Tokens<'_>,
        state: &mut M::State,
    ) -> Result<VocabularyLogits> {
        self.run(|module| module.next_vocabulary_logits(tokens, state))
    }
}

/// A causal model that is a closure, which computes the logits `[batch, vocabulary]` of the next token from all tokens so far.
/// Nothing is kept between the tokens: each costs a forward over the whole text. For models whose forward is more than a call,
/// such as one whose stages are on several ranks.
///
/// ```
/// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options, UncachedModel};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// model.eval();
/// let uncached = UncachedModel::new(|tokens| Ok(model.forward(tokens)?.f_select(1, -1)?));
/// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
/// let greedy = GenerationOptions::default();
/// assert_eq!(greedy.generate(&uncached, &ids, None)?, greedy.generate(&model, &ids, None)?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct UncachedModel<F>(F);

/// The tokens that an [`UncachedModel`] has seen.
#[derive(Debug, Default)]
pub struct SeenTokens {
    ids: Option<Tensor>,
    positions: Option<Tensor>,
}

impl<F: Fn(Tokens<'_>) -> Result<Tensor>> UncachedModel<F> {
    /// Makes the model of a closure.
    pub fn new(next_logits: F) -> Self {
        Self(next_logits)
    }
}

impl<F: Fn(Tokens<'_>) -> Result<Tensor>> CausalModel for UncachedModel<F> {
    type State = SeenTokens;

    fn start(&self, _tokens: i64) -> SeenTokens {
        SeenTokens::default()
    }

    fn next_logits(&self, tokens: Tokens<'_>, seen: &mut SeenTokens) -> Result<Tensor> {
        let behind = |seen: Option<&Tensor>, more: &Tensor| match seen {
            Some(seen) => Tensor::f_cat(&[seen, more], 1),
            None => Ok(more.shallow_clone()),
        };
        let ids = behind(seen.ids.as_ref(), tokens.ids)?;
        let positions = tokens.position_ids.map(|more| behind(seen.positions.as_ref(), more));
        *seen = SeenTokens { ids: Some(ids.shallow_clone()), positions: positions.transpose()? };
        (self.0)(Tokens { position_ids: seen.positions.as_ref(), ids: &ids, ..tokens })
    }
}

impl<F> std::fmt::Debug for UncachedModel<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UncachedModel").finish_non_exhaustive()
    }
}

/// How tokens are chosen, and when to stop; under the names of transformers' `GenerationConfig`.
///
/// Steps are applied in transformers' order: the penalty of repetitions, temperature, `top_k`, `top_p`, `min_p`. A
/// model in training drops as ever: call [`Model::eval`] before.
///
/// ```
/// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// model.eval();
/// let sampled = GenerationOptions {
///     do_sample: true, temperature: 0.8, top_k: Some(20), seed: Some(3), max_new_tokens: 5,
///     ..Default::default()
/// };
/// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
/// let first = sampled.generate(&model, &ids, None)?;
/// assert_eq!(first.size(), [1, 7]);
/// assert_eq!(first, sampled.generate(&model, &ids, None)?);
/// // One by one:
/// for tokens in sampled.stream(&model, &ids, None)? {
///     assert_eq!(tokens?.len(), 1);
/// }
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationOptions {
    /// The most tokens to write; 20.
    pub max_new_tokens: i64,
    /// The longest text with its beginning, where that is shorter; no limit by default.
    pub max_length: Option<i64>,
    /// Draws tokens by their probabilities; otherwise, by default, the most probable one is taken.
    pub do_sample: bool,
    /// Divides logits: below 1 probable tokens become more probable; 1.
    pub temperature: f64,
    /// Draws among this many tokens, the most probable ones.
    pub top_k: Option<i64>,
    /// Draws among the fewest tokens that have this probability together; 1.
    pub top_p: f64,
    /// Draws among tokens of at least this part of the highest probability.
    pub min_p: Option<f64>,
    /// Divides positive logits of tokens that the text has, and multiplies negative ones; 1.
    pub repetition_penalty: f64,
    /// Tokens that end a text.
    pub eos_token_id: Vec<i64>,
    /// What follows the end while other texts of the batch go on; the first of `eos_token_id` by default.
    pub pad_token_id: Option<i64>,
    /// Of the draws. Without, it is drawn from libtorch's generator (`tch::manual_seed`).
    pub seed: Option<u64>,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 20,
            max_length: None,
            do_sample: false,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: None,
            repetition_penalty: 1.0,
            eos_token_id: Vec::new(),
            pad_token_id: None,
            seed: None,
        }
    }
}

impl GenerationOptions {
    /// Writes on from the ids `[batch, tokens]`, and gives them with what was written, `[batch, tokens + new]`. Texts
    /// of unequal lengths are padded on the left, with an attention mask `[batch, tokens]` of 0 there.
    ///
    /// # Errors
    /// As [`GenerationOptions::stream`], and the model's.
    pub fn generate<M: CausalModel>(
        &self,
        model: &M,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mut tokens = self.stream(model, ids, attention_mask)?;
        for step in &mut tokens {
            step?;
        }
        Ok(tokens.into_ids())
    }

    /// Writes on from the ids `[batch, tokens]` as the iterator is asked: each item is the next token of each text.
    ///
    /// # Errors
    /// Options out of their ranges, no ids, or padding that is not on the left.
    pub fn stream<'m, M: CausalModel>(
        &self,
        model: &'m M,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<GeneratedTokens<'m, M>> {
        self.check()?;
        let &[batch, length] = ids.size().as_slice() else {
            return Err(refused(format!("expected ids [batch, tokens], found {:?}", ids.size())));
        };
        if batch < 1 || length < 1 {
            return Err(refused(format!("there is no token to go on from: ids {:?}", ids.size())));
        }
        let mask =
            attention_mask.map(|mask| left_padded(mask, batch, length)).transpose()?.flatten();
        let room = self.max_length.map_or(i64::MAX, |longest| (longest - length).max(0));
        let left = self.max_new_tokens.min(room);
        let seed = match self.seed {
            Some(seed) => seed,
            None => Tensor::f_randint(i64::MAX, [1], (Kind::Int64, tch::Device::Cpu))?
                .f_int64_value(&[0])?
                .unsigned_abs(),
        };
        let positions = mask.as_ref().map(positions).transpose()?;
        Ok(GeneratedTokens {
            model,
            state: model.start(length + left),
            options: self.clone(),
            rng: Pcg64::seed_from_u64(seed),
            ids: ids.shallow_clone(),
            next: Next { ids: ids.shallow_clone(), positions },
            mask,
            ended: vec![false; usize::try_from(batch).map_err(Error::custom)?],
            left,
        })
    }

    fn check(&self) -> Result<()> {
        let sampled = self.do_sample;
        let problem = if self.max_new_tokens < 0 {
            Some(format!("max_new_tokens {} is negative", self.max_new_tokens))
        } else if sampled && (self.temperature <= 0.0 || !self.temperature.is_finite()) {
            Some(format!(
                "temperature {} is not positive; do_sample: false takes the most probable token",
                self.temperature
            ))
        } else if sampled && self.top_k.is_some_and(|k| k < 1) {
            Some(format!("top_k {:?} is less than 1", self.top_k))
        } else if sampled && !(0.0..=1.0).contains(&self.top_p) {
            Some(format!("top_p {} is not in [0, 1]", self.top_p))
        } else if sampled && self.min_p.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
            Some(format!("min_p {:?} is not in [0, 1]", self.min_p))
        } else if self.repetition_penalty <= 0.0 || !self.repetition_penalty.is_finite() {
            Some(format!("repetition_penalty {} is not positive", self.repetition_penalty))
        } else {
            None
        };
        problem.map_or(Ok(()), |problem| Err(refused(problem)))
    }
}

/// Tokens as they are written: an iterator over the next token of each text of the batch.
///
/// It ends when all texts have ended or are as long as they may be, and after an error.
pub struct GeneratedTokens<'m, M: CausalModel> {
    model: &'m M,
    state: M::State,
    options: GenerationOptions,
    rng: Pcg64,
    /// All so far.
    ids: Tensor,
    /// What the model has not seen yet.
    next: Next,
    /// `[batch, tokens so far]`, where a text is padded.
    mask: Option<Tensor>,
    ended: Vec<bool>,
    left: i64,
}

/// Input of the next step.
#[derive(Debug)]
struct Next {
    ids: Tensor,
    positions: Option<Tensor>,
}

impl<M: CausalModel> GeneratedTokens<'_, M> {
    /// Returns the ids `[batch, tokens]` so far, those of the beginning included.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// As [`GeneratedTokens::ids`], by value.
    pub fn into_ids(self) -> Tensor {
        self.ids
    }

    fn step(&mut self) -> Result<Vec<i64>> {
        let tokens = Tokens {
            attention_mask: self.mask.as_ref(),
            position_ids: self.next.positions.as_ref(),
            ..Tokens::from(&self.next.ids)
        };
        let logits = self.model.next_vocabulary_logits(tokens, &mut self.state)?;
        let before = Before { ids: &self.ids, mask: self.mask.as_ref() };
        let mut chosen = sampling::choose(&logits, before, &self.options, &mut self.rng)?;
        if chosen.len() != self.ended.len() {
            return Err(refused(format!("the model gave logits {:?}", logits.whole()?.size())));
        }
        let ends = &self.options.eos_token_id;
        let pad = self.options.pad_token_id.or_else(|| ends.first().copied()).unwrap_or(0);
        for (token, ended) in chosen.iter_mut().zip(&mut self.ended) {
            if *ended { *token = pad } else { *ended = ends.contains(token) }
        }
        let device = self.ids.device();
        let column = Tensor::f_from_slice(&chosen)?.f_unsqueeze(1)?.f_to_device(device)?;
        self.ids = Tensor::f_cat(&[&self.ids, &column], 1)?;
        if let Some(mask) = &self.mask {
            self.mask =
                Some(Tensor::f_cat(&[mask, &column.f_ones_like()?.f_to_kind(mask.kind())?], 1)?);
        }
        let positions = self.next.positions.as_ref().map(|positions| {
            let last = positions.f_narrow(1, positions.size()[1] - 1, 1)?;
            last.f_add_scalar(1)
        });
        self.next = Next { ids: column, positions: positions.transpose()? };
        self.left = if self.ended.iter().all(|&ended| ended) { 0 } else { self.left - 1 };
        Ok(chosen)
    }
}

impl<M: CausalModel> Iterator for GeneratedTokens<'_, M> {
    type Item = Result<Vec<i64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left < 1 {
            return None;
        }
        let step = tch::no_grad(|| self.step());
        if step.is_err() {
            self.left = 0;
        }
        Some(step)
    }
}

impl<M: CausalModel> std::fmt::Debug for GeneratedTokens<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GeneratedTokens")
            .field("ids", &self.ids)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

/// The mask, where it hides something, after a check that the last tokens are seen.
fn left_padded(mask: &Tensor, batch: i64, length: i64) -> Result<Option<Tensor>> {
    if mask.size() != [batch, length] {
        return Err(refused(format!(
            "for ids [{batch}, {length}] the attention mask has the same shape, found {:?}",
            mask.size()
        )));
    }
    let seen = mask.f_ne(0)?;
    if seen.f_all()?.f_int64_value(&[])? != 0 {
        return Ok(None);
    }
    let (earlier, later) = (seen.f_narrow(1, 0, length - 1)?, seen.f_narrow(1, 1, length - 1)?);
    let grows = earlier.f_le_tensor(&later)?.f_all()?.f_int64_value(&[])? != 0;
    if !grows || seen.f_select(1, -1)?.f_all()?.f_int64_value(&[])? == 0 {
        return Err(refused(
            "texts that are written on from are padded on the left: the attention mask has a 0 after a 1, \
             or at the end",
        ));
    }
    Ok(Some(seen.f_to_kind(Kind::Int64)?))
}

/// Positions that do not count padding.
fn positions(mask: &Tensor) -> Result<Tensor> {
    Ok(mask.f_cumsum(1, Kind::Int64)?.f_sub_scalar(1)?.f_clamp_min(0)?)
}

fn refused(problem: impl std::fmt::Display) -> Error {
    Error::invalid_argument(format!("generation: {problem}"))
}
