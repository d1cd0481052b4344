//! The arguments of `accelerate launch` that are for its plugins: a table, with what their values are.
//!
//! The table is Accelerate's code (`prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env`,
//! `prepare_extend_env_parallelism_config`, `setup_fp8_env`, version 1.15).

use Kind::{Bool, Choice, Flag, Float, Integer, OneOrZero, Switch, Text, ThreeOnesOrZeros};

use crate::value::Value as _;

/// One argument of `accelerate launch`.
#[derive(Clone, Copy, Debug)]
pub struct PluginArgument {
    /// Its name, with dashes: the flag after two of them, and the key in `[accelerate]`.
    pub name: &'static str,
    /// Which plugin it is for.
    pub plugin: Plugin,
    /// What its value is.
    pub kind: Kind,
    /// Its value where nothing is said; `None`: its variable is not set then.
    pub default: Option<&'static str>,
    /// The variable that it becomes, or how the names of several begin; `None` where it becomes none
    /// by itself.
    pub variable: Option<&'static str>,
    /// Accelerate writes its value in small letters.
    pub(crate) is_lower: bool,
}

/// A way of training for which Accelerate has arguments of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    /// PyTorch's `FullyShardedDataParallel` and `fully_shard`.
    Fsdp,
    /// DeepSpeed.
    DeepSpeed,
    /// Megatron-LM.
    Megatron,
    /// Axes of parallelism besides data: tensors, contexts, sequences.
    Parallelism,
    /// Products in numbers of eight bits.
    Fp8,
}

impl Plugin {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Fsdp, Self::DeepSpeed, Self::Megatron, Self::Parallelism, Self::Fp8];

    /// Its name in prose.
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

    /// The argument that turns it on; `None` for fp8, which is a value of the setting
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

    /// Returns whether its arguments say how a Rust program shards its model, too.
    #[must_use]
    pub fn shards(self) -> bool {
        matches!(self, Self::Fsdp | Self::DeepSpeed | Self::Megatron | Self::Parallelism)
    }

    /// Every argument that turns one of them on.
    pub fn switches() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().filter_map(Self::switch)
    }

    /// The flags that turn it on.
    pub(crate) fn flag(self) -> String {
        let of_fp8 = || "--mixed-precision fp8".to_owned();
        self.switch().map_or_else(of_fp8, |switch| format!("--{switch}"))
    }
}

/// What the value of an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No value: it is there or not, and turns a plugin on.
    Switch,
    /// No value: Python's `True` where it is there.
    Flag,
    /// True or false, of which Accelerate's parser makes 1 and 0.
    OneOrZero,
    /// Three of the same kind, with commas between them.
    ThreeOnesOrZeros,
    /// A whole number.
    Integer,
    /// Any number.
    Float,
    /// One of these words, in small or capital letters: Accelerate's files have both.
    Choice(&'static [&'static str]),
    /// True or false, as Python prints it. Accelerate's own parser takes every text for true here.
    Bool,
    /// Any text.
    Text,
}

impl Kind {
    /// Whether a flag for it stands without a value.
    #[must_use]
    pub fn is_switch(self) -> bool {
        matches!(self, Self::Switch | Self::Flag)
    }

    /// For errors and for help.
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

    /// The value as Python prints it; `None` where it is not [`expected`](Self::expected).
    fn normal(self, text: &str) -> Option<String> {
        match self {
            Self::Switch => bool::parse(text).map(|it| it.to_string()),
            Self::Integer => text.trim().parse::<i64>().ok().map(|it| it.to_string()),
            // DeepSpeed's word for: as the program's own configuration says.
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
    /// The argument of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        ARGUMENTS.iter().find(|it| it.name == name)
    }

    /// The value as it is kept.
    ///
    /// # Errors
    /// What was expected instead.
    pub fn parse(&self, text: &str) -> Result<String, String> {
        self.kind.normal(text).ok_or_else(|| format!("expected {}", self.kind.expected()))
    }

    /// The value of a file of Accelerate's as it is kept. Accelerate does not look at a number there,
    /// DeepSpeed knows the word auto, and its parser of flags does not see true and false.
    pub(crate) fn of_file(&self, text: String) -> String {
        match self.kind {
            Flag | OneOrZero | Float => text,
            // Without brackets it is a list in YAML's eyes, within round ones a text.
            ThreeOnesOrZeros => {
                let items = text.trim_matches(|it: char| "()[] ".contains(it));
                three(items, |it| python_bool(it).to_owned()).unwrap_or(text)
            }
            _ => self.parse(&text).unwrap_or(text),
        }
    }
}

/// Three truths, each written in the same way.
fn three(text: &str, write: impl Fn(bool) -> String) -> Option<String> {
    let items: Vec<bool> =
        text.split(',').map(|it| bool::parse(it.trim())).collect::<Option<_>>()?;
    let words: Vec<String> = items.into_iter().map(write).collect();
    (words.len() == 3).then(|| words.join(","))
}

/// `True` and `False`.
#[must_use]
pub(crate) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// A number as Python prints it: `1.0`, `1e-05`, `1e+16`.
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

/// What a file's `deepspeed_config` says of `gradient_accumulation_steps`: it holds with DeepSpeed only.
pub(crate) const STEPS: &str = "deepspeed-gradient-accumulation-steps";
/// The keys of a file's `deepspeed_config`, in its order.
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

/// Every argument, in the order in which `accelerate launch` sets the variables.
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
        // For files: Accelerate has no flag for it, nor for the two at the end of DeepSpeed's.
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
        // Accelerate takes these two and hands them on to no program.
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
