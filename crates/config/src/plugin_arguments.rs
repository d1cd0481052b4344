//! Table of the arguments of `accelerate launch` that configure its plugins, with the types of their values.
//!
//! The table follows Accelerate's code (`prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env`,
//! `prepare_extend_env_parallelism_config`, `setup_fp8_env`, version 1.15).

use Kind::{Bool, Choice, Flag, Float, Integer, OneOrZero, Switch, Text, ThreeOnesOrZeros};

use crate::value::Value as _;

/// Argument of `accelerate launch` for a plugin.
#[derive(Clone, Copy, Debug)]
pub struct PluginArgument {
    /// Name with dashes: the flag without its leading dashes, and the key in `[accelerate]`.
    pub name: &'static str,
    /// Plugin that the argument is for.
    pub plugin: Plugin,
    /// Type of the argument's value.
    pub kind: Kind,
    /// Default value. `None` leaves the argument's variable unset.
    pub default: Option<&'static str>,
    /// Environment variable that the argument becomes, or the common prefix of several. `None` if it does not become
    /// one by itself.
    pub variable: Option<&'static str>,
    /// `true` if Accelerate converts the value to lower case.
    pub(crate) is_lower: bool,
}

/// Accelerate plugin with arguments of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// PyTorch's `FullyShardedDataParallel` and `fully_shard`.
    Fsdp,
    /// DeepSpeed, with its ZeRO stages.
    DeepSpeed,
    /// Megatron-LM, with tensor and pipeline parallelism.
    Megatron,
    /// Parallelism config: tensor, context and sequence parallelism besides data parallelism.
    Parallelism,
    /// Matrix products with 8-bit floating-point numbers.
    Fp8,
}

impl Plugin {
    /// All plugins, in order.
    pub const ALL: [Self; 5] =
        [Self::Fsdp, Self::DeepSpeed, Self::Megatron, Self::Parallelism, Self::Fp8];

    /// Returns the plugin's name for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fsdp => "FSDP",
            Self::DeepSpeed => "DeepSpeed",
            Self::Megatron => "Megatron-LM",
            Self::Fp8 => "fp8",
            Self::Parallelism => "the parallelism config",
        }
    }

    /// Returns the argument that turns the plugin on; `None` for fp8, which is a value of the setting
    /// `mixed-precision`.
    #[must_use]
    pub fn switch(self) -> Option<&'static str> {
        match self {
            Self::Fsdp => Some("use-fsdp"),
            Self::DeepSpeed => Some("use-deepspeed"),
            Self::Megatron => Some("use-megatron-lm"),
            Self::Parallelism => Some("use-parallelism-config"),
            Self::Fp8 => None,
        }
    }

    /// Returns `true` if the plugin's arguments also configure how a Rust program shards its model.
    #[must_use]
    pub fn shards(self) -> bool {
        matches!(self, Self::Fsdp | Self::DeepSpeed | Self::Megatron | Self::Parallelism)
    }

    /// Returns the arguments that turn plugins on.
    pub fn switches() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().filter_map(Self::switch)
    }

    /// Returns the flag that turns the plugin on.
    pub(crate) fn flag(self) -> String {
        let of_fp8 = || "--mixed-precision fp8".to_owned();
        self.switch().map_or_else(of_fp8, |switch| format!("--{switch}"))
    }
}

/// Type of an argument's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A switch without a value, which turns a plugin on.
    Switch,
    /// A flag without a value, which becomes Python's `True`.
    Flag,
    /// A Boolean that Accelerate's parser converts to 1 or 0.
    OneOrZero,
    /// Three Booleans, separated by commas, each of which Accelerate's parser converts to 1 or 0.
    ThreeOnesOrZeros,
    /// A whole number.
    Integer,
    /// A number, or `auto`.
    Float,
    /// One of these words in any case: Accelerate's files have both lower and upper case.
    Choice(&'static [&'static str]),
    /// A Boolean, as Python prints it. Accelerate's own parser takes every text as true here.
    Bool,
    /// A text of any content.
    Text,
}

impl Kind {
    /// Returns `true` if the flag has no value.
    #[must_use]
    pub fn is_switch(self) -> bool {
        matches!(self, Self::Switch | Self::Flag)
    }

    /// Describes the expected value, for errors and help.
    #[must_use]
    pub fn expected(self) -> String {
        match self {
            Self::ThreeOnesOrZeros => {
                "true or false three times, as in true,false,false".to_owned()
            }
            Self::Switch | Self::Flag | Self::OneOrZero | Self::Bool => "true or false".to_owned(),
            Self::Integer => "a whole number".to_owned(),
            Self::Float => "a number, or auto".to_owned(),
            Self::Choice(words) => words.join(" or "),
            Self::Text => "a text".to_owned(),
        }
    }

    /// Normalises the value to the form that Python prints; `None` if it is not as [`expected`](Self::expected).
    fn normal(self, text: &str) -> Option<String> {
        match self {
            Self::Switch => bool::parse(text).map(|it| it.to_string()),
            Self::Integer => text.trim().parse::<i64>().ok().map(|it| it.to_string()),
            // DeepSpeed's word for the value of the program's own configuration.
            Self::Float if text == "auto" => Some(text.to_owned()),
            Self::Float => text.trim().parse::<f64>().ok().map(python_float),
            Self::Flag | Self::Bool => bool::parse(text).map(|it| python_bool(it).to_owned()),
            Self::OneOrZero => bool::parse(text.trim()).map(|it| u8::from(it).to_string()),
            Self::ThreeOnesOrZeros => three(text, |it| u8::from(it).to_string()),
            Self::Choice(words) => {
                words.iter().any(|it| it.eq_ignore_ascii_case(text)).then(|| text.to_owned())
            }
            Self::Text => Some(text.to_owned()),
        }
    }
}

impl PluginArgument {
    /// Returns the argument of that name, if it exists.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        ARGUMENTS.iter().find(|it| it.name == name)
    }

    /// Validates a value and normalises it to the form that is stored.
    ///
    /// # Errors
    /// Returns a description of the expected value.
    pub fn parse(&self, text: &str) -> Result<String, String> {
        self.kind.normal(text).ok_or_else(|| format!("expected {}", self.kind.expected()))
    }

    /// Normalises a value of an Accelerate file. There, Accelerate does not validate numbers, DeepSpeed accepts `auto`,
    /// and Booleans do not pass through the parser of flags.
    pub(crate) fn of_file(&self, text: String) -> String {
        match self.kind {
            Flag | OneOrZero | Float => text,
            // Without brackets YAML parses a list, within parentheses a text.
            ThreeOnesOrZeros => {
                let items = text.trim_matches(|it: char| "()[] ".contains(it));
                three(items, |it| python_bool(it).to_owned()).unwrap_or(text)
            }
            _ => self.parse(&text).unwrap_or(text),
        }
    }
}

/// Parses three Booleans and formats each with `write`.
fn three(text: &str, write: impl Fn(bool) -> String) -> Option<String> {
    let items: Vec<bool> =
        text.split(',').map(|it| bool::parse(it.trim())).collect::<Option<_>>()?;
    let words: Vec<String> = items.into_iter().map(write).collect();
    (words.len() == 3).then(|| words.join(","))
}

/// Returns `True` or `False`.
#[must_use]
pub(crate) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Formats a number as Python prints it: `1.0`, `1e-05`, `1e+16`.
pub(crate) fn python_float(number: f64) -> String {
    let text = format!("{number:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let digits = digits.strip_suffix(".0").unwrap_or(digits);
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Argument for `gradient_accumulation_steps` in a file's `deepspeed_config`, which applies with DeepSpeed only.
pub(crate) const STEPS: &str = "deepspeed-gradient-accumulation-steps";
/// Argument for the list of keys in a file's `deepspeed_config`, in the order of the file.
pub(crate) const FIELDS: &str = "deepspeed-fields-from-accelerate-config";

macro_rules! arguments {
    ($($plugin:ident {$(
        $name:literal $kind:expr $(, default $default:literal)? $(=> $variable:literal $($lower:ident)?)?;
    )*})*) => {
        &[$($(
            PluginArgument {
                name: $name,
                plugin: Plugin::$plugin,
                kind: $kind,
                default: [$(Some($default),)? None][0],
                variable: [$(Some($variable),)? None][0],
                is_lower: arguments!(@is_lower $($($lower)?)?),
            },
        )*)*]
    };
    (@is_lower lower) => { true };
    (@is_lower) => { false };
}

/// Table of all arguments, in the order in which `accelerate launch` sets the variables.
pub const ARGUMENTS: &[PluginArgument] = arguments! {
    Fsdp {
        "use-fsdp" Switch => "ACCELERATE_USE_FSDP";
        "fsdp-version" Choice(&["1", "2"]), default "1" => "FSDP_VERSION";
        "fsdp-sharding-strategy" Text, default "FULL_SHARD" => "FSDP_SHARDING_STRATEGY";
        "fsdp-reshard-after-forward" Text, default "true" => "FSDP_RESHARD_AFTER_FORWARD" lower;
        "fsdp-offload-params" Text, default "false" => "FSDP_OFFLOAD_PARAMS" lower;
        "fsdp-min-num-params" Integer, default "100000000" => "FSDP_MIN_NUM_PARAMS";
        "fsdp-auto-wrap-policy" Text => "FSDP_AUTO_WRAP_POLICY";
        "fsdp-transformer-layer-cls-to-wrap" Text => "FSDP_TRANSFORMER_CLS_TO_WRAP";
        "fsdp-backward-prefetch" Text => "FSDP_BACKWARD_PREFETCH";
        "fsdp-state-dict-type" Text => "FSDP_STATE_DICT_TYPE";
        "fsdp-forward-prefetch" Text, default "false" => "FSDP_FORWARD_PREFETCH" lower;
        "fsdp-use-orig-params" Text, default "true" => "FSDP_USE_ORIG_PARAMS" lower;
        "fsdp-cpu-ram-efficient-loading" Text, default "true" => "FSDP_CPU_RAM_EFFICIENT_LOADING" lower;
        "fsdp-sync-module-states" Text, default "true" => "FSDP_SYNC_MODULE_STATES" lower;
        "fsdp-activation-checkpointing" Text, default "false" => "FSDP_ACTIVATION_CHECKPOINTING" lower;
        "fsdp-activation-checkpointing-offload" Text, default "false"
            => "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD" lower;
        // For files only: Accelerate has no flag for this one, nor for the last two of DeepSpeed.
        "fsdp-ignored-modules" Text => "FSDP_IGNORED_MODULES";
    }
    DeepSpeed {
        "use-deepspeed" Switch => "ACCELERATE_USE_DEEPSPEED";
        "zero-stage" Integer => "ACCELERATE_DEEPSPEED_ZERO_STAGE";
        "gradient-clipping" Float => "ACCELERATE_GRADIENT_CLIPPING" lower;
        "offload-optimizer-device" Text => "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE" lower;
        "offload-param-device" Text => "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE" lower;
        "zero3-init-flag" Text => "ACCELERATE_DEEPSPEED_ZERO3_INIT" lower;
        "zero3-save-16bit-model" Text => "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL" lower;
        "deepspeed-config-file" Text => "ACCELERATE_DEEPSPEED_CONFIG_FILE";
        "deepspeed-moe-layer-cls-names" Text => "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES";
        // Accelerate accepts these two and passes them to no program.
        "offload-optimizer-nvme-path" Text;
        "offload-param-nvme-path" Text;
        "deepspeed-multinode-launcher" Text;
        "deepspeed-gradient-accumulation-steps" Text;
        "deepspeed-fields-from-accelerate-config" Text;
    }
    Megatron {
        "use-megatron-lm" Switch => "ACCELERATE_USE_MEGATRON_LM";
        "megatron-lm-tp-degree" Integer, default "1" => "MEGATRON_LM_TP_DEGREE";
        "megatron-lm-use-custom-fsdp" Bool, default "False" => "MEGATRON_LM_USE_CUSTOM_FSDP";
        "megatron-lm-no-load-optim" Bool, default "False" => "MEGATRON_LM_NO_LOAD_OPTIM";
        "megatron-lm-eod-mask-loss" Bool, default "False" => "MEGATRON_LM_EOD_MASK_LOSS";
        "megatron-lm-no-save-optim" Bool, default "False" => "MEGATRON_LM_NO_SAVE_OPTIM";
        "megatron-lm-optimizer-cpu-offload" Bool, default "False" => "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD";
        "megatron-lm-use-precision-aware-optimizer" Bool, default "False"
            => "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER";
        "megatron-lm-overlap-cpu-optimizer-d2h-h2d" Bool, default "False"
            => "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D";
        "megatron-lm-decoder-last-pipeline-num-layers" Integer
            => "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS";
        "megatron-lm-pp-degree" Integer, default "1" => "MEGATRON_LM_PP_DEGREE";
        "megatron-lm-gradient-clipping" Float, default "1.0" => "MEGATRON_LM_GRADIENT_CLIPPING";
        "megatron-lm-num-micro-batches" Integer => "MEGATRON_LM_NUM_MICRO_BATCHES";
        "megatron-lm-sequence-parallelism" Text => "MEGATRON_LM_SEQUENCE_PARALLELISM";
        "megatron-lm-recompute-activations" Text => "MEGATRON_LM_RECOMPUTE_ACTIVATIONS";
        "megatron-lm-use-distributed-optimizer" Text => "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER";
        "megatron-lm-recompute-granularity" Text => "MEGATRON_LM_RECOMPUTE_GRANULARITY";
        "megatron-lm-recompute-method" Text => "MEGATRON_LM_RECOMPUTE_METHOD";
        "megatron-lm-recompute-num-layers" Integer => "MEGATRON_LM_RECOMPUTE_NUM_LAYERS";
        "megatron-lm-attention-backend" Text => "MEGATRON_LM_ATTENTION_BACKEND";
        "megatron-lm-expert-model-parallel-size" Integer => "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE";
        "megatron-lm-context-parallel-size" Integer => "MEGATRON_LM_CONTEXT_PARALLEL_SIZE";
        "megatron-lm-attention-dropout" Float => "MEGATRON_LM_ATTENTION_DROPOUT";
        "megatron-lm-hidden-dropout" Float => "MEGATRON_LM_HIDDEN_DROPOUT";
        "megatron-lm-attention-softmax-in-fp32" Text => "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32";
        "megatron-lm-expert-tensor-parallel-size" Integer => "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE";
        "megatron-lm-calculate-per-token-loss" Text => "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS";
        "megatron-lm-use-rotary-position-embeddings" Text
            => "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS";
    }
    Parallelism {
        "use-parallelism-config" Switch => "ACCELERATE_USE_PARALLELISM_CONFIG";
        "parallelism-config-dp-replicate-size" Integer, default "1" => "PARALLELISM_CONFIG_DP_REPLICATE_SIZE";
        "parallelism-config-dp-shard-size" Integer, default "1" => "PARALLELISM_CONFIG_DP_SHARD_SIZE";
        "parallelism-config-tp-size" Integer, default "1" => "PARALLELISM_CONFIG_TP_SIZE";
        "parallelism-config-cp-size" Integer, default "1" => "PARALLELISM_CONFIG_CP_SIZE";
        "parallelism-config-cp-backend" Choice(&["torch"]), default "torch" => "PARALLELISM_CONFIG_CP_BACKEND";
        "parallelism-config-sp-size" Integer, default "1" => "PARALLELISM_CONFIG_SP_SIZE";
        "parallelism-config-sp-backend" Choice(&["deepspeed"]), default "deepspeed"
            => "PARALLELISM_CONFIG_SP_BACKEND";
        "parallelism-config-cp-comm-strategy" Text, default "allgather" => "PARALLELISM_CONFIG_CP_COMM_STRATEGY";
        "parallelism-config-sp-seq-length" Text, default "None" => "PARALLELISM_CONFIG_SP_SEQ_LENGTH";
        "parallelism-config-sp-seq-length-is-variable" Bool, default "True"
            => "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE";
        "parallelism-config-sp-attn-implementation" Text, default "sdpa"
            => "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION";
    }
    Fp8 {
        "fp8-backend" Choice(&["ao", "te", "msamp"]) => "ACCELERATE_FP8_BACKEND";
        "fp8-use-autocast-during-eval" Flag, default "False" => "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL";
        "fp8-margin" Integer, default "0" => "ACCELERATE_FP8_MARGIN";
        "fp8-interval" Integer, default "1" => "ACCELERATE_FP8_INTERVAL";
        "fp8-format" Choice(&["HYBRID", "E4M3", "E5M2"]), default "HYBRID" => "ACCELERATE_FP8_FORMAT";
        "fp8-amax-history-len" Integer, default "1024" => "ACCELERATE_FP8_AMAX_HISTORY_LEN";
        "fp8-amax-compute-algo" Choice(&["max", "most_recent"]), default "most_recent"
            => "ACCELERATE_FP8_AMAX_COMPUTE_ALGO";
        "fp8-override-linear-precision" ThreeOnesOrZeros, default "False,False,False"
            => "ACCELERATE_FP8_OVERRIDE";
        "fp8-opt-level" Choice(&["O1", "O2"]), default "O2" => "ACCELERATE_FP8_OPT_LEVEL";
        "fp8-enable-fsdp-float8-all-gather" OneOrZero, default "1"
            => "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER";
        "fp8-pad-inner-dim" OneOrZero, default "1" => "ACCELERATE_FP8_PAD_INNER_DIM";
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pythons() {
        let table = [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e300, "1e+300"),
        ];
        for (number, expected) in table {
            assert_eq!(python_float(number), expected);
        }
    }

    #[test]
    fn names_are_used_once() {
        let mut names: Vec<&str> = ARGUMENTS.iter().map(|it| it.name).collect();
        names.extend(
            crate::settings::TABLE.iter().flat_map(|argument| {
                [argument.name].into_iter().chain(argument.also.iter().copied())
            }),
        );
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }
}
