//! Tokenizers without tensors: sources of texts, tokenizers, vocabularies, and a cache of token ids.
//!
//! - [`TextSource`]: texts of folders, tables and files of lines.
//! - [`Tokenizer`]: splits a text into a [`TokenList`]. [`tokenize_all`] splits all texts of a source.
//! - [`HuggingFaceTokenizer`]: a tokenizer from a `tokenizer.json`. [`BpeTrainer`] trains one.
//! - [`TokenCorpus`]: tokenized texts of a source, in memory or in a file of a [`TokenCache`].
//! - [`Vocabulary`]: the map between tokens and ids, made from [`TokenCounts`] by [`VocabularyOptions`].
//!
//! ```
//! use brigade_tokens::{TokenCounts, VocabularyOptions};
//!
//! let mut counts = TokenCounts::new();
//! counts.add(0, ["xxbos", "to", "be", "or", "not", "to", "be"]);
//! let vocabulary = VocabularyOptions::new().min_freq(2).build(&counts);
//! assert_eq!(vocabulary.id("to"), Some(9));
//! assert_eq!((vocabulary.id("or"), vocabulary.unknown()), (None, Some(0)));
//! assert_eq!(vocabulary.len(), 16);
//! ```
//!
//! # How texts become tokens
//!
//! A [`TextSource`] returns texts by index, with labels and names. A [`Tokenizer`] splits one text, and returns a
//! description of its settings. `each_row` (`parallel.rs`) tokenizes all texts on all threads, in order, with a bounded
//! number of chunks in flight.
//!
//! A [`TokenCorpus`] is a list of the distinct tokens and, for each text, indices into that list (of 2 bytes each if
//! these suffice), in memory or in a file. Only the list is looked up in a vocabulary, so that one file can be used
//! with every vocabulary: that of a language model, that of its classifier, and those of other minimum frequencies. The
//! name of the file is a hash of the texts' content, the tokenizer's description and the crate's version. `cache.rs`
//! writes it under a temporary name, with a lock; checksums detect damage. It is read by `pread` and not mapped; a row
//! of a language model's batch is one read of some 150 bytes.
//!
//! spaCy's tables (`english/*.txt`) are written by a script from an installed spaCy, and are under its licence; the
//! code around them takes time linear in the text. `tests/needs/fastai.rs` compares both on random texts. Hugging Face
//! tokenizers are a wrapper of the crate `tokenizers`, which catches its panics and checks its assumptions about a
//! file.

mod cache;
mod corpus;
mod english;
mod error;
mod fastai;
mod files;
mod hugging_face;
mod parallel;
pub mod rules;
mod source;
mod token_list;
mod tokenizer;
mod vocabulary;

pub use cache::TokenCache;
pub use corpus::{TokenCorpus, TokenIds};
pub use english::English;
pub use error::{Error, Result};
pub use fastai::FastaiTokenizer;
pub use hugging_face::{
    BpeTrainer, Encoding, HuggingFaceTokenizer, Side, SpecialToken, Truncation, TruncationStrategy,
};
pub use parallel::{ParallelOptions, TokenProgress, tokenize_all};
#[cfg(feature = "parquet")]
pub use source::ParquetOptions;
pub use source::{CsvOptions, FolderOptions, LinesOptions, TextSource};
pub use token_list::TokenList;
pub use tokenizer::Tokenizer;
pub use vocabulary::{SPECIAL_TOKENS, TokenCounts, Vocabulary, VocabularyOptions};
