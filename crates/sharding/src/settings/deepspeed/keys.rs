//! All keys of DeepSpeed's configuration, with their types and their treatment.

use serde_json::{Map, Value};

use crate::settings::given::closest;
use crate::settings::reader::{AUTO, Reader, as_count, as_number, as_truth, at};
use crate::settings::{Note, SettingsError};

/// Type of a value.
#[derive(Clone, Copy)]
enum Kind {
    Truth,
    Count,
    Number,
    Text,
    Word(&'static [&'static str]),
    /// Any value: it is not checked.
    Any,
    /// An object whose keys have rows of their own.
    Section,
}

/// Treatment of a key.
#[derive(Clone, Copy)]
enum Meaning {
    /// The key becomes a setting.
    Honoured,
    /// The key asks for Brigade's own behaviour if it has this value, written in JSON. For other values a note has the
    /// text, which explains their meaning.
    Same(&'static str, &'static str),
    /// The key has no effect. A note has the text, which explains its meaning.
    Noted(&'static str),
    /// The key would change the training: refused, unless it has this value, or is an object whose `enabled` is false.
    Refused(&'static str, &'static str),
}

use Kind::{Any, Count, Number, Section, Text, Truth, Word};
use Meaning::{Honoured, Noted, Refused, Same};

/// Checks that all keys are known and have values of their types. Returns notes on the keys that are not applied.
/// `written` is the configuration before `auto` was replaced: the user has not chosen these values.
pub(super) fn check(
    reader: Reader<'_>,
    written: &Map<String, Value>,
) -> Result<Vec<Note>, SettingsError> {
    let mut notes = Vec::new();
    check_section(reader, written, reader.root, "", &mut notes)?;
    // Keys of a precision that is off have no effect, and need no note.
    for section in ["fp16", "bf16", "torch_autocast"] {
        if !reader.is_on(&format!("{section}.enabled"))? {
            notes.retain(|note: &Note| !note.key.starts_with(&format!("{section}.")));
        }
    }
    Ok(notes)
}

fn check_section(
    reader: Reader<'_>,
    written: &Map<String, Value>,
    section: &Map<String, Value>,
    prefix: &str,
    notes: &mut Vec<Note>,
) -> Result<(), SettingsError> {
    for (key, value) in section {
        let path = format!("{prefix}{key}");
        let Some((_, kind, meaning)) = KEYS.iter().find(|row| row.0 == path) else {
            return Err(SettingsError::UnknownKey {
                origin: reader.origin.to_owned(),
                key: path.clone(),
                hint: closest(&path, KEYS.iter().map(|row| row.0)),
            });
        };
        if value.is_null() || value == AUTO {
            continue;
        }
        if let Section = kind {
            let Value::Object(inner) = value else {
                return Err(reader.wrong(&path, "an object, { ... }"));
            };
            check_section(reader, written, inner, &format!("{path}."), notes)?;
            continue;
        }
        if let Some(expected) = fault(*kind, value) {
            return Err(reader.wrong(&path, &expected));
        }
        let is_chosen = at(written, &path).is_some_and(|value| value != AUTO);
        match meaning {
            Honoured => {}
            Same(usual, text) if !is_same(value, usual) && is_chosen => {
                notes.push(reader.note(&path, text));
            }
            Same(..) => {}
            Noted(text) if !is_off(value) => notes.push(reader.note(&path, text)),
            Noted(_) => {}
            Refused(off, reason) => {
                if !is_same(value, off) && !is_disabled(value) {
                    return Err(reader.unsupported(&path, reason));
                }
            }
        }
    }
    Ok(())
}

/// Returns a description of the valid values, if a value is not of its type.
fn fault(kind: Kind, value: &Value) -> Option<String> {
    let (is_right, expected) = match kind {
        Truth => (as_truth(value).is_some(), "true or false".to_owned()),
        Count => (as_count(value).is_some(), "a whole number".to_owned()),
        Number => (as_number(value).is_some(), "a number".to_owned()),
        Text => (value.is_string(), "a text".to_owned()),
        Word(words) => {
            let is_word = |text: &str| words.iter().any(|word| word.eq_ignore_ascii_case(text));
            (value.as_str().is_some_and(is_word), format!("one of {}", words.join(", ")))
        }
        Any | Section => return None,
    };
    (!is_right).then_some(expected)
}

/// Returns `true` if a value equals one that is written in JSON, also as another text of the same number or Boolean.
fn is_same(value: &Value, json: &str) -> bool {
    let Ok(usual) = serde_json::from_str::<Value>(json) else { return false };
    match &usual {
        Value::Bool(usual) => as_truth(value) == Some(*usual),
        Value::Number(usual) => as_number(value) == usual.as_f64(),
        Value::String(usual) => value.as_str().is_some_and(|text| text.eq_ignore_ascii_case(usual)),
        usual => value == usual,
    }
}

/// Returns `true` for an object whose `enabled` is false, for `false` itself, and for an empty object.
fn is_disabled(value: &Value) -> bool {
    is_off(value) || *value == false || value.as_object().is_some_and(Map::is_empty)
}

/// Returns `true` for an object whose `enabled` is false.
fn is_off(value: &Value) -> bool {
    value.get("enabled").and_then(as_truth) == Some(false)
}

const DTYPES: Kind = Word(&["fp32", "fp16", "bf16"]);
const TRACKER: &str = "DeepSpeed would log to it; give the program a tracker of Brigade's";
const PRESCALE: &str =
    "gradients would be divided before they are summed; they are divided once, after the sum";
const NO_EFFECT: &str = "another way to the same results; Brigade has one, as fast";
const UNIT: &str = "a size of DeepSpeed's buffers; here a unit is gathered or reduced at once";
const NVME: &str = "it is for offload to NVMe drives, which Brigade does not have";
const QUANTIZED: &str =
    "parameters or gradients would be sent in 8 bits (ZeRO++), with other results; set it to false";
const CHECKPOINT: &str = "it is for DeepSpeed's checkpoints; Brigade writes its own";
const REMOVED: &str =
    "another training, which Brigade does not do (nor does DeepSpeed since 0.19); leave it out";
const RECOMPUTE: &str =
    "it is for models that call `deepspeed.checkpointing`; a Rust model sets what it recomputes";

const KEYS: &[(&str, Kind, Meaning)] = &[
    ("train_batch_size", Count, Honoured),
    ("train_micro_batch_size_per_gpu", Count, Honoured),
    ("gradient_accumulation_steps", Count, Honoured),
    ("gradient_clipping", Number, Honoured),
    (
        "managed_gradient_accumulation",
        Truth,
        Same("true", "the program would decide when a step is due; Brigade counts the batches"),
    ),
    ("prescale_gradients", Truth, Same("false", PRESCALE)),
    ("gradient_predivide_factor", Number, Same("1", PRESCALE)),
    (
        "gradient_allreduce_op",
        Word(&["mean", "sum"]),
        Refused(
            "\"mean\"",
            "gradients would be summed over ranks; they are averaged: write \"mean\", and multiply the loss",
        ),
    ),
    ("communication_data_type", DTYPES, Honoured),
    (
        "seq_parallel_communication_data_type",
        DTYPES,
        Noted("it is for ranks that share a sequence, of which there are none"),
    ),
    (
        "sparse_gradients",
        Truth,
        Same("false", "gradients of embeddings would be sent sparse; they are sent dense"),
    ),
    ("disable_allgather", Truth, Same("false", "it is for tests of DeepSpeed")),
    (
        "steps_per_print",
        Any,
        Noted("DeepSpeed would print at this interval of steps; Accelerate turns that off, too"),
    ),
    ("wall_clock_breakdown", Truth, Same("false", "DeepSpeed would print times; use the Profiler")),
    ("memory_breakdown", Truth, Same("false", "DeepSpeed would print memory; use `memory_report`")),
    ("dump_state", Truth, Same("false", "DeepSpeed would print its state")),
    ("disable_python_gc", Truth, Noted("there is no Python")),
    ("vocabulary_size", Count, Noted("DeepSpeed would warn where it is not a multiple of 8")),
    ("log_level", Text, Noted("it is for DeepSpeed's logger")),
    ("dataloader_drop_last", Truth, Noted("the program sets this with `drop_last` of its loader")),
    (
        "zero_allow_untested_optimizer",
        Truth,
        Same("true", "each of Brigade's optimizers works with each stage"),
    ),
    (
        "zero_force_ds_cpu_optimizer",
        Truth,
        Noted(
            "DeepSpeed would put its own optimizer for CPUs in place of the program's; Brigade keeps the program's",
        ),
    ),
    (
        "use_data_before_expert_parallelism",
        Truth,
        Noted("it is for experts on several ranks, of which there are none"),
    ),
    (
        "sequence_parallel_size",
        Count,
        Refused("1", "sequences would be cut among ranks; set it to 1"),
    ),
    (
        "tensor_parallel",
        Any,
        Refused(
            "{\"autotp_size\": 1}",
            "layers would be cut among ranks (tensor parallelism); leave it out",
        ),
    ),
    ("expert_parallel", Any, Refused("null", "experts would be spread over ranks; leave it out")),
    ("fp16", Section, Honoured),
    ("fp16.enabled", Truth, Honoured),
    ("fp16.auto_cast", Truth, Same("true", "inputs of float32 would not be cast; they are")),
    ("fp16.loss_scale", Number, Honoured),
    ("fp16.initial_scale_power", Count, Honoured),
    ("fp16.loss_scale_window", Count, Honoured),
    (
        "fp16.hysteresis",
        Count,
        Same(
            "1",
            "the scale would be halved after this number of overflows; it is halved after each",
        ),
    ),
    (
        "fp16.consecutive_hysteresis",
        Truth,
        Same("false", "there is no hysteresis: each overflow halves the scale"),
    ),
    (
        "fp16.min_loss_scale",
        Number,
        Noted("training would fail at this scale; Brigade's scale may fall below it"),
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        Truth,
        Same("false", "shards and gradients would be float16; they are float32"),
    ),
    ("bf16", Section, Honoured),
    ("bf16.enabled", Truth, Honoured),
    ("bf16.immediate_grad_update", Truth, Noted(NO_EFFECT)),
    (
        "bf16.check_grad_overflow",
        Truth,
        Noted(
            "steps with gradients that are not finite would be skipped; `check_finite_loss` decides what happens",
        ),
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        Truth,
        Same("false", "shards and gradients would be bfloat16; they are float32"),
    ),
    (
        "bf16.bf16_optimizer_states",
        Truth,
        Same("false", "the optimizer's state would be bfloat16; it is float32"),
    ),
    (
        "bfloat16",
        Any,
        Refused(
            "null",
            "the old name of bf16, which Accelerate overrides by a bf16 that is off; rename it to bf16",
        ),
    ),
    ("torch_autocast", Section, Honoured),
    ("torch_autocast.enabled", Truth, Honoured),
    (
        "torch_autocast.dtype",
        Word(&[
            "float16",
            "fp16",
            "half",
            "torch.float16",
            "bfloat16",
            "bf16",
            "torch.bfloat16",
            "float32",
            "fp32",
            "float",
            "torch.float32",
        ]),
        Honoured,
    ),
    (
        "torch_autocast.lower_precision_safe_modules",
        Any,
        Noted("names classes of a Python model; all units are computed in this precision"),
    ),
    ("data_types", Section, Honoured),
    (
        "data_types.grad_accum_dtype",
        DTYPES,
        Same("\"fp32\"", "gradients would be added up in it; they are in float32"),
    ),
    (
        "data_types.param_dtype",
        DTYPES,
        Noted("parameters would be held in it; fp16.enabled or bf16.enabled sets this"),
    ),
    (
        "data_types.buffer_dtype",
        DTYPES,
        Noted("buffers would be cast to it; they keep the type that the model gave"),
    ),
    ("data_types.keep_in_fp32_modules", Any, Noted("buffers keep the type that the model gave")),
    ("optimizer", Section, Honoured),
    ("optimizer.type", Text, Honoured),
    ("optimizer.params", Any, Honoured),
    ("optimizer.legacy_fusion", Truth, Noted(NO_EFFECT)),
    ("scheduler", Section, Honoured),
    ("scheduler.type", Text, Honoured),
    ("scheduler.params", Any, Honoured),
    ("zero_optimization", Section, Honoured),
    ("zero_optimization.stage", Count, Honoured),
    ("zero_optimization.contiguous_gradients", Truth, Same("true", NO_EFFECT)),
    ("zero_optimization.reduce_scatter", Truth, Same("true", NO_EFFECT)),
    ("zero_optimization.reduce_bucket_size", Count, Noted(UNIT)),
    ("zero_optimization.use_multi_rank_bucket_allreduce", Truth, Noted(NO_EFFECT)),
    ("zero_optimization.allgather_partitions", Truth, Same("true", NO_EFFECT)),
    ("zero_optimization.allgather_bucket_size", Count, Noted(UNIT)),
    (
        "zero_optimization.overlap_comm",
        Truth,
        Same("true", "messages would wait for the computation; they always run beside it"),
    ),
    (
        "zero_optimization.compute_grad_norm",
        Truth,
        Same(
            "true",
            "the gradients' norm would not be computed; it is where gradients are clipped",
        ),
    ),
    (
        "zero_optimization.load_from_fp32_weights",
        Truth,
        Same("true", "weights would be read from their 16-bit copies; checkpoints have float32"),
    ),
    (
        "zero_optimization.elastic_checkpoint",
        Truth,
        Same("true", "each of Brigade's checkpoints loads on any number of ranks"),
    ),
    ("zero_optimization.offload_param", Section, Honoured),
    ("zero_optimization.offload_param.device", Word(&["none", "cpu", "nvme"]), Honoured),
    ("zero_optimization.offload_param.nvme_path", Any, Noted(NVME)),
    ("zero_optimization.offload_param.buffer_count", Count, Noted(NVME)),
    ("zero_optimization.offload_param.buffer_size", Count, Noted(NVME)),
    ("zero_optimization.offload_param.max_in_cpu", Count, Noted(NVME)),
    ("zero_optimization.offload_param.pin_memory", Truth, Honoured),
    ("zero_optimization.offload_optimizer", Section, Honoured),
    ("zero_optimization.offload_optimizer.device", Word(&["none", "cpu", "nvme"]), Honoured),
    ("zero_optimization.offload_optimizer.nvme_path", Any, Noted(NVME)),
    ("zero_optimization.offload_optimizer.buffer_count", Count, Noted(NVME)),
    ("zero_optimization.offload_optimizer.pin_memory", Truth, Honoured),
    ("zero_optimization.offload_optimizer.pipeline", Truth, Noted(NVME)),
    ("zero_optimization.offload_optimizer.pipeline_read", Truth, Noted(NVME)),
    ("zero_optimization.offload_optimizer.pipeline_write", Truth, Noted(NVME)),
    ("zero_optimization.offload_optimizer.fast_init", Truth, Noted(NVME)),
    (
        "zero_optimization.offload_optimizer.ratio",
        Number,
        Same(
            "1",
            "a part of the optimizer's state would stay on the device; all of it is offloaded",
        ),
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        Truth,
        Refused("false", "it is for superchips; set it to false"),
    ),
    (
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        Number,
        Noted("the offloaded optimizer runs on all cores of the rank"),
    ),
    (
        "zero_optimization.zenflow",
        Any,
        Refused("null", "parameters would be updated late; leave it out"),
    ),
    (
        "zero_optimization.sub_group_size",
        Count,
        Noted("the optimizer would work in slices; it works unit by unit"),
    ),
    ("zero_optimization.cpu_offload", Truth, Honoured),
    ("zero_optimization.cpu_offload_param", Truth, Honoured),
    ("zero_optimization.cpu_offload_use_pin_memory", Truth, Honoured),
    ("zero_optimization.cpu_offload_params", Truth, Honoured),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        Count,
        Noted("one unit is gathered ahead of its use"),
    ),
    (
        "zero_optimization.stage3_param_persistence_threshold",
        Count,
        Same("0", "smaller parameters would stay whole on each rank; every parameter is sharded"),
    ),
    (
        "zero_optimization.stage3_model_persistence_threshold",
        Count,
        Noted("at most this number of parameters would stay whole; every parameter is sharded"),
    ),
    ("zero_optimization.stage3_max_live_parameters", Count, Honoured),
    ("zero_optimization.stage3_max_reuse_distance", Count, Honoured),
    (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        Truth,
        Same("true", "`save_model` writes whole weights anyway"),
    ),
    (
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        Truth,
        Same("true", "`save_model` writes whole weights anyway"),
    ),
    (
        "zero_optimization.stage3_module_granularity_threshold",
        Count,
        Same("0", "small modules would be gathered together; units are the model's blocks"),
    ),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", Truth, Same("false", NO_EFFECT)),
    ("zero_optimization.stage3_allgather_sequential", Truth, Same("false", NO_EFFECT)),
    (
        "zero_optimization.ignore_unused_parameters",
        Truth,
        Same("true", "parameters without gradients would be an error; their gradients are zeros"),
    ),
    ("zero_optimization.legacy_stage1", Truth, Same("false", NO_EFFECT)),
    ("zero_optimization.round_robin_gradients", Truth, Same("false", NO_EFFECT)),
    (
        "zero_optimization.parameter_alignment",
        Truth,
        Noted("every parameter is aligned to 64 bytes"),
    ),
    ("zero_optimization.zero_hpz_partition_size", Count, Honoured),
    ("zero_optimization.zero_quantized_weights", Truth, Refused("false", QUANTIZED)),
    ("zero_optimization.zero_quantized_nontrainable_weights", Truth, Refused("false", QUANTIZED)),
    ("zero_optimization.zero_quantized_gradients", Truth, Refused("false", QUANTIZED)),
    (
        "zero_optimization.zeropp_loco_param",
        Any,
        Refused("null", "quantized gradients with error feedback; leave it out"),
    ),
    ("zero_optimization.mics_shard_size", Any, Honoured),
    ("zero_optimization.mics_hierarchical_params_gather", Truth, Same("false", NO_EFFECT)),
    ("zero_optimization.memory_efficient_linear", Truth, Noted(NO_EFFECT)),
    ("zero_optimization.override_module_apply", Truth, Noted("there are no Python modules")),
    ("zero_optimization.pipeline_loading_checkpoint", Truth, Same("false", CHECKPOINT)),
    (
        "zero_optimization.log_trace_cache_warnings",
        Truth,
        Same("false", "there is no trace whose order may change"),
    ),
    (
        "zero_optimization.enable_sanity_checks",
        Truth,
        Same("true", "plans of all ranks are always compared"),
    ),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", Truth, Noted(NVME)),
    (
        "zero_optimization.leaf_module",
        Any,
        Noted("names Python modules that are gathered as one; a Rust model names its units"),
    ),
    ("activation_checkpointing", Section, Honoured),
    (
        "activation_checkpointing.partition_activations",
        Truth,
        Same(
            "false",
            "kept inputs would be cut among ranks that share layers, of which there are none",
        ),
    ),
    (
        "activation_checkpointing.cpu_checkpointing",
        Truth,
        Same("false", "kept inputs would wait in the host's memory; they stay on the device"),
    ),
    ("activation_checkpointing.contiguous_memory_optimization", Truth, Same("false", RECOMPUTE)),
    ("activation_checkpointing.number_checkpoints", Count, Noted(RECOMPUTE)),
    ("activation_checkpointing.synchronize_checkpoint_boundary", Truth, Same("false", RECOMPUTE)),
    (
        "activation_checkpointing.profile",
        Truth,
        Same("false", "DeepSpeed would print times; use the Profiler"),
    ),
    ("checkpoint", Section, Honoured),
    (
        "checkpoint.tag_validation",
        Word(&["warn", "ignore", "fail"]),
        Noted("ranks always agree on a checkpoint's name"),
    ),
    (
        "checkpoint.load_universal",
        Truth,
        Same("true", "each of Brigade's checkpoints loads on any number of ranks"),
    ),
    ("checkpoint.use_node_local_storage", Truth, Same("false", CHECKPOINT)),
    ("checkpoint.parallel_write", Any, Noted(CHECKPOINT)),
    ("checkpoint.checkpoint_serialization", Truth, Noted(CHECKPOINT)),
    ("checkpoint.writer", Any, Noted(CHECKPOINT)),
    ("tensorboard", Any, Noted(TRACKER)),
    ("wandb", Any, Noted(TRACKER)),
    ("comet", Any, Noted(TRACKER)),
    ("csv_monitor", Any, Noted(TRACKER)),
    ("comms_logger", Any, Noted("DeepSpeed would log its messages; use the Profiler")),
    ("flops_profiler", Any, Noted("DeepSpeed would print operations; use the Profiler")),
    ("timers", Any, Noted("it is for DeepSpeed's own timers")),
    ("aio", Any, Noted(NVME)),
    (
        "pipeline",
        Any,
        Noted("it is for DeepSpeed's pipeline engine, which Accelerate does not use"),
    ),
    (
        "compile",
        Any,
        Refused("{\"deepcompile\": false}", "the model would be compiled; leave it out"),
    ),
    (
        "autotuning",
        Any,
        Refused("null", "DeepSpeed would try settings in separate runs; leave it out"),
    ),
    (
        "data_efficiency",
        Any,
        Refused("null", "DeepSpeed would choose samples and tokens; leave it out"),
    ),
    ("curriculum_learning", Any, Refused("null", "DeepSpeed would choose samples; leave it out")),
    (
        "hybrid_engine",
        Any,
        Refused("null", "training would generate texts with kernels of DeepSpeed's; leave it out"),
    ),
    ("weight_quantization", Any, Refused("null", "weights would be quantized; leave it out")),
    ("datastates", Any, Refused("null", "another writer of checkpoints; leave it out")),
    ("msamp", Any, Refused("null", "training in 8 bits; leave it out")),
    (
        "amp",
        Any,
        Refused("null", "Apex would choose precisions; leave it out, and use fp16 or bf16"),
    ),
    (
        "elasticity",
        Any,
        Refused("null", "DeepSpeed would choose batch sizes; use --nnodes MIN:MAX instead"),
    ),
    ("nebula", Any, Refused("null", REMOVED)),
    ("compression_training", Any, Refused("null", REMOVED)),
    ("quantize_training", Any, Refused("null", REMOVED)),
    ("eigenvalue", Any, Refused("null", REMOVED)),
    ("sparse_attention", Any, Refused("null", REMOVED)),
    ("progressive_layer_drop", Any, Refused("null", REMOVED)),
    ("graph_harvesting", Any, Refused("false", REMOVED)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_one_row_in_a_section_of_its_own() {
        for (place, (path, ..)) in KEYS.iter().enumerate() {
            assert!(KEYS[..place].iter().all(|row| row.0 != *path), "{path} is there twice");
            if let Some((section, _)) = path.rsplit_once('.') {
                let row = KEYS.iter().find(|row| row.0 == section);
                assert!(matches!(row, Some((_, Section, _))), "{section} of {path}");
            }
        }
    }

    #[test]
    fn values_that_turn_a_key_off_are_json() {
        for (path, _, meaning) in KEYS {
            if let Same(value, _) | Refused(value, _) = meaning {
                assert!(serde_json::from_str::<Value>(value).is_ok(), "{path}: {value}");
            }
        }
    }
}
