"""Prints, as JSON, what the installed Accelerate knows of its configuration, and which variables its
launcher sets: `python made.py > 1.15.0.json`, with PyTorch installed."""

import contextlib
import dataclasses
import io
import json
import os
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
]
# What every launcher has its own way with: threads, the folder, a port.
OTHERS = {"KMP_AFFINITY", "KMP_BLOCKTIME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}


def variables(words, config):
    """What `accelerate launch` adds to an empty environment, without starting anything."""
    with tempfile.TemporaryDirectory() as folder:
        if config is not None:
            path = os.path.join(folder, "config.yaml")
            with open(path, "w", encoding="utf-8") as out:
                yaml.safe_dump(config, out)
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
    added = {name: value for name, value in found.items() if os.environ.get(name) != value}
    return {
        name: value.replace(here, "FOLDER")
        for name, value in sorted(added.items())
        if name not in OTHERS
    }


def main():
    warnings.simplefilter("ignore")
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HF_HOME="/nowhere")
    with contextlib.redirect_stderr(io.StringIO()):
        launches = [
            {"arguments": words, "file": config, "variables": variables(words, config)}
            for words, config in LAUNCHES
        ]
    fields = sorted(field.name for field in dataclasses.fields(config_args.ClusterConfig))
    print(
        json.dumps(
            {"accelerate": accelerate.__version__, "fields": fields, "launches": launches}, indent=1
        )
    )


main()
