//! Additional methods of text Learners: saving and loading of encoders, and text generation.

use std::any::Any;
use std::path::Path;

use brigade_learn::{Learner, LearnerState};
use brigade_models::{
    AwdLstmModel, LanguageModel, NextWordOptions, TextClassifier, encoder_state, read_encoder,
    with_encoder, write_encoder,
};
use brigade_tokens::rules::decode_special_tokens;
use brigade_tokens::{TokenList, Vocabulary};
use brigade_torch::{Error, Result};

use crate::TextCodec;
use crate::error::TextError;

/// Options of [`TextLearner::generate`], as in fastai's `LMLearner.predict`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Generate {
    /// Sampling temperature: probabilities are raised to `1 / temperature` before a token is drawn. 0 takes the most
    /// probable token. Defaults to 1.
    pub temperature: f64,
    /// Minimum probability of a token that is drawn, unless all are below it. Defaults to none.
    pub min_p: Option<f64>,
    /// Never draws the unknown token (`no_unk`). Defaults to `true`.
    pub no_unknown: bool,
    /// Predicts each token from only the token before it. Defaults to `false`.
    pub only_last_word: bool,
    /// Decodes the tokens for capitals and repetitions (`decode_spec_tokens`). Defaults to `true`.
    pub decode: bool,
}

impl Default for Generate {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            min_p: None,
            no_unknown: true,
            only_last_word: false,
            decode: true,
        }
    }
}

/// Methods of a Learner that [`language_model_learner`](crate::language_model_learner) or
/// [`text_classifier_learner`](crate::text_classifier_learner) has made.
pub trait TextLearner {
    /// Writes the weights of the encoder alone to a file, from rank 0, for a classifier or for fastai's
    /// `learn.load_encoder`.
    ///
    /// # Errors
    /// Fails on every rank if rank 0 cannot write, or if the model has no AWD-LSTM encoder.
    fn save_encoder(&self, path: impl AsRef<Path>) -> Result<()>;

    /// Loads the encoder of a language model, written by this crate or by fastai, and freezes everything but the head.
    /// Every rank calls it.
    ///
    /// # Errors
    /// Fails if the file cannot be read or does not match the model. Nothing is changed then.
    fn load_encoder(&mut self, path: impl AsRef<Path>) -> Result<()>;

    /// Continues a text by `words` tokens, which are drawn with libtorch's generator, and returns both together. It
    /// does not communicate with other ranks.
    ///
    /// # Errors
    /// Fails if the model is not a language model, or the data have no tokenizer.
    fn generate(&mut self, text: &str, words: usize, options: &Generate) -> Result<String>;
}

impl TextLearner for Learner {
    fn save_encoder(&self, path: impl AsRef<Path>) -> Result<()> {
        let name = encoder_name(self)?;
        let state = self.full_state_dict()?.unwrap_or_default();
        let written = self
            .accelerator()
            .processes()
            .on_main_process(|| write_encoder(&encoder_state(&state, &name)?, path.as_ref()));
        written.map(drop)
    }

    fn load_encoder(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let name = encoder_name(self)?;
        let state = self.full_state_dict()?.unwrap_or_default();
        let whole = self
            .accelerator()
            .processes()
            .on_main_process(|| with_encoder(&state, &name, &read_encoder(path.as_ref())?))?;
        self.state_mut().load_full_state_dict(whole.as_ref())?;
        self.freeze()
    }

    fn generate(&mut self, text: &str, words: usize, options: &Generate) -> Result<String> {
        let codec = self.item_codec().and_then(|codec| {
            let codec: &dyn Any = &**codec;
            codec.downcast_ref::<TextCodec>().cloned()
        });
        let codec = codec.ok_or_else(|| {
            Error::invalid_argument(
                "generate: the data do not say how texts are split; make them by TextLoaders, or give the Loaders a \
                 TextCodec",
            )
        })?;
        let vocabulary = codec.vocabulary();
        let options = *options;
        let chosen = NextWordOptions {
            temperature: options.temperature,
            min_p: options.min_p,
            never: vocabulary.unknown().filter(|_| options.no_unknown).map(i64::from),
            only_last_word: options.only_last_word,
        };
        let mut ids = codec.ids(text)?;
        let after = self.evaluated(|learner| {
            let Some(model) = learner.module::<LanguageModel>() else {
                return Err(Error::invalid_argument(
                    "generate: the model is not a LanguageModel; make the Learner by language_model_learner",
                ));
            };
            let state = model.state().clone();
            let before = state.hidden_state();
            state.reset();
            let words = model.next_words(&ids, words, &chosen);
            state.set_hidden_state(before)?;
            words
        })?;
        ids.extend(after);
        written(&ids, vocabulary, options.decode)
    }
}

/// Returns the name of the encoder in the model.
fn encoder_name(learner: &LearnerState) -> Result<String> {
    let of_language_model = learner.module::<LanguageModel>().map(AwdLstmModel::encoder);
    let encoder = of_language_model
        .or_else(|| learner.module::<TextClassifier>().map(AwdLstmModel::encoder))
        .ok_or_else(|| {
            Error::invalid_argument(
                "the Learner's model has no encoder of an AWD-LSTM; make it by language_model_learner or \
                 text_classifier_learner",
            )
        })?;
    Ok(encoder.name().to_owned())
}

/// Joins the words of a text, without tokens for its beginning and padding.
fn written(ids: &[i64], vocabulary: &Vocabulary, decode: bool) -> Result<String> {
    let token = |id: &i64| u32::try_from(*id).ok().and_then(|id| vocabulary.token(id));
    let tokens: TokenList =
        ids.iter().filter_map(token).filter(|token| !["xxbos", "xxpad"].contains(token)).collect();
    let tokens =
        if decode { decode_special_tokens(&tokens).map_err(TextError::from)? } else { tokens };
    Ok(tokens.iter().collect::<Vec<_>>().join(" "))
}
