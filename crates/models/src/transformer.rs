//! Transformers under Hugging Face's names: GPT-2, BERT, Llama and Mixtral, with their losses and generation.

mod attention;
mod bert;
mod blocks;
mod cache;
mod causal_lm;
mod config;
mod context;
mod conv1d;
mod decay;
mod generate;
mod gpt2;
mod groups;
mod head;
mod init;
mod labelled;
mod llama;
mod loss;
mod mixtral;
mod pretrained;
mod rotary;
mod rotated_attention;
mod tokens;
mod vocabulary_logits;

pub use self::bert::{
    Bert, BertForMaskedLm, BertForSequenceClassification, BertForTokenClassification, BertOptions,
};
pub use self::cache::{CacheKind, KeyValueCache};
pub use self::causal_lm::{CausalBody, CausalLm, HeadInput};
pub use self::config::{ConfigError, TransformerOptions};
pub use self::decay::no_decay_parameters;
pub use self::generate::{
    BeamSearch, Beams, CausalModel, EarlyStopping, GeneratedText, GeneratedTokens,
    GenerationOptions, NextLogits, RecordedStep, SeenTokens, StageCaches, StagedModel,
    StagedTokens, UncachedModel,
};
pub use self::gpt2::{Gpt2, Gpt2LmHead, Gpt2Options};
pub use self::groups::joined_layers;
pub use self::labelled::Labelled;
pub use self::llama::{Llama, LlamaForCausalLm, LlamaOptions};
pub use self::loss::{
    IGNORED_LABEL, ProblemType, TokenLoss, causal_lm_loss, sequence_loss, token_loss,
};
pub use self::mixtral::{Mixtral, MixtralForCausalLm, MixtralOptions};
pub use self::pretrained::Transformer;
pub use self::rotary::Llama3Scaling;
pub use self::tokens::Tokens;
pub use self::vocabulary_logits::VocabularyLogits;

/// Returns the full name of a parameter in a module; the root's name is empty.
fn full_name(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}.{name}") }
}
