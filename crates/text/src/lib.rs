//! Batches of tensors from texts, on one process or many, and Learners that train on them.
//!
//! Tokenizers are in `brigade-tokens`, which does not use tensors. This crate contains datasets for language models,
//! samplers that sort by length for classifiers, packing and collators for transformers, and fastai's text Learners.
//!
//! ```
//! use brigade_data::DataLoader;
//! use brigade_text::LanguageModelData;
//!
//! let texts = vec![(0..30).collect::<Vec<i64>>(), (30..50).collect()];
//! let data = LanguageModelData::new(texts, 2, 10)?;
//! let loader = DataLoader::new(data).batch_size(2);
//! let batches = loader.iter().collect::<Result<Vec<_>, _>>()?;
//! let (x, y) = &**batches.get(1).expect("24 tokens of each row are three steps");
//! assert_eq!(i64::try_from(x.get(1).get(0))?, 34);
//! assert_eq!(i64::try_from(y.get(1).get(0))?, 35);
//! assert_eq!(batches.iter().map(|batch| batch.0.size()[1]).collect::<Vec<_>>(), [10, 10, 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How tokens become batches
//!
//! Token ids are not copied after tokenization: `Documents` (`documents.rs`) reads ranges of texts, and subsets,
//! reversed texts and orders are views of it. `Stream` is the concatenation of all texts. [`LanguageModelData`] cuts it
//! into as many rows as all ranks have together, and numbers its samples so that Accelerate's sharding scheme gives
//! each rank the same rows at every step; a batch with other samples is an error. So each rank keeps the hidden states
//! of its rows without communication.
//!
//! [`SortedSampler`] orders samples, not batches: each round is a piece of the order that all ranks share, so that they
//! have texts of similar length. fastai gives each rank a block of the order.
//!
//! The loss of a language model is computed together with its head ([`brigade_torch`], `cross_entropy.rs`). With the
//! Accelerator it is part of the model's forward (`Labelled`), because the reducer covers only the parameters that the
//! forward uses. With a Learner, a callback switches the head during a fit (`learner/loss.rs`), because metrics and
//! predictions need logits.

mod codec;
mod collate;
mod documents;
mod error;
mod labelled;
mod labels;
mod language_model;
mod learner;
mod loaders;
mod packing;
mod padding;
mod sequences;
mod sorted;
mod stream;

pub use brigade_tokens as tokens;
pub use codec::{TextCodec, codec_from};
pub use collate::{
    MaskedTokens, Sequence, SequenceBatch, SequenceCollator, SequenceLabel, align_labels,
    words_of_offsets,
};
pub use documents::{Backwards, Documents, Subset};
pub use error::TextError;
pub use labelled::{LabelledTexts, UnlabelledTexts};
pub use labels::{Categories, IGNORED};
pub use language_model::LanguageModelData;
pub use learner::{
    Generate, LanguageLearnerOptions, ModelResetter, PretrainedText, RnnRegularizer, TextLearner,
    TextLearnerOptions, language_model_learner, text_classifier_learner,
};
pub use loaders::{TextBatches, TextData, TextDataLoaders, TextLoaders, TextTarget};
pub use packing::{Blocks, PackedBatch, PackedTexts};
pub use padding::Padding;
pub use sequences::{SequenceData, Sequences};
pub use sorted::{LengthGrouped, SortedSampler};
