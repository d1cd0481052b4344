//! Hugging Face tokenizers.

mod encoding;
mod special;
mod train;

use std::fmt;
use std::fs;
use std::path::Path;

use serde::de::IgnoredAny;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::{
    AddedToken, Model, OffsetType, PostProcessor, PreTokenizer, Tokenizer as Inner,
    TruncationDirection, truncate_encodings,
};

pub use self::encoding::{Encoding, Side, Truncation, TruncationStrategy};
use self::special::Settings;
pub use self::special::SpecialToken;
pub use self::train::BpeTrainer;
use crate::files::{io_error, write_whole};
use crate::parallel::{catch_panic, each_row};
use crate::{Error, ParallelOptions, Result, TextSource, TokenList, Tokenizer, Vocabulary};

/// Any tokenizer that has a `tokenizer.json`: byte-level BPE (GPT-2, Llama 3), BPE with byte fallback (Llama 2),
/// WordPiece (BERT), Unigram (T5), word lists.
///
/// It wraps the crate `tokenizers`, which is also used by the Python package of that name, so that ids, offsets and
/// decoded texts are the same. Truncation and padding in `tokenizer.json` are ignored, as in `transformers`: use
/// [`with_truncation`](Self::with_truncation) to truncate, and collators to pad.
///
/// As a [`Tokenizer`] it returns the tokens of a text with the special tokens around them;
/// [`vocabulary`](Self::vocabulary) gives them the same ids as [`encode`](Self::encode).
///
/// ```
/// use brigade_tokens::{BpeTrainer, SpecialToken, TextSource};
///
/// let texts = TextSource::memory(["low lower lowest", "new newer newest"])?;
/// let tokenizer = BpeTrainer::new(300).special_tokens(["<|endoftext|>"]).train(&texts)?;
/// let encoding = tokenizer.encode("newest")?;
/// assert_eq!(tokenizer.decode(&encoding.ids, true)?, "newest");
/// assert_eq!(tokenizer.special_id(SpecialToken::End), Some(0));
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
#[derive(Clone)]
pub struct HuggingFaceTokenizer {
    inner: Inner,
    settings: Settings,
    /// Hash of `tokenizer.json`.
    digest: [u8; 32],
    add_special_tokens: bool,
    truncation: Option<Truncation>,
}

/// File of a tokenizer, and files with its settings in the same folder.
const FILE: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";

impl HuggingFaceTokenizer {
    /// Reads a `tokenizer.json`, given the path of the file or of its folder. The special tokens, the maximum length
    /// and the padding side come from `tokenizer_config.json` and `special_tokens_map.json` beside it.
    ///
    /// # Errors
    /// Fails if a file cannot be read, is empty, or is not UTF-8, not JSON or not a tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join(FILE) } else { path.to_owned() };
        let bytes = fs::read(&file).map_err(io_error(&file))?;
        let name = || file.display().to_string();
        let beside = |name: &str| -> Result<Option<Value>> {
            let path = file.with_file_name(name);
            if !path.exists() {
                return Ok(None);
            }
            let bytes = fs::read(&path).map_err(io_error(&path))?;
            let json = serde_json::from_slice(&bytes);
            json.map(Some).map_err(|error| Error::Format { path, detail: error.to_string() })
        };
        let refuse = |error| match error {
            Error::NotUtf8 { offset, .. } => Error::NotUtf8 { name: name(), offset },
            error => Error::Format { path: file.clone(), detail: error.to_string() },
        };
        Self::read(&bytes, beside(CONFIG)?.as_ref(), beside(SPECIAL)?.as_ref()).map_err(refuse)
    }

    /// Creates a tokenizer from the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// Fails if the bytes are empty, or are not UTF-8, not JSON or not a tokenizer.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<Self> {
        Self::read(bytes.as_ref(), None, None)
    }

    fn read(bytes: &[u8], config: Option<&Value>, special: Option<&Value>) -> Result<Self> {
        if bytes.trim_ascii().is_empty() {
            return Err(Error::Refused("tokenizer.json is empty".into()));
        }
        std::str::from_utf8(bytes).map_err(|error| Error::NotUtf8 {
            name: FILE.into(),
            offset: error.valid_up_to() as u64,
        })?;
        // The crate panics if a part of the file is not JSON.
        serde_json::from_slice::<IgnoredAny>(bytes)
            .map_err(|error| Error::Refused(format!("tokenizer.json is not JSON: {error}")))?;
        let inner = catch_panic(|| {
            Inner::from_bytes(bytes)
                .map_err(|error| Error::Refused(format!("tokenizer.json is broken: {error}")))
        })?;
        let mut hasher = Sha256::new();
        hasher.update(bytes);
        for json in [config, special] {
            hasher.update(json.map(Value::to_string).unwrap_or_default());
        }
        Self::with(inner, bytes, config, special, hasher.finalize().into())
    }

    fn with(
        mut inner: Inner,
        json: &[u8],
        config: Option<&Value>,
        special: Option<&Value>,
        digest: [u8; 32],
    ) -> Result<Self> {
        catch_panic(|| {
            inner.with_truncation(None).map_err(refused)?;
            inner.with_padding(None);
            let settings = Settings::read(&inner, json, config, special);
            // `transformers` does the same with special tokens that only the settings name.
            let missing = settings.names().filter(|token| inner.token_to_id(token).is_none());
            let missing: Vec<_> = missing.map(|token| AddedToken::from(token, true)).collect();
            if !missing.is_empty() {
                inner.add_special_tokens(missing).map_err(refused)?;
            }
            Ok(Self { inner, settings, digest, add_special_tokens: true, truncation: None })
        })
    }

    /// Sets whether the special tokens that a model expects around a text (`[CLS]`, `[SEP]`, `<s>`) are added. Defaults
    /// to `true`.
    #[must_use]
    pub fn with_special_tokens(mut self, add: bool) -> Self {
        self.add_special_tokens = add;
        self
    }

    /// Enables truncation of texts that are too long.
    ///
    /// # Errors
    /// Fails if the special tokens around a text alone reach the maximum length.
    pub fn with_truncation(mut self, truncation: Truncation) -> Result<Self> {
        let around = catch_panic(|| Ok(self.around(true)))?;
        if truncation.max_length <= around {
            return Err(Error::InvalidArgument(format!(
                "texts of at most {} tokens have no room beside the {around} special tokens around a pair",
                truncation.max_length
            )));
        }
        self.truncation = Some(truncation);
        Ok(self)
    }

    /// Encodes a text as token ids.
    ///
    /// # Errors
    /// Fails if the tokenizer rejects the text, for example because it lacks an unknown token, or if the truncation
    /// strategy cannot make it short enough.
    pub fn encode(&self, text: &str) -> Result<Encoding> {
        self.encode_texts(text, None, OffsetType::Byte).map(|encoding| Encoding::of(&encoding))
    }

    /// Encodes a pair of texts, such as a question and a context, as token ids.
    ///
    /// # Errors
    /// Returns the same errors as [`encode`](Self::encode).
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Encoding> {
        let encoding = self.encode_texts(first, Some(second), OffsetType::Byte);
        encoding.map(|encoding| Encoding::of(&encoding))
    }

    /// Does the same as the crate's own `encode`, except that texts are truncated here: its version 0.23.2 renumbers
    /// words in a text that is truncated on its left.
    fn encode_texts(
        &self,
        first: &str,
        second: Option<&str>,
        offsets: OffsetType,
    ) -> Result<tokenizers::Encoding> {
        let encode = || {
            let mut first = self.encode_sequence(first, 0, offsets)?;
            let mut second =
                second.map(|text| self.encode_sequence(text, 1, offsets)).transpose()?;
            if let Some(truncation) = self.truncation {
                let around =
                    if self.add_special_tokens { self.around(second.is_some()) } else { 0 };
                let params = truncation.params(around);
                (first, second) = truncate_encodings(first, second, &params)?;
            }
            self.inner.post_process(first, second, self.add_special_tokens)
        };
        catch_panic(|| encode().map_err(refused))
    }

    fn encode_sequence(
        &self,
        text: &str,
        type_id: u32,
        offsets: OffsetType,
    ) -> tokenizers::Result<tokenizers::Encoding> {
        let added = self.inner.get_added_vocabulary();
        let mut pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        // The part that is truncated on the right is not tokenized in the first place.
        let enough = self.truncation.and_then(|it| it.enough(type_id));
        let enough = enough.map(|length| (length, TruncationDirection::Right));
        self.inner.get_model().tokenize_in_pretokenized(&mut pieces, enough)?;
        pieces.into_encoding(None, type_id, offsets)
    }

    /// Returns the number of special tokens that are added around a text, or a pair.
    fn around(&self, is_pair: bool) -> usize {
        self.inner.get_post_processor().map_or(0, |it| it.added_tokens(is_pair))
    }

    /// Returns the token ids of a text, without the other parts of an [`Encoding`], which is faster.
    ///
    /// # Errors
    /// Returns the same errors as [`encode`](Self::encode).
    pub fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encode_texts(text, None, OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes all texts of a source on several threads, texts of two fields as pairs. Calls `consume` with each text's
    /// index and encoding, in the order of the texts, like [`tokenize_all`](crate::tokenize_all).
    ///
    /// # Errors
    /// Returns the same errors as [`tokenize_all`](crate::tokenize_all), and fails if texts have more than two fields.
    pub fn encode_all(
        &self,
        texts: &TextSource,
        options: ParallelOptions<'_>,
        consume: impl FnMut(usize, Encoding) -> Result<()>,
    ) -> Result<()> {
        let encode = |fields: Vec<String>| match fields.as_slice() {
            [text] => self.encode(text),
            [first, second] => self.encode_pair(first, second),
            _ => Err(Error::InvalidArgument(format!(
                "a text of {} fields cannot be encoded; give one, or two for a pair",
                fields.len()
            ))),
        };
        each_row(texts, options, encode, consume)
    }

    /// Decodes token ids to a text. Special tokens are left out if `skip_special_tokens` is `true`. An id that the
    /// tokenizer does not have is ignored.
    ///
    /// # Errors
    /// Fails if the tokenizer rejects the ids.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        catch_panic(|| self.inner.decode(ids, skip_special_tokens).map_err(refused))
    }

    /// Returns the id of a token.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the token with this id.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the id of a special token: the one in the settings beside `tokenizer.json`, or, if these do not contain
    /// it, the one of the tokenizer's special tokens that has a usual name, such as `[PAD]` or `<pad>`.
    #[must_use]
    pub fn special_id(&self, token: SpecialToken) -> Option<u32> {
        self.id(self.settings.name(token)?)
    }

    /// Returns the ids of all special tokens, in order.
    #[must_use]
    pub fn special_ids(&self) -> Vec<u32> {
        let added = self.inner.get_added_tokens_decoder();
        let mut ids: Vec<u32> =
            added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Returns the vocabulary size, including added tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the model's maximum number of tokens (`model_max_length`), if the settings contain it.
    #[must_use]
    pub fn max_length(&self) -> Option<usize> {
        self.settings.max_length
    }

    /// Returns the side on which the model expects padding. Defaults to the right if the settings do not contain it.
    #[must_use]
    pub fn padding_side(&self) -> Side {
        self.settings.padding_side
    }

    /// Returns the side from which texts are truncated. Defaults to the right if the settings do not contain it.
    #[must_use]
    pub fn truncation_side(&self) -> Side {
        self.settings.truncation_side
    }

    /// Returns a vocabulary of all tokens with their ids, and with the tokenizer's unknown token.
    ///
    /// # Errors
    /// Fails if most of the numbers up to the largest id are not ids of a token.
    pub fn vocabulary(&self) -> Result<Vocabulary> {
        let tokens = self.inner.get_vocab(true);
        let size = tokens.values().max().map_or(0, |id| *id as usize + 1);
        if size > 2 * tokens.len() + 1024 {
            return Err(Error::Refused(format!(
                "{} tokens have ids up to {}, and most numbers in between are of none",
                tokens.len(),
                size - 1
            )));
        }
        let mut numbered: Vec<Box<str>> = vec![NO_TOKEN.into(); size];
        for (token, id) in tokens {
            if let Some(place) = numbered.get_mut(id as usize) {
                *place = token.into();
            }
        }
        let vocabulary = Vocabulary::new(numbered)?;
        match self.settings.name(SpecialToken::Unknown) {
            Some(unknown) => vocabulary.with_unknown(unknown),
            None => Ok(vocabulary),
        }
    }

    /// Writes `tokenizer.json`, which Python's `tokenizers` and `transformers` can read, and `tokenizer_config.json`
    /// with the special tokens and the maximum length, into a folder, which is created if it does not exist.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(io_error(folder))?;
        let json = catch_panic(|| self.inner.to_string(true).map_err(refused))?;
        write_whole(&folder.join(FILE), |file| file.write_all(json.as_bytes()))?;
        let config = format!("{:#}\n", self.settings.to_json());
        write_whole(&folder.join(CONFIG), |file| file.write_all(config.as_bytes()))
    }
}

impl Tokenizer for HuggingFaceTokenizer {
    /// Appends the tokens of the ids: text that the vocabulary lacks becomes the unknown token, not the piece of the
    /// text.
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
        for id in self.ids(text)? {
            let token = self.token(id);
            tokens.push(&token.ok_or_else(|| Error::Refused(format!("id {id} has no token")))?);
        }
        Ok(())
    }

    fn describe(&self) -> Value {
        let digest: String = self.digest.iter().map(|byte| format!("{byte:02x}")).collect();
        serde_json::json!({
            "kind": "hugging_face",
            "sha256": digest,
            "special_tokens": self.add_special_tokens,
            "truncation": self.truncation.map(Truncation::describe),
        })
    }
}

impl fmt::Debug for HuggingFaceTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HuggingFaceTokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("settings", &self.settings)
            .field("add_special_tokens", &self.add_special_tokens)
            .field("truncation", &self.truncation)
            .finish_non_exhaustive()
    }
}

/// Converts an error of the crate `tokenizers`.
#[allow(clippy::needless_pass_by_value, reason = "as `map_err` gives it")]
fn refused(error: tokenizers::Error) -> Error {
    Error::Refused(error.to_string())
}

/// Entry of a vocabulary for a number without a token. It occurs in no text, because no token contains NUL.
const NO_TOKEN: &str = "\0no token";
