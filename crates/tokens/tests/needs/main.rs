//! Tokens beside fastai's, spaCy's and those of Python's `tokenizers` on this machine.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod fastai;
mod hugging_face_peer;
#[path = "../common/random_texts.rs"]
mod random_texts;

brigade_test_needs::main!();
