//! Conversion of single texts to a model's input, and its settings.

use std::any::Any;
use std::sync::Arc;

use brigade_data::DataLoader;
use brigade_learn::{Item, ItemCodec, LearnError, Loaders, Picture, data};
use brigade_rank_env::text::counted;
use brigade_tokens::{
    FastaiTokenizer, ParallelOptions, TextSource, TokenCorpus, TokenList, Tokenizer, Vocabulary,
};
use brigade_torch::{Error, Result};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::TextError;
use crate::{Backwards, Documents, LabelledTexts, Padding, SortedSampler, UnlabelledTexts};

/// Kind of [`TextCodec`] in serialised settings.
const KIND: &str = "text";

/// Conversion of single texts to a model's input, and of texts to batches: a tokenizer and a vocabulary. The loaders of
/// [`TextLoaders`](crate::TextLoaders) and an exported Learner have one.
///
/// ```
/// use std::sync::Arc;
///
/// use brigade_learn::{Item, ItemCodec};
/// use brigade_text::{TextCodec, codec_from};
/// use brigade_tokens::{FastaiTokenizer, SPECIAL_TOKENS, Vocabulary};
///
/// let vocabulary = Vocabulary::new(SPECIAL_TOKENS.into_iter().chain(["a", "film"]))?;
/// let codec = TextCodec::new(Arc::new(FastaiTokenizer::new()), Arc::new(vocabulary));
/// let (kind, settings) = codec.describe()?;
/// let again = codec_from(kind, &settings)?; // in another process
/// let input = again.encode(&Item::Text("A fine film".to_owned()))?;
/// assert_eq!(input[0], tch::Tensor::from_slice2(&[[2i64, 9, 0, 10]]));
/// assert_eq!(again.text(&input, 0)?.as_deref(), Some("xxbos a xxunk film"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextCodec {
    tokenizer: Arc<dyn Tokenizer>,
    vocabulary: Arc<Vocabulary>,
    backwards: bool,
    pad_id: Option<i64>,
}

/// Codec in JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    tokenizer: serde_json::Value,
    vocabulary: serde_json::Value,
    backwards: bool,
    pad_id: Option<i64>,
}

impl TextCodec {
    /// Creates a codec from a tokenizer and a vocabulary.
    #[must_use]
    pub fn new(tokenizer: Arc<dyn Tokenizer>, vocabulary: Arc<Vocabulary>) -> Self {
        Self { tokenizer, vocabulary, backwards: false, pad_id: None }
    }

    /// Creates a codec from the settings that [`ItemCodec::describe`] returned, with the tokenizer of the original
    /// codec. For tokenizers that are stored in files of their own, such as Hugging Face's.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for settings of another kind or of a later version, and if the
    /// tokenizer differs from the original one.
    pub fn from_settings(
        settings: &serde_json::Value,
        tokenizer: Arc<dyn Tokenizer>,
    ) -> Result<Self> {
        let settings = Settings::deserialize(settings).map_err(|error| {
            Error::invalid_argument(format!(
                "the settings of a codec of texts cannot be read: {error}"
            ))
        })?;
        let Settings { tokenizer: expected, vocabulary, backwards, pad_id } = settings;
        if tokenizer.describe() != expected {
            return Err(Error::invalid_argument(format!(
                "the codec was made with the tokenizer {expected}, and this one is {}",
                tokenizer.describe()
            )));
        }
        let vocabulary =
            Vocabulary::from_json(vocabulary.to_string().as_bytes()).map_err(TextError::from)?;
        Ok(Self { tokenizer, vocabulary: Arc::new(vocabulary), backwards, pad_id })
    }

    /// Sets whether texts are read backwards, from their last token to their first. Defaults to `false`.
    #[must_use]
    pub fn backwards(mut self, backwards: bool) -> Self {
        self.backwards = backwards;
        self
    }

    /// Sets the id of the padding token, which is left out when texts are displayed. `None` if there is no padding.
    #[must_use]
    pub fn pad_id(mut self, id: Option<i64>) -> Self {
        self.pad_id = id;
        self
    }

    /// Returns the id of the padding token, if there is one.
    #[must_use]
    pub fn padding(&self) -> Option<i64> {
        self.pad_id
    }

    /// Returns the codec of loaders that [`TextLoaders`](crate::TextLoaders) has made. `None` if the loaders have no
    /// such codec.
    #[must_use]
    pub fn of<X>(loaders: &Loaders<X>) -> Option<&Self> {
        let codec: &dyn Any = &**loaders.item_codec()?;
        codec.downcast_ref()
    }

    /// Returns the tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<dyn Tokenizer> {
        &self.tokenizer
    }

    /// Returns the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Returns the token ids of a text.
    ///
    /// # Errors
    /// Fails if the tokenizer rejects the text, or if a token is not in the vocabulary, and the vocabulary has no
    /// unknown token.
    pub fn ids(&self, text: &str) -> Result<Vec<i64>> {
        let mut tokens = TokenList::new();
        self.tokenizer.tokenize(text, &mut tokens).map_err(TextError::from)?;
        let ids = self.vocabulary.ids(&tokens).map_err(TextError::from)?;
        let mut ids: Vec<i64> = ids.into_iter().map(i64::from).collect();
        if self.backwards {
            ids.reverse();
        }
        Ok(ids)
    }

    /// Creates a loader of texts for prediction, without targets, the longest first, padded in chunks of `seq_len`
    /// tokens (fastai: 72): fastai's `test_dl`. A Learner returns its predictions in the original order of the texts.
    /// Texts are tokenized on all cores, and their tokens are kept in memory.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use brigade_text::TextCodec;
    /// # use brigade_tokens::{FastaiTokenizer, SPECIAL_TOKENS, TextSource, Vocabulary};
    /// # let vocabulary = Vocabulary::new(SPECIAL_TOKENS.into_iter().chain(["a", "film"]))?;
    /// # let codec = TextCodec::new(Arc::new(FastaiTokenizer::new()), Arc::new(vocabulary)).pad_id(Some(1));
    /// let texts = TextSource::memory(["a film", "a fine film"])?;
    /// let loader = codec.loader(&texts, 72, 64)?; // for Learner::predictions_of
    /// let (ids, target) = loader.iter().next().expect("a batch")?.into_data();
    /// assert_eq!(ids, tch::Tensor::from_slice2(&[[2i64, 9, 0, 10], [2, 9, 10, 1]]));
    /// assert!(target.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails if texts cannot be read or tokenized, or a text has no tokens.
    pub fn loader(
        &self,
        texts: &TextSource,
        seq_len: usize,
        batch_size: usize,
    ) -> Result<DataLoader<UnlabelledTexts>> {
        let corpus = TokenCorpus::in_memory(&*self.tokenizer, texts, ParallelOptions::new())
            .map_err(TextError::from)?;
        let ids = corpus.ids(&self.vocabulary).map_err(TextError::from)?;
        let documents: Box<dyn Documents> =
            if self.backwards { Box::new(Backwards(ids)) } else { Box::new(ids) };
        let padding = Padding::chunks(seq_len).id(self.pad_id.unwrap_or(1));
        let data = LabelledTexts::new(documents, vec![None; texts.len()], padding)?;
        let sampler = SortedSampler::longest_first(data.lengths());
        Ok(DataLoader::new(data).batch_size(batch_size).sampler(sampler))
    }

    /// Returns the tokens with these ids as a string, joined by spaces and without padding.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for an id that the vocabulary does not have.
    pub fn tokens(&self, ids: &[i64]) -> Result<String> {
        let token = |id: &i64| {
            let token = u32::try_from(*id).ok().and_then(|id| self.vocabulary.token(id));
            token.ok_or_else(|| {
                Error::invalid_argument(format!(
                    "the vocabulary of {} has none with number {id}",
                    counted(self.vocabulary.len(), "token")
                ))
            })
        };
        let shown = ids.iter().filter(|id| Some(**id) != self.pad_id);
        Ok(shown.map(token).collect::<Result<Vec<_>>>()?.join(" "))
    }
}

impl ItemCodec for TextCodec {
    fn encode(&self, item: &Item) -> Result<Vec<Tensor>> {
        let utf8 = |bytes: Vec<u8>, name: String| {
            String::from_utf8(bytes).map_err(|error| {
                Error::invalid_argument(format!("{name} is not UTF-8: {}", error.utf8_error()))
            })
        };
        let ids = match item {
            Item::Text(text) => self.ids(text)?,
            Item::Bytes(bytes) => self.ids(&utf8(bytes.clone(), "the text".to_owned())?)?,
            Item::File(path) => {
                let bytes = std::fs::read(path).map_err(|source| LearnError::File {
                    action: "reading",
                    path: path.clone(),
                    source,
                })?;
                self.ids(&utf8(bytes, path.display().to_string())?)?
            }
            Item::Tensors(tensors) => {
                return tensors.iter().map(|tensor| Ok(tensor.f_unsqueeze(0)?)).collect();
            }
            other => {
                return Err(Error::invalid_argument(format!(
                    "these data are texts: predict a text, its file, bytes or numbers, not {other:?}"
                )));
            }
        };
        if ids.is_empty() {
            return Err(Error::invalid_argument(
                "the text has no token, and a model has nothing to read: give another one",
            ));
        }
        Ok(vec![Tensor::f_from_slice(&ids)?.f_unsqueeze(0)?])
    }

    fn picture(&self, _inputs: &[Tensor], _row: i64) -> Result<Option<Picture>> {
        Ok(None)
    }

    fn text(&self, inputs: &[Tensor], row: i64) -> Result<Option<String>> {
        let ids = match inputs {
            [ids, ..] if ids.dim() == 2 && row < ids.size()[0] => ids.f_select(0, row)?,
            _ => {
                return Err(Error::invalid_argument(format!(
                    "row {row} is not a text: expected numbers of tokens [rows, tokens], found {:?}",
                    inputs.iter().map(Tensor::size).collect::<Vec<_>>()
                )));
            }
        };
        let ids = ids.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Int64)?;
        self.tokens(&Vec::<i64>::try_from(&ids)?).map(Some)
    }

    fn describe(&self) -> Result<(&'static str, serde_json::Value)> {
        let settings = Settings {
            tokenizer: self.tokenizer.describe(),
            vocabulary: serde_json::from_str(&self.vocabulary.to_json()).map_err(Error::custom)?,
            backwards: self.backwards,
            pad_id: self.pad_id,
        };
        Ok((KIND, serde_json::to_value(settings).map_err(Error::custom)?))
    }
}

/// Creates a codec from its kind and the settings that [`ItemCodec::describe`] returned: a [`TextCodec`], or one of the
/// codecs of [`brigade_learn::data::codec_from`]. Pass this function to `Predictor::load_with`.
///
/// # Errors
/// Fails for an unknown kind, and for settings of another kind or of a later version.
pub fn codec_from(kind: &str, settings: &serde_json::Value) -> Result<Arc<dyn ItemCodec>> {
    if kind != KIND {
        return data::codec_from(kind, settings);
    }
    let tokenizer = settings.get("tokenizer").unwrap_or(&serde_json::Value::Null);
    let tokenizer = FastaiTokenizer::from_description(tokenizer).map_err(|error| {
        Error::invalid_argument(format!(
            "{error}; a codec with another tokenizer is made by TextCodec::from_settings, which takes it"
        ))
    })?;
    Ok(Arc::new(TextCodec::from_settings(settings, Arc::new(tokenizer))?))
}
