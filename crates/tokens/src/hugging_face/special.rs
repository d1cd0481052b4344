//! Special tokens and settings of a tokenizer.

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer as Inner;
use tokenizers::models::ModelWrapper;

use super::Side;

/// A special token of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialToken {
    /// Beginning of a text (`bos_token`).
    Begin,
    /// End of a text (`eos_token`).
    End,
    /// Unknown token: stands for text that the vocabulary lacks (`unk_token`).
    Unknown,
    /// Separator between texts (`sep_token`).
    Separator,
    /// Padding of short texts (`pad_token`).
    Padding,
    /// Classifier token: stands for the whole text (`cls_token`).
    Class,
    /// Mask token: stands for a hidden token in masked language models (`mask_token`).
    Mask,
}

impl SpecialToken {
    /// List of all special tokens.
    pub const ALL: [Self; 7] = [
        Self::Begin,
        Self::End,
        Self::Unknown,
        Self::Separator,
        Self::Padding,
        Self::Class,
        Self::Mask,
    ];

    /// Returns the token's key in the settings.
    const fn key(self) -> &'static str {
        match self {
            Self::Begin => "bos_token",
            Self::End => "eos_token",
            Self::Unknown => "unk_token",
            Self::Separator => "sep_token",
            Self::Padding => "pad_token",
            Self::Class => "cls_token",
            Self::Mask => "mask_token",
        }
    }

    /// Returns the token's usual names.
    const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Begin => &["<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>"],
            Self::End => &["</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>"],
            Self::Unknown => &["[UNK]", "<unk>"],
            Self::Separator => &["[SEP]"],
            Self::Padding => &["[PAD]", "<pad>", "<|pad|>"],
            Self::Class => &["[CLS]"],
            Self::Mask => &["[MASK]", "<mask>"],
        }
    }
}

/// Settings from the files beside `tokenizer.json`.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    names: [Option<String>; SpecialToken::ALL.len()],
    pub(super) max_length: Option<usize>,
    pub(super) padding_side: Side,
    pub(super) truncation_side: Side,
}

impl Settings {
    /// Reads the settings. `special_tokens_map.json` is older than `tokenizer_config.json`, which takes precedence if
    /// both name a token.
    pub(super) fn read(
        inner: &Inner,
        json: &[u8],
        config: Option<&Value>,
        special: Option<&Value>,
    ) -> Self {
        let side = |key| match config.and_then(|config| config.get(key)?.as_str()) {
            Some("left") => Side::Left,
            _ => Side::Right,
        };
        // No limit is written as 10^30.
        let max_length = config.and_then(|config| config.get("model_max_length")?.as_u64());
        let max_length = max_length.filter(|length| *length < LARGE);
        let added = inner.get_added_tokens_decoder();
        let is_special =
            |name: &str| added.values().any(|token| token.special && token.content == name);
        let find = |token: SpecialToken| {
            let named = [config, special].into_iter().flatten().find_map(|json| {
                let value = json.get(token.key())?;
                value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
            });
            let of_model = || match token {
                SpecialToken::Unknown => unknown_of(inner, json),
                _ => None,
            };
            let usual = || token.names().iter().find(|name| is_special(name));
            named.or_else(of_model).or_else(|| usual().map(|name| (*name).to_owned()))
        };
        Self {
            names: SpecialToken::ALL.map(find),
            max_length: max_length.and_then(|length| usize::try_from(length).ok()),
            padding_side: side("padding_side"),
            truncation_side: side("truncation_side"),
        }
    }

    pub(super) fn name(&self, token: SpecialToken) -> Option<&str> {
        self.names.get(token as usize)?.as_deref()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.names.iter().flatten()
    }

    /// Returns the settings in the format of `tokenizer_config.json`.
    pub(super) fn to_json(&self) -> Value {
        let mut json = Map::new();
        for token in SpecialToken::ALL {
            if let Some(name) = self.name(token) {
                json.insert(token.key().into(), name.into());
            }
        }
        if let Some(length) = self.max_length {
            json.insert("model_max_length".into(), length.into());
        }
        json.insert("padding_side".into(), self.padding_side.name().into());
        json.insert("truncation_side".into(), self.truncation_side.name().into());
        json.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        Value::Object(json)
    }
}

#[derive(Deserialize)]
struct UnigramFile {
    model: UnigramModel,
}

#[derive(Deserialize)]
struct UnigramModel {
    unk_id: Option<u32>,
}

/// Returns the unknown token of the model itself.
fn unknown_of(inner: &Inner, json: &[u8]) -> Option<String> {
    let name = match inner.get_model() {
        ModelWrapper::BPE(model) => model.get_unk_token().clone(),
        ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
        ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
        // The model's field is private.
        ModelWrapper::Unigram(_) => {
            let file: UnigramFile = serde_json::from_slice(json).ok()?;
            inner.id_to_token(file.model.unk_id?)
        }
    };
    name.filter(|name| inner.token_to_id(name).is_some())
}

/// Larger values mean that there is no maximum length: no model supports as many tokens.
const LARGE: u64 = 1 << 40;
