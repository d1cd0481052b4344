//! Text generation with causal language models.

mod beam_search;
mod reader;
mod recorded;
mod rules;
mod sampling;
mod staged;
mod text;

use brigade_nn::Model;
use brigade_torch::{Error, Result};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;
use tch::{Device, Kind, Tensor};

pub use self::beam_search::{BeamSearch, Beams, EarlyStopping};
use self::reader::{Prompt, Reader};
pub use self::recorded::RecordedStep;
use self::rules::Before;
pub use self::staged::{NextLogits, StageCaches, StagedModel, StagedTokens};
pub use self::text::GeneratedText;
use self::text::{Decode, StopStrings};
use super::{CacheKind, Tokens, VocabularyLogits};

/// A model that predicts the next token from the tokens before it, for [`GenerationOptions`].
///
/// [`crate::Gpt2LmHead`] and [`crate::LlamaForCausalLm`] implement it. The state of a user-defined model contains what
/// the model needs of earlier tokens: keys and values, the hidden state of an LSTM, or the tokens themselves.
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
    /// Type of the model's state, which represents the tokens so far.
    type State;

    /// Returns the state before the first token, with capacity for `tokens` tokens in total.
    fn start(&self, tokens: i64) -> Self::State;

    /// Returns the state before the first token, with capacity for `tokens` tokens in total and with keys and values
    /// stored in the format `kind`. By default it calls [`CausalModel::start`] for [`CacheKind::Computed`], and fails
    /// for other formats.
    ///
    /// # Errors
    /// Fails for a format that the model's state does not support.
    fn start_as(&self, tokens: i64, kind: CacheKind) -> Result<Self::State> {
        match kind {
            CacheKind::Computed => Ok(self.start(tokens)),
            CacheKind::Bf16 | CacheKind::Int8 => Err(refused(format!(
                "this model has no cache of kind {kind:?}: implement `CausalModel::start_as`, or leave out cache_kind"
            ))),
        }
    }

    /// Computes the logits `[batch, vocabulary]` of the token after `tokens`, which follow those in the state. With
    /// padding, the attention mask covers all tokens so far, and positions do not count padding.
    ///
    /// # Errors
    /// Returns the errors of the model.
    fn next_logits(&self, tokens: Tokens<'_>, state: &mut Self::State) -> Result<Tensor>;

    /// Returns the maximum number of tokens of a text, without padding. Defaults to `None`: no limit.
    fn max_tokens(&self) -> Option<i64> {
        None
    }

    /// Computes the logits like [`CausalModel::next_logits`], but only those of this rank's part if the vocabulary is
    /// divided over ranks. Defaults to [`CausalModel::next_logits`].
    ///
    /// # Errors
    /// Returns the errors of the model.
    fn next_vocabulary_logits(
        &self,
        tokens: Tokens<'_>,
        state: &mut Self::State,
    ) -> Result<VocabularyLogits> {
        Ok(self.next_logits(tokens, state)?.into())
    }

    /// Prepares the state for steps of one token that can be recorded as a graph and replayed
    /// ([`GenerationOptions::capture`]): from now on [`CausalModel::next_logits`] gets one token of each text, and takes
    /// its place from [`RecordedStep::position`] instead of a number of the host. Its shapes are the same in each step,
    /// it allocates nothing that later steps read, and does not wait for the device. Positions are given; with padding
    /// the attention mask is `[batch, tokens]` for all tokens for which the state has room, with 1 for those to come.
    ///
    /// # Errors
    /// Returns the reason if that is impossible, and leaves the state as it is. The default implementation does.
    fn begin_steps(
        &self,
        state: &mut Self::State,
        step: &RecordedStep<'_>,
    ) -> std::result::Result<(), String> {
        let _ = (state, step);
        Err("the model has no steps of fixed shapes (`CausalModel::begin_steps`)".to_owned())
    }

    /// Replaces the state of text `i` by that of text `rows[i]`. `rows` is int64 `[texts]` on the device of the tokens;
    /// an index may occur several times, so that several continuations share the computation of one prompt.
    ///
    /// # Errors
    /// Returns the errors of the model. The default implementation returns an error, for a model that generates one
    /// continuation of each text.
    fn select_rows(&self, state: &mut Self::State, rows: &Tensor) -> Result<()> {
        let _ = state;
        Err(refused(format!(
            "several continuations of a text need `CausalModel::select_rows`, which this model does not have, for {:?}: \
             implement it, or take one continuation",
            rows.size()
        )))
    }
}

impl<M: CausalModel> CausalModel for Model<M> {
    type State = M::State;

    fn max_tokens(&self) -> Option<i64> {
        self.module().max_tokens()
    }

    fn start(&self, tokens: i64) -> M::State {
        self.module().start(tokens)
    }

    fn start_as(&self, tokens: i64, kind: CacheKind) -> Result<M::State> {
        self.module().start_as(tokens, kind)
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

    fn begin_steps(
        &self,
        state: &mut M::State,
        step: &RecordedStep<'_>,
    ) -> std::result::Result<(), String> {
        self.records_forwards()?;
        self.module().begin_steps(state, &step.checked())
    }

    fn select_rows(&self, state: &mut M::State, rows: &Tensor) -> Result<()> {
        self.module().select_rows(state, rows)
    }
}

/// A causal model from a closure that computes the logits `[batch, vocabulary]` of the next token from all tokens so
/// far, without a cache: each token costs a forward over the whole text. For models with a special forward. A model
/// whose stages are on several ranks has caches as a [`StagedModel`].
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

/// Tokens that an [`UncachedModel`] has processed.
#[derive(Debug, Default)]
pub struct SeenTokens {
    ids: Option<Tensor>,
    positions: Option<Tensor>,
}

impl<F: Fn(Tokens<'_>) -> Result<Tensor>> UncachedModel<F> {
    /// Creates the model from a closure.
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

    fn select_rows(&self, seen: &mut SeenTokens, rows: &Tensor) -> Result<()> {
        for tensor in [&mut seen.ids, &mut seen.positions].into_iter().flatten() {
            *tensor = tensor.f_index_select(0, rows)?;
        }
        Ok(())
    }
}

impl<F> std::fmt::Debug for UncachedModel<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UncachedModel").finish_non_exhaustive()
    }
}

/// Options of text generation: decoding method, sampling and stop conditions, under the names of transformers'
/// `GenerationConfig`.
///
/// Logits are processed in transformers' order: repetition penalty, repeated n-grams, bad words, minimum number of
/// tokens, forced end, suppressed tokens, temperature, `top_k`, `top_p`, `min_p`. Call [`Model::eval`] before, because
/// dropout is active in a model in training mode.
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
    /// Maximum number of tokens to generate. Defaults to 20.
    pub max_new_tokens: i64,
    /// Maximum length of a text in tokens, including the prompt, in addition to `max_new_tokens`. Defaults to none.
    pub max_length: Option<i64>,
    /// `true` to draw tokens by their probabilities, `false` to take the most probable one. Defaults to `false`.
    pub do_sample: bool,
    /// Sampling temperature: the divisor of the logits. Below 1 probable tokens become more probable. Defaults to 1.
    pub temperature: f64,
    /// Number of the most probable tokens among which one is drawn (top-k sampling). Defaults to none.
    pub top_k: Option<i64>,
    /// Cumulative probability of the most probable tokens among which one is drawn (top-p, or nucleus, sampling).
    /// Defaults to 1.
    pub top_p: f64,
    /// Minimum probability of a token that is drawn, relative to the highest probability. Defaults to none.
    pub min_p: Option<f64>,
    /// Repetition penalty: divides the positive logits of tokens that the text already contains, and multiplies their
    /// negative ones. Defaults to 1.
    pub repetition_penalty: f64,
    /// Ids of the tokens that end a text. Defaults to none: a text ends at the maximum length.
    pub eos_token_id: Vec<i64>,
    /// Id of the token that pads finished texts while others of the batch continue. Defaults to the first of
    /// `eos_token_id`.
    pub pad_token_id: Option<i64>,
    /// Seed of the draws. Defaults to one that is drawn from libtorch's generator (`tch::manual_seed`).
    pub seed: Option<u64>,
    /// Minimum number of generated tokens before a text may end with one of `eos_token_id`. Defaults to 0.
    pub min_new_tokens: i64,
    /// Length of the n-grams of tokens that must not occur twice in a text, or 0 to allow repetition. Defaults to 0.
    pub no_repeat_ngram_size: usize,
    /// Sequences of token ids that are never generated. Defaults to none. To suppress the end of a text use
    /// `min_new_tokens`.
    pub bad_words_ids: Vec<Vec<i64>>,
    /// Ids of tokens that are never generated. Defaults to none.
    pub suppress_tokens: Vec<i64>,
    /// Ids of tokens that are never generated as the first token. Defaults to none.
    pub begin_suppress_tokens: Vec<i64>,
    /// Ids of the tokens that may be the last token of a text that reaches the maximum length. Defaults to none: any
    /// token may.
    pub forced_eos_token_id: Vec<i64>,
    /// Strings that end a text: generation stops with the token that completes one. They need a decoder
    /// ([`GeneratedTokens::decoded_by`]). Defaults to none.
    pub stop_strings: Vec<String>,
    /// Number of continuations of each text, which follow each other in the result. More than one needs `do_sample` or
    /// at least as many beams. The prompt is computed once. Defaults to 1.
    pub num_return_sequences: i64,
    /// Number of beams: continuations of each text that a beam search keeps. Defaults to 1: no beam search.
    pub num_beams: i64,
    /// Exponent of the number of generated tokens, by which the sum of log probabilities is divided: above 0 long texts
    /// are preferred, below 0 short ones. Defaults to 1.
    pub length_penalty: f64,
    /// Stop condition of a text's beam search. Defaults to [`EarlyStopping::Heuristic`].
    pub early_stopping: EarlyStopping,
    /// Number of groups of beams, which are searched one after the other and differ because of `diversity_penalty`.
    /// Defaults to 1.
    pub num_beam_groups: i64,
    /// Penalty that is subtracted from the log probability of a token for each beam of an earlier group that has chosen
    /// it in the same step. Defaults to 0.
    pub diversity_penalty: f64,
    /// Number of prompt tokens that are computed at once (chunked prefill), which limits the memory of activations.
    /// Sums in attention are grouped differently, so that logits can differ in the last bits. Defaults to all.
    pub prefill_chunk: Option<i64>,
    /// Storage format of the key-value cache. Memory for all tokens is allocated at the start. Defaults to
    /// [`CacheKind::Computed`].
    pub cache_kind: CacheKind,
    /// `true` to record the step of one token as a graph on a GPU and replay it for each token, which removes the
    /// launch overhead of a model's many small kernels. Each step then attends to the cache's memory for all tokens,
    /// under a mask. [`GeneratedTokens::records`] returns the reason if steps are not recorded, such as a device without
    /// graphs or weights that are loaded for each use; the tokens are the same, except that logits may differ in the
    /// last bits. Defaults to `false`.
    pub capture: bool,
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
            min_new_tokens: 0,
            no_repeat_ngram_size: 0,
            bad_words_ids: Vec::new(),
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
            forced_eos_token_id: Vec::new(),
            stop_strings: Vec::new(),
            num_return_sequences: 1,
            num_beams: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
            num_beam_groups: 1,
            diversity_penalty: 0.0,
            prefill_chunk: None,
            cache_kind: CacheKind::Computed,
            capture: false,
        }
    }
}

impl GenerationOptions {
    /// Continues the texts with the ids `[batch, tokens]`, and returns the ids with the generated ones, `[batch,
    /// tokens + new]`. Texts of unequal lengths must be padded on the left, with an attention mask `[batch, tokens]`
    /// that is 0 for padding.
    ///
    /// # Errors
    /// Returns the same errors as [`GenerationOptions::stream`], and those of the model.
    pub fn generate<M: CausalModel>(
        &self,
        model: &M,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        if self.num_beams > 1 {
            return Ok(self.beam_search(model, ids, attention_mask)?.run()?.ids);
        }
        self.stream(model, ids, attention_mask)?.finish()
    }

    /// Returns an iterator that continues the texts with the ids `[batch, tokens]`. Each item is the next token of each
    /// text.
    ///
    /// # Errors
    /// Fails for options that are out of range, for several beams, for an empty prompt, or for padding that is not on
    /// the left.
    pub fn stream<'m, M: CausalModel>(
        &self,
        model: &'m M,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<GeneratedTokens<'m, M>> {
        self.check()?;
        if self.num_beams > 1 {
            return Err(refused(format!(
                "the tokens of {} beams are determined only at the end: call beam_search or generate",
                self.num_beams
            )));
        }
        let prompt = Prompt::new(self, ids, attention_mask)?;
        let copies = self.num_return_sequences;
        let again = |row: &Vec<i64>| vec![row.clone(); copies as usize];
        Ok(GeneratedTokens {
            reader: Reader::new(model, &prompt, self)?,
            options: self.clone(),
            rng: self.generator()?,
            ids: prompt.ids.f_repeat_interleave_self_int(copies, 0, None)?,
            mask: prompt
                .mask
                .map(|mask| mask.f_repeat_interleave_self_int(copies, 0, None))
                .transpose()?,
            ended: vec![false; prompt.rows.len() * copies as usize],
            rows: prompt.rows.iter().flat_map(again).collect(),
            written: 0,
            left: prompt.left,
            decode: None,
            own_stops: Vec::new(),
        })
    }

    /// Returns texts of unequal lengths as ids `[texts, tokens]`, padded on the left, and an attention mask of the same
    /// shape, for [`GenerationOptions::generate`], [`GenerationOptions::stream`] and
    /// [`GenerationOptions::beam_search`].
    ///
    /// ```
    /// use brigade_models::GenerationOptions;
    /// use tch::{Device, Tensor};
    ///
    /// let options = GenerationOptions { pad_token_id: Some(9), ..Default::default() };
    /// let (ids, mask) = options.padded(&[vec![1, 2, 3], vec![4]], Device::Cpu)?;
    /// assert_eq!(ids, Tensor::from_slice(&[1i64, 2, 3, 9, 9, 4]).view([2, 3]));
    /// assert_eq!(mask, Tensor::from_slice(&[1i64, 1, 1, 0, 0, 1]).view([2, 3]));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails if there are no texts, or if a text has no tokens.
    pub fn padded(&self, texts: &[Vec<i64>], device: Device) -> Result<(Tensor, Tensor)> {
        if let Some(empty) = texts.iter().position(Vec::is_empty) {
            return Err(refused(format!("text {empty} has no token to continue from")));
        }
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        let rows = texts.iter().flat_map(|text| {
            let padding = std::iter::repeat_n((self.pad(), 0), longest - text.len());
            padding.chain(text.iter().map(|&token| (token, 1)))
        });
        let (ids, mask): (Vec<i64>, Vec<i64>) = rows.unzip();
        let shape = [texts.len() as i64, longest as i64];
        let tensor = |values: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_view(shape)?.f_to_device(device)?)
        };
        Ok((tensor(&ids)?, tensor(&mask)?))
    }

    fn generator(&self) -> Result<Pcg64> {
        let seed = match self.seed {
            Some(seed) => seed,
            None => Tensor::f_randint(i64::MAX, [1], (Kind::Int64, Device::Cpu))?
                .f_int64_value(&[0])?
                .unsigned_abs(),
        };
        Ok(Pcg64::seed_from_u64(seed))
    }

    /// Returns the token that pads finished texts.
    fn pad(&self) -> i64 {
        self.pad_token_id.or_else(|| self.eos_token_id.first().copied()).unwrap_or(0)
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
        } else if self.num_return_sequences < 1 {
            Some(format!("num_return_sequences {} is less than 1", self.num_return_sequences))
        } else if self.num_beams < 1 {
            Some(format!("num_beams {} is less than 1", self.num_beams))
        } else if self.num_beams == 1 && self.num_return_sequences > 1 && !sampled {
            Some(format!(
                "num_return_sequences {} needs several continuations, and without do_sample and num_beams there is one",
                self.num_return_sequences
            ))
        } else if self.num_beams > 1 && self.num_return_sequences > self.num_beams {
            Some(format!(
                "num_return_sequences {} is more than the {} beams",
                self.num_return_sequences, self.num_beams
            ))
        } else if self.num_beam_groups < 1 || self.num_beams % self.num_beam_groups != 0 {
            Some(format!(
                "num_beam_groups {} does not divide num_beams {}",
                self.num_beam_groups, self.num_beams
            ))
        } else if self.num_beam_groups > 1 && sampled {
            Some("num_beam_groups is for a search without do_sample".to_owned())
        } else if !self.length_penalty.is_finite() || !self.diversity_penalty.is_finite() {
            Some(format!(
                "length_penalty {} and diversity_penalty {} have to be finite",
                self.length_penalty, self.diversity_penalty
            ))
        } else if self.prefill_chunk.is_some_and(|chunk| chunk < 1) {
            Some(format!("prefill_chunk {:?} is less than 1", self.prefill_chunk))
        } else if self.bad_words_ids.iter().any(Vec::is_empty) {
            Some("bad_words_ids has a sequence without a token".to_owned())
        } else if self.stop_strings.iter().any(String::is_empty) {
            Some("stop_strings has an empty string, which ends every text".to_owned())
        } else {
            None
        };
        problem.map_or(Ok(()), |problem| Err(refused(problem)))
    }
}

/// Iterator over generated tokens: each item is the next token of each text of the batch.
///
/// It ends when all texts have ended or reached their maximum length, and after an error.
pub struct GeneratedTokens<'m, M: CausalModel> {
    reader: Reader<'m, M>,
    options: GenerationOptions,
    rng: Pcg64,
    /// All ids so far, `[batch, tokens]`.
    ids: Tensor,
    /// Attention mask `[batch, tokens so far]`, if a text is padded.
    mask: Option<Tensor>,
    /// Tokens so far of each text, without padding.
    rows: Vec<Vec<i64>>,
    ended: Vec<bool>,
    written: i64,
    left: i64,
    decode: Option<Decode<'m>>,
    /// Stop strings of each text beside those of the options. Empty if no text has any.
    own_stops: Vec<Vec<String>>,
}

impl<'m, M: CausalModel> GeneratedTokens<'m, M> {
    /// Returns the ids `[batch, tokens]` so far, including the prompt.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// Converts the iterator into the ids `[batch, tokens]` so far, including the prompt.
    pub fn into_ids(self) -> Tensor {
        self.ids
    }

    /// Returns the tokens of each text so far, including the prompt, without padding.
    pub fn texts(&self) -> &[Vec<i64>] {
        &self.rows
    }

    /// Returns `true` for each text that has ended, in the order of [`GeneratedTokens::texts`].
    ///
    /// A text that only reached the maximum length is not one of them.
    pub fn ended(&self) -> &[bool] {
        &self.ended
    }

    /// Returns `Ok` if the steps of one token are recorded as a graph or will be ([`GenerationOptions::capture`]),
    /// otherwise the reason why they are not.
    ///
    /// ```
    /// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options};
    /// use brigade_nn::Model;
    /// use tch::Tensor;
    ///
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    /// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
    /// model.eval();
    /// let options = GenerationOptions { capture: true, ..Default::default() };
    /// let mut stream = options.stream(&model, &Tensor::from_slice(&[7i64, 8]).view([1, 2]), None)?;
    /// while let Some(tokens) = stream.next() {
    ///     tokens?;
    /// }
    /// assert_eq!(stream.records(), Err("the device records no graphs"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the reason.
    pub fn records(&self) -> std::result::Result<(), &str> {
        self.reader.records()
    }

    /// Sets strings that end one text each, beside [`GenerationOptions::stop_strings`], which end any: a list for each
    /// text of the batch, which all of its continuations share. They need [`GeneratedTokens::decoded_by`].
    ///
    /// ```
    /// # use brigade_models::{CausalModel, GenerationOptions, Tokens};
    /// # use tch::{Kind, Tensor};
    /// # struct Counter;
    /// # impl CausalModel for Counter {
    /// #     type State = ();
    /// #     fn start(&self, _tokens: i64) {}
    /// #     fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> brigade_torch::Result<Tensor> {
    /// #         let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
    /// #         Ok(next.f_one_hot(10)?.f_to_kind(Kind::Float)?)
    /// #     }
    /// # }
    /// let digits = |ids: &[i64]| Ok(ids.iter().map(|id| id.to_string()).collect::<String>());
    /// let ids = Tensor::from_slice(&[2i64, 5]).view([2, 1]);
    /// let options = GenerationOptions { max_new_tokens: 9, ..Default::default() };
    /// let stream = options.stream(&Counter, &ids, None)?.decoded_by(digits);
    /// let mut text = stream.stopped_by([["34"], ["90"]])?.text();
    /// let mut texts = [String::new(), String::new()];
    /// while let Some(pieces) = text.next() {
    ///     for (text, piece) in texts.iter_mut().zip(pieces?) {
    ///         text.push_str(&piece);
    ///     }
    /// }
    /// assert_eq!(texts, ["34", "67890"]);
    /// assert_eq!(text.tokens().ended(), [true, true]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for another number of lists than texts, and for an empty string.
    pub fn stopped_by<S: Into<String>>(
        mut self,
        strings: impl IntoIterator<Item = impl IntoIterator<Item = S>>,
    ) -> Result<Self> {
        let strings = strings.into_iter().map(|own| own.into_iter().map(Into::into).collect());
        let strings: Vec<Vec<String>> = strings.collect();
        let copies = self.options.num_return_sequences as usize;
        let texts = self.rows.len() / copies.max(1);
        if strings.len() != texts {
            let found = strings.len();
            return Err(refused(format!("expected stop strings for {texts} texts, found {found}")));
        }
        if strings.iter().flatten().any(String::is_empty) {
            return Err(refused("an empty stop string ends every text"));
        }
        let again = |own: Vec<String>| std::iter::repeat_n(own, copies);
        self.own_stops = strings.into_iter().flat_map(again).collect();
        Ok(self)
    }

    /// Sets the function that decodes tokens to text, for stop strings and [`GeneratedTokens::text`].
    ///
    /// ```
    /// # use brigade_models::{CausalModel, GenerationOptions, Tokens};
    /// # use tch::{Kind, Tensor};
    /// # struct Counter;
    /// # impl CausalModel for Counter {
    /// #     type State = ();
    /// #     fn start(&self, _tokens: i64) {}
    /// #     fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> brigade_torch::Result<Tensor> {
    /// #         let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
    /// #         Ok(next.f_one_hot(10)?.f_to_kind(Kind::Float)?)
    /// #     }
    /// # }
    /// let digits = |ids: &[i64]| Ok(ids.iter().map(|id| id.to_string()).collect::<String>());
    /// let options = GenerationOptions { stop_strings: vec!["01".to_owned()], ..Default::default() };
    /// let ids = Tensor::from_slice(&[7i64]).view([1, 1]);
    /// let written = options.stream(&Counter, &ids, None)?.decoded_by(digits).finish()?;
    /// assert_eq!(written, Tensor::from_slice(&[7i64, 8, 9, 0, 1]).view([1, 5]));
    /// let mut text = String::new();
    /// for pieces in options.stream(&Counter, &ids, None)?.decoded_by(digits).text() {
    ///     text += &pieces?[0];
    /// }
    /// assert_eq!(text, "8901");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn decoded_by(mut self, decode: impl Fn(&[i64]) -> Result<String> + 'm) -> Self {
        self.decode = Some(Box::new(decode));
        self
    }

    /// Makes every rank run as many forwards as the rank with the longest text needs, so that ranks whose texts end
    /// earlier do not block the others in a collective of a sharded model. The function is called before each forward
    /// with `true` if this rank needs it, and returns `true` if any rank does: a reduction over the ranks by the
    /// maximum. Each rank must iterate to the end.
    ///
    /// ```no_run
    /// # use brigade_models::{GenerationOptions, LlamaForCausalLm};
    /// # use brigade_nn::Model;
    /// # use brigade_torch::{ProcessGroup, ReduceOp, Result};
    /// # use tch::Tensor;
    /// # fn write(model: &Model<LlamaForCausalLm>, ids: &Tensor, group: &ProcessGroup) -> Result<()> {
    /// let any_rank = |needed| {
    ///     let mut needed = Tensor::from_slice(&[i64::from(needed)]);
    ///     group.all_reduce(&mut needed, ReduceOp::Max)?;
    ///     Ok(needed.f_int64_value(&[0])? > 0)
    /// };
    /// let options = GenerationOptions { eos_token_id: vec![2], ..Default::default() };
    /// let written = options.stream(model, ids, None)?.synchronized(any_rank).finish()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn synchronized(mut self, any_rank: impl Fn(bool) -> Result<bool> + 'm) -> Self {
        self.reader.synchronize(any_rank);
        self
    }

    /// Generates all remaining tokens, and returns the ids like [`GenerationOptions::generate`].
    ///
    /// # Errors
    /// Returns the errors of the model and of the decoding function.
    pub fn finish(mut self) -> Result<Tensor> {
        for step in &mut self {
            step?;
        }
        Ok(self.ids)
    }

    /// Returns an iterator over the generated text instead of its tokens. It needs [`GeneratedTokens::decoded_by`].
    pub fn text(self) -> GeneratedText<'m, M> {
        GeneratedText::new(self)
    }

    fn step(&mut self) -> Result<Vec<i64>> {
        let mut logits = self.reader.logits()?;
        let copies = self.options.num_return_sequences;
        if self.written == 0 && copies > 1 {
            let texts = self.ended.len() as i64 / copies;
            let all = Tensor::f_arange(texts, (Kind::Int64, self.ids.device()))?;
            let rows = all.f_repeat_interleave_self_int(copies, 0, None)?;
            self.reader.select_rows(&rows)?;
            logits = logits.select_rows(&rows)?;
        }
        let before = Before {
            ids: &self.ids,
            mask: self.mask.as_ref(),
            rows: &self.rows,
            written: self.written,
            left: self.left,
        };
        let mut chosen = sampling::choose(&logits, before, &self.options, &mut self.rng)?;
        if chosen.len() != self.ended.len() {
            return Err(refused(format!("the model gave logits {:?}", logits.whole()?.size())));
        }
        let (ends, pad) = (&self.options.eos_token_id, self.options.pad());
        let (all, decode) = (&self.options.stop_strings, self.decode.as_ref());
        let stops = StopStrings::new(all, decode)?;
        let own = self.own_stops.iter().map(|own| StopStrings::new(all.iter().chain(own), decode));
        let own = own.collect::<Result<Vec<_>>>()?;
        let texts = chosen.iter_mut().zip(&mut self.ended).zip(&mut self.rows);
        for (text, ((token, ended), row)) in texts.enumerate() {
            let stops = own.get(text).unwrap_or(&stops);
            if *ended {
                *token = pad;
            } else {
                row.push(*token);
                *ended = ends.contains(token) || stops.are_met(row)?;
            }
        }
        let device = self.ids.device();
        let column = Tensor::f_from_slice(&chosen)?.f_unsqueeze(1)?.f_to_device(device)?;
        self.ids = Tensor::f_cat(&[&self.ids, &column], 1)?;
        self.reader.push(column)?;
        self.mask = self.reader.mask().map(Tensor::shallow_clone);
        self.written += 1;
        self.left = if self.ended.iter().all(|&ended| ended) { 0 } else { self.left - 1 };
        Ok(chosen)
    }
}

impl<M: CausalModel> Iterator for GeneratedTokens<'_, M> {
    type Item = Result<Vec<i64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left < 1 {
            return self.reader.finish().err().map(Err);
        }
        let step = tch::no_grad(|| self.step());
        if step.is_err() {
            self.left = 0;
            self.reader.abandon();
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

fn refused(problem: impl std::fmt::Display) -> Error {
    Error::invalid_argument(format!("generation: {problem}"))
}
