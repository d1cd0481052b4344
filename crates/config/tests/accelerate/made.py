"""Prints, as JSON, what the installed Accelerate knows of its configuration, and which variables its
launcher sets for command lines, for settings and for the settings files in `files/`:
`python made.py > 1.15.0.json`, with PyTorch installed. Nothing is started."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import tempfile
import warnings

import accelerate
import yaml
from accelerate.commands import launch
from accelerate.commands.config import config_args
from accelerate.utils import launch as prepare

FSDP_2 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block",
    "fsdp_version": 2,
}
ZERO_3 = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "none",
    "offload_param_device": "cpu",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}

FP8 = {
    "amax_compute_algo": "max",
    "amax_history_len": 16,
    "backend": "TE",
    "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_format": "E4M3",
    "fp8_pad_inner_dim": False,
    "interval": 2,
    "margin": 3,
    "override_linear_precision": [False, True, False],
    "use_autocast_during_eval": True,
}
MEGATRON = {
    "megatron_lm_gradient_clipping": 1,
    "megatron_lm_num_micro_batches": 2,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_sequence_parallelism": "false",
    "megatron_lm_tp_degree": 4,
    "megatron_lm_use_distributed_optimizer": None,
}
AXES = {"parallelism_config_dp_shard_size": 2}


def file(kind, **more):
    common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2}
    return {"distributed_type": kind, **common, **more}


# Command lines, and files or none.
LAUNCHES = [
    ("--use_fsdp", None),
    (
        "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward False --fsdp_offload_params TRUE "
        "--fsdp_min_num_params 2000 --fsdp_sharding_strategy HYBRID_SHARD "
        "--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer "
        "--fsdp_backward_prefetch BACKWARD_PRE --fsdp_state_dict_type FULL_STATE_DICT "
        "--fsdp_forward_prefetch true --fsdp_use_orig_params false "
        "--fsdp_cpu_ram_efficient_loading false --fsdp_sync_module_states false "
        "--fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true",
        None,
    ),
    ("--use-fsdp --fsdp-version=2 --mixed-precision fp16 --debug", None),
    ("--use_fsdp --dynamo_backend inductor --dynamo_mode max-autotune --dynamo_use_fullgraph", None),
    ("--use_deepspeed", None),
    (
        "--use_deepspeed --zero_stage 3 --gradient_accumulation_steps 4 --gradient_clipping 1 "
        "--offload_optimizer_device CPU --offload_param_device nvme --offload_param_nvme_path nvme0 "
        "--zero3_init_flag True --zero3_save_16bit_model True --deepspeed_config_file Zero.json "
        "--deepspeed_moe_layer_cls_names MixtralSparseMoeBlock",
        None,
    ),
    ("--use_deepspeed --gradient_clipping 0.00001", None),
    (
        "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 2 "
        "--parallelism_config_dp_shard_size 4",
        None,
    ),
    (
        "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2 "
        "--parallelism_config_cp_comm_strategy alltoall",
        None,
    ),
    (
        "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_sp_size 2 "
        "--parallelism_config_sp_seq_length 128",
        None,
    ),
    ("--multi_gpu", None),
    ("", file("FSDP", fsdp_config=FSDP_2, mixed_precision="bf16")),
    ("--fsdp_offload_params true --mixed_precision no", file("FSDP", fsdp_config=FSDP_2)),
    ("", file("FSDP", fsdp_config={"version": 1, "sharding_strategy": 1, "min_num_params": 5})),
    ("", file("FSDP", fsdp_config={"fsdp_ignored_modules": "head.*"})),
    ("", file("DEEPSPEED", deepspeed_config=ZERO_3, mixed_precision="bf16")),
    ("--mixed_precision fp16 --zero_stage 2", file("DEEPSPEED", deepspeed_config=ZERO_3)),
    ("", file("DEEPSPEED", deepspeed_config={"deepspeed_config_file": "Zero.json"})),
    ("", file("DEEPSPEED")),
    ("--use_fsdp", file("DEEPSPEED", deepspeed_config=ZERO_3)),
    ("--use_deepspeed", file("FSDP", fsdp_config=FSDP_2)),
    ("--use_deepspeed", file("MULTI_GPU", deepspeed_config=ZERO_3)),
    ("--multi_gpu", file("FSDP", fsdp_config=FSDP_2)),
    ("--cpu", file("FSDP", fsdp_config=FSDP_2)),
    ("", file("MULTI_GPU", fsdp_config=FSDP_2)),
    (
        "",
        file(
            "FSDP",
            fsdp_config=FSDP_2,
            parallelism_config={
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 2,
                "parallelism_config_cp_comm_strategy": "allgather",
            },
        ),
    ),
    ("--use_fsdp", file("FSDP", parallelism_config={"parallelism_config_tp_size": 2})),
    ("--mixed_precision fp8", None),
    (
        "--mixed_precision fp8 --fp8_backend te --fp8_margin 2 --fp8_interval 3 --fp8_format E4M3 "
        "--fp8_amax_history_len 16 --fp8_amax_compute_algo max --fp8_opt_level O1 "
        "--fp8_override_linear_precision true,False,yes --fp8_use_autocast_during_eval "
        "--fp8_enable_fsdp_float8_all_gather false --fp8_pad_inner_dim no",
        None,
    ),
    ("--multi_gpu --mixed_precision fp8 --fp8_backend ao", None),
    ("--cpu --mixed_precision fp8 --fp8_backend msamp", None),
    ("--use_fsdp --fsdp_version 2 --mixed_precision fp8 --fp8_backend ao", None),
    ("--use_deepspeed --mixed_precision fp8 --fp8_backend msamp --fp8_opt_level O2", None),
    ("--fp8_margin 3 --fp8_backend te", None),
    ("", file("MULTI_GPU", fp8_config=FP8, mixed_precision="fp8")),
    ("--fp8_margin 4", file("MULTI_GPU", fp8_config=FP8, mixed_precision="fp8")),
    ("--mixed_precision bf16", file("MULTI_GPU", fp8_config=FP8, mixed_precision="fp8")),
    ("--mixed_precision fp8", file("FSDP", fp8_config=FP8, fsdp_config=FSDP_2)),
    ("", file("MULTI_CPU", fp8_config={"backend": "AO"}, mixed_precision="fp8", use_cpu=True)),
    ("", file("DEEPSPEED", deepspeed_config=ZERO_3, fp8_config=FP8, mixed_precision="fp8")),
    ("--use_megatron_lm", None),
    (
        "--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_pp_degree 4 "
        "--megatron_lm_gradient_clipping 0.5 --megatron_lm_num_micro_batches 8 "
        "--megatron_lm_use_custom_fsdp True --megatron_lm_no_load_optim True "
        "--megatron_lm_eod_mask_loss True --megatron_lm_overlap_cpu_optimizer_d2h_h2d True "
        "--megatron_lm_no_save_optim True --megatron_lm_optimizer_cpu_offload True "
        "--megatron_lm_use_precision_aware_optimizer True "
        "--megatron_lm_decoder_last_pipeline_num_layers 3 --megatron_lm_sequence_parallelism true "
        "--megatron_lm_recompute_activations False --megatron_lm_use_distributed_optimizer TRUE "
        "--megatron_lm_recompute_granularity full --megatron_lm_recompute_method uniform "
        "--megatron_lm_recompute_num_layers 2 --megatron_lm_attention_backend true "
        "--megatron_lm_expert_model_parallel_size 2 --megatron_lm_context_parallel_size 2 "
        "--megatron_lm_attention_dropout 0.1 --megatron_lm_hidden_dropout 1e-5 "
        "--megatron_lm_attention_softmax_in_fp32 true --megatron_lm_expert_tensor_parallel_size 1 "
        "--megatron_lm_calculate_per_token_loss true "
        "--megatron_lm_use_rotary_position_embeddings true --mixed_precision bf16",
        None,
    ),
    ("--use_megatron_lm --mixed_precision fp8 --fp8_backend te", None),
    ("--use_megatron_lm --use_fsdp", None),
    ("--use_megatron_lm --use_deepspeed", None),
    ("--use_megatron_lm --multi_gpu", None),
    ("--use_megatron_lm --cpu", None),
    ("--megatron_lm_tp_degree 2", None),
    ("", file("MEGATRON_LM", megatron_lm_config=MEGATRON, mixed_precision="bf16")),
    ("", file("MEGATRON_LM")),
    ("", file("MEGATRON_LM", megatron_lm_config=MEGATRON, parallelism_config=AXES)),
    ("--megatron_lm_tp_degree 8", file("MEGATRON_LM", megatron_lm_config=MEGATRON)),
    ("--use_fsdp", file("MEGATRON_LM", megatron_lm_config=MEGATRON)),
    ("--use_deepspeed", file("MEGATRON_LM", megatron_lm_config=MEGATRON)),
    ("--multi_gpu", file("MEGATRON_LM", megatron_lm_config=MEGATRON)),
    ("--cpu", file("MEGATRON_LM", megatron_lm_config=MEGATRON)),
    ("--use_megatron_lm", file("FSDP", fsdp_config=FSDP_2, megatron_lm_config=MEGATRON)),
    ("", file("MULTI_GPU", megatron_lm_config=MEGATRON)),
    ("", file("MULTI_GPU", parallelism_config=AXES)),
    ("", file("MULTI_CPU", parallelism_config=AXES, use_cpu=True)),
    ("--cpu", file("MULTI_GPU", parallelism_config=AXES)),
    (
        "--mixed_precision bf16 --dynamo_backend inductor --dynamo_mode reduce-overhead "
        "--dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation --debug",
        None,
    ),
    ("--multi_gpu --dynamo_backend aot_eager --debug --mixed_precision fp16", None),
    ("--cpu --mixed_precision bf16", None),
    (
        "",
        file(
            "MULTI_GPU",
            debug=True,
            dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
        ),
    ),
    ("", file("MULTI_CPU", mixed_precision="bf16", use_cpu=True)),
]
# What every launcher has its own way with: threads, the folder, a port.
OTHERS = {"KMP_AFFINITY", "KMP_BLOCKTIME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}


def added(words, path):
    """What `accelerate launch` adds to an empty environment, without starting anything."""
    if path is not None:
        words = f"--config_file {path} {words}"
    args = launch.launch_command_parser().parse_args([*words.split(), "train.py"])
    args, defaults, from_file = launch._validate_launch_command(args)
    if args.use_deepspeed and not args.cpu:
        # As `launch_command` does.
        fields = list(defaults.deepspeed_config.keys()) if defaults else []
        fields += ["mixed_precision"] if from_file else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, found = prepare.prepare_deepspeed_cmd_env(args)
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        found = prepare.prepare_multi_gpu_env(args)
    else:
        _, found = prepare.prepare_simple_launcher_cmd_env(args)
    here = os.path.abspath(".")
    more = {name: value for name, value in found.items() if os.environ.get(name) != value}
    return {
        name: value.replace(here, "FOLDER")
        for name, value in sorted(more.items())
        if name not in OTHERS
    }


def variables(words, config):
    """The same for the keys and values of a file, or for none."""
    if config is None:
        return added(words, None)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(config, out)
        return added(words, path)


def of_file(path):
    """The same for a file of the folder; or that Accelerate does not take it."""
    with open(path, encoding="utf-8") as text:
        words = "" if "num_processes" in yaml.safe_load(text) else "--num_processes 2"
    row = {"file": path.name, "arguments": words}
    try:
        return {**row, "variables": added(words, path)}
    except (AttributeError, ValueError):
        # An unknown key; a job on Amazon SageMaker, which is not started here.
        return {**row, "variables": None}


def main():
    warnings.simplefilter("ignore")
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HF_HOME="/nowhere")
    # Neither is asked for what it does, only whether it is there.
    prepare.is_fp8_available = lambda: True
    prepare._get_mpirun_args = lambda: ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to")
    with contextlib.redirect_stderr(io.StringIO()):
        launches = [
            {"arguments": words, "file": config, "variables": variables(words, config)}
            for words, config in LAUNCHES
        ]
        paths = sorted(pathlib.Path(__file__).parent.glob("files/*.yaml"))
        files = [of_file(path) for path in paths]
    fields = sorted(field.name for field in dataclasses.fields(config_args.ClusterConfig))
    made = {
        "accelerate": accelerate.__version__,
        "fields": fields,
        "launches": launches,
        "files": files,
    }
    print(json.dumps(made, indent=1))


main()
