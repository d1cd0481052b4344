//! Arguments of `accelerate launch` as they were given: names, values and sources.

use super::{Precision, SettingsError};

/// Argument of `accelerate launch`, from a flag, an environment variable, or a key of a file.
///
/// Names are those of the keys in Accelerate's files (`fsdp_version`, `zero_stage`). Dashes count as underscores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Name of the argument, in lower case with underscores.
    pub name: String,
    /// Value of the argument, as text.
    pub value: String,
    /// Source of the argument, for messages: `accelerate.yaml:7`, `environment FSDP_VERSION`.
    pub origin: String,
}

impl Given {
    /// Creates an argument from its name, value and source. The name is converted to lower case, and its dashes to
    /// underscores.
    #[must_use]
    pub fn new(name: &str, value: impl Into<String>, origin: impl Into<String>) -> Self {
        let name = name.to_ascii_lowercase().replace('-', "_");
        Self { name, value: value.into(), origin: origin.into() }
    }

    /// Converts the environment variables of `accelerate launch` to arguments, and skips all others.
    ///
    /// ```
    /// use brigade_sharding::settings::Given;
    ///
    /// let given = Given::from_variables([("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"), ("HOME", "/root")]);
    /// assert_eq!(given, [Given::new("zero_stage", "3", "environment ACCELERATE_DEEPSPEED_ZERO_STAGE")]);
    /// ```
    #[must_use]
    pub fn from_variables<'a>(
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Vec<Self> {
        let argument = |(variable, value): (&str, &str)| {
            let name = argument_of(variable)?;
            Some(Self::new(&name, value, format!("environment {variable}")))
        };
        variables.into_iter().filter_map(argument).collect()
    }

    /// Returns `true` if the value is one of the words for true of Python and YAML.
    pub(super) fn is_true(&self) -> bool {
        truth(&self.value) == Some(true)
    }

    pub(super) fn wrong(&self, expected: impl Into<String>) -> SettingsError {
        SettingsError::Value {
            origin: self.origin.clone(),
            key: self.name.clone(),
            value: self.value.clone(),
            expected: expected.into(),
        }
    }

    pub(super) fn unsupported(&self, reason: impl Into<String>) -> SettingsError {
        SettingsError::Unsupported {
            origin: self.origin.clone(),
            key: self.name.clone(),
            value: self.value.clone(),
            reason: reason.into(),
        }
    }

    pub(super) fn note(&self, text: impl Into<String>) -> super::Note {
        super::Note {
            key: self.name.clone(),
            value: self.value.clone(),
            origin: self.origin.clone(),
            text: text.into(),
        }
    }

    /// Parses the value as a Boolean, with the words that Accelerate accepts.
    pub(super) fn truth(&self) -> Result<bool, SettingsError> {
        truth(&self.value).ok_or_else(|| self.wrong("true or false"))
    }

    pub(super) fn count(&self) -> Result<u64, SettingsError> {
        self.value.trim().parse().map_err(|_| self.wrong("a whole number"))
    }
}

/// Returns the name of the argument that an environment variable of Accelerate stands for.
fn argument_of(variable: &str) -> Option<String> {
    let name = match variable {
        "ACCELERATE_USE_FSDP" => "use_fsdp",
        "ACCELERATE_USE_DEEPSPEED" => "use_deepspeed",
        "ACCELERATE_USE_MEGATRON_LM" => "use_megatron_lm",
        "ACCELERATE_USE_PARALLELISM_CONFIG" => "use_parallelism_config",
        "ACCELERATE_MIXED_PRECISION" => "mixed_precision",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" => "deepspeed_gradient_accumulation_steps",
        "ACCELERATE_GRADIENT_CLIPPING" => "gradient_clipping",
        "ACCELERATE_CONFIG_DS_FIELDS" => "deepspeed_fields_from_accelerate_config",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE" => "deepspeed_config_file",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT" => "zero3_init_flag",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES" => "deepspeed_moe_layer_cls_names",
        "FSDP_TRANSFORMER_CLS_TO_WRAP" => "fsdp_transformer_layer_cls_to_wrap",
        _ => match variable.strip_prefix("ACCELERATE_DEEPSPEED_") {
            Some(name) => name,
            None if variable.starts_with("FSDP_") => variable,
            None if variable.starts_with("PARALLELISM_CONFIG_") => variable,
            None if variable.starts_with("MEGATRON_LM_") => variable,
            None => return None,
        },
    };
    Some(name.to_ascii_lowercase())
}

/// Parses a Boolean, as Accelerate's `str_to_bool` does.
pub(super) fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" | "t" | "true" | "on" | "1" => Some(true),
        "n" | "no" | "f" | "false" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// Arguments by name. If several have the same name, the last one counts.
#[derive(Clone, Copy)]
pub(super) struct Values<'a>(&'a [Given]);

impl<'a> Values<'a> {
    pub(super) fn new(given: &'a [Given]) -> Self {
        Self(given)
    }

    pub(super) fn find(self, name: &str) -> Option<&'a Given> {
        self.0.iter().rfind(|it| it.name == name)
    }

    pub(super) fn with_prefix(self, prefix: &'a str) -> impl Iterator<Item = &'a Given> {
        self.0.iter().filter(move |it| it.name.starts_with(prefix))
    }

    /// Parses an argument as a Boolean. Defaults to `false`.
    pub(super) fn switch(self, name: &str) -> Result<bool, SettingsError> {
        self.find(name).map_or(Ok(false), Given::truth)
    }

    pub(super) fn precision(self) -> Result<Option<Precision>, SettingsError> {
        let Some(given) = self.find("mixed_precision") else { return Ok(None) };
        let precision = Precision::parse(&given.value.to_ascii_lowercase());
        precision.map(Some).ok_or_else(|| given.wrong("no, fp16, bf16 or fp8"))
    }
}

/// Returns the name that is most similar to `word`, if one is similar enough.
pub(super) fn closest(
    word: &str,
    names: impl Iterator<Item = &'static str>,
) -> Option<&'static str> {
    let likeness = |name| (strsim::jaro_winkler(word, name), name);
    let closest = names.map(likeness).max_by(|a, b| a.0.total_cmp(&b.0));
    closest.filter(|(likeness, _)| *likeness >= 0.8).map(|(_, name)| name)
}
