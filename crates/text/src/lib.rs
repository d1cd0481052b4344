//! Texts as batches of tensors, on one process or many, and the Learners that train on them.
//!
//! Tokens come from `brigade-tokens`, which has no tensors. This crate has streams for language models, sorted and
//! packed batches for classifiers, collators, and fastai's text Learners.
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
//! Nothing is copied after tokenizing: `Documents` (`documents.rs`) reads ranges of texts, and parts, directions and
//! orders are views of it. `Stream` is all texts one after the other. [`LanguageModelData`] cuts it into as many rows
//! as all ranks have together, and numbers its samples so that the usual rule of sharding gives each rank the same
//! rows at every step; a batch with other samples is refused. So hidden states stay with their rows without a
//! message.
//!
//! The sorted order is a sampler of samples, not of batches: rounds of batches are pieces of it, which all ranks
//! share. fastai gives each rank a block.
//!
//! The loss of a language model is computed together with its head ([`brigade_torch`], `cross_entropy.rs`). With the
//! Accelerator it is a part of the model's forward (`Labelled`), because the reducer covers what goes through the
//! forward. With a Learner a callback switches the head for the time of a fit (`learner/loss.rs`), because metrics
//! and predictions need scores.

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
