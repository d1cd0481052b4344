//! Texts as tokens, without tensors: where texts come from, how they are split, and the numbers that tokens get.
//!
//! - [`TextSource`]: texts of folders, tables and files of lines.
//! - [`Tokenizer`]: splits a text into a [`TokenList`]; [`tokenize_all`] does so with all texts of a source.
//! - [`HuggingFaceTokenizer`]: any `tokenizer.json`; [`BpeTrainer`] makes one.
//! - [`TokenCorpus`]: the tokens of all texts as numbers, in memory or in the files of a [`TokenCache`].
//! - [`Vocabulary`]: the numbers of tokens, counted with [`TokenCounts`] and chosen by [`VocabularyOptions`].

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
