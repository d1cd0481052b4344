//! Texts as tokens, without tensors: where texts come from, how they are split, and the numbers that tokens get.
//!
//! - [`TextSource`]: texts of folders, tables and files of lines.
//! - [`Tokenizer`]: splits a text into a [`TokenList`]; [`tokenize_all`] does so with all texts of a source.
//! - [`Vocabulary`]: the numbers of tokens, counted with [`TokenCounts`] and chosen by [`VocabularyOptions`].

mod english;
mod error;
mod fastai;
mod files;
mod parallel;
pub mod rules;
mod source;
mod token_list;
mod tokenizer;
mod vocabulary;

pub use english::English;
pub use error::{Error, Result};
pub use fastai::FastaiTokenizer;
pub use parallel::{ParallelOptions, TokenProgress, tokenize_all};
pub use source::{CsvOptions, FolderOptions, LinesOptions, TextSource};
pub use token_list::TokenList;
pub use tokenizer::Tokenizer;
pub use vocabulary::{SPECIAL_TOKENS, TokenCounts, Vocabulary, VocabularyOptions};
