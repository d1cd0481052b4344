//! Reading and writing of Hugging Face's `config.json`.

use std::path::{Path, PathBuf};

use brigade_sharding::Inference;
use brigade_torch::{Activation, Error, ErrorKind, dtype_of};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use tch::Kind;

/// Options of a transformer, under the names of Hugging Face's `config.json`.
pub trait TransformerOptions: Clone + std::fmt::Debug + Sized {
    /// The `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;

    /// Reads the content of a `config.json`.
    ///
    /// # Errors
    /// Any [`ConfigError`] except [`ConfigError::Read`].
    fn from_config(config: Map<String, Value>) -> Result<Self, ConfigError>;

    /// Returns the content of a `config.json` with these options, without the entries that depend on the model
    /// (`architectures`, `dtype`).
    fn to_config(&self) -> Map<String, Value>;

    /// Reads the `config.json` of a folder.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if the file cannot be read or is not the config of a transformer of this type.
    fn from_folder(folder: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = folder.as_ref().join(CONFIG);
        let text = std::fs::read(&path)
            .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
        let config = serde_json::from_slice(&text).map_err(|error| ConfigError::Json {
            reason: format!("{}: {error}", path.display()),
        })?;
        Self::from_config(config)
    }

    /// Returns the sizes that decide the memory of text generation beside the weights: a key-value cache of `kind` for
    /// `samples` texts of `tokens` tokens, prompt included, and the logits. [`Inference::reserve`] is what a device map
    /// has to keep for it. `None` for a model without a key-value cache, which is the default, and for a kind that
    /// files do not have.
    ///
    /// ```
    /// use brigade_models::{LlamaOptions, TransformerOptions};
    /// use tch::Kind;
    ///
    /// let options = LlamaOptions { num_key_value_heads: Some(8), ..Default::default() };
    /// let inference = options.inference(4, 4096, Kind::BFloat16).expect("Llama has a cache");
    /// // Keys and values of 8 heads of 128 numbers of 2 bytes in each of 32 layers.
    /// assert_eq!(inference.cache_per_token(), 2 * 8 * 128 * 2 * 32);
    /// ```
    fn inference(&self, samples: u64, tokens: u64, kind: Kind) -> Option<Inference> {
        let _ = (samples, tokens, kind);
        None
    }
}

/// Returns the sizes of a model with a key-value cache in each layer.
pub(super) fn inference_of(
    [layers, key_width, vocabulary]: [i64; 3],
    [samples, tokens]: [u64; 2],
    kind: Kind,
) -> Option<Inference> {
    Some(Inference {
        layers: u64::try_from(layers).ok()?,
        key_width: u64::try_from(key_width).ok()?,
        vocabulary: u64::try_from(vocabulary).ok()?,
        samples,
        tokens,
        dtype: dtype_of(kind)?,
    })
}

/// Name of the config file.
pub(super) const CONFIG: &str = "config.json";

/// Error for a `config.json` that does not describe a transformer of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },

    /// The config is not JSON, or a value has another type than in Hugging Face's format.
    #[error("the config cannot be read: {reason}")]
    Json {
        /// Description of the mistake.
        reason: String,
    },

    /// The config belongs to another architecture.
    #[error("the config is of a model of the type `{found}`, expected `{expected}`")]
    ModelType {
        /// The `model_type` in the file.
        found: String,
        /// The `model_type` of the requested architecture.
        expected: &'static str,
    },

    /// The activation function is unknown.
    #[error("unknown activation function `{name}`; expected one of {}", activation_names())]
    Activation {
        /// Name of the function in the file.
        name: String,
    },

    /// The position embedding type is not supported.
    #[error("positions of the type `{found}` are not supported, only {known}")]
    Positions {
        /// Position embedding type in the file.
        found: String,
        /// Supported position embedding type.
        known: &'static str,
    },

    /// The architecture has a part that is not supported.
    #[error("`{key}: {value}` is not supported")]
    Unsupported {
        /// Key of the entry.
        key: &'static str,
        /// Value of the entry.
        value: String,
    },
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        let kind = match error {
            ConfigError::Read { .. } => ErrorKind::Io,
            ConfigError::Json { .. }
            | ConfigError::ModelType { .. }
            | ConfigError::Activation { .. }
            | ConfigError::Positions { .. }
            | ConfigError::Unsupported { .. } => ErrorKind::Checkpoint,
        };
        Self::new(kind, error)
    }
}

/// Names of activation functions. The first name of each function is written.
const ACTIVATIONS: [(&str, Activation); 9] = [
    ("relu", Activation::Relu),
    ("relu2", Activation::ReluSquared),
    ("mish", Activation::Mish),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
];

fn activation_names() -> String {
    ACTIVATIONS.map(|(name, _)| name).join(", ")
}

/// Activation functions under the names of `config.json`.
pub(super) mod activation {
    use super::{ACTIVATIONS, Activation, ConfigError, Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        activation: &Activation,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let name = ACTIVATIONS.iter().find(|(_, known)| known == activation);
        serializer.serialize_str(name.map_or("", |(name, _)| name))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Activation, D::Error> {
        let name = String::deserialize(deserializer)?;
        let found = ACTIVATIONS.iter().find(|(known, _)| *known == name);
        let unknown = || serde::de::Error::custom(ConfigError::Activation { name: name.clone() });
        found.map(|(_, activation)| *activation).ok_or_else(unknown)
    }
}

/// Token ids at which a text ends: none, one or several, as in `eos_token_id`.
pub(super) mod token_ids {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize, Serialize)]
    #[serde(untagged)]
    enum Ids {
        One(i64),
        Many(Vec<i64>),
    }

    pub(in super::super) fn serialize<S: Serializer>(
        ids: &[i64],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match ids {
            [] => serializer.serialize_none(),
            [id] => serializer.serialize_i64(*id),
            ids => ids.serialize(serializer),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<i64>, D::Error> {
        Ok(match Option::<Ids>::deserialize(deserializer)? {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Many(ids)) => ids,
        })
    }
}

/// Reads options whose names are those of the config, after checking the model type.
pub(super) fn from_map<O: DeserializeOwned>(
    mut config: Map<String, Value>,
    model_type: &'static str,
) -> Result<O, ConfigError> {
    if let Some(found) = config.get("model_type").filter(|it| it.as_str() != Some(model_type)) {
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        return Err(ConfigError::ModelType { found, expected: model_type });
    }
    for key in ["hidden_act", "activation_function"] {
        let name = config.get(key).and_then(Value::as_str);
        if let Some(name) = name.filter(|name| ACTIVATIONS.iter().all(|(known, _)| known != name)) {
            return Err(ConfigError::Activation { name: name.to_owned() });
        }
    }
    // Entries about the program that has written the file.
    for key in WRITTEN {
        config.remove(key);
    }
    serde_json::from_value(Value::Object(config))
        .map_err(|error| ConfigError::Json { reason: error.to_string() })
}

/// Entries that are replaced when a config is written.
const WRITTEN: [&str; 6] = [
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
];

/// Writes options whose names are those of the config.
pub(super) fn to_map<O: Serialize>(options: &O, model_type: &str) -> Map<String, Value> {
    // Only numbers, texts and maps with texts as keys: the conversion to JSON cannot fail.
    let mut config = match serde_json::to_value(options) {
        Ok(Value::Object(config)) => config,
        _ => Map::new(),
    };
    config.insert("model_type".to_owned(), model_type.into());
    config
}

/// Refuses entries with another value than the supported one.
pub(super) fn refuse(
    config: &Map<String, Value>,
    entries: &[(&'static str, Value)],
) -> Result<(), ConfigError> {
    for (key, built) in entries {
        if let Some(value) = config.get(*key).filter(|value| !value.is_null() && *value != built) {
            return Err(ConfigError::Unsupported { key, value: value.to_string() });
        }
    }
    Ok(())
}
