//! Architectures with the names, initial values and weights files of their PyTorch versions, built from the layers of
//! [`brigade_nn`].
//!
//! ```
//! use brigade_models::{ResNet, ResNetOptions};
//! use brigade_nn::Model;
//!
//! let small = ResNetOptions::basic([1, 1, 1, 1]);
//! let model = Model::new(|path| ResNet::new(path, 10, small))?;
//! assert_eq!(model.state_dict().names().next(), Some("conv1.weight"));
//! # Ok::<(), brigade_torch::Error>(())
//! ```
//!
//! Well-known image classifiers are also available as functions that return a constructor:
//!
//! ```
//! use brigade_models::resnet18;
//! use brigade_nn::Model;
//!
//! assert_eq!(Model::new(resnet18(1000))?.num_parameters(), 11_689_512);
//! # Ok::<(), brigade_torch::Error>(())
//! ```

mod awd_lstm;
mod classifier;
mod cnn;
mod conv_norm;
mod convnext;
mod drop_path;
mod head;
mod hub;
mod init;
mod input_channels;
mod pretrained;
mod residual;
mod resnet;
mod transfer;
mod transformer;
mod unet;
mod vit;
mod xresnet;
#[doc(hidden)]
pub mod zoo;

pub use awd_lstm::{
    AwdLstm, AwdLstmDropout, AwdLstmModel, AwdLstmOptions, EmbeddingReport, LanguageModel,
    LanguageModelHead, LanguageModelOptions, NextWordOptions, PretrainedLanguageModel,
    RecurrentState, RnnOutputs, SentenceEncoder, TextClassifier, TextClassifierOptions,
    encoder_state, generate_words, load_encoder, masked_concat_pool, next_word, read_encoder,
    save_encoder, with_encoder, write_encoder,
};
pub use classifier::ImageClassifier;
pub use cnn::{Cnn, CnnOptions};
pub use convnext::{ConvNeXt, ConvNeXtOptions};
pub use head::{Head, HeadOptions};
pub use hub::cached_hub_file;
#[cfg(feature = "hub")]
pub use hub::{Hub, HubError};
pub use input_channels::InputChannels;
pub use pretrained::{Pretrained, PretrainedReport};
pub use resnet::{ResNet, ResNetBody, ResNetOptions, Stem};
pub use transfer::{Architecture, TransferModel};
pub use transformer::{
    BeamSearch, Beams, Bert, BertForMaskedLm, BertForSequenceClassification,
    BertForTokenClassification, BertOptions, CacheKind, CausalBody, CausalLm, CausalModel,
    ConfigError, EarlyStopping, GeneratedText, GeneratedTokens, GenerationOptions, Gpt2,
    Gpt2LmHead, Gpt2Options, HeadInput, IGNORED_LABEL, KeyValueCache, Labelled, Llama,
    Llama3Scaling, LlamaForCausalLm, LlamaOptions, Mixtral, MixtralForCausalLm, MixtralOptions,
    NextLogits, ProblemType, RecordedStep, SeenTokens, StageCaches, StagedModel, StagedTokens,
    TokenLoss, Tokens, Transformer, TransformerOptions, UncachedModel, VocabularyLogits,
    causal_lm_loss, joined_layers, no_decay_parameters, sequence_loss, token_loss,
};
pub use unet::{UNet, UNetOptions};
pub use vit::{VisionTransformer, VisionTransformerOptions};
pub use xresnet::{BlockWidth, XResNet, XResNetOptions};
#[doc(inline)]
pub use zoo::*;
