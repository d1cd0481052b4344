"""Prints, as JSON, what the installed Accelerate and DeepSpeed make of settings for sharded training:
`python made.py > accelerate-1.15.0.json`, with `accelerate==1.15.0`, `torch==2.13.0` and `deepspeed==0.19.8`; without
DeepSpeed its tables are left out. Nothing is trained; DeepSpeed is asked for its configuration only."""

import contextlib
import io
import itertools
import json
import logging
import math
import os
import re
import types
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")
with contextlib.redirect_stdout(io.StringIO()):
    import accelerate
    import torch
    from accelerate import Accelerator
    from accelerate.utils import dataclasses as plugins

    try:
        import deepspeed
        from accelerate.utils import DummyOptim, DummyScheduler
        from deepspeed.runtime import config as ds_config
        from deepspeed.runtime import constants, lr_schedules
        from deepspeed.runtime.activation_checkpointing import config as recompute
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero import config as zero
        from deepspeed.runtime.zero import offload_config
    except ImportError:
        deepspeed = None

logging.disable(logging.CRITICAL)
VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "deepspeed_fields_from_accelerate_config": "ACCELERATE_CONFIG_DS_FIELDS",
}
PREFIXES = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")


def variable(name):
    if name in VARIABLES:
        return VARIABLES[name]
    if name.startswith(("fsdp_", "parallelism_config_")):
        return name.upper()
    return f"ACCELERATE_DEEPSPEED_{name.upper()}"


@contextlib.contextmanager
def environment(given):
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        del os.environ[name]
    os.environ.update({variable(name): value for name, value in given.items()})
    yield


FAULTS = (AssertionError, AttributeError, ImportError, KeyError, TypeError, ValueError)
if deepspeed:
    FAULTS += (ds_config.DeepSpeedConfigError,)


def answer(question):
    """What a function returns, or the beginning of its error."""
    try:
        return {"answer": question()}
    except FAULTS as error:
        words = (str(error).strip() or type(error).__name__).splitlines()
        return {"error": words[0][:120]}


# FSDP

FSDP = [
    {},
    {"fsdp_version": "2"},
    *({"fsdp_sharding_strategy": name} for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")),
    *({"fsdp_sharding_strategy": name} for name in ("HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5", "full_shard", "NONE", "6")),
    *({"fsdp_version": "2", "fsdp_reshard_after_forward": word} for word in ("true", "False", "0", "yes", "FULL_SHARD", "2")),
    {"fsdp_version": "1", "fsdp_reshard_after_forward": "true"},
    {"fsdp_version": "2", "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    {"fsdp_version": "2", "fsdp_offload_params": "true"},
    {"fsdp_offload_params": "true"},
    {"fsdp_offload_params": "maybe"},
    *({"fsdp_version": version, "fsdp_backward_prefetch": word} for version in "12" for word in ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "2", "SOON")),
    *({"fsdp_version": version, "fsdp_state_dict_type": word} for version in "12" for word in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "1", "WHOLE")),
    *({"fsdp_version": version, "fsdp_auto_wrap_policy": word} for version in "12" for word in ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "no_wrap", "SIZE_BASED_WRAP", "BLOCKS")),
    {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "2000"},
    {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "0"},
    {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "many"},
    {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block"},
    {"fsdp_activation_checkpointing": "true"},
    {"fsdp_version": "2", "fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_offload": "true"},
    {"fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_offload": "true"},
    {"fsdp_version": "2", "fsdp_activation_checkpointing_offload": "true"},
    {"fsdp_use_orig_params": "false", "fsdp_sync_module_states": "false", "fsdp_cpu_ram_efficient_loading": "false"},
    {"fsdp_cpu_ram_efficient_loading": "true", "fsdp_sync_module_states": "false"},
    {"fsdp_version": "2", "fsdp_cpu_ram_efficient_loading": "true", "fsdp_use_orig_params": "true"},
    {"fsdp_forward_prefetch": "true"},
    {"fsdp_version": "3"},
]
# Arguments of a Python program, which Accelerate reads from no variable in version 2.
FSDP_OF_PROGRAM = [
    {"fsdp_version": "2", "fsdp_forward_prefetch": "true"},
    {"fsdp_version": "2", "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
]


def dtype(it):
    return None if it is None else str(it).removeprefix("torch.")


def fsdp(given, precision, passed=()):
    def question():
        kwargs = {name.removeprefix("fsdp_"): given[name] == "true" if given[name] == "true" else given[name] for name in passed}
        with environment({name: value for name, value in given.items() if name not in passed}):
            plugin = plugins.FullyShardedDataParallelPlugin(**kwargs)
        if plugin.fsdp_version not in (1, 2):
            raise ValueError("no such version")
        if precision != "no":
            plugin.set_mixed_precision(precision)
        mixed = plugin.mixed_precision_policy
        policy = plugin.auto_wrap_policy
        return {
            "strategy": plugin.sharding_strategy.name if plugin.fsdp_version == 1 else None,
            "reshard": plugin.reshard_after_forward if plugin.fsdp_version == 2 else None,
            "offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy" or getattr(plugin.cpu_offload, "offload_params", False),
            "wrap": policy.__name__ if policy else None,
            "min_num_params": plugin.min_num_params if policy else None,
            "recompute": plugin.activation_checkpointing,
            "param": dtype(mixed and mixed.param_dtype),
            "reduce": dtype(mixed and mixed.reduce_dtype),
            "output": dtype(mixed and (mixed.output_dtype if plugin.fsdp_version == 2 else mixed.param_dtype)),
        }

    return {"given": given, "precision": precision, **answer(question)}


# Axes

AXES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def axes(sizes, world):
    given = {f"parallelism_config_{name}": str(size) for name, size in zip(AXES, sizes) if size is not None}

    def question():
        with environment(given):
            config = accelerate.ParallelismConfig()
        program = types.SimpleNamespace(
            multi_device=world > 1, num_processes=world, is_fsdp2=True, is_main_process=False, distributed_type=None
        )
        config._validate_accelerator(program)
        mesh = config._get_mesh()
        return [[name, size] for name, size in zip(*mesh)] if mesh else []

    return {"given": given, "world": world, **answer(question)}


def all_axes():
    yield from (axes((replicate, shard, 1, 1, 1), world) for replicate, shard, world in itertools.product((1, 2, 3), (None, 1, 2, 4), (1, 2, 4, 8)))
    yield from (axes(sizes, 8) for sizes in ((1, 1, 1, 2, 4), (1, 2, 1, 4, 1), (2, 1, 1, 4, 1), (0, 8, 1, 1, 1), (1, 8, 1, 1, 0)))


# DeepSpeed

HF_ZERO3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FACTS = {
    "world_size": 2,
    "mixed_precision": "no",
    "batch_sizes": [8],
    "split_batches": False,
    "takes_largest_batch": False,
    "gradient_accumulation_steps": 1,
    "hidden_sizes": [768],
    "optimizer": None,
    "schedule": None,
}
DUMMY = {"optimizer": {"lr": 0.005, "weight_decay": 0.1}, "schedule": {"warmup": 100, "total": 1001}}


def stage(number, **more):
    return {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": {"stage": number, **more}}


def batches(train, micro, steps):
    sizes = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return {**{name: size for name, size in sizes.items() if size is not None}, "zero_optimization": {"stage": 2}}


# Configuration (None: of the arguments alone), arguments, facts.
DEEPSPEED = [
    *((HF_ZERO3, {}, {**DUMMY, "mixed_precision": precision}) for precision in ("no", "fp16", "bf16", "fp8")),
    (HF_ZERO3, {}, {**DUMMY, "split_batches": True, "batch_sizes": [16, 64]}),
    (HF_ZERO3, {}, {**DUMMY, "takes_largest_batch": True, "batch_sizes": [16, 64], "world_size": 4}),
    (HF_ZERO3, {}, {**DUMMY, "gradient_accumulation_steps": 3}),
    (HF_ZERO3, {"deepspeed_gradient_accumulation_steps": "5", "gradient_clipping": "0.25"}, DUMMY),
    (HF_ZERO3, {}, {**DUMMY, "hidden_sizes": [96, 192, 384, 777]}),
    (HF_ZERO3, {}, {**DUMMY, "hidden_sizes": []}),
    (HF_ZERO3, {}, {**DUMMY, "batch_sizes": []}),
    (HF_ZERO3, {}, {**DUMMY, "batch_sizes": [8, None]}),
    (HF_ZERO3, {}, {"schedule": {"warmup": 0, "total": None}, "optimizer": {"lr": 0.001, "weight_decay": 0.0}}),
    (HF_ZERO3, {}, {"schedule": {"warmup": 0, "total": 10}, "optimizer": {"lr": 0.001, "weight_decay": 0.0}}),
    (HF_ZERO3, {}, {"optimizer": {"own": 0.1}}),
    (HF_ZERO3, {}, {**DUMMY, "schedule": "own"}),
    *((stage(number), {}, {}) for number in (0, 1, 2, 3)),
    (stage("auto"), {}, {}),
    (stage("auto"), {"zero_stage": "3"}, {}),
    (stage(4), {}, {}),
    (stage(3, offload_param={"device": "auto"}), {"offload_param_device": "cpu"}, {}),
    (stage(2, offload_optimizer={"device": "auto"}), {}, {}),
    (stage(2, allgather_bucket_size="auto"), {}, {}),
    (stage(2), {}, {"optimizer": {"own": 0.1}, "schedule": "own"}),
    (stage(2), {}, {"optimizer": {"lr": 0.1, "weight_decay": 0.0}}),
    (stage(2), {}, {"optimizer": {"own": 0.1}, "schedule": {"warmup": 5, "total": 10}}),
    ({**stage(2), "scheduler": HF_ZERO3["scheduler"]}, {}, {"optimizer": {"own": 0.1}, "schedule": {"warmup": 5, "total": 10}}),
    ({**stage(2), "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}, {}, {"optimizer": {"lr": 0.1, "weight_decay": 0.0}}),
    *(({**stage(1), section: {"enabled": on}}, {}, {"mixed_precision": precision}) for section in ("fp16", "bf16") for on in (True, False) for precision in ("no", "fp16", "bf16")),
    ({**stage(1), "fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, {}),
    ({**stage(1), "gradient_clipping": 0.5}, {}, {}),
    ({**stage(1), "gradient_clipping": 0}, {}, {}),
    *(
        (batches(train, micro, steps), {}, {"world_size": world})
        for train in (None, 32, "auto")
        for micro in (None, 4, "auto")
        for steps in (None, 4, "auto")
        for world in (2, 4)
    ),
    (batches(30, None, None), {}, {"world_size": 4}),
    (batches(32, 0, None), {}, {}),
    ({"train_micro_batch_size_per_gpu": 1}, {}, {}),
    *((stage(2), {"deepspeed_fields_from_accelerate_config": field}, {}) for field in ("zero_stage", "mixed_precision", "deepspeed_config_file")),
    *((None, {"zero_stage": str(number)}, {}) for number in (0, 1, 2, 3)),
    (None, {}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}),
    (None, {"gradient_clipping": "0.5", "deepspeed_gradient_accumulation_steps": "3"}, {}),
    (None, {"gradient_clipping": "0", "zero_stage": "1"}, {}),
    (None, {"zero_stage": "3", "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_save_16bit_model": "true"}, {}),
    *(
        ({**stage(2), key: value}, {}, {})
        for key, value in (
            ("nebula", {"enabled": True}),
            ("compression_training", {"weight_quantization": {}}),
            ("elasticity", {"enabled": True}),
            ("sparse_attention", {"mode": "fixed"}),
            ("communication_data_type", "fp32"),
            ("communication_data_type", "fp8"),
            ("gradient_allreduce_op", "max"),
        )
    ),
    *(
        (stage(3, **{key: value}), {}, {})
        for key, value in (
            ("stage3_max_live_parameters", 1e9),
            ("max_live_parameters", 1e9),
            ("overlap_com", True),
            ("overlap_comm", "perhaps"),
            ("reduce_bucket_size", -1),
            ("reduce_bucket_size", 5e8),
            ("reduce_bucket_size", 0.5),
            ("zero_hpz_partition_size", 2),
            ("cpu_offload", True),
            ("offload_optimizer", {"device": "gpu"}),
            ("offload_optimizer", {"device": "cpu", "pinned": True}),
        )
    ),
]


class Reached(Exception):
    pass


def filled(config, arguments, facts):
    """The configuration that `Accelerator.prepare` hands to `deepspeed.initialize`."""
    with environment(arguments):
        if config is None:
            plugin = plugins.DeepSpeedPlugin(zero3_init_flag=False, is_train_batch_min=not facts["takes_largest_batch"])
        else:
            plugin = plugins.DeepSpeedPlugin(
                hf_ds_config=config, zero3_init_flag=False, is_train_batch_min=not facts["takes_largest_batch"]
            )
    plugin.set_mixed_precision(facts["mixed_precision"])
    accelerator = types.SimpleNamespace(
        fp8_backend=None,
        deepspeed_plugin=plugin,
        parallelism_config=None,
        _prepare_one=lambda it, first_pass: it,
        split_batches=facts["split_batches"],
        num_processes=facts["world_size"],
        gradient_accumulation_steps=facts["gradient_accumulation_steps"],
        device=torch.device("cpu"),
    )
    model = torch.nn.Linear(2, 2)
    if facts["hidden_sizes"]:
        model.config = types.SimpleNamespace(hidden_sizes=facts["hidden_sizes"])
    given = [model, *(torch.utils.data.DataLoader([0] * 64, batch_size=size) for size in facts["batch_sizes"])]
    optimizer = facts["optimizer"]
    if optimizer is not None:
        if "own" in optimizer:
            optimizer = torch.optim.SGD(model.parameters(), lr=optimizer["own"])
        else:
            optimizer = DummyOptim(model.parameters(), **optimizer)
        given.append(optimizer)
    schedule = facts["schedule"]
    if schedule == "own":
        own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else torch.optim.SGD(model.parameters(), lr=1)
        given.append(torch.optim.lr_scheduler.ConstantLR(own))
    elif schedule is not None:
        given.append(DummyScheduler(optimizer, total_num_steps=schedule["total"], warmup_num_steps=schedule["warmup"]))
    found = {}

    def initialize(config_params, **_):
        found.update(config_params)
        raise Reached

    deepspeed.initialize = initialize
    with contextlib.suppress(Reached):
        Accelerator._prepare_deepspeed(accelerator, *given)
    found.pop("steps_per_print")
    return found


def of_deepspeed(config, arguments, more):
    facts = {**FACTS, **more}
    row = {"config": config, "arguments": arguments, "facts": facts}
    filling = answer(lambda: json.loads(json.dumps(filled(config, arguments, facts))))
    if "error" in filling:
        return {**row, **filling}

    def understood():
        ds_config.dist.get_rank = lambda *_: 0
        ds_config.dist.get_world_size = lambda *_: facts["world_size"]
        with contextlib.redirect_stdout(io.StringIO()):
            it = ds_config.DeepSpeedConfig(json.loads(json.dumps(filling["answer"])))
        if it.zero_optimization_stage > 3:
            raise ValueError("no such stage")
        fp16 = it.float16_config
        return {
            "stage": int(it.zero_optimization_stage),
            "train_batch_size": it.train_batch_size,
            "micro_batch_size": it.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": it.gradient_accumulation_steps,
            "gradient_clipping": it.gradient_clipping,
            "fp16": fp16.enabled,
            "bf16": it.bfloat16_config.enabled,
            "initial_scale": fp16.initial_dynamic_scale() if fp16.enabled else None,
            "sums": dtype(it.communication_data_type),
        }

    return {**row, "filled": filling["answer"], **answer(understood)}


def keys():
    """Every key that DeepSpeed's code names."""
    with open(ds_config.__file__, encoding="utf-8") as source:
        text = source.read()
    names = {
        value
        for name, value in vars(constants).items()
        if isinstance(value, str) and name.isupper() and value.islower() and value.isidentifier()
    }
    asked = set(re.findall(r"param_dict(?:,|\.get\(|\[)\s*([A-Z0-9_]+)", text))
    names = {name for name in names if name.upper() in asked}
    names |= set(re.findall(r"""param_dict(?:\.get\(|\[)['"]([a-z0-9_]+)""", text))
    models = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for section, model in models.items():
        names |= {f"{section}.{field.alias or name}" for name, field in model.model_fields.items()}
    names |= {f"activation_checkpointing.{name}" for name in recompute.ACT_CHKPT_DEFAULT}
    names |= set(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    names |= {f"zero_optimization.{name}" for name in ds_config._REMOVED_ZERO_CONFIG_KEYS}
    return sorted(names)


# Schedules

SCHEDULES = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_momentum": False}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 6,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "cycle_momentum": False,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2, "cycle_momentum": False}),
]


def schedule(name, params):
    own = 0.3
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=own)
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    rates = []
    for _ in range(16):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert all(math.isfinite(rate) for rate in rates)
    return {"type": name, "params": params, "lr": own, "rates": rates}


def main():
    kept = {name: os.environ[name] for name in ("PATH", "DS_ACCELERATOR") if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    # Accelerate's logger asks for it.
    accelerate.PartialState(cpu=True)
    # `sync_module_states` asks for a device to make weights on.
    plugins.is_cuda_available = lambda: True
    torch.cuda.current_device = lambda: 0
    precisions = [fsdp({"fsdp_version": version}, word) for version in "12" for word in ("bf16", "fp16", "fp8")]
    of_program = [fsdp(given, "no", [name for name in given if name != "fsdp_version"]) for given in FSDP_OF_PROGRAM]
    made = {
        "accelerate": accelerate.__version__,
        "fsdp": [fsdp(given, "no") for given in FSDP] + precisions + of_program,
        "axes": list(all_axes()),
    }
    if deepspeed:
        made |= {
            "deepspeed": deepspeed.__version__,
            "deepspeed_configs": [of_deepspeed(*case) for case in DEEPSPEED],
            "deepspeed_keys": keys(),
            "schedules": [schedule(*case) for case in SCHEDULES],
        }
    rows = []
    for name, value in made.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
            rows.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            rows.append(f" {json.dumps(name)}: {json.dumps(value)}")
    print("{\n" + ",\n".join(rows) + "\n}")


main()
