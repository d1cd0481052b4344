//! Text generation with a recurrent language model.

use brigade_nn::Model;
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use tch::{Kind, Tensor};

use super::LanguageModel;
use super::weights::AwdLstmModel;

/// Sampling options of the next token, as in fastai's `LMLearner.predict`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NextWordOptions {
    /// Sampling temperature: probabilities are raised to `1 / temperature` before a token is drawn. 0 takes the most
    /// probable token. Defaults to 1.
    pub temperature: f64,
    /// Minimum probability of a token that is drawn, unless all are below it. Defaults to none.
    pub min_p: Option<f64>,
    /// Id of a token that is never drawn, such as the unknown token (`no_unk`). Defaults to none.
    pub never: Option<i64>,
    /// Predicts each token from only the token before it (fastai's `only_last_word`, which resets the state at every
    /// token). Defaults to `false`.
    pub only_last_word: bool,
}

impl Default for NextWordOptions {
    fn default() -> Self {
        Self { temperature: 1.0, min_p: None, never: None, only_last_word: false }
    }
}

/// Chooses the next token from logits `[words]`: draws with libtorch's generator, or takes the most probable one.
///
/// ```
/// use brigade_models::{NextWordOptions, next_word};
/// use tch::Tensor;
///
/// let scores = Tensor::from_slice(&[3f32, 1.0, 2.0]);
/// let greedy = NextWordOptions { temperature: 0.0, never: Some(0), ..NextWordOptions::default() };
/// assert_eq!(next_word(&scores, &greedy)?, 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] for logits that do not have one dimension or are all infinite or NaN,
/// a temperature below 0, or a token that is not in the vocabulary.
pub fn next_word(scores: &Tensor, options: &NextWordOptions) -> Result<i64> {
    let &[words] = scores.size().as_slice() else {
        return Err(Error::invalid_argument(format!(
            "the scores of one word's successors are a vector, found {:?}",
            scores.size()
        )));
    };
    let NextWordOptions { temperature, min_p, never, .. } = *options;
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return Err(Error::invalid_argument(format!(
            "the temperature {temperature} is not 0 or greater"
        )));
    }
    let kind = if scores.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let mut likely = scores.f_softmax(0, kind)?;
    if let Some(word) = never {
        if !(0..words).contains(&word) {
            return Err(Error::invalid_argument(format!(
                "word {word} is not in the vocabulary of {}",
                counted(words, "word")
            )));
        }
        let _ = likely.f_narrow(0, word, 1)?.f_zero_()?;
    }
    if let Some(least) = min_p {
        let enough = likely.f_ge(least)?;
        if enough.f_any()?.f_int64_value(&[])? != 0 {
            likely = likely.f_mul(&enough)?;
        }
    }
    if temperature != 1.0 && temperature != 0.0 {
        // Relative to the largest one, so that small probabilities raised to a large power do not all become 0.
        likely = likely.f_div(&likely.f_max()?)?.f_pow_tensor_scalar(1.0 / temperature)?;
    }
    let sum = likely.f_sum(kind)?.f_double_value(&[])?;
    if !(sum > 0.0 && sum.is_finite()) {
        return Err(Error::invalid_argument(format!(
            "no word can be chosen: the probabilities of {} sum up to {sum}",
            counted(words, "word")
        )));
    }
    let chosen = if temperature == 0.0 {
        likely.f_argmax(0, false)?
    } else {
        likely.f_multinomial(1, false)?
    };
    Ok(chosen.f_int64_value(&[0; 0]).or_else(|_| chosen.f_int64_value(&[0]))?)
}

/// Continues a text: returns the `count` tokens after `prompt`.
///
/// The model computes in evaluation mode, each token once, because its hidden state contains the earlier ones. Its mode
/// and its hidden state are restored afterwards. Tokens are drawn with libtorch's generator.
///
/// ```
/// use brigade_models::{LanguageModel, LanguageModelOptions, NextWordOptions, generate_words};
/// use brigade_nn::Model;
///
/// let mut options = LanguageModelOptions::default();
/// (options.encoder.embedding, options.encoder.hidden) = (8, 12);
/// let mut model = Model::new(|path| LanguageModel::new(path, 26, &options))?;
/// let words = generate_words(&mut model, &[2, 8, 11], 5, &NextWordOptions::default())?;
/// assert_eq!(words.len(), 5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] for an empty prompt, the errors of [`next_word`], and those of the
/// model for a token that is not in the vocabulary.
pub fn generate_words(
    model: &mut Model<LanguageModel>,
    prompt: &[i64],
    count: usize,
    options: &NextWordOptions,
) -> Result<Vec<i64>> {
    let trains = model.is_training();
    let state = model.module().state().clone();
    let before = state.hidden_state();
    model.eval();
    state.reset();
    let words = tch::no_grad(|| model.module().next_words(prompt, count, options));
    if trains {
        model.train();
    }
    state.set_hidden_state(before)?;
    words
}

impl LanguageModel {
    /// Continues a text like [`generate_words`], with a module that its owner, such as a Learner, has put into
    /// evaluation mode. It starts from the present hidden state, and leaves the state after the last token but one.
    ///
    /// # Errors
    /// Returns the errors of [`generate_words`].
    pub fn next_words(
        &self,
        prompt: &[i64],
        count: usize,
        options: &NextWordOptions,
    ) -> Result<Vec<i64>> {
        if prompt.is_empty() {
            return Err(Error::invalid_argument(
                "nothing to continue from: begin with a word, such as the one that begins texts",
            ));
        }
        let device = self.encoder().embedding().device();
        let mut words = Vec::with_capacity(count);
        let mut input = prompt.to_vec();
        for _ in 0..count {
            let row = Tensor::from_slice(&input).f_to_device(device)?.f_unsqueeze(0)?;
            let hidden = self.decoder_input(&row)?;
            // The decoder is the larger part of the work, so it runs for the last word only.
            let last = hidden.f_select(1, input.len() as i64 - 1)?.f_select(0, 0)?;
            let next = next_word(&self.head().scores(&last)?, options)?;
            words.push(next);
            input = vec![next];
            if options.only_last_word {
                self.state().reset();
            }
        }
        Ok(words)
    }
}
