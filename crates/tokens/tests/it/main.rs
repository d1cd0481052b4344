//! Tokens of texts: rules, tokenizers, vocabularies, sources and the cache.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod cache;
mod hugging_face;
mod parallel;
#[cfg(feature = "parquet")]
mod parquet;
#[path = "../common/random_texts.rs"]
mod random_texts;
mod sources;
mod tokenization;
mod tokenizer_properties;
mod vocabulary;
