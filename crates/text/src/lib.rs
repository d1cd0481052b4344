//! Texts as batches of tensors, on one process or many, and the Learners that train on them.

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
