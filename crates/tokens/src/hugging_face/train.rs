//! Training of byte-level BPE.

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Inner};

use super::{HuggingFaceTokenizer, refused};
use crate::parallel::catch_panic;
use crate::{Error, Result, TextSource};

/// Trains a byte-level BPE tokenizer, like that of GPT-2, on texts: Python's `ByteLevelBPETokenizer`.
///
/// Texts are split into words with the spaces before them, words into bytes, and the most common pairs of neighbours
/// are merged repeatedly. The same texts give the same tokenizer, whatever the number of threads. The distinct words of
/// the texts are kept in memory.
#[derive(Clone, Debug)]
pub struct BpeTrainer {
    vocab_size: usize,
    min_frequency: u64,
    special_tokens: Vec<String>,
    add_prefix_space: bool,
}

impl BpeTrainer {
    /// Creates a trainer of a vocabulary of this size, including special tokens and the 256 bytes. By default pairs
    /// that occur at least twice are merged, and there are no special tokens.
    #[must_use]
    pub fn new(vocab_size: usize) -> Self {
        Self { vocab_size, min_frequency: 2, special_tokens: Vec::new(), add_prefix_space: false }
    }

    /// Sets the minimum number of occurrences of a pair that is merged. Defaults to 2.
    #[must_use]
    pub fn min_frequency(mut self, times: u64) -> Self {
        self.min_frequency = times;
        self
    }

    /// Sets the special tokens, which get the first ids in this order.
    #[must_use]
    pub fn special_tokens<T: Into<String>>(mut self, tokens: impl IntoIterator<Item = T>) -> Self {
        self.special_tokens = tokens.into_iter().map(Into::into).collect();
        self
    }

    /// Sets whether a space is added before each text, so that its first word is tokenized like the others. Defaults to
    /// `false`.
    #[must_use]
    pub fn add_prefix_space(mut self, add: bool) -> Self {
        self.add_prefix_space = add;
        self
    }

    /// Trains a tokenizer on the threads of rayon's global pool (`RAYON_NUM_THREADS`).
    ///
    /// # Errors
    /// Fails if the vocabulary size is too small for the bytes and special tokens, or a text cannot be read.
    pub fn train(&self, texts: &TextSource) -> Result<HuggingFaceTokenizer> {
        let least = ByteLevel::alphabet().len() + self.special_tokens.len();
        if self.vocab_size < least {
            return Err(Error::InvalidArgument(format!(
                "a vocabulary of {} tokens has no room for the 256 bytes and {} special tokens; {least} is the least",
                self.vocab_size,
                self.special_tokens.len()
            )));
        }
        let special = self.special_tokens.iter().map(|token| AddedToken::from(token, true));
        let trainer = BpeTrainerBuilder::new()
            .vocab_size(self.vocab_size)
            .min_frequency(self.min_frequency)
            .special_tokens(special.collect())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .show_progress(false)
            .build();
        let byte_level = ByteLevel::new(self.add_prefix_space, true, true);
        let inner = catch_panic(|| {
            let mut inner = Inner::new(ModelWrapper::BPE(BPE::default()));
            inner.with_pre_tokenizer(Some(byte_level));
            inner.with_decoder(Some(ByteLevel::default()));
            inner.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
            // The trainer takes texts, not errors: the iterator ends at the first error.
            let failed = Mutex::new(None);
            let all = texts.texts()?.map_while(|text| match text {
                Ok(text) => Some(text),
                Err(error) => {
                    *failed.lock() = Some(error);
                    None
                }
            });
            inner.train(&mut TrainerWrapper::BpeTrainer(trainer), all).map_err(refused)?;
            match failed.into_inner() {
                Some(error) => Err(error),
                None => Ok(inner),
            }
        })?;
        let json = inner.to_string(false).map_err(refused)?;
        let digest = Sha256::digest(json.as_bytes()).into();
        HuggingFaceTokenizer::with(inner, json.as_bytes(), None, None, digest)
    }
}
